"""The jinja2 environment chat templates run in: sandboxed, with the extras transformers gives them and no others.

Templates come with models and are not trusted. They see plain data only (`plain`), cannot change it, and cannot reach
Python's own attributes. Knows jinja2; does not know messages.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tidemill.errors import ConfigError


def environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    made.globals["dict"] = _Dict()
    made.globals["namespace"] = _Scratch
    return made


def compile_template(source: str) -> jinja2.Template:
    try:
        return environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template has a syntax error on line {error.lineno}: {error.message}",
            param="chat_template",
            cause=f"{error.message} (line {error.lineno})",
            fix="correct it, or pass another one: --chat-template path/to/template.jinja",
        ) from error


def plain(value: Any) -> Any:
    """A copy made of JSON's types alone: an object with methods of its own would be a way out of the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            # Of a subclass (an enum, a numpy number) the value counts, not what it prints as.
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        # Messages and tools of the openai package are pydantic models.
        return plain(dump())
    return f"<{type(value).__name__}>"


class _GenerationTag(Extension):
    """Accepts {% generation %}...{% endgeneration %}, which marks assistant text for training, as plain text."""

    tags = {"generation"}  # noqa: RUF012 - the type is jinja2's

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


class _Dict:
    """`dict(...)` without the type behind it, whose attributes lead to Python's internals."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Scratch(Namespace):
    """`namespace(...)`, which refuses names with an underscore in front: stored there, they hide Python's own."""

    # The first argument is not called self, so that a template may have a variable of that name.
    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.sandbox.SecurityError(f"a namespace cannot hold {name!r}: names start with a letter")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
