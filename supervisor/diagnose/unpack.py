"""Packed files (gzip, zstd, xz, bzip2), read as far as possible: first all bytes before a damage, then the damage.

A log that is packed while it is written, or cut off in transfer, ends in the middle; its last lines matter most.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import IO, Any, Final, cast

import zstandard

PIECE: Final = 64 * 1024
"""Bytes that are unpacked at once: at most this many are lost before a damage."""
ZSTD_WINDOW: Final = 1 << 27
ZSTD_FED: Final = 2048
"""Bytes that make 64 MiB at most (4 bytes of a block that repeats one byte stand for 128 KiB)."""
_DAMAGES: Final = (OSError, EOFError, ValueError, RuntimeError, lzma.LZMAError, zlib.error, zstandard.ZstdError)
MAGIC_BYTES: Final = 6


class Unpacked(io.RawIOBase):
    """Reads up to the damage; `damage` then says what it is."""

    def __init__(self, read: Callable[[int], bytes], close: Callable[[], None]) -> None:
        super().__init__()
        self.damage = ""
        self._read, self._close = read, close

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """As of any raw stream; never raises for what is in the file."""
        if self.damage:
            return 0
        try:
            data = self._read(min(len(buffer), PIECE))
        except _DAMAGES:
            self.damage = "damaged or cut off; it was read as far as it goes"
            return 0
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Closes the file as well."""
        self._close()
        super().close()


class _Members:
    """The members of a packed file, one after the other."""

    def __init__(self, raw: Any, magic: bytes, make: Callable[[], Any]) -> None:
        self._raw, self._magic, self._make = raw, magic, make
        self._machine = make()
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Raises what the machine does where it is damaged, EOFError where it is cut off or something else follows."""
        is_over = False
        while True:
            if self._machine.eof and not self._next():
                return b""
            if not self._rest and getattr(self._machine, "needs_input", True):
                self._rest = self._raw.read1(PIECE)
                is_over = not self._rest
            data: bytes = self._machine.decompress(self._rest, size)
            self._rest = getattr(self._machine, "unconsumed_tail", b"")
            if data:
                return data
            if is_over and not self._machine.eof:
                raise EOFError

    def _next(self) -> bool:
        """Begin the next member; False at the end."""
        rest = self._machine.unused_data.lstrip(b"\0")
        while len(rest) < len(self._magic) and (more := self._raw.read1(PIECE)):
            rest = (rest + more).lstrip(b"\0")  # tapes and file systems fill up with zeros
        if not rest:
            return False
        if not rest.startswith(self._magic):
            raise EOFError
        self._machine, self._rest = self._make(), rest
        return True


class _Zstd:
    """As the machines of the standard library. zstd's own knows no limit of what it gives, so it is fed little."""

    def __init__(self) -> None:
        self._machine = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj()
        self._ready = memoryview(b"")
        self.unconsumed_tail = b""

    @property
    def needs_input(self) -> bool:
        return not self._ready

    @property
    def eof(self) -> bool:
        return self._machine.eof and not self._ready

    @property
    def unused_data(self) -> bytes:
        return self._machine.unused_data + self.unconsumed_tail

    def decompress(self, data: bytes, size: int) -> bytes:
        self.unconsumed_tail = data
        if not self._ready and data:
            self._ready = memoryview(self._machine.decompress(data[:ZSTD_FED]))
            self.unconsumed_tail = data[ZSTD_FED:]
        given, self._ready = bytes(self._ready[:size]), self._ready[size:]
        return given


_MEMBERS: Final[dict[bytes, Callable[[], Any]]] = {
    b"\x1f\x8b": lambda: zlib.decompressobj(31),
    b"\x28\xb5\x2f\xfd": _Zstd,
    b"\xfd7zXZ\x00": lzma.LZMADecompressor,
    b"BZh": bz2.BZ2Decompressor,
}


def unpacked(raw: Any) -> IO[bytes]:
    """The file `raw` (buffered), unpacked if its first bytes say that it is packed. Closing it closes `raw`."""
    head = raw.peek(MAGIC_BYTES)[:MAGIC_BYTES]
    for magic, make in _MEMBERS.items():
        if head.startswith(magic):
            return io.BufferedReader(Unpacked(_Members(raw, magic, make).read, raw.close), PIECE)
    return cast("IO[bytes]", raw)


def damage(stream: IO[bytes]) -> str:
    """What is wrong with a packed file, as far as it was read; empty: nothing."""
    found = getattr(getattr(stream, "raw", None), "damage", "")
    return found if isinstance(found, str) else ""
