"""`key=value` overrides, checked against the types of the config tree.

A key is a dotted path (`model.decoder.pattern.0.mlp.dim`). A value is read as JSON if the field accepts the result, and
as plain text otherwise. Setting the `kind` of a union switches the node to that kind and keeps the fields that both
kinds have.
"""

import contextlib
import difflib
import json
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar, Union

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from jaxformer.config.base import Config
from jaxformer.errors import UserError

C = TypeVar("C", bound=Config)


def apply_overrides(config: C, overrides: Sequence[str]) -> C:
    """Apply the `key=value` overrides in order, then validate the whole config once."""
    tree = config.model_dump(mode="json")
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key:
            raise UserError(f"override '{override}': expected key=value, such as train.steps=200")
        _assign(type(config), tree, key.split("."), value, key)
    return validate_tree(type(config), tree)


def validate_tree(cls: type[C], tree: Any, source: str = "") -> C:
    """Build a config from nested dictionaries; errors name the field, the value and what is allowed."""
    try:
        return cls.model_validate(tree)
    except ValidationError as error:
        where = f"{source}: " if source else ""
        raise UserError("\n".join(where + line for line in explained(error, cls))) from None


def _assign(annotation: Any, node: Any, path: list[str], value: str, key: str) -> None:
    """Set the field at `path` below `node`; `annotation` is the type of `node` and is followed along the path."""
    name, rest = path[0], path[1:]
    if isinstance(node, list):
        _assign_item(annotation, node, path, value, key)
        return
    fields = _fields(annotation, node)
    if name not in fields:
        raise UserError(f"override {unknown_field(key, path, fields)}")
    child = fields[name]
    if not rest:
        parsed = _parse(child, value, key)
        if name == "kind" and parsed != node.get("kind") and len(member_models(annotation)) > 1:
            _switch_kind(annotation, node, parsed)
        node[name] = parsed
        return
    if node.get(name) is None:
        if not member_models(child):
            raise UserError(f"override '{key}': '{name}' has no fields")
        node[name] = {}
    elif not isinstance(node[name], dict | list):
        raise UserError(f"override '{key}': '{name}' is {node[name]!r}, which has no fields")
    _assign(child, node[name], rest, value, key)


def _assign_item(annotation: Any, node: list, path: list[str], value: str, key: str) -> None:
    name, rest = path[0], path[1:]
    if not name.isdigit() or int(name) >= len(node):
        raise UserError(f"override '{key}': '{name}' is not an index below {len(node)}")
    item = item_type(annotation)
    if rest and isinstance(node[int(name)], dict | list):
        _assign(item, node[int(name)], rest, value, key)
    elif rest:
        raise UserError(f"override '{key}': item {name} is {node[int(name)]!r}, which has no fields")
    else:
        node[int(name)] = _parse(item, value, key)


def _switch_kind(annotation: Any, node: dict, kind: str) -> None:
    """Keep the fields that the new kind has and whose values it accepts; the others get their defaults."""
    fields = _model_of_kind(annotation, kind).model_fields
    for name, value in list(node.items()):
        if name not in fields or not _accepts(fields[name], value):
            del node[name]


def _model_of_kind(annotation: Any, kind: Any) -> type[BaseModel] | None:
    return next((m for m in member_models(annotation) if m.model_fields["kind"].default == kind), None)


def _accepts(field: FieldInfo, value: Any) -> bool:
    try:
        TypeAdapter(Annotated[field.annotation, field]).validate_python(value)
    except ValidationError:
        return False
    return True


def _fields(annotation: Any, node: dict) -> dict[str, Any]:
    """Types of the fields that a node may have, by name; the `kind` of the node selects the member of a union."""
    models = member_models(annotation)
    if len(models) > 1:
        chosen = [m for m in models if m.model_fields["kind"].default == node.get("kind")]
        kinds = typing.Literal[tuple(m.model_fields["kind"].default for m in models)]
        fields = _fields(chosen[0], node) if chosen else {}
        return fields | {"kind": kinds}
    return {name: _annotation(field) for name, field in models[0].model_fields.items()} if models else {}


def _annotation(field: FieldInfo) -> Any:
    """The type of a field; a union keeps its discriminator, so that an error names the fields of one kind only."""
    return Annotated[field.annotation, field] if field.discriminator else field.annotation


def _union_members(annotation: Any) -> list[Any]:
    """The members of a union, without `Annotated` and `None`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _union_members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return [member for part in typing.get_args(annotation) for member in _union_members(part)]
    return [] if annotation is type(None) else [annotation]


def member_models(annotation: Any) -> list[type[BaseModel]]:
    """The config classes in a union, or the class itself."""
    return [m for m in _union_members(annotation) if isinstance(m, type) and issubclass(m, BaseModel)]


def item_type(annotation: Any) -> Any:
    """The type of the items of a list."""
    tuples = [member for member in _union_members(annotation) if typing.get_origin(member) is tuple]
    return typing.get_args(tuples[0])[0]


def _parse(annotation: Any, text: str, key: str) -> Any:
    """The value of `text` read as JSON if the field accepts that, otherwise as plain text."""
    adapter: TypeAdapter = TypeAdapter(annotation)
    candidates = [None] if text in ("none", "None") else []
    with contextlib.suppress(json.JSONDecodeError):
        candidates.append(json.loads(text))
    failure = None
    for candidate in [*candidates, text]:
        try:
            # Strict for booleans: otherwise pydantic would accept train.steps=true as 1.
            value = adapter.validate_python(candidate, strict=isinstance(candidate, bool))
            return adapter.dump_python(value, mode="json")
        except ValidationError as error:
            failure = failure or error
    raise UserError(f"override '{key}={text}': " + "; ".join(explained(failure, annotation)))


def unknown_field(key: str, path: list[str], fields: Iterable[str]) -> str:
    """Say that the first name of `path`, the rest of a key, is none of the fields, and name the nearest ones."""
    name, parent = path[0], key.split(".")[: -len(path)]
    near = difflib.get_close_matches(name, fields, n=3, cutoff=0.5)
    shown = ", ".join(".".join([*parent, n]) for n in (near or sorted(fields)))
    return f"'{key}': no field '{name}'; " + (f"did you mean {shown}?" if near else f"there are: {shown}")


def explained(error: ValidationError, cls: Any = None) -> list[str]:
    """One line per error: the dotted key, its value, and what is wrong with it."""
    errors = error.errors()
    lines = []
    for e in errors:
        has_nested = any(other["loc"][: len(e["loc"])] == e["loc"] and other is not e for other in errors)
        if has_nested and e["type"] == "too_short":  # pydantic does not count items that failed
            continue
        path = ".".join(_keys(cls, e["loc"]))
        reason = e["msg"].removeprefix("Value error, ")
        simple = isinstance(e["input"], str | int | float | bool | None)
        value = f" = {e['input']!r}" if simple and e["type"] != "missing" else ""
        lines.append(f"{path}{value}: {reason}" if path else reason)
    return lines


def _keys(annotation: Any, location: tuple[str | int, ...]) -> list[str]:
    """The dotted key of an error, as a user writes it: pydantic's location without the kinds it adds for unions."""
    if not location:
        return []
    part, rest = location[0], location[1:]
    models = member_models(annotation)
    if len(models) > 1:
        chosen = _model_of_kind(annotation, part)
        return _keys(chosen, rest) if chosen else [str(part), *_keys(None, rest)]
    if isinstance(part, int):
        return [str(part), *_keys(item_type(annotation) if annotation else None, rest)]
    field = models[0].model_fields.get(part) if models else None
    return [str(part), *_keys(field and field.annotation, rest)]
