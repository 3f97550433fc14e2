"""What one rendering of a chat template may cost: steps, characters, and the size of any single value.

Templates come with models and are not trusted, so nothing they write may take the process's time or memory without
being counted here. Knows sizes of plain values; does not know jinja2's syntax or what is rendered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.utils import Namespace

# About as many as the nodes of the syntax tree that run: a message of a long template takes one or two thousand.
MAX_STEPS = 32_000_000
# Written, copied or cut in one rendering. A template that collects its text in a variable copies it with each piece.
MAX_CHARS = 2**28
# Of one value. A body of a request is never larger.
MAX_VALUE = 2**25
MAX_ITEMS = 2_000_000
# Python takes nested tuples of any depth as keys, and overflows the C stack when there are too many.
MAX_DEPTH = 500
MAX_BITS = 2048
MAX_WIDTH = 100_000
# What takes Python longer than a node of the tree: an item that passes through a filter, a value that is measured,
# and the call of a macro, a method or a filter.
ITEM_STEPS, VALUE_STEPS, CALL_STEPS = 4, 8, 64
# Reading a character is so much cheaper than writing one.
CHARS_READ_PER_WRITTEN = 8


class BudgetExceeded(Exception):
    """No TemplateError: it is not the template that refuses, and no filter takes it for a failed conversion."""


class Budget:
    """What is left for one rendering."""

    __slots__ = ("chars", "steps")

    def __init__(self) -> None:
        self.steps, self.chars = MAX_STEPS, MAX_CHARS

    def step(self, count: int) -> None:
        self.steps -= count
        if self.steps < 0:
            raise BudgetExceeded(f"it takes more than {MAX_STEPS:,} steps")

    def write(self, count: int) -> None:
        self.chars -= count
        if self.chars < 0:
            raise BudgetExceeded(f"it writes and copies more than {MAX_CHARS:,} characters")

    def read(self, count: int) -> None:
        self.write(count // CHARS_READ_PER_WRITTEN)

    def fits(self, size: int) -> None:
        """Asked before a value of so many characters is made."""
        _check_value(size)
        self.write(size)

    def items(self, count: int) -> None:
        if count > MAX_ITEMS:
            raise BudgetExceeded(f"it makes a list of more than {MAX_ITEMS:,} items")
        self.write(count)

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.step(ITEM_STEPS)
            yield value

    def text(self, pieces: Iterable[str]) -> str:
        """The pieces as one text, given up while it is made when it becomes too long."""
        kept: list[str] = []
        size = 0
        for piece in pieces:
            self.step(ITEM_STEPS)
            size += len(piece)
            _check_value(size)
            kept.append(piece)
        self.write(size)
        return "".join(kept)

    def take(self, value: Any) -> Any:
        """Counts a value an operation has made."""
        if isinstance(value, str):
            self.fits(len(value))
        elif isinstance(value, list | tuple | dict):
            self.items(len(value))
        elif isinstance(value, int):
            check_bits(value.bit_length())
        return value

    def measure(self, value: Any) -> int:
        """About how many characters a value is when written, counting what stands in it twice twice.

        Ten lists, each with the one before in it twice and more, are small in memory and endless in print, and to
        compare or hash them takes as long.
        """
        if isinstance(value, str):
            return len(value)
        total, level, depth = 0, [value], 0
        while level:
            depth += 1
            self.step(VALUE_STEPS * len(level))
            if depth > MAX_DEPTH:
                raise BudgetExceeded(f"it nests values more than {MAX_DEPTH} deep")
            below: list[Any] = []
            for item in level:
                total += _own_size(item)
                if isinstance(item, dict):
                    below.extend(item)
                    below.extend(item.values())
                elif isinstance(item, list | tuple) or type(item) in _VIEWS:
                    below.extend(item)
                elif isinstance(item, Namespace):
                    below.append(object.__getattribute__(item, "_Namespace__attrs"))
                _check_value(total + len(below))
            level = below
        return total


_EMPTY: dict[Any, Any] = {}
_VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_RUNNING: ContextVar[Budget] = ContextVar("tidemill_template_budget")
budget = _RUNNING.get
"""The budget of the rendering that runs in this thread."""


@contextmanager
def spending() -> Iterator[Budget]:
    made = Budget()
    token = _RUNNING.set(made)
    try:
        yield made
    finally:
        _RUNNING.reset(token)


def check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise BudgetExceeded(f"it makes a number of more than {MAX_BITS:,} bits")


def _check_value(size: int) -> None:
    if size > MAX_VALUE:
        raise BudgetExceeded(f"it makes a value of more than {MAX_VALUE:,} characters")


def _own_size(item: Any) -> int:
    if isinstance(item, str):
        return len(item)
    return 4 + item.bit_length() // 3 if isinstance(item, int) else 4
