"""The kernel log: its lines as signals, what they mean as findings, and the checks `kernel_log_*` folded from those.

An agent reads only what comes after its start, and folds its recent findings into the checks whenever `health.json` is
written (`states`). `KernelMessagesProbe` is for `unbroken check` without an agent: each look reads the whole window
anew, and keeps nothing but the time of the last look. Faults of programs do not count as a check of the node.

`/dev/kmsg` where it may be read, else the journal, else a log file; or a file that somebody names. Nothing here
blocks, and a flood costs no more than its first lines of each poll.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, Protocol

import msgspec

from diagnosis.health import Check, CheckResult, CheckState, Level, healthy, not_applicable, unhealthy, unknown
from diagnosis.kernel import log as kernel_rules
from diagnosis.kernel.causes import Causes, is_elsewhere
from diagnosis.kernel.log import KernelReader, read_stamp
from diagnosis.kernel.xid import default_tables
from diagnosis.signals import Finding, KernelEvent, Scope, Signal, clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.keeper_client import WorkerProcess
from supervisor.node_health.contract import Moment, ProbeContext, Site, fits, recall
from supervisor.node_health.state import CheckStates, MinuteLimit

DEVICE: Final = "/dev/kmsg"
FILES: Final = ("/var/log/kern.log", "/var/log/messages", "/var/log/syslog")
JOURNALS: Final = ("/run/log/journal", "/var/log/journal")
OF_KERNEL: Final = ("-k", "SYSLOG_FACILITY=0")
"""What journalctl is to show: `-k` alone also has what programs wrote to /dev/kmsg."""
JOURNALCTL: Final = (*OF_KERNEL, "-f", "-o", "short-unix", "--lines=0", "--no-pager", "-q")
_TIED: Final = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs a program that ends when its parent does (PR_SET_PDEATHSIG, SIGTERM), however that ends."""
RECORDS_PER_POLL: Final = 2000
BYTES_PER_POLL: Final = 256 * 1024
RESTART_S: Final = 60.0
CRASHES: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)
CRASHED_S: Final = 10.0
"""The kernel's line and the end of the process may be this far apart: a core dump takes time."""
TORCHS_OWN: Final = ("pt_",)
"""Prefixes of the names that torch gives its threads and loader workers."""
_INITIAL_CGROUP_NAMESPACE: Final = "cgroup:[4026531835]"
"""The kernel numbers it so; there a process is told the names that the kernel writes."""
EVENTS_KEPT: Final = 500
"""More in half a second are one storm."""
MAX_TEXT: Final = 2000
"""An OOM kill names its victim at the end of a line that begins with two long cgroup paths."""

log = logging.getLogger("unbroken.kernel")

_RECORD: Final = re.compile(rb"(\d+),(\d+),(\d+),([^;,]*)[^;]*;")
_FROM_KERNEL: Final = re.compile(r"^[^\[\n]{0,120}?\bkernel(?:\[\d+\])?:")
"""In a file with the lines of all programs, the kernel's lines have its name."""


class _Source(Protocol):
    lost: int

    def read(self) -> list[str]: ...

    def close(self) -> None: ...


class KmsgRecords:
    """What the kernel itself wrote to `/dev/kmsg`, one record a read. Programs write there too, with other facilities.

    `lost`: how many records the ring dropped before they were read.
    """

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: does not block, and is at the place to read from; closed by `close`."""
        self.descriptor = descriptor
        self._next: int | None = None
        self.lost = 0
        self.error: OSError | None = None
        """Why nothing more can be read."""

    def read(self) -> list[str]:
        return [text for _, text in self.stamped()]

    def stamped(self, most: int = RECORDS_PER_POLL, until: float = float("inf")) -> list[tuple[float | None, str]]:
        """The next records: seconds since boot (None: not known) and text. Of at most `most`, and until this monotonic
        time.
        """
        found: list[tuple[float | None, str]] = []
        for _ in range(most):
            try:
                record = os.read(self.descriptor, 8192)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # the ring ran over us: the next read has the oldest record there is
                    continue
                self.error = error
                break
            if not record or time.monotonic() > until:
                break
            self._take(record, found)
        return found

    def _take(self, record: bytes, found: list[tuple[float | None, str]]) -> None:
        match = _RECORD.match(record)
        flags, uptime_s = b"-", None
        if match is not None:
            number, uptime_s, flags = int(match[2]), int(match[3]) / 1e6, match[4]
            self.lost += max(0, number - self._next) if self._next is not None else 0
            self._next = number + 1
            if int(match[1]) >> 3:  # the facility of a program
                return
            record = record[match.end() :]
        # What follows the first newline are keys and values, not text; newlines of the text are written out.
        text = record.split(b"\n", 1)[0].decode(errors="replace")
        if b"+" in flags and found:
            found[-1] = found[-1][0], (found[-1][1] + text)[: MAX_TEXT * 2]
        else:
            found.append((uptime_s, text))

    def close(self) -> None:
        os.close(self.descriptor)


class _Lines:
    """Whole lines of a descriptor that does not block; what is too much for one poll waits for the next."""

    def __init__(self) -> None:
        self._rest = b""
        self._waiting: list[bytes] = []

    def read(self, descriptor: int) -> list[str]:
        if not self._waiting:
            try:
                data = os.read(descriptor, BYTES_PER_POLL)
            except OSError:
                return []
            *self._waiting, self._rest = (self._rest + data).split(b"\n")
            self._rest = self._rest[-8192:]
        now, self._waiting = self._waiting[:RECORDS_PER_POLL], self._waiting[RECORDS_PER_POLL:]
        return [line.decode(errors="replace") for line in now]


class _File:
    """A file that grows, and is truncated or replaced now and then (log rotation)."""

    def __init__(self, path: str, *, from_end: bool, of_all: bool = False) -> None:
        """`of_all`: programs write into it as well."""
        self._path = path
        self._of_all = of_all
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if from_end:
            os.lseek(self._descriptor, 0, os.SEEK_END)
        self._lines = _Lines()
        self.lost = 0

    def read(self) -> list[str]:
        lines = self._lines.read(self._descriptor)
        if not lines:
            self._follow()
        return [line for line in lines if _FROM_KERNEL.match(line)] if self._of_all else lines

    def _follow(self) -> None:
        try:
            there, ours = os.stat(self._path), os.fstat(self._descriptor)
            if there.st_ino != ours.st_ino or there.st_dev != ours.st_dev:
                fresh = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.close(self._descriptor)
                self._descriptor, self._lines = fresh, _Lines()
            elif ours.st_size < os.lseek(self._descriptor, 0, os.SEEK_CUR):
                os.lseek(self._descriptor, 0, os.SEEK_SET)
        except OSError:  # rotated away and not yet there again
            pass

    def close(self) -> None:
        os.close(self._descriptor)


class _Journal:
    """`journalctl` as a child that follows the kernel's part of the journal; started again when it ends."""

    def __init__(self, program: str) -> None:
        self._command = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), program, *JOURNALCTL]
        self._child: subprocess.Popen[bytes] | None = None
        self._started_at = -RESTART_S
        self._lines = _Lines()
        self.lost = 0
        self._start()

    def _start(self) -> None:
        if time.monotonic() - self._started_at < RESTART_S:
            return
        self._started_at = time.monotonic()
        self._child = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)

    def read(self) -> list[str]:
        if self._child is None or self._child.poll() is not None:
            try:
                self._start()
            except OSError:  # out of processes or memory: tried again later
                self._child = None
        if self._child is None or self._child.stdout is None:
            return []
        return self._lines.read(self._child.stdout.fileno())

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            if self._child.stdout is not None:
                self._child.stdout.close()


def _at_end(device: str) -> int:
    descriptor = os.open(device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.lseek(descriptor, 0, os.SEEK_END)
    return descriptor


def may_read_journal(root: Path = Path("/")) -> bool:
    """Without the right, journalctl only warns, and then shows a user nothing but the user's own messages."""
    folders = [root / name.lstrip("/") for name in JOURNALS]
    return any(os.access(file, os.R_OK) for folder in folders for file in folder.glob("*/system.journal"))


class KernelLog:
    """Reads the new lines of the kernel log, and makes one finding of each root cause.

    `problem` says in words why nothing can be seen, `source` what is read.
    """

    def __init__(
        self, path: str = "", site: Site | None = None, checks: CheckStates | None = None, root: Path = Path("/")
    ) -> None:
        """`path`: empty: nothing is read. `checks`: knows node, GPUs, ranks and steps.

        Raises ValueError, which names the key, for tables of the site that cannot be used.
        """
        self._path = path
        self._site = Site() if site is None else site
        self._checks = CheckStates("") if checks is None else checks
        self._root = root
        self._source: _Source | None = None
        self._lost_told = 0
        self.source = ""
        self.problem = ""
        tables = default_tables().with_site(self._site.tables)
        rules = kernel_rules.default().with_site(self._site.tables.get("kernel") or {})
        self._reader, self._reader_of_events = KernelReader(tables, rules), KernelReader(tables, rules)
        self._causes = Causes()
        self._last: Signal | None = None
        """The newest line."""
        self._warned_at = float("-inf")
        self._limit = MinuteLimit()
        self.events: deque[Signal] = deque(maxlen=EVENTS_KEPT)
        """The driver's own events, which come as lines of the kernel log; the next `findings` has them."""
        self._began_at = time.time()
        self._recent: deque[Finding] = deque(maxlen=EVENTS_KEPT)
        """Within the window of the checks."""
        self.count = 0
        """Findings so far."""
        if path:
            self._open(from_end=True)

    # ----- reading -----

    @property
    def lost(self) -> int:
        """Records that the kernel dropped before they were read."""
        return self._source.lost if self._source is not None else 0

    def _open(self, *, from_end: bool) -> None:
        path = str(self._root / "dev/kmsg") if self._path == DEVICE else self._path
        try:
            is_device = stat.S_ISCHR(os.stat(path).st_mode) and path != os.devnull
            self._source = KmsgRecords(_at_end(path)) if is_device else _File(path, from_end=from_end)
            self.source, self.problem = self._path, ""
        except OSError as error:
            self._source = self._instead() if self._path == DEVICE else None
            if self._source is None:
                self.problem = (
                    f"the kernel log {self._path} cannot be read ({error.strerror}): Xid and OOM lines are not seen"
                )

    def _instead(self) -> _Source | None:
        """Another place where the kernel's lines are."""
        program = shutil.which("journalctl")
        if program is not None and may_read_journal(self._root):
            with contextlib.suppress(OSError):
                journal = _Journal(program)
                self.source = "journal"
                return journal
        for name in FILES:
            with contextlib.suppress(OSError):
                file = _File(str(self._root / name.lstrip("/")), from_end=True, of_all=True)
                self.source = name
                return file
        return None

    def read(self) -> list[str]:
        """New lines since the last time, at most 2,000. Never blocks."""
        if self._source is None and self._path not in ("", DEVICE) and os.path.exists(self._path):
            self._open(from_end=False)
        if self._source is None:
            return []
        lines = self._source.read()
        if self.lost > self._lost_told:
            log.warning("%d records of the kernel log were lost before they could be read", self.lost - self._lost_told)
            self._lost_told = self.lost
        return [text for line in lines if (text := clean_text(line, MAX_TEXT))]

    @property
    def descriptor(self) -> int | None:
        """Readable when there are new lines; None where a source does not tell."""
        source = self._source
        return source.descriptor if isinstance(source, KmsgRecords) and source.error is None else None

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    # ----- findings -----

    def findings(self, workers: Sequence[WorkerProcess], *, more_may_come: bool = False) -> list[Finding]:
        """New findings in the log and in the driver's events, with the rank, GPU and step that they concern.

        `more_may_come`: it was read a moment ago, so what waits for more lines waits on.
        """
        at, mono = time.time(), time.monotonic()
        lines = [Signal(source="kernel", text=text, at=at, mono=mono) for text in self.read()]
        found = self.findings_in([*lines, *self.events], workers, more_may_come=more_may_come)
        self.events.clear()
        now = time.time()  # a storm goes on for as long as it is reported
        self._recent.extend(msgspec.structs.replace(finding, at=now) for finding in found)
        self.count += len(found)
        return found

    def findings_in(
        self, lines: Iterable[Signal], workers: Sequence[WorkerProcess] = (), *, more_may_come: bool = False
    ) -> list[Finding]:
        """The same of these lines. When there are none, what waits for more lines is complete as it is."""
        found: list[Finding] = []
        quiet = not more_may_come
        for line in lines:
            if line.source == "kernel":
                quiet, self._last = False, line
                events = self._reader.feed(line.text)
            else:
                events = [*self._reader_of_events.feed(line.text), *self._reader_of_events.end()]
            if events:
                found += self._findings_of(events, line, workers)
        if quiet and self._last is not None and self._reader.is_open:
            found += self._findings_of(self._reader.end(), self._last, workers)
        return found

    def _findings_of(self, events: list[KernelEvent], line: Signal, workers: Sequence[WorkerProcess]) -> list[Finding]:
        ranks = {worker.pid: worker.rank for worker in workers}
        found = []
        for event in events:
            rank = ranks.get(event.pid) if event.pid is not None else None
            if rank is None and event.kind == "segfault":
                ours, rank = whose_crash(event, line.at, workers)
                if not ours:
                    continue
            if rank is None and event.kind == "oom_kill" and of_another_cgroup(event, workers):
                continue
            finding = self._causes.note(event, line.at, line.source)
            if finding is None or not self._may_tell(finding, line.at):
                continue
            if event.kind == "segfault" and workers:  # that it is the job's is known
                finding = msgspec.structs.replace(finding, confidence=event.confidence)
            found.append(self._checks.placed(finding, line, rank))
        return found

    def _may_tell(self, finding: Finding, at: float) -> bool:
        """Limits each severity by itself: a flood of lines that anybody may cause must not hide a fatal one."""
        allowed = self._limit.allows(at, finding.severity)
        if not allowed and at - self._warned_at >= 60.0:
            self._warned_at = at
            log.warning("too many findings in the kernel log, the next are not reported: %s", finding.evidence.text)
        return allowed

    def states(self) -> list[CheckState]:
        """The states of the checks now, by the findings of the last minutes."""
        now = time.time()
        while self._recent and self._recent[0].at < now - longest_s(self._site.limits):
            self._recent.popleft()
        if self.problem:
            worst = [unknown(check.id, self.problem) for check in CHECKS.values()]
        else:
            worst = results(self._recent, now, self._site.limits)
        first = {
            (CHECKS[finding.failure_class].id, finding.fields.get("device", "")): finding
            for finding in reversed(self._recent)
            if finding.failure_class in CHECKS
        }
        return [
            CheckState(
                result=one,
                status=one.status,
                level=one.level,
                since=began.at if (began := first.get((one.check, one.device))) is not None else self._began_at,
                looked_at=now,
                rank=began.rank if began is not None else None,
            )
            for one in worst
            if not fits((one.check, KERNEL), self._site.skip)
        ]


def whose_crash(event: KernelEvent, at: float, workers: Sequence[WorkerProcess]) -> tuple[bool, int | None]:
    """Whether the process (or thread) that crashed belongs to the job, and its rank where that can be told.

    One that is there is a rank's or a descendant's, or not. One that is gone counts when a rank has just ended of such
    a signal, or by a name that torch gives. Without ranks only the name can tell.
    """
    if not workers or event.pid is None:
        return not is_elsewhere(event), None
    ranks = {worker.pid: worker.rank for worker in workers}
    above = _processes_above(event.pid)
    if above:
        return any(pid in ranks for pid in above), next((ranks[pid] for pid in above if pid in ranks), None)
    crashed = any(
        worker.status is not None
        and os.WIFSIGNALED(worker.status)
        and os.WTERMSIG(worker.status) in CRASHES
        and abs((worker.ended_at or 0.0) - at) < CRASHED_S
        for worker in workers
    )
    return crashed or event.fields.get("process", "").startswith(TORCHS_OWN), None


def of_another_cgroup(event: KernelEvent, workers: Sequence[WorkerProcess]) -> bool:
    """A control group was out of memory in which neither the job's ranks nor we are, such as another job's.

    Not where a rank has ended: the group that it was in is not known any more.
    """
    full = event.fields.get("cgroup", "").rstrip("/")
    if not full or not workers or _link("/proc/self/ns/cgroup") != _INITIAL_CGROUP_NAMESPACE:
        return False  # in a namespace of its own a process sees other names than the kernel writes
    ours = [_memory_cgroups(pid) for pid in ("self", *(str(worker.pid) for worker in workers))]
    return all(ours) and not any(f"{group}/".startswith(f"{full}/") for groups in ours for group in groups)


def _link(path: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


def _memory_cgroups(pid: str) -> list[str]:
    """Where it is in the hierarchies that may limit memory: version 2, and version 1's `memory`."""
    try:
        lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text(errors="replace").splitlines()]
    except OSError:
        return []
    return [line[2] for line in lines if len(line) == 3 and "memory" in (line[1] or "memory").split(",")]


def _processes_above(pid: int) -> list[int]:
    """The process of a thread, its parent and so on; empty when it is gone."""
    found: list[int] = []
    while pid and len(found) < 64:
        try:
            status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        except OSError:
            break
        ids = dict(re.findall(r"^(Tgid|PPid):\s+(\d+)$", status, re.MULTILINE))
        if "Tgid" not in ids or "PPid" not in ids:
            break
        found.append(int(ids["Tgid"]))
        pid = int(ids["PPid"])
    return found


# ----- what it said of late, for a check without an agent -----

RECORDS: Final = 200_000
"""More than the ring of any kernel holds; reading ends after `READ_S` all the same."""
READ_S: Final = 3.0
JOURNAL_S: Final = 6.0
JOURNAL_LINES: Final = 5000


def lines(seconds: float, now: Moment) -> list[Signal]:
    """Those of the last `seconds`, oldest first. Raises OSError, in words, where nothing can be read."""
    try:
        descriptor = open_device()
        try:
            return records(descriptor, seconds, now)
        finally:
            os.close(descriptor)
    except OSError as error:
        return _journal(seconds, now, error.strerror or "")


def open_device() -> int:
    """At the oldest record there is."""
    return os.open(DEVICE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def records(descriptor: int, seconds: float, now: Moment) -> list[Signal]:
    """Of the records of `/dev/kmsg` from here on those of the last `seconds`. Raises OSError."""
    source = KmsgRecords(descriptor)
    found = source.stamped(RECORDS, time.monotonic() + READ_S)
    if source.error is not None:
        raise source.error
    aged = [(now.mono - uptime_s if uptime_s is not None else 0.0, text) for uptime_s, text in found]
    return [
        Signal(source="kernel", text=clean_text(text, MAX_TEXT), at=now.wall - age_s)
        for age_s, text in aged
        if age_s <= seconds
    ]


def _journal(seconds: float, now: Moment, why: str) -> list[Signal]:
    program = shutil.which("journalctl")
    if program is None or not may_read_journal():
        raise OSError(f"the kernel log cannot be read ({DEVICE}: {why}), nor can the journal")
    since = f"--since=@{max(0, int(now.wall - seconds))}"
    command = [program, *OF_KERNEL, "-o", "short-unix", "--no-pager", "-q", f"-n{JOURNAL_LINES}", since]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=JOURNAL_S, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"journalctl gave no answer in {JOURNAL_S:g} s") from None
    if done.returncode:
        raise OSError(f"journalctl: {done.stderr[:200].decode(errors='replace')}")
    return [
        Signal(source="kernel", text=clean_text(line, MAX_TEXT), at=at)
        for line in done.stdout.decode(errors="replace").splitlines()
        if (at := read_stamp(line).at) is not None
    ]


# ----- the checks: one for each failure class of the node -----

DEVICES: Final = 32
"""Of each class."""
STATE: Final = "kernel_past"
HALF_A_DAY_S: Final = 43_200.0
KERNEL: Final = "kernel_log"
"""The probe that these checks belong to, whoever makes them."""
_CLASSES: Final[tuple[tuple[FailureClass, Scope, str], ...]] = (
    (FailureClass.GPU_FALLEN_OFF_BUS, "gpu", "that a GPU has fallen off the bus"),
    (FailureClass.GPU_HANG, "gpu", "that a GPU hangs"),
    (FailureClass.GPU_ECC_UNCORRECTABLE, "gpu", "memory errors of a GPU"),
    (FailureClass.NVLINK_ERROR, "gpu", "NVLink errors"),
    (FailureClass.GPU_DRIVER, "gpu", "a problem of the GPU driver"),
    (FailureClass.GPU_THERMAL_POWER, "gpu", "a problem with the heat or power of a GPU"),
    (FailureClass.PCIE_ERROR, "node", "PCIe errors"),
    (FailureClass.CPU_OR_MEMORY_HW, "node", "machine checks or memory errors"),
    (FailureClass.KERNEL_FAULT, "node", "a fault of its own: a lockup, an oops, hung tasks"),
    (FailureClass.NCCL_NETWORK, "fabric", "a problem of a network device"),
    (FailureClass.STORAGE_ERROR, "storage", "a problem of a disk or file system"),
)
CHECKS: Final[dict[FailureClass, Check]] = {
    one: Check(
        id=f"kernel_log_{one.value}",
        what=f"the kernel reported {what}",
        source="/dev/kmsg, else `journalctl -k`",
        threshold="a message in the last {minutes} min, or since the last check; critical: a fatal one, or one after "
        "which the GPU or node is to be left out",
        limits={"minutes": 10.0},
        failure_class=one,
        scope=scope,
        when="periodic",
        calm_looks=1,
    )
    for one, scope, what in _CLASSES
}


class KernelMessagesProbe:
    name = KERNEL
    checks = tuple(CHECKS.values())
    every_s = 3600.0
    deadline_s = 15.0
    once_s = 10.0

    def look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:
        if not place.live:
            why = "`unbroken diagnose` reads the logs of a captured tree"
            return [not_applicable(check.id, why) for check in self.checks]
        last = recall(place, STATE, float)
        since_s = now.mono - last if 0 < last < now.mono else 0.0
        try:
            recent = lines(max(longest_s(place.site.limits), since_s), now)
        except OSError as error:
            return [unknown(check.id, clean_text(str(error), 200)) for check in self.checks]
        place.keep(STATE, now.mono)
        log = KernelLog(site=place.site)
        found = [*log.findings_in(recent), *log.findings_in(())]
        return results(found, now.wall, place.site.limits, since_s)


def results(
    found: Iterable[Finding], now: float, limits: Mapping[str, Mapping[str, float]], at_least_s: float = 0.0
) -> list[CheckResult]:
    """The results at this Unix time, by the findings of the kernel log. `limits`: of the site, by check."""
    found = tuple(found)
    told: list[CheckResult] = []
    for one, check in CHECKS.items():
        seconds = max({**check.limits, **limits.get(check.id, {})}["minutes"] * 60, at_least_s)
        worst = worst_of(finding for finding in found if finding.failure_class is one and finding.at >= now - seconds)
        told += [
            unhealthy(
                check.id,
                clean_text(f"{_when(finding.at, now)}: {finding.evidence.text}", 300),
                clean_text(device, 100),
                level,
                gpu=finding.gpu,
                gpu_uuid=finding.gpu_uuid,
            )
            for device, (level, finding) in worst.items()
        ] or [healthy(check.id, text="the kernel reported nothing of this kind recently")]
    return told


def longest_s(limits: Mapping[str, Mapping[str, float]]) -> float:
    """The longest time for which a message of the kernel counts."""
    return 60 * max({**check.limits, **limits.get(check.id, {})}["minutes"] for check in CHECKS.values())


def worst_of(found: Iterable[Finding]) -> dict[str, tuple[Level, Finding]]:
    """Device -> the first of the worst reports about it."""
    worst: dict[str, tuple[Level, Finding]] = {}
    for finding in found:
        device = finding.fields.get("device", "")
        left_out = finding.severity == "error" and finding.fields.get("action", "").startswith("cordon")
        level: Level = "critical" if finding.severity == "fatal" or left_out else "warning"
        is_worse = device in worst and (worst[device][0], level) == ("warning", "critical")
        if is_worse or (device not in worst and len(worst) < DEVICES):
            worst[device] = level, finding
    return worst


def _when(at: float, now: float) -> str:
    """The time itself: an agent's answer is read later than it was written."""
    pattern = "%H:%M:%S UTC" if now - at < HALF_A_DAY_S else "%Y-%m-%d %H:%M UTC"
    return datetime.fromtimestamp(at, timezone.utc).strftime(pattern)
