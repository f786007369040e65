"""In which phase of the training each line of a log stands: start-up, training, checkpoint, evaluation, the end.

Start-up lasts until a step counter has grown; then it trains, and between two steps it may save a checkpoint or
evaluate, as its lines say. What follows the last step is the end. Memory is bounded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple, get_args

from diagnosis.kernel.stamps import moment
from diagnosis.logs.step_places import Phase
from diagnosis.logs.steps import StepReader
from diagnosis.logs.templates import MAX_BYTES

PhaseName = Literal["start-up", "training", "checkpoint", "evaluation", "the end"]
Episodic = Literal["checkpoint", "evaluation"]

MAX_FORMS: Final = 4000
"""Forms of lines that are told apart in one phase of one log."""
WINDOWS: Final = 16
"""Equal parts of the training, at least; twice as many at most."""
STEPS: Final = 4
"""Steps of a part at first."""
DURATIONS: Final = 64
HEAD: Final = 200
"""Bytes of a line in which its time is."""
LINE: Final = 4 * MAX_BYTES
"""Bytes of a line in which steps and phases are looked for."""

_SAVED: Final = re.compile(r"\bsaved\b|\b(?:checkpoint|ckpt) (?:written|done|complete)")
_SCORED: Final = re.compile(r"\b(?:val|valid|validation|eval|evaluation)[ _/.\-]{0,2}(?:loss|ppl|perplexity|acc)")
TRUST: Final = 16
"""A form that showed a step, or nothing, so often in a row is believed,"""
CHECK: Final = 16
"""and read again every so many lines."""


class First(NamedTuple):
    """Where a form of line was first seen."""

    line: int
    sample: bytes


Forms = dict[str, First]
"""By the text of their template."""


class Episode:
    """One checkpoint or evaluation, from the step before it to the step after it."""

    def __init__(self, line: int, head: bytes) -> None:
        self.line = line
        self.began = self.ended = head
        self.forms: Forms = {}

    @property
    def seconds(self) -> float | None:
        """How long it took, where its lines tell their times."""
        return seconds_between(self.began, self.ended)


class Episodes:
    """All checkpoints, or all evaluations, of one log."""

    def __init__(self) -> None:
        self.times = self.lines = 0
        self.seen: dict[str, tuple[int, First]] = {}
        """Form -> how many episodes before the last one had it, and where it was last."""
        self.took: list[float] = []
        """Seconds of the newest ones before the last."""
        self.last: Episode | None = None

    def begin(self, line: int, head: bytes) -> Episode:
        """The next one begins."""
        if self.last is not None:
            for form, first in self.last.forms.items():
                if form in self.seen or len(self.seen) < MAX_FORMS:
                    self.seen[form] = (self.seen.get(form, (0, first))[0] + 1, first)
            took = self.last.seconds
            self.took = self.took if took is None else [*self.took[1 - DURATIONS :], took]
        self.times += 1
        self.last = Episode(line, head)
        return self.last


class Window:
    """A part of the training: so many steps, and how often each form of line came."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.steps = 0
        self.forms: Counter[str] = Counter()


class _Habit:
    """What lines of one form have shown."""

    __slots__ = ("is_step", "streak")

    def __init__(self) -> None:
        self.is_step = False
        self.streak = 0

    def note(self, is_step: bool) -> None:
        self.streak = self.streak + 1 if is_step is self.is_step else 1
        self.is_step = is_step

    def is_known(self) -> bool:
        """It need not be read this time."""
        if self.streak < TRUST:
            return False
        self.streak += 1
        return self.streak % CHECK != 0


class LogPhases:
    """One log while it is read, and after."""

    def __init__(self, source: str, rank: int | None = None) -> None:
        self.source, self.rank = source, rank
        self.steps = 0
        self.step_line = self.last_line = 0
        """The lines of the newest step, and the last one."""
        self.first_head = self.step_head = self.start_head = self.last_head = b""
        """The first bytes of the first line, the newest and the first step's, and the last one."""
        self.start_up: Forms = {}
        self.training: Forms = {}
        self.training_lines = 0
        self.start_lines = 0
        self.episodes: dict[Episodic, Episodes] = {name: Episodes() for name in get_args(Episodic)}
        self.windows: list[Window] = []
        self.since: Forms = {}
        """Since the newest step, but for checkpoints and evaluations."""
        self.counts: Counter[str] = Counter()
        """The same, how often."""
        self._reader = StepReader()
        self._open: dict[Episodic, Episode] = {}
        self._newest: Episode | None = None
        """Of the open ones."""
        self._habits: dict[str, _Habit] = {}
        self._width = STEPS

    @property
    def ended_in(self) -> PhaseName:
        """The phase that its last lines are of."""
        if not self.steps:
            return "start-up"
        return "the end" if self._reader.phase == "end" else self._reader.phase or "training"

    def feed(self, lines: Sequence[bytes], forms: Sequence[str], marked: Iterable[int], first_line: int) -> None:
        """The next lines with their forms; `marked`: those that may tell a step or a phase."""
        self.first_head = self.first_head or lines[0][:HEAD]
        at = 0
        for index in marked:
            self._take(self._reader.phase, lines[at:index], forms[at:index], first_line + at)
            self._read(lines[index], forms[index], first_line + index)
            at = index + 1
        self._take(self._reader.phase, lines[at:], forms[at:], first_line + at)
        self.last_line = first_line + len(lines) - 1
        self.last_head = lines[-1][:HEAD]

    def _read(self, line: bytes, form: str, number: int) -> None:
        """A line that may tell a step or a phase."""
        habit = self._habits.get(form)
        if habit is None:
            habit = self._habits[form] = _Habit()
            if len(self._habits) > MAX_FORMS:
                self._habits.clear()
        elif habit.is_known():
            if habit.is_step:
                self._reader.phase = ""
                self._step(line, form, number)
            else:
                self._take(self._reader.phase, [line], [form], number)
            return
        step, phase = self._reader.step, self._reader.phase
        self._reader.feed(line[:LINE] + b"\n")
        is_step = self._reader.step is not None and (step is None or self._reader.step > step)
        if is_step or self._reader.phase == phase == "":
            habit.note(is_step)
        if is_step:
            self._step(line, form, number)
            return
        phase = self._reader.phase or phase  # the line that ends a phase is of it
        if not phase:
            low = form.lower()
            phase = "checkpoint" if _SAVED.search(low) else "evaluation" if _SCORED.search(low) else ""
            habit.streak = 0 if phase else habit.streak
        self._take(phase, [line], [form], number)

    def _take(self, phase: Phase, lines: Sequence[bytes], forms: Sequence[str], first_line: int) -> None:
        """Lines of one phase."""
        if not lines:
            return
        if not self.steps:
            _note(self.start_up, lines, forms, first_line)
            self.start_lines += len(lines)
        elif phase in ("checkpoint", "evaluation"):
            known = self.episodes[phase]
            episode = self._open.get(phase)
            if episode is None:
                episode = self._open[phase] = known.begin(first_line, lines[0][:HEAD])
            if self._newest is not None and self._newest is not episode:
                self._newest.ended = lines[0][:HEAD]
            self._newest = episode
            _note(episode.forms, lines, forms, first_line)
            episode.ended = lines[-1][:HEAD]
            known.lines += len(lines)
        else:
            _note(self.since, lines, forms, first_line)
            for form in forms:
                self.counts[form] += 1
            self.counts = _most(self.counts)

    def _step(self, line: bytes, form: str, number: int) -> None:
        """One was made: what was open is over."""
        if self._newest is not None:
            self._newest.ended, self._newest = line[:HEAD], None
            self._open.clear()
        if not self.windows or self.windows[-1].steps >= self._width:
            self._merge()
            self.windows.append(Window(number))
        window = self.windows[-1]
        window.steps += 1
        window.forms[form] += 1
        self.training_lines += 1
        if form not in self.training:
            _note(self.training, [line], [form], number)
        if self.counts:
            self._leave_behind(window)
        self.steps += 1
        self.step_line, self.step_head = number, line[:HEAD]
        self.start_head = self.start_head or line[:HEAD]

    def _leave_behind(self, window: Window) -> None:
        """What came since the step before was of the training."""
        self.training_lines += self.counts.total()
        for key, count in self.counts.items():
            window.forms[key] += count
        window.forms = _most(window.forms)
        for key, first in self.since.items():
            if key not in self.training and len(self.training) < MAX_FORMS:
                self.training[key] = first
        self.since.clear()
        self.counts.clear()

    def _merge(self) -> None:
        """Parts twice as long where there are too many."""
        if len(self.windows) < 2 * WINDOWS:
            return
        for one, other in zip(self.windows[::2], self.windows[1::2], strict=True):
            one.steps += other.steps
            one.forms.update(other.forms)
            one.forms = _most(one.forms)
        del self.windows[1::2]
        self._width *= 2


def seconds_between(one: bytes, other: bytes) -> float | None:
    """Between the times of two lines, where both tell one."""
    first, last = (moment(head.decode(errors="replace")) for head in (one, other))
    return last - first if first is not None and last is not None and last >= first else None


def _note(known: Forms, lines: Sequence[bytes], forms: Sequence[str], first_line: int) -> None:
    for index, form in enumerate(forms):
        if form not in known and len(known) < MAX_FORMS:
            known[form] = First(first_line + index, lines[index][:MAX_BYTES])


def _most(counts: Counter[str]) -> Counter[str]:
    return counts if len(counts) <= 2 * MAX_FORMS else Counter(dict(counts.most_common(MAX_FORMS)))
