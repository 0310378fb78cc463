"""Contract tests of the formats: they run for all registered formats, samples and presets."""

import json
import re
from collections import Counter

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

from jaxformer.convert import FORMATS, SAMPLES
from jaxformer.convert.directory import HuggingFaceDirectory
from jaxformer.convert.export import export_model, find_format
from jaxformer.convert.fields import Fields
from jaxformer.convert.format import ModelFiles
from jaxformer.convert.tables import bindings, flat_shapes
from jaxformer.data.tokenizer import Bytes, huggingface_files
from jaxformer.errors import UserError
from jaxformer.layers import abstract_params
from jaxformer.models import FAMILIES, PRESETS, preset

F32 = np.dtype("float32")
# Families without a format, because transformers has no such model.
NO_FORMAT = {"vaswani", "rnn"}


def test_every_format_has_a_sample():
    assert {sample.model_type for sample in SAMPLES.values()} == set(FORMATS)


def test_every_family_has_a_format_or_is_known_to_have_none():
    presets = {sample.preset for sample in SAMPLES.values()}
    assert {name for name, family in FAMILIES.items() if presets & _names(family)} == set(FAMILIES) - NO_FORMAT


def _names(family) -> set[str]:
    return {name for row in family.ZOO_ROWS for name in row.presets}


def _bind(format, model, architecture):
    shapes = flat_shapes(abstract_params(model)[0])
    return bindings(format.table(model), model, shapes, format.base_of(architecture)), shapes


def _check_covered(bound, shapes) -> None:
    """Check that every element of every parameter is stored in exactly one tensor."""
    parts = [part for binding in bound for part in binding.parts]
    assert {part.path for part in parts} == set(shapes)
    counts = {path: np.zeros(shapes[path][: len(index)], int) for path, index in parts}
    for path, index in parts:
        counts[path][index] += 1
    assert all((count == 1).all() for count in counts.values())
    assert max(Counter(binding.name for binding in bound).values()) == 1
    assert sum(np.prod(b.shape, dtype=int) for b in bound) == sum(np.prod(s, dtype=int) for s in shapes.values())


# ---------------------------------------------------------------- samples
@pytest.mark.parametrize("name", SAMPLES)
def test_table_covers_every_parameter_and_tensor_once(name, sample_dir):
    files = HuggingFaceDirectory(sample_dir(name))
    bound, shapes = _bind(files.format, files.model, SAMPLES[name].architecture)
    _check_covered(bound, shapes)
    stored = load_file(sample_dir(name) / "model.safetensors")
    assert {binding.name: binding.shape for binding in bound} == {key: t.shape for key, t in stored.items()}


@pytest.mark.parametrize("name", SAMPLES)
def test_import_then_export_is_byte_identical(name, sample_dir, sample_run, tmp_path):
    format = export_model(
        tmp_path, sample_run(name).config.model, sample_run(name).params, F32, model_type=SAMPLES[name].model_type
    )
    assert format is FORMATS[SAMPLES[name].model_type]
    assert (tmp_path / "model.safetensors").read_bytes() == (sample_dir(name) / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", SAMPLES)
def test_transformers_loads_exported_models(name, sample_dir, sample_run, tmp_path):
    export_model(
        tmp_path, sample_run(name).config.model, sample_run(name).params, F32, model_type=SAMPLES[name].model_type
    )
    kind = getattr(transformers, SAMPLES[name].architecture)
    theirs, report = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    wanted = kind.from_pretrained(sample_dir(name)).state_dict()
    again = theirs.state_dict()
    assert again.keys() == wanted.keys()
    for key in wanted:
        np.testing.assert_array_equal(again[key].numpy(), wanted[key].numpy(), err_msg=key)


# Fields that may differ without changing the model: explicit defaults, synonyms, and sizes of layers that do not exist.
EQUIVALENT_FIELDS = {"n_inner", "head_dim", "max_window_layers", "intermediate_size", "activation_function"}


@pytest.mark.parametrize("name", SAMPLES)
def test_exported_config_equals_the_original(name, sample_dir, sample_run):
    _, fields = find_format(sample_run(name).config.model, SAMPLES[name].model_type)
    kind = getattr(transformers, SAMPLES[name].config)
    again, wanted = (kind.from_dict(values).to_dict() for values in (fields, _json(sample_dir(name) / "config.json")))
    names = set(again) | set(wanted)
    different = {key for key in names if again.get(key) != wanted.get(key)}
    assert different <= EQUIVALENT_FIELDS | {"dtype", "transformers_version", "_name_or_path"}


@pytest.mark.parametrize("model_type", FORMATS)
def test_autotokenizer_class_of_exported_tokenizers(model_type, tmp_path):
    tokenizer, format = Bytes(), FORMATS[model_type]
    text = "e\u0301"  # two characters, which Qwen2Tokenizer normalises to one
    for name, content in huggingface_files(tokenizer, format.shape).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(theirs).__name__ == (format.tokenizer_class or transformers.PreTrainedTokenizerFast.__name__)
    same = theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert same == (format.tokenizer_class is None)


# ---------------------------------------------------------------- presets
ROWS = [row for family, module in FAMILIES.items() if family not in NO_FORMAT for row in module.ZOO_ROWS]
EXPORTABLE = [name for row in ROWS for name in row.presets]
# One preset per row: the others differ only in their sizes.
FAST = {next(iter(row.presets)) for row in ROWS}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in EXPORTABLE]
)
def test_every_preset_round_trips_through_its_format(name):
    model = preset(name)
    format, fields = find_format(model)
    bound, shapes = _bind(format, model, fields["architectures"][0])
    _check_covered(bound, shapes)
    rest = {key: value for key, value in json.loads(json.dumps(fields)).items() if key != "model_type"}
    again = Fields(rest, "written")
    files = ModelFiles(fields["architectures"][0], frozenset(binding.name for binding in bound))
    assert _with_kv_heads(format.read(again, files)) == _with_kv_heads(model)
    again.finish()
    assert transformers.AutoConfig.for_model(**fields).model_type == format.model_type


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in EXPORTABLE])
def test_error_of_presets_without_a_format_names_the_field(name):
    with pytest.raises(UserError, match="no Hugging Face format can hold this model") as error:
        find_format(preset(name))
    reasons = dict(line.strip().split(": ", 1) for line in str(error.value).splitlines()[1:])
    assert set(reasons) == {f.model_type for f in FORMATS.values() if f.shape == preset(name).shape}
    if preset(name).shape == "decoder-only":
        assert set(reasons.values()) == {"it has no recurrent layers"}
    else:
        assert reasons["bart"] == "its embedding.position.kind would be 'learned', not 'sinusoidal'"
        assert reasons["marian"] == "its embedding.position.layout would be 'halves', not 'interleaved'"


def test_sinusoids_of_another_toolkit_cannot_be_exported_as_marian():
    model = preset("marian-opus-en-de")
    position = model.embedding.position.model_copy(update={"endpoint": True})
    model = model.model_copy(update={"embedding": model.embedding.model_copy(update={"position": position})})
    with pytest.raises(UserError, match=r"marian: its embedding\.position\.endpoint would be False, not True"):
        find_format(model, "marian")


def test_the_padding_id_of_marian_must_be_in_both_vocabularies():
    model = preset("marian-opus-en-de").replace(source_vocab_size=58_101)
    assert find_format(model)[0].model_type == "marian"
    with pytest.raises(UserError, match=r"marian: .*special\.pad=58100 >= 58100"):
        find_format(model.replace(source_vocab_size=58_100))


def test_only_marian_has_two_vocabularies():
    with pytest.raises(UserError, match=r"bart: .*it has no tensor for parameter embedding/source_tokens"):
        find_format(preset("bart-base").replace(source_vocab_size=50_265))


def test_find_format_by_model_type():
    assert find_format(preset("smollm2-135m"), "llama")[0].model_type == "llama"
    with pytest.raises(UserError, match=r"unknown Hugging Face format 'lama'; supported: gpt2, llama, "):
        find_format(preset("smollm2-135m"), "lama")
    with pytest.raises(UserError, match=r"format 'bert' cannot hold this model: the format is not decoder-only"):
        find_format(preset("smollm2-135m"), "bert")
    with pytest.raises(UserError, match=r"qwen2: its decoder\.pattern\.0\.attention\.bias would be True, not False"):
        find_format(preset("smollm2-135m"), "qwen2")


def _with_kv_heads(model):
    """Replace the default of `num_kv_heads`, null, by the number of heads."""
    text = model.model_dump_json()
    return re.sub(r'"num_heads":(\d+),"num_kv_heads":null', r'"num_heads":\1,"num_kv_heads":\1', text)


def _json(path):
    return json.loads(path.read_text())
