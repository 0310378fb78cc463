"""Directories that cannot be imported: one clear message each, and nothing left behind."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from jaxformer import exchange
from jaxformer.convert import export, weights
from jaxformer.errors import UserError
from jaxformer.exchange import export_run, import_run
from jaxformer.run import load

FIRST = "model.layers.0.self_attn.q_proj.weight"


def refused(source: Path, tmp_path: Path) -> str:
    """The message; the target's parent must be as it was."""
    parent = tmp_path / "runs"
    parent.mkdir()
    with pytest.raises(UserError) as error:
        import_run(source, parent / "run")
    assert not list(parent.iterdir())
    return str(error.value)


# ---------------------------------------------------------------- weights
@pytest.mark.parametrize("size", [0, 5, 8, 100, 4000, -1, -1000])
def test_a_file_cut_short(size, copied, tmp_path):
    source = copied("llama")
    content = source.weights.read_bytes()[:size]
    source.weights.write_bytes(content)
    message = refused(source.path, tmp_path)
    assert message.startswith(f"'{source.weights}' is damaged or cut short ({len(content):,} bytes; ")
    assert message.endswith("fetch it again")


@pytest.mark.parametrize("header", [b"{]", b"[]", b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'])
def test_a_header_that_makes_no_sense(header, copied, tmp_path):
    source = copied("llama")
    source.weights.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    assert "is damaged or cut short" in refused(source.path, tmp_path)


def test_a_shape_that_disagrees_with_the_config(copied, tmp_path):
    source = copied("llama")
    source.set(intermediate_size=50)
    message = refused(source.path, tmp_path)
    assert f"'{source.weights}': tensor 'model.layers.0.mlp.gate_proj.weight' has shape (48, 32), but by" in message
    assert "it must have (50, 32)" in message
    assert "correct the field" in message


def test_a_missing_tensor(copied, tmp_path):
    source = copied("llama")
    tensors = source.tensors()
    del tensors[FIRST]
    source.put(tensors)
    assert f"'{source.path}': tensor '{FIRST}' of shape (32, 32) is missing" in refused(source.path, tmp_path)


def test_fewer_layers_than_the_file_has(copied, tmp_path):
    source = copied("llama")
    source.set(num_hidden_layers=2)
    message = refused(source.path, tmp_path)
    assert "tensor 'model.layers.2.input_layernorm.weight' of shape (32,) belongs to no parameter of Llama" in message


def test_an_unknown_tensor(copied, tmp_path):
    source = copied("llama")
    source.put(source.tensors() | {"model.layers.0.adapter.weight": np.zeros((2, 3), np.float32)})
    message = refused(source.path, tmp_path)
    assert f"'{source.weights}': tensor 'model.layers.0.adapter.weight' of shape (2, 3) belongs to no" in message


@pytest.mark.parametrize(("stored", "itemsize"), [("I64", 8), ("F8_E4M3", 1), ("F64", 8)])
def test_a_dtype_we_do_not_read(stored, itemsize, copied, tmp_path):
    """Written by hand: not every library can."""
    source = copied("llama")
    tensors = source.tensors()
    rows, content = {}, b""
    for name, tensor in tensors.items():
        data = tensor.tobytes() if name != FIRST else bytes(tensor.size * itemsize)
        offsets = [len(content), len(content) + len(data)]
        rows[name] = {
            "dtype": stored if name == FIRST else "F32", "shape": list(tensor.shape), "data_offsets": offsets,
        }  # fmt: skip
        content += data
    header = json.dumps(rows).encode()
    source.weights.write_bytes(struct.pack("<Q", len(header)) + header + content)
    message = refused(source.path, tmp_path)
    assert f"'{source.weights}': tensor '{FIRST}' has dtype {stored}, which is not supported" in message
    assert "save the model in one of F32, F16, BF16" in message


def test_only_pickles(copied, tmp_path):
    source = copied("llama")
    source.weights.rename(source.path / "pytorch_model.bin")
    message = refused(source.path, tmp_path)
    assert "has no model.safetensors, only 'pytorch_model.bin'" in message
    assert "pickles can run code when they are read" in message
    assert "save_pretrained" in message


def test_no_weights(copied, tmp_path):
    source = copied("llama")
    source.weights.unlink()
    assert "has no weights: neither model.safetensors nor model.safetensors.index.json" in refused(
        source.path, tmp_path
    )


def test_tied_copies_that_differ(copied, tmp_path):
    source = copied("smollm2")
    source.put(source.tensors() | {"lm_head.weight": np.zeros((96, 32), np.float32)})
    message = refused(source.path, tmp_path)
    assert "tensor 'lm_head.weight' differs from 'model.embed_tokens.weight', but by config.json they are" in message
    assert "set tie_word_embeddings to false" in message


def test_tied_copies_that_do_not_differ(copied, loaded):
    source = copied("smollm2")
    source.put(source.tensors() | {"lm_head.weight": source.tensors()["model.embed_tokens.weight"]})
    params = load(source.path).params
    np.testing.assert_array_equal(params["embedding"]["tokens"], loaded("smollm2").params["embedding"]["tokens"])


def test_two_tables_of_tokens_have_no_remedy(copied, tmp_path):
    source = copied("t5")
    source.put(source.tensors() | {"encoder.embed_tokens.weight": np.zeros((96, 32), np.float32)})
    message = refused(source.path, tmp_path)
    assert "tensor 'encoder.embed_tokens.weight' differs from 'shared.weight'" in message
    assert "tie_word_embeddings" not in message


# ---------------------------------------------------------------- the index
def test_an_index_of_a_file_that_is_not_there(copied, tmp_path):
    source = copied("llama")
    source.shard(3)
    (source.path / "model-00002-of-00003.safetensors").unlink()
    message = refused(source.path, tmp_path)
    assert "model.safetensors.index.json' names 'model-00002-of-00003.safetensors', which is not there" in message


def test_an_index_of_a_tensor_that_is_not_there(copied, tmp_path):
    source = copied("llama")
    listed = source.shard()
    file = listed[FIRST]
    source.index(listed | {FIRST: next(other for other in listed.values() if other != file)})
    assert f"says that tensor '{FIRST}' is in '" in refused(source.path, tmp_path)


def test_a_tensor_in_two_files(copied, tmp_path):
    source = copied("llama")
    listed = source.shard()
    single = type(source)(source.path)
    single.weights = source.path / "model-00001-of-00002.safetensors"
    single.put(
        single.tensors() | {n: np.zeros(1, np.float32) for n, f in listed.items() if f.startswith("model-00002")}
    )
    message = refused(source.path, tmp_path)
    assert "00001-of-00002.safetensors' and again in '" in message


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_an_index_that_makes_no_sense(content, copied, tmp_path):
    source = copied("llama")
    source.shard()
    (source.path / "model.safetensors.index.json").write_text(content)
    assert "is not an index of tensors" in refused(source.path, tmp_path)


def test_an_index_that_points_elsewhere(copied, tmp_path):
    """Weights are those of the directory and of no other."""
    source = copied("llama")
    source.weights.rename(tmp_path / "model.safetensors")
    source.index({FIRST: "../../model.safetensors"})
    assert "'../../model.safetensors', which is not in the directory" in refused(source.path, tmp_path)


# ---------------------------------------------------------------- config.json
def test_no_config(copied, tmp_path):
    source = copied("llama")
    (source.path / "config.json").unlink()
    message = refused(source.path, tmp_path)
    assert message == f"'{source.path}' has no config.json: name a directory that save_pretrained wrote"


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "is not valid JSON"), (b"\xff", "is not valid JSON"), (b"[1]", "JSON object")]
)
def test_a_config_that_is_no_json(content, message, copied, tmp_path):
    source = copied("llama")
    (source.path / "config.json").write_bytes(content)
    assert message in refused(source.path, tmp_path)
    with pytest.raises(UserError, match=message):
        load(source.path)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama", {"logit_scale": 0.5}, "not understood, and may change the maths: logit_scale = 0.5"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved = True is not supported, only False"),
        ("llama", {"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu' is not supported; there are: relu, gelu"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type = 'longrope' is not supported; there"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope parameter 'factor' is missing with rope_type 'l"),
        ("llama", {"rope_parameters": {"rope_type": "default", "mscale": 2}}, "not understood with rope_type 'd"),
        ("llama", {"rope_parameters": 3}, "rope_parameters = 3"),
        ("llama", {"hidden_size": ...}, "field 'hidden_size' is missing"),
        ("llama", {"hidden_size": None}, "field 'hidden_size' is missing"),
        ("llama", {"hidden_size": "large"}, "hidden_size = 'large'"),
        ("llama", {"num_hidden_layers": -1}, "num_hidden_layers = -1 must be a number above 0"),
        ("llama", {"attention_bias": "no"}, "attention_bias = 'no' must be true or false"),
        ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6' must be a number"),
        ("llama", {"rms_norm_eps": -1.0}, "eps = -1.0"),
        ("llama", {"num_attention_heads": 1e-400}, "num_attention_heads = 0.0 must be a number above 0"),
        ("llama", {"num_key_value_heads": 3}, "num_kv_heads"),
        ("llama", {"model_type": "falcon"}, "model_type = 'falcon' is not supported; there are: gpt2, llama, mistral"),
        ("llama", {"model_type": ...}, "model_type = None is not supported; there are: gpt2"),
        ("llama", {"model_type": ["llama"]}, "model_type = ['llama'] is not supported"),
        ("llama", {"architectures": ["LlamaForTokenClassification"]}, "'LlamaForTokenClassification' of llama is not"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM'"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True is not supported"),
        ("qwen2.5", {"use_mrope": True}, "use_mrope = True is not supported"),
        ("qwen3-moe", {"mlp_only_layers": [0]}, "mlp_only_layers = [0] is not supported"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj = 'gated-mish' is not supported"),
        ("bart", {"normalize_before": True}, "normalize_before = True is not supported"),
        ("marian", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings = False is not"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key' is not"),
        ("bert", {"is_decoder": True}, "is_decoder = True is not supported"),
        ("roberta", {"pad_token_id": None}, "field 'pad_token_id' is missing"),
        ("modernbert", {"local_attention": 7}, "local_attention = 7 is odd"),
        ("modernbert classes", {"classifier_pooling": "max"}, "classifier_pooling = 'max' is not supported"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_config_we_cannot_hold(name, fields, message, copied, tmp_path):
    source = copied(name)
    source.set(**fields)
    given = refused(source.path, tmp_path)
    assert message in given
    assert str(source.path / "config.json") in given


def test_a_quantized_model_is_told_what_to_do(copied, tmp_path):
    source = copied("llama")
    source.set(quantization_config={"quant_method": "gptq", "bits": 4})
    message = refused(source.path, tmp_path)
    assert "quantized weights (gptq) are not supported: use the model they were made from" in message


# ---------------------------------------------------------------- the rest of the directory
def test_a_tokenizer_with_more_ids_than_the_model(copied, tmp_path):
    source = copied("llama")
    vocabulary = {f"t{i}": i for i in range(97)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.save(str(source.path / "tokenizer.json"))
    special = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t0", "tokenizer_class": "PreTrainedTokenizerFast"}
    (source.path / "tokenizer_config.json").write_text(json.dumps(special))
    message = refused(source.path, tmp_path)
    assert f"'{source.path / 'config.json'}': vocab_size=96 is less than the tokenizer's 97 ids" in message


def test_a_source_that_is_a_file(saved, tmp_path):
    assert "is a file: name the directory that holds it" in refused(saved("llama") / "config.json", tmp_path)


def test_a_source_that_is_a_run(saved, tmp_path):
    import_run(saved("smollm2"), tmp_path / "first")
    assert "model_type = None is not supported" in refused(tmp_path / "first", tmp_path)


# ---------------------------------------------------------------- the target
@pytest.fixture(scope="module")
def run_dir(saved, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "smollm2"
    import_run(saved("smollm2"), path)
    return path


@pytest.fixture(params=["import", "export"])
def convert(request, saved, run_dir):
    return {
        "import": lambda target: import_run(saved("smollm2"), target),
        "export": lambda target: export_run(run_dir, target),
    }[request.param]


def test_a_target_that_is_not_empty(convert, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("kept")
    with pytest.raises(UserError, match=r"target' exists and is not empty: choose another name"):
        convert(tmp_path / "target")
    assert (tmp_path / "target" / "mine").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_target_that_is_a_file(convert, tmp_path):
    (tmp_path / "target").write_text("kept")
    with pytest.raises(UserError, match=r"target' exists and is no directory: choose another name"):
        convert(tmp_path / "target")
    assert (tmp_path / "target").read_text() == "kept"


def test_a_target_that_cannot_be_written(convert, tmp_path):
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file" / "target", Path("/proc/nothing/target")):
        with pytest.raises(UserError, match=r"target' cannot be written \("):
            convert(target)


def test_an_empty_target_is_used(convert, tmp_path):
    (tmp_path / "target").mkdir()
    convert(tmp_path / "target")
    assert (tmp_path / "target" / "config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_target_far_down(convert, tmp_path):
    convert(tmp_path / "not" / "there" / "yet")
    assert (tmp_path / "not" / "there" / "yet" / "config.json").is_file()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), RuntimeError("bug")])
@pytest.mark.parametrize("place", ["weights", "end"])
def test_a_stop_in_the_middle_leaves_nothing(error, place, convert, tmp_path, monkeypatch):
    """Ctrl-C, a full disk or a bug: while tensors are read or written, or when all but the last file is there."""

    def stop(*args, **options):
        assert list(tmp_path.rglob(".run.*")), "a temporary directory stands there by now"
        raise error

    if place == "weights":
        monkeypatch.setattr(exchange.Checkpoints, "save", stop)
        monkeypatch.setattr(weights, "_to_stored", stop)
    else:
        monkeypatch.setattr(exchange.RunDir, "write_config", stop)
        write = export.write_weights
        monkeypatch.setattr(export, "write_weights", lambda *args: write(*args) or stop())
    with pytest.raises(UserError if isinstance(error, OSError) else BaseException) as raised:
        convert(tmp_path / "deep" / "run")
    if isinstance(error, OSError):
        assert "run' cannot be written (No space left on device)" in str(raised.value)
    assert not list(tmp_path.iterdir())
