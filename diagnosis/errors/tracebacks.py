"""Python tracebacks in the output of one rank or of many: exception, place, causes.

Lines may carry a prefix (`[rank1]:`, `3: `, `(train pid=7) `, a time), the lines of several ranks may be mixed, with or
without prefixes, and a traceback may be drawn by rich, loguru or IPython, be quoted by another process, or lack its
beginning or end. A traceback of a launcher says only that a worker failed: it is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from diagnosis.errors.blocks import START, Block, blocks_of
from diagnosis.signals import Frame, Frozen, clean_text, printable
from diagnosis.stacks import is_library
from diagnosis.text import hide_keys

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
    before: Block | None = None
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
        told = _tracebacks(block, rank, numbered[block.start][0])
        if told and joins and outer is not None:
            found.pop()
            told[-1] = _joined(outer, told[-1], chained=chained)
        in_thread = bool(_THREAD.search(intro)) or any(_THREAD_CODE.match(_place(one)) for one in block.frames[:2])
        passing = in_thread or bool(_MILD.search(lines[max(0, block.start - 1)]))
        found += [msgspec.structs.replace(one, is_passing=True) for one in told] if passing else told
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


def _tracebacks(block: Block, rank: int | None, index: int) -> list[Traceback]:
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
