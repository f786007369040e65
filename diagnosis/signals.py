"""What is observed, as frozen values: the raw material of every decision.

Ages are seconds before the moment the value was sent, so that no two clocks need to agree. Text in these values is
hostile input (log lines): it is bounded, cleaned and freed of secrets where it enters (`clean_text`), and only ever
shown or matched.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from diagnosis.taxonomy import FailureClass
from diagnosis.text import redact

Scope = Literal["rank", "gpu", "node", "fabric", "storage", "job"]
Severity = Literal["fatal", "error", "warning"]
KernelSeverity = Literal["fatal", "error", "warning", "info"]
"""`fatal`: ends the process or takes the GPU away. `error`: may have. `warning`: worth telling, no cause by itself.
`info`: nobody's fault."""
KernelKind = Literal[
    "xid", "sxid", "fallen_off_bus", "gpu_driver", "oom_kill", "mlx5", "link", "mce", "edac", "aer", "nvme", "block",
    "filesystem", "nfs", "lustre", "hung_task", "lockup", "oops", "segfault", "other",
]  # fmt: skip

_UNPRINTABLE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
    r"|[\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]"  # turned, and unseen
    r"|[\ud800-\udfff]"  # names that are no UTF-8
)
_BREAKS = re.compile(r"[\n\r\x0b\x0c\x85\u2028\u2029]+")


def printable(text: str, limit: int) -> str:
    """The beginning of `text` without terminal escapes and control characters: to be looked at, not kept."""
    return _UNPRINTABLE.sub("", text[:limit])


def clean_text(text: str, limit: int = 500) -> str:
    """`text` without terminal escapes, control characters, what cannot be encoded and secrets, cut at `limit`.

    Secrets go last (an escape in one would hide it), but before the cut (half of one cannot be known for one).
    """
    whole, text = text, text[: limit * 4]
    if len(whole) > len(text):
        text = text.rpartition(" ")[0] or text
    text = redact(_UNPRINTABLE.sub("", text)).rstrip()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def clean_line(text: str, limit: int = 500) -> str:
    """`clean_text` in one line, for names that may have a newline in them: nobody forges a line of ours with one."""
    return clean_text(_BREAKS.sub(" ", text[: limit * 4]), limit)


class Frozen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all values that travel or are kept: frozen, by keyword, small on the wire."""


_OF_A_CHILD: Final = (2, 4, 6, 7, 8, 9, 10, 11, 12, 15, 24, 25)
"""Signals that a shell reports as 128 + n."""
_SENT_FOR: Final[dict[int, tuple[FailureClass, float, str]]] = {
    signal.SIGXCPU: (FailureClass.PREEMPTED_OR_CANCELLED, 0.6, "its limit of CPU time is reached"),
    signal.SIGXFSZ: (FailureClass.STORAGE_ERROR, 0.65, "a file reached its limit of size"),
    signal.SIGHUP: (FailureClass.PREEMPTED_OR_CANCELLED, 0.6, "its terminal or session was closed"),
    signal.SIGUSR1: (FailureClass.PREEMPTED_OR_CANCELLED, 0.6, "as schedulers warn of an end, and nobody handled it"),
    signal.SIGUSR2: (FailureClass.PREEMPTED_OR_CANCELLED, 0.6, "as schedulers warn of an end, and nobody handled it"),
}
"""What some signals are sent for."""


def from_wait_status(status: int) -> tuple[int | None, int | None, bool]:
    """(exit code, signal, core dumped) of a status as `waitpid` gives it."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status), bool(status & 0x80)
    return os.WEXITSTATUS(status), None, False


def signal_name(number: int) -> str:
    """`SIGKILL`; a number that this system has no name for is said as such."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class ExitRecord(Frozen, frozen=True, kw_only=True):
    """How one rank ended, as its real parent (the keeper) saw it."""

    rank: int
    local_rank: int
    pid: int
    code: int | None
    """Exit code, or None when a signal ended it."""
    signal: int | None
    """The signal that ended it, or None."""
    ended_at: float
    """Unix time on the node."""
    core_dumped: bool = False
    stopped_by_us: bool = False
    """We (agent or keeper) ended it on purpose: never evidence of a fault."""
    order: int = 0
    """0 for the first rank of this attempt on this node that ended, 1 for the next, ..."""

    @property
    def failed(self) -> bool:
        """It ended badly and we did not do it."""
        return not self.stopped_by_us and self.code != 0

    @property
    def how(self) -> str:
        """`was killed by SIGKILL`, `ended with code 1`."""
        if self.signal is not None:
            return f"was killed by {signal_name(self.signal)}{' (core dumped)' if self.core_dumped else ''}"
        number = self.ending_signal
        of_child = f" ({signal_name(number)} of its child)" if number is not None else ""
        return f"ended with code {self.code}{of_child}"

    @property
    def ending_signal(self) -> int | None:
        """The signal that ended it, also when a shell or a wrapper in between turned it into 128 + n."""
        if self.signal is None and self.code is not None and self.code - 128 in _OF_A_CHILD:
            return self.code - 128
        return self.signal

    @property
    def by_itself(self) -> bool:
        """It ended by itself (also by an abort), not by a signal from outside or a fault."""
        return self.ending_signal in (None, signal.SIGABRT)

    def ended_by(self, *names: str) -> bool:
        """Whether one of these signals (`"SIGTERM"`) ended it."""
        number = self.ending_signal
        return number is not None and signal_name(number) in names

    def hint(self) -> tuple[FailureClass, float, str]:
        """(class, confidence, why) from the wait status alone: the least that a verdict can say."""
        number = self.ending_signal
        if number == signal.SIGBUS:
            return FailureClass.SHM_EXHAUSTED, 0.6, f"{self.how}: most often /dev/shm is full"
        if number == signal.SIGKILL:
            return FailureClass.WORKER_CRASH, 0.7, f"{self.how}, from outside: no out-of-memory kill is on record"
        if number in (signal.SIGTERM, signal.SIGINT):
            return FailureClass.WORKER_CRASH, 0.6, f"{self.how}, which somebody sent to it"
        if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE):
            return FailureClass.WORKER_CRASH, 0.65, self.how
        if number in _SENT_FOR:
            failure_class, confidence, why = _SENT_FOR[number]
            return failure_class, confidence, f"{self.how}: {why}"
        if number is not None:
            return FailureClass.WORKER_CRASH, 0.5, self.how
        if self.code == 0:
            return FailureClass.WORKER_CRASH, 0.5, "ended with code 0 while the others still trained"
        if self.code in (126, 127):
            return FailureClass.CONFIG_OR_ARGUMENT_ERROR, 0.6, f"{self.how}: the command could not be executed"
        return FailureClass.WORKER_CRASH, 0.5, f"{self.how} and left no traceback"


def rank_names(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2, 3, 4, 5 and 2 more`, `process 4312` where only that is known."""
    known = sorted(set(ranks))
    word = "rank" if not known or known[-1] >= 0 else "process"
    plural = "" if len(known) == 1 else "s" if word == "rank" else "es"
    shown = ", ".join(str(abs(rank)) for rank in known[:6])
    return f"{word}{plural} {shown}" + (f" and {len(known) - 6} more" if len(known) > 6 else "")


Phase = Literal["", "checkpoint", "evaluation", "end"]
ProcessState = Literal["R", "S", "D", "T", "t", "Z", "X", "?"]


class LossAlarm(Frozen, frozen=True, kw_only=True):
    """The loss that a rank prints has gone wrong and does not come back by itself."""

    kind: Literal["nan", "spike", "divergence"]
    """`nan`: several values in a row were none. `divergence`: half of what was learnt is lost, or it climbs on."""
    step: int | None = None
    """The first bad one; None: no steps are known."""
    interval: int = 1
    """Steps from one printed value to the next: the first bad step is at most so much earlier."""
    usual: float = 0.0
    """The level before."""
    level: float = 0.0
    """The level now."""


class RankClock(Frozen, frozen=True, kw_only=True, array_like=True):
    """What the steps of a rank's optimizers show: exact, while its output may tell few steps or none."""

    steps: int = 0
    """Since it started; 0: they are compiled, and only the newest one's time is known."""
    age_s: float = 0.0
    """Seconds since the newest one."""
    step_s: float | None = None
    """Mean time of a step in the last half minute or so."""
    slowest_s: float = 0.0
    """The longest of the last 50 to 100."""
    input_share: float | None = None
    """Share of the last half minute or so in which it has waited for data; None: it has no data loader of torch's."""
    step: int | None = None
    """The run's step, where the output and the clock go together (`diagnosis.logs.steps`); None: not known."""


class RankSample(Frozen, frozen=True, kw_only=True):
    """What an agent sees of one rank without disturbing it; sent with each heartbeat."""

    rank: int
    local_rank: int
    pid: int
    state: ProcessState = "?"
    """State letter of the main thread (`/proc/PID/stat`)."""
    step: int | None = None
    """Newest training step read from its output or written to the heartbeat descriptor."""
    last_step: int | None = None
    """The step at which the run will be complete, where the output tells (`100/1000`)."""
    groups: dict[str, tuple[int, int]] = {}
    """Process group id (rank-local) -> (last enqueued, last completed) collective; at most 32 groups."""
    moved_age_s: float = 0.0
    """Seconds since any sign of progress: a step, a collective, checkpoint bytes, output with main-thread switches."""
    waiting_s: float | None = None
    """Seconds since it has been waiting in a collective that does not complete; None when it is in none."""
    stopped_s: float | None = None
    """Seconds in state T or t; None when it runs."""
    beat_age_s: float | None = None
    """Seconds since the beacon thread last ran (old: the GIL is held or the process is stopped); None: no beacon."""
    cpu_s: float = 0.0
    """CPU seconds of the process since it started."""
    switches: int = 0
    """Voluntary context switches of the main thread since it started."""
    io_bytes: int = 0
    """Bytes read and written by the process since it started."""
    phase: Phase = ""
    """The phase that its latest output names, where it names one."""
    bad_reports: int = 0
    """So many of its newest reports in a row had a loss (or, for long, a gradient norm) that is no number."""
    bad_since: int | None = None
    """The step of the first of them, where it is known."""
    loss: float | None = None
    """The newest finite loss that it told in this attempt. It is only shown."""
    loss_step: int | None = None
    """The step of it, where it is known."""
    watches_loss: bool = False
    """It tells its loss again and again: an alarm would be seen."""
    loss_alarm: LossAlarm | None = None
    world: int = 0
    """How many ranks the job has, by the rank's own environment; 0: not told."""
    timeout_s: float | None = None
    """The time-out of collectives in the group of all ranks; None: not known."""
    clock: RankClock | None = None
    """None: no optimizer of torch's has made a step (or it is not known: no beacon)."""
    locked_s: float | None = None
    """Seconds since every thread of it waits for another one of the process, without a time-out, and none has run."""
    exit: ExitRecord | None = None


class Frame(Frozen, frozen=True, kw_only=True, array_like=True):
    """One stack frame."""

    function: str
    file: str
    line: int


class RankStack(Frozen, frozen=True, kw_only=True):
    """The main thread's stack of one rank, innermost frame first, at most 40 frames."""

    rank: int
    frames: tuple[Frame, ...]
    sample: int = 0
    """0 for the first sample, 1 for the one taken a second later."""
    error: str = ""
    """Why there are no frames (no permission, process gone, timed out)."""
    others: int = 0
    """Further Python threads of the script that may go on by themselves."""
    sends: bool = False
    """Bytes of the process are on their way over the network."""


class CollectiveEntry(Frozen, frozen=True, kw_only=True):
    """One flight recorder entry, reduced to what tells ranks apart."""

    group: str
    """Its ranks, as `[0, 1]` or `[0-4088:8]`; its name where they are not told (gloo)."""
    seq: int
    op: str
    """For example `gloo:all_reduce`."""
    sizes: str = ""
    dtypes: str = ""
    completed: bool = False
    outputs: str = ""
    """Sizes of the outputs, where they are not those of the inputs."""
    name: str = ""
    desc: str = ""
    """Name and description of the group."""
    p2p: bool = False
    started: bool = False
    at_ns: int = 0
    """Unix nanoseconds when it was enqueued; 0: not told."""


class RankFlight(Frozen, frozen=True, kw_only=True):
    """The flight recorder entries of one rank that tell where it is, oldest first: `diagnosis.flight.dumps`."""

    rank: int
    entries: tuple[CollectiveEntry, ...] = ()
    error: str = ""


class RankOutput(Frozen, frozen=True, kw_only=True):
    """The end of what one rank wrote."""

    rank: int
    tail: tuple[str, ...] = ()
    """Cleaned lines, oldest first, at most 40."""
    error_file: str = ""
    """Message of torch elastic's error file, if the script wrote one."""
    traceback: tuple[str, ...] = ()
    """The last Python traceback in its output, cleaned, at most 60 lines (the innermost kept)."""


class Evidence(Frozen, frozen=True, kw_only=True):
    """One piece of evidence, as people see it."""

    text: str
    source: str = ""
    line: int | None = None
    node: str = ""
    rank: int | None = None
    at: float | None = None


class Signal(Frozen, frozen=True, kw_only=True):
    """A raw observation of a probe: one line of the kernel log, one failing check, one line of a rank's output."""

    source: Literal["output", "kernel", "gpu", "host", "network", "storage", "scheduler", "agent"]
    text: str
    at: float
    node: str = ""
    rank: int | None = None
    gpu: str = ""
    """PCI address or UUID where known."""
    gpu_uuid: str = ""
    step: int | None = None
    """Newest step of the attempt when it was seen, where one runs."""
    mono: float = 0.0
    """Monotonic seconds of the node when it was seen (with `boot_id`: a time that no clock correction moves)."""
    boot_id: str = ""


Outlook = Literal["", "fails", "degrades", "slows", "repair"]
"""What becomes of a device of which something is known. `fails`: a rank on it is not expected to make another step.
`degrades`: it works for now, and gets worse. `slows`: it works right, and slower. `repair`: it works as well as before,
and waits for a reset. Empty: nothing to do with it."""


class KernelEvent(Frozen, frozen=True, kw_only=True):
    """One message of the kernel that tells of trouble: what a line of the kernel log becomes."""

    kind: KernelKind
    rule: str
    """Id of the rule; `xid_79`, `sxid_20034` for these."""
    failure_class: FailureClass
    severity: KernelSeverity
    scope: Scope
    text: str
    """Its (first) line without stamps; cleaned."""
    line: int
    """Number of its first line (of an OOM kill: the line that names who was killed), from 1."""
    code: int | None = None
    """The Xid or SXid, or the killed process."""
    device: str = ""
    """PCI address `dddd:bb:dd`, or the kernel's name of it."""
    action: str = ""
    """What the tables of Xids and SXids say to do; empty: what the class asks for."""
    confidence: float = 0.8
    pid: int | None = None
    """The process it is about."""
    gpu_uuid: str = ""
    consequence: bool = False
    """It says itself, or its table says, that something else came first."""
    fields: dict[str, str] = {}
    at: float | None = None
    """Unix time, where its stamp has a date (without a zone: as if it were UTC)."""
    uptime: float | None = None
    """Seconds since the kernel started, where its stamp says that."""
    outlook: Outlook = ""


class Finding(Frozen, frozen=True, kw_only=True):
    """A rule's reading of a signal."""

    rule: str
    failure_class: FailureClass
    confidence: float
    scope: Scope
    severity: Severity
    evidence: Evidence
    node: str = ""
    rank: int | None = None
    gpu: str = ""
    fields: dict[str, str] = {}
    at: float = 0.0
    attempt: int = 0
    """The attempt whose output it was found in; 0 for what belongs to no attempt (kernel, host)."""
    gpu_uuid: str = ""
    step: int | None = None
    mono: float = 0.0
    boot_id: str = ""
    """These four as in the signal."""
    count: int = 1
    """So many signals of the same root cause are told by this one finding."""
    outlook: Outlook = ""
    """By the row of its Xid, kernel rule or check; a line of output has none."""


class NodeEvidence(Frozen, frozen=True, kw_only=True):
    """What one agent collected for one incident, within the evidence budget (64 KiB at most)."""

    node: str
    attempt: int
    request: int = 0
    """Number of the evidence request it answers; 0 for the evidence an agent collects by itself when a rank ends."""
    exits: tuple[ExitRecord, ...] = ()
    stacks: tuple[RankStack, ...] = ()
    flights: tuple[RankFlight, ...] = ()
    outputs: tuple[RankOutput, ...] = ()
    samples: tuple[RankSample, ...] = ()
    findings: tuple[Finding, ...] = ()
    took_s: float = 0.0
    folder: str = ""
    """Where the agent kept the whole of it."""
    complete: bool = True
    """False when the budget ran out first."""
