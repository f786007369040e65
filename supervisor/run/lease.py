"""The lease: one life of a job at a time, on whatever host and in whatever container (docs/adr/0017).

Each life claims `leases/<n>.json` in the job folder by creating it, which exactly one process can do, and rewrites it
in place every few seconds. Who comes next sees whether that goes on: no locks, and no two clocks are compared. A life
whose lease has not changed for `DEAD_S` is dead; one of this boot and PID namespace shows by its process; one that was
given up says so. The run itself never waits for the lease, and never ends because it cannot be written.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from diagnosis.signals import Frozen, clean_line
from supervisor.errors import JobRunsAlready
from supervisor.files import Here, create_exclusively, open_regular, start_time

FOLDER = "leases"
BEAT_S = 2.0
DEAD_S = 30.0
"""How long caches of network file systems may hide a change; slower clients than ours may need as long."""
LOOK_S = 0.25
SIZE = 2048
"""Bytes of the file. It never grows: each beat overwrites it in place, which works on a full disk, too."""
LAST_WRITE_S = 2.0
JOURNAL = re.compile(r"journal\.(\d{1,9})\.jsonl")

LeaseState = Literal["free", "lives", "unknown"]


class Holder(Frozen, frozen=True, kw_only=True):
    """Content of a lease: who runs the job, and how often it has renewed the lease."""

    id: str
    node: str
    host: str
    user: str
    pid: int
    start_time: int
    boot_id: str
    pid_namespace: str
    since: float
    """Unix time, by its own clock: for people only."""
    scheduler_job: str = ""
    requeues: int = 0
    journal: int | None = None
    """The newest journal's number when this life began, 0: none; its own controller begins another. None: not known."""
    beat: int = 0
    ended: bool = False


def holder_here(node: str, scheduler_job: str, requeues: int, journal: int | None = None) -> Holder:
    """This process as the holder of a new lease."""
    boot_id, pid_namespace = Here.find()
    pid = os.getpid()
    return Holder(
        id=secrets.token_hex(8),
        node=node,
        host=socket.gethostname(),
        user=_user(),
        pid=pid,
        start_time=start_time(pid) or 0,
        boot_id=boot_id,
        pid_namespace=pid_namespace,
        since=time.time(),
        scheduler_job=scheduler_job,
        requeues=requeues,
        journal=journal,
    )


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container that knows no names
        return str(os.geteuid())


def encode(holder: Holder) -> bytes:
    """The bytes of the file: always of the same length."""
    return msgspec.json.encode(holder).ljust(SIZE - 1) + b"\n"


def decode(data: bytes) -> Holder | None:
    """None where it is torn or damaged."""
    try:
        return msgspec.json.decode(data, type=Holder)
    except (msgspec.DecodeError, RecursionError):
        return None


def lease_state(holder: Holder | None, mine: Holder, here: Here, started: Callable[[int], int | None]) -> LeaseState:
    """What the lease alone shows. `started`: when a process of this namespace began; None: it is gone.

    A torn lease says nothing: whether it changes tells. The scheduler that starts a job again has ended it before.
    """
    if holder is None:
        return "unknown"
    if holder.ended:
        return "free"
    if holder.scheduler_job and holder.scheduler_job == mine.scheduler_job and mine.requeues > holder.requeues:
        return "free"
    if here.sees(holder.boot_id, holder.pid_namespace):
        return "lives" if started(holder.pid) == holder.start_time else "free"
    return "unknown"


class Lease:
    """A lease that we hold; `keep` renews it in a thread until `give_up`. `lost`: who has it now, in words."""

    def __init__(self, job_dir: Path, number: int, holder: Holder, beat_s: float = BEAT_S) -> None:
        self.number = number
        self.holder = holder
        self.lost = ""
        self._path = lease_path(job_dir, number)
        self._next = lease_path(job_dir, number + 1)
        self._beat_s = beat_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self) -> None:
        """Start renewing the lease."""
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread left: others see this life by its process, if at all
            self._thread.start()

    def _beat(self) -> None:
        while not self._over.wait(self._beat_s):
            self.holder = msgspec.structs.replace(self.holder, beat=self.holder.beat + 1)
            self._write()
            if not self.lost and os.path.exists(self._next):
                other = read_lease(self._next)
                self.lost = f"another run of this job has taken it over{': ' + who_holds(other) if other else ''}"

    def _write(self) -> None:
        """Renew the lease. A failure here changes nothing: the run itself is healthy."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.pwrite(descriptor, encode(self.holder), 0)
            finally:
                os.close(descriptor)

    def give_up(self) -> None:
        """Release the lease: nothing of this run is left, so another may start at once. Waits a short time only."""
        self._over.set()

        def last() -> None:
            if self._thread is not None and self._thread.ident is not None:
                self._thread.join()
            self.holder = msgspec.structs.replace(self.holder, ended=True)
            self._write()

        ending = threading.Thread(target=last, name="lease", daemon=True)
        with contextlib.suppress(RuntimeError):
            ending.start()
            ending.join(LAST_WRITE_S)


def lease_path(job_dir: Path, number: int) -> Path:
    return job_dir / FOLDER / f"{number}.json"


def newest_lease(job_dir: Path) -> int:
    """The number of the newest life; 0: there was none. Raises OSError."""
    try:
        with os.scandir(job_dir / FOLDER) as entries:
            names = (entry.name.removesuffix(".json") for entry in entries)
            return max((int(name) for name in names if name.isdigit()), default=0)
    except FileNotFoundError:
        return 0


def _content(path: Path) -> bytes:
    with open(open_regular(path, follow=False), "rb") as file:
        return file.read(SIZE)


def read_lease(path: Path) -> Holder | None:
    try:
        return decode(_content(path))
    except OSError:
        return None


def take(
    job_dir: Path,
    mine: Holder,
    *,
    joins: bool,
    say: Callable[[str], None],
    pause: Callable[[float], object] = time.sleep,
    now: Callable[[], float] = time.monotonic,
    dead_s: float = DEAD_S,
) -> Lease | None:
    """Take the lease of the job; None where the job lives and this node `joins` it. Raises JobRunsAlready, and OSError.

    Where nothing tells whether the newest life goes on, its lease is watched until it changes, or for `dead_s`.
    """
    (job_dir / FOLDER).mkdir(parents=True, exist_ok=True)
    here, watched, seen, since, reported = Here.find(), 0, (b"", b""), now(), False
    while True:
        number = newest_lease(job_dir)
        content = _content(lease_path(job_dir, number)) if number else b""
        holder = decode(content)
        signs = content, _journals(job_dir)
        told_by_itself = lease_state(holder, mine, here, start_time) if number else "free"
        if number != watched:
            watched, seen, since = number, signs, now()
        elif signs != seen and holder is not None and not holder.ended:
            told_by_itself = "lives"
        if told_by_itself == "lives" and holder is not None:
            if joins and holder.node != mine.node:
                return None
            raise JobRunsAlready(_refusal(job_dir, holder, joins=joins))
        if told_by_itself == "free" or now() - since >= dead_s:
            if create_exclusively(lease_path(job_dir, number + 1), encode(mine)):
                return Lease(job_dir, number + 1, mine)
            continue
        if not reported:
            reported = True
            who = who_holds(holder) if holder is not None else "whose lease is damaged"
            say(f"this job may still be running ({who}): watching it for at most {dead_s:.0f} s")
        pause(LOOK_S)


def _journals(job_dir: Path) -> bytes:
    """What changes while a controller writes: `unbroken run` may be stopped (Ctrl-Z), and its ranks go on."""
    with os.scandir(job_dir) as entries:
        sizes = [(one.name, one.stat().st_size) for one in entries if one.name.startswith("journal.")]
    return repr(sorted(sizes)).encode()


def newest_journal(job_dir: Path) -> int:
    """The number of the newest journal; 0: there is none. Raises OSError."""
    try:
        with os.scandir(job_dir) as entries:
            names = (JOURNAL.fullmatch(entry.name) for entry in entries)
            return max((int(name[1]) for name in names if name), default=0)
    except FileNotFoundError:
        return 0


def has_begun(job_dir: Path, holder: Holder) -> bool:
    """Whether a controller of the life of `holder` has begun its journal. Raises OSError."""
    return newest_journal(job_dir) > (holder.journal or 0)


def who_holds(holder: Holder) -> str:
    """`ann on h1, node n1, since 2026-01-31 12:00:00 UTC, process 123`."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(holder.since))
    who = f"{holder.user} on {holder.host}, node {holder.node}, since {since} UTC, process {holder.pid}"
    return clean_line(who + (f", job {holder.scheduler_job}" if holder.scheduler_job else ""), 300)


def _refusal(job_dir: Path, holder: Holder, *, joins: bool) -> str:
    more = "To join it from here give another --node-name. " if joins else ""
    return (
        f"this job runs already: {who_holds(holder)}. {more}To see it: unbroken status --job-dir {job_dir}; to end it: "
        f"unbroken stop --job-dir {job_dir}; to train beside it give another --name or --job-dir"
    )
