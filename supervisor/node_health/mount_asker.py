"""The storage probe's side of its child process: questions to file systems, and how long they have been open.

One child for all mounts, one open question for each: a mount that does not answer is never asked again before it has.
The child stays while a question is open (it may not be killable) and still asks the others; with none it is let go, so
that between looks nothing of it is left.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, Literal, NamedTuple

CHILD: Final = Path(__file__).with_name("mount_child.py")
QUESTIONS: Final = 64
LINE_LIMIT: Final = 16 * 1024

Kind = Literal["stat", "real", "write"]


class Space(NamedTuple):
    """What statvfs says, and what the path is without its links."""

    size_bytes: int
    free_bytes: int
    files: int
    files_available: int
    real_path: str


class Answer(NamedTuple):
    error: int = 0
    """errno, 0 when it went well."""
    space: Space | None = None
    lost: bool = False
    """The child ended before it could tell."""


class Question(NamedTuple):
    key: str
    path: str
    since: float
    """Monotonic."""
    pid: int
    tid: int = 0
    """Thread that waits; 0: it was not begun yet."""


class Asker:
    def __init__(self, child: Path = CHILD) -> None:
        self.open: dict[str, Question] = {}
        """Key -> the question that was not answered yet."""
        self.answers: dict[str, Answer] = {}
        """Those since the last `clear`."""
        self.problem = ""
        """Why nothing can be asked."""
        self._path = child
        self._child: subprocess.Popen[bytes] | None = None
        self._numbers: dict[str, str] = {}
        self._count = 0
        self._rest = b""

    def ask(self, key: str, kind: Kind, path: str) -> None:
        """Ask unless a question of this key is open."""
        if key in self.open or len(self.open) >= QUESTIONS or not self._start():
            return
        assert self._child is not None
        assert self._child.stdin is not None
        self._count += 1
        number = str(self._count)
        try:
            self._child.stdin.write(f"{number} {kind} {os.fsencode(path).hex()}\n".encode())
            self._child.stdin.flush()
        except OSError:
            self._ended()
            return
        self._numbers[number] = key
        self.open[key] = Question(key, path, time.monotonic(), self._child.pid)

    def collect(self, patience_s: float) -> None:
        """Take answers until those to the questions that are still young are all there, or they are young no more."""
        while self._child is not None:
            now = time.monotonic()
            waits = [patience_s - (now - question.since) for question in self.open.values()]
            wait_s = max((left for left in waits if left > 0), default=0.0)
            if not self._read(wait_s) and wait_s <= 0:
                break
            if not self.open:
                break
        if not self.open:
            self._drop()

    def clear(self) -> None:
        self.answers.clear()

    def _start(self) -> bool:
        if self._child is not None:
            return True
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", str(self._path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
            )
        except OSError as error:
            self.problem = f"no process can be started to ask file systems: {error.strerror}"
            return False
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)
        self.problem, self._rest = "", b""
        return True

    def _read(self, wait_s: float) -> bool:
        """Take what the child says within `wait_s`; whether it said anything."""
        assert self._child is not None
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(max(0.0, wait_s) * 1000):
            return False
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._ended()
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:LINE_LIMIT]
        for line in lines:
            self._take(line.decode(errors="replace").split(" "))
        return True

    def _take(self, words: list[str]) -> None:
        number, what, *more = words
        key = self._numbers.get(number)
        question = self.open.get(key) if key is not None else None
        if key is None or question is None:
            return
        if what == "began":
            self.open[key] = question._replace(tid=int(more[0]))
            return
        del self._numbers[number], self.open[key]
        if what == "error":
            self.answers[key] = Answer(error=int(more[0]))
        elif len(more) == 5:
            size, free, files, files_available = map(int, more[:4])
            real_path = os.fsdecode(bytes.fromhex(more[4]))
            self.answers[key] = Answer(space=Space(size, free, files, files_available, real_path))
        else:
            self.answers[key] = Answer()

    def _ended(self) -> None:
        """The child is gone, and with it what it was asked."""
        for key in self.open:
            self.answers[key] = Answer(lost=True)
        self.open.clear()
        self._drop()

    def _drop(self) -> None:
        """Close its standard input, which ends it."""
        child, self._child = self._child, None
        self._numbers.clear()
        if child is None:
            return
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # what was not written yet cannot be any more
                pass
        try:
            child.wait(1.0)
        except subprocess.TimeoutExpired:
            pass  # subprocess itself looks after it when the next one is started
