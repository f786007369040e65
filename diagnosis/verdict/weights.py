"""The numbers of the verdict (`weights.toml`), read once and checked; and the rows that say where they apply.

A row has a name, a condition and an effect. Each can be left out by its name. The bench then scores the verdicts
without it (`python -m tests.bench diagnosis CORPUS --without NAME`): a row that helps nobody can be deleted.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Generic, Literal, TypeVar

import msgspec

from diagnosis import tables
from diagnosis.signals import Frozen
from diagnosis.taxonomy import FailureClass

Unit = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Instead = dict[FailureClass, Unit]
Points = tuple[tuple[Unit, Unit], ...]
_Context = TypeVar("_Context")

Effect = Literal["factor", "left_out", "error", "warning", "counts", "survived", "uncaught", "exit_hang", "doubtful"]
"""`factor`: the confidence is multiplied by the factor of the row's name. `left_out`: it says nothing of a failure.
`error`, `warning`: it has this severity. `survived`: the run went on after it. `counts`: it did not. `uncaught`: it is
not benign. `exit_hang`: it is a symptom of a hang at the end. `doubtful`: it counts only beside a failure."""


class Calibration(Frozen, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[calibration]`"""

    live: Points
    logs: Points

    def __post_init__(self) -> None:
        for points in (self.live, self.logs):
            ordered = all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(points))
            if len(points) < 2 or not ordered or points[0][0] != 0 or points[-1][0] != 1:
                raise ValueError("calibration: weights must rise from 0 to 1, and shares must not fall")


class Weights(Frozen, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All numbers of the verdict, as they are in the file."""

    factor: dict[str, Unit]
    confidence: dict[str, Unit]
    role: dict[str, Unit]
    """How much a statement says, by its role."""
    bonus: dict[str, Unit]
    """What is added to the confidence of a reading, by the kind of its class."""
    verdict: dict[str, Unit]
    trust: dict[FailureClass, Unit]
    calibration: Calibration
    hang: dict[str, tuple[FailureClass, Unit]]
    """Class and confidence, by the kind of a `HangReport`."""
    instead: dict[str, Instead]
    by_end: dict[str, Instead]
    confusable: dict[FailureClass, Instead]
    left_out: frozenset[str] = frozenset()
    """Names of rows that are left out (for the bench; a file has none)."""


_FIXED: Final = ("factor", "confidence", "role", "bonus", "verdict", "hang", "instead")
"""Tables whose keys the code names: another file must have the same ones."""


@dataclass(frozen=True)  # Python 3.10 has no generic named tuples
class Row(Generic[_Context]):
    """One adjustment: where `applies` is true, `effect` happens."""

    name: str
    effect: Effect
    applies: Callable[[_Context], bool]
    case: str
    """The file of `tests/diagnosis/cases` whose verdict is another one without this row."""


def parse(text: str) -> Weights:
    """The weights of a file's text. Raises `ValueError`, which names table and key."""
    weights = _converted(text)
    for table in _FIXED:
        wanted, found = (getattr(one, table).keys() for one in (packaged(), weights))
        if wanted != found:
            raise ValueError(f"{table}: `{min(wanted ^ found)}` is {'missing' if wanted - found else 'not known'}")
    if missing := {"0", "1"} - weights.by_end.keys():
        raise ValueError(f"by_end: `{missing.pop()}` is missing")
    return weights


def _converted(text: str) -> Weights:
    return msgspec.convert(tables.parse(text), Weights, strict=True)


@functools.cache
def packaged() -> Weights:
    """`weights.toml`"""
    return _converted(tables.folder("diagnosis.verdict").joinpath("weights.toml").read_text(encoding="utf-8"))


_in_use: Final[list[Weights]] = []


def current() -> Weights:
    """The weights of this process."""
    return _in_use[0] if _in_use else packaged()


def use(weights: Weights | None) -> None:
    """From now on `current` is this; None: the packaged ones. For benches and tests."""
    _in_use[:] = [] if weights is None else [weights]


def without(weights: Weights, name: str) -> Weights:
    """The weights without one factor, or one row."""
    if name in weights.factor:
        weights = msgspec.structs.replace(weights, factor={**weights.factor, name: 1.0})
    return msgspec.structs.replace(weights, left_out=weights.left_out | {name})


def in_use(rows: Iterable[Row[_Context]], context: _Context) -> Iterator[Row[_Context]]:
    """The rows that apply, in order."""
    left_out = current().left_out
    return (row for row in rows if row.name not in left_out and row.applies(context))


def first_factor(rows: Iterable[Row[_Context]], context: _Context) -> float:
    """The factor of the first row that applies; 1 where none does."""
    return next((current().factor[row.name] for row in in_use(rows, context)), 1.0)
