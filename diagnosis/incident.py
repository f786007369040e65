"""All evidence of one failure (`Incident`), the readings of it (`Candidate`), and the conclusion (`Verdict`).

A live job's agents collect evidence (`diagnosis.signals`). What old logs, dumps and stacks show is here, reduced: a
`LogSummary` is one file read to its end in bounded memory, a `LogEvidence` is everything that was given. Times are Unix
seconds where lines carry a date, else None: then only the order of lines is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from diagnosis.signals import Evidence, Finding, Frozen, KernelEvent, NodeEvidence, RankStack
from diagnosis.taxonomy import TAXONOMY, FailureClass, RemedyAction

if TYPE_CHECKING:  # every process of ours loads this module, and few of them read lines; nothing here is decoded
    from diagnosis.rules import RuleMatch
    from diagnosis.tracebacks import Traceback

LogKind = Literal["output", "kernel", "scheduler", "mixed"]


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
    matches: tuple[RuleMatch, ...] = ()
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
    starts: tuple[int, ...] = ()
    """Lines at which somebody started the program, as far as they are near a traceback, a report or the end."""
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


class ComparedLine(Frozen, frozen=True, kw_only=True):
    """One line in which a failed run and good ones differ."""

    text: str
    source: str = ""
    line: int | None = None
    """Of a missing line: where a good run has it, or where it came last."""
    ranks: tuple[int, ...] = ()
    """If it concerns some ranks only."""
    why: str = ""


class RunComparison(Frozen, frozen=True, kw_only=True):
    """A failed run beside good ones. It is shown, and is never a reading of its own."""

    beside: tuple[str, ...]
    """The names of the good runs."""
    share: float = 1.0
    """How much of the lines they have as well."""
    new: tuple[ComparedLine, ...] = ()
    """Lines that no good run has; what stands right before the failure first."""
    new_left_out: int = 0
    at_end: Evidence | None = None
    """A new line right before the end of a log, after its last step: a doubt where nothing else is known."""
    missing: tuple[ComparedLine, ...] = ()
    slower: tuple[str, ...] = ()
    odd: tuple[ComparedLine, ...] = ()
    """What few ranks say or do not say."""
    known: tuple[str, ...] = ()
    """Complaints that good runs have as well: no verdict rests on them."""


class LogEvidence(Frozen, frozen=True, kw_only=True):
    """Everything that was given: logs, dumps, stacks, and what follows from their curves and timings."""

    logs: tuple[LogSummary, ...] = ()
    flight: FlightReport | None = None
    stacks: tuple[RankStack, ...] = ()
    slow: tuple[Slowdown, ...] = ()
    anomalies: tuple[Anomaly, ...] = ()
    compared: RunComparison | None = None


PartKind = Literal[
    "chip", "cpu", "device", "dimm", "disk", "file", "job", "module", "parameter", "pid", "pod", "server"
]


class Culprit(Frozen, frozen=True, kw_only=True):
    """The culprit, as far as it is known."""

    node: str = ""
    rank: int | None = None
    gpu: str = ""
    kind: PartKind | msgspec.UnsetType = msgspec.UNSET
    """What `name` is. Only words of old logs name it, and nothing acts on it."""
    name: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def part(self) -> str:
        """`file /data/7.jpg`; empty where none is named."""
        return f"{self.kind} {self.name}" if self.kind and self.name else ""


class Alternative(Frozen, frozen=True, kw_only=True):
    failure_class: FailureClass
    confidence: float


class HangReport(Frozen, frozen=True, kw_only=True):
    """What the hang watch found; it opens an incident."""

    kind: Literal[
        "stopped",
        "traced",
        "missing",
        "mismatch",
        "all_waiting",
        "silent",
        "exit_hang",
        "early_exit",
        "deadlock",
        "dead",
        "device",
        "teardown",
    ]
    """`stopped`: a rank in state T that SIGCONT did not revive. `traced`: under a debugger (reported, left alone).
    `missing`: peers wait in a collective that `ranks` have not entered. `mismatch`: all wait, in different ones.
    `all_waiting`: all wait in the same one. `silent`: nobody makes progress and nothing else is known.
    `exit_hang`: the work is complete and the end hangs. `early_exit`: `ranks` ended with code 0, the others train on.
    `deadlock`: every thread of `ranks` waits for another one. `dead`: their first thread is gone. `device`: a fatal
    finding about their GPU or node. `teardown`: they destroy their process groups while others wait for them."""
    ranks: tuple[int, ...]
    quiet_s: float
    """Seconds without progress."""
    limit_s: float
    phase: str
    why: str
    proven: bool = True
    """False: an honest wait would look the same from outside."""
    place: str = ""
    """Where the first of `ranks` is, in words: `upload (train.py:88)`."""
    places: tuple[str, ...] = ()
    """The innermost of the script's own frames, and its caller's, as they are remembered."""
    step: int | None = None
    elsewhere: int = 0
    """How many of `ranks` are at other places."""
    waiting: int = 0
    """How many ranks wait for them in a collective."""
    timeout_s: float | None = None
    """After so long in a collective the run ends by itself; None: not known."""
    early: bool = False
    """`device`: one slow step without progress was enough, and no stacks are waited for."""


class WaitNode(Frozen, frozen=True, kw_only=True):
    """Ranks that wait for the same ranks, and are waited for by the same."""

    count: int
    ranks: tuple[int, ...] = ()
    """The first 64 of them, as far as they are known."""
    suspect: bool = False
    """The verdict names them."""
    place: str = ""
    """Where the first of them is, by its stack."""


class WaitEdge(Frozen, frozen=True, kw_only=True):
    waiting: int
    """Index of the node that waits."""
    waited: int
    """Index of the node that is waited for."""
    call: str
    text: str
    """`4,095 ranks wait for rank 17 in all_reduce 1034 of default_pg`."""


class WaitGraph(Frozen, frozen=True, kw_only=True):
    nodes: tuple[WaitNode, ...]
    """The suspects first."""
    edges: tuple[WaitEdge, ...]
    left_out: int = 0
    """Ranks in smaller groups that are not drawn."""
    unseen: int = 0
    """Ranks of the job of which nothing is known here: not all nodes are asked."""


class Incident(Frozen, frozen=True, kw_only=True):
    """All evidence of one failure, live or from old logs: the input of `triage.conclude`. Its builder bounds it."""

    id: str
    opened_at: float
    attempt: int
    trigger: Literal[
        "exit", "hang", "node_lost", "launcher", "signal", "setup", "device", "loss", "replicas", "swap", "logs"
    ]
    """What opened it; `logs`: somebody asked what old logs show."""
    step: int | None = None
    """Newest step of the attempt when it broke."""
    hang: HangReport | None = None
    lost_nodes: tuple[str, ...] = ()
    launcher_exits: dict[str, str] = {}
    """Node -> how its launcher ended, in words."""
    launcher_code: int | None = None
    """The exit code of the first launcher that ended by itself."""
    ranks_started: bool = True
    """Whether any rank of the attempt was started."""
    evidence: tuple[NodeEvidence, ...] = ()
    findings: tuple[Finding, ...] = ()
    """Findings of the attribution window (10 minutes before to 5 after) beyond those in `evidence`."""
    logs: LogEvidence | None = None
    """Old logs, dumps and stacks, instead of what agents collect."""
    rank_nodes: dict[int, str] = {}
    world_size: int = 0


def of_logs(evidence: LogEvidence, rank_nodes: dict[int, str] | None = None, world_size: int = 0) -> Incident:
    """An incident of old logs."""
    return Incident(
        id="",
        opened_at=0.0,
        attempt=0,
        trigger="logs",
        logs=evidence,
        rank_nodes=rank_nodes or {},
        world_size=world_size,
    )


class Candidate(Frozen, frozen=True, kw_only=True):
    """One reading of the incident."""

    failure_class: FailureClass
    confidence: float
    why: str
    culprits: tuple[Culprit, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    fingerprint: str = ""
    action: RemedyAction | None = None
    """The action that the table of this message asks for, if it differs from that of the class."""
    instead: dict[FailureClass, float] | None = None
    """The alternatives, if the reading is wrong; None: the classes that its class is confused with."""
    is_of_all: bool = False
    """No single rank or node is the culprit, whatever other readings say."""


class Verdict(Frozen, frozen=True, kw_only=True):
    """The conclusion. `why` is one sentence for people."""

    failure_class: FailureClass
    culprits: tuple[Culprit, ...]
    confidence: float
    why: str
    action: RemedyAction
    symptoms: tuple[FailureClass, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    """At most 10 pieces, the most important first."""
    fingerprint: str = ""
    """Equal for failures of one line of code (exception, file, function, line); same step too: deterministic."""

    @property
    def kind(self) -> str:
        return TAXONOMY[self.failure_class].kind

    @property
    def domain(self) -> str:
        return TAXONOMY[self.failure_class].domain


RULE_PREFIX = "rule-"
"""The prefix of the ids of proposed rules: commands recognize them by it."""


class ProposedRule(Frozen, frozen=True, kw_only=True):
    """A rule of output that a language model proposes. It does nothing until an operator approves it."""

    id: str
    failure_class: FailureClass
    text: str
    """A part of `line` that a line must contain, with any numbers."""
    line: str
    """The line of the evidence that it was found in."""


class Opinion(Frozen, frozen=True, kw_only=True):
    """A language model's reading of an incident. It is shown beside the verdict and decides nothing."""

    failure_class: FailureClass
    culprits: tuple[Culprit, ...] = ()
    """Only ranks, nodes and GPUs of the evidence."""
    lines: tuple[str, ...] = ()
    """The lines of the evidence that it rests on, word for word."""
    why: str = ""
    """One paragraph, cleaned and bounded."""
    past: tuple[str, ...] = ()
    """The earlier incidents that `why` names: `past-1: ...`."""
    model: str = ""
    took_s: float = 0.0
    rule: ProposedRule | None = None
    """Waits in `pending_rules.toml` of the job folder."""
    rule_rejected: str = ""
    """Which gate rejected the rule that the model proposed, and why."""
    tokens_read: int = 0
    tokens_written: int = 0
    """As the model's side counted them; 0: it did not say."""
    cost: float = 0.0
    """Of the tokens, where their price is known."""
    problem: str = ""
    """Why there is no opinion (no answer in time, not grounded, ...); then the other fields mean nothing."""
