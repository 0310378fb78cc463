"""Outputs of every sample equal those of transformers: padded on either side, windowed, in several blocks."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch

import jaxformer as jf
from jaxformer.convert import FORMATS, SAMPLES
from jaxformer.convert.sample import POSITIONS, VOCAB
from jaxformer.errors import UserError
from jaxformer.layers import Runtime, Transformer
from jaxformer.ops.attention.blocked import MIN_BLOCK
from jaxformer.typing import Tokens, tokens_from_ids

TOLERANCE = 1e-4
LENGTHS, TARGET_LENGTHS = (24, 17, 5), (9, 14, 6)
LONG, LONG_TARGETS = (140, 75), (66, 90)
# Samples whose attention differs; the others repeat one of them in the blocked kernel.
BLOCKED = {"gpt2", "llama", "mistral", "gemma2", "t5", "bart", "bert", "modernbert"}
EXPERTS = [name for name, sample in SAMPLES.items() if any("experts" in field for field in sample.fields)]
WINDOWED = [name for name, s in SAMPLES.items() if {"sliding_window", "local_attention"} & set(s.fields)]


class Text(NamedTuple):
    """Padded rows; padding holds random ids, which nobody may see."""

    ids: np.ndarray
    mask: np.ndarray
    types: np.ndarray

    def row(self, i: int) -> "Text":
        """Without its padding."""
        return Text(*(part[i : i + 1, self.mask[i].astype(bool)] for part in self))


def text(lengths: tuple[int, ...], side: str, seed: int = 0, num_types: int = 0) -> Text:
    """Rows of these lengths; those of one seed hold the same tokens on whichever side their padding is."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), max(lengths))
    rows, noise = rng.integers(3, VOCAB - 1, (2, *shape))
    types = rng.integers(0, max(num_types, 1), shape)
    from_start = np.arange(shape[1]) < np.array(lengths)[:, None]
    mask = from_start if side == "right" else from_start[:, ::-1]
    ids, kinds = noise.copy(), np.zeros_like(types)
    ids[mask], kinds[mask] = rows[from_start], types[from_start]
    return Text(ids, mask.astype(int), kinds)


class Question(NamedTuple):
    text: Text
    """What the decoder reads; without one, what the encoder does."""
    source: Text | None

    def row(self, i: int) -> "Question":
        return Question(self.text.row(i), self.source and self.source.row(i))


def question(pair, side: str, lengths=LENGTHS, target_lengths=TARGET_LENGTHS) -> Question:
    if pair.config.shape == "encoder-decoder":
        return Question(text(target_lengths, side, seed=1), text(lengths, side))
    return Question(text(lengths, side, num_types=pair.config.embedding.num_types), None)


# ---------------------------------------------------------------- ours
def ours(pair, asked: Question, attention: str = "auto") -> dict[str, np.ndarray]:
    model = Transformer(pair.config, Runtime(attention=attention))
    tokens, source = (part and tokens_from_ids(part.ids, part.mask) for part in asked)
    if pair.config.embedding.num_types:
        tokens = tokens._replace(types=asked.text.types)
    return {name: np.asarray(array) for name, array in _answers(model, pair.run.params, tokens, source).items()}


@partial(jax.jit, static_argnames="model")
def _answers(model: Transformer, params, tokens: Tokens, source: Tokens | None) -> dict[str, jax.Array]:
    def say(model: Transformer) -> dict[str, jax.Array]:
        said = {}
        if model.config.head is not None:
            said["logits"] = model(tokens, source)
        if model.config.shape == "encoder-only":
            said["hidden"] = model.hidden(tokens)
        if model.config.pooler is not None:
            said["pooled"] = model.pool(tokens)
        return said

    return model.apply({"params": params}, method=say)


# ---------------------------------------------------------------- theirs
def theirs(pair, asked: Question) -> dict[str, np.ndarray]:
    """The same under the same names; the rows' positions are named where the model lets us."""
    answer = _ask(pair.theirs, asked)
    if pair.config.shape != "encoder-only":
        return {"logits": answer.logits.numpy()}
    said = {"hidden": _ask(pair.theirs.base_model, asked).last_hidden_state.numpy()}
    if pair.config.head is not None:
        said["logits"] = answer.logits.numpy()
    if pair.config.pooler is not None:
        said["pooled"] = (answer.logits if pair.config.pooler.num_classes else answer.pooler_output).numpy()
    return said


def _ask(model: Any, asked: Question) -> Any:
    ids, mask, types = (torch.tensor(part) for part in asked.text)
    accepted = inspect.signature(model.forward).parameters
    if asked.source is not None:
        source_ids, source_mask, _ = (torch.tensor(part) for part in asked.source)
        given = {"input_ids": source_ids, "attention_mask": source_mask}
        given |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    else:
        given = {"input_ids": ids, "attention_mask": mask}
        offset = _position_offset(model)
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0) + offset
        if "token_type_ids" in accepted and hasattr(model.config, "type_vocab_size"):
            given["token_type_ids"] = types
    assert set(given) <= set(accepted)
    with torch.no_grad():
        return model(**given)


def _position_offset(model: Any) -> int:
    """RoBERTa's positions begin behind that of padding, and so do those one names."""
    return model.config.pad_token_id + 1 if model.config.model_type == "roberta" else 0


def assert_equal(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], mask: np.ndarray) -> None:
    """At every real position, and for the rows as wholes."""
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        real = slice(None) if name == "pooled" else mask.astype(bool)
        assert found[name].shape == array.shape
        np.testing.assert_allclose(found[name][real], array[real], rtol=0, atol=TOLERANCE, err_msg=name)


# ---------------------------------------------------------------- all samples
def test_every_format_has_a_sample():
    assert {sample.model_type for sample in SAMPLES.values()} == set(FORMATS)


@pytest.mark.parametrize("name", SAMPLES)
def test_right_padded_rows(name, pair_of):
    pair = pair_of(name)
    asked = question(pair, "right")
    assert_equal(ours(pair, asked), theirs(pair, asked), asked.text.mask)


@pytest.mark.parametrize("name", [name for name in SAMPLES if SAMPLES[name].model_type not in ("bart", "marian")])
def test_left_padded_rows(name, pair_of):
    """Their sentence vectors read the first column whatever it holds, and the positions of BART cannot be named."""
    pair = pair_of(name)
    asked = question(pair, "left")
    found, wanted = ours(pair, asked), theirs(pair, asked)
    found.pop("pooled", None), wanted.pop("pooled", None)
    assert_equal(found, wanted, asked.text.mask)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_batch_equals_their_rows_one_by_one(name, side, pair_of):
    pair = pair_of(name)
    asked = question(pair, side)
    assert_rows_equal(ours(pair, asked), pair, asked)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BLOCKED else pytest.mark.slow) for name in SAMPLES]
)
def test_long_rows_in_blocks_equal_their_rows(name, side, pair_of):
    assert min(*LONG, *LONG_TARGETS) > MIN_BLOCK
    assert max(*LONG, *LONG_TARGETS) <= POSITIONS
    pair = pair_of(name)
    asked = question(pair, side, LONG, LONG_TARGETS)
    assert_rows_equal(ours(pair, asked, attention="blocked"), pair, asked)


def assert_rows_equal(found: Mapping[str, np.ndarray], pair, asked: Question) -> None:
    for i, mask in enumerate(asked.text.mask.astype(bool)):
        row = asked.row(i)
        mine = {key: a[i : i + 1] if key == "pooled" else a[i : i + 1, mask] for key, a in found.items()}
        assert_equal(mine, theirs(pair, row), row.text.mask)


# ---------------------------------------------------------------- what some of them have
@pytest.mark.parametrize("name", EXPERTS)
def test_every_expert_has_its_say(name, pair_of):
    """In each layer, so that parity is that of all experts."""
    pair = pair_of(name)
    asked = question(pair, "right")
    with torch.no_grad():
        given = {"input_ids": torch.tensor(asked.text.ids), "attention_mask": torch.tensor(asked.text.mask)}
        routers = pair.theirs(**given, output_router_logits=True).router_logits
    moe, real = pair.config.decoder.pattern[0].mlp, asked.text.mask.reshape(-1).astype(bool)
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


def test_samples_with_windows_and_experts_are_known():
    assert {"mistral", "gemma2", "gemma3", "modernbert"} <= set(WINDOWED)
    assert {"mixtral", "qwen3-moe"} <= set(EXPERTS)


# ---------------------------------------------------------------- the public call
def test_forward_gives_the_hidden_states_of_an_encoder_with_types(pair_of):
    pair = pair_of("bert pooled")
    asked = question(pair, "right")
    assert set(asked.text.types[asked.text.mask > 0]) == {0, 1}
    found = jf.forward(pair.run, asked.text.ids, mask=asked.text.mask, types=asked.text.types)
    real = asked.text.mask.astype(bool)
    np.testing.assert_allclose(found[real], theirs(pair, asked)["hidden"][real], atol=TOLERANCE)


def test_forward_gives_the_logits_of_an_encoder_decoder(pair_of):
    pair = pair_of("bart")
    tokens, source = question(pair, "left")
    found = jf.forward(pair.run, tokens.ids, source.ids, tokens.mask, source.mask)
    wanted = ours(pair, Question(tokens, source))["logits"]
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "types", "message"),
    [
        ("llama", [[0, 0]], "has no types"),
        ("bert pooled", [[0]], r"\(1, 1\) but tokens \(1, 2\)"),
        ("bert pooled", [[0, 2]], "hold 2, but this model has 2: use 0 to 1"),
    ],
)
def test_types_that_a_model_does_not_have_are_refused(name, types, message, pair_of):
    with pytest.raises(UserError, match=message):
        jf.forward(pair_of(name).run, np.array([[5, 6]]), types=np.array(types))
