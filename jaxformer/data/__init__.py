"""The input pipeline: sources -> tokenizer -> packing -> sets (in memory or prepared on disk) -> loader."""

from jaxformer.data.labels import complete_labels as complete_labels
from jaxformer.data.loader import Loader as Loader, make_loader as make_loader
from jaxformer.data.packing import Objective as Objective
from jaxformer.data.prepared import (
    load_heldout as load_heldout,
    load_sets as load_sets,
    open_prepared as open_prepared,
    prepare as prepare,
)
from jaxformer.data.sets import PackedSet as PackedSet, Sets as Sets, build_set as build_set
from jaxformer.data.sources import (
    Documents as Documents,
    Example as Example,
    open_source as open_source,
    open_split as open_split,
)
from jaxformer.data.tokenizer import (
    Bytes as Bytes,
    HuggingFace as HuggingFace,
    SentencePiece as SentencePiece,
    Tokenizer as Tokenizer,
    check_vocabulary as check_vocabulary,
    huggingface_files as huggingface_files,
    load_huggingface as load_huggingface,
    load_sentencepiece as load_sentencepiece,
    load_tokenizer as load_tokenizer,
    make_tokenizer as make_tokenizer,
    train_sentencepiece as train_sentencepiece,
    train_tokenizer_file as train_tokenizer_file,
)
