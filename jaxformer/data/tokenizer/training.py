"""Trains SentencePiece models (arXiv:1808.06226) deterministically, with exact round trips of text."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from jaxformer.config import SentencePieceTokenizer, TextSource
from jaxformer.data.sources import open_source
from jaxformer.data.tokenizer.base import Tokenizer
from jaxformer.data.tokenizer.sentencepiece import SENTENCEPIECE_FILE, SentencePiece
from jaxformer.errors import UserError
from jaxformer.rundir import write_file

# The unigram trainer's float sums depend on the number of threads; a fixed number makes the model reproducible.
TRAIN_THREADS = 8
MAX_SENTENCE_CHARS = 2048  # longer lines are split, since SentencePiece would skip them
# Scores are rounded to multiples of 1/64. SentencePiece sums the scores of a segmentation in float32, where sums of
# 100,000 such numbers are exact, so that ties are broken identically everywhere, also in a converted `tokenizer.json`.
SCORE_STEPS = 64


def train_tokenizer_file(paths: Sequence[str], vocab_size: int, algorithm: str, out: str | Path) -> Path:
    """Train on text files, write the SentencePiece model to the file `out` and return its path."""
    documents = open_source(TextSource(paths=tuple(paths)))
    cfg = SentencePieceTokenizer(algorithm=algorithm)
    tokenizer = train_sentencepiece([example["text"] for example in documents], vocab_size, cfg)
    return write_file(Path(out), tokenizer.files()[SENTENCEPIECE_FILE])


def train_sentencepiece(
    texts: Sequence[str],
    vocab_size: int,
    cfg: SentencePieceTokenizer,
    prefix: str = "",
    extra_tokens: Sequence[str] = (),
) -> Tokenizer:
    """Train a model of exactly `vocab_size` pieces; the result is the same on every machine.

    Args:
      prefix: prefix of setting names in error messages; `source_` for a source tokenizer.
      extra_tokens: special tokens that are part of the vocabulary, after all pieces.
    """
    sentences = list(select_sentences(texts, cfg.train_bytes))
    if not sentences:
        raise UserError(
            f"data.{prefix}tokenizer.train_bytes={cfg.train_bytes} is too little text to train on: raise it"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=vocab_size - len(extra_tokens),
            model_type=cfg.algorithm,
            byte_fallback=cfg.byte_fallback,
            # Without byte fallback, characters outside the vocabulary would be lost.
            character_coverage=0.9995 if cfg.byte_fallback else 1.0,
            num_threads=TRAIN_THREADS,
            minloglevel=2,  # errors only
            **SPECIAL_IDS,
            **TEXT_OPTIONS,
            **FAST_TRAINING,
        )
    except RuntimeError as error:
        raise _vocab_size_error(error, f"model.{prefix}vocab_size", vocab_size, len(extra_tokens)) from None
    return SentencePiece(_round_scores(model.getvalue())).with_tokens(extra_tokens)


SPECIAL_IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
TEXT_OPTIONS = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,  # indentation can be a single piece
    "user_defined_symbols": ["\n", "\t"],  # training text is split at these, so it never contains them
    "split_digits": True,  # one piece per digit
    "max_sentence_length": 4 * MAX_SENTENCE_CHARS,  # in bytes
}
# By default, unigram training starts with a million candidates and prunes a quarter in each iteration. With fewer
# candidates, halved in each iteration, 4 MB of code take 22 s of CPU time instead of 39 s, at the same compression.
FAST_TRAINING = {"seed_sentencepiece_size": 50_000, "shrinking_factor": 0.5, "num_sub_iterations": 1}


def _round_scores(model: bytes) -> bytes:
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    for piece in proto.pieces:
        piece.score = round(piece.score * SCORE_STEPS) / SCORE_STEPS
    return proto.SerializeToString(deterministic=True)


def select_sentences(texts: Sequence[str], max_bytes: int) -> Iterator[str]:
    """Yield sentences sampled evenly from all texts, at most `max_bytes` in total."""
    total = sum(len(sentence.encode()) for sentence in _sentences(texts))
    seen = kept = 0
    for sentence in _sentences(texts):
        size = len(sentence.encode())
        seen += size
        if (kept + size) * total <= max_bytes * seen:
            kept += size
            yield sentence


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), MAX_SENTENCE_CHARS):
                yield line[start : start + MAX_SENTENCE_CHARS]


def _vocab_size_error(error: RuntimeError, name: str, vocab_size: int, num_extra: int) -> Exception:
    """Translate SentencePiece's errors about the vocabulary size into config terms; return other errors unchanged."""
    if too_high := re.search(r"Vocabulary size too high.*<= (\d+)", str(error)):
        return UserError(
            f"{name}={vocab_size} is more than the training text can fill: "
            f"set {name}={int(too_high[1]) + num_extra} or less, or train on more text"
        )
    if too_low := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
        return UserError(
            f"{name}={vocab_size} is too small for the characters of the training text: "
            f"set {name}={int(too_low[1]) + num_extra} or more"
        )
    return error
