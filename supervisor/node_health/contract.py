"""What a probe is, what it is given, which probes there are, and what they remember.

A probe gets a place to look (`ProbeContext`), a time (`Moment`), and what it may know of the job (`JobInfo`).

A probe runs in a probe worker (`supervisor/node_health/worker.py`), on a thread of its own: when it blocks, no other
probe waits for it. It reads through `ProbeContext`, which takes a root folder: so a captured tree can be read in place
of the live node. It never raises for what a node may lack: an absent file, device or right gives `not_applicable` or
`unknown`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import os
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import msgspec

from diagnosis import tables
from diagnosis.health import Check, CheckResult
from diagnosis.signals import Frozen, Signal
from diagnosis.taxonomy import FailureClass
from supervisor.files import entry_points, write_atomically

READ_LIMIT = 64 * 1024
SMALL_LIMIT = 4096
WHOLE_BYTES = 512
"""So much is in a first answer of a small file of /proc or /sys unless that is all there is: asking for the end
costs as much again."""

NOT_LOADED: Final = "cannot be used: "
"""In the text about a probe that cannot be loaded."""


def raised(error: BaseException) -> str:
    """`ValueError: no such sensor (/opt/site/inlet.py:12)`: what, and where in the file that raised it."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place is not None else ""
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    return f"{type(error).__name__}: {str(error)[:300]} ({where})"


class JobInfo(Frozen, frozen=True, kw_only=True):
    """What a probe may know about the job on this node; sent to the probe workers whenever it changes."""

    ranks: dict[int, int] = {}
    """Pid of a worker -> its rank."""
    gpus_of_ranks: dict[int, str] = {}
    """Rank -> its CUDA_VISIBLE_DEVICES with the index of its device in there, as `0,1,2,3:2`; where known."""
    checkpoint_dirs: tuple[str, ...] = ()
    checkpoint_bytes: int = 0
    """Size of the newest complete checkpoint; 0 while there is none."""
    folders: tuple[str, ...] = ()
    """Other folders that the job writes: job folder, local folder."""
    python: str = ""
    """The training environment's interpreter, for its versions; it is never executed."""
    clock_offset_s: float | None = None
    """This node's clock minus the controller's (`supervisor.agent.link`); None while it is not known."""
    clock_error_s: float = 0.0
    """The largest error that `clock_offset_s` may have."""
    on_probation: bool = False
    """The node was repaired lately: every probe looks twice as often."""


class Expect(Frozen, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a site says a node of it has; absent: found out from the node itself."""

    gpus: int | None = None
    ib_ports: int | None = None
    ib_rate_gbps: float | None = None
    mounts: tuple[str, ...] = ()


class Site(Frozen, frozen=True, kw_only=True):
    """A site's own settings: `[expect]`, `[limits.CHECK] NAME = NUMBER`, `skip = [...]` of the site file."""

    expect: Expect = Expect()
    limits: dict[str, dict[str, float]] = {}
    skip: tuple[str, ...] = ()
    """Patterns of check ids that are not looked at."""
    interfaces_left_out: tuple[str, ...] = ()
    """Patterns of network interfaces and InfiniBand devices that are not the job's (management, storage)."""
    tables: dict[str, Any] = {}
    """Rows over the tables of kernel messages: the sections `xid`, `sxid` and `kernel` as TOML has them."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a look is taken: Unix seconds, and monotonic seconds (for rates)."""

    wall: float
    mono: float


_LIVE_ROOT = Path("/")


def _inside(root: str, relative: str, *, follow: bool) -> str:
    """The path below `root`; a captured tree's links and `..` never lead out of it (as under chroot)."""
    parts = relative.split("/")[::-1]
    path: list[str] = []
    links = 0
    while parts and links < 40:
        part = parts.pop()
        if part == "..":
            del path[-1:]
        elif part not in ("", "."):
            path.append(part)
            try:
                target = os.readlink("/".join([root, *path])) if parts or follow else ""
            except (OSError, ValueError):
                continue
            if target:
                links += 1
                path = [] if target.startswith("/") else path[:-1]
                parts.extend(target.split("/")[::-1])
    return "/".join([root, *path])


@dataclasses.dataclass
class ProbeContext:
    """Where a probe looks. All paths are given relative to the root: `place.text("proc/meminfo")`."""

    root: Path = Path("/")
    node: str = ""
    site: Site = dataclasses.field(default_factory=Site)
    state_dir: Path | None = None
    """Where a probe may keep counters over its own restarts (`load`, `keep`); None: nowhere."""
    job: JobInfo = dataclasses.field(default_factory=JobInfo)
    preflight: bool = False
    """Preflight checks are wanted too."""
    once: bool = False
    """There is no second look soon: `unbroken check` without an agent."""

    @property
    def live(self) -> bool:
        """False for a captured tree: nothing may be executed, asked of the kernel, or taken from this machine."""
        return self.root == _LIVE_ROOT

    @property
    def boot_id(self) -> str:
        return (self.text("proc/sys/kernel/random/boot_id") or "").strip()

    def path(self, relative: str) -> Path:
        return Path(self._name(relative))

    def _name(self, relative: str, *, follow: bool = True) -> str:
        """As `path`; joining strings makes a small read a third cheaper."""
        if self.root == _LIVE_ROOT:
            return "/" + relative.lstrip("/")
        return _inside(str(self.root), relative, follow=follow)

    def text(self, relative: str, limit: int = READ_LIMIT) -> str | None:
        """Content of a small file; None when it is absent, not a file, or not ours to read. Never raises."""
        try:
            name = self._name(relative)
            if not self.live and not stat.S_ISREG(os.stat(name).st_mode):
                return None  # a tree may hold device nodes, and opening one may do something
            descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError):
            return None
        try:
            chunks, left = [], limit
            while left > 0 and (chunk := os.read(descriptor, left)):
                chunks.append(chunk)
                # A table may come in parts, and a short one before a long line is not its end.
                left = left - len(chunk) if len(chunk) >= WHOLE_BYTES or limit > SMALL_LIMIT else 0
        except OSError:  # EINVAL and EIO are how sysfs says that a device has no such value
            return None
        finally:
            os.close(descriptor)
        return b"".join(chunks).decode(errors="replace")

    def number(self, relative: str) -> int | None:
        """A file that holds one integer (decimal or 0x...)."""
        text = self.text(relative, 64)
        try:
            return int(text.split()[0], 0) if text else None
        except (ValueError, IndexError):
            return None

    def denied(self, relative: str) -> bool:
        """Whether the file is there and we may not read it."""
        try:
            name = self._name(relative)
            os.stat(name)
        except PermissionError:  # in a closed folder it is not even seen
            return True
        except (OSError, ValueError):
            return False
        return not os.access(name, os.R_OK)

    def names(self, relative: str, pattern: str = "*", limit: int = 4096) -> list[str]:
        """Sorted names in a folder that match; empty when there is no such folder."""
        try:
            found = os.listdir(self._name(relative))
        except OSError:
            return []
        return sorted(name for name in found if fnmatchcase(name, pattern))[:limit]

    def link(self, relative: str) -> str | None:
        """Where a symbolic link leads, as it is written."""
        try:
            return os.readlink(self._name(relative, follow=False))
        except OSError:
            return None

    def is_device(self, relative: str) -> bool:
        try:
            mode = os.stat(self.path(relative)).st_mode
        except OSError:
            return False
        return stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or (not self.live and stat.S_ISREG(mode))

    def limits(self, check: Check) -> dict[str, float]:
        """The numbers of a check's threshold, the site's own where it has some."""
        return {**check.limits, **self.site.limits.get(check.id, {})}

    def load(self, name: str, *, any_boot: bool = False) -> Any:
        """What `keep` kept under this name since the node was booted (`any_boot`: ever); None when nothing was."""
        if self.state_dir is None:
            return None
        try:
            kept = msgspec.json.decode((self.state_dir / f"{name}.json").read_bytes())
        except (OSError, msgspec.DecodeError):
            return None
        if not isinstance(kept, dict) or (kept.get("boot_id") != self.boot_id and not any_boot):
            return None
        return kept.get("value")

    def keep(self, name: str, value: Any) -> None:
        """Keep a small JSON value for the next process of this boot."""
        if self.state_dir is not None:
            keep_file(self.state_dir / f"{name}.json", {"boot_id": self.boot_id, "value": value})


def keep_file(path: Path, value: object) -> None:
    """Write a value as JSON, whole. That the disk is full, or a name is no UTF-8, is no reason to fail."""
    with contextlib.suppress(OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, msgspec.json.encode(value))


@runtime_checkable
class Probe(Protocol):
    """Looks at one part of the node. Made once for each probe worker: it may remember what it saw before (rates)."""

    name: str
    """For example `infiniband`; unique."""
    checks: tuple[Check, ...]
    """Everything it can say; results name one of them."""
    every_s: float
    """Seconds between two looks."""
    deadline_s: float
    """A look that takes longer is a finding by itself."""

    def look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:
        """One look. At least one result for each of its checks that `place` asks for (`not_applicable` included)."""
        ...


@runtime_checkable
class EventListener(Probe, Protocol):
    """A probe that also gets events as they happen."""

    def listen(self, place: ProbeContext, tell: Callable[[Signal], None]) -> None:
        """Runs on another thread of its own, for as long as there is something to wait for. Told signals are read like
        lines of the kernel log: an NVML event becomes the `NVRM: Xid (PCI:...): ...` that stands for it.
        """
        ...


@runtime_checkable
class Brisk(Probe, Protocol):
    """A probe whose look is soon over where nothing hangs: `unbroken check` need not wait for its whole deadline."""

    once_s: float
    """Without an agent, a look that takes longer is not waited for: what it looks at is then unknown."""


@runtime_checkable
class Talkative(Probe, Protocol):
    """A probe that names the call it is in, so that a call that never returns can be reported by name."""

    doing: str
    """The call it is in, as `nvmlDeviceGetTemperature 0000:c1:00`; empty between looks."""


# ----- the checks of our own probes: the rows of `checks.toml` -----

_ROWS: Final = tables.load("supervisor.node_health", "checks.toml")
CHECK: Final[dict[str, Check]] = {
    name: Check(**{**row, "id": name, "failure_class": FailureClass(row["failure_class"])})
    for rows in _ROWS.values()
    for name, row in rows.items()
}
"""By id."""


def checks_of(probe: str) -> tuple[Check, ...]:
    """In the order of the table."""
    return tuple(CHECK[name] for name in _ROWS[probe])


# ----- which probes there are: ours by name, others by the entry-point group `unbroken.probes` -----

WORKERS: Final[dict[str, tuple[str, ...]]] = {
    "gpu": ("supervisor.node_health.gpu.probe:NvmlProbe",),
    "node": (
        "supervisor.node_health.pci:PciProbe",
        "supervisor.node_health.fabric:FabricProbe",
        "supervisor.node_health.infiniband:InfinibandProbe",
        "supervisor.node_health.network:EthernetProbe",
        "supervisor.node_health.memory:MemoryProbe",
        "supervisor.node_health.machine:HardwareProbe",
        "supervisor.node_health.processes:ProcessProbe",
        "supervisor.node_health.storage:StorageProbe",
        "supervisor.node_health.machine:MachineProbe",
        "supervisor.node_health.network:NcclProbe",
    ),
}
"""Probe worker -> its probes. `gpu` calls the GPU driver, whose calls may never return; `node` does everything else."""
WITHOUT_AGENT: Final = ("supervisor.node_health.kernel_log:KernelMessagesProbe",)
"""Probes that run in the probe worker `node` only without an agent: an agent reads the kernel log all the time."""
GROUP: Final = "unbroken.probes"
"""Entry points of this group name classes that follow `Probe`; they run in the probe worker `node`."""


def load(worker: str, *, for_agent: bool = False) -> tuple[list[Probe], list[str]]:
    """The probes of a worker, and a sentence for each that cannot be loaded: a broken plug-in is skipped."""
    found: list[Probe] = []
    problems: list[str] = []
    plug_ins = entry_points(GROUP, sys.path) if worker == "node" else []
    more = WITHOUT_AGENT if worker == "node" and not for_agent else ()
    for target in [*WORKERS[worker], *more, *plug_ins]:
        module, _, name = target.partition(":")
        try:
            probe = getattr(importlib.import_module(module), name)()
            if not isinstance(probe, Probe):
                raise TypeError("it has not what a Probe must have")
            found.append(probe)
        except (Exception, SystemExit) as error:  # whatever a plug-in raises
            problems.append(f"probe {target} {NOT_LOADED}{raised(error)}")
    return found, problems


def table(*workers: str) -> list[Check]:
    """All checks of the probe workers (of all by default), in order."""
    probes = [probe for worker in workers or WORKERS for probe in load(worker)[0]]
    return [check for probe in probes for check in probe.checks]


def is_asked_for(check: Check, probe: str, only: Sequence[str], skip: Sequence[str], *, preflight: bool) -> bool:
    """Whether a check is to be made. `only` (empty: all) and `skip`: patterns of check ids and probe names.

    Preflight checks are made when they are wanted, or one is named.
    """
    names = (check.id, probe)
    if check.when == "preflight" and not preflight and check.id not in only:
        return False
    return (not only or fits(names, only)) and not fits(names, skip)


def fits(names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


# ----- what probes remember: values of this boot, counters as first seen, how fast counters grow -----

_T = TypeVar("_T")
_ONE_AT_A_TIME = threading.Lock()
"""msgspec may crash when two threads make the first conversion to a type at once."""


def recall(place: ProbeContext, name: str, kind: type[_T], *, any_boot: bool = False) -> _T:
    """What `ProbeContext.keep` kept, as a `kind`; an empty one when nothing was, or another version of ours kept it."""
    kept = place.load(name, any_boot=any_boot)
    try:
        with _ONE_AT_A_TIME:
            return kind() if kept is None else msgspec.convert(kept, kind)
    except msgspec.ValidationError:
        return kind()


class Baseline:
    """Counters as they were when they were first looked at in this boot. One that became smaller was reset."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: dict[str, int] | None = None

    def of(self, place: ProbeContext, counts: Mapping[str, int]) -> dict[str, int]:
        before = recall(place, self._name, dict[str, int]) if self._first is None else self._first
        first = before | {key: min(before.get(key, value), value) for key, value in counts.items()}
        if first != self._first:
            place.keep(self._name, first)
        self._first = first
        return first


class Rates:
    """Increases of counters over the last minutes. A counter that became smaller was reset: it starts anew."""

    def __init__(self, longest_s: float = 3600.0) -> None:
        self._longest = longest_s
        self._last: dict[Hashable, tuple[float, int]] = {}
        self._steps: dict[Hashable, deque[tuple[float, float, int]]] = {}
        """Counter -> (from, until, by how much it grew), monotonic seconds."""

    def add(self, key: Hashable, value: int, mono: float) -> None:
        since, last = self._last.get(key, (mono, value))
        self._last[key] = mono, value
        if value < last:
            self._steps.pop(key, None)
        elif value > last:
            self._steps.setdefault(key, deque(maxlen=512)).append((since, mono, value - last))

    def increase(self, key: Hashable, window_s: float, mono: float) -> int:
        """How much it grew in the last `window_s` seconds; of a longer time between two looks, the share that is in."""
        steps = self._steps.get(key)
        if not steps:
            return 0
        while steps and mono - steps[0][1] > self._longest:
            steps.popleft()
        start = mono - window_s
        grown = (
            by * min(1.0, (until - start) / max(until - since, 1e-9)) for since, until, by in steps if until > start
        )
        return math.ceil(sum(grown) - 1e-6)
