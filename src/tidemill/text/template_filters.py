"""The filters and tests of chat templates: jinja2's own and transformers' `tojson`, each within the budget.

A filter that walks a whole value has it measured first; one that is lazy counts what passes through it. Left out are
those for web pages whose cost cannot be told beforehand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import GeneratorType
from typing import Any

import jinja2
from jinja2 import pass_context
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Context, markup_join, str_join
from jinja2.tests import TESTS

from tidemill.text.template_budget import CALL_STEPS, budget
from tidemill.text.template_metering import CHECKED, JOINED, SLICED, TICK
from tidemill.text.template_operations import (
    COMPARISONS,
    binary,
    check_naive,
    check_replacing,
    check_width,
    checked,
    modulo,
    sliced,
)

# jinja2 has filters as functions of any kind, for which there is no closer type.
Function = Any

_WEB = frozenset(["pprint", "striptags", "urlize", "wordwrap", "xmlattr"])
_LAZY = frozenset(["batch", "map", "reject", "rejectattr", "select", "selectattr"])
_SHALLOW = frozenset(
    [
        "abs",
        "attr",
        "count",
        "d",
        "default",
        "first",
        "float",
        "int",
        "items",
        "last",
        "length",
        "list",
        "random",
        "reverse",
    ]
)
_WIDTHS = frozenset(["batch", "center", "indent", "round", "slice"])
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_LISTING = frozenset(["batch", "dictsort", "groupby", "join", "list", "max", "min", "slice", "sort", "sum", "unique"])


def counted_filters() -> dict[str, Function]:
    own = {"tojson": _to_json, "sum": _sum, "join": _join, "replace": _replace, "format": _format, "trim": _trim}
    own["indent"] = _indent
    named = {name: function for name, function in FILTERS.items() if name not in _WEB}
    made = {name: _counted(name, own.get(name, function)) for name, function in named.items()}
    made[JOINED] = pass_context(_joined)
    made[SLICED] = pass_context(lambda context, *args: sliced(*args))
    made[CHECKED] = pass_context(lambda context, value: checked(value))
    return made


def counted_tests() -> dict[str, Function]:
    made: dict[str, Function] = dict(TESTS)
    for name, compare in COMPARISONS.items():
        made[name] = _counted_comparison(compare)
    # Of a text, the remainder is the text filled in.
    made["odd"] = pass_context(lambda context, value: modulo(value, 2) == 1)
    made["even"] = pass_context(lambda context, value: modulo(value, 2) == 0)
    made["divisibleby"] = pass_context(lambda context, value, num: modulo(value, num) == 0)
    for name in ("lower", "upper"):
        made[name] = _counted_question(TESTS[name])
    return made


def tick(steps: int) -> tuple[str, Function]:
    """The filter that counts one turn; it looks at no value, for a template may call it by name."""

    @pass_context
    def count(context: Context, value: Any) -> bool:
        budget().step(steps)
        return True

    return f"{TICK}{steps}", count


def _counted(name: str, function: Function) -> Function:
    # None of jinja2's filters runs at compile time once it asks for the context, which is there only in a rendering.
    wants = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def run(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        spending = budget()
        spending.step(CALL_STEPS)
        if name in _LISTING and isinstance(value, str):
            spending.items(len(value))
        if name in _LAZY:
            value = spending.counted(value) if value else value
        elif name not in _SHALLOW:
            if isinstance(value, GeneratorType):
                value = list(value)
            spending.read(spending.measure(value))
            for given in (*args, *kwargs.values()):
                spending.measure(given)
        if name in _WIDTHS:
            for given in (*args, *kwargs.values()):
                check_width(given)
        leading = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        first = () if wants is None else (leading[wants.name],)
        made = function(*first, value, *args, **kwargs)
        return spending.counted(made) if isinstance(made, GeneratorType) else spending.take(made)

    return run


def _counted_comparison(compare: Function) -> Function:
    @pass_context
    def run(context: Context, value: Any, other: Any) -> Any:
        return compare(checked(value), checked(other))

    return run


def _counted_question(ask: Function) -> Function:
    @pass_context
    def run(context: Context, value: Any) -> Any:
        return ask(checked(value))

    return run


def _joined(context: Context, parts: list[Any]) -> str:
    budget().fits(budget().measure(parts))
    return markup_join(parts) if context.eval_ctx.autoescape else str_join(parts)


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> Any:
    spending = budget()
    items = list(spending.counted(value))
    if attribute is not None:
        items = list(map(make_attrgetter(context.environment, attribute), items))
    spending.fits(spending.measure(items) + len(items) * spending.measure(d))
    return FILTERS["join"](context.eval_ctx, items, d)


@pass_context
def _sum(context: Context, value: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    items = budget().counted(value)
    if isinstance(start, str):
        raise TypeError("sum() can't sum strings [use ''.join(seq) instead]")
    for item in items if attribute is None else map(make_attrgetter(context.environment, attribute), items):
        start = binary("+", start, item)
    return start


@pass_context
def _replace(context: Context, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
    check_replacing(str(s), str(old), str(new))
    return FILTERS["replace"](context.eval_ctx, s, old, new, count)


def _format(value: Any, *args: Any, **kwargs: Any) -> Any:
    if args and kwargs:
        raise jinja2.exceptions.FilterArgumentError("can't handle positional and keyword arguments at the same time")
    return modulo(value if isinstance(value, str) else str(value), kwargs or args)


def _trim(value: Any, chars: str | None = None) -> Any:
    if isinstance(chars, str):
        check_naive(str(value), chars)
    return FILTERS["trim"](value, chars)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    text = str(s)
    lines = 1 + sum(map(text.count, _LINE_ENDS))
    budget().fits(len(text) + lines * (len(width) if isinstance(width, str) else check_width(width)))
    return FILTERS["indent"](s, width, first, blank)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no model was trained on.
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        spending = budget()
        spending.fits(spending.measure(value) * (1 + sum(map(len, separators or ()))))
        return encoder.encode(value)
    check_width(len(indent) if isinstance(indent, str) else indent)
    return budget().text(encoder.iterencode(value))
