"""Python config files and `config.json`: round trips, no code execution, error messages."""

import json
import pickle
import sys

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from jaxformer.config import (
    Cosine,
    DataConfig,
    EvaluateConfig,
    InverseSqrt,
    JsonlSource,
    Linear,
    MemorySource,
    MeshConfig,
    OptimConfig,
    RunConfig,
    Seq2Seq,
    TrainConfig,
    WarmupStableDecay,
    apply_overrides,
    load_run_file,
)
from jaxformer.errors import UserError
from jaxformer.models import PRESETS, preset
from jaxformer.rundir import RunDir

RUN_FILE = """
from jaxformer.config import ByteTokenizer, DataConfig, MemorySource, RunConfig
from jaxformer.models.gpt2 import gpt2

def config():
    model = gpt2(num_layers=1, embed_dim=4, num_heads={heads}, vocab_size=300, context_length=8)
    data = DataConfig(train=MemorySource(documents=("abc",)), tokenizer=ByteTokenizer(), length={length})
    return {result}
"""
GOOD = {"heads": 1, "length": 8, "result": "RunConfig(model=model, data=data)"}


# ---------------------------------------------------------------- Python config files
def test_default_workdir_is_named_after_the_file(tmp_path):
    config = load_run_file(_write_run_file(tmp_path / "small_run.py", **GOOD))
    assert config.data.length == 8
    assert config.workdir == "runs/small_run"


def test_overrides_apply_and_may_set_the_workdir(tmp_path):
    config = load_run_file(_write_run_file(tmp_path / "small_run.py", **GOOD), ["data.length=4", "workdir=elsewhere"])
    assert (config.data.length, config.workdir) == (4, "elsewhere")


def test_a_workdir_set_in_the_file_is_kept(tmp_path):
    result = "RunConfig(model=model, data=data, workdir='mine')"
    assert load_run_file(_write_run_file(tmp_path / "small_run.py", **GOOD | {"result": result})).workdir == "mine"


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"absent\.py' does not exist: name a Python file"):
        load_run_file(tmp_path / "absent.py")


def test_a_directory_is_not_a_run_file(tmp_path):
    with pytest.raises(UserError, match="does not exist: name a Python file"):
        load_run_file(tmp_path)


def test_a_file_without_config(tmp_path):
    path = tmp_path / "empty.py"
    path.write_text("steps = 3\n")
    with pytest.raises(UserError, match=r"empty\.py' has no function config\(\)"):
        load_run_file(path)


def test_a_file_that_does_not_return_a_run_config(tmp_path):
    path = _write_run_file(tmp_path / "small_run.py", **GOOD | {"result": "model"})
    with pytest.raises(UserError, match=r"small_run\.py'.* returned ModelConfig, expected RunConfig"):
        load_run_file(path)


def test_an_invalid_value_names_the_file_the_field_and_the_value(tmp_path):
    path = _write_run_file(tmp_path / "small_run.py", **GOOD | {"length": -5})
    with pytest.raises(UserError, match=r"small_run\.py: length = -5: .*greater than 0"):
        load_run_file(path)


def test_an_error_of_a_builder_names_the_file(tmp_path):
    path = _write_run_file(tmp_path / "small_run.py", **GOOD | {"heads": 3})
    with pytest.raises(UserError, match=r"small_run\.py: embed_dim=4 is not a multiple of num_heads=3"):
        load_run_file(path)


def test_a_failed_check_of_several_fields_names_the_file(tmp_path):
    path = _write_run_file(tmp_path / "small_run.py", **GOOD | {"length": 9})
    with pytest.raises(UserError, match=r"small_run\.py: data\.length=9 is longer than .*max_length=8"):
        load_run_file(path)


def test_an_exception_in_the_file_keeps_its_traceback(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("def config():\n    return 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_run_file(path)


def test_a_config_file_imports_another_of_its_directory(tmp_path):
    """A file of the same name in another directory is not mistaken for it."""
    for name, length in (("a", 8), ("b", 4)):
        directory = tmp_path / name
        directory.mkdir()
        _write_run_file(directory / "neighbour.py", **GOOD | {"length": length})
        (directory / "derived.py").write_text(
            "from neighbour import config as base\n\ndef config():\n    return base().replace(seed=7)\n"
        )
        config = load_run_file(directory / "derived.py")
        assert (config.seed, config.data.length, config.workdir) == (7, length, "runs/derived")
    assert "neighbour" not in sys.modules


def test_a_derived_config_is_validated(run):
    with pytest.raises(ValidationError, match=r"data\.length=99 is longer"):
        run.replace(data=run.data.replace(length=99))


# ---------------------------------------------------------------- config.json
def test_a_config_of_a_newer_version_is_refused(tmp_path, run):
    RunDir(tmp_path).write_config(run)
    tree = json.loads((tmp_path / "config.json").read_text())
    assert tree["version"] == 1
    (tmp_path / "config.json").write_text(json.dumps(tree | {"version": 2}))
    with pytest.raises(UserError, match=r"config\.json: version = 2, .* up to 1: install a newer jaxformer"):
        RunDir(tmp_path).read_config()


def test_evaluate_exact_match_of_earlier_versions(tmp_path):
    """Python configs may still use the earlier field."""
    metrics = EvaluateConfig(exact_match=5).metrics
    assert [(m.kind, m.every) for m in metrics] == [("perplexity", None), ("exact_match", "end")]
    assert metrics[1].num_examples == 5
    assert EvaluateConfig(exact_match=0).metrics == EvaluateConfig().metrics


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_survives_json(tmp_path, name):
    _round_trip(_run_config(preset(name)), tmp_path)


def test_configs_without_a_decoder_kind_are_transformers(tmp_path, run):
    RunDir(tmp_path).write_config(run)
    tree = json.loads((tmp_path / "config.json").read_text())
    del tree["model"]["decoder"]["kind"]
    (tmp_path / "config.json").write_text(json.dumps(tree))
    assert RunDir(tmp_path).read_config() == run


def test_writing_leaves_no_temporary_file(tmp_path, run):
    RunDir(tmp_path).write_config(run)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@given(data=st.data())
def test_any_values_survive_json(run, data):
    changed = RunConfig.model_validate(dict(run) | {name: data.draw(field) for name, field in FIELDS.items()})
    assert RunConfig.model_validate_json(changed.model_dump_json()) == changed
    assert apply_overrides(changed, []) == changed
    assert hash(RunConfig.model_validate_json(changed.model_dump_json())) == hash(changed)


def test_not_a_run_directory(tmp_path):
    with pytest.raises(UserError, match=r"is not a run directory: it has no config\.json"):
        RunDir(tmp_path).read_config()


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe{}", pickle.dumps({"seed": 1})])
def test_invalid_json(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json: not valid JSON \("):
        RunDir(tmp_path).read_config()


def test_a_saved_config_is_validated(tmp_path, run):
    tree = run.model_dump(mode="json")
    tree["train"]["steps"] = "many"
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"config\.json: train\.steps = 'many': .*integer"):
        RunDir(tmp_path).read_config()


def test_an_unknown_field_is_rejected(tmp_path, run):
    (tmp_path / "config.json").write_text(json.dumps(run.model_dump(mode="json") | {"novelty": 1}))
    with pytest.raises(UserError, match=r"config\.json: novelty = 1: "):
        RunDir(tmp_path).read_config()


def test_loading_json_executes_nothing(tmp_path, run):
    text = "__import__('os').abort()"
    RunDir(tmp_path).write_config(apply_overrides(run, [f"workdir={text}"]))
    for name in ("config.py", "__init__.py", "conftest.py"):
        (tmp_path / name).write_text("raise AssertionError('executed')\n")
    RunDir(tmp_path).read_config()  # imports that happen on first use are not part of this test
    AUDIT.append([])
    config = RunDir(tmp_path).read_config()
    assert config.workdir == text
    assert AUDIT.pop() == []


# ---------------------------------------------------------------- immutability
def test_configs_are_frozen(run):
    with pytest.raises(ValidationError, match="frozen"):
        run.seed = 1
    with pytest.raises(ValidationError, match="frozen"):
        run.model.decoder.num_layers = 1


def test_configs_are_hashable_by_value(run, pair_run):
    """Needed because model configs are static arguments of jitted functions."""
    copy = RunConfig.model_validate_json(run.model_dump_json())
    assert copy is not run
    assert hash(copy) == hash(run)
    assert len({run.model, copy.model, pair_run.model}) == 2


# ---------------------------------------------------------------- builders
POSITIVE = st.integers(1, 10**9)
REAL = st.floats(min_value=0.0, exclude_min=True, allow_infinity=False)
UNIT = st.floats(0.0, 1.0)
TEXTS = st.lists(st.text(), min_size=1, max_size=3).map(tuple)
FIELDS = {
    "workdir": st.text(),
    "seed": st.integers(0, 2**64),
    "data": st.builds(
        DataConfig,
        train=st.builds(MemorySource, documents=TEXTS) | st.builds(JsonlSource, paths=TEXTS, text=st.text()),
        heldout=st.none() | st.builds(MemorySource, pairs=st.lists(st.tuples(st.text(), st.text()), min_size=1)),
        length=st.integers(1, 32),
        batch_size=POSITIVE,
        pack=st.booleans(),
    ),
    "optim": st.builds(
        OptimConfig,
        learning_rate=REAL,
        schedule=st.builds(Linear, final=UNIT)
        | st.builds(Cosine, final=UNIT)
        | st.builds(InverseSqrt, warmup_steps=POSITIVE)
        | st.builds(WarmupStableDecay, decay_steps=st.just(1), final=UNIT),
        clip_norm=st.none() | REAL,
    ),
    "train": st.builds(TrainConfig, steps=POSITIVE, unroll=st.just("all") | POSITIVE, peak_flops=st.none() | REAL),
    "mesh": st.builds(MeshConfig, data=POSITIVE, fsdp=st.just(-1) | POSITIVE),
    "evaluate": st.builds(EvaluateConfig, every=st.none() | POSITIVE, prompts=TEXTS),
}

AUDIT: list[list[str]] = []


def _audit(event: str, args: tuple) -> None:
    if AUDIT and event in ("exec", "compile", "import", "pickle.find_class", "subprocess.Popen", "os.system"):
        AUDIT[-1].append(f"{event} {args}")


sys.addaudithook(_audit)  # cannot be removed, so it only records while a test has added a list to AUDIT


def _run_config(model) -> RunConfig:
    if model.shape == "encoder-only":
        return RunConfig(model=model)
    data = {"train": MemorySource(documents=("a",)), "length": 8}
    if model.shape == "encoder-decoder":
        data = {"train": MemorySource(pairs=(("a", "b"),)), "length": 8, "objective": Seq2Seq(input_length=8)}
    return RunConfig(model=model, data=DataConfig(**data))


def _round_trip(config: RunConfig, directory) -> None:
    RunDir(directory).write_config(config)
    assert RunDir(directory).read_config() == config


def _write_run_file(path, **fields):
    path.write_text(RUN_FILE.format(**fields))
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("these are words", "is not valid Python (line 1: "),
        ("import no_such_module_at_all", "cannot be imported (No module named 'no_such_module_at_all')"),
        ("config = 4", "config() returned int, expected RunConfig"),
    ],
)
def test_a_file_that_is_no_config_is_one_line(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_run_file(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
