"""Teacher-forced scores, logits and embeddings: full forward passes, without a cache."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.decode.slots import make_tokens, pad_batch_size, pad_rows, use_mesh
from jaxformer.decode.text import (
    Text,
    bos_id,
    check_context,
    check_decoder,
    decoder_start_id,
    encode_prompts,
    encode_sources,
    encode_texts,
)
from jaxformer.errors import UserError
from jaxformer.layers import Transformer
from jaxformer.objectives.base import token_loss
from jaxformer.ops.losses import LossOptions, auto_chunks
from jaxformer.ops.reductions import pool
from jaxformer.run import Run
from jaxformer.typing import Array, Batch, Float, Int, Params, Tokens, tokens_from_ids

BATCH_SIZE = 32


# ---------------------------------------------------------------- scores
def score(
    run: Run, targets: Sequence[Text], inputs: Sequence[Text] | None = None, add_bos: bool = False
) -> list[Float[np.ndarray, " T"]]:
    """Log-probability of every token of each target, given the tokens before it.

    A decoder-only model scores the ids that its tokenizer returns for a prompt, including special ids; id lists are
    scored unchanged. There is one value per token. The first value is NaN, because no token precedes the first one.
    `exp(-numpy.nanmean(values))` is the perplexity that transformers computes.

    An encoder-decoder also needs one input per target. Its decoder starts from the decoder start token, so no value is
    NaN. Target texts are encoded without special ids; to score eos as well, pass ids.

    A prefix language model may have inputs too: each is the prompt, read in both directions, that its target follows.

    Args:
      add_bos: prepend bos to each target of a decoder-only model, so that its first token is scored too. There is no
        value for bos itself. If the tokenizer adds bos already, the model reads it twice.
    """
    check_decoder(run, "score")
    shape = run.config.model.shape
    has_source = shape == "encoder-decoder"
    has_prompt = run.config.model.prefix and inputs is not None
    if (inputs is not None) != has_source and not has_prompt:
        need = "needs inputs, one per target" if inputs is None else "takes no inputs; leave them out"
        raise UserError(f"score: this {shape} model {need}")
    if add_bos and inputs is not None:
        start = "an encoder-decoder starts from its decoder start token" if has_source else "the inputs come first"
        raise UserError(f"score: add_bos=True: {start}; leave add_bos out")
    ids = encode_texts(run, targets, "encode_prompt" if inputs is None else "encode_batch")
    sources = encode_sources(run, inputs) if has_source else None
    prompts = encode_prompts(run, inputs) if has_prompt else None
    for given in (sources, prompts):
        if given is not None and len(given) != len(ids):
            raise UserError(f"score: {len(ids)} targets but {len(given)} inputs: give one input per target")
    check_context(run, ids if prompts is None else [a + b for a, b in zip(prompts, ids, strict=True)], "target")
    check_context(run, sources or [], "input")
    if has_source:
        first_id = decoder_start_id(run)
    else:
        first_id = bos_id(run) if add_bos else None
    scores: list[Float[np.ndarray, " T"]] = []
    for start in range(0, len(ids), BATCH_SIZE):
        batch = slice(start, start + BATCH_SIZE)
        if prompts is None:
            scores += _score_batch(run, ids[batch], None if sources is None else sources[batch], first_id)
        else:
            scores += _score_after_prompts(run, ids[batch], prompts[batch])
    return scores


def _score_after_prompts(run: Run, ids: list[list[int]], prompts: list[list[int]]) -> list[Float[np.ndarray, " T"]]:
    """Scores of targets that follow the prompts of a prefix language model."""
    rows, size = [a + b for a, b in zip(prompts, ids, strict=True)], pad_batch_size(run, len(ids))
    previous = make_tokens([row[:-1] for row in rows], size)
    length = previous.ids.shape[1]
    is_prompt_BT = pad_rows([[1] * min(len(prompt), length) for prompt in prompts], size, length) > 0
    targets_BT = pad_rows([row[1:] for row in rows], size, length)
    with use_mesh(run):
        tokens = previous._replace(prefix=jnp.asarray(is_prompt_BT) & (previous.segments > 0))
        scores_BT = np.asarray(_log_probs(run.model, run.params, tokens, targets_BT, None))
    ends = [(len(prompt) - 1, len(row) - 1) for prompt, row in zip(prompts, rows, strict=True)]
    return [scores_BT[i, start:end] for i, (start, end) in enumerate(ends)]


def _score_batch(
    run: Run, ids: list[list[int]], sources: list[list[int]] | None, first_id: int | None
) -> list[Float[np.ndarray, " T"]]:
    """Scores of one batch. `first_id` is prepended to every row; if it is None, the first token gets NaN."""
    # The model reads every token but the last and predicts every token but the first.
    rows = ids if first_id is None else [[first_id, *row] if row else [] for row in ids]
    size = pad_batch_size(run, len(rows))
    previous = make_tokens([row[:-1] for row in rows], size)
    targets_BT = pad_rows([row[1:] for row in rows], size, previous.ids.shape[1])
    source = None if sources is None else make_tokens(sources, size)
    with use_mesh(run):
        scores_BT = np.asarray(_log_probs(run.model, run.params, previous, targets_BT, source))
    unscored = [np.nan] if first_id is None else []
    return [
        np.concatenate([unscored[: len(row)], scores_BT[i, : max(len(row) - 1, 0)]]).astype(scores_BT.dtype)
        for i, row in enumerate(rows)
    ]


@partial(jax.jit, static_argnames="model")
def _log_probs(
    model: Transformer, params: Params, previous: Tokens, targets_BT: Array, source: Tokens | None
) -> Float[Array, "B T"]:
    batch = Batch(previous, targets_BT, jnp.ones(targets_BT.shape, jnp.float32), source)
    # The chunked loss of training, so that the logits [B, T, V] of a large vocabulary are never in memory at once.
    options = LossOptions(num_chunks=auto_chunks(*targets_BT.shape, model.config.vocab_size))
    return -token_loss(model, params, batch, options)[1].nll_BT


# ---------------------------------------------------------------- logits
def forward(
    run: Run,
    tokens: Int[Array, "B T"],
    inputs: Int[Array, "B S"] | None = None,
    mask: Int[Array, "B T"] | None = None,
    inputs_mask: Int[Array, "B S"] | None = None,
    types: Int[Array, "B T"] | None = None,
    prefix: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T V"]:
    """Logits of every position, or hidden states [B, T, D] of a model without a head. Masks are 1 for real tokens.

    A model with a class head returns class logits instead: [B, C], or [B, T, C] if it labels tokens.

    Args:
      inputs: the source of an encoder-decoder.
      types: token type ids, for models that have token type embeddings; None means type 0 for every token.
      prefix: 1 for the tokens that a prefix language model reads in both directions; None means no token.
    """
    shape = run.config.model.shape
    if (inputs is not None) != (shape == "encoder-decoder"):
        raise UserError(f"forward: this {shape} model {'needs' if inputs is None else 'takes no'} inputs")
    target = tokens_from_ids(jnp.asarray(tokens), None if mask is None else jnp.asarray(mask))
    check_context(run, target.ids, "row")
    if types is not None:
        _check_types(run, target.ids, np.asarray(types))
        target = target._replace(types=jnp.asarray(types))
    if prefix is not None:
        target = target._replace(prefix=_check_prefix(run, target.ids, np.asarray(prefix)))
    source = None
    if inputs is not None:
        source = tokens_from_ids(jnp.asarray(inputs), None if inputs_mask is None else jnp.asarray(inputs_mask))
        check_context(run, source.ids, "input")
    with use_mesh(run):
        return _forward(run.model, run.params, target, source)


@partial(jax.jit, static_argnames="model")
def _forward(model: Transformer, params: Params, target: Tokens, source: Tokens | None) -> Array:
    pooler = model.config.pooler
    has_classes = pooler is not None and pooler.num_classes is not None
    return model.apply({"params": params}, target, source, method="pool" if has_classes else "__call__")


def _check_types(run: Run, ids: Array, types: np.ndarray) -> None:
    num_types = run.config.model.embedding.num_types
    if not num_types:
        raise UserError("forward: this model has no token type embeddings; leave types out")
    if types.shape != ids.shape:
        raise UserError(f"forward: types have shape {types.shape} but tokens {ids.shape}: give one type per token")
    bad = types[(types < 0) | (types >= num_types)]
    if bad.size:
        raise UserError(
            f"forward: types contain {bad[0]}, but this model has {num_types} token types: use 0 to {num_types - 1}"
        )


def _check_prefix(run: Run, ids: Array, prefix: np.ndarray) -> Array:
    if not run.config.model.prefix:
        raise UserError("forward: this model is no prefix language model (model.prefix=false); leave prefix out")
    if prefix.shape != ids.shape:
        raise UserError(f"forward: prefix has shape {prefix.shape} but tokens {ids.shape}: give one value per token")
    return jnp.asarray(prefix) != 0


# ---------------------------------------------------------------- embeddings
POOLINGS = {"mean": "mean", "cls": "first", "last": "last"}


def embed(run: Run, texts: Sequence[Text], pooling: str = "mean", normalize: bool = True) -> Float[np.ndarray, "N D"]:
    """One embedding vector per text, pooled from the hidden states of an encoder or decoder, or from word vectors.

    Args:
      pooling: the "mean" over the tokens of a text, its first token ("cls"), or its "last" token.
      normalize: scale every vector to length 1, so that dot products are cosine similarities.
    """
    shape = run.config.model.shape
    if shape == "encoder-decoder":
        raise UserError("embed: an encoder-decoder is not supported; use an encoder-only or decoder-only model")
    if pooling not in POOLINGS:
        raise UserError(f"pooling={pooling!r}: must be one of {', '.join(POOLINGS)}")
    if shape == "embedding-only":
        ids = encode_texts(run, texts, "encode_batch")
    else:
        ids = (encode_sources if shape == "encoder-only" else encode_prompts)(run, texts)
    check_context(run, ids, "text")
    vectors = [np.zeros((0, run.config.model.embed_dim), np.float32)]
    for start in range(0, len(ids), BATCH_SIZE):
        rows = ids[start : start + BATCH_SIZE]
        tokens = make_tokens(rows, pad_batch_size(run, len(rows)))
        if run.config.model.prefix:
            tokens = tokens._replace(prefix=tokens.segments > 0)
        with use_mesh(run):
            x_BD = _embed(run.model, run.params, tokens, pooling=POOLINGS[pooling], normalize=normalize)
        vectors.append(np.asarray(x_BD)[: len(rows)])
    return np.concatenate(vectors)


@partial(jax.jit, static_argnames=("model", "pooling", "normalize"))
def _embed(model: Transformer, params: Params, tokens: Tokens, *, pooling: str, normalize: bool) -> Array:
    hidden_BTD = model.apply({"params": params}, tokens, method="hidden")
    x_BD = pool(hidden_BTD, tokens.segments, pooling).astype(jnp.float32)
    return x_BD / jnp.maximum(jnp.linalg.norm(x_BD, axis=-1, keepdims=True), 1e-12) if normalize else x_BD
