"""Reads pickles and executes nothing in them: flight recorder dumps and checkpoints are pickles, and may be foreign.

There are two ways to read one. `read_inert` takes any pickle: it follows the opcodes with inert values only, looks up
no class and calls no function; an object becomes an `InertObject` that remembers what it was to be. `read_plain` takes
only plain data (None, booleans, numbers, text, lists, tuples, dictionaries with text for keys). A pattern first proves
that a pickle has no other opcode; then `pickle` itself may read it, at the speed of C: 4,096 dumps of 2,000 collectives
are read within a minute only that way. Where the pattern proves nothing, `read_plain` uses the inert values.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import struct
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any, Final, NamedTuple, cast

PLAIN_BYTES: Final = 32 << 20
PLAIN_OPCODES: Final = 2_000_000
"""Of plain data that the pattern does not know; a dump of 2,000 collectives has about 500,000."""
PLAIN_DEPTH: Final = 50
INERT_OPCODES: Final = 3_000_000
"""Bounds time and memory (about a second and 70 MB for a million); a file of 10,000 tensors has some 400,000."""


class PickleError(ValueError):
    """
    PickleError
    |- PickleDamaged    the opcodes do not make up a whole pickle
    |- PickleTooLong    it is larger than the limits allow: nothing is known about it
    `- PickleNotPlain   it has more than plain data
    """


class PickleDamaged(PickleError):
    pass


class PickleTooLong(PickleError):
    pass


class PickleNotPlain(PickleError):
    pass


class InertObject:
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
        """Key and value pairs, where the members are pairs."""
        return (item for item in self.items if type(item) is tuple and len(item) == 2)

    def get(self, key: str) -> object:
        """The last value under a string key, or None; looks into the state of an instance too."""
        found: object = None
        for name, value in self.pairs():
            if name == key:
                found = value
        if found is None and isinstance(self.state, InertObject):
            found = self.state.get(key)
        return found


class InertPickle(NamedTuple):
    """A pickle's content as inert values."""

    value: object
    persistent: list[object]
    """Persistent ids in the order of the file: for torch, the storages it refers to."""


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


def read_inert(
    source: bytes | BoundedReader, out_of_time: Callable[[], bool] | None = None, opcodes: int = INERT_OPCODES
) -> InertPickle:
    """The inert value of the pickle at the start of `source` (a file is read exactly to the pickle's end).

    Raises PickleDamaged and PickleTooLong; OSError passes.
    """
    machine, steps = _Machine(), _STEPS
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(cast("IO[bytes]", source))):
            if opcode.name == "STOP":
                return InertPickle(machine.stack.pop(), machine.persistents)
            if count >= opcodes or (not count & 8191 and out_of_time is not None and out_of_time()):
                raise PickleTooLong(f"a pickle of more than {count} opcodes")
            steps[opcode.name](machine, argument)
    except PickleError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error) as error:
        raise PickleDamaged(str(error)[:200] or type(error).__name__) from None
    raise PickleDamaged("it ends before its last opcode")


def read_plain(data: bytes, *, limit_bytes: int = PLAIN_BYTES, opcodes: int = PLAIN_OPCODES) -> object:
    """The value of the pickle of plain data that `data` begins with. Raises PickleError.

    The value may contain itself, or one list many times: bound the walk over it.
    """
    if len(data) > limit_bytes:
        raise PickleTooLong(f"a pickle of {len(data)} bytes is too large")
    if plain_end(data) is None:
        try:
            value = read_inert(data, opcodes=opcodes).value
        except PickleDamaged as error:
            raise PickleDamaged(f"a damaged pickle: {error}") from None
        return plain_value(value)
    try:
        return pickle.loads(data)
    except (pickle.UnpicklingError, ValueError, TypeError, LookupError, EOFError, AttributeError):
        raise PickleDamaged("a damaged pickle") from None


def plain_value(value: object) -> object:
    """The plain data that an inert value stands for. Raises PickleNotPlain and PickleTooLong."""
    return _plain(value, {}, 0)


def _plain(value: object, done: dict[int, object], depth: int) -> object:
    """`done`: plain values by the id of the inert one, so that what is shared stays shared."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if id(value) in done:
        return done[id(value)]
    if depth > PLAIN_DEPTH:
        raise PickleTooLong("a pickle of something that contains itself, or is too deep")
    made: object
    if type(value) is tuple:
        made = tuple([_plain(item, done, depth + 1) for item in value])
    elif isinstance(value, InertObject) and value.name == "list":
        made = [_plain(item, done, depth + 1) for item in value.items]
    elif isinstance(value, InertObject) and value.name == "dict":
        pairs = list(value.pairs())
        if len(pairs) != len(value.items) or not all(isinstance(key, str) for key, _ in pairs):
            raise PickleNotPlain("a pickle with a dictionary whose keys are no text")
        made = {key: _plain(item, done, depth + 1) for key, item in pairs}
    else:
        kind = value.args[:1] or value.name if isinstance(value, InertObject) else type(value).__name__
        raise PickleNotPlain(f"the pickle has more than plain data ({str(kind)[:80]})")
    done[id(value)] = made
    return made


CONTAINERS: Final = 1_000_000
STRINGS: Final = 400_000
_SIMPLE: Final = rb"[}\](N\x88\x89tesu\x85\x86\x87a)\x94]"
_SHORT: Final = rb"|".join(rb"\x%02x.{%d}" % (size, size) for size in range(1, 33))
_FINAL: Final = b"+" if sys.version_info >= (3, 11) else b""
"""Possessive: a quarter less time. Older Pythons keep a record of each repetition, so they get few of them only."""
_RUN: Final = re.compile(
    rb"(?s:" + _SIMPLE + b"*" + _FINAL + rb"[hKq\x80].|" + _SIMPLE + b"+" + _FINAL + rb"|\x8a\x08.{8}|M..|J.{4}"
    rb"|r..[\x00-\x07]\x00|j.{4}|G.{8}|\x8c(?:" + _SHORT + rb")|X(?:" + _SHORT.replace(b".", rb"\0\0\0.") + rb")"
    rb"|\x8a(?:\x00|\x01.|\x02..|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7})|\x95.{8})"
    + (b"++" if _FINAL else b"{1,4000}")
)
"""Opcodes of plain data, each with its length. No memo index is large, since C makes room for all smaller ones."""
_LENGTHS: Final = {ord("X"): 4, 0x8C: 1, 0x8D: 8}
"""Opcodes of text, and how many bytes tell its length."""


def plain_end(data: bytes) -> int | None:
    """Where the pickle ends if it has only opcodes of plain data; None if it has others, or if that cannot be told."""
    if sum(data.count(code) for code in (b"}", b"]", b"(")) > CONTAINERS:
        return None
    at, match = 0, _RUN.match
    for _ in range(STRINGS):
        run = match(data, at)
        if run:
            at = run.end()
        if at >= len(data):
            return None
        code = data[at]
        if code == 0x2E:  # STOP
            return at + 1
        size = _LENGTHS.get(code)
        if size is not None:
            at += 1 + size + int.from_bytes(data[at + 1 : at + 1 + size], "little")
        elif not run:
            return None
    return None


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}
        self.persistents: list[object] = []

    def cut(self) -> list[object]:
        """What was pushed since the last mark."""
        start = self.marks.pop()
        top = self.stack[start:]
        del self.stack[start:]
        return top

    def tuple_of(self, count: int) -> None:
        top = tuple(self.stack[-count:])
        if len(top) < count:
            raise IndexError("stack underflow")
        self.stack[-count:] = [top]

    def collect(self, kind: str, items: list[object]) -> None:
        node = InertObject(kind)
        node.items = items
        self.stack.append(node)

    def extend(self, items: list[object]) -> None:
        if isinstance(self.stack[-1], InertObject):
            self.stack[-1].items.extend(items)

    def set_one(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.extend([(key, value)])

    def pop(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def named(self, name: object) -> InertObject:
        return InertObject("global", (str(name).replace(" ", "."),))

    def named_on_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(InertObject("global", (f"{module}.{name}",)))

    def make(self, function: object, arguments: object) -> None:
        name = str(function.args[0]) if isinstance(function, InertObject) and function.name == "global" else "?"
        self.stack.append(InertObject(name, arguments if type(arguments) is tuple else (arguments,)))

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.make(function, arguments)

    def call_with_keywords(self) -> None:
        self.stack.pop()
        self.call()

    def instance_on_stack(self) -> None:
        function, *arguments = self.cut()
        self.make(function, tuple(arguments))

    def build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], InertObject):
            self.stack[-1].state = state

    def persistent(self, name: object) -> None:
        self.persistents.append(name)
        self.stack.append(InertObject("persistent", (name,)))


def _pairs(items: list[object]) -> list[object]:
    return list(zip(items[::2], items[1::2], strict=True))


_Step = Callable[[_Machine, Any], object]


def _each(names: str, step: _Step) -> dict[str, _Step]:
    return dict.fromkeys(names.split(), step)


_STEPS: Final[dict[str, _Step]] = {
    **_each("PROTO FRAME READONLY_BUFFER", lambda *_: None),
    **_each("INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT", lambda m, number: m.stack.append(number)),
    **_each("STRING BINSTRING SHORT_BINSTRING", lambda m, text: m.stack.append(text)),
    **_each("UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8", lambda m, text: m.stack.append(text)),
    **_each("BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8", lambda m, data: m.stack.append(data)),
    "NONE": lambda m, _: m.stack.append(None),
    "NEWTRUE": lambda m, _: m.stack.append(True),
    "NEWFALSE": lambda m, _: m.stack.append(False),
    "EMPTY_TUPLE": lambda m, _: m.stack.append(()),
    "EMPTY_DICT": lambda m, _: m.collect("dict", []),
    "EMPTY_LIST": lambda m, _: m.collect("list", []),
    "EMPTY_SET": lambda m, _: m.collect("set", []),
    **_each("GET BINGET LONG_BINGET", lambda m, index: m.stack.append(m.memo[int(index)])),
    **_each("PUT BINPUT LONG_BINPUT", lambda m, index: m.memo.__setitem__(int(index), m.stack[-1])),
    "MEMOIZE": lambda m, _: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    "MARK": lambda m, _: m.marks.append(len(m.stack)),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.cut())),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "LIST": lambda m, _: m.collect("list", m.cut()),
    "DICT": lambda m, _: m.collect("dict", _pairs(m.cut())),
    "FROZENSET": lambda m, _: m.collect("set", m.cut()),
    "APPEND": lambda m, _: m.extend([m.stack.pop()]),
    **_each("APPENDS ADDITEMS", lambda m, _: m.extend(m.cut())),
    "SETITEM": lambda m, _: m.set_one(),
    "SETITEMS": lambda m, _: m.extend(_pairs(m.cut())),
    "POP": lambda m, _: m.pop(),
    "POP_MARK": lambda m, _: m.cut(),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
    "GLOBAL": lambda m, name: m.stack.append(m.named(name)),
    "STACK_GLOBAL": lambda m, _: m.named_on_stack(),
    **_each("REDUCE NEWOBJ", lambda m, _: m.call()),
    "NEWOBJ_EX": lambda m, _: m.call_with_keywords(),
    "INST": lambda m, name: m.make(m.named(name), tuple(m.cut())),
    "OBJ": lambda m, _: m.instance_on_stack(),
    "BUILD": lambda m, _: m.build(),
    "PERSID": lambda m, name: m.persistent(name),
    "BINPERSID": lambda m, _: m.persistent(m.stack.pop()),
    **_each("EXT1 EXT2 EXT4 NEXT_BUFFER", lambda m, _: m.stack.append(InertObject("?"))),
}
"""What each opcode of `pickletools` does to the machine."""
