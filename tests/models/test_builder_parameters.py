"""Contract of all builders: the same parameter names with the same meanings, and widths that divide."""

import inspect
from collections.abc import Callable, Iterator, Sequence

import pytest

from jaxformer.config import AttentionConfig, ModelConfig, Problem, SpecialIds
from jaxformer.errors import UserError
from jaxformer.models import FAMILIES
from jaxformer.models.builders import RENAMED
from jaxformer.models.gpt2 import gpt2
from jaxformer.models.mixtral import mixtral


def builders() -> Iterator[tuple[str, Callable[..., ModelConfig]]]:
    """The public functions of all family files that return a `ModelConfig`."""
    for module in FAMILIES.values():
        for name, function in inspect.getmembers(module, inspect.isfunction):
            own = function.__module__ == module.__name__ and not name.startswith("_")
            if own and inspect.signature(function).return_annotation is ModelConfig:
                yield name, function


BUILDERS = dict(builders())
ATTENTION = {name for name, build in BUILDERS.items() if "num_heads" in inspect.signature(build).parameters}

# Every parameter that at least one group of builders must have: allowed annotations, and a value to build with.
SPECIAL = SpecialIds(bos=3, eos=(4,), pad=5, decoder_start=6)
ALL = {
    "num_layers": ({int}, 4),
    "embed_dim": ({int}, 24),
    "vocab_size": ({int}, 61),
    "context_length": ({int, int | None}, 40),
    "tied": ({bool}, False),
    "special": ({SpecialIds, SpecialIds | None}, SPECIAL),
    "dropout": ({float}, 0.25),
}
WITH_ATTENTION = {
    "num_heads": ({int}, 4),
    "num_kv_heads": ({int | None}, 2),
    "head_dim": ({int | None}, 10),
    "mlp_dim": ({int, int | None}, 20),
    "activation": (None, "relu"),
    "attention_dropout": ({float, float | None}, 0.125),
}
WITH_TWO_STACKS = {
    "num_decoder_layers": ({int | None}, 2),
    "num_decoder_heads": ({int | None}, 6),
    "decoder_mlp_dim": ({int | None}, 28),
    "source_vocab_size": ({int | None}, 83),
}
CLASSIFIERS = {name for name, build in BUILDERS.items() if "num_classes" in inspect.signature(build).parameters}
TAGGERS = {name for name, build in BUILDERS.items() if "num_tags" in inspect.signature(build).parameters}
CLASSES = {
    "num_classes": ({int | None}, 3),
    "labels": ({Sequence[str]}, ("no", "perhaps", "yes")),
    "problem": ({Problem}, "multi_label"),
    "classifier_dropout": ({float, float | None}, 0.375),
}
TAGS = {name: value for name, value in CLASSES.items() if name not in ("num_classes", "problem")}
TAGS["num_tags"] = ({int | None}, 3)
# Required parameters of builders without attention.
OTHER = {"cell": "lstm", "dim": 16}


def values(name: str, *groups: dict) -> dict:
    """Arguments for a builder: those of the groups, and values of the other parameters that it requires."""
    chosen = {key: value for group in groups for key, (_, value) in group.items()}
    known = chosen | {key: value for group in (ALL, WITH_ATTENTION) for key, (_, value) in group.items()} | OTHER
    parameters = inspect.signature(BUILDERS[name]).parameters.values()
    # llama and its siblings require mlp_dim unless they get experts.
    required = {p.name: known[p.name] for p in parameters if p.default is p.empty or p.name == "mlp_dim"}
    return required | chosen


def stacks(model: ModelConfig) -> list:
    return [stack for stack in (model.encoder, model.decoder) if stack is not None]


def attentions(stack) -> list[AttentionConfig]:
    return [a for block in stack.blocks for a in (block.attention, block.cross_attention) if a is not None]


def test_all_families_have_builders():
    assert {build.__module__.rpartition(".")[2] for build in BUILDERS.values()} == set(FAMILIES)
    assert set(BUILDERS) - ATTENTION == {"rnn"}


@pytest.mark.parametrize("name", BUILDERS)
def test_signature_lists_all_parameters_by_their_common_names(name):
    parameters = inspect.signature(BUILDERS[name]).parameters
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}, "decorate it with @builder"
    groups = [ALL] + [WITH_ATTENTION] * (name in ATTENTION)
    if name in ATTENTION and BUILDERS[name](**values(name, ALL)).shape == "encoder-decoder":
        groups.append(WITH_TWO_STACKS)
    groups += [CLASSES] * (name in CLASSIFIERS) + [TAGS] * (name in TAGGERS)
    for key, (annotations, _) in {key: value for group in groups for key, value in group.items()}.items():
        assert key in parameters, f"{name} has no {key}"
        assert annotations is None or parameters[key].annotation in annotations, f"annotation of {key} in {name}"
    assert not RENAMED.keys() & parameters.keys(), "former names are accepted, but not listed"


@pytest.mark.parametrize("name", BUILDERS)
def test_every_listed_parameter_is_accepted(name):
    """A builder that passes options on must not list a parameter that it sets itself."""
    arguments = values(name, ALL)
    for key, parameter in inspect.signature(BUILDERS[name]).parameters.items():
        if parameter.default is not parameter.empty and key not in arguments:
            BUILDERS[name](**arguments | {key: parameter.default})


@pytest.mark.parametrize("name", BUILDERS)
def test_common_parameters_have_the_same_meaning(name):
    model = BUILDERS[name](**values(name, ALL))
    assert (model.vocab_size, model.embed_dim, model.max_length) == (61, 24, 40)
    assert {stack.num_layers for stack in stacks(model)} == {4}
    assert model.special == SPECIAL
    assert model.head is None or not model.head.tied
    dropouts = {model.embedding.dropout} | {
        part.dropout for stack in stacks(model) for part in getattr(stack, "blocks", [stack])
    }
    assert dropouts == {0.25}


@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_parameters_of_attention_and_mlps_have_the_same_meaning(name):
    model = BUILDERS[name](**values(name, ALL, WITH_ATTENTION))
    for stack in stacks(model):
        sizes = {(a.num_heads, a.num_kv_heads, a.head_dim, a.dropout) for a in attentions(stack)}
        assert sizes == {(4, 2, 10, 0.125)}
        assert {(block.mlp.dim, block.mlp.activation) for block in stack.blocks} == {(20, "relu")}
    plain = BUILDERS[name](**values(name, ALL) | {"num_heads": 4, "head_dim": None})
    assert {(a.kv_heads, a.head_dim) for stack in stacks(plain) for a in attentions(stack)} == {(4, 6)}


@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_parameters_of_decoders_have_the_same_meaning(name):
    if "num_decoder_layers" not in inspect.signature(BUILDERS[name]).parameters:
        assert len(stacks(BUILDERS[name](**values(name, ALL)))) == 1
        return
    model = BUILDERS[name](**values(name, ALL, WITH_ATTENTION, WITH_TWO_STACKS))
    assert (model.encoder.num_layers, model.decoder.num_layers) == (4, 2)
    assert (model.vocab_size, model.source_vocab_size) == (61, 83)
    assert {a.num_heads for a in attentions(model.decoder)} == {6}
    assert {a.num_heads for a in attentions(model.encoder)} == {4}
    assert {block.mlp.dim for block in model.decoder.blocks} == {28}
    assert {block.mlp.dim for block in model.encoder.blocks} == {20}


@pytest.mark.parametrize("name", sorted(CLASSIFIERS))
def test_parameters_of_classifiers_have_the_same_meaning(name):
    model = BUILDERS[name](**values(name, ALL, CLASSES))
    pooler = model.pooler
    assert (pooler.num_classes, pooler.labels, pooler.problem) == (3, ("no", "perhaps", "yes"), "multi_label")
    assert pooler.dropout == 0.375
    assert pooler.pooling == ("first" if model.shape == "encoder-only" else "last")
    assert pooler.bias == (model.shape != "decoder-only")
    assert model.head is None
    with pytest.raises(UserError, match="without classes: set num_classes"):
        BUILDERS[name](**values(name, ALL) | {"labels": ("no", "yes")})


@pytest.mark.parametrize("name", sorted(TAGGERS))
def test_parameters_of_taggers_have_the_same_meaning(name):
    model = BUILDERS[name](**values(name, ALL, TAGS))
    pooler = model.pooler
    assert (pooler.pooling, pooler.num_classes, pooler.labels) == ("none", 3, ("no", "perhaps", "yes"))
    assert (pooler.bias, pooler.dropout) == (True, 0.375)
    assert model.head is None
    with pytest.raises(UserError, match="num_classes=3 and num_tags=3: set only one"):
        BUILDERS[name](**values(name, ALL, TAGS, CLASSES))


def test_all_families_but_the_oldest_have_class_heads():
    shapes = {name: build(**values(name, ALL)).shape for name, build in BUILDERS.items()}
    assert set(BUILDERS) - CLASSIFIERS == {"rnn", "vaswani"}
    assert {name for name in CLASSIFIERS if shapes[name] == "encoder-decoder"} == CLASSIFIERS - TAGGERS


@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_heads_that_do_not_divide_the_width_are_rejected(name):
    arguments = values(name, ALL) | {"embed_dim": 16, "num_heads": 3, "head_dim": None}
    with pytest.raises(UserError, match=r"embed_dim=16 is not a multiple of num_heads=3.*set head_dim"):
        BUILDERS[name](**arguments)
    independent = inspect.signature(BUILDERS[name]).parameters["head_dim"].default
    if independent is None:
        del arguments["head_dim"]
        with pytest.raises(UserError, match="embed_dim=16 is not a multiple of num_heads=3"):
            BUILDERS[name](**arguments)
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        BUILDERS[name](**values(name, ALL) | {"num_heads": 4, "num_kv_heads": 3})


@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_no_heads_are_rejected(name):
    with pytest.raises(ValueError, match="num_heads"):
        BUILDERS[name](**values(name, ALL) | {"num_heads": 0})


def test_decoder_heads_must_divide_the_width_too():
    arguments = values("bart", ALL) | {"num_decoder_heads": 5}
    with pytest.raises(UserError, match="embed_dim=24 is not a multiple of num_heads=5"):
        BUILDERS["bart"](**arguments)


@pytest.mark.parametrize("name", BUILDERS)
def test_former_names_are_accepted_with_a_warning(name):
    arguments = values(name, ALL)
    length = arguments.pop("context_length")
    with pytest.warns(FutureWarning, match=f"{name}: max_length is now called context_length") as caught:
        model = BUILDERS[name](**arguments, max_length=length)
    assert model == BUILDERS[name](**values(name, ALL))
    assert {warning.filename for warning in caught} == {__file__}
    assert len(caught) == 1
    with pytest.raises(UserError, match="max_length is the former name of context_length"):
        BUILDERS[name](**values(name, ALL), max_length=length)


def test_unknown_parameters_are_errors():
    with pytest.raises(TypeError, match="num_head"):
        gpt2(num_layers=1, embed_dim=8, num_head=2)


def test_experts_have_no_biases():
    with pytest.raises(UserError, match="mlp_bias=True with moe"):
        mixtral(num_layers=1, embed_dim=8, num_heads=2, mlp_dim=8, vocab_size=30, mlp_bias=True)
