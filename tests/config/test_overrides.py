"""`key=value` overrides: which fields they can set, how values are parsed, and the error messages."""

import json

import pytest
from hypothesis import assume, given, strategies as st

from jaxformer.config import (
    AdamW,
    AttentionConfig,
    JsonlSource,
    Learned,
    MemorySource,
    ModelConfig,
    NormConfig,
    Rope,
    RunConfig,
    Sgd,
    Sinusoidal,
    StdlibSource,
    apply_overrides,
)
from jaxformer.errors import UserError

BLOCK = "model.decoder.pattern.0"


# ---------------------------------------------------------------- fields
def test_no_overrides_give_an_equal_config(run):
    assert apply_overrides(run, []) == run


def test_nested_fields(run):
    changed = apply_overrides(run, ["train.steps=200", "model.decoder.num_layers=5"])
    assert (changed.train.steps, changed.model.decoder.num_layers) == (200, 5)
    assert run.train.steps == 1000, "the original is unchanged"


def test_only_the_named_field_changes(run):
    changed = apply_overrides(run, ["train.steps=200"])
    assert changed == run.model_copy(update={"train": run.train.model_copy(update={"steps": 200})})


def test_items_of_a_tuple_by_index(run):
    assert apply_overrides(run, [f"{BLOCK}.mlp.dim=24"]).model.decoder.pattern[0].mlp.dim == 24
    assert apply_overrides(run, ["data.train.documents.1=xyz"]).data.train.documents == ("abc", "xyz")


def test_items_of_pairs_by_two_indices(pair_run):
    assert apply_overrides(pair_run, ["data.train.pairs.0.1=xyz"]).data.train.pairs == (("abc", "xyz"),)


def test_later_overrides_win(run):
    assert apply_overrides(run, ["seed=1", "seed=2"]).seed == 2


def test_overrides_apply_to_any_config_class(run):
    assert apply_overrides(run.model, ["decoder.num_layers=3"]).decoder.num_layers == 3


def test_overrides_that_are_valid_only_together(run):
    """Either override alone would fail a check that involves both fields."""
    changed = apply_overrides(run, ["data.length=64", "model.embedding.position.max_length=64"])
    assert changed.model.max_length == changed.data.length == 64


# ---------------------------------------------------------------- optional fields and unions
@pytest.mark.parametrize("word", ["none", "None", "null"])
def test_none_unsets_an_optional_field(run, word):
    assert apply_overrides(run, [f"optim.clip_norm={word}"]).optim.clip_norm is None
    assert apply_overrides(run, [f"model.decoder.final_norm={word}"]).model.decoder.final_norm is None


def test_a_field_of_an_unset_node_creates_the_node(run):
    changed = apply_overrides(run, [f"{BLOCK}.attention.qk_norm.eps=0.25"])
    assert changed.model.decoder.pattern[0].attention.qk_norm == NormConfig(eps=0.25)


def test_an_unset_union_needs_its_kind_first(run):
    kind, theta = f"{BLOCK}.attention.position.kind=rope", f"{BLOCK}.attention.position.theta=500000"
    changed = apply_overrides(run, [kind, theta])
    assert changed.model.decoder.pattern[0].attention.position == Rope(theta=500_000.0)
    with pytest.raises(UserError, match=r"no field 'theta'; there are: .*attention\.position\.kind"):
        apply_overrides(run, [theta])


def test_kind_outside_a_union_is_an_ordinary_field(run):
    """Both kinds of norm have the same config class, so the other fields are kept."""
    changed = apply_overrides(run, ["model.decoder.final_norm.eps=0.25", "model.decoder.final_norm.kind=rms"])
    assert changed.model.decoder.final_norm.kind == "rms"
    assert changed.model.decoder.final_norm.eps == 0.25


def test_kind_switches_the_class_and_keeps_shared_fields(run):
    source = run.data.train
    assert isinstance(source, MemorySource)
    changed = apply_overrides(run, ["data.train.kind=jsonl", 'data.train.paths=["a.jsonl"]'])
    assert changed.data.train == JsonlSource(paths=("a.jsonl",))
    kept = apply_overrides(run, ["optim.algorithm.b1=0.5", "optim.algorithm.kind=muon"])
    assert kept.optim.algorithm.b1 == 0.5


def test_fields_of_the_new_kind_can_be_set(run):
    changed = apply_overrides(run, ["optim.algorithm.kind=sgd", "optim.algorithm.momentum=0.9"])
    assert changed.optim.algorithm == Sgd(momentum=0.9)


def test_setting_the_current_kind_changes_nothing(run):
    changed = apply_overrides(run, ["optim.algorithm.b1=0.5", "optim.algorithm.kind=adamw"])
    assert changed.optim.algorithm == AdamW(b1=0.5)


def test_kind_sets_an_unset_union(run):
    changed = apply_overrides(run, ["data.heldout.kind=stdlib", "data.heldout.split=heldout"])
    assert changed.data.heldout == StdlibSource(split="heldout")


def test_a_whole_node_as_json(run):
    changed = apply_overrides(run, ['model.embedding.position={"kind": "sinusoidal"}'])
    assert changed.model.embedding.position == Sinusoidal()
    node = {"kind": "learned", "max_length": 99}
    changed = apply_overrides(changed, [f"model.embedding.position={json.dumps(node)}"])
    assert changed.model.embedding.position == Learned(max_length=99)


def test_a_union_of_number_and_word(run):
    assert apply_overrides(run, ["train.unroll=4"]).train.unroll == 4
    assert apply_overrides(run, ["train.unroll=all"]).train.unroll == "all"


# ---------------------------------------------------------------- values
@pytest.mark.parametrize(
    ("text", "value"),
    [("runs/x", "runs/x"), ("123", "123"), ("none", "none"), ("true", "true"), ('"a b"', "a b"), ("a=b", "a=b")],
)
def test_values_of_a_string_field(run, text, value):
    assert apply_overrides(run, [f"workdir={text}"]).workdir == value


def test_scientific_notation(run):
    assert apply_overrides(run, ["optim.learning_rate=3e-4"]).optim.learning_rate == 3e-4


def test_booleans(run):
    assert apply_overrides(run, ["data.pack=false"]).data.pack is False


def test_a_json_list_sets_a_tuple(run):
    assert apply_overrides(run, ['evaluate.prompts=["a", "b"]']).evaluate.prompts == ("a", "b")


@given(text=st.text())
def test_any_string_is_parsed_unchanged(run, text):
    """A string in JSON quotes always is; a plain one is unless it looks like a JSON string."""
    assert apply_overrides(run, [f"workdir={json.dumps(text)}"]).workdir == text
    assume(not text.strip().startswith('"'))
    assert apply_overrides(run, [f"workdir={text}"]).workdir == text


@given(number=st.integers(min_value=0, max_value=2**63))
def test_any_integer_is_parsed_unchanged(run, number):
    assert apply_overrides(run, [f"seed={number}"]).seed == number


@given(number=st.floats(min_value=0.0, exclude_min=True, allow_infinity=False))
def test_any_float_is_parsed_unchanged(run, number):
    assert apply_overrides(run, [f"optim.learning_rate={number!r}"]).optim.learning_rate == number


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize("override", ["train.steps", "=5", "", "--steps"])
def test_an_override_without_key_or_value(run, override):
    with pytest.raises(UserError, match=r"expected key=value, such as train\.steps=200") as caught:
        apply_overrides(run, [override])
    assert f"'{override}'" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("train.step=1", "train.steps"),
        ("modle.vocab_size=1", "model"),
        (f"{BLOCK}.attention.heads=1", f"{BLOCK}.attention.num_heads"),
        ("data.train.document=1", "data.train.documents"),
        ("optim.algorithm.momentum_decay=1", "optim.algorithm"),
        ("data.train.data=1", "data.train."),
    ],
)
def test_an_unknown_key_suggests_the_nearest(run, override, nearest):
    with pytest.raises(UserError, match="no field") as caught:
        apply_overrides(run, [override])
    message = str(caught.value)
    assert override.split("=")[0] in message
    assert nearest in message.partition(";")[2], message


def test_an_unknown_key_without_a_near_match_lists_all(run):
    with pytest.raises(UserError, match="there are: ") as caught:
        apply_overrides(run, ["mesh.qqqq=1"])
    assert all(f"mesh.{axis}" in str(caught.value) for axis in ("data", "fsdp", "tensor"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps=many", ["train.steps=many", "integer"]),
        ("train.steps=1.5", ["train.steps=1.5", "integer"]),
        ("train.steps=none", ["train.steps=none", "integer"]),
        ("train.steps=0", ["train.steps", "0", "greater than 0"]),
        ("train.steps=true", ["train.steps", "integer"]),
        ("data.pack=maybe", ["data.pack=maybe", "boolean"]),
        ("train.remat=some", ["train.remat=some", "'none', 'full', 'attention', 'dots' or 'offload'"]),
        ("optim.learning_rate=-1", ["optim.learning_rate", "-1", "greater than 0"]),
        ("optim.learning_rate=Infinity", ["optim.learning_rate", "finite"]),
        ("optim.algorithm.kind=adam", ["optim.algorithm.kind=adam", "'adamw'", "'sgd'"]),
        ("optim.algorithm=5", ["optim.algorithm=5"]),
        ("data.train.documents=5", ["data.train.documents=5", "tuple"]),
        ("data.train.paths=5", ["no field 'paths'", "data.train.pairs"]),
        (f"{BLOCK}.dropout=1.0", ["dropout", "1.0", "less than 1"]),
        ("model.decoder.pattern.1.mlp.dim=4", ["pattern.1", "index below 1"]),
        ("model.decoder.pattern.first.mlp.dim=4", ["'first'", "index below 1"]),
        ("train.steps.more=4", ["'steps' is 1000, which has no fields"]),
        ("checkpoint.every.x=4", ["'every' is 500, which has no fields"]),
        ("evaluate.every.x=4", ["'every' has no fields"]),
        ("data.train.documents.0.x=4", ["item 0 is 'abc', which has no fields"]),
        ("model.embedding.position.size=4", ["no field 'size'"]),
    ],
)
def test_an_invalid_value_names_the_field_and_what_is_allowed(run, override, words):
    with pytest.raises(UserError) as caught:
        apply_overrides(run, [override])
    for word in words:
        assert word in str(caught.value)


def test_all_errors_are_reported_together(run):
    with pytest.raises(UserError) as caught:
        apply_overrides(run, ["train.steps=0", "seed=-1"])
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["seed", "train.steps"]


def test_user_errors_are_value_errors():
    assert issubclass(UserError, ValueError)


@pytest.mark.parametrize("cls", [RunConfig, ModelConfig, AttentionConfig])
def test_unknown_fields_are_rejected_in_python(cls):
    with pytest.raises(ValueError, match="nonsense"):
        cls(nonsense=1)


def test_an_error_inside_a_whole_object_names_one_kind_and_its_field(run):
    with pytest.raises(UserError) as error:
        apply_overrides(run, ['data.objective={"kind":"masked","rate":1.0}'])
    assert str(error.value).endswith(": rate = 1.0: Input should be less than 1")
