"""Pickles read as plain data: no name in them is imported, nothing is called, and no other byte can make it so.

:func:`read_pickle` interprets the few instructions that ``torch.save`` and the index of a checkpoint consist of. Where
Python's own unpickler would import and call, this one only writes down what is asked for: a :class:`Name`, which must
be one of an exact list of pairs, and a :class:`PickledCall` of one with its arguments. What they mean is decided by
:mod:`mua.compat.plain_index` and :mod:`mua.compat.plain_archive`, which know each of them. Memory and time are in
proportion to the bytes read; Python's unpickler makes room for as many remembered values as one instruction of five
bytes says.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from megatron_bridge.plain_files import label

_KEYS: frozenset[type] = frozenset({str, int, bool, float, bytes, type(None)})
"""What may be a key of a dictionary, beside a call. Tuples may not: a deeply nested one overflows C's stack."""

DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
"""Those of tensors in checkpoints, by the name a pickle has for them."""
_MAX_DIMS = 16


class PickleError(ValueError):
    """The bytes are no pickle of the admitted kind; the message says why, as the end of a sentence about "it"."""


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """A name that a pickle asks for. It stands for itself: nothing is imported."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class PickledCall:
    """A call that a pickle asks for, and the state that it wants the result to have. Nothing is called."""

    function: Name
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A persistent id: in an archive of ``torch.save``, the values of a tensor."""

    key: Any


class _Machine:
    """The stack machine that a pickle is a program for."""

    __slots__ = ("data", "marks", "memo", "names", "position", "stack")

    def __init__(self, data: bytes, names: Collection[tuple[str, str]]) -> None:
        self.data, self.names, self.position = data, names, 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        end = self.position + count
        if end > len(self.data):
            raise PickleError("it is cut short")
        part, self.position = self.data[self.position : end], end
        return part

    def number(self, form: struct.Struct) -> Any:
        """The next number."""
        return form.unpack(self.take(form.size))[0]

    def line(self) -> str:
        """Text up to the end of the line."""
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise PickleError("it is cut short")
        text = self.data[self.position : end].decode()
        self.position = end + 1
        return text

    def name(self, module: Any, name: Any) -> None:
        """Push a name, if it is one of the admitted pairs."""
        if type(module) is not str or type(name) is not str or (module, name) not in self.names:
            raise PickleError(f"it names {label(module)}.{label(name)}")
        self.stack.append(Name(module, name))

    def items(self) -> list[Any]:
        """What was pushed since the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def tuple(self, count: int) -> None:
        """Replace the last ``count`` values by their tuple."""
        if len(self.stack) < count:
            raise PickleError("it takes a value that is not there")
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def group(self) -> None:
        """Push the tuple of what was pushed since the last mark."""
        items = self.items()
        self.stack.append(tuple(items))

    def call(self) -> None:
        """Replace a function and its arguments by their call."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(function) is not Name or type(arguments) is not tuple:
            raise PickleError("it calls what is no name")
        self.stack.append(PickledCall(function, arguments))

    def build(self) -> None:
        """Give the last call its state, once."""
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not PickledCall or target.state is not None:
            raise PickleError("it changes what is no new object")
        target.state = state

    def append(self, items: list[Any]) -> None:
        """Extend the last list."""
        if type(self.stack[-1]) is not list:
            raise PickleError("it extends what is no list")
        self.stack[-1].extend(items)

    def put(self, items: list[Any]) -> None:
        """Add keys and values in turn to the last dictionary."""
        target, keys = self.stack[-1], items[::2]
        if type(target) is not dict or len(items) % 2:
            raise PickleError("it adds to what is no dictionary")
        if any(type(key) is not PickledCall and type(key) not in _KEYS for key in keys):
            raise PickleError("it has a key that is neither text nor number")
        target.update(zip(keys, items[1::2], strict=True))

    def mark(self) -> None:
        """Begin a group of values."""
        self.marks.append(self.stack)
        self.stack = []


_U1, _U2, _U4, _U8 = (struct.Struct("<" + form) for form in "BHIQ")
_I4, _FLOAT = struct.Struct("<i"), struct.Struct(">d")

_OPERATIONS: dict[bytes, Callable[[_Machine], Any]] = {
    pickle.PROTO: lambda m: m.take(1),
    pickle.FRAME: lambda m: m.take(8),
    pickle.MARK: _Machine.mark,
    pickle.NONE: lambda m: m.stack.append(None),
    pickle.NEWTRUE: lambda m: m.stack.append(True),
    pickle.NEWFALSE: lambda m: m.stack.append(False),
    pickle.BININT: lambda m: m.stack.append(m.number(_I4)),
    pickle.BININT1: lambda m: m.stack.append(m.number(_U1)),
    pickle.BININT2: lambda m: m.stack.append(m.number(_U2)),
    pickle.LONG1: lambda m: m.stack.append(int.from_bytes(m.take(m.number(_U1)), "little", signed=True)),
    pickle.BINFLOAT: lambda m: m.stack.append(m.number(_FLOAT)),
    pickle.SHORT_BINUNICODE: lambda m: m.stack.append(m.take(m.number(_U1)).decode()),
    pickle.BINUNICODE: lambda m: m.stack.append(m.take(m.number(_U4)).decode()),
    pickle.SHORT_BINBYTES: lambda m: m.stack.append(m.take(m.number(_U1))),
    pickle.BINBYTES: lambda m: m.stack.append(m.take(m.number(_U4))),
    pickle.EMPTY_TUPLE: lambda m: m.stack.append(()),
    pickle.EMPTY_LIST: lambda m: m.stack.append([]),
    pickle.EMPTY_DICT: lambda m: m.stack.append({}),
    pickle.TUPLE1: lambda m: m.tuple(1),
    pickle.TUPLE2: lambda m: m.tuple(2),
    pickle.TUPLE3: lambda m: m.tuple(3),
    pickle.TUPLE: _Machine.group,
    pickle.APPEND: lambda m: m.append([m.stack.pop()]),
    pickle.APPENDS: lambda m: m.append(m.items()),
    pickle.SETITEM: lambda m: m.put([m.stack.pop(-2), m.stack.pop()]),
    pickle.SETITEMS: lambda m: m.put(m.items()),
    pickle.GLOBAL: lambda m: m.name(m.line(), m.line()),
    pickle.STACK_GLOBAL: lambda m: m.name(m.stack.pop(-2), m.stack.pop()),
    pickle.REDUCE: _Machine.call,
    pickle.NEWOBJ: _Machine.call,
    pickle.BUILD: _Machine.build,
    pickle.BINPERSID: lambda m: m.stack.append(Stored(m.stack.pop())),
    pickle.MEMOIZE: lambda m: m.memo.update({len(m.memo): m.stack[-1]}),
    pickle.BINPUT: lambda m: m.memo.update({m.number(_U1): m.stack[-1]}),
    pickle.LONG_BINPUT: lambda m: m.memo.update({m.number(_U4): m.stack[-1]}),
    pickle.BINGET: lambda m: m.stack.append(m.memo[m.number(_U1)]),
    pickle.LONG_BINGET: lambda m: m.stack.append(m.memo[m.number(_U4)]),
}
_BY_CODE = {code[0]: operation for code, operation in _OPERATIONS.items()}


def read_pickle(data: bytes, names: Collection[tuple[str, str]]) -> Any:
    """What a pickle holds: plain values, lists, tuples and dictionaries, with :class:`PickledCall` for every object.

    Args:
        names: pairs of module and name that it may ask for.

    Raises:
        PickleError: it asks for another name, uses another instruction, or is damaged.
    """
    machine = _Machine(data, names)
    try:
        while (code := machine.number(_U1)) != pickle.STOP[0]:
            operation = _BY_CODE.get(code)
            if operation is None:
                raise PickleError(f"its byte {machine.position - 1} is instruction {code:#04x}, which none has")
            operation(machine)
        return machine.stack.pop()
    except PickleError:
        raise
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise PickleError(f"it is damaged at byte {machine.position}") from error


def shape_of(numbers: Any) -> tuple[int, ...]:
    """``numbers``, if they can be the shape of a tensor."""
    if type(numbers) is not tuple or len(numbers) > _MAX_DIMS or not all(map(is_count, numbers)):
        raise PickleError("it has a shape that no tensor has")
    return numbers


def is_count(value: Any) -> bool:
    """Whether it can be a number of elements or bytes."""
    return type(value) is int and 0 <= value < 1 << 62
