"""A damaged journal: the intact part was replayed, but the nodes may be further than that.

The job does not act on a past that it does not know. If ranks may live, and an event or an operator's command may be
lost, it pauses and says so. It believes what nodes report about their ranks more than the journal: an attempt that is
newer than any in the journal is taken over as it runs.
"""

from __future__ import annotations

from supervisor import messages as m
from supervisor.job import wants as w
from supervisor.job.attempts import Attempts
from supervisor.job.core import Core
from supervisor.job.wants import Wants
from supervisor.notes import note

OURS = "unbroken"
"""Who paused the job, if no person did."""


class Damage:
    def __init__(self, core: Core, attempts: Attempts) -> None:
        self._core, self._attempts = core, attempts
        self._commands_kept = False
        """The newest damage cannot have hit an operator's command."""

    def journal_damaged(self, event: m.JournalDamaged) -> Wants:
        self._commands_kept = not event.orders
        yield w.AttemptsBeen(event.attempt)
        yield note("journal_damaged", loud=True, lost=event.lost or None, what=event.what)
        fits = self._fits(event)
        if event.events and not fits:
            yield w.ForgetAttempt("the journal has lost how it went on")
        if event.living and not self._core.is_over and (event.orders or not fits):
            what = "an operator's command may be lost" if fits else "it is not known what was decided since"
            yield from self._pause(f"the journal was damaged, and {what}")

    def _fits(self, event: m.JournalDamaged) -> bool:
        """Whether the replay ends in the state that the nodes were assigned."""
        attempt = self._attempts.current
        number, formed = (attempt.number, attempt.round is not None) if attempt is not None else (0, False)
        if not event.events:  # decisions may be lost: then it has come further than they tell
            return (number, formed) >= (event.attempt, event.formed)
        return (number, formed, self._core.is_over) == (event.attempt, event.formed, event.ended)

    def _pause(self, reason: str) -> Wants:
        if not self._core.paused:
            yield w.Pause(m.OperatorCommand(at=self._core.now, command="pause", reason=reason, by=OURS))
        yield note("paused_for", loud=True, reason=reason)

    def is_unknown(self, event: m.WorkersStarted) -> bool:
        """Whether the journal does not know the attempt of these ranks, or has lost its start."""
        attempts, attempt = self._attempts, self._attempts.current
        known = attempt.number if attempt is not None else 0
        if self._core.is_over or not event.ranks or event.attempt < max(known, attempts.numbers_from):
            return False
        return self._is_other(event) or (attempt is not None and attempt.adopted and not attempt.over)

    def _is_other(self, event: m.WorkersStarted) -> bool:
        """The attempt of these ranks is newer than the current one, which may not even have started."""
        attempt = self._attempts.current
        if attempt is None or event.attempt > attempt.number:
            return True
        return attempt.round is None and not attempt.over

    def adopt(self, event: m.WorkersStarted) -> Wants:
        """Take the running attempt over as it is."""
        if self._is_other(event):
            number, pause = event.attempt, self._core.pause
            yield w.ForgetAttempt(f"ranks of attempt {number} run, of which the journal does not tell")
            yield note("attempt_adopted", attempt=number)
            yield w.BeginAdopted(number)
            if not self._commands_kept:
                yield from self._pause(
                    "the journal does not tell of the attempt that runs: an operator's command may be lost as well"
                )
            elif pause is not None and pause.by == OURS:
                yield w.ActAgain()
                yield note("acts_again", loud=True)
        yield w.AdoptRanks(event)
