"""A failed run beside runs that went well: what is new in it, what is missing, what became slower, which rank is odd.

It informs and never accuses. `without_known` takes from the logs what healthy runs say as well, so that no verdict
rests on it. `RunComparison.at_end` is a doubt where no rule knows anything. No confident verdict comes from here.

A complaint of a good run excuses the same complaint only where the failed run goes on after it as the good run did:
with lines that good runs have, too, and not far more often. Numbers that tell (`code 137`, `5 errors`) are part of a
complaint; all others are not.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from diagnosis import exceptions
from diagnosis.incident import ComparedLine, LoggedTraceback, LogSummary, RunComparison
from diagnosis.logs.templates import Template, mask
from diagnosis.signals import Evidence, Frozen
from diagnosis.taxonomy import FailureClass
from diagnosis.text import shape
from diagnosis.tracebacks import fingerprint

MAX_NEW: Final = 4
MAX_MISSING: Final = 3
MAX_ODD: Final = 2
MAX_KNOWN: Final = 2
CONSIDERED: Final = 2_000
"""Of so many templates it is asked whether they are variants of others."""
AFTER: Final = 5
"""A complaint that is followed by a new line within so many lines may be its cause."""
ENOUGH_AFTER: Final = 3
OFTEN: Final = 3
"""Somewhat more complaints than in a good run are not new: so many times as many, and so many more."""
END: Final = 40
"""A new line among the last so many lines of a log stands right before its end."""
ALIKE: Final = 0.75
"""Two templates of as many words are variants if this share of the words is the same."""
FEW: Final = 0.125
"""A smaller share of the ranks is odd."""
SAME_JOB: Final = 0.5
"""If good runs have a smaller share of the lines, they are of another job, and all lines are new beside them."""
SLOWER: Final = 1.5
POINTS: Final = 5
LAST_POINTS: Final = 20
QUIET: Final = 4.0
"""A line that came regularly and did not come for so many of its intervals is missing."""

_OF_TRACEBACK: Final = re.compile(
    r"^(?:\[[\w ]{1,16}\]:? ?|\d{1,6}: )?(?:\s{2,}\S|\s*\^)|(?:\s|^)(?:Traceback \(|File \")|^[\W_]*$"
)
"""Frames, code, and lines without a word: the verdict tells them better."""
_TRACEBACK: Final = "traceback"
_TELLING: Final = re.compile(
    r"\b(?:code|status|rc|errno|signal|error|xid\b.{0,30}?\)|\w*errors?|fail\w*)\b\W{0,12}(-?\d{1,9})"
    r"|(-?\d{1,9}) (?:\w+ )?(?:errors?|fail\w*)",
    re.IGNORECASE,
)
_RATES: Final = {
    "step_s": ("steps took {now:.3g} s at the end, {usual:.3g} s in good runs", True),
    "data_s": ("waiting for data took {now:.3g} s a step at the end, {usual:.3g} s in good runs", True),
    "tokens_per_s": ("{now:.4g} tokens/s at the end, {usual:.4g} in good runs", False),
    "mfu": ("MFU was {now:.3g} at the end, {usual:.3g} in good runs", False),
}
"""Curve -> sentence, and whether more is slower."""


class GoodRun(Frozen, frozen=True, kw_only=True):
    """What the logs of a run that went well contain."""

    name: str
    templates: tuple[Template, ...]
    logs: tuple[LogSummary, ...] = ()
    until: dict[str, int] = {}
    """Source -> the line up to which it went well; a source that is not here went well to its end."""

    def came_as_far(self, step: int | None) -> bool:
        """Whether it went well at this step, too."""
        steps = [log.step for log in self.logs if log.step is not None]
        return not self.until or (step is not None and max(steps, default=-1) >= step)


def good_run(name: str, logs: Sequence[LogSummary], templates: Iterable[Template], *, until_progress: bool) -> GoodRun:
    """A good run. `until_progress`: it failed as well, so only what it said up to its last step is good."""
    until = {log.source: log.progress_line or 0 for log in logs} if until_progress else {}
    kept = (one for one in templates if one.first_line <= until.get(one.source, one.first_line))
    return GoodRun(name=name, templates=tuple(kept), logs=tuple(logs), until=until)


# ----- what good runs complain of as well -----


class _Known(NamedTuple):
    """How a good run complains."""

    times: int
    after: int
    """Lines of its log after the last one."""


class KnownLines:
    """The lines of good runs, and how complaints are compared with them."""

    def __init__(self, good: Sequence[GoodRun]) -> None:
        self.texts = frozenset(one.text for run in good for one in run.templates)
        self._complaints: dict[tuple[str, ...], _Known] = {}
        self._by_length: dict[int, list[list[str]]] = defaultdict(list)
        for text in self.texts:
            words = text.split(" ")
            self._by_length[len(words)].append(words)
        for run in good:
            self._read(run)

    def _read(self, run: GoodRun) -> None:
        lengths = {log.source: run.until.get(log.source, log.lines) for log in run.logs}
        for one in run.templates:
            after = lengths.get(one.source, one.last_line) - one.last_line
            self._note(_complaint(one.sample), one.count, after)
        for log in run.logs:
            for match in log.matches:
                self._note(_complaint(match.text), match.count, lengths[log.source] - (match.last_line or match.line))
            for logged in log.tracebacks:
                self._note((_TRACEBACK, fingerprint(logged.traceback)), 1, lengths[log.source] - logged.line)

    def _note(self, complaint: tuple[str, ...], times: int, after: int) -> None:
        """What was said again after the part that went well excuses nothing."""
        if after >= 0:
            old = self._complaints.get(complaint, _Known(times, after))
            self._complaints[complaint] = _Known(max(old.times, times), min(old.after, after))

    def is_variant(self, text: str) -> bool:
        """Whether a good run has the line with a few other words (a host, a name), none of them of trouble."""
        words = text.split(" ")
        if len(words) < 4 or exceptions.trouble([text]) is not None:
            return False
        needed = ALIKE * len(words)
        return any(sum(map(str.__eq__, words, other)) >= needed for other in self._by_length.get(len(words), ()))

    def of_text(self, text: str) -> _Known | None:
        """How good runs say this."""
        return self._complaints.get(_complaint(text))

    def of_traceback(self, one: LoggedTraceback) -> _Known | None:
        """How good runs go on after this exception."""
        return self._complaints.get((_TRACEBACK, fingerprint(one.traceback)))


def _complaint(text: str) -> tuple[str, ...]:
    """A line without the numbers that tell nothing."""
    return mask(shape(text.encode(errors="replace"))), *(one or two for one, two in _TELLING.findall(text))


def without_known(logs: Sequence[LogSummary], known: KnownLines, new: Sequence[Template]) -> list[LogSummary]:
    """The logs without the complaints that good runs have as well."""
    new_lines: dict[str, set[int]] = defaultdict(set)
    for one in new:
        new_lines[one.source] |= {one.first_line, one.last_line}
    return [_without(log, known, new_lines[log.source]) for log in logs]


def _without(log: LogSummary, known: KnownLines, new: set[int]) -> LogSummary:
    def excused(how: _Known | None, line: int, count: int = 1, length: int = 0) -> bool:
        if how is None or count > OFTEN * how.times + OFTEN or log.lines - line < min(how.after, ENOUGH_AFTER):
            return False
        return new.isdisjoint(range(line + 1, line + 1 + length + AFTER))

    matches = [
        one
        for one in log.matches
        if one.failure_class is FailureClass.NONE
        or not excused(known.of_text(one.text), one.last_line or one.line, one.count)
    ]
    events = [one for one in log.events if one.severity == "fatal" or not excused(known.of_text(one.text), one.line)]
    tracebacks = [
        one
        for one in log.tracebacks
        if not excused(known.of_traceback(one), one.line, length=3 * len(one.traceback.frames))
    ]
    first = log.lines - len(log.tail) + 1
    tail = [
        "" if exceptions.complains(text) and excused(known.of_text(text), line) else text
        for line, text in enumerate(log.tail, first)
    ]
    return msgspec.structs.replace(
        log, matches=tuple(matches), events=tuple(events), tracebacks=tuple(tracebacks), tail=tuple(tail)
    )


# ----- the comparison -----


def new_lines(templates: Iterable[Template], known: KnownLines) -> list[Template]:
    """The templates that no good run has, also not with a few other words; none of tracebacks."""
    fresh = (one for one in templates if one.text not in known.texts and _OF_TRACEBACK.search(one.sample) is None)
    latest = sorted(fresh, key=lambda one: -one.last_line)
    return [one for one in latest[:CONSIDERED] if not known.is_variant(one.text)]


def compare(
    logs: Sequence[LogSummary], templates: Sequence[Template], good: Sequence[GoodRun]
) -> tuple[RunComparison, list[LogSummary]]:
    """The comparison, and the logs without what good runs say as well. `good`: at least one."""
    known = KnownLines(good)
    new = new_lines(templates, known)
    told = without_known(logs, known, new)
    by_source = {log.source: log for log in logs}
    told_by_source = {log.source: log for log in told}
    everyone = {rank for one in templates for rank in one.ranks} | {log.rank for log in logs if log.rank is not None}
    distances = {one.text: _distance(one, told_by_source.get(one.source)) for one in new}
    ordered = sorted(new, key=lambda one: distances[one.text])
    # What is said after the failure is told only where nothing new stands before it.
    shown = [one for one in ordered if not distances[one.text][0]] or ordered
    step = max((log.step for log in logs if log.step is not None), default=None)
    share = _known_share(templates, known)
    comparable = share >= SAME_JOB and any(run.came_as_far(step) for run in good)
    at_end = [one for one in ordered if comparable and _is_at_end(one, by_source.get(one.source))]
    missing = [*_skipped(templates, good), *_stopped(templates, by_source)]
    comparison = RunComparison(
        beside=tuple(run.name for run in good),
        share=round(share, 3),
        new=tuple(_compared_line(one, everyone) for one in shown[:MAX_NEW]),
        new_left_out=len(ordered) - len(shown[:MAX_NEW]),
        at_end=_evidence(at_end[0]) if at_end else None,
        missing=tuple(missing[:MAX_MISSING]),
        slower=tuple(_slower(logs, good)),
        odd=tuple(_odd(new, templates, good, everyone))[:MAX_ODD],
        known=_excused(logs, told),
    )
    return comparison, told


def _known_share(templates: Iterable[Template], known: KnownLines) -> float:
    """How much of the lines good runs have as well."""
    counts = {True: 0, False: 0}
    for one in templates:
        counts[one.text in known.texts] += one.count
    return counts[True] / max(sum(counts.values()), 1)


def _distance(one: Template, log: LogSummary | None) -> tuple[bool, int, str]:
    """What stands right before the failure first, then what was said since then, in order."""
    if log is None:
        return True, one.first_line, one.text
    failed = [*(logged.line for logged in log.tracebacks), *(failure.line for failure in log.launcher)]
    failed += [match.line for match in log.matches if match.severity != "warning"]
    at = min((line for line in failed if line > (log.progress_line or 0)), default=log.lines + 1)
    return one.first_line > at, abs(at - one.first_line), one.text


def _is_at_end(one: Template, log: LogSummary | None) -> bool:
    return log is not None and one.first_line > max(log.progress_line or 0, log.lines - END)


def _skipped(templates: Sequence[Template], good: Sequence[GoodRun]) -> list[ComparedLine]:
    """Lines of all good runs that this one passed by, and the one that came next where it ended."""
    here = {one.text: one for one in templates}
    first, *others = good
    in_all = frozenset(one.text for one in first.templates).intersection(
        *(frozenset(one.text for one in run.templates) for run in others)
    )
    mine = KnownLines([GoodRun(name="", templates=tuple(templates))])
    furthest: Counter[str] = Counter()
    for one in first.templates:
        if one.text in here:
            furthest[one.source] = max(furthest[one.source], one.first_line)
    ordered = sorted(first.templates, key=lambda one: (one.source, one.first_line))
    absent = [
        one
        for one in ordered
        if one.text in in_all
        and one.text not in here
        and furthest[one.source]
        and _OF_TRACEBACK.search(one.sample) is None
        and not mine.is_variant(one.text)
    ]
    passed = [one for one in absent if one.first_line < furthest[one.source]]
    ahead = [one for one in absent if one.first_line > furthest[one.source]]
    found = [
        ComparedLine(text=one.sample, source=one.source, line=one.first_line, why="not said") for one in passed[-2:]
    ]
    return found + [
        ComparedLine(text=one.sample, source=one.source, line=one.first_line, why="comes next in good runs")
        for one in ahead[:1]
    ]


def _stopped(templates: Sequence[Template], logs: Mapping[str, LogSummary]) -> list[ComparedLine]:
    """Lines that came regularly and then no more, long before the end."""
    found = []
    for one in templates:
        log = logs.get(one.source)
        if log is None or one.count < POINTS or log.lines < 10 * POINTS:
            continue
        interval = (one.last_line - one.first_line) / (one.count - 1)
        quiet = log.lines - one.last_line
        if interval >= 2 and quiet > QUIET * interval and one.last_line > 0.3 * log.lines and quiet > 2 * END:
            why = f"came every {interval:.0f} lines, then no more"
            found.append(ComparedLine(text=one.sample, source=one.source, line=one.last_line, why=why))
    return sorted(found, key=lambda one: -(one.line or 0))


def _slower(logs: Sequence[LogSummary], good: Sequence[GoodRun]) -> list[str]:
    """Rates that are far from those of all good runs."""
    found = []
    for name, (sentence, more_is_slower) in _RATES.items():
        now = _values(logs, name)[-LAST_POINTS:]
        usual = [statistics.median(values) for run in good if len(values := _values(run.logs, name)) >= POINTS]
        if len(now) < POINTS or not usual or min(usual) <= 0:
            continue
        value = statistics.median(now)
        slow = value > SLOWER * max(usual) if more_is_slower else value * SLOWER < min(usual)
        if slow:
            found.append(sentence.format(now=value, usual=max(usual) if more_is_slower else min(usual)))
    return found


def _values(logs: Sequence[LogSummary], name: str) -> list[float]:
    return [point.value for log in logs for curve in log.curves if curve.name == name for point in curve.points]


def _odd(
    new: Sequence[Template], templates: Sequence[Template], good: Sequence[GoodRun], everyone: set[int]
) -> list[ComparedLine]:
    """Ranks that alone say something new, or alone do not say what all others do and all ranks of good runs did."""
    if len(everyone) < 3:
        return []
    few = max(1, int(FEW * len(everyone)))
    found = [
        ComparedLine(
            text=one.sample, source=one.source, line=one.first_line, ranks=tuple(one.ranks), why="only they say"
        )
        for one in new
        if 0 < len(one.ranks) <= few
    ]
    ranks = {one.text: set(one.ranks) for run in good for one in run.templates}
    for one in templates:
        lacking = everyone - set(one.ranks)
        if one.ranks and 0 < len(lacking) <= few and lacking <= ranks.get(one.text, set()):
            why = "all others say, they do not"
            lacks = tuple(sorted(lacking))
            found.append(ComparedLine(text=one.sample, source=one.source, line=one.last_line, ranks=lacks, why=why))
    by_ranks = {ranks: list(said) for ranks, said in itertools.groupby(sorted(found, key=_ranks), key=_ranks)}
    return [said[0] for said in by_ranks.values()]


def _ranks(one: ComparedLine) -> tuple[int, ...]:
    return one.ranks


def _excused(before: Sequence[LogSummary], after: Sequence[LogSummary]) -> tuple[str, ...]:
    """The complaints of which good runs have the same."""
    found: list[str] = []
    for old, new in zip(before, after, strict=True):
        found += [one.text for one in old.matches if one not in new.matches and one.severity != "warning"]
        found += [one.text for one in old.events if one not in new.events and one.severity != "info"]
        found += [one.traceback.line for one in old.tracebacks if one not in new.tracebacks]
        found += [one.strip() for one, now in zip(old.tail, new.tail, strict=True) if one != now]
    return tuple(dict.fromkeys(found))[:MAX_KNOWN]


def _compared_line(one: Template, everyone: set[int]) -> ComparedLine:
    ranks = tuple(one.ranks) if len(one.ranks) < len(everyone) else ()
    why = f"{one.count} lines" if one.count > 1 else ""
    return ComparedLine(text=one.sample, source=one.source, line=one.first_line, ranks=ranks, why=why)


def _evidence(one: Template) -> Evidence:
    rank = next(iter(one.ranks)) if len(one.ranks) == 1 else None
    return Evidence(text=one.sample.strip(), source=one.source, line=one.first_line, rank=rank, at=one.first_at)
