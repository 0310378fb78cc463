"""A vocabulary of words with their counts, for word vectors and word-level models."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxformer.config import WordsTokenizer
from jaxformer.data.tokenizer.base import Tokenizer
from jaxformer.errors import UserError

WORDS_FILE = "words.json"
WORD = r"\w+(?:['\u2019]\w+)*"  # letters, digits and underscores, with apostrophes inside
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
PATTERN = re.compile(WORD)


class Words(Tokenizer):
    """Encodes the words of a text; words outside the vocabulary get `unk_id`, and punctuation is left out."""

    pad_id, bos_id, eos_id, unk_id = 0, 1, 2, 3

    def __init__(self, counts: Mapping[str, int], lowercase: bool = True, extra_tokens: Sequence[str] = ()) -> None:
        """`counts` is sorted, the most frequent word first."""
        self.lowercase = lowercase
        self._counts, self._extra_tokens = dict(counts), tuple(extra_tokens)
        self._ids = {word: id for id, word in enumerate(self._counts, start=len(SPECIAL))}
        self.vocab_size = len(SPECIAL) + len(self._counts) + len(self._extra_tokens)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (*SPECIAL, *self._extra_tokens)

    @cached_property
    def counts(self) -> np.ndarray:
        """How often each id occurs in the training data; 0 for special tokens."""
        return np.array([0] * len(SPECIAL) + list(self._counts.values()) + [0] * len(self._extra_tokens), np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._ids.get(word, self.unk_id) for word in find_words(text, self.lowercase)] for text in texts]

    def _decode(self, ids: list[int]) -> str:
        tokens = self.tokens()
        return " ".join(tokens[id] for id in ids)

    def tokens(self) -> list[str]:
        return [*SPECIAL, *self._counts, *self._extra_tokens]

    @cached_property
    def word_starts(self) -> np.ndarray:
        """Every token is a whole word."""
        return np.ones(self.vocab_size, bool)

    def _with_new_tokens(self, tokens: list[str]) -> "Words":
        return Words(self._counts, self.lowercase, (*self._extra_tokens, *tokens))

    def files(self) -> dict[str, bytes]:
        fields = {"lowercase": self.lowercase, "extra_tokens": self._extra_tokens, "counts": self._counts}
        return {WORDS_FILE: json.dumps(fields, ensure_ascii=False, indent=0).encode()}


def find_words(text: str, lowercase: bool) -> list[str]:
    return PATTERN.findall(text.lower() if lowercase else text)


def train_words(
    texts: Iterable[str], vocab_size: int, cfg: WordsTokenizer, prefix: str = "", extra_tokens: Sequence[str] = ()
) -> Words:
    """The most frequent words of the texts; words of the same count are in alphabetical order.

    Args:
      prefix: prefix of setting names in error messages; `source_` for a source tokenizer.
      extra_tokens: special tokens that are part of the vocabulary, after all words.
    """
    counts = Counter(word for text in texts for word in find_words(text, cfg.lowercase))
    frequent = [item for item in counts.items() if item[1] >= cfg.min_count and item[0] not in SPECIAL]
    num_words = vocab_size - len(SPECIAL) - len(extra_tokens)
    if num_words < 1 or not frequent:
        fix = (
            f"model.{prefix}vocab_size={vocab_size} leaves no room for words: raise it"
            if num_words < 1
            else f"no word of data.train occurs data.{prefix}tokenizer.min_count={cfg.min_count} times: lower it"
        )
        raise UserError(fix)
    kept = sorted(frequent, key=lambda item: (-item[1], item[0]))[:num_words]
    return Words(dict(kept), cfg.lowercase).with_tokens(extra_tokens)


def load_words(path: str | Path) -> Words:
    """Load a vocabulary that `Words.files` wrote."""
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        counts = {str(word): int(count) for word, count in fields["counts"].items()}
        return Words(counts, bool(fields["lowercase"]), fields.get("extra_tokens", ()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"'{path}' does not hold the words and counts of a tokenizer: restore the file") from None
