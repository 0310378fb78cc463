"""Makes the tokenizer of a config, and loads the tokenizer in a directory."""

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxformer.config import RunConfig
from jaxformer.data.tokenizer.base import BYTES_FILE, Bytes, Tokenizer
from jaxformer.data.tokenizer.huggingface import TOKENIZER_FILE, load_huggingface
from jaxformer.data.tokenizer.sentencepiece import SENTENCEPIECE_FILE, SentencePiece, load_sentencepiece
from jaxformer.data.tokenizer.training import train_sentencepiece
from jaxformer.data.tokenizer.translation import SOURCE_FILE, load_translation
from jaxformer.errors import UserError


def make_tokenizer(cfg: RunConfig, documents: Sequence[dict[str, str]]) -> Tokenizer:
    """Load the tokenizer of a config, or train it on the documents."""
    tokenizer = MAKERS[cfg.data.tokenizer.kind](cfg, documents)
    check_vocabulary(tokenizer, cfg.model.vocab_size, "model.vocab_size")
    return tokenizer


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Load the tokenizer in a run directory or a Hugging Face directory, without executing code from it."""
    directory = Path(directory)
    for name, load in LOADERS.items():
        if (directory / name).is_file():
            return load(directory / name)
    raise UserError(f"'{directory}' has no tokenizer: it holds none of {', '.join(LOADERS)}{_hint(directory)}")


def find_tokenizer(directory: str | Path) -> Tokenizer | None:
    """Load the tokenizer in a directory; None if it has no tokenizer."""
    return load_tokenizer(directory) if any((Path(directory) / name).is_file() for name in LOADERS) else None


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, where: str) -> None:
    """Raise if the tokenizer has more ids than the model has embeddings; additional embeddings are padding.

    Args:
        where: how error messages name the setting that holds `vocab_size`.
    """
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{where}={vocab_size} is less than the tokenizer's {tokenizer.vocab_size} ids: "
            f"set {where}={tokenizer.vocab_size} or more, or use the tokenizer the model was made for"
        )


def _make_sentencepiece(cfg: RunConfig, documents: Sequence[dict[str, str]]) -> SentencePiece:
    if cfg.data.tokenizer.path is not None:
        return load_sentencepiece(cfg.data.tokenizer.path)
    texts = [text for example in documents for text in example.values()]
    return train_sentencepiece(texts, cfg.model.vocab_size, cfg.data.tokenizer)


MAKERS: dict[str, Callable[[RunConfig, Sequence[dict[str, str]]], Tokenizer]] = {
    "sentencepiece": _make_sentencepiece,
    "bytes": lambda cfg, documents: Bytes(),
    "huggingface": lambda cfg, documents: load_huggingface(cfg.data.tokenizer.path),
    "directory": lambda cfg, documents: load_tokenizer(cfg.data.tokenizer.path),
}
# In order of preference: `tokenizer.json` comes before SentencePiece models, because only it has the added tokens and
# the post-processor.
LOADERS: dict[str, Callable[[Path], Tokenizer]] = {
    TOKENIZER_FILE: load_huggingface,
    SENTENCEPIECE_FILE: load_sentencepiece,
    "spiece.model": load_sentencepiece,  # the name of T5's SentencePiece file
    SOURCE_FILE: load_translation,
    BYTES_FILE: lambda path: Bytes(),
}
# Tokenizer files that do not determine the ids by themselves.
UNREADABLE = ("sentencepiece.bpe.model", "vocab.json", "vocab.txt")


def _hint(directory: Path) -> str:
    unreadable = next((name for name in UNREADABLE if (directory / name).is_file()), None)
    if unreadable is None:
        return ""
    return f"; {unreadable} alone is not enough: save the tokenizer with transformers, which writes {TOKENIZER_FILE}"
