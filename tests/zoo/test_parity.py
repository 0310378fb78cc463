"""Outputs of every sample equal those of transformers: with left and right padding, windows, and blocked attention."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch

import jaxformer as jf
from jaxformer.config import ModelConfig
from jaxformer.convert import FORMATS, SAMPLES
from jaxformer.convert.heads import head_kind
from jaxformer.convert.sample import POSITIONS, VOCAB
from jaxformer.errors import UserError
from jaxformer.layers import Runtime, Transformer
from jaxformer.ops.attention.blocked import MIN_BLOCK
from jaxformer.typing import Tokens, tokens_from_ids
from jaxformer.zoo.parity import classifier_ids, classifier_tokens

TOLERANCE = 1e-4
LENGTHS, TARGET_LENGTHS = (24, 17, 5), (9, 14, 6)
LONG, LONG_TARGETS = (140, 75), (66, 90)
# Samples with different attention; for the blocked kernel, each of the others is the same as one of these.
BLOCKED = {"gpt2", "llama", "mistral", "gemma2", "t5", "bart", "bert", "modernbert"}
# Of classifiers and taggers, transformers does not return the router logits.
EXPERTS = [
    name
    for name, sample in SAMPLES.items()
    if any("experts" in field for field in sample.fields) and sample.architecture.endswith("CausalLM")
]
WINDOWED = [name for name, s in SAMPLES.items() if {"sliding_window", "local_attention"} & set(s.fields)]


class Text(NamedTuple):
    """Padded rows; padding has random ids, which must not affect outputs."""

    ids: np.ndarray
    mask: np.ndarray
    types: np.ndarray

    def row(self, i: int) -> "Text":
        """One row without its padding."""
        return Text(*(part[i : i + 1, self.mask[i].astype(bool)] for part in self))


def make_text(lengths: tuple[int, ...], side: str, seed: int = 0, num_types: int = 0) -> Text:
    """Random rows of these lengths; for the same seed, their tokens do not depend on the side of the padding."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), max(lengths))
    rows, noise = rng.integers(3, VOCAB - 1, (2, *shape))
    types = rng.integers(0, max(num_types, 1), shape)
    from_start = np.arange(shape[1]) < np.array(lengths)[:, None]
    mask = from_start if side == "right" else from_start[:, ::-1]
    ids, kinds = noise.copy(), np.zeros_like(types)
    ids[mask], kinds[mask] = rows[from_start], types[from_start]
    return Text(ids, mask.astype(int), kinds)


class Inputs(NamedTuple):
    text: Text
    """Input of the decoder, or of the encoder of an encoder-only model."""
    source: Text | None
    """Input of the encoder of an encoder-decoder. None for a classifier, which reads the same text on both sides."""

    def row(self, i: int) -> "Inputs":
        return Inputs(self.text.row(i), self.source and self.source.row(i))


def make_inputs(pair, side: str, lengths=LENGTHS, target_lengths=TARGET_LENGTHS) -> Inputs:
    if head_kind(pair.config) == "classes":
        text = make_text(lengths, side, num_types=pair.config.embedding.num_types)
        return Inputs(text._replace(ids=classifier_ids(pair.config, text.ids, text.mask)), None)
    if pair.config.shape == "encoder-decoder":
        return Inputs(make_text(target_lengths, side, seed=1), make_text(lengths, side))
    return Inputs(make_text(lengths, side, num_types=pair.config.embedding.num_types), None)


# ---------------------------------------------------------------- ours
def ours(pair, inputs: Inputs, attention: str = "auto") -> dict[str, np.ndarray]:
    model = Transformer(pair.config, Runtime(attention=attention))
    tokens, source = (part and tokens_from_ids(part.ids, part.mask) for part in inputs)
    if head_kind(pair.config) == "classes":
        tokens, source = classifier_tokens(pair.config, inputs.text.ids, inputs.text.mask)
    if pair.config.embedding.num_types:
        tokens = tokens._replace(types=inputs.text.types)
    return {name: np.asarray(array) for name, array in _outputs(model, pair.run.params, tokens, source).items()}


@partial(jax.jit, static_argnames="model")
def _outputs(model: Transformer, params, tokens: Tokens, source: Tokens | None) -> dict[str, jax.Array]:
    def all_outputs(model: Transformer) -> dict[str, jax.Array]:
        outputs = {}
        if model.config.head is not None:
            outputs["logits"] = model(tokens, source)
        if model.config.shape == "encoder-only":
            outputs["hidden"] = model.hidden(tokens)
        if model.config.pooler is not None:
            outputs[_pooled_name(model.config)] = model.pool(tokens, source)
        return outputs

    return model.apply({"params": params}, method=all_outputs)


def _pooled_name(config: ModelConfig) -> str:
    return "tags" if config.pooler.pooling == "none" else "pooled"


# ---------------------------------------------------------------- theirs
def theirs(pair, inputs: Inputs) -> dict[str, np.ndarray]:
    """The same outputs of transformers, by the same names."""
    result = _call(pair.theirs, inputs)
    if pair.config.shape != "encoder-only":
        return {"logits" if pair.config.pooler is None else _pooled_name(pair.config): result.logits.numpy()}
    outputs = {"hidden": _call(pair.theirs.base_model, inputs).last_hidden_state.numpy()}
    if pair.config.head is not None:
        outputs["logits"] = result.logits.numpy()
    if pair.config.pooler is not None:
        pooled = result.logits if pair.config.pooler.num_classes else result.pooler_output
        outputs[_pooled_name(pair.config)] = pooled.numpy()
    return outputs


def _call(model: Any, inputs: Inputs) -> Any:
    """Call a transformers model; all but encoder-decoders get explicit position ids."""
    ids, mask, types = (torch.tensor(part) for part in inputs.text)
    accepted = inspect.signature(model.forward).parameters
    if inputs.source is not None:
        source_ids, source_mask, _ = (torch.tensor(part) for part in inputs.source)
        arguments = {"input_ids": source_ids, "attention_mask": source_mask}
        arguments |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    else:
        arguments = {"input_ids": ids, "attention_mask": mask}
    if not model.config.is_encoder_decoder:
        offset = _position_offset(model)
        arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0) + offset
        if "token_type_ids" in accepted and hasattr(model.config, "type_vocab_size"):
            arguments["token_type_ids"] = types
    assert set(arguments) <= set(accepted)
    with torch.no_grad():
        return model(**arguments)


def _position_offset(model: Any) -> int:
    """The position ids of RoBERTa start after its padding id, also when they are passed as an argument."""
    return model.config.pad_token_id + 1 if model.config.model_type == "roberta" else 0


def assert_equal(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], mask: np.ndarray) -> None:
    """Compare outputs per token at every real position, and outputs per row."""
    assert set(actual) == set(expected)
    for name, array in expected.items():
        real = slice(None) if name == "pooled" else mask.astype(bool)
        assert actual[name].shape == array.shape
        np.testing.assert_allclose(actual[name][real], array[real], rtol=0, atol=TOLERANCE, err_msg=name)


# ---------------------------------------------------------------- all samples
def test_every_format_has_a_sample():
    assert {sample.model_type for sample in SAMPLES.values()} == set(FORMATS)


@pytest.mark.parametrize("name", SAMPLES)
def test_right_padded_rows(name, pair_of):
    pair = pair_of(name)
    inputs = make_inputs(pair, "right")
    assert_equal(ours(pair, inputs), theirs(pair, inputs), inputs.text.mask)


# BART and Marian accept no position ids, and the decoder of a classifier attends to padding before the text.
RIGHT_ONLY = {"t5 classes", "mt5 classes", *(n for n in SAMPLES if SAMPLES[n].model_type in ("bart", "marian"))}


@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in RIGHT_ONLY])
def test_left_padded_rows(name, pair_of):
    """transformers pools the first column even if it is padding."""
    pair = pair_of(name)
    inputs = make_inputs(pair, "left")
    actual, expected = ours(pair, inputs), theirs(pair, inputs)
    if pair.config.pooler is not None and pair.config.pooler.pooling == "first":
        actual.pop("pooled"), expected.pop("pooled")
    assert actual
    assert_equal(actual, expected, inputs.text.mask)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_batch_equals_transformers_row_by_row(name, side, pair_of):
    pair = pair_of(name)
    inputs = make_inputs(pair, side)
    assert_rows_equal(ours(pair, inputs), pair, inputs)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BLOCKED else pytest.mark.slow) for name in SAMPLES]
)
def test_blocked_attention_equals_transformers_row_by_row(name, side, pair_of):
    assert min(*LONG, *LONG_TARGETS) > MIN_BLOCK
    assert max(*LONG, *LONG_TARGETS) <= POSITIONS
    pair = pair_of(name)
    inputs = make_inputs(pair, side, LONG, LONG_TARGETS)
    assert_rows_equal(ours(pair, inputs, attention="blocked"), pair, inputs)


def assert_rows_equal(actual: Mapping[str, np.ndarray], pair, inputs: Inputs) -> None:
    for i, mask in enumerate(inputs.text.mask.astype(bool)):
        row = inputs.row(i)
        outputs = {key: a[i : i + 1] if key == "pooled" else a[i : i + 1, mask] for key, a in actual.items()}
        assert_equal(outputs, theirs(pair, row), row.text.mask)


# ---------------------------------------------------------------- experts and windows
@pytest.mark.parametrize("name", EXPERTS)
def test_every_expert_is_used(name, pair_of):
    """Every layer uses every expert, so that the tests above compare all of them."""
    pair = pair_of(name)
    inputs = make_inputs(pair, "right")
    with torch.no_grad():
        arguments = {"input_ids": torch.tensor(inputs.text.ids), "attention_mask": torch.tensor(inputs.text.mask)}
        routers = pair.theirs(**arguments, output_router_logits=True).router_logits
    moe, real = pair.config.decoder.pattern[0].mlp, inputs.text.mask.reshape(-1).astype(bool)
    assert len(routers) == pair.config.decoder.num_layers
    for logits in routers:
        chosen = logits.reshape(-1, moe.num_experts)[real].topk(moe.top_k).indices
        assert set(chosen.reshape(-1).tolist()) == set(range(moe.num_experts))


@pytest.mark.parametrize("name", WINDOWED)
def test_rows_are_longer_than_windows(name, pair_of):
    config = pair_of(name).config
    windows = [block.attention.window for block in (config.decoder or config.encoder).blocks]
    assert any(windows)
    assert all(window is None or window < sorted(LENGTHS)[1] for window in windows)


def test_lists_of_samples_with_windows_and_experts_are_complete():
    assert {"mistral", "gemma2", "gemma3", "modernbert"} <= set(WINDOWED)
    assert {"mixtral", "qwen3-moe"} <= set(EXPERTS)


# ---------------------------------------------------------------- jf.forward
def test_forward_returns_hidden_states_of_an_encoder_with_token_types(pair_of):
    pair = pair_of("bert pooled")
    inputs = make_inputs(pair, "right")
    assert set(inputs.text.types[inputs.text.mask > 0]) == {0, 1}
    hidden = jf.forward(pair.run, inputs.text.ids, mask=inputs.text.mask, types=inputs.text.types)
    real = inputs.text.mask.astype(bool)
    np.testing.assert_allclose(hidden[real], theirs(pair, inputs)["hidden"][real], atol=TOLERANCE)


def test_forward_returns_logits_of_an_encoder_decoder(pair_of):
    pair = pair_of("bart")
    tokens, source = make_inputs(pair, "left")
    logits = jf.forward(pair.run, tokens.ids, source.ids, tokens.mask, source.mask)
    expected = ours(pair, Inputs(tokens, source))["logits"]
    np.testing.assert_allclose(logits, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "types", "message"),
    [
        ("llama", [[0, 0]], "has no token type embeddings"),
        ("bert pooled", [[0]], r"\(1, 1\) but tokens \(1, 2\)"),
        ("bert pooled", [[0, 2]], "contain 2, but this model has 2 token types: use 0 to 1"),
    ],
)
def test_invalid_token_types_are_rejected(name, types, message, pair_of):
    with pytest.raises(UserError, match=message):
        jf.forward(pair_of(name).run, np.array([[5, 6]]), types=np.array(types))
