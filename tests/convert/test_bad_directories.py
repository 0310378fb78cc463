"""Directories that cannot be imported: each raises a clear error and leaves no files behind."""

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


def import_error(source: Path, tmp_path: Path) -> str:
    """Return the error message of a failed import, after checking that it left no files behind."""
    parent = tmp_path / "runs"
    parent.mkdir()
    with pytest.raises(UserError) as error:
        import_run(source, parent / "run")
    assert not list(parent.iterdir())
    return str(error.value)


# ---------------------------------------------------------------- weights
@pytest.mark.parametrize("size", [0, 5, 8, 100, 4000, -1, -1000])
def test_truncated_file(size, copy_sample, tmp_path):
    source = copy_sample("llama")
    content = source.weights.read_bytes()[:size]
    source.weights.write_bytes(content)
    message = import_error(source.path, tmp_path)
    assert message.startswith(f"'{source.weights}' is damaged or truncated ({len(content):,} bytes; ")
    assert message.endswith("fetch it again")


@pytest.mark.parametrize("header", [b"{]", b"[]", b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'])
def test_invalid_header(header, copy_sample, tmp_path):
    source = copy_sample("llama")
    source.weights.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    assert "is damaged or truncated" in import_error(source.path, tmp_path)


def test_shape_differs_from_the_config(copy_sample, tmp_path):
    source = copy_sample("llama")
    source.set(intermediate_size=50)
    message = import_error(source.path, tmp_path)
    assert f"'{source.weights}': tensor 'model.layers.0.mlp.gate_proj.weight' has shape (48, 32), but" in message
    assert "config.json requires (50, 32)" in message
    assert "correct the field" in message


def test_a_missing_tensor(copy_sample, tmp_path):
    source = copy_sample("llama")
    tensors = source.tensors()
    del tensors[FIRST]
    source.put(tensors)
    assert f"'{source.path}': tensor '{FIRST}' of shape (32, 32) is missing" in import_error(source.path, tmp_path)


def test_config_has_fewer_layers_than_the_file(copy_sample, tmp_path):
    source = copy_sample("llama")
    source.set(num_hidden_layers=2)
    message = import_error(source.path, tmp_path)
    assert "tensor 'model.layers.2.input_layernorm.weight' of shape (32,) belongs to no parameter of Llama" in message


def test_an_unknown_tensor(copy_sample, tmp_path):
    source = copy_sample("llama")
    source.put(source.tensors() | {"model.layers.0.adapter.weight": np.zeros((2, 3), np.float32)})
    message = import_error(source.path, tmp_path)
    assert f"'{source.weights}': tensor 'model.layers.0.adapter.weight' of shape (2, 3) belongs to no" in message


@pytest.mark.parametrize(("stored", "itemsize"), [("I64", 8), ("F8_E4M3", 1), ("F64", 8)])
def test_unsupported_dtype(stored, itemsize, copy_sample, tmp_path):
    """The file is written by hand, because NumPy has no F8_E4M3."""
    source = copy_sample("llama")
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
    message = import_error(source.path, tmp_path)
    assert f"'{source.weights}': tensor '{FIRST}' has dtype {stored}, which is not supported" in message
    assert "save the model with one of the dtypes F32, F16, BF16" in message


def test_only_pickles(copy_sample, tmp_path):
    source = copy_sample("llama")
    source.weights.rename(source.path / "pytorch_model.bin")
    message = import_error(source.path, tmp_path)
    assert "has no model.safetensors, only 'pytorch_model.bin'" in message
    assert "pickles can run code when they are read" in message
    assert "save_pretrained" in message


def test_no_weights(copy_sample, tmp_path):
    source = copy_sample("llama")
    source.weights.unlink()
    assert "has no weights: it holds neither model.safetensors nor model.safetensors.index.json" in import_error(
        source.path, tmp_path
    )


def test_tied_copies_that_differ(copy_sample, tmp_path):
    source = copy_sample("smollm2")
    source.put(source.tensors() | {"lm_head.weight": np.zeros((96, 32), np.float32)})
    message = import_error(source.path, tmp_path)
    assert "tensor 'lm_head.weight' differs from 'model.embed_tokens.weight', but config.json ties them" in message
    assert "set tie_word_embeddings to false" in message


def test_tied_copies_that_do_not_differ(copy_sample, sample_run):
    source = copy_sample("smollm2")
    source.put(source.tensors() | {"lm_head.weight": source.tensors()["model.embed_tokens.weight"]})
    params = load(source.path).params
    np.testing.assert_array_equal(params["embedding"]["tokens"], sample_run("smollm2").params["embedding"]["tokens"])


def test_different_encoder_embeddings_cannot_be_untied(copy_sample, tmp_path):
    source = copy_sample("t5")
    source.put(source.tensors() | {"encoder.embed_tokens.weight": np.zeros((96, 32), np.float32)})
    message = import_error(source.path, tmp_path)
    assert "tensor 'encoder.embed_tokens.weight' differs from 'shared.weight'" in message
    assert "tie_word_embeddings" not in message


# ---------------------------------------------------------------- the index
def test_index_names_a_missing_file(copy_sample, tmp_path):
    source = copy_sample("llama")
    source.shard(3)
    (source.path / "model-00002-of-00003.safetensors").unlink()
    message = import_error(source.path, tmp_path)
    assert "model.safetensors.index.json' names 'model-00002-of-00003.safetensors', which is missing" in message


def test_index_names_the_wrong_file_for_a_tensor(copy_sample, tmp_path):
    source = copy_sample("llama")
    weight_map = source.shard()
    file = weight_map[FIRST]
    source.index(weight_map | {FIRST: next(other for other in weight_map.values() if other != file)})
    assert f"says that tensor '{FIRST}' is in '" in import_error(source.path, tmp_path)


def test_a_tensor_in_two_files(copy_sample, tmp_path):
    source = copy_sample("llama")
    weight_map = source.shard()
    single = type(source)(source.path)
    single.weights = source.path / "model-00001-of-00002.safetensors"
    single.put(
        single.tensors() | {n: np.zeros(1, np.float32) for n, f in weight_map.items() if f.startswith("model-00002")}
    )
    message = import_error(source.path, tmp_path)
    assert "00001-of-00002.safetensors' and again in '" in message


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_invalid_index(content, copy_sample, tmp_path):
    source = copy_sample("llama")
    source.shard()
    (source.path / "model.safetensors.index.json").write_text(content)
    assert "is not a valid index of safetensors files" in import_error(source.path, tmp_path)


def test_index_points_outside_the_directory(copy_sample, tmp_path):
    """Only weight files inside the directory are read."""
    source = copy_sample("llama")
    source.weights.rename(tmp_path / "model.safetensors")
    source.index({FIRST: "../../model.safetensors"})
    assert "'../../model.safetensors', which is not in the directory" in import_error(source.path, tmp_path)


# ---------------------------------------------------------------- config.json
def test_no_config(copy_sample, tmp_path):
    source = copy_sample("llama")
    (source.path / "config.json").unlink()
    message = import_error(source.path, tmp_path)
    assert message == f"'{source.path}' has no config.json: name a directory that save_pretrained wrote"


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "is not valid JSON"), (b"\xff", "is not valid JSON"), (b"[1]", "JSON object")]
)
def test_config_is_not_a_json_object(content, message, copy_sample, tmp_path):
    source = copy_sample("llama")
    (source.path / "config.json").write_bytes(content)
    assert message in import_error(source.path, tmp_path)
    with pytest.raises(UserError, match=message):
        load(source.path)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama", {"logit_scale": 0.5}, "unknown fields, which may change the model's output: logit_scale = 0.5"),
        ("llama", {"rope_interleaved": True},
         "rope_interleaved = True is not supported: it changes the model's output; supported: False"),
        ("llama", {"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu' is not supported; supported: relu, gelu"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type = 'longrope' is not supported; supp"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope parameter 'factor' is missing with rope_type 'l"),
        ("llama", {"rope_parameters": {"rope_type": "default", "mscale": 2}}, "unknown rope parameters for rope_type"),
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
        ("llama", {"model_type": "falcon"}, "model_type = 'falcon' is not supported; supported: gpt2, llama, mistral"),
        ("llama", {"model_type": ...}, "model_type = None is not supported; supported: gpt2"),
        ("llama", {"model_type": ["llama"]}, "model_type = ['llama'] is not supported"),
        ("llama", {"architectures": ["LlamaForQuestionAnswering"]}, "'LlamaForQuestionAnswering' of llama is not"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM'"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("gpt2", {"n_head": 5}, "the fields do not form a valid model: embed_dim=32 is not a multiple of num_heads=5"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True is not supported"),
        ("qwen2.5", {"use_mrope": True}, "use_mrope = True is not supported"),
        ("qwen3-moe", {"mlp_only_layers": [0]}, "mlp_only_layers = [0] is not supported"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj = 'gated-mish' is not supported"),
        ("bart", {"normalize_before": True}, "normalize_before = True is not supported"),
        ("marian", {"decoder_vocab_size": 95}, "decoder_vocab_size = 95 is not supported"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key' is not"),
        ("bert", {"is_decoder": True}, "is_decoder = True is not supported"),
        ("roberta", {"pad_token_id": None}, "field 'pad_token_id' is missing"),
        ("modernbert", {"local_attention": 7}, "local_attention = 7 is odd"),
        ("modernbert classes", {"classifier_pooling": "max"}, "classifier_pooling = 'max' is not supported"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)  # fmt: skip
def test_unsupported_config(name, fields, message, copy_sample, tmp_path):
    source = copy_sample(name)
    source.set(**fields)
    error = import_error(source.path, tmp_path)
    assert message in error
    assert str(source.path / "config.json") in error


def test_quantized_model(copy_sample, tmp_path):
    source = copy_sample("llama")
    source.set(quantization_config={"quant_method": "gptq", "bits": 4})
    message = import_error(source.path, tmp_path)
    assert "quantized weights (gptq) are not supported: use the unquantized model" in message


# ---------------------------------------------------------------- the rest of the directory
def test_a_tokenizer_with_more_ids_than_the_model(copy_sample, tmp_path):
    source = copy_sample("llama")
    vocabulary = {f"t{i}": i for i in range(97)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.save(str(source.path / "tokenizer.json"))
    special = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t0", "tokenizer_class": "PreTrainedTokenizerFast"}
    (source.path / "tokenizer_config.json").write_text(json.dumps(special))
    message = import_error(source.path, tmp_path)
    assert f"'{source.path / 'config.json'}': vocab_size=96 is less than the tokenizer's 97 ids" in message


def test_a_source_that_is_a_file(sample_dir, tmp_path):
    assert "is a file: name the directory that holds it" in import_error(sample_dir("llama") / "config.json", tmp_path)


def test_a_source_that_is_a_run(sample_dir, tmp_path):
    import_run(sample_dir("smollm2"), tmp_path / "first")
    assert "model_type = None is not supported" in import_error(tmp_path / "first", tmp_path)


# ---------------------------------------------------------------- the target
@pytest.fixture(scope="module")
def run_dir(sample_dir, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "smollm2"
    import_run(sample_dir("smollm2"), path)
    return path


@pytest.fixture(params=["import", "export"])
def convert(request, sample_dir, run_dir):
    return {
        "import": lambda target: import_run(sample_dir("smollm2"), target),
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
    with pytest.raises(UserError, match=r"target' exists and is not a directory: choose another name"):
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


def test_missing_parents_of_the_target_are_created(convert, tmp_path):
    convert(tmp_path / "not" / "there" / "yet")
    assert (tmp_path / "not" / "there" / "yet" / "config.json").is_file()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), RuntimeError("bug")])
@pytest.mark.parametrize("stage", ["weights", "end"])
def test_interruption_leaves_no_files(error, stage, convert, tmp_path, monkeypatch):
    """Ctrl-C, a full disk or a bug, either while weights are written or just before the last file."""

    def stop(*args, **options):
        assert list(tmp_path.rglob(".run.*")), "the temporary directory exists by now"
        raise error

    if stage == "weights":
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
