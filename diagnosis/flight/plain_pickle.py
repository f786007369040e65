"""Plain data out of a pickle, with nothing in it executed: torch writes the flight recorder's dump as one.

Only opcodes of None, booleans, numbers, text, lists, tuples and dictionaries with text for keys are followed; every
other one ends it. What is built is bounded, also when one list stands in another many times over.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, Final

LIMIT_BYTES: Final = 32 << 20
OPCODES: Final = 2_000_000
"""Bounds time (some 0.5 s) and memory (some 200 MB at worst); a dump of 2,000 collectives has about 500,000."""
SIZE: Final = 5_000_000
"""Values, each time they stand somewhere."""
DEPTH: Final = 50


def loads(data: bytes, *, limit_bytes: int = LIMIT_BYTES) -> object:
    """The value of the pickle that `data` begins with. Raises ValueError: damaged, too large, no plain data."""
    if len(data) > limit_bytes:
        raise ValueError(f"a pickle of {len(data)} bytes is too large")
    machine = _Machine(data)
    try:
        value = machine.run()
    except (IndexError, KeyError, struct.error):
        raise ValueError("a damaged pickle") from None
    _size(value, {}, 0)
    return value


class _Machine:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> object:
        data, steps = self.data, _STEPS
        for _ in range(OPCODES):
            code = data[self.at]  # IndexError: it ends before its last opcode
            self.at += 1
            if code == _STOP:
                if len(self.stack) != 1:
                    raise IndexError
                return self.stack[0]
            step = steps.get(code)
            if step is None:
                raise ValueError(f"the pickle has more than plain data (opcode 0x{code:02x})")
            step(self)
        raise ValueError(f"a pickle of more than {OPCODES} opcodes is too large")

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise IndexError
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def push(self, value: object) -> None:
        self.stack.append(value)

    def text(self, size_of_length: int) -> None:
        self.push(self.take(self.number(size_of_length)).decode(errors="replace"))

    def cut(self) -> list[Any]:
        """What was pushed since the last mark."""
        start = self.marks.pop()
        top = self.stack[start:]
        del self.stack[start:]
        return top

    def tuple_of(self, count: int) -> None:
        top = tuple(self.stack[-count:])
        if len(top) < count:
            raise IndexError
        self.stack[-count:] = [top]

    def extend(self, items: Iterable[object]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise IndexError
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2 or not all(type(key) is str for key in items[::2]):
            raise ValueError("a damaged pickle, or a dictionary with keys that are no text")
        target.update(zip(items[::2], items[1::2], strict=True))

    def two(self) -> list[Any]:
        value = self.stack.pop()
        return [self.stack.pop(), value]


_STOP: Final = ord(".")
_STEPS: Final[dict[int, Callable[[_Machine], object]]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.number(1)),
    ord("M"): lambda m: m.push(m.number(2)),
    ord("J"): lambda m: m.push(m.number(4, signed=True)),
    0x8A: lambda m: m.push(m.number(m.number(1), signed=True)),  # LONG1
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    0x8C: lambda m: m.text(1),
    ord("X"): lambda m: m.text(4),
    0x8D: lambda m: m.text(8),
    ord("}"): lambda m: m.push({}),
    ord("]"): lambda m: m.push([]),
    ord(")"): lambda m: m.push(()),
    ord("("): lambda m: m.marks.append(len(m.stack)),
    ord("t"): lambda m: m.push(tuple(m.cut())),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("e"): lambda m: m.extend(m.cut()),
    ord("a"): lambda m: m.extend([m.stack.pop()]),
    ord("u"): lambda m: m.update(m.cut()),
    ord("s"): lambda m: m.update(m.two()),
    ord("q"): lambda m: m.memo.__setitem__(m.number(1), m.stack[-1]),
    ord("r"): lambda m: m.memo.__setitem__(m.number(4), m.stack[-1]),
    0x94: lambda m: m.memo.__setitem__(len(m.memo), m.stack[-1]),  # MEMOIZE
    ord("h"): lambda m: m.push(m.memo[m.number(1)]),
    ord("j"): lambda m: m.push(m.memo[m.number(4)]),
}


def _size(value: object, sizes: dict[int, int], depth: int) -> int:
    """How much it is when all that is shared is written out. Raises ValueError when that is too much, or has no end."""
    if isinstance(value, str):
        return 1 + len(value) // 16
    if not isinstance(value, (dict, list, tuple)):
        return 1
    size = sizes.get(id(value))
    if size == 0 or depth > DEPTH:
        raise ValueError("a pickle of something that contains itself, or is too deep")
    if size is None:
        sizes[id(value)] = 0
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        size = 1 + sum(_size(part, sizes, depth + 1) for part in parts)
        if size > SIZE:
            raise ValueError("a pickle whose content is too large")
        sizes[id(value)] = size
    return size
