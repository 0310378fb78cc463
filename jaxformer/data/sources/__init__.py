"""Data sources with random access to their examples.

An example has the fields `text` (with `text_pair`, `label` or `tags`), or `inputs` and `targets`; all examples of a
source have the same fields.
"""

from collections.abc import Callable
from typing import Any, Literal

from jaxformer.config import DataConfig, HeldoutSplit, Source
from jaxformer.data.sources.columns import open_conll, open_tsv
from jaxformer.data.sources.dates import Dates
from jaxformer.data.sources.examples import (
    Documents as Documents,
    Example as Example,
    PlainTexts,
    has_text as has_text,
    place_of as place_of,
    texts_of as texts_of,
)
from jaxformer.data.sources.files import open_memory, open_text
from jaxformer.data.sources.json_records import RecordDocuments, open_jsonl
from jaxformer.data.sources.parallel import open_parallel
from jaxformer.data.sources.split import split_documents
from jaxformer.data.sources.stdlib import open_stdlib
from jaxformer.errors import UserError

SplitName = Literal["train", "heldout"]
OPENERS: dict[str, Callable[[Any], Documents]] = {
    "text": open_text,
    "jsonl": open_jsonl,
    "tsv": open_tsv,
    "conll": open_conll,
    "parallel": open_parallel,
    "array_record": RecordDocuments,
    "memory": open_memory,
    "stdlib": open_stdlib,
    "dates": Dates,
}


def open_source(config: Source) -> Documents:
    """Open a source; raise if it has no examples."""
    documents = OPENERS[config.kind](config)
    if not len(documents):
        paths = getattr(config, "paths", None)
        names = "" if paths is None else f" ({paths if isinstance(paths, str) else ', '.join(paths)})"
        raise UserError(f"the {config.kind} source{names} holds no documents with text: add some text")
    return documents


def open_split(cfg: DataConfig, split: SplitName) -> Documents:
    """Open the training or the held-out examples of a run; with a held-out split, both come from `data.train`."""
    if isinstance(cfg.heldout, HeldoutSplit):
        documents = split_documents(open_source(cfg.train), cfg.heldout.percent, heldout=split == "heldout")
    else:
        documents = open_source(cfg.train if split == "train" else cfg.heldout)
    # Only tagging needs the words of a text one by one.
    return PlainTexts(documents) if "tags" in documents[0] and cfg.objective.head != "tags" else documents
