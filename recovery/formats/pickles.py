"""Reading pickles without executing anything in them.

`pickletools` splits a pickle into opcodes; the small machine here follows them with inert values only: no class is
looked up, no function is called, and whatever would be an object becomes a `Node` that remembers what it was to be.
"""

from __future__ import annotations

import pickletools
import struct
import time
from collections.abc import Callable, Iterator
from typing import IO, Final, NamedTuple, cast

OPCODE_LIMIT: Final = 3_000_000
"""Bounds time and memory (about a second and 70 MB for a million); a file of 10,000 tensors has some 400,000."""


class PickleDamaged(Exception):
    """The opcodes do not make up a whole pickle."""


class PickleTooLong(Exception):
    """More opcodes than the limits allow: nothing is known about it."""


class Node:
    """What an object in the pickle would have been."""

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: tuple[object, ...] = ()) -> None:
        self.name = name
        """`dict`, `list`, `set`, `global`, `persistent`, or the dotted name of a class or function."""
        self.args = args
        self.items: list[object] = []
        """Members; for a mapping key and value pairs."""
        self.state: object = None

    def pairs(self) -> Iterator[tuple[object, object]]:
        """Key and value pairs, where the members are such."""
        return (item for item in self.items if type(item) is tuple and len(item) == 2)

    def get(self, key: str) -> object:
        """The last value under a string key, or None; looks into the state of an instance too."""
        found: object = None
        for name, value in self.pairs():
            if name == key:
                found = value
        if found is None and isinstance(self.state, Node):
            found = self.state.get(key)
        return found


class BoundedReader:
    """The part of a file that `pickletools` needs; a damaged length must not make it ask for gigabytes."""

    def __init__(self, file: IO[bytes], size: int, limit: int) -> None:
        self._file = file
        self._size = size
        self._left = limit

    def read(self, size: int) -> bytes:
        """Raises PickleDamaged beyond the end of the file, PickleTooLong beyond the limit."""
        if size > self._size - self._file.tell():
            raise PickleDamaged("the file ends within it")
        if size > self._left:
            raise PickleTooLong("more bytes than the limit")
        self._left -= size
        return self._file.read(size)

    def readline(self) -> bytes:
        line = self._file.readline(self._left)
        self._left -= len(line)
        return line


class Pickled(NamedTuple):
    """A pickle's content, inert."""

    value: object
    persistent: list[object]
    """Persistent ids in the order of the file: for torch, the storages it refers to."""


def read(source: bytes | BoundedReader, deadline: float | None = None) -> Pickled:
    """The inert value of the pickle at the start of `source` (a file is read exactly to the pickle's end).

    `deadline` is on the monotonic clock. Raises PickleDamaged and PickleTooLong; OSError passes.
    """
    machine = _Machine()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(cast("IO[bytes]", source))):
            if opcode.name == "STOP":
                return Pickled(machine.stack.pop(), machine.persistents)
            if count >= OPCODE_LIMIT or (not count & 8191 and deadline is not None and time.monotonic() > deadline):
                raise PickleTooLong(f"more than {count} opcodes")
            machine.follow(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error) as error:
        raise PickleDamaged(str(error)[:200] or type(error).__name__) from None
    raise PickleDamaged("it ends before its last opcode")


class _Machine:
    def __init__(self) -> None:
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}
        self.persistents: list[object] = []

    def follow(self, name: str, argument: object) -> None:
        if name in _CONSTANTS:
            self.stack.append(argument)
        elif name in _FIXED:
            self.stack.append(_FIXED[name])
        elif name in _EMPTY:
            self.stack.append(Node(_EMPTY[name]))
        elif name in _GETS:
            self.stack.append(self.memo[int(str(argument))])
        elif name in _PUTS:
            self.memo[int(str(argument))] = self.stack[-1]
        elif name not in _IGNORED:
            _STEPS[name](self, argument)

    def cut(self) -> list[object]:
        """What was pushed since the last mark."""
        start = self.marks.pop()
        top = self.stack[start:]
        del self.stack[start:]
        return top

    def memoize(self, _: object) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def mark(self, _: object) -> None:
        self.marks.append(len(self.stack))

    def tuple_of_mark(self, _: object) -> None:
        self.stack.append(tuple(self.cut()))

    def tuple_of(self, count: int) -> None:
        top = tuple(self.stack[-count:])
        if len(top) < count:
            raise IndexError("stack underflow")
        del self.stack[-count:]
        self.stack.append(top)

    def collect(self, kind: str) -> None:
        node = Node(kind)
        top = self.cut()
        node.items = list(zip(top[::2], top[1::2], strict=True)) if kind == "dict" else top
        self.stack.append(node)

    def extend(self, top: list[object]) -> None:
        if isinstance(self.stack[-1], Node):
            self.stack[-1].items.extend(top)

    def append_one(self, _: object) -> None:
        self.extend([self.stack.pop()])

    def append_all(self, _: object) -> None:
        self.extend(self.cut())

    def set_one(self, _: object) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.extend([(key, value)])

    def set_all(self, _: object) -> None:
        top = self.cut()
        self.extend(list(zip(top[::2], top[1::2], strict=True)))

    def pop(self, _: object) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def pop_mark(self, _: object) -> None:
        self.cut()

    def duplicate(self, _: object) -> None:
        self.stack.append(self.stack[-1])

    def named(self, argument: object) -> None:
        self.stack.append(Node("global", (str(argument).replace(" ", "."),)))

    def named_on_stack(self, _: object) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(Node("global", (f"{module}.{name}",)))

    def make(self, function: object, arguments: object) -> None:
        name = str(function.args[0]) if isinstance(function, Node) and function.name == "global" else "?"
        self.stack.append(Node(name, arguments if type(arguments) is tuple else (arguments,)))

    def call(self, _: object) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.make(function, arguments)

    def call_with_keywords(self, _: object) -> None:
        self.stack.pop()
        self.call(None)

    def instance(self, argument: object) -> None:
        self.make(Node("global", (str(argument).replace(" ", "."),)), tuple(self.cut()))

    def instance_on_stack(self, _: object) -> None:
        function, *arguments = self.cut()
        self.make(function, tuple(arguments))

    def build(self, _: object) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Node):
            self.stack[-1].state = state

    def persistent(self, argument: object) -> None:
        self.persistents.append(argument)
        self.stack.append(Node("persistent", (argument,)))

    def persistent_on_stack(self, _: object) -> None:
        self.persistent(self.stack.pop())

    def opaque(self, _: object) -> None:
        self.stack.append(Node("?"))


_CONSTANTS: Final = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 "
    "BYTEARRAY8 UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 FLOAT BINFLOAT".split()
)
_FIXED: Final[dict[str, object]] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: Final = {"EMPTY_DICT": "dict", "EMPTY_LIST": "list", "EMPTY_SET": "set"}
_GETS: Final = frozenset(("GET", "BINGET", "LONG_BINGET"))
_PUTS: Final = frozenset(("PUT", "BINPUT", "LONG_BINPUT"))
_IGNORED: Final = frozenset(("PROTO", "FRAME", "READONLY_BUFFER"))
_STEPS: Final[dict[str, Callable[[_Machine, object], None]]] = {
    "MEMOIZE": _Machine.memoize,
    "MARK": _Machine.mark,
    "TUPLE": _Machine.tuple_of_mark,
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "LIST": lambda machine, _: machine.collect("list"),
    "DICT": lambda machine, _: machine.collect("dict"),
    "FROZENSET": lambda machine, _: machine.collect("set"),
    "APPEND": _Machine.append_one,
    "APPENDS": _Machine.append_all,
    "ADDITEMS": _Machine.append_all,
    "SETITEM": _Machine.set_one,
    "SETITEMS": _Machine.set_all,
    "POP": _Machine.pop,
    "POP_MARK": _Machine.pop_mark,
    "DUP": _Machine.duplicate,
    "GLOBAL": _Machine.named,
    "STACK_GLOBAL": _Machine.named_on_stack,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "NEWOBJ_EX": _Machine.call_with_keywords,
    "INST": _Machine.instance,
    "OBJ": _Machine.instance_on_stack,
    "BUILD": _Machine.build,
    "PERSID": _Machine.persistent,
    "BINPERSID": _Machine.persistent_on_stack,
    "EXT1": _Machine.opaque,
    "EXT2": _Machine.opaque,
    "EXT4": _Machine.opaque,
    "NEXT_BUFFER": _Machine.opaque,
}
