"""What an agent must remember over its own death: a small file, replaced atomically, written only when it changed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from supervisor.node import write_atomically


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
    offsets: dict[str, int] = {}
    """Path of a rank's output -> how far it was read."""


class NotebookFile:
    """Reads the notebook of the agent before at the start; `write()` keeps what changed since."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = b""
        try:
            self.book = msgspec.json.decode(path.read_bytes(), type=Notebook)
        except (OSError, msgspec.DecodeError):
            self.book = Notebook()

    def write(self) -> None:
        """A full disk is no reason to end: the next try comes in half a second."""
        data = msgspec.json.encode(self.book)
        if data == self._written:
            return
        try:
            write_atomically(self._path, data)
            self._written = data
        except OSError:
            pass
