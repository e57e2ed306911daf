"""Pickles read as plain data: no name in them is imported, nothing that they name is called, whatever the bytes.

:class:`PlainUnpickler` is Python's own unpickler (the one in Python: that in C makes room for as many remembered values
as one instruction of five bytes says) with few instructions. A name must be one of an exact list of pairs, each of
which stands for a value or function that the caller gives. Memory and time are in proportion to the bytes read.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

from mua.utils.strict_json import label

_KEYS: frozenset[type] = frozenset({str, int, bool, float, bytes, type(None)})
"""What may be a key of a dictionary, beside a record. Tuples may not: a deeply nested one overflows C's stack."""
_INSTRUCTIONS = (
    "PROTO FRAME MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE "
    "SHORT_BINBYTES BINBYTES EMPTY_TUPLE EMPTY_LIST EMPTY_DICT TUPLE1 TUPLE2 TUPLE3 TUPLE APPEND APPENDS GLOBAL "
    "STACK_GLOBAL BINPERSID MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET STOP"
)


class PickleError(ValueError):
    """The bytes are no pickle of the admitted kind; the message says why, as the end of a sentence about "it"."""


class Record:
    """An object that a pickle asks for: the name of its class and the state that it wants it to have."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str, *_: Any) -> None:
        self.kind, self.state = kind, cast(Any, None)

    @classmethod
    def fields(cls, value: Any, kind: str) -> dict[str, Any]:
        """Those of ``value``, which must be an instance of the class ``kind``."""
        if type(value) is not cls or value.kind != kind or type(value.state) is not dict:
            raise PickleError(f"it has something else where a {kind} should be")
        return cast(dict[str, Any], value.state)


class PlainUnpickler(pickle._Unpickler):
    """Reads one pickle by :meth:`read_value`.

    Args:
        names: what stands for each pair of module and name that it may ask for. Only these are ever called, with
            arguments that may be any plain values.
        storage: gives what stands for a persistent id; without it there may be none.
    """

    stack: list[Any]

    def __init__(
        self, data: bytes, names: Mapping[tuple[str, str], Any], storage: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names
        if storage is not None:
            self.persistent_load = storage  # type: ignore[method-assign, assignment]

    def read_value(self) -> Any:
        """What the pickle holds: plain values, lists, tuples and dictionaries, and what stands for names.

        Raises:
            PickleError: it asks for another name, uses another instruction, or is damaged.
        """
        try:
            return self.load()
        except PickleError:
            raise
        except Exception as error:  # Python's unpickler tells damage by whatever its parts happen to raise
            raise PickleError("it is damaged, cut short, or has an instruction that none has") from error

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name, which is never imported."""
        if (module, name) not in self._names:
            raise PickleError(f"it names {label(module)}.{label(name)}")
        return self._names[module, name]

    def load_call(self) -> None:
        """Replace a function and its arguments by what it gives."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or not callable(function):
            raise PickleError("it calls what is no name")
        self.stack.append(function(*arguments))

    def load_state(self) -> None:
        """Give the last object its state, once."""
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not Record or target.state is not None:
            raise PickleError("it changes what is no new object")
        target.state = state

    def load_items(self, items: list[Any]) -> None:
        """Add keys and values in turn to the last dictionary."""
        target, keys = self.stack[-1], items[::2]
        if type(target) is not dict or len(items) % 2:
            raise PickleError("it adds to what is no dictionary")
        if any(type(key) is not Record and type(key) not in _KEYS for key in keys):
            raise PickleError("it has a key that is neither text nor number")
        target.update(zip(keys, items[1::2], strict=True))

    dispatch: ClassVar[dict[int, Any]] = {
        **{getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]
           for name in _INSTRUCTIONS.split()},
        pickle.REDUCE[0]: load_call,
        pickle.NEWOBJ[0]: load_call,
        pickle.BUILD[0]: load_state,
        pickle.SETITEM[0]: lambda self: self.load_items([self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS[0]: lambda self: self.load_items(self.pop_mark()),
    }  # fmt: skip
