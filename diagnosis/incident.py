"""All evidence of one failure (Incident), and the conclusion from it (Verdict)."""

from __future__ import annotations

from typing import Literal

from diagnosis.log_evidence import LogEvidence
from diagnosis.signals import Evidence, Finding, Frozen, NodeEvidence
from diagnosis.taxonomy import TAXONOMY, FailureClass, RemedyAction


class Culprit(Frozen, frozen=True, kw_only=True):
    """The culprit, as far as it is known."""

    node: str = ""
    rank: int | None = None
    gpu: str = ""


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


class Incident(Frozen, frozen=True, kw_only=True):
    """All evidence of one failure, live or from old logs: the input of `triage.conclude`. Its builder bounds it."""

    id: str
    opened_at: float
    attempt: int
    trigger: Literal["exit", "hang", "node_lost", "launcher", "signal", "setup", "device", "logs"]
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
    model: str = ""
    took_s: float = 0.0
    rule: ProposedRule | None = None
    """Waits in `pending_rules.toml` of the job folder."""
    problem: str = ""
    """Why there is no opinion (no answer in time, not grounded, ...); then the other fields mean nothing."""
