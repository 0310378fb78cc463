"""The reference of config keys: the type, default and meaning of each, read from the config classes.

A key is a dotted path as in overrides. It may also name a kind (`optim.algorithm.muon.ns_steps`); without one, it means
every kind that has the field. The item of a list is a number, or `N` for any item.
"""

import json
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from jaxformer.config.overrides import item_type, member_models, unknown_field
from jaxformer.config.run import RunConfig
from jaxformer.errors import UserError

Model = type[BaseModel]
REQUIRED = "required"


@dataclass(frozen=True)
class Entry:
    """What a key stands for: a field, or one kind of a union."""

    key: str
    annotation: Any
    meaning: str
    type: str = ""
    default: str = ""
    kinds: tuple[str, ...] = ()
    """The kinds that have this field, if not all do."""

    @property
    def models(self) -> list[Model]:
        """The possible config classes of the value, or of the items of a list."""
        return member_models(_items(self.annotation))


# ---------------------------------------------------------------- one key
def describe_key(key: str | None) -> str:
    """The text of `jaxformer help KEY`; without a key, the keys of a run."""
    if key is None:
        lines = _field_lines("", RunConfig)
        return "\n".join(["Keys of a config; for more: jaxformer help KEY, for example jaxformer help train", *lines])
    return "\n\n".join("\n".join(_entry_lines(entry)) for entry in find_entries(key))


def find_entries(key: str) -> list[Entry]:
    """The fields or kinds that a key names; several if kinds of a union differ in a field."""
    found: list[Entry] = []
    for entry in _walk(key, key.split("."), RunConfig):
        same = next((i for i, e in enumerate(found) if e.kinds and _content(e) == _content(entry)), None)
        if same is None:
            found.append(entry)
        else:
            found[same] = Entry(**{**vars(entry), "kinds": (*found[same].kinds, *entry.kinds)})
    return found


def _walk(key: str, path: list[str], annotation: Any, kind: str = "") -> Iterator[Entry]:
    """Follow the rest of a key, `path`, from a type; `kind` is the kind that the key has just named."""
    name, rest = path[0], path[1:]
    if name == "N" or name.isdigit():
        item = _items(annotation)
        if item is annotation:
            raise UserError(f"'{key}': '{name}' is an index, but '{_parent(key, path)}' is not a list")
        if rest:
            yield from _walk(key, rest, item)
        else:
            yield Entry(key, item, f"An item of {_parent(key, path)}.", _type_words(TypeAdapter(item)))
        return
    models = member_models(_items(annotation))
    by_kind = {kind_of(model): model for model in models if len(models) > 1}
    if name == "kind" and by_kind and not rest:
        yield Entry(key, str, f"Kind of {_parent(key, path)}; its other keys depend on it.", ", ".join(by_kind))
        return
    owners = [model for model in models if name in model.model_fields]
    if name not in by_kind and not owners:
        names = dict.fromkeys([*by_kind, *(field for model in models for field in model.model_fields)])
        raise UserError(unknown_field(key, path, names) if names else f"'{key}': '{_parent(key, path)}' has no keys")
    if name in by_kind:
        model = by_kind[name]
        without_kind = ".".join([*key.split(".")[: -len(path)], *rest])  # as an override is written
        yield from (
            _walk(without_kind, rest, model, name) if rest else [Entry(without_kind, model, _doc(model), kinds=(name,))]
        )
    for model in owners if len(owners) == 1 or not rest else _owners_with(owners, path):
        field = model.model_fields[name]
        kinds = (kind_of(model),) if by_kind or kind else ()
        yield from _walk(key, rest, field.annotation) if rest else [_field_entry(key, field, kinds)]


def _owners_with(owners: list[Model], path: list[str]) -> list[Model]:
    """The classes in which the rest of the path also exists; all classes if it exists in none."""
    return [m for m in owners if _exists(path[1:], m.model_fields[path[0]].annotation)] or owners


def _exists(path: list[str], annotation: Any) -> bool:
    try:
        return bool(list(_walk(".".join(path), path, annotation)))
    except UserError:
        return False


def _field_entry(key: str, field: FieldInfo, kinds: tuple[str, ...] = ()) -> Entry:
    words = _type_words(TypeAdapter(Annotated[field.annotation, field]))
    return Entry(key, field.annotation, _one_line(field.description), words, _default_words(field), kinds)


def _content(entry: Entry) -> tuple[str, ...]:
    return entry.meaning, entry.type, entry.default


def _entry_lines(entry: Entry) -> Iterator[str]:
    yield entry.key + (f"  (kind {', '.join(entry.kinds)})" if entry.kinds else "")
    yield f"  {entry.meaning}"
    if entry.type:
        yield f"  type: {entry.type}"
    if entry.default:
        yield f"  {'' if entry.default == REQUIRED else 'default: '}{entry.default}"
    is_list = _items(entry.annotation) is not entry.annotation
    inside = f"{entry.key}.N" if is_list and entry.models else entry.key
    if len(entry.models) > 1:
        yield "  kinds:"
        width = max(len(kind_of(model)) for model in entry.models)
        yield from (f"    {kind_of(model):<{width}}  {_doc(model)}" for model in entry.models)
        yield f"  for the keys of a kind: jaxformer help {inside}.{kind_of(entry.models[0])}"
    elif entry.models:
        yield "  keys:"
        yield from (f"  {line}" for line in _field_lines(inside, entry.models[0]))


def _field_lines(prefix: str, model: Model) -> list[str]:
    keys = {f"{prefix}.{name}".lstrip("."): field for name, field in _fields(model)}
    width = max(map(len, keys), default=0)
    return [f"  {key:<{width}}  {_one_line(field.description)}" for key, field in keys.items()]


# ---------------------------------------------------------------- all keys
def format_markdown() -> str:
    """All keys as Markdown: one table per config class."""
    sections = []
    for model, places in _find_places().items():
        shown = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
        lines = [f"#### {model.__name__}", "", _escape(_doc(model)), "", f"At: {shown}"]
        if rows := [_markdown_row(name, field) for name, field in _fields(model)]:
            lines += ["", "| key | type | default | meaning |", "|---|---|---|---|", *rows]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _find_places() -> dict[Model, list[str]]:
    """Every config class with the keys at which it can occur, in the order of the tree."""
    places: dict[Model, list[str]] = {}

    def visit(key: str, model: Model, kind: str) -> None:
        shown = f"`{key}`" + (f" with kind `{kind}`" if kind else "") if key else "the top level"
        places.setdefault(model, []).append(shown)
        for name, field in _fields(model):
            entry = Entry(f"{key}.{name}".lstrip("."), field.annotation, "")
            is_list = _items(field.annotation) is not field.annotation
            for member in entry.models:
                inside = f"{entry.key}.N" if is_list else entry.key
                visit(inside, member, kind_of(member) if len(entry.models) > 1 else "")

    visit("", RunConfig, "")
    return places


def _markdown_row(name: str, field: FieldInfo) -> str:
    def link(model: str) -> str:
        return f"[{model}](#{model.lower()})"

    words = _type_words(TypeAdapter(Annotated[field.annotation, field]), link)
    default, meaning = _default_words(field), _one_line(field.description)
    return f"| `{name}` | {_escape(words)} | {_escape(default)} | {_escape(meaning)} |"


def _escape(text: str) -> str:
    """Escape Markdown outside of code, and the separator of table cells everywhere."""
    parts = text.replace("|", "\\|").split("`")
    parts[::2] = [part.replace("*", "\\*").replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


# ---------------------------------------------------------------- classes and fields
def kind_of(model: Model) -> str:
    """The constant `kind` of a member of a union; empty for other classes."""
    field = model.model_fields.get("kind")
    kinds = typing.get_args(field.annotation) if field is not None else ()
    return kinds[0] if len(kinds) == 1 else ""


def _fields(model: Model) -> list[tuple[str, FieldInfo]]:
    """The fields of a class without a constant `kind`."""
    return [(name, field) for name, field in model.model_fields.items() if name != "kind" or not kind_of(model)]


def _items(annotation: Any) -> Any:
    """The item type of a list of configs; every other annotation unchanged."""
    try:
        item = item_type(annotation)
    except IndexError:
        return annotation
    return item


def _doc(model: Model) -> str:
    return _one_line(model.__doc__)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _parent(key: str, path: list[str]) -> str:
    return ".".join(key.split(".")[: -len(path)])


def _default_words(field: FieldInfo) -> str:
    return REQUIRED if field.is_required() else _value_words(field.default)


def _value_words(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return kind_of(type(value)) or "its own defaults"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value_words, value))}]"
    return value if isinstance(value, str) and value else json.dumps(value)


# ---------------------------------------------------------------- types in words
def _type_words(adapter: TypeAdapter, name_model: Callable[[str], str] = str) -> str:
    return _schema_words(adapter.json_schema(ref_template="{model}"), name_model)


def _schema_words(schema: dict[str, Any], name_model: Callable[[str], str]) -> str:
    """A JSON schema in plain words."""
    if "$ref" in schema:
        return name_model(schema["$ref"])
    if members := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_schema_words(member, name_model) for member in members))
    if "const" in schema or "enum" in schema:
        return ", ".join(map(str, schema.get("enum", [schema.get("const")])))
    if schema["type"] == "array":
        return _list_words(schema, name_model)
    if schema["type"] == "object":
        return name_model(schema["title"]) if "title" in schema else "object with named fields"
    words = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "null": "none"}
    limits = ", ".join(LIMITS[name](schema) for name in LIMITS if name in schema)
    return words[schema["type"]] + (f" ({limits})" if limits else "")


LIMITS: dict[str, Callable[[dict[str, Any]], str]] = {
    "minimum": lambda schema: f"at least {schema['minimum']:g}",
    "exclusiveMinimum": lambda schema: (
        f"at least {schema['exclusiveMinimum'] + 1}"
        if schema["type"] == "integer"
        else f"above {schema['exclusiveMinimum']:g}"
    ),
    "maximum": lambda schema: f"at most {schema['maximum']:g}",
    "exclusiveMaximum": lambda schema: f"below {schema['exclusiveMaximum']:g}",
    "multipleOf": lambda schema: f"a multiple of {schema['multipleOf']}",
}


def _list_words(schema: dict[str, Any], name_model: Callable[[str], str]) -> str:
    if "prefixItems" in schema:
        return f"list of {' and '.join(_schema_words(item, name_model) for item in schema['prefixItems'])}"
    items = _schema_words(schema["items"], name_model)
    return f"list of {items}" + (f", at least {schema['minItems']}" if "minItems" in schema else "")
