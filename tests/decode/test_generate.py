"""The decode loop against the full forward pass, and in batches of different composition."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Request, Run, complete, forward, generate
from jaxformer.decode import loop
from jaxformer.decode.loop import Prompt, advance, prefill, token_step
from jaxformer.decode.sampling import SamplingConfig
from jaxformer.decode.slots import DecodeRequest, Slots, make_shape
from jaxformer.errors import UserError
from jaxformer.ops.cpu import token_loop_options
from jaxformer.typing import tokens_from_ids

PROMPTS = ["a", "def parse(", "some longer text", "b\nc"]


WIDTH = 32  # every reference row is padded to it, so that the full forward compiles once per model


def _padded(ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    row = np.zeros((1, WIDTH), np.int32)
    row[0, : len(ids)] = ids
    return row, (np.arange(WIDTH) < len(ids))[None]


def _source(run, text: str) -> dict[str, np.ndarray]:
    """Arguments of `forward` for the prompt of an encoder-decoder, as `generate` reads it."""
    if run.config.model.encoder is None:
        return {}
    inputs, mask = _padded([*run.tokenizer.encode(text), run.tokenizer.eos_id])
    return {"inputs": inputs, "inputs_mask": mask}


def _greedy_by_forward(run, text: str, count: int) -> list[int]:
    """Greedy decoding without a cache: a full forward pass for every token."""
    row = [run.tokenizer.bos_id] + ([] if run.config.model.encoder is not None else run.tokenizer.encode(text))
    new = []
    for _ in range(count):
        ids, mask = _padded(row + new)
        logits = forward(run, ids, mask=mask, **_source(run, text))[0, len(row + new) - 1]
        new.append(int(np.argmax(logits[: run.tokenizer.vocab_size])))
        if new[-1] == run.tokenizer.eos_id:
            return new[:-1]
    return new


def _ids(run, text: str) -> list[int]:
    """The ids that `generate` reads for the text."""
    ids = run.tokenizer.encode(text)
    return [*ids, run.tokenizer.eos_id] if run.config.model.encoder is not None else [run.tokenizer.bos_id, *ids]


def test_cached_logits_equal_the_full_forward(run):
    """Three rows of different lengths, fed token by token after a prefill."""
    rng = np.random.default_rng(0)
    ids, lengths = rng.integers(3, 250, (3, 12)).astype(np.int32), np.array([5, 2, 7], np.int32)
    inputs = rng.integers(3, 250, (3, 9)).astype(np.int32) if run.config.model.encoder is not None else None
    source = None if inputs is None else tokens_from_ids(jnp.asarray(inputs))
    expected = forward(run, ids, inputs=inputs)
    prompt = Prompt(ids[:, :7], lengths, source)
    model, params = run.decoding
    rows, logits_BV = prefill(model, params, prompt, capacity=12)
    step = jax.jit(token_step, static_argnums=0)
    for _ in range(5):
        for i in range(3):
            np.testing.assert_allclose(logits_BV[i], expected[i, rows.lengths_B[i] - 1], atol=1e-5)
        token_B = jnp.asarray(ids)[jnp.arange(3), rows.lengths_B]
        rows, logits_BV = step(model, params, rows, token_B)


def test_greedy_equals_decoding_without_a_cache(run):
    outputs = generate(run, [_ids(run, text) for text in PROMPTS], max_new_tokens=12)
    assert outputs == [_greedy_by_forward(run, text, 12) for text in PROMPTS]


@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.slow), {"temperature": 1.2, "top_k": 20, "top_p": 0.9}]
)
def test_a_row_does_not_depend_on_its_batch(run, settings):
    ids = [_ids(run, text) for text in PROMPTS]
    together = generate(run, ids, max_new_tokens=12, seed=3, **settings)
    assert together[:2] == [generate(run, [row], max_new_tokens=12, seed=3, **settings)[0] for row in ids[:2]]
    assert together[::-1] == generate(run, ids[::-1], max_new_tokens=12, seed=3, **settings)


def test_equal_seeds_repeat_and_different_seeds_differ(decoder_run):
    first, again, other = (generate(decoder_run, ["abc"], 20, temperature=1.0, seed=s)[0] for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_rows_stop_at_their_own_eos(decoder_run):
    """One row must end with its third token, the other must not end at all."""
    eos = decoder_run.tokenizer.eos_id
    ends = Request([1, 70], forced_last=eos, max_new_tokens=3, banned=[eos])
    continues = Request([1, 71], banned=[eos])
    completions = [each[0] for each in complete(decoder_run, [ends, continues], max_new_tokens=6)]
    assert [(len(c.ids), c.finish) for c in completions] == [(2, "eos"), (6, "length")]


def test_outputs_are_cut_before_eos(decoder_run):
    """At a high temperature some rows sample eos early; their ids end there and do not contain it."""
    outputs = generate(decoder_run, [[i] for i in range(3, 67)], max_new_tokens=40, temperature=50.0)
    assert any(len(row) < 40 for row in outputs)
    assert all(decoder_run.tokenizer.eos_id not in row for row in outputs)


def test_ids_beyond_the_tokenizer_are_never_sampled(decoder_run):
    outputs = generate(decoder_run, [[5]] * 4 + [[6], [7]], max_new_tokens=40, temperature=50.0)
    assert max(max(row) for row in outputs if row) < decoder_run.tokenizer.vocab_size


def test_zero_new_tokens(run):
    assert generate(run, PROMPTS, max_new_tokens=0) == [""] * 4


def test_empty_prompt_and_no_prompts(run):
    assert isinstance(generate(run, [""], max_new_tokens=3)[0], str)
    assert generate(run, [], max_new_tokens=3) == []


def test_prompt_of_the_whole_context(decoder_run):
    ids = [5] * 63
    assert len(generate(decoder_run, [ids], max_new_tokens=1)[0]) <= 1
    with pytest.raises(UserError, match=r"prompt of 63 tokens and max_new_tokens=2 exceed.*context of 64.*at most 1"):
        generate(decoder_run, [ids], max_new_tokens=2)
    with pytest.raises(UserError, match=r"prompt of 65 tokens"):
        generate(decoder_run, [[5] * 65], max_new_tokens=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"num_beams": 0}, "num_beams=0"),
        ({"num_beams": 4, "temperature": 1.0}, "num_beams=4 with temperature=1.0"),
        ({"num_beams": 4, "early_stopping": "maybe"}, "early_stopping='maybe'"),
    ],
)
def test_bad_settings_are_named(decoder_run, settings, message):
    with pytest.raises(UserError, match=message):
        generate(decoder_run, ["a"], **settings)


def test_bad_prompts_are_named(decoder_run):
    with pytest.raises(UserError, match="list of texts"):
        generate(decoder_run, "abc")
    with pytest.raises(UserError, match="prompt 1: token id 264"):
        generate(decoder_run, [[1], [264]], max_new_tokens=2)


@pytest.mark.parametrize(
    ("num_rows", "cache"),
    [(1, "dtype"), (8, "int8")]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "dtype"), (8, "dtype"), (1, "int8"), (2, "int8"))],
)
def test_the_loop_updates_its_cache_in_place(run, num_rows, cache):
    """The loop must not copy a whole cache: every token would then cost a read and a write of all of it."""
    runtime = replace(run.model.runtime, cache=cache)
    run = Run(run.config, run.model.clone(runtime=runtime), run.params, run.tokenizer, 0)
    requests = [DecodeRequest([5] * 16, SamplingConfig(max_new_tokens=32))] * num_rows
    slots = Slots(run, make_shape(run, requests, num_rows))
    slots.add(requests)
    state, settings = slots._state, slots._settings
    options = {"vocab_size": run.tokenizer.vocab_size}
    model_and_params = run.decoding_alone if num_rows == 1 else run.decoding
    compiled = advance.lower(*model_and_params, state, settings, np.int32(9), np.int32(9), **options).compile()
    stored = jax.tree.leaves([layer.attention for layer in state.model_state.caches])
    sizes = {leaf.size for leaf in stored if leaf.ndim == 4 and leaf.shape[-1] > 1}
    copies = [line.strip() for line in compiled.as_text().splitlines() if _copies(line, stored[0].dtype, sizes)]
    assert not copies
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(leaf.nbytes for leaf in stored)


@pytest.mark.parametrize(("platform", "is_cpu"), [("cpu", True), ("tpu", False)])
def test_compiler_options_follow_the_platform(platform, is_cpu):
    """They do not follow the backend of the process: a program may be compiled for devices that are not attached."""
    options = dict(token_loop_options(platform, num_rows=8, quantized=False))
    assert list(options) == (["xla_cpu_experimental_ynn_fusion_type"] if is_cpu else [])
    assert not token_loop_options(platform, num_rows=128, quantized=False)


def test_decode_does_not_query_devices():
    for file in sorted(Path(loop.__file__).parent.glob("*.py")):
        match = re.search(r"jax\.(local_)?(devices|device_count|default_backend)\b", file.read_text())
        assert match is None, f"{file.name} calls {match[0]}"


def _copies(line: str, dtype: jnp.dtype, sizes: set[int]) -> bool:
    """Whether an instruction copies or transposes an array of one of the sizes."""
    match = re.search(r"= (\w+)\[([\d,]+)\]\S* (copy|transpose)\(", line)
    kind = {"float32": "f32", "int8": "s8"}[str(dtype)]
    return match is not None and match[1] == kind and int(np.prod([int(n) for n in match[2].split(",")])) in sizes


def test_forward_ignores_padding(run):
    ids, rng = np.random.default_rng(0).integers(3, 250, (2, 6)), np.random.default_rng(1)
    inputs = rng.integers(3, 250, (2, 5)) if run.config.model.encoder is not None else None
    plain = forward(run, ids, inputs=inputs)
    padded = np.pad(ids, ((0, 0), (3, 2)))
    mask = np.pad(np.ones_like(ids), ((0, 0), (3, 2)))
    more = {} if inputs is None else {
        "inputs": np.pad(inputs, ((0, 0), (1, 2))), "inputs_mask": np.pad(np.ones_like(inputs), ((0, 0), (1, 2)))
    }  # fmt: skip
    np.testing.assert_allclose(forward(run, padded, mask=mask, **more)[:, 3:9], plain, atol=1e-5)
