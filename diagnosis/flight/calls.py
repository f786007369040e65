"""One collective or point-to-point call as the flight recorder names it, and where ranks may honestly differ in it."""

from __future__ import annotations

import re
import zlib
from typing import Any, Final, NamedTuple

from diagnosis.signals import clean_text

_P2P: Final = re.compile(r"(?:\w+:)?(send|recv) (\d{1,6})(?:->|<-)(\d{1,6})$")
_NO_SIZES: Final = re.compile(r"all_?to_?all|coalesced$|barrier", re.IGNORECASE)
_NO_DTYPES: Final = re.compile(r"coalesced$|barrier", re.IGNORECASE)
_STRICT: Final = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|broadcast|reduce|gather|scatter|allreduce_coalesced", re.IGNORECASE
)
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
    name = clean_text(op, 80) if isinstance(op, str) else "?"
    if _P2P.match(name):
        return Call(name, _text(sizes, 120), "", _text(dtypes, 60))
    loose = _NO_SIZES.search(name) or not _STRICT.search(name)
    kind = name.rsplit(":", 1)[-1]
    # Only the root of these two has all tensors: one side of each is the same everywhere.
    inputs_told = not loose and not kind.startswith("scatter")
    outputs_told = not loose and not kind.startswith("gather")
    return Call(
        op=name,
        sizes=_text(sizes, 120) if inputs_told else "",
        outputs=_text(outputs, 120) if outputs_told else "",
        dtypes="" if _NO_DTYPES.search(name) or kind.startswith(("scatter", "gather")) else _text(dtypes, 60),
    )


def _text(value: tuple[object, ...], limit: int) -> str:
    """`4x8` for one tensor, `4x8,2` for two."""
    tensors = [one for one in value if isinstance(one, tuple)]
    if tensors:
        whole = ",".join(_sides(one) for one in tensors) + (f",... {value[-1]}" if len(tensors) == _TENSORS else "")
    else:
        whole = _sides(value)
    if len(whole) <= limit:
        return clean_text(whole, limit)
    return f"{clean_text(whole, limit - 12)}#{zlib.crc32(whole.encode(errors='replace')):08x}"


def _sides(one: tuple[object, ...]) -> str:
    return "x".join(str(part)[:24] for part in one)
