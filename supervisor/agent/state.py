"""What an agent must remember over its own death: a small file, replaced atomically, written only when it changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from supervisor.paths import write_atomically


class Notebook(msgspec.Struct, kw_only=True):
    """`agent.json`. Numbers that a new agent must not start again; nothing that the keeper knows better."""

    epoch: int = 0
    """Newest epoch that was accepted: an older controller is not obeyed."""
    joined: int = 0
    """Newest attempt that a launcher was let into."""
    prepared: int = 0
    collected: int = 0
    woken: int = 0
    notice: int = 0
    crash_attempt: int = 0
    """Newest attempt whose crash evidence was collected."""
    findings_from: int = 0
    """How many findings the controller has acknowledged."""
    stop_request: str = ""
    drain_request: str = ""
    """The reason in the request that was left: one that root's programs have read is not left again."""
    offsets: dict[str, int] = {}
    """Path of a rank's output -> how far it was read."""


OFFSETS_EVERY_S = 6.0
"""Output moves all the time; the next agent may read so much of it twice."""


class NotebookFile:
    """Reads the notebook of the agent before at the start; `write()` keeps what changed since."""

    def __init__(self, path: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._now = monotonic
        self._written: Notebook | None = None
        self._written_at = -OFFSETS_EVERY_S
        try:
            self.book = msgspec.json.decode(path.read_bytes(), type=Notebook)
        except (OSError, msgspec.DecodeError):
            self.book = Notebook()

    def write(self) -> None:
        """A full disk is no reason to end: the next try comes in half a second."""
        book, now = self.book, self._now()
        same = self._written is not None and msgspec.structs.replace(self._written, offsets=book.offsets) == book
        if same and (now - self._written_at < OFFSETS_EVERY_S or self._written == book):
            return
        try:
            write_atomically(self._path, msgspec.json.encode(book))
        except OSError:
            return
        self._written, self._written_at = msgspec.structs.replace(book), now
