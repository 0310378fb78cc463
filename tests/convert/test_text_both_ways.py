"""Imported, exported and trained models generate the same text in jaxformer and in transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxformer.checkpoint import Checkpoints
from jaxformer.cli import main
from jaxformer.config import (
    Constant,
    DataConfig,
    MemorySource,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SentencePieceTokenizer,
    SpecialIds,
    TrainConfig,
)
from jaxformer.convert import SAMPLES
from jaxformer.convert.sample import VOCAB
from jaxformer.data.tokenizer import Bytes, Tokenizer, find_tokenizer, train_sentencepiece
from jaxformer.decode.api import generate
from jaxformer.errors import UserError
from jaxformer.exchange import ORIGIN, export_run, import_run
from jaxformer.layers import abstract_params
from jaxformer.models.llama import llama
from jaxformer.models.qwen import qwen2
from jaxformer.models.rnn import rnn
from jaxformer.models.t5 import t5
from jaxformer.models.vaswani import vaswani
from jaxformer.run import load
from jaxformer.rundir import RunDir
from jaxformer.train.loop import train

PROMPTS = ["the quick brown fox", "a lazy dog sleeps", "jumps"]
TEXT = ["the quick brown fox jumps over the lazy dog while a small cat sleeps on the warm roof of my old house"] * 5
NEW = 12


def _make(directory: Path, name: str, special: list[str], single: list[str], **roles: str) -> None:
    """Write a sample with a tokenizer that has as many ids as the model has embeddings."""
    SAMPLES[name].save(directory)
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special))
    marks = [(token, backend.token_to_id(token)) for token in single if token != "$A"]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=marks)
    assert backend.get_vocab_size() == VOCAB
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", **roles)
    fast.save_pretrained(directory)


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("theirs") / "llama"
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    _make(path, "llama", special, ["<s>", "$A"], bos_token="<s>", eos_token="</s>")
    return path


@pytest.fixture(scope="module")
def t5_dir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("theirs") / "t5"
    _make(path, "t5v1.1", ["<pad>", "</s>", "<unk>"], ["$A", "</s>"], eos_token="</s>")
    return path


def their_ids(directory: Path) -> list[list[int]]:
    """Return the new token ids that transformers generates for each prompt, without batching."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    config = transformers.AutoConfig.from_pretrained(directory)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(directory)
    rows = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        # The KV cache of transformers is sized by T5's encoder layers instead of its decoder layers, so it is off.
        ids = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, use_cache=not config.is_encoder_decoder)[0]
        rows.append(ids[1 if config.is_encoder_decoder else inputs["input_ids"].shape[1] :].tolist())
    return rows


def their_texts(directory: Path) -> list[str]:
    """Return the text that the new tokens add to each prompt, including a leading space."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    translates = transformers.AutoConfig.from_pretrained(directory).is_encoder_decoder
    texts = []
    for prompt, row in zip(PROMPTS, their_ids(directory), strict=True):
        before = [] if translates else tokenizer(prompt)["input_ids"]
        known, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (before, [*before, *row]))
        texts.append(whole[len(known) :])
    return texts


@pytest.fixture
def jaxformer(capsys, monkeypatch) -> Callable[..., str]:
    """Runs the command line in this process, to share compiled programs, and returns what it prints."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object, fails: bool = False) -> str:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert (code != 0) == fails, out + err
        return err if fails else out

    return run


# ---------------------------------------------------------------- imported models
def test_import_generate_export_on_the_command_line(llama_dir, tmp_path, jaxformer):
    run, out = tmp_path / "run", tmp_path / "out"
    size = sum(leaf.size for leaf in jax.tree.leaves(load(llama_dir).params))
    assert jaxformer("import", llama_dir, run) == f"llama with {size:,} parameters imported into {run}\n"
    assert jaxformer("export", run, out, "--dtype", "float32") == f"step 0 exported as llama in float32 to {out}\n"
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    output = jaxformer("generate", run, *prompts, "--max-new-tokens", NEW)
    wanted = their_texts(llama_dir)
    assert len(set(wanted)) == len(wanted)
    assert all(wanted)
    assert output == "\n".join(wanted) + "\n"
    assert their_texts(out) == wanted
    assert generate(load(out), PROMPTS, NEW) == wanted
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        assert (out / name).read_bytes() == (llama_dir / name).read_bytes()


def test_import_and_export_keep_the_chat_template(llama_dir, tmp_path, jaxformer):
    """The reply and the ids of the conversation are those of transformers."""
    source = shutil.copytree(llama_dir, tmp_path / "source")
    template = "{{ bos_token }}{% for m in messages %}{{ m.role + ' ' + m.content + eos_token }}{% endfor %} the"
    (source / "chat_template.jinja").write_text(template)
    generation = {"max_new_tokens": NEW, "repetition_penalty": 1.4, "eos_token_id": 2}
    (source / "generation_config.json").write_text(json.dumps(generation))
    jaxformer("import", source, tmp_path / "run")
    jaxformer("export", tmp_path / "run", tmp_path / "out")
    messages = [{"role": "user", "content": PROMPTS[0]}]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    row = model.generate(**inputs, do_sample=False)[0].tolist()
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (inputs["input_ids"][0], row))
    assert whole != before
    for path in (source, tmp_path / "run", tmp_path / "out"):
        assert jaxformer("generate", path, "--chat", "--prompt", PROMPTS[0]) == whole[len(before) :] + "\n"


def test_command_line_error_is_one_line(llama_dir, tmp_path, jaxformer):
    message = jaxformer("export", llama_dir, tmp_path / "out", "--model-type", "bert", fails=True)
    assert message == "error: the Hugging Face format 'bert' cannot hold this model: the format is not decoder-only\n"
    assert not list(tmp_path.iterdir())


def test_encoder_decoder_generates_the_same_text(t5_dir, tmp_path):
    import_run(t5_dir, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    wanted = their_texts(t5_dir)
    assert len(set(wanted)) > 1
    assert all(wanted)
    assert their_texts(tmp_path / "out") == wanted
    for path in (t5_dir, tmp_path / "run", tmp_path / "out"):
        assert generate(load(path), PROMPTS, NEW) == wanted


def test_hugging_face_directory_can_be_exported_without_import(llama_dir, tmp_path):
    export_run(llama_dir, tmp_path / "out", dtype="bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


# ---------------------------------------------------------------- trained models
@pytest.mark.slow
def test_trained_run_generates_the_same_text_in_transformers(tmp_path):
    words = TEXT[0].split()
    documents = tuple(" ".join(words[i % 9 :] + words[: i % 9]) for i in range(40))
    run, out = tmp_path / "run", tmp_path / "out"
    config = RunConfig(
        workdir=str(run),
        model=llama(
            num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48, vocab_size=300, context_length=64
        ),
        data=DataConfig(
            train=MemorySource(documents=documents), tokenizer=SentencePieceTokenizer(), length=32, batch_size=8
        ),
        optim=OptimConfig(learning_rate=1e-2, schedule=Constant()),
        train=TrainConfig(steps=20),
    )  # fmt: skip
    train(config)
    assert export_run(run, out) == f"step 20 exported as llama in float32 to {out}"
    wanted = generate(load(run), PROMPTS, NEW)
    assert all(wanted)
    assert their_texts(out) == wanted
    assert generate(load(out), PROMPTS, NEW) == wanted


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_sentencepiece(TEXT, 290, SentencePieceTokenizer())


def make_run(directory: Path, model: ModelConfig, tokenizer: Tokenizer | None) -> Path:
    """Write a run directory like training does, with random parameters from NumPy, which needs no compilation."""
    config = RunConfig(model=model, workdir=str(directory))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: 0.5 * rng.standard_normal(x.shape, np.float32), abstract_params(model)[0])
    with Checkpoints(RunDir(directory), config) as checkpoints:
        checkpoints.save(5, {"params": params}, config, {"step": 5})
    if tokenizer is not None:
        tokenizer.save(directory)
    RunDir(directory).write_config(config)
    return directory


def test_exported_encoder_decoder_starts_with_bos(tokenizer, tmp_path):
    """The model has no special ids, so its decoder starts with the tokenizer's bos; a published T5 starts with pad."""
    shape = {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "head_dim": 8, "mlp_dim": 48, "vocab_size": 290}
    model = t5(**shape, special=SpecialIds())
    run = make_run(tmp_path / "run", model, tokenizer)
    export_run(run, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["decoder_start_token_id"] == tokenizer.bos_id
    # Compare ids, not texts: random weights generate invalid UTF-8, which the two libraries decode differently.
    sources = [[*tokenizer.encode(prompt), tokenizer.eos_id] for prompt in PROMPTS]
    wanted = generate(load(run), sources, NEW)
    assert len({tuple(row) for row in wanted}) > 1
    assert [[id for id in row if id != tokenizer.eos_id] for row in their_ids(tmp_path / "out")] == wanted


SMALL = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 16, "vocab_size": 290}
SPELLINGS = ["", " ", "  two  spaces ", "a\nb\n\n\tc\r\n", "naïve e\u0301 漢字 👩‍👩‍👧", "<s></s><pad>"]


def test_the_tokenizer_of_an_exported_directory(tokenizer, tmp_path):
    run = make_run(tmp_path / "run", llama(**SMALL, context_length=16), tokenizer)
    assert "\n" not in export_run(run, tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    ids = [fields[f"{role}_token_id"] for role in ("bos", "eos", "pad")]
    assert ids == [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    ours, theirs = find_tokenizer(tmp_path / "out"), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    wanted = tokenizer.encode_prompt(SPELLINGS)
    assert ours.encode_prompt(SPELLINGS) == theirs(SPELLINGS)["input_ids"] == wanted
    assert [ours.decode(ids) for ids in wanted] == SPELLINGS
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == (run / "tokenizer.model").read_bytes()


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
def test_qwen_export_warns_about_the_tokenizer_class(kind, tokenizer, tmp_path):
    ours = {"sentencepiece": tokenizer, "bytes": Bytes()}[kind]
    out, again = tmp_path / "out", tmp_path / "again"
    first, warning = export_run(make_run(tmp_path / "run", qwen2(**SMALL, context_length=16), ours), out).splitlines()
    assert first == f"step 5 exported as qwen2 in float32 to {out}"
    assert warning == (
        "AutoTokenizer uses Qwen2Tokenizer for qwen2 models, which gives different ids: "
        "load the tokenizer with PreTrainedTokenizerFast.from_pretrained"
    )
    wanted = ours.encode_prompt(SPELLINGS)
    assert transformers.AutoTokenizer.from_pretrained(out)(SPELLINGS)["input_ids"] != wanted
    assert transformers.PreTrainedTokenizerFast.from_pretrained(out)(SPELLINGS)["input_ids"] == wanted
    # The tokenizer of a Hugging Face directory is assumed to match its model, so there is no warning.
    assert export_run(out, again) == f"step 0 exported as qwen2 in float32 to {again}"


def test_qwen_export_without_a_tokenizer_has_no_warning(tmp_path):
    run = make_run(tmp_path / "run", qwen2(**SMALL, context_length=16), None)
    assert "\n" not in export_run(run, tmp_path / "out")


def test_export_without_a_tokenizer(tmp_path):
    model = llama(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=1, mlp_dim=16, vocab_size=40, context_length=16)
    run = make_run(tmp_path / "run", model, None)
    export_run(run, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    again = load(tmp_path / "out")
    assert again.config.model == model
    jax.tree.map(np.testing.assert_array_equal, again.params, load(run).params)


def test_imported_run_records_its_origin(llama_dir, tmp_path):
    import_run(llama_dir, tmp_path / "run")
    origin = json.loads((tmp_path / "run" / ORIGIN).read_text())
    assert origin == {"model_type": "llama", "dtype": "float32", "other_dtypes": {}}
    assert load(tmp_path / "run").step == 0
    assert load(tmp_path / "run").config.workdir == str(tmp_path / "run")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (rnn(cell="lstm", num_layers=1, embed_dim=8, dim=8, vocab_size=300), "llama: it has no recurrent layers"),
        (
            vaswani(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16, vocab_size=300),
            "marian: its embedding.position.layout would be 'halves', not 'interleaved'",
        ),
    ],
    ids=["recurrent", "vaswani"],
)
def test_models_that_cannot_be_exported(model, message, tokenizer, tmp_path):
    run = make_run(tmp_path / "run", model, tokenizer)
    with pytest.raises(UserError, match="no Hugging Face format can hold this model") as error:
        export_run(run, tmp_path / "out")
    assert message in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
