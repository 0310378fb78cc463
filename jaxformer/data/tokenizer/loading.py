"""Makes the tokenizer of a config, and loads the tokenizer in a directory."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxformer.config import ModelConfig, RunConfig, Tokenizer as TokenizerConfig, sentinel_token
from jaxformer.data.sources import texts_of
from jaxformer.data.tokenizer.base import BYTES_FILE, Bytes, Tokenizer, load_bytes
from jaxformer.data.tokenizer.huggingface import TOKENIZER_FILE, load_huggingface
from jaxformer.data.tokenizer.pair import SOURCE_DIRECTORY, TokenizerPair
from jaxformer.data.tokenizer.sentencepiece import SENTENCEPIECE_FILE, load_sentencepiece
from jaxformer.data.tokenizer.training import train_sentencepiece
from jaxformer.data.tokenizer.translation import SETTINGS_FILE, SOURCE_FILE, load_translation
from jaxformer.data.tokenizer.words import WORDS_FILE, load_words, train_words
from jaxformer.errors import UserError


def make_tokenizer(cfg: RunConfig, documents: Sequence[dict[str, str]]) -> Tokenizer:
    """Load the tokenizer of a config, or train it on the documents; a pair if the config has a source tokenizer."""
    data, model = cfg.data, cfg.model
    needed = data.objective.tokens
    if data.source_tokenizer is None:
        tokenizer = _make_one(data.tokenizer, model.vocab_size, documents, needed)
    else:
        source = _make_one(data.source_tokenizer, model.source_vocab_size, documents, (), "inputs")
        tokenizer = TokenizerPair(source, _make_one(data.tokenizer, model.vocab_size, documents, needed, "targets"))
    check_vocabulary(tokenizer, model)
    return tokenizer


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Load the tokenizer in a run directory or a Hugging Face directory, without executing code from it."""
    directory = Path(directory)
    tokenizer, source = _load_one(directory), directory / SOURCE_DIRECTORY
    return TokenizerPair(_load_one(source), tokenizer) if source.is_dir() else tokenizer


def _load_one(directory: Path) -> Tokenizer:
    for name, load in LOADERS.items():
        if (directory / name).is_file():
            return load(directory / name)
    raise UserError(f"'{directory}' has no tokenizer: it holds none of {', '.join(LOADERS)}{_hint(directory)}")


def find_tokenizer(directory: str | Path) -> Tokenizer | None:
    """Load the tokenizer in a directory; None if it has no tokenizer."""
    return load_tokenizer(directory) if any((Path(directory) / name).is_file() for name in LOADERS) else None


def check_vocabulary(tokenizer: Tokenizer, model: ModelConfig, where: str = "model.") -> None:
    """Raise if the tokenizer has more ids than the model has embeddings; additional embeddings are padding.

    Args:
        where: prefix of the setting's name in error messages.
    """
    source_name = "vocab_size" if model.source_vocab_size is None else "source_vocab_size"
    sizes = (("vocab_size", model.vocab_size, tokenizer.vocab_size, "ids"),)
    if model.shape == "encoder-decoder":
        sizes += ((source_name, model.encoder_vocab_size, tokenizer.source_vocab_size, "source ids"),)
    for name, size, needed, what in sizes:
        if needed > size:
            raise UserError(
                f"{where}{name}={size} is less than the tokenizer's {needed} {what}: "
                f"set {where}{name}={needed} or more, or use the tokenizer the model was made for"
            )


def _make_one(
    cfg: TokenizerConfig,
    vocab_size: int,
    documents: Sequence[dict[str, Any]],
    needed: Sequence[str],
    field: str | None = None,
) -> Tokenizer:
    """Load a tokenizer, or train it on one field of the documents. None: on all fields.

    A tokenizer that is made for this run gets the tokens that its objective needs; a loaded one is never extended
    unless the config says so, because its model may have no embeddings for them.
    """
    if cfg.kind == "bytes":
        return Bytes().with_tokens((*needed, *cfg.extra_tokens))
    if cfg.kind in READERS and getattr(cfg, "path", None) is not None:
        return READERS[cfg.kind](cfg).with_tokens(cfg.extra_tokens)
    extra = tuple(dict.fromkeys((*needed, *cfg.extra_tokens)))
    texts = [text for example in documents for text in texts_of(example, *([] if field is None else [(field,)]))]
    if field is not None and not texts:
        raise UserError(
            f"data.source_tokenizer needs examples with inputs and targets, but data.train has "
            f"{' and '.join(documents[0])}: change the source or set data.source_tokenizer=none"
        )
    prefix = "source_" if field == "inputs" else ""
    train = train_words if cfg.kind == "words" else train_sentencepiece
    return train(texts, vocab_size, cfg, prefix, extra)


READERS: dict[str, Callable[[Any], Tokenizer]] = {
    "sentencepiece": lambda cfg: load_sentencepiece(cfg.path),
    "huggingface": lambda cfg: load_huggingface(cfg.path),
    "directory": lambda cfg: load_tokenizer(cfg.path),
}


def _load_t5(path: Path) -> Tokenizer:
    """Load T5's SentencePiece file, and its sentinels: transformers adds `extra_ids` of them, the last first."""
    settings = path.with_name(SETTINGS_FILE)
    try:
        fields = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
        num_sentinels = int(fields.get("extra_ids", 0))
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"'{settings}' does not hold a JSON object with a number extra_ids: fetch it again") from None
    return load_sentencepiece(path).with_tokens([sentinel_token(i) for i in reversed(range(num_sentinels))])


# In order of preference: `tokenizer.json` comes before SentencePiece models, because only it has the added tokens and
# the post-processor.
LOADERS: dict[str, Callable[[Path], Tokenizer]] = {
    TOKENIZER_FILE: load_huggingface,
    SENTENCEPIECE_FILE: load_sentencepiece,
    "spiece.model": _load_t5,
    SOURCE_FILE: load_translation,
    BYTES_FILE: load_bytes,
    WORDS_FILE: load_words,
}
# Tokenizer files that do not determine the ids by themselves.
UNREADABLE = ("sentencepiece.bpe.model", "vocab.json", "vocab.txt")


def _hint(directory: Path) -> str:
    unreadable = next((name for name in UNREADABLE if (directory / name).is_file()), None)
    if unreadable is None:
        return ""
    return f"; {unreadable} alone is not enough: save the tokenizer with transformers, which writes {TOKENIZER_FILE}"
