"""What stands after an error in its log: whether training, or the program, went on, and the error ended nothing."""

from __future__ import annotations

import re
from typing import Final

from diagnosis.signals import Finding
from diagnosis.story import LogStory
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import log_findings
from diagnosis.verdict.statements import Statement

OUTLIVED_LINES: Final = 3
"""Progress this many lines after an error: the rank that prints it was not ended by it."""
OUTLIVED_BY_OTHERS_LINES: Final = 20
"""The same for a traceback where several ranks write: those of others may still come."""
LAST_LINES: Final = 30
QUIET_LINES: Final = 100
_OPTIONAL: Final = (
    FailureClass.DEPENDENCY_IMPORT_ERROR,
    FailureClass.DNS_OR_CONNECT,
    FailureClass.PERMISSION_OR_AUTH,
)
"""What a script often can do without."""
_WITHOUT: Final = re.compile(
    r"not (?:available|installed|found|reachable).{0,80}(?:using|fall|will|disabl|instead|without|default|skip)"
    r"|\b(?:is|will be|are|now) disabled\b"
    r"|fall(?:ing)?[ -]?back|using (?:the )?default|(?:continu|proceed)\w* without|ignoring",
    re.IGNORECASE,
)
MAX_ANSWER: Final = 4
_STACK: Final = re.compile(r'frame #\d|\b0x[0-9a-f]{6}|File "|^\s+at \S')
_TRACKER: Final = "tracker_failed"
_SOFT: Final = 0.6
"""So sure is a line that tells of an end, and not who wanted it."""
_RAISED: Final = re.compile(r"\b\w{1,60}(?:Error|Exception)\b: ")
"""What is left of a traceback."""
_RANKED: Final = re.compile(r"^\s{0,2}(?:\[(?:rank|default)\d+\]|\d{1,5}: )")
_SLOWNESS: Final = (FailureClass.INPUT_STALL, FailureClass.STRAGGLER_OR_SLOW, FailureClass.GPU_THERMAL_POWER)
_TRAINS: Final = re.compile(
    r"\b\w{0,20}loss\w{0,20}['\"]?\s{0,3}[:=]\s{0,3}-?\d|\b(?:it/s|s/it)\b"
    r"|\b(?:step|iter|iteration|epoch)\b.{0,3}\s?\d.{0,200}\bloss\b",
    re.IGNORECASE,
)
"""A line of training."""
_LIFE: Final = re.compile(
    rf"(?<![\w.-])(?:INFO|DEBUG)(?![\w-])|^(?:\[\w+\]:? ?)?\[?[ID]\d{{4}}[ \]]|{_TRAINS.pattern}", re.IGNORECASE
)
"""An ordinary line: of a level below warning, or of training."""
_DEATH: Final = re.compile(
    r"NCCL INFO|\belastic\b|launch\.py|\b(?:fail|err(?:or)?\b|exception|fatal|abort|kill|cancel|terminat|shut|stop|exit"
    r"|quit|clos|clean|sig[a-z]{3,4}\b|destroy|restart|retry|rendezvous|worker group|timed? ?out|lost|dump|traceback)"
    r"|[:=]\s{0,3}-?(?:nan|inf)\b",
    re.IGNORECASE,
)
"""What also those say whom an error ends, and those who clean up after them."""


def lives(lines: tuple[str, ...], least: int = 1) -> bool:
    """Whether so many of these lines, which follow an error, are said by a program that goes on."""
    signs = (_LIFE.search(text[:400]) is not None and _DEATH.search(text[:400]) is None for text in lines)
    return sum(signs) >= least


def after(story: LogStory, line: int) -> tuple[str, ...]:
    """What follows a line, as far as it is kept."""
    return story.tail[max(0, line - story.lines + len(story.tail)) :]


def is_mild(story: LogStory, one: Statement) -> bool:
    """A traceback at the very end was not caught, whatever it looks like, unless the work was complete by then."""
    at_the_end = one.is_traceback and story.lines - one.line <= LAST_LINES
    return one.mild and (one.is_helper or not at_the_end or is_finished(story, -1) or _is_complete(story))


def is_outlived(story: LogStory, one: Statement) -> bool:
    """Whether the run went on after what it tells of."""
    if one.failure_class in _SLOWNESS and 2 * one.last_line > story.lines:
        return False  # it slows a run that goes on
    is_soft_end = one.rule == _TRACKER or (one.role == "outcome" and one.confidence <= _SOFT and not one.is_traceback)
    if is_soft_end and is_finished(story, -1):
        return True  # whoever ended it, and with what exit code: the work is complete
    several = _is_of_several(story)
    # Who is told to end may make a few steps more.
    long = one.role == "outcome" or (one.is_traceback and (one.is_uncaught or several))
    lines = OUTLIVED_BY_OTHERS_LINES if long else OUTLIVED_LINES
    if one.mild and one.is_traceback and not several:
        lines = 1
    if goes_on(story, one.last_line, lines, one.is_uncaught):
        return True
    raised = one.is_traceback or _RAISED.search(one.evidence.text) is not None
    if raised and one.failure_class in _OPTIONAL and _is_done_without(story, one.last_line):
        return True
    if (one.mild or not raised) and one.role == "cause" and _starts(story, one.last_line):
        return True
    if story.lines - one.last_line > QUIET_LINES and _ends_quietly(story):
        return True
    # Scripts have their last words after an exception as well.
    passes = one.mild or one.role in ("cascade", "symptom")
    return (passes and is_finished(story, one.last_line)) or (one.mild and _is_complete(story))


def goes_on(story: LogStory, line: int, lines: int, is_uncaught: bool = False) -> bool:
    """Whether training goes on after this line. Words of a good end prove nothing after an exception that nobody
    caught: anything can be printed."""
    if story.progress_line is None or story.progress_line <= line or _is_summary(story, story.progress_line):
        return False
    return story.progress_line - line >= lines or (not is_uncaught and is_finished(story, story.progress_line))


def _is_summary(story: LogStory, line: int) -> bool:
    """A tracker's client that repeats the run's numbers after its process failed."""
    at = line - 1 - (story.lines - len(story.tail))
    failed = any(match.rule == _TRACKER and match.line < line for match in story.matches)
    return failed and 0 <= at < len(story.tail) and "wandb: " in story.tail[at]


def outlives(story: LogStory, finding: Finding) -> bool:
    """Whether training, in whose log the kernel's message stands, went on after it."""
    line = log_findings.last_line(finding, story)
    return story.kind == "mixed" and (goes_on(story, line, OUTLIVED_BY_OTHERS_LINES) or is_finished(story, line))


def is_finished(story: LogStory, line: int) -> bool:
    """Whether the work was complete after this line, and no launcher tells of a bad end after that."""
    end = story.finished_line
    if end is None or end <= line or _is_summary(story, end):
        return False
    return not any(failure.line > end for failure in story.launcher)


def _ends_quietly(story: LogStory) -> bool:
    """Nothing at the end of a log tells of trouble: what was said long before did not end it."""
    return not story.launcher and not any(_DEATH.search(text[:400]) or _STACK.search(text) for text in story.tail)


def _starts(story: LogStory, line: int) -> bool:
    """A log of a beginning, without a step yet: ordinary lines follow."""
    following = after(story, line)
    trains = any(_TRAINS.search(text[:400]) is not None and _DEATH.search(text[:400]) is None for text in following)
    return story.progress_line is None and not story.launcher and (trains or lives(following, 2))


def _is_complete(story: LogStory) -> bool:
    """The last step was made."""
    return story.last_step is not None and story.step == story.last_step and not story.launcher


def _is_done_without(story: LogStory, line: int) -> bool:
    """The next lines say that it goes on without what could not be had, and more lines follow."""
    following = after(story, line - 1) if line > story.lines - len(story.tail) else ()
    return len(following) > 1 and any(_WITHOUT.search(text) for text in following[:MAX_ANSWER])


def _is_of_several(story: LogStory) -> bool:
    """Whether several ranks write to it, as far as one sees."""
    ranks = {one.rank for one in story.matches} | {one.rank for one in story.tracebacks}
    return story.rank is None and (
        bool(story.launcher) or len(ranks - {None}) > 1 or any(map(_RANKED.search, story.tail))
    )
