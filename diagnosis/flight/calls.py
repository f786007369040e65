"""One collective or point-to-point call as the flight recorder names it, and where ranks may honestly differ in it."""

from __future__ import annotations

import re
import zlib
from typing import Any, Final, NamedTuple

from diagnosis.signals import clean_line

_P2P: Final = re.compile(r"(?:\w+:)?(send|recv) (\d{1,6})(?:->|<-)(\d{1,6})$")
_SAME_SIZES: Final = re.compile(
    r"_?(all_?reduce|all_?gather(_base|_into_tensor)?|reduce_?scatter(_base|_tensor)?|broadcast(_oop)?|reduce(_oop)?"
    r"|gather|scatter)$",
    re.IGNORECASE,
)
"""Of all others (all_to_all, several that were coalesced) ranks may honestly give tensors of other sizes."""
_NO_DTYPES: Final = re.compile(r"coalesced$|barrier", re.IGNORECASE)
_TENSORS: Final = 64
_DIMENSIONS: Final = 8
_LISTS: Final = (list, tuple)


class Call(NamedTuple):
    """What was called; sizes and dtypes are text, empty where ranks may differ in them."""

    op: str
    """As recorded, for example `nccl:all_reduce`."""
    sizes: str = ""
    outputs: str = ""
    dtypes: str = ""

    @property
    def kind(self) -> str:
        """`all_reduce`: without the backend, and without the peers of a send."""
        return self.op.rsplit(":", 1)[-1].split(" ", 1)[0]

    def __str__(self) -> str:
        shapes = f"{self.sizes}->{self.outputs}" if self.outputs and self.outputs != self.sizes else self.sizes
        return " ".join(part for part in (self.op, shapes, self.dtypes) if part)

    def digest(self) -> int:
        """Equal for equal calls on all ranks; never 0."""
        return zlib.crc32("|".join(self).encode(errors="replace")) or 1


def peer_of(op: str) -> tuple[bool, int] | None:
    """Of a send or receive: (sends, index of the partner in the group); None of anything else."""
    found = _P2P.match(op)
    return (found[1] == "send", int(found[3])) if found else None


def shape(sizes: Any) -> tuple[object, ...]:
    """`[[4, 8], [2]]` as a value that can be compared, for one tensor just its sizes; () for what is no sizes."""
    try:
        if type(sizes) is list and len(sizes) == 1:
            one = sizes[0]
            if type(one) is list and len(one) <= _DIMENSIONS:
                sum(one)  # all numbers: nothing nested, which would take for ever to hash
                return tuple(one)
        return _shapes(sizes) if type(sizes) in _LISTS and sizes else ()
    except (TypeError, KeyError):
        return ()


def _shapes(sizes: Any) -> tuple[object, ...]:
    for one in sizes[:_TENSORS]:
        sum(one[:_DIMENSIONS])
    return (*[tuple(one[:_DIMENSIONS]) for one in sizes[:_TENSORS]], len(sizes))


def names(dtypes: Any) -> tuple[object, ...]:
    """`["Float"]` as a value that can be compared."""
    return tuple([one for one in dtypes[:_TENSORS] if type(one) is str]) if type(dtypes) in _LISTS else ()


def call(op: object, sizes: tuple[object, ...], outputs: tuple[object, ...], dtypes: tuple[object, ...]) -> Call:
    """What all ranks of a group have to call alike."""
    name = clean_line(op, 80) if isinstance(op, str) else "?"
    return comparable(Call(name, _text(sizes, 120), _text(outputs, 120), _text(dtypes, 60)))


def comparable(told: Call) -> Call:
    """Without that in which ranks may honestly differ."""
    if _P2P.match(told.op):
        return told._replace(outputs="")
    kind = told.kind
    same = _SAME_SIZES.match(kind) is not None
    # Only the root of these two has all tensors: one side of each is the same everywhere.
    scatters, gathers = kind.startswith("scatter"), kind.startswith("gather")
    return Call(
        op=told.op,
        sizes=told.sizes if same and not scatters else "",
        outputs=told.outputs if same and not gathers else "",
        dtypes="" if _NO_DTYPES.search(kind) or scatters or gathers else told.dtypes,
    )


def _text(value: tuple[object, ...], limit: int) -> str:
    """`4x8` for one tensor, `4x8,2` for two."""
    tensors = [one for one in value if isinstance(one, tuple)]
    if tensors:
        whole = ",".join(_sides(one) for one in tensors) + (f",... {value[-1]}" if len(tensors) == _TENSORS else "")
    else:
        whole = _sides(value)
    if len(whole) <= limit:
        return clean_line(whole, limit)
    return f"{clean_line(whole, limit - 12)}#{zlib.crc32(whole.encode(errors='replace')):08x}"


def _sides(one: tuple[object, ...]) -> str:
    return "x".join(str(part)[:24] for part in one)
