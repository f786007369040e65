"""Stacks as tools write them: py-spy (text and JSON, native too), faulthandler, gdb, pstack, eu-stack, lldb, pystack.

One file may hold one process or those of a whole node, one sample or several. Of each process the main thread is
kept; where that only waits for autograd's own thread, the frames of this thread stand before its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from diagnosis.signals import RankStack, clean_text
from diagnosis.stacks.frames import MAX_FRAMES as MAX_FRAMES
from diagnosis.stacks.frames import NATIVE, RAW_FRAMES, Thread, frame_of, kept

MAX_BYTES: Final = 64 << 20
MAX_THREADS: Final = 50_000
MAX_LINE: Final = 4000

_HEAD: Final = re.compile(
    rb'"thread_name"|^(?:\S+ )?Process \d+: |most recent call first\)|^Traceback for thread \d'
    rb"|^Thread (?:0x[0-9A-Fa-f]+|\d+)(?:/0x[0-9A-Fa-f]+)? \((?:idle|active)[ +\w]*\)"
    rb"|^#\d{1,3} +0x[0-9a-f]{6,}|^#0 +\S+ \(|^TID \d+:|^ *\* thread #\d+",
    re.MULTILINE,
)
_HEAD_WORDS: Final = (
    b'"thread_name"',
    b" (idle",
    b" (active",
    b"Process ",
    b"call first)",
    b"for thread ",
    b"\n#",
    b"TID ",
    b" thread #",
)
_PREFIX: Final = re.compile(
    r"\[(?:rank|default|trainer)(\d{1,6})\]:|\[\d{1,6},(\d{1,6})\]<std\w{3}>:| {0,4}(\d{1,6}):(?= \D)"
)
_PROCESS: Final = re.compile(
    r"(?:.{0,40}\W)?Process (\d{1,9}): |PID (\d{1,9}) - process|.*process (\d{1,9})\) detached"
)
_RANK: Final = re.compile(r"[\s=#*>\-[]{0,60}(?:[\w.-]{1,64}[\s:]{1,3})?[Rr]ank[\s_:=#]{0,3}(\d{1,6})\b(?!.*\bin\b)")
_PYSPY: Final = re.compile(r'Thread (0x[0-9A-Fa-f]+|\d+)(?:/0x[0-9A-Fa-f]+)? \((\w[\w+ ]*)\)(?:: "(.{0,100})")?')
_FAULT: Final = re.compile(r"(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.{0,40})\])? \(most recent call first\):")
_PYBT: Final = re.compile(r"Traceback \(most recent call first\):")
_PYSTACK: Final = re.compile(r"Traceback for thread (\d+)(?: \(([^)]{0,40})\))?[^(]{0,200}\(most recent call last\):")
_PYSTACK_FRAME: Final = re.compile(
    r' {0,8}\((?:Python|C)\) File "(.{0,1000})", line (\d{1,9}), in (.{1,300}?)(?: \((\S+)\))?$'
)
_GDB: Final = re.compile(r'Thread (\d+) \((?:Thread 0x[0-9a-f]+ \()?LWP (\d+)\)?(?: "(.{0,40})")?\)')
_EU: Final = re.compile(r"TID (\d+):$")
_LLDB: Final = re.compile(r"[* ]{0,4}thread #(\d+)(?:, name = '(.{0,40})')?")
_FILE: Final = re.compile(r' {0,4}File "(.{0,1000})", line (\d+|\?\?\?),? in (.{1,300})')
_NUMBERED: Final = re.compile(r"#\d{1,4} +(?:0x[0-9a-f]+ (?:in |- \d )?)?(.+)")
_LLDB_FRAME: Final = re.compile(r" {0,8}\*? {0,4}frame #\d{1,4}: 0x[0-9a-f]+ ([^`]{1,200})`(.+)")
_MORE: Final = re.compile(r" {1,8}(?:at|from) (\S+)")
_PYTHON_IN_GDB: Final = re.compile(r"for file (\S{1,500}), line (\d{1,9}), in (\w{1,200})")
_HELPER: Final = re.compile(
    r"torch/utils/data/_utils/worker\.py|multiprocessing/(?:resource_tracker|forkserver)\.py|compile_worker/|"
    r"torch/distributed/elastic/|torch/distributed/(?:run|launch)\.py"
)
_NAME_RANK: Final = re.compile(r"rank[\s_\-.=:]{0,2}(\d{1,6})(?!\d)", re.IGNORECASE)
_NAME_NUMBER: Final = re.compile(
    r"(?:stacks?|py-?spy|dump|trace(?:back)?|threads?|bt|gdb|pstack)[_\-.](\d{1,4})(?:\.[a-z]\w*)*$", re.IGNORECASE
)

_OURS: Final = re.compile(r"supervisor/training/beacon\.py$")

_NO_JSON_DUMP: Final = (
    msgspec.DecodeError,
    UnicodeError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    OverflowError,
)


class _Process:
    __slots__ = ("pid", "rank", "threads")

    def __init__(self, rank: int | None = None, pid: int | None = None) -> None:
        self.rank = rank
        self.pid = pid
        self.threads: list[Thread] = []


def is_dump(head: bytes) -> bool:
    """Whether a file that begins with `head` (some KiB) looks like stacks; a log that quotes some does too."""
    few = any(word in head for word in _HEAD_WORDS) or head.startswith(b"#")  # most files are logs: 4 ms less for each
    return few and _HEAD.search(head) is not None


def parse(
    rank: int, dump: bytes | str, *, sample: int = 0, waits: Callable[[int], bool] = lambda _: False
) -> RankStack:
    """The main thread of `py-spy dump --json` output. Text that is not such a dump becomes `error`.

    `waits`: whether a thread (its number) can only go on when another one of the process wakes it.
    """
    try:
        threads = _json_processes(msgspec.json.decode(dump))[0].threads
        frames = kept(threads, None)
    except _NO_JSON_DUMP as error:
        return RankStack(rank=rank, frames=(), sample=sample, error=f"no stack: {clean_text(str(error), 200)}")
    others = sum(1 for one in threads if _may_go_on(one, waits)) if frames else 0
    return RankStack(rank=rank, frames=frames, sample=sample, error="" if frames else "no Python frames", others=others)


def _may_go_on(thread: Thread, waits: Callable[[int], bool]) -> bool:
    """A further thread of the script that runs, or may run again without another thread's help."""
    if thread.name == "MainThread" or not thread.frames or _OURS.search(thread.frames[-1].file):
        return False
    return thread.tid is None or not waits(thread.tid)


def read_dump(data: bytes, name: str) -> list[RankStack]:
    """The stacks in a file, one for each process and sample, in the order of the file; empty when there are none.

    The rank is told by the lines' prefix, a header in the file, or the file's name. A process whose rank nobody tells
    gets minus its pid, so that it is apart from the others and never taken for a rank (`stacks.names` says "process").
    """
    data = data[:MAX_BYTES]
    rank = _rank_of(name)
    processes = list(_processes(data, rank))
    found: list[RankStack] = []
    samples: dict[int, int] = {}
    for count, process in enumerate(processes, 1):
        frames = kept(process.threads, process.pid)
        if not frames or any(_HELPER.search(frame.file) for frame in frames):
            continue
        number = process.rank
        if number is None:
            number = -(process.pid or count)
        sample = samples[number] = samples.get(number, -1) + 1
        found.append(RankStack(rank=number, frames=frames, sample=sample))
    return found


def _rank_of(name: str) -> int | None:
    parts = name.replace("\\", "/").split("/")[-3:]
    for part in reversed(parts):
        match = _NAME_RANK.search(part)
        if match is not None:
            return int(match[1])
    match = _NAME_NUMBER.search(parts[-1])
    return int(match[1]) if match is not None else None


def _processes(data: bytes, rank: int | None) -> Iterator[_Process]:
    """The processes of a file; `rank` goes to the first of them (others belong to it: loaders, helpers)."""
    told = _from_json(data)
    if told is None:
        told = _from_text(data.decode(errors="replace"), rank)
    elif rank is not None and told:
        told = told[:1]
        told[0].rank = rank
    yield from told


# ----- py-spy's JSON -----


def _from_json(data: bytes) -> list[_Process] | None:
    if data[:64].lstrip()[:1] not in (b"[", b"{"):
        return None
    for pieces in ([data], data.splitlines()):
        try:
            return [one for piece in pieces if piece.strip() for one in _json_processes(msgspec.json.decode(piece))]
        except _NO_JSON_DUMP:
            continue
    return None


def _json_processes(threads: list[dict[str, Any]]) -> list[_Process]:
    by_pid: dict[int, _Process] = {}
    for raw in threads[:MAX_THREADS]:
        pid = int(raw.get("pid") or 0)
        process = by_pid.setdefault(pid, _Process(pid=pid))
        # py-spy leaves the thread id of a busy process at None sometimes: then only the name tells.
        thread = Thread(tid=raw.get("os_thread_id"), name=str(raw.get("thread_name") or ""))
        for frame in raw["frames"][:RAW_FRAMES]:
            file = frame.get("filename") or frame.get("short_filename") or ""
            thread.add(str(frame.get("name", "")), str(file), int(frame.get("line") or 0))
        process.threads.append(thread)
    return list(by_pid.values())


# ----- text -----


def _from_text(text: str, rank: int | None) -> list[_Process]:
    readers: dict[str, _TextReader] = {}
    for raw in text.splitlines():
        prefix = _PREFIX.match(raw)
        told = next((int(group) for group in prefix.groups() if group), None) if prefix is not None else None
        key = "" if told is None else str(told)
        if key not in readers:
            if len(readers) >= MAX_THREADS:
                continue
            readers[key] = _TextReader(rank if told is None else told, fixed=told is not None)
        readers[key].read(raw[prefix.end() if prefix is not None else 0 :][:MAX_LINE])
    return [one for reader in readers.values() for one in reader.processes if one.threads]


class _TextReader:
    """Reads the lines of one stream, whatever tool wrote them."""

    def __init__(self, rank: int | None, *, fixed: bool) -> None:
        self.processes = [_Process(rank)]
        self._rank = rank
        """Of the next process without a header of its own; a file's rank is its first process's only."""
        self._fixed = fixed
        self._thread: Thread | None = None
        self._count = 0
        self._kind = ""
        self._indent = 0
        """Of the last header: a label before the lines may end in a space."""

    def read(self, line: str) -> None:
        if not line.strip():
            return
        if not self._frame(line[self._indent :] if line[: self._indent].isspace() else line):
            self._header(line)

    def _header(self, line: str) -> None:
        self._indent = len(line) - len(line.lstrip())
        line = line[self._indent :]
        match = _FAULT.match(line)
        if match is not None:
            thread = Thread(tid=int(match[2], 16), name=match[3] or "")
            thread.current = match[1] == "Current thread"
            self._open("file", thread)
        elif (match := _PYSPY.match(line)) is not None:
            self._open("py-spy", Thread(tid=int(match[1], 0), name=match[3] or ""))
        elif _PYBT.match(line):
            self._open("file", Thread(number=1))
        elif (match := _PYSTACK.match(line)) is not None:
            self._open("pystack", Thread(tid=int(match[1])))
        elif (match := _GDB.match(line)) is not None:
            self._open("#", Thread(tid=int(match[2]), name=match[3] or "", number=int(match[1])))
        elif (match := _EU.match(line)) is not None:
            self._open("#", Thread(tid=int(match[1])))
        elif (match := _LLDB.match(line)) is not None:
            self._open("#", Thread(number=int(match[1]), name=match[2] or ""))
        elif (match := _PROCESS.match(line)) is not None:
            self._new(int(next(group for group in match.groups() if group)), ended=match[3] is not None)
        elif (match := _RANK.match(line)) is not None and not self._fixed:
            self._rank = int(match[1])
            self._new(None)
        elif line.startswith("Timeout ("):
            self._new(self.processes[-1].pid, again=True)

    def _new(self, pid: int | None, *, again: bool = False, ended: bool = False) -> None:
        """A process begins (`ended`: gdb names it at its end; `again`: another sample of the same one)."""
        self._thread = None
        last = self.processes[-1]
        if ended or not last.threads:
            last.pid = last.pid or pid
            last.rank = self._rank if last.rank is None or not last.threads else last.rank
            return
        known = self._fixed or again or pid == last.pid or last.rank != self._rank
        self.processes.append(_Process(self._rank if known else None, pid))

    def _open(self, kind: str, thread: Thread) -> None:
        process = self.processes[-1]
        same = thread.tid is not None and any(one.tid == thread.tid for one in process.threads)
        if same:  # the same thread once more: another sample
            self._new(process.pid, again=True)
            process = self.processes[-1]
        self._count += 1
        if self._count > MAX_THREADS:
            self._thread = None
            return
        self._kind = kind
        self._thread = thread
        process.threads.append(thread)

    def _frame(self, line: str) -> bool:
        """Whether the line was a frame, and taken."""
        if line.startswith("#"):
            return self._numbered(line)
        thread = self._thread
        if thread is None:
            return False
        if self._kind == "py-spy":
            return _pyspy_frame(thread, line)
        if self._kind == "file":
            match = _FILE.match(line)
            if match is not None:
                thread.add(match[3], match[1], int(match[2]) if match[2] != "???" else 0)
            return match is not None
        if self._kind == "pystack":
            match = _PYSTACK_FRAME.match(line)
            if match is not None:  # the innermost comes last
                thread.add_before(match[3], match[4] or match[1], 0 if match[4] else int(match[2]))
            return match is not None
        match = _LLDB_FRAME.match(line)
        if match is not None:
            thread.add(match[2].partition(" at ")[0], match[1], 0)
        elif (match := _MORE.match(line)) is not None and thread.frames:
            last = thread.frames[-1]
            thread.frames[-1] = frame_of(last.function, *_place(match[1]))
        return match is not None

    def _numbered(self, line: str) -> bool:
        match = _NUMBERED.match(line)
        if match is None:
            return False
        if self._thread is None or self._kind != "#" or (line.startswith("#0 ") and self._thread.frames):
            known = self._thread is not None and self._kind == "#"
            if known:
                self._new(None)
            self._open("#", Thread(number=1))
        if self._thread is not None:
            _gdb_frame(self._thread, match[1])
        return True


def _pyspy_frame(thread: Thread, line: str) -> bool:
    if line[:4] != "    " or line[4:5] == " " or not line.rstrip().endswith(")"):
        return line.startswith("        ")  # --locals
    function, _, where = line.strip()[:-1].rpartition(" (")
    thread.add(function, *_place(where))
    return True


def _gdb_frame(thread: Thread, text: str) -> None:
    python = _PYTHON_IN_GDB.search(text)
    if python is not None:
        thread.add(python[3], python[1], int(python[2]))
        return
    for word in (" from ", " at ", " - "):
        head, found, where = text.rpartition(word)
        if found and " " not in where.strip() and ("/" in where or ":" in where or ".so" in where):
            text = head
            break
    else:
        where = ""
    thread.add(text, *_place(where.strip() or NATIVE))


def _place(where: str) -> tuple[str, int]:
    """`train.py:12` -> its file and line; a library has no line."""
    file, colon, line = where.rpartition(":")
    return (file, int(line)) if colon and line.isdigit() and len(line) < 10 else (where, 0)
