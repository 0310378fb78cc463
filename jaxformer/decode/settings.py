"""What a request may ask for: checked one by one, then batched into `ops.sampling.SamplingParams`."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from jaxformer.errors import UserError
from jaxformer.ops.sampling import MIN_TEMPERATURE, SamplingParams


@dataclass(frozen=True)
class SamplingConfig:
    """How the tokens of one request are chosen, and what is told of them; none is off. A bad value raises here."""

    temperature: float = 0.0  # 0 takes the likeliest token, and then the next four do not matter
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None  # over prompt and new tokens
    frequency_penalty: float | None = None  # over new tokens
    presence_penalty: float | None = None  # over new tokens
    no_repeat_ngram: int | None = None
    min_new_tokens: int = 0
    max_new_tokens: int = 64
    forced_first: int | None = None  # say the target language of a translation
    forced_last: int | None = None  # as the max_new_tokens-th token
    bias: Mapping[int, float] | None = None  # token id -> what is added to its logit
    banned: Sequence[int] = ()  # token ids never chosen
    stop: Sequence[str] = ()  # the output ends before the first of these texts
    seed: int = 0
    num_samples: int = 1  # outputs of the same prompt, each with draws of its own
    log_probs: int | None = None  # note every token's log-probability, and that of so many of the likeliest

    def __post_init__(self) -> None:
        for name, (kind, allowed, words, _) in (NUMBERS | OTHERS).items():
            value, optional = getattr(self, name), getattr(SamplingConfig, name) is None
            if not ((value is None and optional) or (_is(kind, value) and allowed(value))):
                raise UserError(f"{name}={value!r}: must be {words}{', or none' if optional else ''}")
        if self.min_new_tokens > self.max_new_tokens:
            raise UserError(
                f"min_new_tokens={self.min_new_tokens}: must be at most max_new_tokens={self.max_new_tokens}"
            )
        if not isinstance(self.bias, Mapping | None):
            raise UserError(f"bias={self.bias!r}: must be token ids with a number each, or none")
        for name, what in (("banned", "token ids"), ("stop", "texts")):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise UserError(f"{name}={value!r}: must be a list of {what}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise UserError(f"stop={self.stop!r}: must be texts that are not empty, got {text!r}")
        for token, value in (self.bias or {}).items():
            if not (_is(float, value) and abs(value) < LARGEST):
                raise UserError(f"bias[{token!r}]={value!r}: must be a finite number; to remove a token use banned")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    def check_tokens(self, vocab_size: int) -> None:
        """Every token named is one of the vocabulary, and bans leave one."""
        named = {
            "forced_first": [] if self.forced_first is None else [self.forced_first],
            "forced_last": [] if self.forced_last is None else [self.forced_last],
            "bias": list(self.bias or ()),
            "banned": list(self.banned),
        }
        for name, tokens in named.items():
            for token in tokens:
                if not (_is(int, token) and 0 <= token < vocab_size):
                    raise UserError(f"{name}: {token!r} is no token id: must be a whole number, 0 to {vocab_size - 1}")
        if len(set(self.banned)) == vocab_size:
            raise UserError(f"banned: holds all {vocab_size} tokens of the vocabulary: leave at least one")


# Beyond these, float32 holds infinity and zero.
LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
# Setting -> its type, the values allowed, how to say it, and the value that leaves a row as it is.
NUMBERS: dict[str, tuple[type, Callable[[float], bool], str, float]] = {
    "temperature": (float, lambda x: 0 <= x < LARGEST, "0 (greedy) or a positive number", 0.0),
    "top_k": (int, lambda x: x >= 1, "a whole number of at least 1", 0),
    "top_p": (float, lambda x: 0 < x <= 1, "in (0, 1]", 1.0),
    "min_p": (float, lambda x: 0 <= x <= 1, "in [0, 1]", 0.0),
    "typical_p": (float, lambda x: 0 < x <= 1, "in (0, 1]", 1.0),
    "repetition_penalty": (float, lambda x: SMALLEST <= x < LARGEST, "a positive number", 1.0),
    "frequency_penalty": (float, lambda x: abs(x) < LARGEST, "a finite number", 0.0),
    "presence_penalty": (float, lambda x: abs(x) < LARGEST, "a finite number", 0.0),
    "no_repeat_ngram": (int, lambda x: x >= 1, "a whole number of at least 1", 0),
    "min_new_tokens": (int, lambda x: x >= 0, "a whole number, 0 or more", 0),
    "max_new_tokens": (int, lambda x: x >= 0, "a whole number, 0 or more", -1),
    "forced_first": (int, lambda x: x >= 0, "a token id", -1),
    "forced_last": (int, lambda x: x >= 0, "a token id", -1),
}
# Those that are not about the choice of a token, in the same form.
OTHERS: dict[str, tuple[type, Callable[[float], bool], str, float]] = {
    "seed": (int, lambda x: abs(x) < 2**63, "a whole number of 64 bits", 0),
    "num_samples": (int, lambda x: x >= 1, "a whole number of at least 1", 1),
    "log_probs": (int, lambda x: x >= 0, "a whole number, 0 or more", 0),
}
SAMPLED_ONLY = ("temperature", "top_k", "top_p", "min_p", "typical_p")


def used(config: SamplingConfig) -> frozenset[str]:
    """The settings that change anything about a row."""
    numbers = {name for name in NUMBERS if _column([config], name, keep=False) is not None}
    return frozenset(numbers | {name for name in ("bias", "banned") if getattr(config, name)})


def batched(
    rows: Sequence[SamplingConfig], *, vocab_size: int, eos_ids: Sequence[int] = (), keep: Set[str] = frozenset()
) -> SamplingParams:
    """One entry a row; a filter that none of them uses, and that is not to be kept, is none: it is not compiled."""
    for row in rows:
        row.check_tokens(vocab_size)
    columns = {name: _column(rows, name, name in keep) for name in NUMBERS}
    if not eos_ids:
        columns["min_new_tokens"] = None
    eos_BE = np.tile(np.array(eos_ids, np.int32), (len(rows), 1))
    bias_BV = _biases(rows, vocab_size) if "bias" in keep or any(row.bias for row in rows) else None
    banned_BV = _bans(rows, vocab_size) if "banned" in keep or any(row.banned for row in rows) else None
    return SamplingParams(**columns, eos=eos_BE, bias=bias_BV, banned=banned_BV)


def _column(rows: Sequence[SamplingConfig], name: str, keep: bool) -> np.ndarray | None:
    kind, _, _, off = NUMBERS[name]
    unused = [getattr(row, name) is None or (row.is_greedy and name in SAMPLED_ONLY) for row in rows]
    values = [off if no else getattr(row, name) for row, no in zip(rows, unused, strict=True)]
    if kind is int:
        column_B = np.array([min(x, np.iinfo(np.int32).max) for x in values], np.int32)
    else:
        column_B = np.array(values, np.float32)
    return column_B if keep or (column_B != off).any() else None


def _biases(rows: Sequence[SamplingConfig], vocab_size: int) -> np.ndarray:
    table_BV = np.zeros((len(rows), vocab_size), np.float32)
    for row_V, row in zip(table_BV, rows, strict=True):
        row_V[list(row.bias or ())] = list((row.bias or {}).values())
    return table_BV


def _bans(rows: Sequence[SamplingConfig], vocab_size: int) -> np.ndarray:
    table_BV = np.zeros((len(rows), vocab_size), bool)
    for row_V, row in zip(table_BV, rows, strict=True):
        row_V[list(row.banned)] = True
    return table_BV


def _is(kind: type, value: object) -> bool:
    return is_whole(value) if kind is int else is_number(value)


def is_whole(value: object) -> bool:
    """True and false are no numbers."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return is_whole(value) or isinstance(value, float | np.floating)
