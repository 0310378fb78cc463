"""Between what users pass, texts or id lists, and the ids a model reads; and whether the model can serve it at all."""

import operator
from collections.abc import Sequence
from typing import TypeVar

from jaxformer.data.tokenizer import Tokenizer, special_ids
from jaxformer.errors import UserError
from jaxformer.run import Run
from jaxformer.typing import Array

Text = TypeVar("Text", str, Sequence[int])


# ---------------------------------------------------------------- ids
def request_ids(run: Run, prompt: Text, max_new_tokens: int) -> list[int]:
    """What the model reads for a prompt; raises if it does not fit."""
    translates = run.config.model.shape == "encoder-decoder"
    ids = (source_ids if translates else prompt_ids)(run, [prompt])[0]
    check_context(run, [ids], "prompt", 0 if translates else max_new_tokens)
    if translates:
        check_context(run, [[decoder_start(run)]], "output", max_new_tokens)
    return ids


def prompt_ids(run: Run, prompts: Sequence[Text]) -> list[list[int]]:
    """What a decoder continues: the text as its tokenizer opens it, or the ids as they are; never an empty row."""
    return [row or [first_id(run)] for row in token_ids(run, prompts, "encode_prompt")]


def source_ids(run: Run, prompts: Sequence[Text]) -> list[list[int]]:
    """What an encoder reads: the text as its tokenizer closes it, or the ids as they are; never an empty row."""
    return [row or list(eos_ids(run)[:1]) or [0] for row in token_ids(run, prompts, "encode_source")]


def token_ids(run: Run, texts: Sequence[Text], encoding: str = "encode_batch") -> list[list[int]]:
    """Id lists as they are; texts as the tokenizer's method `encoding` reads them."""
    if isinstance(texts, str):
        raise UserError(f"expected a list of texts or of id lists, got the text {texts!r}: write [{texts!r}]")
    if all(is_text(text) for text in texts):
        return getattr(tokenizer_of(run), encoding)(list(texts)) if texts else []
    if any(is_text(text) for text in texts):
        return [token_ids(run, [text], encoding)[0] for text in texts]
    rows = [_whole(row, i) for i, row in enumerate(texts)]
    _check_ids(run, rows)
    return rows


def is_text(prompt: object) -> bool:
    return isinstance(prompt, str)


def tokenizer_of(run: Run) -> Tokenizer:
    if run.tokenizer is None:
        raise UserError("this model has no tokenizer: pass id lists instead of texts, and no stop texts")
    return run.tokenizer


def num_drawable(run: Run) -> int:
    """A model may have more rows in its table than its tokenizer has pieces."""
    return run.config.model.vocab_size if run.tokenizer is None else run.tokenizer.vocab_size


def first_id(run: Run) -> int:
    """What a text opens with."""
    return _known(special_ids(run.config.model, run.tokenizer).bos, "bos")


def decoder_start(run: Run) -> int:
    """What the decoder of an encoder-decoder reads first."""
    return _known(special_ids(run.config.model, run.tokenizer).start, "decoder_start")


def eos_ids(run: Run) -> tuple[int, ...]:
    """Tokens that end a text; none at all where neither the model nor a tokenizer names one."""
    return special_ids(run.config.model, run.tokenizer).eos


def _known(id: int | None, name: str) -> int:
    if id is None:
        raise UserError(f"this model has no tokenizer and no model.special.{name}: pass non-empty id lists")
    return id


def _whole(row: object, i: int) -> list[int]:
    try:
        return [operator.index(token) for token in row]  # unlike int, it takes no 1.5 for a 1
    except TypeError:
        raise UserError(f"row {i} is neither a text nor a list of token ids: {row!r}") from None


# ---------------------------------------------------------------- checks
def check_decoder(run: Run, what: str) -> None:
    if run.config.model.decoder is None:
        raise UserError(f"{what}: an encoder-only model has no decoder; use forward or embed for its hidden states")


def check_context(run: Run, rows: Sequence[Sequence[int]] | Array, what: str, new: int = 0) -> None:
    limit, longest = run.config.model.max_length, max((len(row) for row in rows), default=0)
    if limit is None or longest + new <= limit:
        return
    more = f" and max_new_tokens={new}" if new else ""
    raise UserError(
        f"{what} of {longest} tokens{more} exceed the model's context of {limit} tokens: "
        + (f"shorten the {what} or set max_new_tokens to at most {max(limit - longest, 0)}" if new else "shorten it")
    )


def _check_ids(run: Run, rows: list[list[int]]) -> None:
    vocab_size = run.config.model.vocab_size
    for i, row in enumerate(rows):
        bad = [t for t in row if not 0 <= t < vocab_size]
        if bad:
            where = f"row {i} holds" if len(rows) > 1 else "holds"
            raise UserError(f"{where} token id {bad[0]}, outside the vocabulary of {vocab_size}")
