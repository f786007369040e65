"""Following what a rank writes: steps, findings, the end of it as evidence. Files are read, never held in memory."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from diagnosis.signals import Frozen

CHUNK_BYTES = 256 * 1024
BACKLOG_BYTES = 64 * 1024 * 1024


class Stream(Frozen, frozen=True, kw_only=True):
    """One line of `streams.json`: where a rank's stdout or stderr goes."""

    rank: int
    local_rank: int
    stream: str
    path: str
    terminal: bool = False
    error_file: str = ""


def read_streams(path: Path) -> tuple[Stream, ...]:
    """The streams of an attempt; none when the file is not there yet or cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[Stream, ...])
    except (OSError, msgspec.DecodeError):
        return ()


class OutputTail:
    """Reads a growing file in bounded pieces from `offset` on. A file that shrinks is read from its start."""

    def __init__(self, path: str, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.skipped_bytes = 0
        self.written_at = 0.0
        """Unix time of the newest write, as the file system has it."""
        self._descriptor: int | None = None

    def read(self) -> bytes:
        """The next piece, at most 256 KiB; empty when nothing new is there."""
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            found = os.fstat(self._descriptor)
            size, self.written_at = found.st_size, found.st_mtime
            if size < self.offset:
                self.offset = 0
            if size - self.offset > BACKLOG_BYTES:
                self.skipped_bytes += size - CHUNK_BYTES - self.offset
                self.offset = size - CHUNK_BYTES
            if size == self.offset:
                return b""
            data = os.pread(self._descriptor, min(CHUNK_BYTES, size - self.offset), self.offset)
        except OSError:  # not there yet, or its file system is in trouble: later
            return b""
        self.offset += len(data)
        return data

    def skip_to_the_end(self) -> None:
        """So that the next read gives the last piece of what is there now."""
        if self._descriptor is not None:
            end = os.fstat(self._descriptor).st_size
            self.skipped_bytes += max(0, end - CHUNK_BYTES - self.offset)
            self.offset = max(self.offset, end - CHUNK_BYTES)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def last_bytes(path: str, limit: int = 32 * 1024) -> bytes:
    """The end of a file, at most `limit` bytes; empty when it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, limit, max(0, size - limit))
    except OSError:
        return b""
    finally:
        os.close(descriptor)
