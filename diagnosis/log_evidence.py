"""What old logs, dumps and stacks show, reduced: the input of a verdict without a live job.

A `LogSummary` is one file read to its end in bounded memory. A `LogEvidence` is everything that was given. Times are
Unix seconds where lines carry a date, else None: then only the order of lines is known.
"""

from __future__ import annotations

from typing import Literal

from diagnosis.kernel.rules import KernelEvent
from diagnosis.signals import Evidence, Frozen, RankStack
from diagnosis.taxonomy import FailureClass
from diagnosis.tracebacks import Traceback

LogKind = Literal["output", "kernel", "scheduler", "mixed"]
Role = Literal["cause", "symptom", "cascade", "outcome"]


class LineMatch(Frozen, frozen=True, kw_only=True):
    """A rule matched a line."""

    rule: str
    role: Role
    failure_class: FailureClass
    confidence: float
    severity: Literal["fatal", "error", "warning"]
    scope: Literal["rank", "gpu", "node", "fabric", "storage", "job"]
    text: str
    line: int
    """From 1, in its file."""
    rank: int | None = None
    node: str = ""
    at: float | None = None
    fields: dict[str, str] = {}
    """What the rule extracted: device, peer, port, rank, errno, path, step, ..."""
    count: int = 1
    """How many lines (of this rank) match; `line` is the first."""
    last_line: int | None = None
    """The last of them, if there are several."""


class LoggedTraceback(Frozen, frozen=True, kw_only=True):
    """A Python traceback and where it stands."""

    traceback: Traceback
    line: int
    """Of its first line."""
    rank: int | None = None
    node: str = ""
    at: float | None = None


class LauncherFailure(Frozen, frozen=True, kw_only=True):
    """One worker as a launcher (torchrun, srun, deepspeed) reported its end."""

    rank: int | None
    line: int
    text: str
    local_rank: int | None = None
    host: str = ""
    pid: int | None = None
    code: int | None = None
    signal: int | None = None
    at: float | None = None
    is_root: bool = False
    """The launcher reports it as the first that failed."""
    error_file: str = ""
    message: str = ""
    """The worker's error file, if the report repeats it."""


class Point(Frozen, frozen=True, kw_only=True, array_like=True):
    """One value of a curve."""

    step: int | None
    value: float
    line: int
    at: float | None = None


class Curve(Frozen, frozen=True, kw_only=True):
    """A number that a rank prints again and again: loss, gradient norm, loss scale, seconds per step, ..."""

    name: Literal[
        "loss", "eval_loss", "grad_norm", "loss_scale", "overflow_scale", "step_s", "data_s", "tokens_per_s", "mfu"
    ]
    points: tuple[Point, ...]
    rank: int | None = None


class LogSummary(Frozen, frozen=True, kw_only=True):
    """What one file shows. The reader bounds every tuple and counts what it leaves out."""

    source: str
    kind: LogKind = "output"
    node: str = ""
    rank: int | None = None
    """The rank that wrote all of it, by its name or its lines; None: several, or not known."""
    lines: int = 0
    size_bytes: int = 0
    first_at: float | None = None
    last_at: float | None = None
    matches: tuple[LineMatch, ...] = ()
    tracebacks: tuple[LoggedTraceback, ...] = ()
    launcher: tuple[LauncherFailure, ...] = ()
    events: tuple[KernelEvent, ...] = ()
    """Kernel messages, one by one."""
    events_left_out: int = 0
    progress_line: int | None = None
    """The last line that shows progress of the training (a new step, a loss)."""
    step: int | None = None
    """The newest step."""
    last_step: int | None = None
    """The step at which the run is complete, if the output says so."""
    finished_line: int | None = None
    """A line that says that the work is completed."""
    tail: tuple[str, ...] = ()
    """The last lines, cleaned, at most 40."""
    curves: tuple[Curve, ...] = ()


FlightKind = Literal[
    "missing_rank",
    "dead_rank",
    "collective_type_mismatch",
    "size_mismatch",
    "dtype_mismatch",
    "order_inversion",
    "p2p_missing",
    "stalled_rank",
    "straggler",
]
"""`missing_rank`: alive, but did not enter the collective its peers wait in. `dead_rank`: left no dump and is waited
for. `stalled_rank`: entered, and does not complete what its peers completed. `straggler`: late, but the job goes on."""


class FlightReport(Frozen, frozen=True, kw_only=True):
    """What the flight recorders of several ranks show together."""

    kind: FlightKind
    culprit_ranks: tuple[int, ...]
    process_group: str
    """As torch names and describes it, with its ranks where known."""
    collective_seq: int | None
    why: str
    confidence: float
    waiting_ranks: tuple[int, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    """The two stacks (or calls) that matter first."""
    ranks_seen: int = 0
    problems: tuple[str, ...] = ()
    """Dumps that could not be read, in words."""


class Slowdown(Frozen, frozen=True, kw_only=True):
    """Something makes steps longer than necessary."""

    kind: Literal["rank", "link", "node", "input"]
    """`input`: steps wait for data."""
    ranks: tuple[int, ...]
    cost_percent: float
    """How much shorter steps would be without it."""
    why: str
    confidence: float
    node: str = ""
    evidence: tuple[Evidence, ...] = ()


class Anomaly(Frozen, frozen=True, kw_only=True):
    """Something unusual in a curve that is not noise."""

    kind: Literal["nan", "inf", "spike", "divergence", "loss_scale_floor"]
    curve: str
    why: str
    confidence: float
    """How sure it is that the run failed, and that this does not pass."""
    rank: int | None = None
    step: int | None = None
    evidence: tuple[Evidence, ...] = ()


class LogEvidence(Frozen, frozen=True, kw_only=True):
    """Everything that was given: logs, dumps, stacks, and what follows from their curves and timings."""

    logs: tuple[LogSummary, ...] = ()
    flight: FlightReport | None = None
    stacks: tuple[RankStack, ...] = ()
    slow: tuple[Slowdown, ...] = ()
    anomalies: tuple[Anomaly, ...] = ()
