"""Files for `unbroken diagnose`: finding and unpacking them, their kind by their first bytes, blocks of lines."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import io
import lzma
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple, cast

import zstandard

from diagnosis import stacks
from diagnosis.signals import clean_line
from supervisor.files import open_regular

BLOCK: Final = 1 << 20
HEAD: Final = 64 * 1024
MAX_LINE: Final = 64 * 1024
"""A line is cut after this many bytes."""
MAX_FILES: Final = 20_000
STDIN: Final = "-"
_OPEN_ALREADY: Final = ("/dev/fd", "/proc/self/fd")
"""`diagnose <(dmesg)` names a pipe here."""

_NO_LOGS: Final = tuple(
    ".pt .pth .bin .safetensors .so .pyc .zip .distcp .npy .npz .png .beacon .sock .whl .tar .parquet .arrow".split()
)
_OF_OURS: Final = frozenset(
    "token rules-begun.json pending_rules.toml corrections.jsonl controller.json node.json front.json agent.json "
    "health.json streams.json outcome.json launcher.exit notices.log agent.log keeper.log controller.log python".split()
)
"""Files of our own folders that no rank wrote."""
_ATTEMPT: Final = re.compile(r"^(.*/attempts?[_/])(\d{1,6})(?=/)")
_MARKS: Final = {
    codecs.BOM_UTF32_LE: "utf-32-le",  # begins as that of UTF-16 does
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_MOSTLY: Final = 0.6
"""Of UTF-16 without a mark every second byte is zero in so many of the characters, and no other one."""

Content = Literal["text", "flight", "stacks", "evidence", "error", "exit", "journal", "binary"]


class Source(NamedTuple):
    """One file to read."""

    path: str
    size: int = 0
    """Bytes on disk; 0 if not known (a pipe)."""
    modified: float = 0.0

    @property
    def name(self) -> str:
        return "stdin" if self.path == STDIN else clean_line(self.path, 1000)


class FoundFiles(NamedTuple):
    """The files of the paths that were named."""

    sources: list[Source]
    left_out: int = 0
    """Files over the number that is read."""


def find(paths: Iterable[str]) -> FoundFiles:
    """The files of these paths. Folders are walked; files in them that are no logs by their names are left out.

    Of several attempts in one folder only the newest with output is read. Raises OSError for a named path.
    """
    found: list[Source] = []
    left_out = 0
    for path in paths:
        if path == STDIN:
            found.append(Source(STDIN))
        elif os.path.isdir(path):
            inside = _newest_attempts(sorted(_walk(path)))
            room = max(MAX_FILES - len(found), 0)
            found += inside[:room]
            left_out += len(inside[room:])
        else:
            about = os.stat(path)
            os.close(_descriptor(path))
            found.append(Source(path, about.st_size, about.st_mtime))
    return FoundFiles(found, left_out)


def _descriptor(path: str) -> int:
    """Of a regular file, or of what the caller's shell opened for us. Raises OSError.

    A pipe or a device in a folder of logs would block: it is not opened.
    """
    folder, name = os.path.split(os.path.abspath(path))
    if name.isdigit() and folder in _OPEN_ALREADY and not stat.S_ISREG(os.stat(path).st_mode):
        return os.dup(int(name))
    return os.dup(0) if path == "/dev/stdin" else open_regular(path)


def _walk(root: str) -> Iterator[Source]:
    for folder, folders, names in os.walk(root):
        ours = "node.json" in names or any(name.startswith("journal.") for name in names)
        if ours:
            folders[:] = [name for name in folders if name not in ("probes", "epochs")]
        for name in names:
            path = os.path.join(folder, name)
            left_out = name.endswith(_NO_LOGS) or (ours and name in _OF_OURS) or name in ("streams.json", "rules.toml")
            # The files of the attempts have all that the journal has.
            if left_out or (name.startswith("journal.") and "attempts" in folders):
                continue
            with contextlib.suppress(OSError):  # it may be gone by now, or point at itself
                about = os.stat(path)
                if stat.S_ISREG(about.st_mode):
                    yield Source(path, about.st_size, about.st_mtime)


def _newest_attempts(sources: list[Source]) -> list[Source]:
    newest: dict[str, int] = {}
    for source in sources:
        match = _ATTEMPT.match(source.path)
        if match is not None and source.size:
            newest[match[1]] = max(newest.get(match[1], 0), int(match[2]))
    return [
        source
        for source in sources
        if (match := _ATTEMPT.match(source.path)) is None or newest.get(match[1], int(match[2])) == int(match[2])
    ]


def attempts(paths: Iterable[str]) -> list[tuple[int, list[Source]]]:
    """The attempts with output in these folders, the newest first, with their files."""
    found: dict[int, list[Source]] = {}
    for path in filter(os.path.isdir, paths):
        for source in sorted(_walk(path)):
            match = _ATTEMPT.match(source.path)
            if match is not None and source.size:
                found.setdefault(int(match[2]), []).append(source)
    return sorted(((number, files[:MAX_FILES]) for number, files in found.items()), reverse=True)


def open_source(source: Source) -> IO[bytes]:
    """Open a file, unpacked if it is packed: gzip, zstd, xz, bzip2 by its first bytes. Raises OSError."""
    # It may be a pipe, so it is opened once; the caller closes what it gets, which closes the file.
    raw: Any = sys.stdin.buffer if source.path == STDIN else open(_descriptor(source.path), "rb", buffering=HEAD)  # noqa: SIM115
    if not hasattr(raw, "peek"):
        raw = io.BufferedReader(raw)
    return unpacked(raw)


def read_up_to(stream: IO[bytes], size: int) -> bytes:
    """This many bytes; fewer at the end, or if the file cannot be read any further."""
    parts: list[bytes] = []
    left = size
    while left > 0:
        try:
            data = stream.read1(min(left, BLOCK))  # type: ignore[attr-defined]
        except OSError:
            break
        if not data:
            break
        parts.append(data)
        left -= len(data)
    return b"".join(parts)


def content(head: bytes, path: str) -> Content:
    """What a file is, by its first bytes first and its name second."""
    text = head.lstrip()[:1]
    name = Path(path).name
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "flight"
    if text in (b"{", b"["):
        first = head.lstrip().split(b"\n", 1)[0]
        if b'"pg_config"' in head or b'"collective_seq_id"' in head or b'"pg_status"' in head:
            return "flight"
        if stacks.is_dump(head):
            return "stacks"
        if b'"kind":"opened"' in first.replace(b" ", b"") or name.startswith("journal."):
            return "journal"
        if name.startswith("evidence-") and b'"node"' in head:
            return "evidence"
        if name.endswith(".exit") and b'"status"' in head:
            return "exit"
        if b'"message"' in head[:200] and (b'"extraInfo"' in head or name.endswith("error.json")):
            return "error"
        return "text"
    if coding_of(head) is None and head[:4096].count(0) > len(head[:4096]) // 10:
        return "binary"
    return "stacks" if stacks.is_dump(head) and _is_mostly_stacks(head) else "text"


def coding_of(head: bytes) -> str | None:
    """UTF-16 or UTF-32, by a mark or by where the zeros are; None: something else."""
    for mark, coding in _MARKS.items():
        if head.startswith(mark):
            return coding
    first = head[:4096]
    even, odd = first[::2].count(0), first[1::2].count(0)
    if even + odd < _MOSTLY * len(first) / 2 or min(even, odd) > 0:
        return None
    return "utf-16-le" if odd else "utf-16-be"


_OF_STACK: Final = re.compile(
    rb"^\s*(?:Thread \d|Process \d|#\d+ |.{1,200} \(.{1,200}:\d+\)$|File \"|Python v|\[Inferior|    |$|===|---)"
)


def _is_mostly_stacks(head: bytes) -> bool:
    """A log that quotes stacks is a log. What Python writes before it dies is no picture of a process that runs."""
    if b"Fatal Python error: " in head:
        return False
    lines = [line for line in head.split(b"\n")[:400] if line.strip()]
    return sum(_OF_STACK.match(line[:500]) is not None for line in lines) >= 0.8 * max(len(lines), 1)


def blocks(stream: IO[bytes], head: bytes = b"", size: int = BLOCK) -> Iterator[bytes]:
    """Whole lines in blocks of about `size` bytes, each without its last newline; `head` comes first.

    CR ends a line where no LF does. (A progress bar writes CRs, and an LF now and then: it stays one line.)
    """
    rest = b""
    for data in _readable(stream, head, size):
        end = data.rfind(b"\n")
        if end >= 0:
            yield b"".join((rest, memoryview(data)[:end]))  # copied once
            rest = data[end + 1 :]
        else:
            rest = (rest + data)[:MAX_LINE]
    if rest:
        yield rest


def _readable(stream: IO[bytes], head: bytes, size: int) -> Iterator[bytes]:
    """The content of the stream; UTF-16 and UTF-32 as UTF-8."""
    data = head + read_up_to(stream, size - len(head))
    coding = coding_of(data)
    decoder = codecs.getincrementaldecoder(coding)("replace") if coding is not None else None
    only_cr: bool | None = None
    while data:
        if decoder is not None:
            data = decoder.decode(data).replace("\ufeff", "").encode(errors="replace")
        if only_cr is None:
            only_cr = b"\r" in data and b"\n" not in data
        yield data.replace(b"\r", b"\n") if only_cr else data
        data = read_up_to(stream, size)


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
