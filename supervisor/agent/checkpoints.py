"""Which checkpoints this job has, looked up in a worker thread: a hanging file system must never stop the agent.

Those in folders that the user gave (`--checkpoint-dir`), else those that ranks of the job were seen to write.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from recovery.actions import Checkpoint
from recovery.bounds import Bounds, GivenFolders, SeenByRanks
from recovery.formats import CheckpointScanner
from recovery.formats.places import Seen
from recovery.provenance import Provenance
from recovery.quarantine import keep_copy
from supervisor.agent.writes import JobRecord, OpenFiles, RankRecords

SCAN_EVERY_S = 1.0
"""When ranks have ended there is a look of its own besides (`scan_now`)."""
AT_START_EVERY_S, START_S = 0.5, 30.0
IDLE_EVERY_S, LIVELY_S = 3.0, 60.0
"""Idle: it is known where checkpoints come, and none has for so long."""
REST_EVERY_S = 9.0
"""Idle, and no rank has written much since the last look."""
LOOK_SHARE, COSTLY_EVERY_S = 0.02, 10.0
"""Of one CPU at most: of a folder with tens of thousands of files a look costs half a second."""
FOLLOWED = 8
"""Folders with checkpoints of one job that are told of."""
ASK_OTHERS_S = 5.0
"""The first node of an attempt asks what the others wrote, where it cannot tell whose something is."""
WROTE_BYTES = 64 * 1024
"""A rank that wrote so much since the last look may be writing a checkpoint."""

log = logging.getLogger("unbroken.agent")


class CheckpointMonitor:
    """Looks every second or so on a thread of its own; `scan()`, called often, takes up what it found.

    The thread keeps its own time: to wake one costs more than a look (up to 1.5 ms on a virtual machine).
    """

    def __init__(self, folders: Sequence[str], cwd: str, *, local_dir: str, job_dir: str, node: str) -> None:
        self._given = [Path(folder) if folder.startswith("/") else Path(cwd) / folder for folder in folders]
        self._job_dir = job_dir
        self._marks = (f"UNBROKEN_JOB_DIR={job_dir}".encode(), local_dir.encode())
        self._told: tuple[Path, ...] = ()
        """Where other nodes' ranks write."""
        self._provenance = Provenance(node)
        self._scanner = CheckpointScanner() if self._given else CheckpointScanner(seen=Seen(self._provenance))
        self._ranks_records = RankRecords(Path(local_dir) / "attempts")
        self._record = JobRecord(Path(job_dir), node.replace("/", "_"))
        self._open = OpenFiles()
        self._to_adopt: list[tuple[str, str]] = []
        """What was put there for the job, and the file that it is a copy of."""
        self.leads = False
        """This node is the first of the attempt: it tells of what several nodes wrote together."""
        self._asked_others_at = float("-inf")
        self._not_kept = ""
        self._ended: Mapping[int, float] = {}
        self._writing: Mapping[int, int] = {}
        """Pid of a rank that writes now -> bytes that it has written; `_written`: those of the look before."""
        self._written: Mapping[int, int] = {}
        self._turn = 0
        self._thread: threading.Thread | None = None
        self._at_once = threading.Event()
        self._at_rest = False
        """No rank is left that could still write."""
        self._looking_since: float | None = None
        self._may_look_at = float("inf")
        """When a rank that writes is a reason to look before the pause is over."""
        self._looks = 0
        self._ranks_since = self._changed_at = time.monotonic()
        self._found: tuple[tuple[Checkpoint, ...], tuple[Path, ...]] | None = None
        """What the newest look found, and the folders that it knew to be written to."""
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        """The look that each waits for, and what it waits on."""
        self._copying: threading.Thread | None = None
        self.checkpoints: tuple[Checkpoint, ...] = ()
        self.learned: tuple[Path, ...] = ()
        """Folders with checkpoints of the job; empty where the user has given them."""
        self.left: tuple[str, ...] = ()
        """What the job wrote, and is left alone all the same, in words."""
        self.changes = 0
        """Grows with every change of `checkpoints` or `learned`."""
        self.problem = ""

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where checkpoints are looked for."""
        return tuple(dict.fromkeys((*self._given, *self._told, *self.learned)))

    def follow(self, folders: Sequence[str]) -> None:
        """Where the job writes, on whatever node: these file systems matter. It proves nothing about what is there."""
        if not self._given:
            self._told = tuple(map(Path, folders[-2 * FOLLOWED :]))

    def scan(self, writing: Mapping[int, int], ended: Mapping[int, float] | None = None) -> None:
        """Take up what was found. Never blocks.

        `writing`: pids of the ranks that are there -> bytes written; `ended`: of those that are not -> Unix time.
        """
        now = time.monotonic()
        self._ended = ended or self._ended
        if self._writing.keys() != writing.keys():
            self._ranks_since = now
        self._writing = writing
        if writing:
            self._at_rest = False
        if now >= self._may_look_at and self._who_wrote(writing):
            self._may_look_at = float("inf")
            self._at_once.set()
        self._begin()
        self._take_up()
        since = self._looking_since
        if since is not None and now - since > 30:
            self.problem = "looking for checkpoints has taken over 30 s: is the file system answering?"

    async def scan_now(self) -> None:
        """One whole look, after one under way: what stands there once the ranks are gone. Two seconds at most."""
        self._writing, self._at_rest = {}, True
        self._begin()
        looked = asyncio.get_running_loop().create_future()
        self._waiters.append((self._looks + (1 if self._looking_since is None else 2), looked))
        self._at_once.set()
        await asyncio.wait({looked}, timeout=2.0)
        self._take_up()

    def _begin(self) -> None:
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
            self._may_look_at = float("inf")
            self._at_once.clear()
            self._looking_since = time.monotonic()
            began_s = time.thread_time()
            try:
                self._found = self._read(self._writing)
                self._copy()
            except Exception:
                log.exception("looking for checkpoints failed")
            self._looking_since = None
            self._looks += 1
            if not self._tell_waiters():
                costly_s = min((time.thread_time() - began_s) / LOOK_SHARE, COSTLY_EVERY_S)
                now = time.monotonic()
                pause_s = self._pause_s(now)
                self._may_look_at = now + max(IDLE_EVERY_S, costly_s)
                self._at_once.wait(max(pause_s, costly_s))

    def _pause_s(self, now: float) -> float:
        if now - self._ranks_since < START_S:
            return AT_START_EVERY_S
        idle = now - max(self._ranks_since, self._changed_at) > LIVELY_S
        return REST_EVERY_S if idle and self.folders else SCAN_EVERY_S

    def _copy(self) -> None:
        """Copy what the next save would overwrite, at once, beside the looks; a later one tells of the copies."""
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

    def _tell_waiters(self) -> bool:
        """Whether somebody waits for another look."""
        due = [waiter for waiter in self._waiters if waiter[0] <= self._looks]
        for waiter in due:
            self._waiters.remove(waiter)
            try:
                waiter[1].get_loop().call_soon_threadsafe(_fulfil, waiter[1])
            except RuntimeError:  # the loop has ended
                pass
        return bool(self._waiters)

    def _take_up(self) -> None:
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
        if self._at_rest:  # while a rank writes, it may still be proven
            self.left = tuple(f"{path} is left alone: {why}" for path, why in self._scanner.left.items())
        told = tuple(checkpoint for checkpoint in found if can_be_told(checkpoint.path))
        if self._given:
            return told, ()
        self._keep()
        folders = dict.fromkeys(Path(one.path).parent for one in reversed(told) if not one.copy_of)
        return told, tuple(folders)[-FOLLOWED:]

    def _learn(self, writing: Mapping[int, int]) -> None:
        """What this node's ranks wrote: by their records, and by what they have open. At rest, and where something
        cannot be told, what other nodes' wrote, too.
        """
        now = time.monotonic()
        self._open.forget()
        unclear = self.leads and self._scanner.left and now >= self._asked_others_at + ASK_OTHERS_S
        if self._looks == 0 or self._at_rest or unclear:
            self._record.read_all(self._provenance)
            self._asked_others_at = now
        self._provenance.note(self._ranks_records.new())
        for rank in self._writers(writing):
            for pid, path in self._open.of_family(rank):
                if can_be_told(path):
                    self._provenance.opened(path, pid, self._open.began_ns(pid), time.time_ns())
        for pid, at in self._ended.items():
            self._provenance.ended(pid, int(at * 1e9))
        self._provenance.settle(self._open.has, time.time_ns())
        self._take_in()

    def _take_in(self) -> None:
        while self._to_adopt:
            path, copy_of = self._to_adopt.pop(0)
            self._provenance.adopt(path, time.time_ns(), copy_of)

    def _keep(self) -> None:
        problem = self._record.keep(self._provenance)
        if problem and problem != self._not_kept:
            log.warning("%s", problem)
        self._not_kept = problem

    # ----- what may be done -----

    def bounds(self) -> Bounds:
        """What preparations may touch, as far as is known now."""
        if self._given:
            return GivenFolders(self._given, self._job_dir, self._marks)
        return SeenByRanks(self._provenance.copy(), self._job_dir, self._marks)

    def placed(self, paths: Sequence[str]) -> None:
        """What preparations have put there is the job's; the next look keeps it."""
        self._to_adopt += [(path, "") for path in paths]

    def why_no_resume(self, path: str, nodes: int, first: str) -> str:
        """Why a script may not be sent to a checkpoint; empty when it may. Blocks: for a thread.

        `nodes`: how many the attempt has, and the `first` of them. Where there are several, all must say the same: that
        the job wrote it is enough then.
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
        """Ranks that have just written much, and each in its turn: one may hold hundreds of descriptors."""
        writers = self._who_wrote(writing)
        self._turn += 1
        turn = list(writing)[self._turn % len(writing) :][:1] if writing else []
        return writers | set(turn)

    def _who_wrote(self, writing: Mapping[int, int]) -> set[int]:
        """Much, since the last look."""
        before = self._written
        return {pid for pid, written in writing.items() if written - before.get(pid, 0) > WROTE_BYTES}


def _fulfil(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def can_be_told(path: str) -> bool:
    """Names that are no UTF-8 cannot travel as JSON: such a file is left alone."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
