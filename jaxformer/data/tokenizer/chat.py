"""Renders chat templates: Jinja programs in tokenizer files that write a conversation as one text.

The text equals that of `apply_chat_template` in transformers, whose environment this module reproduces: white space
around blocks is trimmed, loops may `break` and `continue`, `raise_exception`, `strftime_now` and `tojson` exist, and
`{% generation %}` tags have no effect. Templates come with the model, so they run in Jinja's sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxformer.errors import UserError

# Errors of Python expressions in a template, for example adding a number to a text.
EXPRESSION_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], tokens: Mapping[str, str]) -> str:
    """Render a conversation, followed by the beginning of the reply.

    Args:
      tokens: special tokens by name, such as bos_token.
    """
    messages = [_with_reasoning(message) for message in check_messages(messages)]
    compiled = _compile(template)
    try:
        text = compiled.render(messages=messages, tools=None, documents=None, add_generation_prompt=True, **tokens)
    except TemplateRefusal as refusal:
        raise UserError(f"the chat template does not accept these messages: {refusal}") from None
    except (jinja2.TemplateError, *EXPRESSION_ERRORS) as error:
        raise UserError(f"the chat template failed on these messages ({type(error).__name__}: {error})") from None
    if not text:
        raise UserError("the chat template wrote nothing for these messages")
    return text


# ---------------------------------------------------------------- messages
def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as plain JSON values, without fields that are None; raise if they are malformed."""
    example = '{"role": "user", "content": "Hello"}'
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise UserError(f"messages={messages!r}: must be a list of messages such as {example}")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UserError(f"message {i} is {message!r}: must be a dict such as {example}")
        fields = {name: _as_json(value, i) for name, value in message.items() if value is not None}
        if not isinstance(fields.get("role"), str):
            raise UserError(f"message {i}: role={message.get('role')!r}: must be a string such as 'user'")
        # A message that calls a tool has no content.
        if not isinstance(fields.get("content", "" if len(fields) > 1 else None), str | list):
            raise UserError(f"message {i}: content={message.get('content')!r}: must be a string or a list of parts")
        checked.append(fields)
    return checked


def _as_json(value: Any, i: int) -> Any:
    """Copy a value; a template must not get objects whose methods the sandbox does not know."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): _as_json(item, i) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item, i) for item in value]
    raise UserError(f"message {i} holds {value!r}: must consist of strings, numbers, lists and dicts")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Give the reasoning of a message the names that templates read."""
    reasoning = next((message[name] for name in REASONING_FIELDS if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


# ---------------------------------------------------------------- the Jinja environment
class TemplateRefusal(jinja2.TemplateError):
    """Raised by `raise_exception` in a template."""


class GenerationBlocks(jinja2.ext.Extension):
    """Parses `{% generation %}`, which marks replies for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as a set

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace` without private attributes, with which a template could pretend to be another type."""

    def __init__(*args: Any, **attributes: Any) -> None:  # no `self`, because a template may use that name
        self, *rest = args
        values = dict(*rest, **attributes)
        for name in values:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.sandbox.SecurityError(f"the attribute {name!r} of a namespace starts with an underscore")


@cache
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": Namespace,
        "dict": _make_dict,
    }
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the chat template has a syntax error in line {error.lineno}: {error.message}") from None


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike Jinja's own filter, it does not escape HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_dict(*args: Any, **fields: Any) -> dict[str, Any]:
    return dict(*args, **fields)
