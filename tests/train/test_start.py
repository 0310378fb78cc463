"""Starting from the weights of another run, and freezing parameters."""

import json
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxformer import generate, load, score
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import (
    Classify,
    MemorySource,
    MeshConfig,
    OptimConfig,
    PoolerConfig,
    TrainConfig,
    apply_overrides,
)
from jaxformer.errors import UserError
from jaxformer.layers import abstract_params
from jaxformer.layers.partition import Partition
from jaxformer.rundir import RunDir
from jaxformer.sharding import path_name
from jaxformer.train.loop import train
from jaxformer.train.program import train_program
from jaxformer.train.start import complete_config, first_state, load_config

QUIET = Console(quiet=True)
ALL_BUT_LAST_LAYER = ("embedding/*", "decoder/final_norm/*", {"path": "decoder/*", "layers": (0, -1)})


def paths(tree) -> dict[str, tuple[int, ...]]:
    return {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run to start from."""
    from jaxformer.config import ByteTokenizer, DataConfig, MemorySource, RunConfig
    from jaxformer.models.gpt2 import gpt2

    documents = tuple(f"document {i}: " + "abc " * (i % 7) for i in range(40))
    config = RunConfig(
        workdir=str(tmp_path_factory.mktemp("runs") / "first"),
        model=gpt2(num_layers=2, embed_dim=16, num_heads=2, vocab_size=264, context_length=64),
        data=DataConfig(
            train=MemorySource(documents=documents),
            heldout=MemorySource(documents=documents[:8]),
            tokenizer=ByteTokenizer(),
            length=32,
            batch_size=8,
        ),
        optim=OptimConfig(learning_rate=1e-2, schedule={"kind": "constant"}),
        train=TrainConfig(steps=4, log_every=1),
    )
    train(config, QUIET)
    return config


# ---------------------------------------------------------------- partitions
def test_without_frozen_parameters_the_tree_is_unchanged(make_config):
    model = make_config().model
    params = abstract_params(model)[0]
    trainable, frozen = Partition(model, ()).split(params)
    assert trainable is params
    assert frozen is None


@pytest.mark.parametrize(
    ("freeze", "num_trained"),
    [
        (("embedding/*",), {"embedding": 0, "decoder": 2}),
        (ALL_BUT_LAST_LAYER, {"embedding": 0, "decoder": 1}),
        (({"path": "*", "layers": (1, 2)},), {"embedding": 1, "decoder": 1}),
    ],
)
def test_merge_restores_a_split_tree(freeze, num_trained, make_config):
    config = make_config(train=TrainConfig(freeze=freeze))
    shapes = abstract_params(config.model)[0]
    params = jax.tree.map(lambda leaf: np.random.default_rng(0).normal(size=leaf.shape).astype(np.float32), shapes)
    partition = Partition(config.model, config.train.freeze)
    trainable, frozen = partition.split(params)
    jax.tree.map(np.testing.assert_array_equal, partition.merge(trainable, frozen), params)
    assert ("embedding" in trainable) == bool(num_trained["embedding"])
    kernel = trainable["decoder"]["blocks_0"]["mlp"]["up"]["kernel"]
    assert kernel.shape[0] == num_trained["decoder"]


def test_layers_are_counted_in_order_of_depth():
    """Gemma 3 repeats five local layers and a global one, so its last layers belong to different pattern entries."""
    from jaxformer.models.gemma import gemma3

    model = gemma3(num_layers=8, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16, vocab_size=32)
    partition = Partition(model, TrainConfig(freeze=({"path": "decoder/*", "layers": (0, 6)},)).freeze)
    trainable, _ = partition.split(jax.tree.map(lambda leaf: np.zeros(leaf.shape), abstract_params(model)[0]))
    blocks = {name for name in trainable["decoder"] if name.startswith("blocks_")}
    assert blocks == {"blocks_0", "blocks_1"}  # layers 6 and 7 are the second use of the first two pattern entries
    assert all(leaf.shape[0] == 1 for leaf in jax.tree.leaves([trainable["decoder"][name] for name in blocks]))


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (("embeding/*",), r"train\.freeze\.0: 'embeding/\*' matches no parameter; parameters are, for example: "),
        (({"path": "decoder/*", "layers": (5, 9)},), r"in layers \[5, 9\] matches no parameter"),
        (("*",), "every parameter is selected; leave at least one trainable"),
    ],
)
def test_invalid_selectors_raise(freeze, message, make_config):
    with pytest.raises(UserError, match=message):
        train_program(make_config(train=TrainConfig(freeze=freeze)), jax.devices()[:1])


# ---------------------------------------------------------------- training with frozen parameters
@pytest.mark.parametrize(
    ("kind", "freeze"),
    [
        pytest.param("adamw", ("embedding/*",), id="adamw-embeddings"),
        pytest.param("muon", ALL_BUT_LAST_LAYER, id="muon-last layer trained"),
        pytest.param("adamw", ALL_BUT_LAST_LAYER, id="adamw-last layer trained", marks=pytest.mark.slow),
        pytest.param("muon", ("embedding/*",), id="muon-embeddings", marks=pytest.mark.slow),
    ],
)
def test_frozen_parameters_do_not_change_and_have_no_moments(freeze, kind, make_config, run_steps):
    optim = OptimConfig(algorithm={"kind": kind}, learning_rate=1e-2, ema_decay=0.9, weight_decay=0.1)
    config = make_config(optim=optim, train=TrainConfig(freeze=freeze))
    program = train_program(config, jax.devices()[:1])
    before = jax.device_get(program.init())
    state, _ = run_steps(config, num_steps=2)
    jax.tree.map(np.testing.assert_array_equal, state.frozen, before.frozen)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), jax.device_get(state.params), before.params)
    assert all(jax.tree.leaves(changed))
    trained = paths(state.params)
    moments = paths(state.opt_state)
    for path, shape in moments.items():
        if path.endswith(("kernel", "scale", "tokens", "positions")):
            assert any(path.endswith(name) and shape == trained[name] for name in trained), path
    assert paths(state.ema) == trained


def test_gradients_do_not_depend_on_what_is_frozen(make_config, run_steps):
    """With plain SGD, trainable parameters change exactly as if nothing were frozen."""
    optim = OptimConfig(algorithm={"kind": "sgd"}, learning_rate=1.0, clip_norm=None, schedule={"kind": "constant"})
    whole, _ = run_steps(make_config(optim=optim), num_steps=1)
    config = make_config(optim=optim, train=TrainConfig(freeze=ALL_BUT_LAST_LAYER))
    part, _ = run_steps(config, num_steps=1)
    expected, _ = Partition(config.model, config.train.freeze).split(whole.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), part.params, expected)


@pytest.mark.slow
def test_training_with_frozen_parameters_on_eight_devices_equals_one(make_config, run_steps):
    config = make_config(train=TrainConfig(freeze=ALL_BUT_LAST_LAYER), optim=OptimConfig(learning_rate=1e-2))
    _, one = run_steps(config)
    _, eight = run_steps(config.replace(mesh=MeshConfig(data=2, fsdp=2, tensor=2)), num_devices=8)
    for a, b in zip(one, eight, strict=True):
        for name in ("loss", "grad_norm", "param_norm"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5, err_msg=name)


# ---------------------------------------------------------------- starting from another run
@pytest.mark.parametrize(
    "freeze",
    [pytest.param((), id="everything", marks=pytest.mark.slow), pytest.param(ALL_BUT_LAST_LAYER, id="last layer")],
)
def test_a_run_starts_from_another_and_resumes_without_it(trained, tmp_path, freeze):
    start = shutil.copytree(trained.workdir, tmp_path / "start")
    config = trained.replace(
        workdir=str(tmp_path / "second"),
        model=None,
        data=trained.data.replace(tokenizer={"kind": "sentencepiece"}),
        train=TrainConfig(steps=4, log_every=1, start=str(start), freeze=freeze),
    )
    whole = config.replace(workdir=str(tmp_path / "whole"))
    train(whole, QUIET)
    first = json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] < np.log(264) - 0.3, "the first loss must be better than that of random weights"

    train(config.replace(train=config.train.replace(steps=2)), QUIET)
    shutil.rmtree(start)
    resumed = train(config, QUIET)
    again = load(tmp_path / "second")
    jax.tree.map(np.testing.assert_array_equal, again.params, load(tmp_path / "whole").params)
    jax.tree.map(np.testing.assert_array_equal, again.params, resumed.params)
    assert generate(again, ["doc"], max_new_tokens=4) == generate(resumed, ["doc"], max_new_tokens=4)
    saved = json.loads((tmp_path / "second" / "config.json").read_text())
    assert saved["model"] == trained.model.model_dump(mode="json")
    assert saved["data"]["tokenizer"] == {"kind": "directory", "path": str(start), "extra_tokens": []}


def test_the_first_state_has_the_weights_of_train_start(trained, tmp_path):
    config = trained.replace(train=TrainConfig(start=trained.workdir), workdir=str(tmp_path / "next"))
    program = train_program(config, jax.devices())
    with Checkpoints(RunDir(tmp_path / "next"), config) as checkpoints:
        state, step = first_state(program, checkpoints, load(trained.workdir).tokenizer)
    assert step == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, load(trained.workdir).params)


def test_a_run_starts_from_a_hugging_face_directory(trained, tmp_path):
    from jaxformer.exchange import export_run

    export_run(trained.workdir, tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text('{"max_new_tokens": 3}')
    config = trained.replace(
        workdir=str(tmp_path / "tuned"), model=None, train=TrainConfig(steps=1, log_every=1, start=str(tmp_path / "hf"))
    )
    run = train(config.replace(optim=OptimConfig(learning_rate=1e-9)), QUIET)
    for actual, expected in zip(score(run, ["document 1"]), score(load(trained.workdir), ["document 1"]), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert run.generation is None, "evaluation during training does not use generation_config.json"
    assert load(tmp_path / "tuned").generation.settings == {"max_new_tokens": 3}


def test_the_tokenizer_of_a_hub_repository_is_read_from_its_download(trained, tmp_path, monkeypatch):
    from jaxformer.exchange import export_run

    export_run(trained.workdir, tmp_path / "download")
    monkeypatch.setattr("jaxformer.convert.hub._download", lambda address: tmp_path / "download")
    data = trained.data.replace(tokenizer={"kind": "sentencepiece"})
    config = trained.replace(model=None, data=data, workdir="", train=TrainConfig(steps=1, start="hf://org/name"))
    assert complete_config(config).data.tokenizer.path == str(tmp_path / "download")


def test_model_overrides_apply_on_top_of_train_start(trained, tmp_path):
    path = tmp_path / "tune.py"
    path.write_text(
        "from jaxformer.config import *\n\n"
        "def config():\n"
        "    data = DataConfig(train=MemorySource(documents=('abc',)), length=16)\n"
        "    return RunConfig(data=data, train=TrainConfig(start='nowhere'))\n"
    )
    config = load_config(path, ["model.embedding.dropout=0.5", f"train.start={trained.workdir}"])
    assert config.model.embedding.dropout == 0.5
    assert config.model.embed_dim == trained.model.embed_dim
    assert config.data.tokenizer.kind == "directory"
    with pytest.raises(UserError, match="'nowhere' does not exist"):
        load_config(path)


def test_a_model_with_other_shapes_raises(trained, tmp_path):
    wider = trained.model.replace(vocab_size=300)
    config = trained.replace(model=wider, workdir=str(tmp_path / "x"), train=TrainConfig(start=trained.workdir))
    with pytest.raises(
        UserError, match=r"parameter 'embedding/tokens' has shape \(264, 16\) in that directory, .*\(300, 16\)"
    ):
        train(config, QUIET)
    assert not (tmp_path / "x" / "config.json").exists()


# ---------------------------------------------------------------- starting with a new head
def classifier(trained, start, **fields):
    """A classifier that starts from the directory `start`; it has no head over the vocabulary."""
    model = trained.model.replace(head=None, pooler=PoolerConfig(pooling="last", num_classes=2, bias=False, **fields))
    source = MemorySource(examples=({"text": "good", "label": "yes"}, {"text": "bad", "label": "no"}) * 8)
    data = trained.data.replace(train=source, heldout=None, objective=Classify())
    return trained.replace(model=model, data=data, train=TrainConfig(steps=1, log_every=1, start=str(start)))


def first_params(config, directory):
    program = train_program(config.replace(workdir=str(directory)), jax.devices()[:1])
    with Checkpoints(RunDir(directory), config) as checkpoints:
        return program.inference_params(first_state(program, checkpoints, None)[0])


def test_a_new_head_starts_with_random_weights(trained, tmp_path, caplog):
    from jaxformer.exchange import export_run

    export_run(trained.workdir, tmp_path / "hf")
    earlier = load(trained.workdir).params
    for start in (trained.workdir, tmp_path / "hf"):
        params = first_params(classifier(trained, start), tmp_path / "next")
        jax.tree.map(np.testing.assert_array_equal, params["decoder"], earlier["decoder"])
        kernel = params["pooler"]["classes"]["kernel"]
        assert np.isfinite(kernel).all()
        assert np.std(kernel) > 0
        assert f"train.start='{start}' has no pooler/classes/kernel: they start with random weights" in caplog.text


def test_a_language_model_starts_without_the_class_head_of_another_run(trained, tmp_path):
    frozen = TrainConfig(steps=1, log_every=1, freeze=("pooler/*", "embedding/*"))
    config = classifier(trained, "none").replace(train=frozen, workdir=str(tmp_path / "classifier"))
    train(config, QUIET)
    start = TrainConfig(start=config.workdir)
    params = first_params(trained.replace(train=start), tmp_path / "next")
    expected = {name: value for name, value in load(config.workdir).params.items() if name != "pooler"}
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("change", ["pooler.num_classes=3", "head.tied=false"])
def test_a_head_of_another_shape_raises(trained, tmp_path, change):
    config = trained if change.startswith("head") else classifier(trained, "none").replace(train=TrainConfig())
    (tmp_path / "start").mkdir()
    RunDir(tmp_path / "start").write_config(config)
    later = config.replace(
        model=apply_overrides(config.model, [change]), train=TrainConfig(start=str(tmp_path / "start"))
    )
    with pytest.raises(UserError, match=r"parameter '(pooler/classes|head/output)/kernel' has shape"):
        first_params(later, tmp_path / "next")


def test_overrides_may_set_an_objective_and_its_head_together(trained, tmp_path):
    path = tmp_path / "tune.py"
    head = ["data.objective.kind=classify", "model.pooler.num_classes=2", "model.pooler.pooling=last"]
    path.write_text(
        "from jaxformer.config import *\nfrom jaxformer.models.gpt2 import gpt2\n\n"
        "data = DataConfig(train=MemorySource(documents=('abc',)), length=16)\n"
        f"start = RunConfig(data=data, train=TrainConfig(start={trained.workdir!r}))\n"
        "model = gpt2(num_layers=1, embed_dim=8, num_heads=2, vocab_size=264)\n"
        "whole = RunConfig(model=model, data=data)\n\nconfig = start\n"
    )
    assert load_config(path, head).model.pooler.num_classes == 2
    path.write_text(path.read_text().replace("config = start", "config = whole"))
    assert load_config(path, head).model.pooler.num_classes == 2


def test_a_config_without_model_and_start_raises(make_config):
    with pytest.raises(ValueError, match=r"model is missing: set it, or set train\.start"):
        make_config().replace(model=None)
    assert complete_config(make_config()).train.start is None
