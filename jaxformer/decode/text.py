"""Prompts (texts, id lists, conversations) to token ids, and new tokens to text: encoding, checks, stop strings."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxformer.config import ModelConfig
from jaxformer.data.tokenizer import Tokenizer, special_ids
from jaxformer.errors import UserError
from jaxformer.run import Run
from jaxformer.typing import Array

Text = TypeVar("Text", str, Sequence[int])


@dataclass(frozen=True)
class Conversation:
    """A prompt in the form of chat messages; the model generates the reply."""

    messages: Sequence[Mapping[str, Any]]


# ---------------------------------------------------------------- text to ids
def encode_request(run: Run, prompt: Text | Conversation, max_new_tokens: int) -> list[int]:
    """The ids the model reads for a prompt: a decoder's prompt, or the source of an encoder-decoder."""
    has_source = run.config.model.shape == "encoder-decoder"
    if isinstance(prompt, Conversation):
        ids = encode_conversation(run, prompt)
    else:
        ids = (encode_sources if has_source else encode_prompts)(run, [prompt])[0]
    check_context(run, [ids], "prompt", 0 if has_source else max_new_tokens)
    if has_source:
        check_context(run, [[decoder_start_id(run)]], "output", max_new_tokens)
    return ids


def encode_conversation(run: Run, conversation: Conversation) -> list[int]:
    """Encode messages with the chat template, which writes every special token itself."""
    if run.tokenizer is None:
        raise UserError("this model has no tokenizer, so it has no chat template: pass id lists to generate")
    return run.tokenizer.encode_chat(conversation.messages)


def encode_prompts(run: Run, prompts: Sequence[Text]) -> list[list[int]]:
    """Encode prompts of a decoder. Special ids are added to texts, not to id lists; an empty prompt becomes bos."""
    return [row or [bos_id(run)] for row in encode_texts(run, prompts, "encode_prompt")]


def encode_sources(run: Run, sources: Sequence[Text]) -> list[list[int]]:
    """Encode inputs of an encoder. Special ids are added to texts, not to id lists; an empty input becomes eos."""
    return [row or _empty_source(run) for row in encode_texts(run, sources, "encode_source")]


def _empty_source(run: Run) -> list[int]:
    if run.config.model.source_vocab_size is None:
        return list(eos_ids(run)[:1]) or [0]
    # The eos ids of the model are those of the target.
    return [0] if run.tokenizer is None else run.tokenizer.encode_source([""])[0] or [0]


def encode_texts(run: Run, texts: Sequence[Text], method: str) -> list[list[int]]:
    """Encode texts with the tokenizer's `method`; id lists are checked and returned unchanged."""
    if isinstance(texts, str):
        raise UserError(f"expected a list of texts or of id lists, got the text {texts!r}: write [{texts!r}]")
    if all(isinstance(text, str) for text in texts):
        return getattr(require_tokenizer(run), method)(list(texts)) if texts else []
    if any(isinstance(text, str) for text in texts):
        return [encode_texts(run, [text], method)[0] for text in texts]
    rows, model = [_as_integers(row, i) for i, row in enumerate(texts)], run.config.model
    _check_ids(rows, model.encoder_vocab_size if method == "encode_source" else model.vocab_size)
    return rows


def _as_integers(row: object, i: int) -> list[int]:
    try:
        return [operator.index(token) for token in row]  # unlike int(), it rejects 1.5
    except TypeError:
        raise UserError(f"row {i} is neither a text nor a list of token ids: {row!r}") from None


def _check_ids(rows: list[list[int]], vocab_size: int) -> None:
    for i, row in enumerate(rows):
        bad = [t for t in row if not 0 <= t < vocab_size]
        if bad:
            where = f"row {i}: " if len(rows) > 1 else ""
            raise UserError(f"{where}token id {bad[0]} is outside the vocabulary of {vocab_size} ids")


# ---------------------------------------------------------------- tokenizer and special ids
def require_tokenizer(run: Run) -> Tokenizer:
    if run.tokenizer is None:
        raise UserError("this model has no tokenizer: pass id lists instead of texts, and no stop strings")
    return run.tokenizer


def sampleable_vocab_size(run: Run) -> int:
    """Ids below this may be sampled. The embedding may have more rows than the tokenizer has ids."""
    return run.config.model.vocab_size if run.tokenizer is None else run.tokenizer.vocab_size


def bos_id(run: Run) -> int:
    return _require_id(special_ids(run.config.model, run.tokenizer).bos, "bos")


def decoder_start_id(run: Run) -> int:
    """The first token the decoder of an encoder-decoder reads."""
    return _require_id(special_ids(run.config.model, run.tokenizer).start, "decoder_start")


def eos_ids(run: Run) -> tuple[int, ...]:
    """The eos token ids; empty if neither the model nor its tokenizer defines one."""
    return special_ids(run.config.model, run.tokenizer).eos


def _require_id(id: int | None, name: str) -> int:
    if id is None:
        hint = ", or pass non-empty id lists" if name == "bos" else ""
        raise UserError(f"neither the model nor its tokenizer has a {name} token: set model.special.{name}{hint}")
    return id


# ---------------------------------------------------------------- checks
def check_decoder(run: Run, what: str) -> None:
    """Raise if the model cannot generate text; the message says what it can do."""
    model = run.config.model
    if model.decoder is None or model.head is None:
        kind = f"an {model.shape} model" if model.decoder is None else "a model without a head over the vocabulary"
        raise UserError(f"{what}: {kind} does not generate text; {_alternatives(model)}")


def _alternatives(model: ModelConfig) -> str:
    """What can be done with a model that does not generate text."""
    if model.shape == "embedding-only":
        return "jf.embed returns its vectors, and jaxformer export writes them to a file"
    uses = []
    has_classes = model.pooler is not None and model.pooler.num_classes is not None
    if has_classes:
        uses.append("jf.tag labels words" if model.pooler.pooling == "none" else "jf.classify labels texts")
    if model.decoder is None and model.head is not None:
        uses.append("jf.fill_mask predicts masked tokens")
    if model.shape != "encoder-decoder":
        uses.append("jf.embed returns one vector per text")
    uses.append(f"jf.forward returns its {'logits' if has_classes or model.head is not None else 'hidden states'}")
    return ", ".join(uses)


def check_context(run: Run, rows: Sequence[Sequence[int]] | Array, what: str, num_new: int = 0) -> None:
    """Raise if the longest row and `num_new` more tokens exceed the model's context."""
    limit, longest = run.config.model.max_length, max((len(row) for row in rows), default=0)
    if limit is None or longest + num_new <= limit:
        return
    new = f" and max_new_tokens={num_new}" if num_new else ""
    fix = f"shorten the {what} or set max_new_tokens to at most {max(limit - longest, 0)}" if num_new else "shorten it"
    verb = "exceed" if num_new else "exceeds"
    raise UserError(f"{what} of {longest} tokens{new} {verb} the model's context of {limit} tokens: {fix}")


# ---------------------------------------------------------------- ids to text
CONTEXT_TOKENS = 8  # prompt tokens decoded with the new ones, to get the space between them right
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers return for bytes that do not form a complete character."""


def new_text(run: Run, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """The text that new tokens add to the text of the prompt."""
    tokenizer = require_tokenizer(run)
    if run.config.model.shape == "encoder-decoder":
        return tokenizer.decode(ids)
    # Decoded alone, the new tokens would lose a leading space with SentencePiece, and a character that begins in the
    # prompt. So both are decoded together, and the text of the prompt is removed.
    before = [token for token in prompt_ids[-CONTEXT_TOKENS:] if token < tokenizer.vocab_size]
    prompt, whole = tokenizer.decode(before), tokenizer.decode([*before, *ids])
    return whole[len(prompt) :] if whole.startswith(prompt) else tokenizer.decode(ids)


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Start index of the stop string that ends first, or None.

    The earliest end decides, not the earliest start, so that the result does not depend on how many tokens are
    generated between two checks.
    """
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(ends)[1] if ends else None


def settled_length(text: str, stops: Sequence[str]) -> int:
    """Number of characters that later tokens cannot change: excludes a partial character or stop string at the end."""
    complete = text.rstrip(INCOMPLETE)
    partial_stops = [n for stop in stops for n in range(1, len(stop)) if complete.endswith(stop[:n])]
    return len(complete) - max(partial_stops, default=0)


def count_tokens_before(run: Run, prompt_ids: Sequence[int], ids: Sequence[int], end: int) -> int:
    """Number of new tokens whose text lies completely before character `end`."""
    return max(n for n in range(len(ids) + 1) if n == 0 or len(new_text(run, prompt_ids, ids[:n])) <= end)
