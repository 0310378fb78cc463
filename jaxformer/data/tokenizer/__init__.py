"""Tokenizers: SentencePiece (arXiv:1808.06226), bytes, words, Hugging Face `tokenizer.json`, and OPUS-MT models.

`export` converts SentencePiece, byte and word tokenizers to `tokenizer.json`.
"""

from jaxformer.data.tokenizer.base import (
    Bytes as Bytes,
    SpecialTokens as SpecialTokens,
    Tokenizer as Tokenizer,
    TypedIds as TypedIds,
    special_ids as special_ids,
)
from jaxformer.data.tokenizer.export import huggingface_files as huggingface_files
from jaxformer.data.tokenizer.huggingface import HuggingFace as HuggingFace, load_huggingface as load_huggingface
from jaxformer.data.tokenizer.loading import (
    check_vocabulary as check_vocabulary,
    find_tokenizer as find_tokenizer,
    load_tokenizer as load_tokenizer,
    make_tokenizer as make_tokenizer,
)
from jaxformer.data.tokenizer.pair import TokenizerPair as TokenizerPair
from jaxformer.data.tokenizer.sentencepiece import (
    SentencePiece as SentencePiece,
    load_sentencepiece as load_sentencepiece,
)
from jaxformer.data.tokenizer.training import (
    train_sentencepiece as train_sentencepiece,
    train_tokenizer_file as train_tokenizer_file,
)
from jaxformer.data.tokenizer.translation import Translation as Translation
from jaxformer.data.tokenizer.words import Words as Words
