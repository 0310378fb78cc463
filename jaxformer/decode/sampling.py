"""The decoding settings of a request: validated per request, then batched into the arrays of `ops.sampling`."""

import difflib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from jaxformer.errors import UserError
from jaxformer.ops.sampling import MIN_TEMPERATURE, SamplingParams


@dataclass(frozen=True)
class SamplingConfig:
    """The decoding settings of one request. None disables a setting."""

    temperature: float = 0.0  # 0 is greedy; the next four settings then have no effect
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None  # over the prompt and the new tokens
    frequency_penalty: float | None = None  # over the new tokens
    presence_penalty: float | None = None  # over the new tokens
    no_repeat_ngram: int | None = None
    min_new_tokens: int = 0
    max_new_tokens: int = 64
    forced_first: int | None = None  # id of the first new token, for example the target language of a translation
    forced_last: int | None = None  # id of the last token if the output reaches max_new_tokens
    bias: Mapping[int, float] | None = None  # token id -> value added to its logit
    banned: Sequence[int] = ()  # token ids that are never chosen
    stop: Sequence[str] = ()  # stop strings: the output ends before the first of them
    seed: int = 0
    num_samples: int = 1  # outputs per prompt, sampled independently
    log_probs: int | None = None  # report the log-probabilities of each token and of this many most likely ids

    def __post_init__(self) -> None:
        for name, rule in (FILTER_RULES | OTHER_RULES).items():
            value, optional = getattr(self, name), getattr(SamplingConfig, name) is None
            if not ((value is None and optional) or (_has_type(rule.type, value) and rule.allows(value))):
                raise UserError(f"{name}={value!r}: must be {rule.words}{', or None' if optional else ''}")
        if self.min_new_tokens > self.max_new_tokens:
            raise UserError(
                f"min_new_tokens={self.min_new_tokens}: must be at most max_new_tokens={self.max_new_tokens}"
            )
        self._check_collections()

    def _check_collections(self) -> None:
        if not isinstance(self.bias, Mapping | None):
            raise UserError(f"bias={self.bias!r}: must be a dict from token id to number, or None")
        for name, what in (("banned", "token ids"), ("stop", "strings")):
            value = getattr(self, name)
            # A string is a sequence of strings: stop="\n\n" would silently mean two stop strings.
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise UserError(f"{name}={value!r}: must be a list of {what}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise UserError(f"stop={self.stop!r}: must be non-empty strings, got {text!r}")
        for token, value in (self.bias or {}).items():
            if not (_has_type(float, value) and abs(value) < LARGEST):
                raise UserError(f"bias[{token!r}]={value!r}: must be a finite number; to exclude a token use banned")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    def check_tokens(self, vocab_size: int) -> None:
        """Raise for a token id outside the vocabulary, or if every id is banned."""
        token_ids = {
            "forced_first": [] if self.forced_first is None else [self.forced_first],
            "forced_last": [] if self.forced_last is None else [self.forced_last],
            "bias": list(self.bias or ()),
            "banned": list(self.banned),
        }
        for name, tokens in token_ids.items():
            for token in tokens:
                if not (_has_type(int, token) and 0 <= token < vocab_size):
                    raise UserError(
                        f"{name}: {token!r} is not a token id: must be an integer from 0 to {vocab_size - 1}"
                    )
        if len(set(self.banned)) == vocab_size:
            raise UserError(f"banned: holds all {vocab_size} tokens of the vocabulary: leave at least one")


def make_sampling_config(settings: Mapping[str, Any]) -> SamplingConfig:
    """Make a `SamplingConfig`; an unknown setting raises an error that lists the closest known ones."""
    known = [field.name for field in fields(SamplingConfig)]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3) or known
            raise UserError(f"unknown setting '{name}'; known settings include: {', '.join(near)}")
    return SamplingConfig(**settings)


class Rule(NamedTuple):
    """The valid values of one numeric setting."""

    type: type
    allows: Callable[[float], bool]
    words: str  # describes the valid values in the error message
    off: float  # the value that disables the setting for a row of a batch


# Bounds of float32: larger numbers become infinity, smaller ones may become zero.
LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
FILTER_RULES = {
    "temperature": Rule(float, lambda x: 0 <= x < LARGEST, "0 (greedy) or a positive number", 0.0),
    "top_k": Rule(int, lambda x: x >= 1, "an integer >= 1", 0),
    "top_p": Rule(float, lambda x: 0 < x <= 1, "in (0, 1]", 1.0),
    "min_p": Rule(float, lambda x: 0 <= x <= 1, "in [0, 1]", 0.0),
    "typical_p": Rule(float, lambda x: 0 < x <= 1, "in (0, 1]", 1.0),
    "repetition_penalty": Rule(float, lambda x: SMALLEST <= x < LARGEST, "a positive number", 1.0),
    "frequency_penalty": Rule(float, lambda x: abs(x) < LARGEST, "a finite number", 0.0),
    "presence_penalty": Rule(float, lambda x: abs(x) < LARGEST, "a finite number", 0.0),
    "no_repeat_ngram": Rule(int, lambda x: x >= 1, "an integer >= 1", 0),
    "min_new_tokens": Rule(int, lambda x: x >= 0, "an integer >= 0", 0),
    # -1 is not a valid value, so `_column` never drops this setting: the decode loop always needs it.
    "max_new_tokens": Rule(int, lambda x: x >= 0, "an integer >= 0", -1),
    "forced_first": Rule(int, lambda x: x >= 0, "a token id", -1),
    "forced_last": Rule(int, lambda x: x >= 0, "a token id", -1),
}
# Numeric settings that are not part of `SamplingParams`.
OTHER_RULES = {
    "seed": Rule(int, lambda x: abs(x) < 2**63, "a 64-bit integer", 0),
    "num_samples": Rule(int, lambda x: x >= 1, "an integer >= 1", 1),
    "log_probs": Rule(int, lambda x: x >= 0, "an integer >= 0", 0),
}
SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p", "typical_p")


# ---------------------------------------------------------------- batches
def active_settings(config: SamplingConfig) -> frozenset[str]:
    """The settings that have an effect on this request."""
    numbers = {name for name in FILTER_RULES if _column([config], name, keep=False) is not None}
    return frozenset(numbers | {name for name in ("bias", "banned") if getattr(config, name)})


def batch_settings(
    configs: Sequence[SamplingConfig], *, vocab_size: int, eos_ids: Sequence[int] = (), keep: Set[str] = frozenset()
) -> SamplingParams:
    """Arrays with one entry per row. A setting that no row uses is None, so that its filter is not compiled.

    Args:
      keep: settings to include even if no row uses them yet, so that adding rows that use them does not recompile.
    """
    for config in configs:
        config.check_tokens(vocab_size)
    columns = {name: _column(configs, name, name in keep) for name in FILTER_RULES}
    if not eos_ids:
        columns["min_new_tokens"] = None  # without an eos token, no row ends early
    eos_BE = np.tile(np.array(eos_ids, np.int32), (len(configs), 1))
    bias_BV = _bias_table(configs, vocab_size) if "bias" in keep or any(c.bias for c in configs) else None
    banned_BV = _banned_table(configs, vocab_size) if "banned" in keep or any(c.banned for c in configs) else None
    return SamplingParams(**columns, eos=eos_BE, bias=bias_BV, banned=banned_BV)


def _column(configs: Sequence[SamplingConfig], name: str, keep: bool) -> np.ndarray | None:
    """The values of one setting, or None if it is disabled for every row."""
    rule = FILTER_RULES[name]
    is_off = [getattr(c, name) is None or (c.is_greedy and name in SAMPLING_ONLY) for c in configs]
    values = [rule.off if off else getattr(c, name) for c, off in zip(configs, is_off, strict=True)]
    if rule.type is int:
        column_B = np.array([min(x, np.iinfo(np.int32).max) for x in values], np.int32)
    else:
        column_B = np.array(values, np.float32)
    return column_B if keep or (column_B != rule.off).any() else None


def _bias_table(configs: Sequence[SamplingConfig], vocab_size: int) -> np.ndarray:
    table_BV = np.zeros((len(configs), vocab_size), np.float32)
    for row_V, config in zip(table_BV, configs, strict=True):
        row_V[list(config.bias or ())] = list((config.bias or {}).values())
    return table_BV


def _banned_table(configs: Sequence[SamplingConfig], vocab_size: int) -> np.ndarray:
    table_BV = np.zeros((len(configs), vocab_size), bool)
    for row_V, config in zip(table_BV, configs, strict=True):
        row_V[list(config.banned)] = True
    return table_BV


# ---------------------------------------------------------------- types
def _has_type(kind: type, value: object) -> bool:
    return is_integer(value) if kind is int else is_number(value)


def is_integer(value: object) -> bool:
    """Whether the value is an integer. A bool is not, although it is an `int` in Python."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return is_integer(value) or isinstance(value, float | np.floating)
