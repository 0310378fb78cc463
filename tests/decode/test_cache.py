"""KV caches: ring caches, prefill in chunks, int8 keys and values."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer import Run, forward, generate, search
from jaxformer.config import AttentionConfig, BlockConfig, MlpConfig, ModelConfig, NormConfig, Rope, StackConfig
from jaxformer.decode import slots
from jaxformer.decode.cache import FullCache, Int8Array, RingCache, make_caches
from jaxformer.decode.loop import ModelState, Prompt, prefill, prefill_chunk, token_step
from jaxformer.decode.slots import make_prompt, prefill_in_chunks
from jaxformer.errors import UserError
from jaxformer.layers import Runtime
from jaxformer.layers.attention import KeysValues
from jaxformer.ops.attention import AttentionInputs, AttentionParams, attend
from jaxformer.typing import tokens_from_ids

WINDOW = 4  # of the local layers of `ring_run`
LENGTHS = np.array([19, 3, 11, 1], np.int32)
IDS = np.random.default_rng(0).integers(3, 250, (4, 20)).astype(np.int32)
LATER = np.random.default_rng(1).integers(3, 250, (9, 4)).astype(np.int32)
CAPACITY = 32

step = jax.jit(token_step, static_argnums=0)


def with_cache(run: Run, cache: str) -> Run:
    model = run.model.clone(runtime=replace(run.model.runtime, cache=cache))
    return Run(run.config, model, run.params, run.tokenizer, 0)


# ---------------------------------------------------------------- ring caches
@pytest.mark.parametrize("length", [5, 32, 10_000])
def test_a_ring_is_as_large_as_its_window_whatever_the_length(ring_run, length):
    caches = jax.eval_shape(lambda: make_caches(ring_run.config.model, 3, length, Runtime()))
    kinds = [type(layer.attention) for layer in caches]
    assert kinds == [RingCache, FullCache, RingCache]
    shapes = [{leaf.shape for leaf in jax.tree.leaves(layer)} for layer in caches]
    assert shapes == [{(3, 2, WINDOW, 8)}, {(3, 2, length, 8)}, {(3, 2, WINDOW, 8)}]


@pytest.mark.parametrize("length", [3, 4])
def test_rows_within_the_window_need_no_ring(ring_run, length):
    caches = jax.eval_shape(lambda: make_caches(ring_run.config.model, 3, length, Runtime()))
    assert {type(layer.attention) for layer in caches} == {FullCache}


def _prefill_in_chunks(run: Run, ids: np.ndarray, lengths: np.ndarray, size: int) -> tuple[ModelState, jax.Array]:
    """Prefill the prompts `size` tokens at a time."""
    model, params = run.decoding
    first = Prompt(ids[:, :size], np.minimum(lengths, size))
    rows, logits_BV = prefill(model, params, first, capacity=CAPACITY)
    for start in range(size, ids.shape[1], size):
        part, left = ids[:, start : start + size], np.clip(lengths - start, 0, size)
        rows, logits_BV = prefill_chunk(model, params, rows, logits_BV, part, left)
    return rows, logits_BV


@pytest.mark.parametrize("size", [20, WINDOW + 1, pytest.param(WINDOW, marks=pytest.mark.slow), 2])
def test_chunks_of_any_size_give_the_logits_of_the_full_forward(ring_run, size):
    """Rows that end in an earlier chunk do not change; then every row wraps around the ring twice."""
    model, params = ring_run.decoding
    rows, logits_BV = _prefill_in_chunks(ring_run, IDS, LENGTHS, size)
    assert np.array_equal(rows.lengths_B, LENGTHS)
    wanted_BTV = _full_forward_logits(ring_run)
    for token_B in LATER:
        _check_close(logits_BV, wanted_BTV[np.arange(4), rows.lengths_B - 1])
        rows, logits_BV = step(model, params, rows, token_B)


def _full_forward_logits(run: Run) -> np.ndarray:
    """Logits of the full forward pass over the prompts and the later tokens."""
    ids = np.zeros((4, CAPACITY), np.int32)
    for i, length in enumerate(LENGTHS):
        row = [*IDS[i, :length], *LATER[:, i]]
        ids[i, : len(row)] = row
    return np.asarray(forward(run, ids, mask=np.arange(CAPACITY) < LENGTHS[:, None] + len(LATER)))


def _check_close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("size", [WINDOW + 1, pytest.param(2, marks=pytest.mark.slow)])
def test_int8_chunks_equal_one_prefill(ring_run, size):
    """The order of summation may change the rounding of a value by one step."""
    run = with_cache(ring_run, "int8")
    model, params = run.decoding
    (rows, logits_BV), (whole, wanted_BV) = (
        _prefill_in_chunks(run, IDS, LENGTHS, size),
        _prefill_in_chunks(run, IDS, LENGTHS, 20),
    )
    for token_B in LATER:
        _check_close(logits_BV, wanted_BV, 1e-4)
        rows, logits_BV = step(model, params, rows, token_B)
        whole, wanted_BV = step(model, params, whole, token_B)


@pytest.mark.parametrize("cache", ["dtype", "int8"])
def test_one_token_at_a_time_equals_one_prefill(ring_run, cache):
    run = with_cache(ring_run, cache)
    lengths = np.full(4, 20, np.int32)
    wanted_BV = _prefill_in_chunks(run, IDS, lengths, 20)[1]
    rows, logits_BV = prefill(*run.decoding, Prompt(IDS[:, :1], np.ones_like(lengths)), capacity=CAPACITY)
    for token_B in IDS.T[1:]:
        rows, logits_BV = step(*run.decoding, rows, token_B)
    _check_close(logits_BV, wanted_BV, 1e-5 if cache == "dtype" else 1e-4)


def test_a_ring_keeps_the_last_tokens_of_each_row_and_no_padding():
    """Every vector holds its token index: entry i must hold the last index that is i modulo the size."""
    empty = jnp.full((3, 1, 5, 1), -1.0)
    ring, starts = RingCache(empty, empty, 5), np.zeros(3, np.int32)
    for lengths in ([2, 7, 0], [1, 0, 12], [6, 4, 3], [0, 0, 1]):
        index = starts[:, None] + np.arange(12)
        new = np.where(np.arange(12) < np.array(lengths)[:, None], index, 99)[:, None, :, None].astype(np.float32)
        ring, _, _ = ring.extend(KeysValues(new, new), jnp.asarray(starts), jnp.asarray(lengths), 5)
        starts = starts + np.array(lengths, np.int32)
        for row, end in enumerate(starts):
            wanted = np.full(5, -1.0)
            for i in range(end):
                wanted[i % 5] = i
            np.testing.assert_array_equal(ring.k[row, 0, :, 0], wanted)
            np.testing.assert_array_equal(ring.v[row, 0, :, 0], wanted)


# ---------------------------------------------------------------- prefill in chunks
def _logits(run: Run, prompts: list[list[int]], capacity: int) -> np.ndarray:
    return np.asarray(prefill_in_chunks(*run.decoding, make_prompt(run, prompts, len(prompts)), capacity)[1])


@pytest.mark.parametrize("part", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_prefill_in_chunks_does_not_change_the_output(run, part, monkeypatch):
    """Rows end within the first chunk, at its end, and near a capacity that is not a multiple of the chunk size."""
    prompts = [[*IDS[i], *IDS[i]][:n] for i, n in enumerate((3, 8, 20, 23))]
    plain = _logits(run, prompts, 24), generate(run, prompts, 1), generate(run, prompts, 8)
    monkeypatch.setattr(slots, "PREFILL_CHUNK", part)
    _check_close(_logits(run, prompts, 24), plain[0])
    assert (generate(run, prompts, 1), generate(run, prompts, 8)) == plain[1:]


def test_beams_start_from_a_prefill_in_chunks(decoder_run, monkeypatch):
    prompts = [IDS[0, :19].tolist(), IDS[1, :3].tolist()]
    whole = search(decoder_run, prompts, 4, num_beams=2)
    monkeypatch.setattr(slots, "PREFILL_CHUNK", 8)
    for actual, expected in zip(search(decoder_run, prompts, 4, num_beams=2), whole, strict=True):
        assert [each.output for each in actual] == [each.output for each in expected]
        np.testing.assert_allclose([each.score for each in actual], [each.score for each in expected], atol=1e-5)


def test_a_chunk_needs_memory_only_for_its_own_attention_scores(ring_run):
    """Besides the donated cache, a chunk needs its attention scores over all keys, and a copy of keys and values."""
    model, params = ring_run.decoding
    B, T, layer = 2, 32, model.config.decoder.blocks[1].attention

    def temporary(capacity: int) -> int:
        shapes = jax.eval_shape(
            lambda: ModelState(make_caches(model.config, B, capacity, model.runtime), jnp.zeros(B, jnp.int32), None)
        )
        logits_BV = jax.ShapeDtypeStruct((B, model.config.vocab_size), jnp.float32)
        ids_BT, lengths_B = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((B, T), (B,)))
        compiled = prefill_chunk.lower(model, params, shapes, logits_BV, ids_BT, lengths_B).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
        return memory.temp_size_in_bytes

    scores = 4 * B * layer.num_heads * T  # bytes per key, before and after the softmax
    stored = 4 * B * layer.kv_heads * layer.head_dim  # bytes of a key, and of a value
    assert temporary(1024) - temporary(256) <= (1024 - 256) * 2 * (scores + stored)


# ---------------------------------------------------------------- int8
def _rounded(x_BKSH: np.ndarray) -> np.ndarray:
    """Quantized to int8 and back, with one scale per vector."""
    unit = np.abs(x_BKSH).max(axis=-1, keepdims=True) / 127
    return np.round(x_BKSH / np.where(unit > 0, unit, 1)) * unit


def test_int8_has_one_scale_per_head_and_token(ring_run):
    caches = jax.eval_shape(lambda: make_caches(ring_run.config.model, 3, 16, Runtime(cache="int8")))
    for layer, size in zip(caches, (WINDOW, 16, WINDOW), strict=True):
        for part in (layer.attention.k, layer.attention.v):
            assert isinstance(part, Int8Array)
            assert (part.values.shape, part.values.dtype) == ((3, 2, size, 8), jnp.int8)
            assert (part.scales.shape, part.scales.dtype) == ((3, 2, size, 1), jnp.float32)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_attention_over_int8_is_attention_over_rounded_keys_and_values(window):
    """A softmax over all rounded keys in NumPy, against a cache that is filled in chunks and token by token."""
    rng, T = np.random.default_rng(0), 9
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((2, T, 4, 8), (2, 2, T, 8), (2, 2, T, 8)))
    k[0, 0, 2] = 0.0  # its scale is 0
    config = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, causal=True, position=Rope(), window=window)
    outputs = []
    cache = make_caches(_one_layer(config), 2, 16, Runtime(cache="int8"))[0].attention
    for start, stop in ((0, 4), (4, 6), *((i, i + 1) for i in range(6, T))):
        new = KeysValues(jnp.asarray(k[:, :, start:stop]), jnp.asarray(v[:, :, start:stop]))
        starts, lengths = jnp.full(2, start), jnp.full(2, stop - start)
        cache, seen, mask = cache.extend(new, starts, lengths, window)
        params = AttentionParams(scale=0.5)
        inputs = AttentionInputs(jnp.asarray(q[:, start:stop]), seen.k_BKSH, seen.v_BKSH, mask, params)
        outputs.append(attend(inputs, platform="cpu"))
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), _attention(q, k, v, window), rtol=0, atol=1e-5)


def _one_layer(attention: AttentionConfig) -> ModelConfig:
    block = BlockConfig(attention=attention, mlp=MlpConfig(dim=8, activation="silu"), norm=NormConfig(kind="rms"))
    return ModelConfig(vocab_size=8, embed_dim=8, decoder=StackConfig(num_layers=1, pattern=(block,)))


def _attention(q_BTNH: np.ndarray, k_BKSH: np.ndarray, v_BKSH: np.ndarray, window: int | None) -> np.ndarray:
    k_BNSH, v_BNSH = (np.repeat(_rounded(x.astype(np.float64)), 2, axis=1) for x in (k_BKSH, v_BKSH))
    scores_BNTS = 0.5 * np.einsum("BTNH,BNSH->BNTS", q_BTNH, k_BNSH)
    distance_TS = np.arange(k_BNSH.shape[2])[:, None] - np.arange(k_BNSH.shape[2])
    seen_TS = (distance_TS >= 0) & (distance_TS < (window or 99))
    p_BNTS = np.where(seen_TS, np.exp(scores_BNTS), 0.0)
    return np.einsum("BNTS,BNSH->BTNH", p_BNTS / p_BNTS.sum(axis=-1, keepdims=True), v_BNSH)


def test_int8_logits_are_close_to_float_logits(run):
    """Mean distances are 0.002 to 0.03 of the logits' standard deviation, with weights larger than trained ones."""
    source = tokens_from_ids(jnp.asarray(IDS[:, :9])) if run.config.model.encoder is not None else None
    prompt = Prompt(IDS, LENGTHS, source)
    plain, rounded = (
        np.asarray(prefill(*with_cache(run, kind).decoding, prompt, capacity=CAPACITY)[1]) for kind in ("dtype", "int8")
    )
    distance = np.abs(rounded - plain).mean() / plain.std()
    assert 0.0 < distance < 0.05


@pytest.mark.slow
def test_int8_rows_do_not_depend_on_their_batch(ring_run):
    run = with_cache(ring_run, "int8")
    prompts = [IDS[i, :n].tolist() for i, n in enumerate((3, 8, 13, 16))]
    settings = {"max_new_tokens": 8, "temperature": 1.0, "seed": 2}
    assert generate(run, prompts, **settings) == [generate(run, [row], **settings)[0] for row in prompts]


def test_unknown_cache_formats_are_rejected(tmp_path):
    with pytest.raises(UserError, match=r"cache='int4': must be 'int8' or none"):
        jf.load(tmp_path, cache="int4")
