"""Processes of the node that are stuck in the kernel (state D).

State D alone is no fault: every process that reads a file is in it. A process is stuck when it stays in D and does not
run once in between.
"""

from __future__ import annotations

import os
import re
import time
from typing import Final

from diagnosis.health import CheckResult, Level, healthy, not_applicable, unhealthy, unknown
from diagnosis.signals import Frozen, clean_text
from supervisor.files import head_of
from supervisor.node_health.contract import Moment, ProbeContext, checks_of, recall

CHECKS: Final = checks_of("processes")


# --- reading: one pass over `stat`, which never blocks (`cmdline`, `environ` and `maps` of a stuck process do)

_PF_KTHREAD: Final = 0x00200000
KERNEL_THREADS_EVERY: Final = 5
"""A node with 256 CPUs has thousands of kernel threads: those that were not in state D are read at every fifth look."""
SUSPECTS: Final = 200
"""Processes in state D that are looked at closely; a node whose storage is gone has all of them there."""
THREADS: Final = 512


_NUMBERS: Final = (6, 11, 12, 17, 19)
"""Fields behind the name that are read as numbers: flags, user and system time, threads, start."""


class Task(Frozen, frozen=True, kw_only=True):
    """A process in state D, or a zombie some of whose threads do not end because they are in state D."""

    pid: int
    name: str
    start: int
    """When it started, clock ticks since boot: with the pid, who it is."""
    runs: int
    """How often it (its stuck thread) was given a CPU."""
    wchan: str = ""
    """The kernel function it waits in; empty where we may not know."""


class Snapshot(Frozen, frozen=True, kw_only=True):
    seen: int
    """Processes that were looked at."""
    stuck: tuple[Task, ...]
    """Those in state D, without those that wait there by right."""
    hidden: bool = False
    """Other users' processes are not to be seen (hidepid)."""


class ProcessReader:
    """Reads snapshots of one place; it remembers the kernel threads."""

    def __init__(self) -> None:
        self._looks = 0
        self._resting: set[int] = set()
        """Kernel threads that were not in state D when they were last read."""
        self._rested: set[int] = set()
        """Those that ever were not: the others sleep in D by design."""

    def read(self, place: ProbeContext) -> Snapshot:
        pids = {int(name) for name in _listed(place.path("proc")) if name.isdecimal()}
        if self._looks % KERNEL_THREADS_EVERY == 0:
            self._resting, self._rested = set(), self._rested & pids
        self._looks += 1
        base = f"{place.path('proc')}/"
        stuck: list[Task] = []
        for pid in pids - self._resting:
            data = head_of(f"{base}{pid}/stat")
            end = data.rfind(b")")
            fields = data[end + 2 :].split(None, 20)
            if len(fields) < 21 or not all(fields[index].isdigit() for index in _NUMBERS):
                continue  # it has just ended
            state, is_kernels = fields[0], int(fields[6]) & _PF_KTHREAD
            if is_kernels and state != b"D":
                self._resting.add(pid)
                self._rested.add(pid)
            if (state == b"D" and (not is_kernels or pid in self._rested)) or (
                state == b"Z" and fields[17] not in (b"0", b"1")
            ):
                found = len(stuck) < SUSPECTS and _stuck(base, pid, state, data[data.find(b"(") + 1 : end], fields)
                if found:
                    stuck.append(found)
        return Snapshot(
            seen=len(pids),
            stuck=tuple(sorted(stuck, key=lambda task: task.pid)),
            hidden=bool(pids) and place.live and 1 not in pids,
        )


def _listed(folder: str | os.PathLike[str]) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


_BY_RIGHT: Final = re.compile(r"refrigerator|vfork_done|^(?:_?do_fork|kernel_clone)$")
"""Frozen (a paused container, a suspended job; since Linux 6.1 see `frozen`), or a parent that waits for its vfork."""


def _stuck(base: str, pid: int, state: bytes, name: bytes, fields: list[bytes]) -> Task | None:
    """None when it waits by right, or is a zombie without a thread in state D."""
    folder = f"{base}{pid}"
    if state == b"Z":
        threads = (f"{folder}/task/{thread}" for thread in _listed(f"{folder}/task")[:THREADS])
        folder = next((thread for thread in threads if _state(head_of(f"{thread}/stat")) == b"D"), "")
        if not folder:
            return None
    wchan = clean_text(head_of(f"{folder}/wchan").decode(errors="replace").strip(), 64)
    if _BY_RIGHT.search(wchan):
        return None
    schedule = head_of(f"{folder}/schedstat").split()
    ran = schedule[2:3] if len(schedule) == 3 else []
    return Task(
        pid=pid,
        name=clean_text(name.decode(errors="replace"), 32),
        start=int(fields[19]),
        runs=int(ran[0]) if ran and ran[0].isdigit() else int(fields[11]) + int(fields[12]),
        wchan="" if wchan == "0" else wchan,
    )


def frozen(place: ProbeContext, pid: int) -> bool:
    """Whether its freezer cgroup (v1) is frozen: that is state D wherever it happens to be. In v2 it is state S."""
    for line in (place.text(f"proc/{pid}/cgroup") or "").splitlines():
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        if "freezer" in kinds.split(","):
            state = place.text(f"sys/fs/cgroup/freezer{path}/freezer.state", 64) or ""
            return state.startswith("FR")
    return False


def _state(stat: bytes) -> bytes:
    end = stat.rfind(b")")
    return stat[end + 2 : end + 3]


# --- judging


class Since(Frozen, frozen=True, kw_only=True):
    """For how long a task has been stuck."""

    task: Task
    at: float
    """Monotonic seconds."""
    looks: int = 1


def follow(before: dict[tuple[int, int], Since], stuck: tuple[Task, ...], mono: float) -> dict[tuple[int, int], Since]:
    """What is stuck now, and since when. A process that ran since the last look just waits again."""
    after = {}
    for task in stuck:
        who = (task.pid, task.start)
        known = before.get(who)
        same = known is not None and known.task.runs == task.runs
        after[who] = (
            Since(task=task, at=known.at, looks=known.looks + 1) if known and same else Since(task=task, at=mono)
        )
    return after


_DRIVER_NAME: Final = re.compile(r"^(?:nvidia|nv-|nvsm|dcgm|UVM )")
_DRIVER_WCHAN: Final = re.compile(r"^(?:_nv\d|nv_|nvidia|nvkms|os_acquire|os_cond|rm_|uvm_|nvswitch|nvlink)")
_NETWORK: Final = (
    r"(?<!ker)nfs|^rpc_|^xprt|^__rpc|lustre|^(?:cl|ll|osc|ldlm|ptlrpc|lov|mdc|obd|lnet|vvp)_"
    r"|gpfs|mmfs|cxiWait|weka|beegfs|ceph"
)
_NETWORK_WCHAN: Final = re.compile(_NETWORK)
_STORAGE_WCHAN: Final = re.compile(
    rf"{_NETWORK}|fuse|request_wait_answer|cifs|smb2?_|io_schedule|folio_wait|folio_lock|wait_on_(?:page|buffer|bit)|lock_page"
    r"|^(?:blk|bio|submit_bio|rq_qos|nvme|scsi|sd)_|jbd2|ext4|xfs|xlog|btrfs|writeback|balance_dirty|congestion_wait",
)


STUCK: Final = ("process_stuck_driver", "process_stuck_storage", "process_stuck")


def check_of(task: Task) -> str:
    """By what it waits for; by its name only where the kernel does not report it, or tells of something general."""
    if _DRIVER_WCHAN.search(task.wchan):
        return "process_stuck_driver"
    if _STORAGE_WCHAN.search(task.wchan):
        return "process_stuck_storage"
    return "process_stuck_driver" if _DRIVER_NAME.search(task.name) else "process_stuck"


def judge_stuck(
    check: str, now_stuck: list[Since], seen: int, mono: float, ranks: dict[int, int], limits: dict[str, float]
) -> CheckResult:
    """`now_stuck`: those in state D of this check's kind, whether for long or not."""
    values = {"in_state_d": len(now_stuck)}
    long = [since for since in now_stuck if mono - since.at >= limits["seconds"] and since.looks >= limits["looks"]]
    if not long:
        return healthy(check, text=f"{seen} processes, {len(now_stuck)} in state D", values=values)
    long.sort(key=lambda since: (since.task.pid not in ranks, since.at))
    level: Level = "critical" if check == "process_stuck_driver" or long[0].task.pid in ranks else "warning"
    told = "; ".join(_describe(since, mono, ranks) for since in long[:3])
    more = f"; {len(long) - 3} more" if len(long) > 3 else ""
    pids = tuple(since.task.pid for since in long[:32])
    return unhealthy(check, told + more, level=level, pids=pids, values=values | {"stuck": len(long)})


AGAIN_S: Final = 2.0
"""A check without an agent looks again after so long at who waits for a driver or a server."""


def is_suspect(since: Since) -> bool:
    """Whether it waits for the GPU driver or a server, by what the kernel says."""
    return bool(_DRIVER_WCHAN.search(since.task.wchan) or _NETWORK_WCHAN.search(since.task.wchan))


def judge_one_look(
    check: str, stuck: list[Since], ranks: dict[int, int], mono: float, *, tree: bool
) -> CheckResult | None:
    """Without a second look, a process that waits for the driver or a server is a warning.

    Of a captured tree there is no second look at all; on a node it is one who has not run for some seconds.
    """
    waiting = [since for since in stuck if is_suspect(since) and (tree or since.looks > 1)]
    if not waiting:
        return None
    told = "; ".join(_name(since.task, ranks) for since in waiting[:3])
    more = f"; {len(waiting) - 3} more" if len(waiting) > 3 else ""
    least = min(mono - since.at for since in waiting)
    how_long = f"for {least:.0f} s at least" if least else "one look cannot tell for how long"
    text = f"in state D: {told}{more}; {how_long}"
    pids = tuple(since.task.pid for since in waiting[:32])
    return unhealthy(check, text, level="warning", pids=pids, values={"in_state_d": len(stuck)})


def _name(task: Task, ranks: dict[int, int], stuck: str = "") -> str:
    rank = f", rank {ranks[task.pid]}" if task.pid in ranks else ""
    return f"{task.name} (pid {task.pid}{rank}){stuck}" + (f" in {task.wchan}" if task.wchan else "")


def _describe(since: Since, mono: float, ranks: dict[int, int]) -> str:
    return f"{_name(since.task, ranks, ' stuck')} for {mono - since.at:.0f} s"


# --- the probe


class ProcessProbe:
    name = "processes"
    checks = CHECKS
    every_s = 30.0
    deadline_s = 10.0
    once_s = 6.0

    def __init__(self) -> None:
        self._reader = ProcessReader()
        self._since: dict[tuple[int, int], Since] | None = None

    def look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:
        snapshot = self._reader.read(place)
        limits = {check.id: place.limits(check) for check in self.checks}
        mono, stuck = now.mono, self._follow(place, snapshot.stuck, now.mono)
        if place.once and place.live and any(is_suspect(since) and since.looks == 1 for since in stuck):
            time.sleep(AGAIN_S)
            mono, stuck = mono + AGAIN_S, self._follow(place, self._reader.read(place).stuck, mono + AGAIN_S)
        if not snapshot.seen:
            return [not_applicable(check, "no process can be seen") for check in STUCK]
        results = []
        for check in STUCK:
            mine = [since for since in stuck if check_of(since.task) == check]
            result = judge_stuck(check, mine, snapshot.seen, mono, place.job.ranks, limits[check])
            if result.status == "healthy" and (place.once or not place.live):
                result = judge_one_look(check, mine, place.job.ranks, mono, tree=not place.live) or result
            results.append(result)
        if snapshot.hidden:
            why = "other users' processes are hidden from us (hidepid)"
            results.append(unknown("process_stuck", why, "other users"))
        return results

    def _follow(self, place: ProbeContext, tasks: tuple[Task, ...], mono: float) -> list[Since]:
        """It goes on where another process left off in this boot: a check that is run now and then sees it, too."""
        before = self._since
        if before is None:
            before = {
                (pid, start): Since(task=Task(pid=pid, name="", start=start, runs=runs), at=at, looks=looks)
                for pid, start, runs, at, looks in recall(place, "stuck", list[tuple[int, int, int, float, int]])
            }
        after = {
            who: Since(task=since.task, at=mono) if since.looks > 1 and frozen(place, since.task.pid) else since
            for who, since in follow(before, tasks, mono).items()
        }
        lasting = {who for who, since in after.items() if since.looks > 1}
        if place.preflight or lasting != {who for who, since in before.items() if since.looks > 1}:
            place.keep("stuck", [[*who, since.task.runs, since.at, since.looks] for who, since in after.items()])
        self._since = after
        return list(after.values())
