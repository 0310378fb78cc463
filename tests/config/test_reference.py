"""The reference of config keys: every key is documented, found by its path, and in configs/README.md."""

import re
from pathlib import Path

import pytest

from jaxformer.cli import main
from jaxformer.config import RunConfig, apply_overrides
from jaxformer.config.reference import _fields, _find_places, describe_key, find_entries, format_markdown
from jaxformer.errors import UserError
from jaxformer.models import preset

GUIDE = Path(__file__).parents[2] / "configs" / "README.md"
UPDATE = "put the output of `jaxformer help --markdown` between the reference comments of configs/README.md"


@pytest.mark.parametrize("model", _find_places(), ids=lambda model: model.__name__)
def test_every_class_and_field_has_a_docstring(model):
    assert model.__doc__
    for name, field in _fields(model):
        assert field.description, f"{model.__name__}.{name} has no docstring"


def test_the_guide_holds_the_reference():
    shown = re.search(r"<!-- reference -->\n(.*)\n<!-- /reference -->", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None, "configs/README.md lacks the comments <!-- reference --> and <!-- /reference -->"
    assert shown[1] == format_markdown(), UPDATE


@pytest.mark.parametrize(
    ("key", "lines"),
    [
        ("train.steps", ["train.steps", "Number of optimizer steps", "type: integer (at least 1)", "default: 1000"]),
        ("data.train", ["kinds:", "text ", "parallel ", "required"]),
        ("data.heldout", ["split ", "or none", "default: none"]),
        ("optim.algorithm.muon.ns_steps", ["optim.algorithm.ns_steps  (kind muon)", "default: 5"]),
        ("optim.algorithm.kind", ["type: adamw, adafactor, lion, sgd, muon"]),
        ("model.decoder.pattern", ["(kind transformer)", "list of BlockConfig, at least 1", "pattern.N.attention "]),
        ("model.decoder.pattern.0.mlp.moe.top_k", ["Number of experts per token."]),
        (
            "data.train.paths",
            ["(kind text, jsonl, tsv, conll, array_record)", "type: text or list of text, at least 1"],
        ),
        ("train.dtype", ["type: auto, float32, bfloat16", "default: auto"]),
        ("evaluate.top_p", ["type: number (above 0, at most 1) or none"]),
        ("mesh.data", ["type: integer (at least -1)", "default: -1"]),
        ("train.freeze", ["list of ParameterSelector", "train.freeze.N.path"]),
        ("evaluate.metrics", ["default: none", "exact_match "]),
    ],
)
def test_help_of_a_key(key, lines, capsys):
    assert main(["help", key]) == 0
    output = capsys.readouterr().out
    for line in lines:
        assert line in output


def test_help_alone_lists_the_keys_of_a_run(capsys):
    assert main(["help"]) == 0
    words = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert set(RunConfig.model_fields) <= words


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("trian.steps", "'trian.steps': no field 'trian'; did you mean train"),
        ("train.stepz", "did you mean train.steps"),
        ("optim.algorithm.moun", "optim.algorithm.muon"),
        ("train.steps.x", "'train.steps' has no keys"),
        ("model.decoder.3", "'model.decoder' is not a list"),
    ],
)
def test_unknown_keys_name_the_nearest_ones(key, message, capsys):
    assert main(["help", key]) == 1
    assert message in capsys.readouterr().err


def test_a_kind_and_a_field_of_the_same_name_are_both_described():
    assert [entry.kinds for entry in find_entries("data.train.text")] == [
        ("text",),
        ("jsonl",),
        ("tsv",),
        ("array_record",),
    ]


def test_every_listed_key_has_an_entry_of_its_own():
    """Follow the keys that `jaxformer help` prints, from the top to the leaves."""
    seen, waiting = set(), list(RunConfig.model_fields)
    while waiting:
        key = waiting.pop()
        if key in seen or key.count(".") > 4:
            continue
        seen.add(key)
        waiting += (
            re.findall(r"^    ([\w.]+)  ", describe_key(key), re.MULTILINE) if "kinds:" not in describe_key(key) else []
        )
    assert {"train.start.path", "model.encoder.pattern.N.attention", "checkpoint.every"} <= seen


def test_keys_without_their_kind_are_overrides():
    """The printed key of `optim.algorithm.muon.ns_steps` is the one that an override takes."""
    config = RunConfig(model=preset("gpt2-124m"))
    (entry,) = find_entries("optim.algorithm.muon.ns_steps")
    assert apply_overrides(config, ["optim.algorithm.kind=muon", f"{entry.key}=7"]).optim.algorithm.ns_steps == 7


def test_markdown_and_key_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        main(["help", "train", "--markdown"])
    with pytest.raises(UserError):
        describe_key("nothing.here")
