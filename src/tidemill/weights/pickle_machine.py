"""A machine for the part of the pickle language that a dictionary of tensors is written in.

A pickle is a program. Python's own machine runs all of it, and there a few bytes may ask for gigabytes, or build what
overflows the C stack when it is hashed. This one has only the instructions that torch.save needs, each bounded by the
bytes that are there. It calls nothing but what its owner hands out by name, and does not know tensors.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

# About 35 instructions describe a tensor.
_MAX_INSTRUCTIONS = 4_000_000
# Arguments and shapes are the only tuples, and shapes lie in arguments.
_MAX_TUPLE = 64
_INTEGER_BYTES = 8
# Names end up in messages.
_MAX_TEXT = 1 << 16
_CONSTANTS = {pickle.NONE: None, pickle.NEWTRUE: True, pickle.NEWFALSE: False, pickle.EMPTY_TUPLE: ()}
_NUMBERS = {pickle.BININT: "<i", pickle.BININT1: "<B", pickle.BININT2: "<H", pickle.BINFLOAT: ">d"}
_TEXT_LENGTHS = {pickle.SHORT_BINUNICODE: "<B", pickle.BINUNICODE: "<I"}
_TUPLE_LENGTHS = {pickle.TUPLE1: 1, pickle.TUPLE2: 2, pickle.TUPLE3: 3}
_PUT_AT = {pickle.BINPUT: "<B", pickle.LONG_BINPUT: "<I"}
_GET_AT = {pickle.BINGET: "<B", pickle.LONG_BINGET: "<I"}


class ForeignInstruction(pickle.UnpicklingError):
    """An instruction of the language that no dictionary of tensors needs."""


class PickleMachine:
    """Runs one pickle. `find_name` gives what a name stands for, `find_reference` what a persistent id does."""

    def __init__(
        self, data: bytes, find_name: Callable[[str, str], Any], find_reference: Callable[[Any], object]
    ) -> None:
        self._data, self._at = data, 0
        self._find_name, self._find_reference = find_name, find_reference
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        """The stacks below each open mark."""
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(_MAX_INSTRUCTIONS):
            code = self._take(1)
            if code == pickle.STOP:
                return self._stack.pop()
            if (instruction := _INSTRUCTIONS.get(code)) is not None:
                instruction(self)
            else:
                self._step(code)
        raise pickle.UnpicklingError(f"more than {_MAX_INSTRUCTIONS} instructions")

    def _step(self, code: bytes) -> None:
        """The instructions that differ only in a value or in the width of a number."""
        if code in _CONSTANTS:
            self._stack.append(_CONSTANTS[code])
        elif code in _NUMBERS:
            self._stack.append(self._number(_NUMBERS[code]))
        elif code in _TEXT_LENGTHS:
            self._stack.append(self._text(self._number(_TEXT_LENGTHS[code])))
        elif code in _TUPLE_LENGTHS:
            self._push_tuple([self._stack.pop() for _ in range(_TUPLE_LENGTHS[code])][::-1])
        elif code in _PUT_AT:
            self._memo[self._number(_PUT_AT[code])] = self._stack[-1]
        elif code in _GET_AT:
            self._stack.append(self._memo[self._number(_GET_AT[code])])
        else:
            raise _unknown(code)

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise pickle.UnpicklingError(f"it ends at byte {len(self._data)} and claims to go on to {end}")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _line(self) -> str:
        line = self._text(self._data.index(b"\n", self._at) - self._at)
        self._take(1)
        return line

    def _text(self, length: int) -> str:
        taken = self._take(length)
        if length > _MAX_TEXT:
            raise ForeignInstruction(f"a text of {length} bytes")
        return taken.decode("utf-8")

    def _push_tuple(self, items: list[Any]) -> None:
        inner = [item for item in items if isinstance(item, tuple)]
        if len(items) > _MAX_TUPLE or any(isinstance(entry, tuple) for item in inner for entry in item):
            raise ForeignInstruction("a tuple that is longer or deeper than the arguments of a tensor")
        self._stack.append(tuple(items))

    def _skip_protocol(self) -> None:
        self._take(1)

    def _skip_frame(self) -> None:
        self._take(8)

    def _mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _integer(self) -> None:
        count = self._number("<B")
        if count > _INTEGER_BYTES:
            raise ForeignInstruction(f"an integer of {count} bytes")
        self._stack.append(int.from_bytes(self._take(count), "little", signed=True))

    def _tuple(self) -> None:
        self._push_tuple(self._since_mark())

    def _list(self) -> None:
        self._stack.append([])

    def _append(self) -> None:
        self._extend([self._stack.pop()])

    def _appends(self) -> None:
        self._extend(self._since_mark())

    def _extend(self, items: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise pickle.UnpicklingError(f"an entry appended to a {type(self._stack[-1]).__name__}")
        self._stack[-1].extend(items)

    def _dictionary(self) -> None:
        self._stack.append({})

    def _set_item(self) -> None:
        value = self._stack.pop()
        self._set([self._stack.pop(), value])

    def _set_items(self) -> None:
        self._set(self._since_mark())

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise pickle.UnpicklingError(f"an entry set in a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing anything else may run as deep as the file likes. Optimizers count their parameters by integers.
            if type(key) not in (str, int):
                raise ForeignInstruction(f"a {type(key).__name__} as the key of a dictionary")
            target[key] = value

    def _name(self) -> None:
        module = self._line()
        self._stack.append(self._find_name(module, self._line()))

    def _stack_name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise pickle.UnpicklingError("a name that is no text")
        self._stack.append(self._find_name(module, name))

    def _call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(arguments, tuple) or not callable(function):
            raise pickle.UnpicklingError(f"a call of a {type(function).__name__}")
        self._stack.append(function(*arguments))

    def _reference(self) -> None:
        self._stack.append(self._find_reference(self._stack.pop()))

    def _discard_attributes(self) -> None:
        """They carry no weights (torch notes the versions of modules so), and would let a file change what it got."""
        self._stack.pop()


_INSTRUCTIONS: Mapping[bytes, Callable[[PickleMachine], None]] = MappingProxyType(
    {
        pickle.PROTO: PickleMachine._skip_protocol,
        pickle.FRAME: PickleMachine._skip_frame,
        pickle.MARK: PickleMachine._mark,
        pickle.MEMOIZE: PickleMachine._memoize,
        pickle.LONG1: PickleMachine._integer,
        pickle.TUPLE: PickleMachine._tuple,
        pickle.EMPTY_LIST: PickleMachine._list,
        pickle.APPEND: PickleMachine._append,
        pickle.APPENDS: PickleMachine._appends,
        pickle.EMPTY_DICT: PickleMachine._dictionary,
        pickle.SETITEM: PickleMachine._set_item,
        pickle.SETITEMS: PickleMachine._set_items,
        pickle.GLOBAL: PickleMachine._name,
        pickle.STACK_GLOBAL: PickleMachine._stack_name,
        pickle.REDUCE: PickleMachine._call,
        pickle.BINPERSID: PickleMachine._reference,
        pickle.BUILD: PickleMachine._discard_attributes,
    }
)


def _unknown(code: bytes) -> pickle.UnpicklingError:
    import pickletools

    for known in pickletools.opcodes:
        if known.code == code.decode("latin-1"):
            return ForeignInstruction(f"the pickle instruction {known.name}")
    return pickle.UnpicklingError(f"{code!r} is no instruction")
