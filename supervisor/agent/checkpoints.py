"""Which checkpoints this job has: those in folders that the user gave (`--checkpoint-dir`), else those that its ranks
were seen to write. A thread of its own looks for them: a file system that hangs must never stop the agent.

What ranks wrote is known from their own records and their open files. The job's record of it has a file for each node
in the job folder (`written/<node>.json`). From it another node, and the job's next life after a requeue, know what the
job wrote before.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from recovery.checkpoint import Checkpoint
from recovery.formats.scan import CheckpointScanner, WrittenCheckpoints
from recovery.provenance import Item, Provenance, Write
from recovery.quarantine import Bounds, GivenFolders, WrittenByRanks, keep_copy
from supervisor.agent.content import ContentMonitor, is_on_a_disk
from supervisor.agent.procfs import descendants, files_open_for_writing
from supervisor.agent.state import fulfil
from supervisor.files import start_time, write_atomically

# ----- what the ranks of this node wrote, and the job's record of it -----

FOLDER: Final = "written"
READ_BYTES: Final = 4 << 20
"""Of all records in one look."""
RECORD_BYTES: Final = 64 << 20
NODES_READ: Final = 4096
ATTEMPTS_READ: Final = 2
"""The newest ones, but for the first look."""
SETTLED_NS: Final = 2_000_000_000
"""A folder that has not changed for so long has another time after its next change."""
_KINDS: Final = frozenset("wdrlhxi")

log = logging.getLogger("unbroken.agent")


class RankRecords:
    """Follows the records that ranks write in the local folder (`attempts/<n>/rank<r>.writes`)."""

    def __init__(self, attempts: Path) -> None:
        self._attempts = str(attempts)
        self._read: dict[int, int] = {}
        """Inode of a record -> how much of it was read."""
        self._listed: dict[str, tuple[int, list[str]]] = {}
        """Folder -> its time, ns, and what was in it."""
        self._looks = 0

    def new(self) -> list[Write]:
        """What was added since the last time, in the order in which it was done."""
        left = READ_BYTES
        found: list[Write] = []
        there: set[int] = set()
        for path in self._records():
            try:
                about = os.stat(path)
                there.add(about.st_ino)
                if about.st_size <= self._read.get(about.st_ino, 0):
                    continue
                with open(path, "rb") as file:
                    inode = os.fstat(file.fileno()).st_ino
                    there.add(inode)
                    file.seek(self._read.get(inode, 0))
                    data = file.read(left)
            except OSError:
                continue
            whole = data.rfind(b"\n") + 1
            self._read[inode] = self._read.get(inode, 0) + whole
            left -= whole
            found += filter(None, map(parsed, data[:whole].splitlines()))
        self._looks += 1
        self._read = {inode: at for inode, at in self._read.items() if inode in there or self._looks > 1}
        while len(self._read) > 50_000:
            del self._read[next(iter(self._read))]
        found.sort(key=lambda write: write.at_ns)
        return _canonical(found)

    def _records(self) -> list[str]:
        """Of the oldest attempt first, and of one rank the part that was full first."""
        numbers = sorted(int(name) for name in self._names(self._attempts) if name.isdigit())
        records: list[str] = []
        for number in numbers if self._looks == 0 else numbers[-ATTEMPTS_READ:]:
            folder = f"{self._attempts}/{number}"
            names = sorted(self._names(folder))
            records += [f"{folder}/{name}" for name in names if name.endswith(".writes.1")]
            records += [f"{folder}/{name}" for name in names if name.endswith(".writes")]
        return records

    def _names(self, folder: str) -> list[str]:
        """What is in a folder; listed again when its time has changed."""
        try:
            changed_ns = os.stat(folder).st_mtime_ns
            at_ns, names = self._listed.get(folder, (-1, []))
            if changed_ns != at_ns:
                names = os.listdir(folder)
        except OSError:
            return []
        if len(self._listed) > 2 * ATTEMPTS_READ:
            self._listed.clear()
        if abs(time.time_ns() - changed_ns) > SETTLED_NS:
            self._listed[folder] = changed_ns, names
        return names


def parsed(line: bytes) -> Write | None:
    """A line of a record; None when it is damaged, or when the file's name is no UTF-8."""
    try:
        at_ns, pid, kind, path, more = json.loads(line)
        path.encode()
        if isinstance(more, list) and kind in "rh":
            more[0].encode()
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError):
        return None
    sound = isinstance(at_ns, int) and isinstance(pid, int) and kind in _KINDS and path.startswith("/")
    return Write(at_ns, pid, kind, path, more) if sound else None


def _canonical(writes: list[Write]) -> list[Write]:
    """Under the names that the files have without links; of what is written, its last part is followed, too."""
    folders: dict[str, str] = {}

    def placed(path: str) -> str:
        folder, name = os.path.split(path.rstrip("/"))
        if name in ("", ".", ".."):
            return os.path.realpath(path)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        return os.path.join(folders[folder], name)

    found: list[Write] = []
    for write in writes:
        path, more = placed(write.path), write.more
        if write.kind in "wi" and os.path.islink(path):
            path = os.path.realpath(path)
        elif write.kind in "rh" and isinstance(more, list):
            more = [placed(str(more[0])), *more[1:]]
        found.append(write._replace(path=path, more=more))
    return found


class OpenFiles:
    """The files that ranks, and the processes that they started, have open for writing."""

    def __init__(self) -> None:
        self._of: dict[int, set[str]] = {}

    def forget(self) -> None:
        """Before each look."""
        self._of.clear()

    def of(self, pid: int) -> set[str]:
        if pid not in self._of:
            self._of[pid] = set(files_open_for_writing(pid))
        return self._of[pid]

    def began_ns(self, pid: int) -> int:
        """When the process began, Unix time; now when it is gone."""
        try:
            ticks = start_time(pid)
        except OSError:
            ticks = None
        if ticks is None:
            return time.time_ns()
        since_boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return time.time_ns() - since_boot_ns + ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")

    def has(self, pid: int, path: str) -> bool:
        return path in self.of(pid)

    def of_family(self, pid: int) -> Iterable[tuple[int, str]]:
        for one in (pid, *descendants(pid)):
            for path in self.of(one):
                yield one, path


class JobRecord:
    """This node's part of the job's record, and the parts of the other nodes."""

    def __init__(self, job_dir: Path, node: str) -> None:
        self._folder = job_dir / FOLDER
        self._own = self._folder / f"{node}.json"
        self._kept = -1
        self._known: dict[str, tuple[int, int, int]] = {}
        """Part -> its inode, size and time when it was read last."""
        self._problems: dict[str, str] = {}
        """Part -> why it could not be read last: logged once."""

    def keep(self, provenance: Provenance) -> str:
        """Write this node's part if it has changed. Why that failed, in words; empty when it did not."""
        changes = provenance.changes
        if changes == self._kept:
            return ""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            write_atomically(self._own, msgspec.json.encode(provenance.items), 0o600)
        except OSError as error:
            return f"which files this job wrote cannot be kept in {self._own}: {error.strerror}"
        self._kept = changes
        return ""

    def read_all(self, provenance: Provenance) -> None:
        """What every node of the job wrote."""
        try:
            names = sorted(os.listdir(self._folder))[:NODES_READ]
        except OSError:
            return
        for name in names:
            if name.endswith(".json"):
                provenance.learn(self._read(self._folder / name))

    def of(self, node: str) -> dict[str, Item]:
        self._known.pop(str(self._folder / f"{node}.json"), None)
        return self._read(self._folder / f"{node}.json")

    def _read(self, path: Path) -> dict[str, Item]:
        """Nothing where it is unchanged since it was read, or not ours."""
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                about = os.fstat(file.fileno())
                version = (about.st_ino, about.st_size, about.st_mtime_ns)
                trusted = stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022
                if not trusted or about.st_size > RECORD_BYTES or self._known.get(str(path)) == version:
                    return {}
                self._known[str(path)] = version
                items = msgspec.json.decode(file.read(), type=dict[str, Item])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            if self._problems.get(str(path)) != str(error):
                log.warning("the record %s cannot be read: %s", path, error)
            self._problems[str(path)] = str(error)
            return {}
        self._problems.pop(str(path), None)
        return items


# ----- the checkpoints -----

SCAN_EVERY_S = 1.0
"""When the ranks have ended there is one more scan (`scan_now`)."""
AT_START_EVERY_S, START_S = 0.5, 30.0
AWAITED_EVERY_S = 0.25
"""A node leaves with the next checkpoint: each moment until it is seen is done again."""
IDLE_EVERY_S, LIVELY_S = 3.0, 60.0
"""Idle: no checkpoint has come or changed for so long."""
REST_EVERY_S = 9.0
"""Idle, the folders with checkpoints are known, and no rank has written much since the last scan."""
SCAN_CPU_SHARE, LONGEST_CPU_PAUSE_S = 0.02, 10.0
"""At most so much of one CPU: a scan of a folder with tens of thousands of files takes half a second of it."""
FOLDERS_REPORTED = 8
"""Folders with checkpoints of one job: the newest."""
ASK_OTHERS_S = 5.0
"""The first node of an attempt reads what the others wrote, where it does not know who wrote something."""
WROTE_BYTES = 64 * 1024
"""A rank that wrote so much since the last scan may be writing a checkpoint."""

log = logging.getLogger("unbroken.agent")


class CheckpointMonitor:
    """A thread scans every second or so. `update()`, called often, takes over what it found.

    The thread has its own clock: to wake it costs more than a scan (up to 1.5 ms on a virtual machine).
    """

    def __init__(self, folders: Sequence[str], cwd: str, *, local_dir: str, job_dir: str, node: str) -> None:
        self._given = [Path(folder) if folder.startswith("/") else Path(cwd) / folder for folder in folders]
        self._job_dir = job_dir
        self._marks = (f"UNBROKEN_JOB_DIR={job_dir}".encode(), local_dir.encode())
        self._followed: tuple[Path, ...] = ()
        """Where other nodes' ranks write."""
        self._provenance = Provenance(node)
        self._scanner = (
            CheckpointScanner() if self._given else CheckpointScanner(seen=WrittenCheckpoints(self._provenance))
        )
        self._ranks_records = RankRecords(Path(local_dir) / "attempts")
        self._record = JobRecord(Path(job_dir), node.replace("/", "_"))
        self._content = ContentMonitor(Path(job_dir), node)
        self._open = OpenFiles()
        self._to_adopt: list[tuple[str, str]] = []
        """What this program has written for the job, and the file that it is a copy of."""
        self.leads = False
        """This node is the first of the attempt: it reports what several nodes wrote together."""
        self._asked_others_at = float("-inf")
        self._record_problem = ""
        self._ended: Mapping[int, float] = {}
        self._writing: Mapping[int, int] = {}
        """Pid of a living rank -> bytes that it has written; `_written`: at the scan before."""
        self._written: Mapping[int, int] = {}
        self._turn = 0
        self._thread: threading.Thread | None = None
        self._scan_requested = threading.Event()
        self._at_rest = False
        """No rank is left that could still write."""
        self._scanning_since: float | None = None
        self._early_scan_at = float("inf")
        """From when on a rank that writes is a reason to scan before the pause is over."""
        self._awaited = False
        """The job waits for the next checkpoint."""
        self._scans = 0
        self._ranks_since = self._changed_at = time.monotonic()
        self._found: tuple[tuple[Checkpoint, ...], tuple[Path, ...]] | None = None
        """What the newest scan found, and the folders that ranks were seen to write to."""
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        """The number of the scan that each waits for, and its future."""
        self._copying: threading.Thread | None = None
        self.checkpoints: tuple[Checkpoint, ...] = ()
        self.learned: tuple[Path, ...] = ()
        """Folders with checkpoints of the job; empty where the user has given them."""
        self.left: tuple[str, ...] = ()
        """Sentences about files that the job wrote, and that nothing is done with all the same."""
        self.changes = 0
        """Grows with every change of `checkpoints` or `learned`."""
        self.problem = ""

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys((*self._given, *self._followed, *self.learned)))

    def follow(self, folders: Sequence[str]) -> None:
        """Where the job writes, on any node: these file systems matter. It proves nothing about the files there."""
        if not self._given:
            self._followed = tuple(map(Path, folders[-2 * FOLDERS_REPORTED :]))

    def update(self, writing: Mapping[int, int], ended: Mapping[int, float] | None = None) -> None:
        """Take over what the thread has found. Never blocks.

        `writing`: pids of the ranks that are there -> bytes written; `ended`: of those that are not -> Unix time.
        """
        now = time.monotonic()
        self._ended = ended or self._ended
        if self._writing.keys() != writing.keys():
            self._ranks_since = now
        self._writing = writing
        if writing:
            self._at_rest = False
        if now >= self._early_scan_at and self._who_wrote(writing):
            self._early_scan_at = float("inf")
            self._scan_requested.set()
        self._start_thread()
        self._take_over()
        since = self._scanning_since
        if since is not None and now - since > 30:
            self.problem = "looking for checkpoints has taken over 30 s: is the file system answering?"

    def wait_for_save(self, awaited: bool) -> None:
        """The job waits for the next checkpoint, or not any more."""
        if awaited and not self._awaited:
            self._scan_requested.set()
        self._awaited = awaited

    async def scan_now(self) -> None:
        """One whole scan, after the one under way: what is there once the ranks are gone. Waits two seconds at most."""
        self._writing, self._at_rest = {}, True
        self._start_thread()
        looked = asyncio.get_running_loop().create_future()
        self._waiters.append((self._scans + (1 if self._scanning_since is None else 2), looked))
        self._scan_requested.set()
        await asyncio.wait({looked}, timeout=2.0)
        self._take_over()

    def _start_thread(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread left: tried again at the next call
            self.problem = f"checkpoints are not looked for: {error}"
            return
        self._thread, self.problem = thread, ""

    def _run(self) -> None:
        while True:
            self._early_scan_at = float("inf")
            self._scan_requested.clear()
            self._scanning_since = time.monotonic()
            began_s = time.thread_time()
            try:
                self._found = self._read(self._writing)
                self._copy()
            except Exception:
                log.exception("the scan for checkpoints failed")
            self._scanning_since = None
            self._scans += 1
            if not self._wake_waiters():
                cpu_pause_s = min((time.thread_time() - began_s) / SCAN_CPU_SHARE, LONGEST_CPU_PAUSE_S)
                now = time.monotonic()
                pause_s = self._pause_s(now)
                self._early_scan_at = now + max(IDLE_EVERY_S if self.folders else SCAN_EVERY_S, cpu_pause_s)
                self._scan_requested.wait(max(pause_s, cpu_pause_s))

    def _pause_s(self, now: float) -> float:
        if self._awaited:
            return AWAITED_EVERY_S
        if now - self._ranks_since < START_S:
            return AT_START_EVERY_S
        idle = now - max(self._ranks_since, self._changed_at) > LIVELY_S
        if not idle:
            return SCAN_EVERY_S
        return REST_EVERY_S if self.folders else IDLE_EVERY_S

    def _copy(self) -> None:
        """Copy what the next save would overwrite, at once, beside the scans; a later scan finds the copies."""
        if self._copying is not None and self._copying.is_alive():
            return
        files = self._scanner.files_to_copy()
        if files:
            self._copying = threading.Thread(target=self._copy_all, args=(files,), name="copies", daemon=True)
            self._copying.start()

    def _copy_all(self, files: list[Path]) -> None:
        known = self._provenance.copy()
        for file in files:
            copy = keep_copy(file, is_own=lambda path: bool(self._given) or known.owns(str(path)))
            if copy is not None:
                self._to_adopt.append((copy.path, str(file)))

    def _wake_waiters(self) -> bool:
        """Whether somebody waits for another scan."""
        due = [waiter for waiter in self._waiters if waiter[0] <= self._scans]
        for waiter in due:
            self._waiters.remove(waiter)
            try:
                waiter[1].get_loop().call_soon_threadsafe(fulfil, waiter[1])
            except RuntimeError:  # the loop has ended
                pass
        return bool(self._waiters)

    def _take_over(self) -> None:
        if self._found is None:
            return
        self.problem = f"{self._scanner.cut_short} holds more than is looked at" if self._scanner.cut_short else ""
        if self._found != (self.checkpoints, self.learned):
            self.checkpoints, self.learned = self._found
            self.changes += 1
            self._changed_at = time.monotonic()

    def _read(self, writing: Mapping[int, int]) -> tuple[tuple[Checkpoint, ...], tuple[Path, ...]]:
        if not self._given:
            self._learn(writing)
        self._written = writing
        found = self._scanner.scan(self._given, time.time(), at_rest=self._at_rest)
        if self._at_rest:  # while a rank writes, it may still turn out who wrote a file
            self.left = tuple(f"{path} is left alone: {why}" for path, why in self._scanner.left.items())
        checkpoints = self._verified(tuple(checkpoint for checkpoint in found if is_utf8(checkpoint.path)))
        if self._given:
            return checkpoints, ()
        self._write_record()
        folders = dict.fromkeys(Path(one.path).parent for one in reversed(checkpoints) if not one.copy_of)
        return checkpoints, tuple(folders)[-FOLDERS_REPORTED:]

    def _verified(self, found: tuple[Checkpoint, ...]) -> tuple[Checkpoint, ...]:
        """With what is known of their content. On shared storage one node reads for all."""
        verifies = tuple(one for one in found if self.leads or is_on_a_disk(one.path))
        self._content.offer(verifies)
        if self._at_rest:
            self._content.check_now(verifies)
        return tuple(map(self._content.judged, found))

    def _learn(self, writing: Mapping[int, int]) -> None:
        """Learn from records and open files what this node's ranks wrote. At rest, and where it is not known
        who wrote something, learn what other nodes' ranks wrote, too.
        """
        now = time.monotonic()
        self._open.forget()
        unclear = self.leads and self._scanner.left and now >= self._asked_others_at + ASK_OTHERS_S
        if self._scans == 0 or self._at_rest or unclear:
            self._record.read_all(self._provenance)
            self._asked_others_at = now
        self._provenance.note(self._ranks_records.new())
        for rank in self._writers(writing):
            for pid, path in self._open.of_family(rank):
                if is_utf8(path):
                    self._provenance.opened(path, pid, self._open.began_ns(pid), time.time_ns())
        for pid, at in self._ended.items():
            self._provenance.ended(pid, int(at * 1e9))
        self._provenance.settle(self._open.has, time.time_ns())
        self._adopt()

    def _adopt(self) -> None:
        while self._to_adopt:
            path, copy_of = self._to_adopt.pop(0)
            self._provenance.adopt(path, time.time_ns(), copy_of)

    def _write_record(self) -> None:
        problem = self._record.keep(self._provenance)
        if problem and problem != self._record_problem:
            log.warning("%s", problem)
        self._record_problem = problem

    # ----- what may be done -----

    def bounds(self) -> Bounds:
        """What preparations may touch, as is known now."""
        if self._given:
            return GivenFolders(self._given, self._job_dir, self._marks)
        return WrittenByRanks(self._provenance.copy(), self._job_dir, self._marks)

    def placed(self, paths: Sequence[str]) -> None:
        """Preparations have written these: they are the job's. The next scan records it."""
        self._to_adopt += [(path, "") for path in paths]

    def why_no_resume(self, path: str, nodes: int, first: str) -> str:
        """Why a script may not resume from a checkpoint; empty when it may. Blocks: for a thread.

        `nodes`: how many the attempt has, and the `first` of them. Where there are several, all must come to the same
        answer: there it is enough that the job wrote the checkpoint.
        """
        bounds = self.bounds()
        if self._given or nodes == 1:
            return bounds.why_not(Path(path)) if self._given else self._provenance.copy().why_not_offered(path)
        if path in self._provenance.items or path in self._record.of(first):
            return ""
        known = self._provenance.copy()
        JobRecord(Path(self._job_dir), "").read_all(known)
        return "" if path in known.items else "no rank of this job was seen to write it"

    def _writers(self, writing: Mapping[int, int]) -> set[int]:
        """Ranks that have just written much, and one other in turn: a rank may hold hundreds of descriptors."""
        writers = self._who_wrote(writing)
        self._turn += 1
        turn = list(writing)[self._turn % len(writing) :][:1] if writing else []
        return writers | set(turn)

    def _who_wrote(self, writing: Mapping[int, int]) -> set[int]:
        """Who has written much since the last scan."""
        before = self._written
        return {pid for pid, written in writing.items() if written - before.get(pid, 0) > WROTE_BYTES}


def is_utf8(path: str) -> bool:
    """Other names cannot be sent as JSON: such a file is left alone."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
