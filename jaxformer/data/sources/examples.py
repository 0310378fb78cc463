"""Examples of all sources: their fields, and where an example comes from.

The fields are `text` with optional `text_pair`, `label` and `tags`, or `inputs` and `targets`. Texts are strings. With
`tags`, which has one tag per word, `text` is a list of words. A label is a string, a number, or a list of those. The
first field of an example is its text or the source text of a pair; all examples of a source have the same fields.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxformer.errors import UserError

Example = dict[str, Any]
Documents = Sequence[Example]

TEXT_FIELDS = ("text", "text_pair", "inputs", "targets")
FIELDS = (*TEXT_FIELDS, "label", "tags")


class MalformedError(ValueError):
    """What is wrong with one line or record; the reader adds its file.

    Args:
      lines: the numbers of the lines at fault, if the record has several lines.
    """

    def __init__(self, reason: str, lines: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.lines = tuple(lines)


# ---------------------------------------------------------------- reading examples
def texts_of(example: Example, fields: Iterable[str] = TEXT_FIELDS) -> list[str]:
    """The texts of an example without labels and tags; lists of words are joined by spaces."""
    return [_joined(example[field]) for field in fields if field in example]


def has_text(example: Example) -> bool:
    """Whether an example has a text, or a pair for sequence to sequence has both of its texts."""
    needs_all = all if "inputs" in example else any
    return needs_all(text.strip() for text in texts_of(example))


def split_key(example: Example) -> str:
    """The text that decides whether an example is held out: its text, or the source text of a pair."""
    # The first field is never the label, and the same source text is never on both sides.
    return _joined(next(iter(example.values())))


class PlainTexts(Sequence[Example]):
    """The examples of a source with tags, whose words are joined by spaces for objectives that read whole texts."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Example:
        example = self._documents[index]
        return example | {"text": _joined(example["text"])}

    def where(self, index: int) -> str:
        """Where the example comes from, for messages."""
        return place_of(self._documents, index)


def place_of(documents: Documents, index: int) -> str:
    """Where an example comes from, for messages: its file and line if the source knows them, else its index."""
    where = getattr(documents, "where", None)
    return f"example {index}" if where is None else where(index)


def _joined(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)


# ---------------------------------------------------------------- making examples
def example_from_fields(values: Mapping[str, Any], names: Mapping[str, str]) -> Example:
    """Check the values of the fields that are present and make an example of them.

    Args:
      names: the name of each field in `values`; they need not all be present.
    """
    present = {field: name for field, name in names.items() if name in values}
    if "text" not in present and not {"inputs", "targets"} <= present.keys():
        found = ", ".join(map(repr, values)) or "none"
        raise MalformedError(
            f"no field '{names['text']}', nor both '{names['inputs']}' and '{names['targets']}'; found: {found}: "
            "set text=, or inputs= and targets=, of the source to the names of the fields"
        )
    example: Example = {}
    for field in FIELDS:  # in this order, so that the first field is a text
        if field in present:
            name, value = present[field], values[present[field]]
            words = field == "tags" or (field == "text" and "tags" in present)
            read = _label if field == "label" else _words if words else _string
            example[field] = read(value, name)
    if "tags" in example and len(example["tags"]) != len(example.get("text", ())):
        num_words, num_tags = len(example.get("text", ())), len(example["tags"])
        raise MalformedError(f"{num_words} words but {num_tags} tags: give one tag per word")
    return example


def check_same_fields(example: Example, first: Example) -> None:
    """Raise if an example does not have the fields of the first example of its source."""
    if example.keys() != first.keys():
        raise MalformedError(
            f"has {' and '.join(example)} but the source began with {' and '.join(first)}: "
            "all examples of a source need the same fields"
        )


def check_not_empty(path: object, num_records: int) -> None:
    if not num_records:
        raise UserError(f"{path}: the file is empty: add text or remove it from paths")


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise MalformedError(f"field '{name}' is {_type_name(value)}, expected a string")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise MalformedError(f"field '{name}' holds an unpaired surrogate, which is not valid text: correct the escape")
    return value


def _words(value: Any, name: str) -> list[str]:
    """A list of words or tags; a string is split at white space."""
    if isinstance(value, str):
        return _string(value, name).split()
    if not isinstance(value, list | tuple):
        raise MalformedError(
            f"field '{name}' is {_type_name(value)}, expected a list of strings, because there are tags"
        )
    words = [_string(word, name) for word in value]
    if not all(word.strip() for word in words):
        raise MalformedError(f"field '{name}' has an empty entry: give every word its text and its tag")
    return words


def _label(value: Any, name: str) -> Any:
    if isinstance(value, list | tuple):
        return [_one_label(each, name) for each in value]
    return _one_label(value, name)


def _one_label(value: Any, name: str) -> str | int | float:
    if isinstance(value, bool):
        return str(value).lower()  # as JSON spells it
    if isinstance(value, int | float):
        if not math.isfinite(value):
            raise MalformedError(f"field '{name}' is {value}: give every example a label")
        return value
    if not isinstance(value, str):
        raise MalformedError(f"field '{name}' is {_type_name(value)}, expected a string, a number or a list of strings")
    if not value.strip():
        raise MalformedError(f"field '{name}' is empty: give every example a label")
    return _string(value, name)


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__
