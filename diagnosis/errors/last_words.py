"""A log that ends with an error in words that no rule knows: what such words are mostly about.

A last resort: it looks at the last few lines only, wants a plain mark of an error in each, and is never sure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from diagnosis import rules
from diagnosis.errors import exceptions
from diagnosis.errors.tracebacks import Traceback, split_prefix
from diagnosis.tables import load
from diagnosis.taxonomy import FailureClass

LINES: Final = 6
"""Lines that are not empty, at the end of a log."""
FINALIZER_LINES: Final = 24
CONFIDENCE: Final = 0.4
_MARK: Final = re.compile(
    r"^.{0,80}?(?:\b(?:FATAL|CRITICAL|PANIC|EMERG)\b"
    r"|(?<![\w.-])(?:ERROR|Error|error|fatal|panic|Fatal error)(?:\[\w+\])?[:\]|>)]"
    r"|\b(?:failed to|cannot|could not|unable to|refusing to)\b)"
)
_TROUBLE: Final = re.compile(r"fail|error|warn|unable|cannot|could not|invalid|lost|timed? ?out|exceed", re.IGNORECASE)
_HARMLESS: Final = re.compile(
    r"retry|ignor|skip|fall(?:ing)?[ -]?back|warn|deprecat|will be|using default|\bINFO\b|\bDEBUG\b|loss|accuracy"
    r"|epoch|not (?:an )?error|no error|0 errors|register|factory",
    re.IGNORECASE,
)
_UNRESOLVED: Final = re.compile(
    r"name resolution|name or service not known|(?:could not|cannot|failed to|unable to) resolve|getaddrinfo|"
    r"network is unreachable|no route to host",
    re.IGNORECASE,
)
_UNREACHED: Final = re.compile(
    r"Max retries exceeded with url|NewConnectionError|ConnectTimeout|ReadTimeoutError|getaddrinfo"
)
_TRIES_AGAIN: Final = re.compile(r"\bRetry(?:ing)?\b.{0,60}\b\d", re.IGNORECASE)
"""Nobody is there, and the log ends while it is tried again."""
_ANSWERS_LATE: Final = re.compile(
    r"^(?!.*(?:Max retries exceeded|NewConnectionError|ConnectTimeout)).*ReadTimeoutError"
)
"""Somebody is there, and may still answer."""
_TRIES_LEFT: Final = re.compile(
    r"\b(?:total|retries_left|remaining|left)[=: ]{1,3}(?P<left>\d{1,6})"
    r"|\b(?P<left2>\d{1,6}) (?:more )?(?:retries|tries|attempts) (?:left|remain)"
    r"|\b(?:retry|attempt|try)\W{1,2}(?P<done>\d{1,6}) ?(?:/|of) ?(?P<of>\d{1,6})",
    re.IGNORECASE,
)
"""Of what is tried again: how often yet."""
_IGNORED: Final = re.compile(
    r"Exception ignored in|Error in (?:atexit|sys\.excepthook|sitecustomize)|Exception in thread (?!MainThread)"
)
_ASLEEP: Final = re.compile(r"\b__schedule\+0x[0-9a-f]{1,6}")
"""The top of the kernel's stack of a task that sleeps; the kernel writes it of those that sleep for too long."""
_SLEEPER: Final = re.compile(
    r"\b(?:io_schedule|rwsem_down|__mutex_lock|wait_on_page|rpc_wait|nfs|lustre|cl_sync|blk_)\w*"
)
_EXCEPTION: Final = re.compile(
    r"^((?:[a-z_]\w{0,40}\.){0,6}[A-Z]\w{1,60}(?:Error|Exception|Timeout)|[a-z_]\w{1,20}\.error): (\S.{2,})$"
)
_CAUGHT: Final = re.compile(r"retry|ignor|skip|fall(?:ing)?[ -]?back|will be|using default|caught|continu", re.I)
_ABOUT: Final = tuple(
    (FailureClass(row["class"]), re.compile(row["regex"])) for row in load("diagnosis", "exceptions.toml")["about"]
)
"""The first that fits: what is told in few words comes before what many errors say."""


def about(text: str) -> tuple[FailureClass, ...]:
    """What a line may be about by its words, the most telling first."""
    return tuple(failure_class for failure_class, words in _ABOUT if words.search(text[:1000]))


def clues(lines: Sequence[str]) -> Counter[FailureClass]:
    """How often lines that sound of trouble, though none tells of a failure, are about a class."""
    troubled = (line for line in lines if _TROUBLE.search(line[:1000]) is not None)
    return Counter(one for line in troubled for one in about(line)[:2])


class LastWords(NamedTuple):
    """A reading of a log's end."""

    failure_class: FailureClass
    text: str
    line: int
    """Position among the lines given."""


def read(lines: Sequence[str]) -> LastWords | None:
    """What the end of a log is about, if it ends with an error."""
    last = [index for index, line in enumerate(lines) if line.strip()][-LINES:]
    unresolved = [index for index in last if _UNRESOLVED.search(lines[index])]
    if len(unresolved) > 1 and unresolved[-1] == last[-1]:
        return LastWords(FailureClass.DNS_OR_CONNECT, split_prefix(lines[last[-1]])[1].strip(), last[-1])
    tried = [index for index in last if _UNREACHED.search(lines[index])]
    tries_again = bool(tried) and _TRIES_AGAIN.search(lines[last[-1]]) is not None
    if tries_again and not (_tries_left(lines[last[-1]]) and all(_ANSWERS_LATE.search(lines[one]) for one in tried)):
        return LastWords(FailureClass.DNS_OR_CONNECT, split_prefix(lines[tried[-1]])[1].strip(), tried[-1])
    for index in last:
        text = split_prefix(lines[index])[1].strip()
        if _MARK.search(text[:300]) is None or _HARMLESS.search(text) or rules.is_mild(text.encode(errors="replace")):
            continue
        about = next((failure_class for failure_class, words in _ABOUT if words.search(text)), None)
        if about is not None:
            return LastWords(about, text, index)
    return None


def _tries_left(line: str) -> int:
    """How often it will be tried once more; 0 where that is not said."""
    said = _TRIES_LEFT.search(line)
    if said is None:
        return 0
    if said["done"] is not None:
        return max(int(said["of"]) - int(said["done"]), 0)
    return int(said["left"] or said["left2"])


def read_exception(lines: Sequence[str], among: int = 1) -> LastWords | None:
    """The exception with which a log ends whose traceback is not there, among so many last lines with words."""
    last = [index for index, line in enumerate(lines) if line.strip()][-among:]
    for index in reversed(last):
        text = split_prefix(lines[index])[1].strip()
        match = _EXCEPTION.match(text)
        if match is None or _CAUGHT.search(match[2]) is not None:
            continue
        if any(_IGNORED.search(line) for line in lines[max(0, index - FINALIZER_LINES) : index]):
            return None
        reading = exceptions.read(Traceback(exception=match[1], message=match[2]), [])
        return None if reading.is_cascade else LastWords(reading.failure_class, text, index)
    return None


def read_kernel(lines: Sequence[str]) -> LastWords | None:
    """A stack of a task in uninterruptible sleep whose headline is not there."""
    start = next((index for index, line in enumerate(lines) if _ASLEEP.search(line)), None)
    if start is None or not any(_SLEEPER.search(line) for line in lines[start : start + 2 * LINES]):
        return None
    head = next((index for index in range(start, max(start - LINES, -1), -1) if " state:D" in lines[index]), start)
    return LastWords(FailureClass.KERNEL_FAULT, lines[head].strip(), head)
