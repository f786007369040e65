"""The keeper's book of launcher and workers: who lives, how each one ended, who is to be killed."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any, Mapping  # noqa: UP035 (Python 3.9)

KEPT = 64
"""Ended workers of older attempts that are still told to watchers."""


def start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat, clock ticks after boot; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def parent(pid: int) -> int:
    """Parent of a process; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def write_atomically(path: str, value: Mapping[str, Any]) -> None:
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(temporary, "w") as file:
            json.dump(value, file)
        os.replace(temporary, path)
    except OSError:
        pass  # a full disk must not end the keeper; watchers are told all the same


def number(environ: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(environ.get(name, default))
    except ValueError:
        return default


class Worker:
    """One rank, warm (our child) or cold (its stub's child)."""

    def __init__(self, attempt: int, rank: int, local_rank: int, pid: int, stub: int) -> None:
        self.attempt, self.rank, self.local_rank, self.pid, self.stub = attempt, rank, local_rank, pid, stub
        self.start_time = start_time(pid)
        self.started_at = time.time()
        self.status: int | None = None
        self.ended_at: float | None = None
        self.order: int | None = None
        self.stopped_by_us = False
        self.leftovers = False
        self.note = ""
        self.cold = False
        self.pidfd = -1
        self.owner: Any = None
        """The stub's connection."""

    @classmethod
    def of(cls, environ: Mapping[str, str], pid: int, attempt: int, stub: int) -> Worker:
        rank = number(environ, "RANK", 0)
        local_rank = number(environ, "UNBROKEN_LOCAL_RANK", number(environ, "LOCAL_RANK", rank))
        return cls(number(environ, "UNBROKEN_ATTEMPT", attempt), rank, local_rank, pid, stub)

    def state(self) -> dict[str, Any]:
        names = (
            "stub",
            "stopped_by_us",
            "attempt",
            "rank",
            "local_rank",
            "pid",
            "start_time",
            "started_at",
            "status",
            "ended_at",
            "order",
        )
        return {name: getattr(self, name) for name in names}

    def record(self) -> dict[str, Any]:
        core = os.WIFSIGNALED(self.status or 0) and os.WCOREDUMP(self.status or 0)
        return {**self.state(), "core_dumped": core, "note": self.note}

    def handles(self, number: int) -> bool:
        """Whether it has a handler for this signal now; False where that is not known."""
        try:
            with open(f"/proc/{self.pid}/status") as file:
                caught = next((int(line.split()[1], 16) for line in file if line.startswith("SigCgt")), 0)
        except (OSError, ValueError):
            return False
        return bool(caught >> (number - 1) & 1) and start_time(self.pid) == self.start_time

    def send(self, number: int) -> None:
        """To its process group, and to itself where it has no group yet."""
        if self.pid <= 1 or start_time(self.pid) != self.start_time:  # 0 and -1 would mean every process
            return
        for send in (os.killpg, os.kill):
            try:
                send(self.pid, number)
            except OSError:
                pass


class Members:
    """`ready`: torch is imported (or could not be)."""

    def __init__(self, local_dir: str) -> None:
        self.local_dir = local_dir
        self.ready = False
        self.launcher: dict[str, Any] | None = None
        self.workers: list[Worker] = []
        self.stopping = False

    def state(self) -> dict[str, Any]:
        return {
            "ready": self.ready,
            "pid": os.getpid(),
            "launcher": self.launcher,
            "workers": [worker.state() for worker in self.workers],
        }

    def take_descriptors(self) -> list[int]:
        """The pidfds, for a fork to close."""
        taken = [worker.pidfd for worker in self.workers if worker.pidfd >= 0]
        for worker in self.workers:
            worker.pidfd = -1
        return taken

    def launcher_alive(self) -> bool:
        return self.launcher is not None and self.launcher["status"] is None

    def launched(self, pid: int) -> None:
        self.stopping = False
        self.launcher = {"pid": pid, "start_time": start_time(pid), "status": None}

    def live(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.status is None]

    def add(self, worker: Worker) -> None:
        newest = max([worker.attempt, *(other.attempt for other in self.workers)])
        old = [other for other in self.workers if other.attempt < newest and other.status is not None]
        for other in old[: max(0, len(old) - KEPT)]:
            self.workers.remove(other)
        self.workers.append(worker)

    def ended(self, pid: int, status: int) -> Worker | None:
        """A child of ours was reaped; the worker it was, if it was one."""
        if self.launcher is not None and pid == self.launcher["pid"]:
            self._launcher_ended(status)
            return None
        for worker in self.workers:
            if worker.pid == pid and worker.status is None and not worker.cold:
                self.finish(worker, status)
                return worker
        return None

    def finish(self, worker: Worker, status: int) -> None:
        """Keep how a worker ended; only the first word counts."""
        if worker.status is not None:
            return
        worker.status, worker.ended_at = status, time.time()
        same = [other for other in self.workers if other.attempt == worker.attempt and other.order is not None]
        worker.order = len(same)
        worker.stopped_by_us = worker.stopped_by_us or self.stopping
        folder = os.path.join(self.local_dir, "attempts", str(worker.attempt))
        write_atomically(os.path.join(folder, f"rank{worker.rank}.exit"), worker.record())
        try:  # a stub that was stopped would hold up the launcher for ever
            if worker.stub > 1:
                os.kill(worker.stub, signal.SIGCONT)
        except OSError:
            pass
        try:
            os.killpg(worker.pid, 0)
            worker.leftovers = True
        except OSError:
            pass

    def cold_gone(self, pidfd: int) -> None:
        """A cold worker ended. Its stub tells the status, unless it went first and the kernel took the worker along."""
        for worker in self.workers:
            if worker.pidfd == pidfd:
                os.close(pidfd)
                worker.pidfd = -1
                if worker.owner is None:
                    self.finish(worker, signal.SIGKILL)

    def _launcher_ended(self, status: int) -> None:
        assert self.launcher is not None
        self.launcher["status"] = status
        record = {**self.launcher, "ended_at": time.time()}
        write_atomically(os.path.join(self.local_dir, "launcher.exit"), record)
        self.kill_all("its launcher is gone")

    def kill(self, worker: Worker, why: str, by_us: bool = True) -> None:
        worker.stopped_by_us = worker.stopped_by_us or by_us
        worker.note = worker.note or why
        worker.send(signal.SIGKILL)
        if worker.cold and worker.owner is None and worker.pidfd < 0:
            self.finish(worker, signal.SIGKILL)

    def kill_attempts(self, newest: int) -> list[int]:
        """Kill every worker of attempts up to `newest`, and what ended ones left behind in their process groups."""
        killed = []
        for worker in self.workers:
            if worker.attempt > newest:
                continue
            if worker.status is None:
                self.kill(worker, "killed before the next attempt")
                killed.append(worker.pid)
            elif worker.leftovers:
                worker.leftovers = False
                if start_time(worker.pid):
                    continue  # a number in use as a group is never given out again, so the group is gone: another's
                try:
                    os.killpg(worker.pid, signal.SIGKILL)
                except OSError:
                    pass
        return killed

    def kill_all(self, why: str) -> None:
        """Launcher and workers."""
        if self.launcher is not None and self.launcher["status"] is None:
            os.kill(self.launcher["pid"], signal.SIGKILL)
        for worker in self.live():
            self.kill(worker, why)

    def signal(self, number: int, ranks: Any, handled: bool = False) -> None:
        """`handled`: only to those with a handler for it. Python takes handlers back when it ends."""
        for worker in self.live():
            if ranks is not None and worker.rank not in ranks:
                continue
            if number == signal.SIGCONT:
                worker.send(number)
            elif worker.pid > 1 and (not handled or worker.handles(number)):
                os.kill(worker.pid, number)

    def stop(self, number: int | None) -> None:
        """Tell the launcher, which tells its workers as torchrun does; what ends from now on was stopped by us.

        Without `number` it has been told already.
        """
        self.stopping = True
        if self.launcher_alive() and self.launcher is not None:
            os.kill(self.launcher["pid"], signal.SIGCONT)
            if number is not None:
                os.kill(self.launcher["pid"], number)
