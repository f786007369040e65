"""What is not as it was in the same phase before: other lines, lines that are missing, another rate, a longer pause.

The last checkpoint is compared with those before it, what follows the last step with all of the log, and of the lines
in training how often they come a step. (After L4's temporal differences, FSE'25.)
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from diagnosis import shapes
from diagnosis.logs.phases import HEAD, LINE, Episodes, First, Forms, LogPhases, PhaseName, Window, seconds_between
from diagnosis.logs.step_places import places
from diagnosis.logs.templates import MAX_BYTES, TemplateBook, mask
from diagnosis.signals import Frozen, clean_text

MAX_CHANGES: Final = 16
"""Of one kind in one phase of one log."""
MAX_LOGS: Final = 20_000
MAX_JOINED: Final = 4000
_ORDER: Final = ("long", "missing", "new", "more", "less")
FORMS_KEPT: Final = 20_000
FASTER: Final = 3.0
LONGER: Final = 3.0
LONG_S: Final = 5.0
"""A checkpoint that takes so many times as long as the longest before it, and so much longer."""
LEAST_EPISODES: Final = 2
"""What so many had, and the last one has not, is missing."""
LEAST_PARTS: Final = 3
"""A rate lasts so many parts of the training at least, before a change and after it."""
LEAST_LINES: Final = 3
"""Lines of a part from which on a rate is told."""

_OF_TRACEBACK: Final = re.compile(
    r"^(?:\[[\w ]{1,16}\]:? ?|\d{1,6}: )?(?:\s{2,}\S|\s*\^)|(?:\s|^)(?:Traceback \(|File \")"
)


class Change(Frozen, frozen=True, kw_only=True):
    """One thing that is not as it was."""

    kind: Literal["new", "missing", "long", "more", "less"]
    phase: PhaseName
    source: str
    line: int
    """Where it is, or since when it is so."""
    text: str = ""
    """The template."""
    sample: str = ""
    before: float = 0.0
    """Of `long` seconds, of `more` and `less` lines in 100 steps, of `missing` how many of the episodes had it."""
    now: float = 0.0
    ranks: tuple[int, ...] = ()


class Span(Frozen, frozen=True, kw_only=True):
    """How much of a log a phase is."""

    phase: PhaseName
    first_line: int
    """Of the last time it came, where it comes again and again."""
    lines: int
    """In all."""
    times: int = 1
    usual_s: float | None = None
    last_s: float | None = None
    """Seconds that it took before, and the last time, where lines tell."""


class Phases(Frozen, frozen=True, kw_only=True):
    """One log by its phases; none where it shows no step."""

    source: str
    rank: int | None = None
    steps: int = 0
    spans: tuple[Span, ...] = ()
    ended_in: PhaseName = "training"


class PhaseBook(TemplateBook):
    """A book of templates that also keeps apart in which phase they are said.

    A log is to be fed from its beginning to its end before the next one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[bytes, tuple[str, bool]] = {}
        """Form of a line -> its template, and whether it may tell a step or a phase."""
        self._log: LogPhases | None = None
        self._told: list[Phases] = []
        self._joined = _Joined()
        self._without_steps: set[int] = set()
        self._phases: dict[str, set[PhaseName]] = {}

    def feed(self, source: str, block: bytes, first_line: int, rank: int | None = None) -> None:
        """Whole lines of one log, without the last newline; `first_line`: the number of the first, from 1."""
        super().feed(source, block, first_line, rank)
        if self._log is None or self._log.source != source:
            self._close()
            self._log = LogPhases(source, rank)
        lines = block.split(b"\n")
        if len(self._texts) > FORMS_KEPT:
            self._texts.clear()
        told = list(map(self._text, shapes.shape(block).split(b"\n")))
        marked = [number for number, (_, may_tell) in enumerate(told) if may_tell]
        self._log.feed(lines, [text for text, _ in told], marked, first_line)

    def _text(self, form: bytes) -> tuple[str, bool]:
        found = self._texts.get(form)
        if found is None:
            found = (mask(form), places(shapes.shape(form[:LINE].lower())) is not None)
            self._texts[form] = found
        return found

    def _close(self) -> None:
        """The log is at its end."""
        if self._log is not None and self._log.rank is not None and not self._log.steps:
            self._without_steps.add(self._log.rank)
        if self._log is not None and self._log.steps and len(self._told) < MAX_LOGS:
            self._told.append(phases_of(self._log))
            self._joined.note(changes_of(self._log), self._log.rank)
            for phase, forms in _forms(self._log):
                for form in forms:
                    if form in self._phases or len(self._phases) < FORMS_KEPT:
                        self._phases.setdefault(form, set()).add(phase)
        self._log = None

    def phases(self) -> list[Phases]:
        """Of every log that shows steps, in order."""
        self._close()
        return list(self._told)

    def changes(self) -> list[Change]:
        """What is not as it was before in the same phase, of all logs: what few of them tell first."""
        self._close()
        return self._joined.told()

    def ended_in(self) -> dict[int, PhaseName]:
        """Rank -> the phase in which its log ends; `start-up` where it shows no step."""
        self._close()
        told = {one.rank: one.ended_in for one in self._told if one.rank is not None}
        return {**dict.fromkeys(sorted(self._without_steps), "start-up"), **told}

    def only_in(self) -> dict[str, PhaseName]:
        """Text of a template -> the only phase in which it is said."""
        self._close()
        return {text: next(iter(phases)) for text, phases in self._phases.items() if len(phases) == 1}


class _Alike:
    """What several logs tell alike."""

    __slots__ = ("change", "ranks", "times")

    def __init__(self, change: Change) -> None:
        self.change = change
        self.times = 0
        self.ranks: set[int] = set()


class _Joined:
    """The changes of all logs."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], _Alike] = {}

    def note(self, changes: Iterable[Change], rank: int | None) -> None:
        """Those of one log."""
        for change in changes:
            key = change.kind, change.phase, change.text
            if key not in self._found and len(self._found) >= MAX_JOINED:
                continue
            alike = self._found.setdefault(key, _Alike(change))
            alike.times += 1
            if rank is not None:
                alike.ranks.add(rank)

    def told(self) -> list[Change]:
        """Each once, with its ranks; of one kind what most logs tell comes last."""
        ordered = sorted(
            self._found.values(), key=lambda one: (_ORDER.index(one.change.kind), one.times, one.change.line)
        )
        return [msgspec.structs.replace(one.change, ranks=tuple(sorted(one.ranks))) for one in ordered]


def is_of_traceback(line: str) -> bool:
    """A frame, or the code in it: tracebacks are told elsewhere."""
    return _OF_TRACEBACK.search(line[:HEAD]) is not None


# ----- one log -----


def phases_of(log: LogPhases) -> Phases:
    """The phases of a log that was read to its end."""
    return Phases(source=log.source, rank=log.rank, steps=log.steps, spans=tuple(_spans(log)), ended_in=log.ended_in)


def changes_of(log: LogPhases) -> list[Change]:
    """What changed in them."""
    return [*_of_episodes(log), *_of_the_end(log), *_of_rates(log)]


def _forms(log: LogPhases) -> Iterator[tuple[PhaseName, Iterable[str]]]:
    yield "start-up", log.start_up
    yield "training", log.training
    for name, known in log.episodes.items():
        yield name, known.seen
        yield name, known.last.forms if known.last is not None else ()
    yield "the end", [form for form in log.since if form not in log.training]


def _spans(log: LogPhases) -> Iterator[Span]:
    if log.start_lines:
        took = seconds_between(log.first_head, log.start_head)
        yield Span(phase="start-up", first_line=1, lines=log.start_lines, last_s=took)
    yield Span(phase="training", first_line=log.windows[0].line, lines=log.training_lines, times=log.steps)
    for name, known in log.episodes.items():
        if known.last is not None:
            yield Span(
                phase=name,
                first_line=known.last.line,
                lines=known.lines,
                times=known.times,
                usual_s=statistics.median(known.took) if known.took else None,
                last_s=known.last.seconds,
            )
    if log.last_line > log.step_line:
        took = seconds_between(log.step_head, log.last_head)
        lines = log.last_line - log.step_line
        yield Span(phase="the end", first_line=log.step_line + 1, lines=lines, last_s=took)


def _of_episodes(log: LogPhases) -> Iterator[Change]:
    """How the last checkpoint, or evaluation, differs from those before it."""
    for name, known in log.episodes.items():
        last, before = known.last, known.times - 1
        if last is None or not before:
            continue
        took = last.seconds
        if took is not None and known.took and took > max(LONGER * max(known.took), max(known.took) + LONG_S):
            usual = statistics.median(known.took)
            yield Change(kind="long", phase=name, source=log.source, line=last.line, before=usual, now=took)
        # What all of them had, in its order: where it stopped.
        missing = [
            (form, first)
            for form, (count, first) in known.seen.items()
            if count == before >= LEAST_EPISODES and form not in last.forms and form not in log.training
        ]
        yield from (
            _change(log, "missing", name, form, first, line=last.line, before=float(before))
            for form, first in missing[:MAX_CHANGES]
        )
        new = [(form, first) for form, first in last.forms.items() if not _said(log, known, form, first)]
        yield from (_change(log, "new", name, form, first) for form, first in new[:MAX_CHANGES])


def _said(log: LogPhases, known: Episodes, form: str, first: First) -> bool:
    return form in known.seen or form in log.training or form in log.start_up or _is_code(first)


def _is_code(first: First) -> bool:
    return is_of_traceback(first.sample.decode(errors="replace"))


def _of_the_end(log: LogPhases) -> Iterator[Change]:
    """What is said after the last step, and was never said before."""
    others: list[Forms | dict[str, tuple[int, First]]] = [log.training, log.start_up]
    for known in log.episodes.values():
        others += [known.seen, known.last.forms] if known.last is not None else []
    new = [
        (form, first)
        for form, first in log.since.items()
        if not any(form in forms for forms in others) and not _is_code(first)
    ]
    yield from (_change(log, "new", "the end", form, first) for form, first in new[:MAX_CHANGES])


def _change(
    log: LogPhases,
    kind: Literal["new", "missing", "more", "less"],
    phase: PhaseName,
    form: str,
    first: First,
    *,
    line: int | None = None,
    before: float = 0.0,
    now: float = 0.0,
) -> Change:
    return Change(
        kind=kind,
        phase=phase,
        source=log.source,
        line=first.line if line is None else line,
        text=form,
        sample=clean_text(first.sample.decode(errors="replace"), MAX_BYTES),
        before=before,
        now=now,
    )


# ----- rates -----


class _Rate(NamedTuple):
    """Lines of one form in 100 steps, before a part of the training and from it on."""

    part: int
    before: float
    now: float


def _of_rates(log: LogPhases) -> list[Change]:
    """Lines that come far more or far less often a step from some part of the training on, to its end."""
    parts = log.windows if len(log.windows) < 2 or _is_whole(log.windows) else log.windows[:-1]
    if len(parts) < 2 * LEAST_PARTS:
        return []
    found: list[tuple[float, Change]] = []
    for form in {form for part in parts for form, count in part.forms.items() if count >= LEAST_LINES}:
        rate = _rate([part.forms[form] for part in parts], [part.steps for part in parts])
        first = log.training.get(form)
        if rate is None or first is None:
            continue
        kind: Literal["more", "less"] = "more" if rate.now > rate.before else "less"
        line = parts[rate.part].line
        change = _change(log, kind, "training", form, first, line=line, before=rate.before, now=rate.now)
        found.append((-abs(rate.now - rate.before), change))
    found.sort(key=lambda one: (one[0], one[1].line, one[1].text))
    return [change for _, change in found[:MAX_CHANGES]]


def _is_whole(parts: Sequence[Window]) -> bool:
    return parts[-1].steps >= parts[-2].steps


def _rate(counts: Sequence[int], steps: Sequence[int]) -> _Rate | None:
    """Where the rate changed for good, if it did. Bursts are no rate: medians count, against nearly the most before."""
    values = [100 * count / step for count, step in zip(counts, steps, strict=True)]
    if max(counts) < LEAST_LINES or max(values) < FASTER * (min(values) + 0.01):
        return None
    sums = [0.0, *itertools.accumulate(values)]
    total, n = sums[-1], len(values)
    cuts = range(LEAST_PARTS, n - LEAST_PARTS + 1)
    part = max(cuts, key=lambda cut: abs(sums[cut] / cut - (total - sums[cut]) / (n - cut)) * (cut * (n - cut)) ** 0.5)
    before, after = values[:part], values[part:]
    low, high = sorted((before, after), key=statistics.median)
    often = statistics.median(high)
    lines = statistics.median(counts[:part] if high is before else counts[part:])
    if lines < LEAST_LINES or often < FASTER * (sorted(low)[int(0.9 * (len(low) - 1))] + 0.01):
        return None
    return _Rate(part, statistics.median(before), statistics.median(after))
