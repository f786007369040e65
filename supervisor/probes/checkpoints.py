"""Which checkpoints exist, looked up in a worker thread: a hanging file system must never stop the agent."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from recovery.actions import Checkpoint
from recovery.formats import CheckpointScanner
from recovery.formats.places import FOLLOWED, Written, file_written, may_be_checkpoint
from recovery.safekeeping import keep_copy
from supervisor.probes.procfs import files_open_for_writing

SCAN_EVERY_S = 1.0
"""When ranks have ended there is a look of its own besides (`scan_now`)."""
AT_START_EVERY_S, START_S = 0.5, 30.0
IDLE_EVERY_S, LIVELY_S = 3.0, 60.0
"""Idle: it is known where checkpoints come, and none has for so long."""
REST_EVERY_S = 9.0
"""Idle, and no rank has written much since the last look."""
_FOLDER_OPTIONS = ("checkpoint", "ckpt", "out_dir", "output_dir", "save_dir", "dump_folder")
_FOLDER_NAMES = ("save", "out", "output", "logdir", "log_dir")
LOOK_SHARE, COSTLY_EVERY_S = 0.02, 10.0
"""Of one CPU at most: of a folder with tens of thousands of files a look costs half a second."""
FILE_TIME_S = 0.02
"""A file's time is that of the kernel's last tick, which may be so long ago."""
WALK_EVERY_S = 1.0
WALK_SHARE = 0.0005
"""Of one CPU at most, when a rank may just have saved: a big folder is walked less often."""
CALM_WALK_SHARE = 0.00005
"""Likewise once ranks run for a minute and none has written much since the last walk. What was saved all the same is
found when ranks end, at the latest."""
WALK_ENTRIES = 3000
WALK_DEPTH = 5
WROTE_BYTES = 64 * 1024
"""A rank that wrote so much since the last look may be writing a checkpoint."""

log = logging.getLogger("unbroken.agent")


class CheckpointProbe:
    """Looks every second or so on a thread of its own; `scan()`, called often, takes up what it found.

    The thread keeps its own time: to wake one costs more than a look (up to 1.5 ms on a virtual machine).
    """

    def __init__(self, folders: Sequence[str], cwd: str, argv: Sequence[str]) -> None:
        self._given = [Path(folder) if folder.startswith("/") else Path(cwd) / folder for folder in folders]
        self._cwd = Path(cwd)
        self._named = () if self._given else tuple(folders_in_arguments(argv, self._cwd))
        self._places = Written()
        """By this node's ranks."""
        self._told: tuple[Path, ...] = ()
        """Where other nodes' ranks write, and this one's before this agent."""
        self._scanner = CheckpointScanner()
        self._walked_at, self._walk_s = float("-inf"), 0.0
        """When the working folder was walked last, and the CPU time that it took."""
        self._may_have_saved = False
        """A rank has written much since that walk."""
        self._seen_open = False
        """Ranks' own open files tell better than a look at what is new, which may be another job's."""
        self._started = time.time() - FILE_TIME_S
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
        """Folders that this node's ranks were seen to write to; empty where the user has named them."""
        self.changes = 0
        """Grows with every change of `checkpoints` or `learned`."""
        self.problem = ""

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where checkpoints are looked for."""
        return tuple(dict.fromkeys((*self._given, *self._named, *self._told, *self.learned)))

    def follow(self, folders: Sequence[str]) -> None:
        """Look into these, too: what the job knows of where its checkpoints are."""
        if not self._given:
            self._told = tuple(map(Path, folders[-2 * FOLLOWED :]))

    def scan(self, writing: Mapping[int, int]) -> None:
        """Take up what was found; `writing`: pids of the ranks that are there -> bytes written. Never blocks."""
        now = time.monotonic()
        if self._writing.keys() != writing.keys():
            self._ranks_since = now
        self._writing = writing
        self._at_rest = self._at_rest and not writing
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
        self._walked_at = float("-inf")
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
            self._copying = threading.Thread(target=_copy, args=(files,), name="copies", daemon=True)
            self._copying.start()

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
        learned = tuple(folder for folder in self._places.folders if can_be_told(str(folder)))
        exact = {*learned, *self._told}
        # Below a folder that the command names may be other runs', once it is known where in it this one writes.
        deep = [*self._given, *(named for named in self._named if not any(named in one.parents for one in exact))]
        found = self._scanner.scan(deep, time.time(), flat={*exact, *self._named}, at_rest=self._at_rest)
        return tuple(checkpoint for checkpoint in found if can_be_told(checkpoint.path)), learned

    def _learn(self, writing: Mapping[int, int]) -> None:
        """Where this run writes, from the files its ranks have open; else from what is new below the working folder."""
        writers, wrote = self._writers(writing)
        opened = [
            file
            for pid in writers
            for name in files_open_for_writing(pid, wanted=_by_its_name)
            if (file := file_written(name, self._cwd)) is not None
        ]
        self._seen_open = self._seen_open or bool(opened)
        self._may_have_saved = self._may_have_saved or wrote
        if not self._seen_open and not self._told and self._is_walk_due(time.monotonic()):
            began_s = time.thread_time()
            self._may_have_saved = False
            opened += map(Path, recent_files(self._cwd, self._started))
            self._walk_s = time.thread_time() - began_s
            self._walked_at = time.monotonic()
        if opened:
            self._places.note(opened)

    def _is_walk_due(self, now: float) -> bool:
        lively = self._may_have_saved or now - self._ranks_since < LIVELY_S
        share = WALK_SHARE if lively else CALM_WALK_SHARE
        return now >= self._walked_at + max(WALK_EVERY_S, self._walk_s / share)

    def _writers(self, writing: Mapping[int, int]) -> tuple[set[int], bool]:
        """Ranks that have just written much, and each in its turn: one may hold hundreds of descriptors. And whether
        any has written much.
        """
        writers = self._who_wrote(writing)
        self._turn += 1
        turn = list(writing)[self._turn % len(writing) :][:1] if writing else []
        return writers | set(turn), bool(writers)

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


def _by_its_name(path: str) -> bool:
    return may_be_checkpoint(os.path.basename(path))


def _copy(files: list[Path]) -> None:
    for file in files:
        keep_copy(file)


def recent_files(folder: Path, since: float) -> list[str]:
    """Files below `folder` written after `since` (Unix time) whose names may be a checkpoint's; a bounded look, five
    levels deep."""
    found: list[str] = []
    left = WALK_ENTRIES
    level = [str(folder)]
    for _ in range(WALK_DEPTH):
        below: list[str] = []
        for parent in level:
            try:
                with os.scandir(parent) as entries:
                    listing = list(itertools.islice(entries, left))
            except OSError:
                continue
            left -= len(listing)
            for entry in listing:
                if entry.name.startswith(".") or entry.name == "unbroken-jobs" or entry.is_symlink():
                    continue
                if entry.is_dir():
                    below.append(entry.path)
                elif may_be_checkpoint(entry.name) and _written_since(entry.path, since):
                    found.append(entry.path)
        level = below
    return found


def _written_since(path: str, since: float) -> bool:
    try:
        return os.stat(path).st_mtime >= since
    except OSError:  # it went
        return False


def folders_in_arguments(argv: Sequence[str], cwd: Path) -> list[Path]:
    """Folders that the command names for its checkpoints (`--save DIR`, `--out_dir=DIR`), there or not yet."""
    found: list[Path] = []
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        name, _, value = word.lstrip("-").partition("=")
        name = name.lower().replace("-", "_")
        looks_right = name in _FOLDER_NAMES or any(part in name for part in _FOLDER_OPTIONS)
        if looks_right and (value or word.startswith("-")):
            value = value or following
            if value and not value.startswith("-") and not value.isdigit():
                found.append(cwd / value)
    return found[:FOLLOWED]
