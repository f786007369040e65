"""The numbers of the verdict (`weights.toml`), read once and checked; and the rows that say where they apply.

A row has a name, a condition and an effect. Each can be left out by its name. The bench then scores the verdicts
without it (`python -m tests.bench diagnosis CORPUS --without NAME`): a row that helps nobody can be deleted.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from diagnosis import tables
from diagnosis.signals import Frozen
from diagnosis.taxonomy import FailureClass

Unit = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Instead = dict[FailureClass, Unit]
_Context = TypeVar("_Context")

Effect = Literal["factor", "left_out", "error", "warning", "counts", "survived", "uncaught", "exit_hang", "doubtful"]
"""`factor`: the confidence is multiplied by the factor of the row's name. `left_out`: it says nothing of a failure.
`error`, `warning`: it has this severity. `survived`: the run went on after it. `counts`: it did not. `uncaught`: it is
not benign. `exit_hang`: it is a symptom of a hang at the end. `doubtful`: it counts only beside a failure."""


class _Table(Frozen, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file: every key must be there, and no other."""


class Factors(_Table, frozen=True, kw_only=True):
    """`[factor]`"""

    caught_traceback: Unit
    after_a_cancellation: Unit
    after_a_cause: Unit
    before_an_uncaught_exception: Unit
    beside_a_broken_device: Unit
    of_an_earlier_run: Unit
    not_the_most_telling: Unit
    written_line: Unit
    before_a_signal: Unit
    long_ago: Unit
    among_output: Unit
    unverified: Unit
    survived_finding: Unit
    survived_statement: Unit
    elsewhere: Unit
    killed_process_of_ours: Unit
    killed_process_of_others: Unit
    kernel_that_does_not_outrank: Unit
    error_not_fatal: Unit
    whole_hours_apart: Unit
    at_another_time: Unit
    failed_together: Unit
    failed_later: Unit
    explained_wait: Unit
    beside_a_failure: Unit
    numbers_already_named: Unit
    wait_in_a_checkpoint: Unit


class Confidences(_Table, frozen=True, kw_only=True):
    """`[confidence]`"""

    ran_out_and_caught: Unit
    numbers_skipped_to_the_end: Unit
    last_of_a_log: Unit
    crash_in_a_library: Unit
    crash_in_user_code: Unit
    launcher_alone: Unit
    launcher_names_memory: Unit
    sigkill_perhaps_memory: Unit
    ended_with_code_0: Unit
    all_terminated: Unit
    only_consequences: Unit
    only_consequences_with_a_lost_node: Unit
    node_lost: Unit
    setup_failed: Unit
    launcher_first: Unit
    launcher_later: Unit
    unproven_hang: Unit
    by_stacks: Unit
    one_moment: Unit
    exception_before_the_end: Unit
    calls_differ: Unit
    finished: Unit
    goes_on: Unit
    shows_life: Unit
    no_sign: Unit
    nothing_known: Unit


class Roles(_Table, frozen=True, kw_only=True):
    """`[role]`"""

    cause: Unit
    outcome: Unit
    symptom: Unit
    cascade: Unit


class Competition(_Table, frozen=True, kw_only=True):
    """`[verdict]`"""

    most: Unit
    opposed: Unit
    most_opposed: Unit
    clue: Unit
    not_thought_of: Unit
    of_class: Unit
    by_words: Unit
    least_alternative: Unit


class Calibration(_Table, frozen=True, kw_only=True):
    """`[calibration]`"""

    points: tuple[tuple[Unit, Unit], ...]

    def __post_init__(self) -> None:
        ordered = all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(self.points))
        if len(self.points) < 2 or not ordered or self.points[0][0] != 0 or self.points[-1][0] != 1:
            raise ValueError("calibration.points: weights must rise from 0 to 1, and shares must not fall")


class Alternatives(_Table, frozen=True, kw_only=True):
    """`[instead]`"""

    no_sign: Instead
    goes_on: Instead
    no_dump: Instead
    in_its_loader: Instead


class HangWeights(_Table, frozen=True, kw_only=True):
    """`[hang]`: class and confidence, by the kind of a `HangReport`."""

    stopped: tuple[FailureClass, Unit]
    traced: tuple[FailureClass, Unit]
    missing: tuple[FailureClass, Unit]
    mismatch: tuple[FailureClass, Unit]
    all_waiting: tuple[FailureClass, Unit]
    silent: tuple[FailureClass, Unit]
    exit_hang: tuple[FailureClass, Unit]
    early_exit: tuple[FailureClass, Unit]
    deadlock: tuple[FailureClass, Unit]
    dead: tuple[FailureClass, Unit]
    device: tuple[FailureClass, Unit]
    teardown: tuple[FailureClass, Unit]


class Weights(_Table, frozen=True, kw_only=True, dict=True):
    """All numbers of the verdict."""

    factor: Factors
    confidence: Confidences
    role: Roles
    bonus: dict[Literal["cause", "outcome", "symptom"], Unit]
    verdict: Competition
    trust: dict[FailureClass, Unit]
    calibration: Calibration
    hang: HangWeights
    instead: Alternatives
    by_end: dict[str, Instead]
    confusable: dict[FailureClass, Instead]
    left_out: frozenset[str] = frozenset()
    """Names of rows that are left out (for the bench; a file has none)."""

    @functools.cached_property
    def factors(self) -> dict[str, float]:
        """The factors by name."""
        return msgspec.structs.asdict(self.factor)

    @functools.cached_property
    def roles(self) -> dict[str, float]:
        """How much a statement tells, by its role."""
        return msgspec.structs.asdict(self.role)

    @functools.cached_property
    def bonuses(self) -> dict[str, float]:
        """What is added to the confidence of a reading, by the kind of its class."""
        return dict(self.bonus.items())

    @functools.cached_property
    def hangs(self) -> dict[str, tuple[FailureClass, float]]:
        """Class and confidence by the kind of a hang."""
        return msgspec.structs.asdict(self.hang)


class Row(NamedTuple, Generic[_Context]):
    """One adjustment: where `applies` is true, `effect` happens."""

    name: str
    effect: Effect
    applies: Callable[[_Context], bool]
    case: str = ""
    """What wants it: a file of `tests/diagnosis/cases`, or a test."""


def parse(text: str) -> Weights:
    """The weights of a file's text. Raises `ValueError`, which names table and key."""
    weights = msgspec.convert(tables.parse(text), Weights, strict=True)
    missing = {"0", "1"} - set(weights.by_end)
    if missing:
        raise ValueError(f"by_end: `{missing.pop()}` is missing")
    return weights


@functools.cache
def packaged() -> Weights:
    """`weights.toml`"""
    return parse(tables.folder("diagnosis.verdict").joinpath("weights.toml").read_text(encoding="utf-8"))


_in_use: Final[list[Weights]] = []


def current() -> Weights:
    """The weights of this process."""
    return _in_use[0] if _in_use else packaged()


def use(weights: Weights | None) -> None:
    """From now on `current` is this; None: the packaged ones. For benches and tests."""
    _in_use[:] = [] if weights is None else [weights]


def without(weights: Weights, name: str) -> Weights:
    """The weights without one factor, or one row."""
    if name in weights.factors:
        weights = msgspec.structs.replace(weights, factor=msgspec.structs.replace(weights.factor, **{name: 1.0}))
    return msgspec.structs.replace(weights, left_out=weights.left_out | {name})


def in_use(rows: Iterable[Row[_Context]], context: _Context) -> Iterator[Row[_Context]]:
    """The rows that apply, in order."""
    left_out = current().left_out
    return (row for row in rows if row.name not in left_out and row.applies(context))


def first_factor(rows: Iterable[Row[_Context]], context: _Context) -> float:
    """The factor of the first row that applies; 1 where none does."""
    return next((current().factors[row.name] for row in in_use(rows, context)), 1.0)
