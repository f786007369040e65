"""Python tracebacks in the output of one rank or of many: exception, place, causes.

Lines may carry a prefix (`[rank1]:`, `3: `, `(train pid=7) `, a time), the lines of several ranks may be mixed, with or
without prefixes, and a traceback may be drawn by rich, loguru or IPython, be quoted by another process, or lack its
beginning or end. A traceback of a launcher says only that a worker failed: it is passed over.

A block (`blocks_of`) is one traceback, or those of several ranks that wrote at the same time: then their lines, and
even pieces of their lines, come in any order, and the exceptions are what can be put together again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from diagnosis.signals import Frame, Frozen, clean_text, printable
from diagnosis.stacks import is_library
from diagnosis.text import hide_keys

START: Final = "Traceback (most recent call last)"
FATAL: Final = "Fatal Python error"
"""The type of a crash that Python's faulthandler wrote down."""
MAX_FOREIGN: Final = 6
"""Lines of something else in a row that do not end a traceback of several ranks."""
MAX_CRASH: Final = 2000
"""Lines of all threads' stacks."""
MAX_MESSAGE: Final = 12
"""Lines of an exception's message."""
_AHEAD: Final = 4
MAX_CODE: Final = 200

_FILE: Final = re.compile(r'(?:^|[\s:|│>])File "([^"]{1,400})", line (\d{1,7})(, in |\b(?! in ))(.{0,200})')
_CRASH: Final = re.compile(r"Fatal Python error: (.{1,200})")
_CRASH_FRAME: Final = re.compile(r'^\s*File "([^"]{1,400})", line (\d{1,7}) in (.{1,200})')
_RICH: Final = re.compile(r"^\s*[│|]\s*(/?[^\s:│][^:│]{0,300}?\.\w{1,4}):(\d{1,7}) in (\S{1,200})")
_IPYTHON: Final = re.compile(r"^(?:File )?([~/<][^\s:(]{0,300})(?::(\d{1,7}))?,? in ([\w.<>]{1,200})\(?")
_EXCEPTION_HEAD: Final = re.compile(r"^([A-Za-z_][\w.]{1,150}(?:\(\w{1,80}\))?)(?::\s?(.*))?$")
_GROUP: Final = re.compile(
    r"^\s*\|\s{0,3}(?=\s*(?:File \"|Traceback|[A-Za-z_][\w.]*(?:Error|Exception|Group|Interrupt)\b))"
)
_SUFFIX: Final = re.compile(
    r"(?:Error|Exception|Interrupt|Exit|Timeout|Failure|Iteration|Warning|Group|Unsupported|NotFound|Invalid|Expired|"
    r"TaskError\(\w+\))$|(?:^|\.)(?:error|timeout|gaierror|herror)$"
)
_DRAWN: Final = tuple("|│┃└╰>")
_BORDER: Final = " \t|│┃┌└╭╰╯┐┘─━>"
"""What a box is drawn with around a traceback, or marks it as quoted: the last line may stand inside."""
_LAST_LINE: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt): \S")
_PIECE: Final = re.compile(r"[A-Z][A-Za-z]*?(?:Error|Exception|KeyboardInterrupt)")
_CHAIN_LINE: Final = re.compile(r"During handling of the above exception|The above exception was the direct cause")
_MORE: Final = re.compile(
    r"^(?:nccl\w+: |Last error|Cuda failure|Exception raised from|\S+ NCCL WARN|Call to |CUDA error)"
)


class TracebackBlock(Frozen, frozen=True, kw_only=True):
    """One traceback, or several that are mixed."""

    start: int
    end: int
    """The line after its last one."""
    frames: tuple[Frame, ...] = ()
    code: tuple[str, ...] = ()
    """The line of code of each frame, where it is shown."""
    exceptions: tuple[tuple[str, str], ...] = ()
    """(type, message); none where its end is missing."""
    rest: str = ""
    """The line after one whose end is missing: perhaps its message."""
    is_mixed: bool = False
    is_original: bool = False
    """Quoted by the traceback before it, of another process or thread."""


def blocks_of(lines: Sequence[str]) -> list[TracebackBlock]:
    found = []
    at = 0
    while at < len(lines):
        if START in lines[at] or ('File "' in lines[at] and _frame(lines[at]) is not None):
            block = _Reader(lines, at).read()
            found.append(block)
            at = max(block.end, at + 1)
        elif FATAL in lines[at]:
            found.append(_crash(lines, at))
            at = found[-1].end
        elif not found and (at == 0 or lines[at - 1][:1] in (" ", "\t")) and _LAST_LINE.match(lines[at]):
            # Its frames were cut off, perhaps with the code of the last one left.
            exception = _exception(lines[at].strip(), strictly=True)
            found += [TracebackBlock(start=at, end=at + 1, exceptions=(exception,))] if exception is not None else []
            at += 1
        else:
            at += 1
    return found


def _crash(lines: Sequence[str], start: int) -> TracebackBlock:
    """What faulthandler wrote: threads one after the other, innermost frame first. The current one (or the first)."""
    crash = _CRASH.search(lines[start])
    threads: list[list[Frame]] = [[]]
    chosen = 0
    at = start + 1
    while at < len(lines) and at - start < MAX_CRASH:
        place = _CRASH_FRAME.match(lines[at])
        if "hread 0x" in lines[at]:
            threads.append([])
            chosen = len(threads) - 1 if "Current thread" in lines[at] else chosen or 1
        elif place is not None:
            threads[-1].insert(0, Frame(function=place[3].strip(), file=place[1], line=int(place[2])))
        elif lines[at].strip():
            break
        at += 1
    frames = tuple(threads[chosen])
    return TracebackBlock(start=start, end=at, frames=frames, exceptions=((FATAL, crash[1].strip() if crash else ""),))


def _is_quoted(lines: Sequence[str], start: int) -> bool:
    """The traceback that begins here is the message of the one before it."""
    if re.search(rf"(?:Original |^[\w.]+: ){re.escape(START)}", lines[start]):
        return True
    return any("terminated with the following error" in line for line in lines[max(0, start - 3) : start])


def _frame(line: str) -> Frame | None:
    """The place that a line names. (faulthandler's lines, innermost first, are none.)"""
    place = _FILE.search(line)
    if place is not None:
        function = place[4].strip() if place[3] == ", in " else "<module>"
        return Frame(function=function or "<module>", file=place[1].replace("\\", "/"), line=int(place[2]))
    place = _RICH.match(line)
    if place is not None:
        return Frame(function=place[3], file=place[1], line=int(place[2]))
    place = _IPYTHON.match(line)
    if place is not None and ("File " in line or "/" in place[1] or place[1].startswith("<ipython")):
        return Frame(function=place[3], file=place[1], line=int(place[2] or 0))
    return None


def _exception(line: str, *, strictly: bool) -> tuple[str, str] | None:
    """(type, message) of the line that ends a traceback. `strictly`: only a type with one of the usual endings."""
    match = _EXCEPTION_HEAD.match(line)
    if match is None:
        return None
    name = match[1].rstrip(".")
    last = name.rsplit(".", 1)[-1]
    pieces = _PIECE.findall(last)
    if len(pieces) > 1 and len(set(pieces)) == 1:
        name = last = pieces[0]  # two ranks at once
    if _SUFFIX.search(name) is None and (strictly or not last[:1].isupper() or last.isupper() or len(last) < 4):
        return None
    return name, (match[2] or "").strip(" :")


class _Reader:
    """Reads one block from its first line."""

    def __init__(self, lines: Sequence[str], start: int) -> None:
        self._lines = lines
        self._start = self._at = start
        self._open = 0
        self._frames: list[Frame] = []
        self._code: list[str] = []
        self._found: list[tuple[str, str]] = []
        self._pieces: list[str] = []
        """Lines of a mixed block that are no whole line of anyone."""

    def read(self) -> TracebackBlock:
        foreign = 0
        end = self._start
        while self._at < len(self._lines):
            line = _GROUP.sub("", self._lines[self._at])
            known = self._take(line)
            if known is None:
                break
            foreign = 0 if known else foreign + 1
            if foreign > MAX_FOREIGN or (foreign and not self._goes_on()):
                break
            self._at += 1
            if known:
                end = self._at
        mixed = self._open > 1 or len(self._found) > 1
        return TracebackBlock(
            start=self._start,
            end=max(end, self._start + 1),
            frames=tuple(self._frames),
            code=tuple(self._code),
            exceptions=self._exceptions(mixed=mixed),
            rest=self._lines[end].strip() if end < len(self._lines) and not self._found else "",
            is_mixed=mixed,
            is_original=_is_quoted(self._lines, self._start),
        )

    def _take(self, line: str) -> bool | None:
        """Whether a line is part of the block; None: the block ended before it."""
        is_first = self._at == self._start
        if START in line:
            outer = _exception(line.partition(START)[0].strip().rstrip(":"), strictly=True)
            if outer is not None and not is_first and self._open <= 1:
                self._found.append(outer)  # old data loaders: "OSError: Traceback (most recent call last):"
                return None
            if self._found or any(map(_PIECE.search, self._pieces)):
                return True if is_first else None
            self._open += 1
            return True
        frame = _frame(line)
        if frame is not None:
            if self._found and self._open <= 1:
                return None
            self._frames.append(frame)
            self._code.append("")
            return True
        if _CHAIN_LINE.search(line):
            return None if self._found else True
        drawn = _exception(line.strip(_BORDER), strictly=True) if line[:1] in _DRAWN else None
        if drawn is not None and self._frames and not self._found:
            self._found.append(drawn)
            return True
        if not line.strip() or line[0] in " \t|+│┃┌└╭╰❱>" or line.startswith(("---", "Cell In", "Input In")):
            if self._found and self._open <= 1:
                return None
            if self._code and not self._code[-1]:
                self._code[-1] = line.strip()[:MAX_CODE]
            return True
        if self._found and self._open <= 1:
            return None
        exception = _exception(line.strip(), strictly=self._open > 1)
        if exception is not None and (self._frames or self._open):
            name, message = exception
            self._found.append((name, " ".join([message, *self._message()]).strip()))
            return True
        if self._open > 1:
            self._pieces.append(line)
            return bool(_PIECE.search(line))
        return False

    def _goes_on(self) -> bool:
        """The lines after a foreign one are of the traceback again."""
        if self._open > 1:
            return True
        for line in self._lines[self._at + 1 : self._at + 1 + _AHEAD]:
            if START in line:
                return False
            if _FILE.search(line) or _exception(line.strip(), strictly=True):
                return True
        return False

    def _message(self) -> list[str]:
        """Further lines of the message of the exception that stands here."""
        gathered: list[str] = []
        after_last_error = False
        for line in self._lines[self._at + 1 : self._at + 1 + MAX_MESSAGE]:
            indented = line.startswith(("  ", "\t")) and "%|" not in line and self._open <= 1
            if START in line or _FILE.search(line) or not (indented or after_last_error or _MORE.match(line)):
                break
            after_last_error = line.startswith("Last error")
            gathered.append(line.strip())
        self._at += len(gathered)
        return gathered

    def _exceptions(self, *, mixed: bool) -> tuple[tuple[str, str], ...]:
        if not mixed:
            return tuple(self._found)
        gathered = [number for number, line in enumerate(self._pieces) if _PIECE.search(line)]
        del self._pieces[gathered[-1] + 2 if gathered else 0 :]
        names = Counter(piece for line in self._pieces for piece in _PIECE.findall(line))
        rest = _PIECE.sub("\n", "\n".join(self._pieces)).split("\n")
        words = max((one.strip(" :.") for one in rest), key=len, default="")
        best: dict[str, tuple[str, str]] = {}
        for name, message in self._found:
            bare = name.rsplit(".", 1)[-1]
            if bare not in best or len(message) > len(best[bare][1]):
                best[bare] = (name, message)
        if not best and names:
            best[names.most_common(1)[0][0]] = (names.most_common(1)[0][0], "")
        return tuple((name, message or words) for name, message in best.values())


MAX_LINES: Final = 60
MAX_PREFIX: Final = 160
CUT_OFF: Final = "an exception"
"""The type of one whose own line is missing."""

_PREFIX: Final = re.compile(r"^\s{0,2}(?:\[(?:rank|default|[a-z_]{1,20})?(\d{1,6})\]:? ?|(\d{1,5}): )", re.IGNORECASE)
_RANK_IN: Final = re.compile(r"(?:rank|worker|default)\D{0,3}(\d{1,6})", re.IGNORECASE)
_TIME: Final = re.compile(r"\d:\d\d")
_OWN_WORDS: Final = re.compile(r"(?:Original|Remote|Exception Group|[─━-]) ?$|[A-Za-z]$")
"""What may stand before "Traceback" without being a prefix."""
_DIGIT: Final = re.compile(r"\d+")
_CHAINED: Final = ("During handling of the above exception", "The above exception was the direct cause")
_EXCEPTION: Final = re.compile(r"^([A-Za-z_][\w.]{1,150}(?:\(\w+\))?)(?::\s?(.*))?$")
_LAUNCHER: Final = ("ChildFailedError", "SignalException", "ProcessExitedException")
_LAUNCHER_CODE: Final = re.compile(
    r"accelerate/commands/|deepspeed/launcher/|torch/distributed/(?:launch|run)\.py|bin/(?:torchrun|accelerate|deepspeed)$"
)
_WRAPPERS: Final = ("ProcessRaisedException", "RayTaskError", "RemoteTraceback", "_RemoteTraceback")
_UNREAL: Final = re.compile(r"Exception ignored in|Error in (?:atexit|sys\.excepthook)|Exception ignored on")
_THREAD: Final = re.compile(r"Exception in thread (?!MainThread)")
_THREAD_CODE: Final = re.compile(r"threading\.py:_bootstrap|queues\.py:_feed$")
_MILD: Final = re.compile(
    r"(?<![\w.])WARN(?:ING)?(?![\w-]).{0,200}(?:fail|error|exception|caught|could not|unable|cannot)", re.IGNORECASE
)


class Traceback(Frozen, frozen=True, kw_only=True):
    """One Python exception with its frames, outermost first."""

    exception: str
    """Its type, with the module where the output names it."""
    message: str = ""
    frames: tuple[Frame, ...] = ()
    causes: tuple[str, ...] = ()
    """Exceptions that led to it (`Type: message`), the first one first."""
    cause_frames: tuple[Frame, ...] = ()
    """Frames of the first cause."""
    code: str = ""
    """The innermost line of the user's own code, else of any, where it is shown."""
    rank: int | None = None
    """From the lines' prefix, where there is one."""
    index: int = 0
    """Position of its first line in what was read."""
    is_passing: bool = False
    """It ended a thread, not the process, or was logged as a warning: the run may have gone on."""

    @property
    def name(self) -> str:
        """The type without its module."""
        return self.exception.partition("(")[0].rsplit(".", 1)[-1]

    @property
    def own_frame(self) -> Frame | None:
        """The innermost frame in the user's own code."""
        return next((frame for frame in reversed(self.frames) if not is_library(frame.file)), None)

    @property
    def line(self) -> str:
        """`ValueError: too many`."""
        return f"{self.exception}: {self.message}" if self.message else self.exception

    @property
    def is_launchers(self) -> bool:
        """Raised by a launcher, not by a worker."""
        if self.name in ("CalledProcessError", "SystemExit", CUT_OFF) and not self.causes:
            own = [frame for frame in self.frames if not frame.file.endswith("runpy.py")]
            return any(_LAUNCHER_CODE.search(frame.file) for frame in own) or (not own and bool(self.frames))
        return self.name in _LAUNCHER


def split_prefix(line: str) -> tuple[int | None, str]:
    """The rank of a line's prefix, and the line without it."""
    match = _PREFIX.match(line)
    if match is None:
        return None, line
    return int(match[1] or match[2]), line[match.end() :]


def collect(lines: Iterable[str]) -> tuple[str, ...]:
    """The lines of the last traceback with its causes, cleaned, at most 60 (the innermost are kept)."""
    lines = list(lines)
    cleaned = [printable(line, 500) for line in lines]
    blocks = blocks_of([split_prefix(line)[1] for line in cleaned])
    if not blocks:
        return ()
    start, end = blocks[-1].start, blocks[-1].end
    for one in reversed(blocks[:-1]):
        if not _is_chained(cleaned[one.end : start]):
            break
        start = one.start
    return tuple(hide_keys([clean_text(line) for line in lines[start:end][-MAX_LINES:]]))


def last(lines: Iterable[str]) -> Traceback | None:
    """The last traceback of a worker, with the causes chained to it; one that ended the process, if there is one."""
    workers = [one for one in read(lines) if not one.is_launchers]
    return next((one for one in reversed(workers) if not one.is_passing), workers[-1] if workers else None)


def read(lines: Iterable[str]) -> list[Traceback]:
    """All tracebacks in the order in which they begin, chained ones joined; those that Python ignored left out."""
    found: list[Traceback] = []
    for rank, numbered in _streams(hide_keys([clean_text(line, 2000) for line in lines])):
        found += _of_stream(rank, numbered)
    return sorted(found, key=lambda one: one.index)


def from_error_file(text: str) -> Traceback | None:
    """What torch elastic's error file (JSON) or its message says."""
    message: Any = text
    try:
        message = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        pass  # the agent may have sent only the message
    for _ in range(3):
        if isinstance(message, dict):
            extra = message.get("extraInfo")
            if isinstance(extra, dict) and isinstance(extra.get("py_callstack"), str):
                found = last(extra["py_callstack"].splitlines())
                if found is not None:
                    return found
            message = message.get("message", "")
    if not isinstance(message, str) or not message.strip():
        return None
    found = last(message.splitlines())
    if found is not None:
        return found
    match = _EXCEPTION.match(clean_text(message.strip().splitlines()[0], 2000))
    return Traceback(exception=match[1], message=(match[2] or "").strip()) if match else None


def fingerprint(traceback: Traceback) -> str:
    """Equal for failures of one line of code."""
    frame = traceback.own_frame or (traceback.frames[-1] if traceback.frames else None)
    if frame is None:
        return ""
    return f"{traceback.name} in {frame.function} ({frame.file}:{frame.line})"


def _streams(lines: Sequence[str]) -> list[tuple[int | None, list[tuple[int, str]]]]:
    """Lines of one writer together, without its prefix: (its rank, [(position, text)])."""
    bare = [split_prefix(line) for line in lines]
    prefixes = _prefixes([text for _, text in bare])
    streams: dict[tuple[int | None, str], list[tuple[int, str]]] = {}
    for index, (rank, text) in enumerate(bare):
        writer = ""
        for shape, width in prefixes:
            if len(text) >= width and _DIGIT.sub("0", text[:width]) == shape:
                writer, text = text[:width], text[width:]
                # The other side of a box that is drawn around it.
                text = text.rstrip(" │┃|") if writer.lstrip()[:1] in tuple("│┃|") else text
                break
        known = _RANK_IN.search(writer)
        rank = int(known[1]) if known is not None else rank
        streams.setdefault((rank, "" if _TIME.search(writer) else writer), []).append((index, text))
    return [(rank, numbered) for (rank, _), numbered in streams.items()]


def _prefixes(lines: Sequence[str]) -> list[tuple[str, int]]:
    """Prefixes (numbers as 0; their width) of lines that carry one: those of a traceback's beginning, or of a frame
    where the beginning is missing, and of the next line."""
    found: dict[tuple[str, int], None] = {}
    for number, line in enumerate(lines[:-1]):
        following = lines[number + 1]
        width = line.find(START)
        width = line.find('  File "', 0, MAX_PREFIX) if width < 0 else width
        if width <= 0 or not line[:width].strip() or _OWN_WORDS.search(line[:width]):
            continue
        shape = _DIGIT.sub("0", line[:width])
        if _DIGIT.sub("0", following[:width]) == shape and len(found) < 50:
            found[shape, width] = None
    return list(found)


def _of_stream(rank: int | None, numbered: Sequence[tuple[int, str]]) -> list[Traceback]:
    lines = [line for _, line in numbered]
    found: list[Traceback] = []
    before: TracebackBlock | None = None
    for block in blocks_of(lines):
        between = lines[before.end : block.start] if before is not None else []
        intro = " ".join([*lines[max(0, block.start - 2) : block.start], lines[block.start]])
        outer = found[-1] if found and before is not None and block.start - before.end <= 6 else None
        chained = _is_chained(between)
        joins = outer is not None and (chained or block.is_original or _is_wrapper(outer))
        before = block
        # Python ignores what a finalizer raises, and mixes its lines with those of others.
        if _UNREAL.search(intro) or any(frame.function == "__del__" for frame in block.frames[:2]):
            continue
        gathered = _tracebacks(block, rank, numbered[block.start][0])
        if gathered and joins and outer is not None:
            found.pop()
            gathered[-1] = _joined(outer, gathered[-1], chained=chained)
        in_thread = bool(_THREAD.search(intro)) or any(_THREAD_CODE.match(_place(one)) for one in block.frames[:2])
        passing = in_thread or bool(_MILD.search(lines[max(0, block.start - 1)]))
        found += [msgspec.structs.replace(one, is_passing=True) for one in gathered] if passing else gathered
    return found


def _place(frame: Frame) -> str:
    return f"{frame.file.rsplit('/', 1)[-1]}:{frame.function}"


def _is_chained(lines: Iterable[str]) -> bool:
    return any(marker in line for line in lines for marker in _CHAINED)


def _is_wrapper(outer: Traceback) -> bool:
    """It only says what another process or thread raised, and quotes that."""
    return outer.name in _WRAPPERS or outer.message.startswith("Caught ")


def _joined(outer: Traceback, inner: Traceback, *, chained: bool) -> Traceback:
    if chained:
        causes = (*outer.causes, outer.line)[-8:]
        return msgspec.structs.replace(inner, causes=causes, cause_frames=outer.cause_frames or outer.frames)
    # What another process raised, quoted by who waited for it: one way through the code.
    return msgspec.structs.replace(
        inner,
        frames=(*outer.frames, *inner.frames),
        causes=outer.causes,
        cause_frames=outer.cause_frames,
        index=outer.index,
    )


def _tracebacks(block: TracebackBlock, rank: int | None, index: int) -> list[Traceback]:
    frames = tuple(dict.fromkeys(block.frames)) if block.is_mixed else block.frames
    if not block.exceptions:
        # Cut off by the end of what was kept: the frames still tell a place.
        rest = clean_text(block.rest, 1000)
        return [Traceback(exception=CUT_OFF, message=rest, frames=frames, rank=rank, index=index)] if frames else []
    own = [code for frame, code in zip(block.frames, block.code, strict=False) if not is_library(frame.file)]
    code = ([*block.code[-1:], *own] or [""])[-1]
    return [
        Traceback(exception=name, message=clean_text(message, 1000), frames=frames, code=code, rank=rank, index=index)
        for name, message in block.exceptions
    ]
