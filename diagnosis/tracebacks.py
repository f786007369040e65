"""The last Python traceback of a rank: exception, place, causes.

Output lines may carry a rank's prefix (`[rank1]:`, `[default0]:`, `3: `) and the lines of several ranks may be mixed.
A traceback of torchrun itself says only that a worker failed: it is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from diagnosis.signals import Frame, Word, clean_text
from diagnosis.stacks import is_library

MAX_LINES: Final = 60
CUT_OFF: Final = "an exception"
"""The type of one whose own line is missing."""

_PREFIX: Final = re.compile(r"^\s{0,2}(?:\[(?:rank|default|[a-z_]{1,20})?(\d{1,6})\]:? ?|(\d{1,5}): )", re.IGNORECASE)
_START: Final = "Traceback (most recent call last)"
_FILE: Final = re.compile(r'^\s*(?:[|+\-]\s*)?File "([^"]{1,400})", line (\d{1,7})(?:, in (.{1,200}))?')
_EXCEPTION: Final = re.compile(r"^([A-Za-z_][\w.]{1,150})(?::\s?(.*))?$")
_CHAINED: Final = ("During handling of the above exception", "The above exception was the direct cause")
_LAUNCHER: Final = ("ChildFailedError", "SignalException")


class Traceback(Word, frozen=True, kw_only=True):
    """One Python exception with its frames, outermost first."""

    exception: str
    """Its type, with the module where the output names it."""
    message: str = ""
    frames: tuple[Frame, ...] = ()
    causes: tuple[str, ...] = ()
    """Exceptions that led to it (`Type: message`), the first one first."""
    cause_frames: tuple[Frame, ...] = ()
    """Frames of the first cause."""
    rank: int | None = None
    """From the lines' prefix, where there is one."""
    index: int = 0
    """Position of its first line in what was read."""

    @property
    def name(self) -> str:
        """The type without its module."""
        return self.exception.rsplit(".", 1)[-1]

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
        """Raised by torchrun, not by a worker."""
        return self.name in _LAUNCHER


def split_prefix(line: str) -> tuple[int | None, str]:
    """The rank of a line's prefix, and the line without it."""
    match = _PREFIX.match(line)
    if match is None:
        return None, line
    return int(match[1] or match[2]), line[match.end() :]


def collect(lines: Iterable[str]) -> tuple[str, ...]:
    """The lines of the last traceback with its causes, cleaned, at most 60 (the innermost are kept)."""
    cleaned = [clean_text(line) for line in lines]
    spans = _spans([split_prefix(line)[1] for line in cleaned])
    if not spans:
        return ()
    start, end = spans[-1]
    for begin, stop in reversed(spans[:-1]):
        between = cleaned[stop:start]
        if not any(marker in line for line in between for marker in _CHAINED):
            break
        start = begin
    return tuple(cleaned[start:end][-MAX_LINES:])


def last(lines: Iterable[str]) -> Traceback | None:
    """The last traceback of a worker, with the causes chained to it."""
    found = read(lines)
    workers = [one for one in found if not one.is_launchers]
    return workers[-1] if workers else None


def read(lines: Iterable[str]) -> list[Traceback]:
    """All tracebacks in the order in which they end, chained ones joined."""
    by_rank: dict[int | None, list[tuple[int, str]]] = {}
    for index, raw in enumerate(lines):
        rank, line = split_prefix(clean_text(raw, 2000))
        by_rank.setdefault(rank, []).append((index, line))
    found: list[Traceback] = []
    for rank, numbered in by_rank.items():
        found += _of_rank(rank, numbered)
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


def _of_rank(rank: int | None, numbered: Sequence[tuple[int, str]]) -> list[Traceback]:
    lines = [line for _, line in numbered]
    found: list[Traceback] = []
    previous_end = -1
    for start, end in _spans(lines):
        one = _parse(lines[start:end], rank, numbered[start][0])
        if one is None:
            continue
        between = lines[previous_end:start] if previous_end >= 0 else []
        if found and any(marker in line for line in between for marker in _CHAINED):
            cause = found.pop()
            one = msgspec.structs.replace(
                one,
                causes=(*cause.causes, cause.line)[-8:],
                cause_frames=cause.cause_frames or cause.frames,
            )
        found.append(one)
        previous_end = end
    return found


def _spans(lines: Sequence[str]) -> list[tuple[int, int]]:
    """(first line, line after the last) of each traceback, also of one whose beginning was cut off."""
    spans = []
    index = 0
    while index < len(lines):
        if _START not in lines[index] and not _FILE.match(lines[index]):
            index += 1
            continue
        start = index
        index += 1
        # A SyntaxError's report and code lines are indented; the exception's line is the first that is not.
        while index < len(lines) and _START not in lines[index] and _belongs(lines[index]):
            index += 1
        if index < len(lines) and _START not in lines[index] and _EXCEPTION.match(lines[index].strip()):
            index += 1
            stop = index + 8
            while index < min(stop, len(lines)) and _continues(lines[index]):
                index += 1
        spans.append((start, index))
    return spans


def _belongs(line: str) -> bool:
    return not line.strip() or line[0] in " \t|+"


def _continues(line: str) -> bool:
    """A further line of an exception's message, rather than the next line of the log."""
    return line.startswith(("    ", "\t")) and _START not in line and not _FILE.match(line)


def _parse(lines: Sequence[str], rank: int | None, index: int) -> Traceback | None:
    frames: list[Frame] = []
    exception: re.Match[str] | None = None
    rest: list[str] = []
    for line in lines:
        place = _FILE.match(line)
        if place is not None and exception is None:
            frames.append(Frame(function=place[3] or "<module>", file=place[1], line=int(place[2])))
        elif exception is not None:
            rest.append(line.strip())
        elif _START not in line and not _belongs(line):
            exception = _EXCEPTION.match(line.strip())
            if exception is None:
                break
    if exception is None:
        # Cut off by the end of what was kept, or garbled by another rank: the frames still tell a place.
        return Traceback(exception=CUT_OFF, frames=tuple(frames), rank=rank, index=index) if frames else None
    message = " ".join([exception[2] or "", *rest]).strip()
    return Traceback(
        exception=exception[1], message=clean_text(message, 1000), frames=tuple(frames), rank=rank, index=index
    )
