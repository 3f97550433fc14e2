"""The operators and methods of a chat template, each checked for the size of its result before it is made.

The result is Python's own, or `BudgetExceeded`. Knows which methods of texts and lists a template may call: those whose
cost can be told beforehand. Does not know filters, or how a template is compiled.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from types import GeneratorType
from typing import Any

from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter

from tidemill.text.template_budget import CALL_STEPS, MAX_WIDTH, Budget, BudgetExceeded, budget, check_bits

# fmt: off
_TEXT_METHODS = frozenset((
    "capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "format", "format_map", "index",
    "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable",
    "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
    "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith",
    "strip", "swapcase", "title", "upper", "zfill",
))
# fmt: on
METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, _TEXT_METHODS),
    (dict, frozenset(["copy", "fromkeys", "get", "items", "keys", "values"])),
    ((list, tuple), frozenset(["copy", "count", "index"])),
    ((int, float), frozenset(["bit_length", "denominator", "imag", "is_integer", "numerator", "real"])),
    (bytes, frozenset()),
)
_PADDING = frozenset(("center", "ljust", "rjust", "zfill"))
_SPLITTING = frozenset(("split", "rsplit", "splitlines"))
# Python looks for these naively, character by character, so that the product of the lengths is what they cost.
_NAIVE = frozenset(["lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"])
_MAX_NAIVE = 2**32
_LOOKS_AT_ENDS = frozenset(("startswith", "endswith"))
_STARRED = re.compile(r"%[#0\- +]*(\d*\.)?\*")
_PLACE = re.compile(r"%[#0\- +.\d]+")
_NUMBER = re.compile(r"\d+")


def binary(sign: str, left: Any, right: Any) -> Any:
    return _BINARY[sign](left, right)


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        budget().fits(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        budget().items(len(left) + len(right))
    return left + right


def _multiply(left: Any, right: Any) -> Any:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str) and isinstance(times, int):
            budget().fits(len(value) * max(0, times))
        elif isinstance(value, list | tuple) and isinstance(times, int):
            budget().items(len(value) * max(0, times))
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() * max(0, right))
    return left**right


def modulo(left: Any, right: Any) -> Any:
    """A remainder, or a text filled in: '%s' % name."""
    if not isinstance(left, str):
        return left % right
    spending = budget()
    if _STARRED.search(left):
        raise BudgetExceeded("it formats with widths that are not written in the text")
    # A name in brackets may hold anything, so that behind one any number counts as a width.
    places = left if "%(" in left else "".join(_PLACE.findall(left))
    width = sum(map(_width, _NUMBER.findall(places)))
    # Each place may hold all there is to fill in.
    spending.fits(len(left) + width + left.count("%") * _written(right))
    return left % right


_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {"+": _add, "*": _multiply, "**": _power, "%": modulo}
INTERCEPTED = frozenset(_BINARY)


def _width(digits: str) -> int:
    return check_width(int(digits) if len(digits) < 12 else MAX_WIDTH + 1)


def check_width(value: Any) -> int:
    if isinstance(value, int) and abs(value) > MAX_WIDTH:
        raise BudgetExceeded(f"it asks for a width of more than {MAX_WIDTH:,}")
    return abs(value) if isinstance(value, int) else 0


def _written(value: Any) -> int:
    return budget().measure(value)


def sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    return budget().take(value[start:stop:step])


def checked(value: Any) -> Any:
    """A value that is about to be compared or looked up."""
    if isinstance(value, GeneratorType):
        value = list(value)
    if value is not None and not isinstance(value, bool | int | float):
        budget().read(_written(value))
    return value


def is_known_method(owner: Any, name: str) -> bool:
    return next((name in names for kind, names in METHODS if isinstance(owner, kind)), True)


def call_method(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a method of a text, a list or an object."""
    owner, name, spending = method.__self__, method.__name__, budget()  # type: ignore[attr-defined]
    if isinstance(owner, str):
        args = _text_arguments(owner, name, args, kwargs, spending)
    elif isinstance(owner, list | tuple) and name != "copy":
        checked(owner)
    args = tuple(map(checked, args))
    return spending.take(method(*args, **kwargs))


def _text_arguments(
    text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], spending: Budget
) -> tuple[Any, ...]:
    first = args[0] if args else kwargs.get("sep", kwargs.get("tabsize"))
    if name not in _LOOKS_AT_ENDS:
        spending.read(len(text))
    if name in _PADDING:
        check_width(first)
    elif name == "expandtabs":
        spending.fits(len(text) + text.count("\t") * check_width(8 if first is None else first))
    elif name == "join" and args:
        items = list(spending.counted(first))
        spending.fits(_written(items) + len(items) * len(text))
        return (items,)
    elif name == "replace" and len(args) > 1:
        check_replacing(text, first, args[1])
    elif name in _SPLITTING:
        spending.fits(len(text))
        spending.items(text.count(first) + 1 if isinstance(first, str) and first else len(text) // 8)
    if name in _NAIVE and isinstance(first, str):
        check_naive(text, first)
    return args


def check_replacing(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        places = text.count(old) if old else len(text) + 1
        budget().fits(len(text) + places * len(new))


def check_naive(text: str, wanted: str) -> None:
    if len(text) * len(wanted) > _MAX_NAIVE:
        raise BudgetExceeded(f"it looks for a text of {len(wanted):,} characters from the end of a longer one")


class _CountedFields:
    """For `'{:>8}'.format(...)`: widths are bounded, and what is filled in is counted as it is made."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        for digits in _NUMBER.findall(format_spec):
            _width(digits)
        _written(value)
        return budget().take(super().format_field(value, format_spec))  # type: ignore[misc]

    def convert_field(self, value: Any, conversion: Any) -> Any:
        _written(value)
        return super().convert_field(value, conversion)  # type: ignore[misc]

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        budget().step(CALL_STEPS)
        return super().get_field(field_name, args, kwargs)  # type: ignore[misc]


class CountedFormatter(_CountedFields, SandboxedFormatter):
    pass


class CountedEscapeFormatter(_CountedFields, SandboxedEscapeFormatter):
    pass


COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("==", "eq", "equalto"), operator.eq),
    **dict.fromkeys(("!=", "ne"), operator.ne),
    **dict.fromkeys((">", "gt", "greaterthan"), operator.gt),
    **dict.fromkeys((">=", "ge"), operator.ge),
    **dict.fromkeys(("<", "lt", "lessthan"), operator.lt),
    **dict.fromkeys(("<=", "le"), operator.le),
    "in": lambda value, holder: value in holder,
}
