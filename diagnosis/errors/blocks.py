"""Where tracebacks begin and end in lines of text, and what stands in them.

A block is one traceback, or those of several ranks that wrote at the same time: then their lines, and even the pieces
of their lines, come in any order, and the exceptions are what can be put together again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

from diagnosis.signals import Frame, Frozen

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
_EXCEPTION: Final = re.compile(r"^([A-Za-z_][\w.]{1,150}(?:\(\w{1,80}\))?)(?::\s?(.*))?$")
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
_CHAINED: Final = re.compile(r"During handling of the above exception|The above exception was the direct cause")
_MORE: Final = re.compile(
    r"^(?:nccl\w+: |Last error|Cuda failure|Exception raised from|\S+ NCCL WARN|Call to |CUDA error)"
)


class Block(Frozen, frozen=True, kw_only=True):
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


def blocks_of(lines: Sequence[str]) -> list[Block]:
    """All blocks, in order."""
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
            found += [Block(start=at, end=at + 1, exceptions=(exception,))] if exception is not None else []
            at += 1
        else:
            at += 1
    return found


def _crash(lines: Sequence[str], start: int) -> Block:
    """What faulthandler wrote: threads one after the other, innermost frame first. The current one (or the first)."""
    told = _CRASH.search(lines[start])
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
    return Block(start=start, end=at, frames=frames, exceptions=((FATAL, told[1].strip() if told else ""),))


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
    match = _EXCEPTION.match(line)
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

    def read(self) -> Block:
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
        return Block(
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
        if _CHAINED.search(line):
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
        told: list[str] = []
        after_last_error = False
        for line in self._lines[self._at + 1 : self._at + 1 + MAX_MESSAGE]:
            indented = line.startswith(("  ", "\t")) and "%|" not in line and self._open <= 1
            if START in line or _FILE.search(line) or not (indented or after_last_error or _MORE.match(line)):
                break
            after_last_error = line.startswith("Last error")
            told.append(line.strip())
        self._at += len(told)
        return told

    def _exceptions(self, *, mixed: bool) -> tuple[tuple[str, str], ...]:
        if not mixed:
            return tuple(self._found)
        told = [number for number, line in enumerate(self._pieces) if _PIECE.search(line)]
        del self._pieces[told[-1] + 2 if told else 0 :]
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
