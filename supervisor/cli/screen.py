"""A live picture on a terminal, and single keys from its keyboard.

Only lines that have changed are written, and the next picture only when the terminal has said that it shows the last
one: a slow line gets fewer pictures, and never old ones. A key counts only if it was pressed by itself: not what was
pasted, not one that is held down, not what was typed before the picture was there.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Final

ALONE_S: Final = 0.15
"""A key with another one so close to it was not pressed by hand."""
HELD_S: Final = 0.7
"""The same key again within this time is being held down: longer than a keyboard waits before it repeats one."""
ANSWER_S: Final = 2.0
"""A terminal that says nothing for so long after a picture gets the next one all the same."""
_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[?2004h"
"""Another screen, no cursor, no wrapping, pasted text is marked."""
_LEAVE: Final = "\x1b[?2004l\x1b[?7h\x1b[?25h\x1b[?1049l"
_WHERE: Final = "\x1b[6n"
"""Asks where the cursor is: the answer comes after everything before it is shown."""
_HERE: Final = re.compile(rb"\x1b\[\d+;\d+R")
_PASTED: Final = (b"\x1b[200~", b"\x1b[201~")
_SEQUENCE: Final = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|[^\[O])")
_BEGUN: Final = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|O)?\Z")
ESCAPE: Final = "\x1b"


class KeyReader:
    """Which keys were pressed by hand. Decides by what came when, and reads nothing."""

    def __init__(self) -> None:
        self.answers = 0
        """How often the terminal has said where its cursor is."""
        self._rest = b""
        self._pasting = False
        self._last = ("", float("-inf"))
        self._candidate = ("", 0.0)

    def feed(self, data: bytes, now: float) -> None:
        data = self._rest + data
        begun = _BEGUN.search(data)
        self._rest = begun[0] if begun is not None else b""
        data = data[: len(data) - len(self._rest)]
        self.answers += len(_HERE.findall(data))
        data = _HERE.sub(b"", data)
        typed, pasted = self._unpasted(data)
        keys = _SEQUENCE.sub(b"", typed).decode(errors="ignore")
        if not (keys or pasted or self._rest):
            return
        key = keys if len(keys) == 1 and not pasted else ""
        before, at = self._last
        alone = now - at >= (HELD_S if key == before else ALONE_S)
        self._candidate = (key or (ESCAPE if self._rest == b"\x1b" else "") if alone else "", now)
        self._last = (keys[-1:], now)

    def due(self, now: float) -> str:
        """A key after which no other came for a while; empty: none."""
        key, at = self._candidate
        if not key or now - at < ALONE_S:
            return ""
        self._candidate, self._rest = ("", 0.0), b""
        return key

    def _unpasted(self, data: bytes) -> tuple[bytes, bool]:
        """What was not pasted, and whether anything was."""
        typed, touched = b"", self._pasting
        while data:
            mark = _PASTED[self._pasting]
            part, found, data = data.partition(mark)
            if not self._pasting:
                typed += part
            if found:
                self._pasting, touched = not self._pasting, True
        return typed, touched


class Screen:
    """This process's terminal: stdout, and stdin where that is the same user's keyboard."""

    def __init__(self) -> None:
        self.keys = KeyReader()
        self._out = sys.stdout.fileno()
        self.has_keyboard = sys.stdin is not None and sys.stdin.isatty() and _in_foreground(sys.stdin.fileno())
        self._in = sys.stdin.fileno() if self.has_keyboard else -1
        self._before: list[Any] = []
        self._shown: list[str] = []
        self._size = (0, 0)
        self._asked_at = 0.0
        self._unanswered = 0

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """The terminal is ours, and is given back whatever happens."""
        handlers = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
        handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        self._enter()
        try:
            yield
        finally:
            self._leave()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        columns, lines = os.get_terminal_size(self._out)
        return (columns or 80), (lines or 24)

    @property
    def is_ready(self) -> bool:
        """It shows the last picture, so there may be a next one."""
        if not self.has_keyboard or self._unanswered > 1 or self.keys.answers:
            self.keys.answers = 0
            self._asked_at = 0.0
        elif self._asked_at and time.monotonic() - self._asked_at > ANSWER_S:
            self._asked_at, self._unanswered = 0.0, self._unanswered + 1
        return not self._asked_at and bool(select.select([], [self._out], [], 0.0)[1])

    def draw(self, lines: Sequence[str]) -> None:
        """Raises OSError."""
        size = self.size()
        lines = list(lines)[: size[1]]
        if size != self._size:
            self._shown, self._size = [], size
        if lines == self._shown:
            return
        parts = [] if self._shown else ["\x1b[2J"]
        for number, line in enumerate(lines):
            if number >= len(self._shown) or self._shown[number] != line:
                parts.append(f"\x1b[{number + 1};1H\x1b[K{line}\x1b[0m")
        if len(lines) < len(self._shown):
            parts.append(f"\x1b[{len(lines) + 1};1H\x1b[J")
        if self.has_keyboard and self._unanswered < 2:
            parts.append(_WHERE)
            self._asked_at = time.monotonic()
        self._write("".join(parts))
        self._shown = lines

    def wait(self, seconds: float) -> str:
        """A key that was pressed by itself, within this time; else nothing."""
        if not self.has_keyboard:
            time.sleep(seconds)
            return ""
        if select.select([self._in], [], [], seconds)[0]:
            data = os.read(self._in, 4096)
            if not data:
                raise KeyboardInterrupt  # the terminal is gone
            self.keys.feed(data, time.monotonic())
        return self.keys.due(time.monotonic())

    def forget_keys(self) -> None:
        """What was typed until now is no answer to what is asked next."""
        if self.has_keyboard:
            termios.tcflush(self._in, termios.TCIFLUSH)
            self.keys = KeyReader()
            self.keys.feed(b"\0", time.monotonic())
            self._asked_at = 0.0  # its answer may be gone, too

    def _enter(self) -> None:
        if self.has_keyboard:
            self._before = termios.tcgetattr(self._in)
            tty.setcbreak(self._in, termios.TCSAFLUSH)
        self._shown, self._asked_at = [], 0.0
        self._write(_ENTER)

    def _leave(self) -> None:
        if self._asked_at and not self._unanswered:  # its answer must not become a command of the shell
            until = self._asked_at + ANSWER_S
            with contextlib.suppress(OSError, KeyboardInterrupt):
                while not self.keys.answers and time.monotonic() < until:
                    self.wait(0.05)
        with contextlib.suppress(OSError):
            self._write(_LEAVE)
        if self._before:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._in, termios.TCSAFLUSH, self._before)

    def _suspend(self, *_: object) -> None:
        """Ctrl-Z: the shell gets a terminal that is as it was."""
        self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        if self.has_keyboard and not _in_foreground(self._in):  # `bg`
            raise KeyboardInterrupt
        self._enter()

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(self._out, data) :]


def _in_foreground(descriptor: int) -> bool:
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
