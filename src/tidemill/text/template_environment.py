"""The jinja2 environment chat templates run in: sandboxed, with the extras transformers gives them and no others.

Templates come with models and are not trusted. They see plain data only (`plain`), cannot change it, cannot reach
Python's own attributes, and run within a budget. Knows jinja2; does not know messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from markupsafe import Markup

from tidemill.errors import ConfigError
from tidemill.text.template_budget import CALL_STEPS, budget, spending
from tidemill.text.template_filters import counted_filters, counted_tests, tick
from tidemill.text.template_metering import metered
from tidemill.text.template_operations import (
    INTERCEPTED,
    CountedEscapeFormatter,
    CountedFormatter,
    binary,
    call_method,
    check_width,
    checked,
    is_known_method,
)

MAX_SOURCE = 256 * 1024


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which keeps templates from reaching out, and a budget, which keeps them from running on."""

    intercepted_binops = INTERCEPTED

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=_counted_output
        )
        self.filters, self.tests = counted_filters(), counted_tests()
        self.concat = _concat  # type: ignore[method-assign]
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Scratch

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return binary(operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and is_known_method(obj, attr)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, checked(argument) if isinstance(argument, tuple) else argument)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, takes_mapping = value.__self__, value.__name__ == "format_map"
        formatter = CountedEscapeFormatter(self, escape=text.escape) if isinstance(text, Markup) else None
        vformat = (formatter or CountedFormatter(self)).vformat

        def fill(*args: Any, **kwargs: Any) -> str:
            made = vformat(text, (), args[0]) if takes_mapping else vformat(text, args, kwargs)
            return type(text)(budget().take(made))

        return fill

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget().step(CALL_STEPS)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | list | tuple | dict) and self.is_safe_callable(obj):
            # Every call inside a loop carries the loop's variables for functions that ask for the context.
            named = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
            return call_method(obj, args, named)
        if isinstance(owner, LoopContext):
            # `loop.changed(...)` compares.
            args = tuple(map(checked, args))
        return budget().take(super().call(context, obj, *args, **kwargs))


def environment() -> TemplateEnvironment:
    return TemplateEnvironment()


def compile_template(source: str) -> jinja2.Template:
    """A template for `render`."""
    if len(source) > MAX_SOURCE:
        raise _unusable(f"is longer than {MAX_SOURCE:,} characters")
    made = environment()
    try:
        tree, weights = metered(made.parse(source), made)
        made.filters.update(map(tick, weights))
        return jinja2.Template.from_code(made, made.compile(tree), made.make_globals(None))
    except jinja2.TemplateSyntaxError as error:
        raise _unusable(
            f"has a syntax error on line {error.lineno}: {error.message}", f"{error.message} (line {error.lineno})"
        ) from error
    except Exception as error:
        # Brackets or loops nested too deep, or a number too long, end wherever Python first meets a limit of its own.
        raise _unusable("cannot be compiled", f"{type(error).__name__}: {error}"[:200]) from error


def _unusable(what: str, cause: str | None = None) -> ConfigError:
    return ConfigError(
        f"the chat template {what}",
        param="chat_template",
        cause=cause,
        fix="correct it, or pass another one: --chat-template path/to/template.jinja",
    )


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The text, or BudgetExceeded."""
    with spending() as left:
        return left.text(template.generate(variables))


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
        return dict(*map(checked, args), **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*map(checked, args))


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


@jinja2.pass_context
def _counted_output(context: Context, value: Any) -> Any:
    left = budget()
    left.fits(left.measure(value))
    return value


def _concat(pieces: Iterable[str]) -> str:
    return budget().text(pieces)


def _raise_exception(message: str) -> None:
    budget().measure(message)
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    check_width(len(format))
    return datetime.now().strftime(format)
