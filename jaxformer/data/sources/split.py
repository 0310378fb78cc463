"""Splits examples into training and held-out examples by hashes of their text.

A hash depends on nothing but the text, so the split is the same on every machine, does not depend on the order of files
and examples, and keeps every example in its split when a corpus grows.
"""

import hashlib
from collections.abc import Sequence

from jaxformer.data.sources.examples import Example, place_of, split_key
from jaxformer.errors import UserError


class Subset(Sequence[Example]):
    """The examples of a source at some indices, read lazily."""

    def __init__(self, documents: Sequence[Example], indices: Sequence[int]) -> None:
        self._documents, self._indices = documents, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Example:
        return self._documents[self._indices[index]]

    def where(self, index: int) -> str:
        """Where the example comes from, for messages."""
        return place_of(self._documents, self._indices[index])


def is_heldout(text: str, percent: int) -> bool:
    """Whether the example with this text or name is held out."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % 100 < percent


def split_documents(documents: Sequence[Example], percent: int, *, heldout: bool) -> Subset:
    """Return the held-out examples, or all others; raise if there are none on one of the two sides."""
    sides: dict[bool, list[int]] = {True: [], False: []}
    for index in range(len(documents)):
        # The first field is the text, or the source text of a pair: the same source text is never on both sides.
        sides[is_heldout(split_key(documents[index]), percent)].append(index)
    if not sides[True] or not sides[False]:
        count = f"{len(documents):,} example{'s' * (len(documents) != 1)}"
        side = "held out" if not sides[True] else "left to train on"
        raise UserError(
            f"data.heldout.percent={percent}: data.train has {count}, of which none is {side}: use more data, change "
            "the percentage, split texts with data.train.document=paragraph or line, or name a source in data.heldout"
        )
    return Subset(documents, sides[heldout])
