"""A journal that was damaged: what is whole has been replayed, and may not be where the nodes are.

Nothing is done by itself on a past that nobody knows: where ranks may live, and an event or an operator's command may
be lost, the job is paused and says so. What nodes tell of their ranks is believed over the journal: an attempt that is
newer than any it knows is adopted as it runs.
"""

from __future__ import annotations

from supervisor import messages as m
from supervisor.job import wants as w
from supervisor.job.attempts import Attempts
from supervisor.job.core import Core
from supervisor.job.wants import Wants
from supervisor.notes import note

OURS = "unbroken"
"""Who paused, where no person did."""


class Damage:
    def __init__(self, core: Core, attempts: Attempts) -> None:
        self._core, self._attempts = core, attempts
        self._commands_kept = False
        """What was damaged last cannot have been an operator's command."""

    def journal_damaged(self, event: m.JournalDamaged) -> Wants:
        self._commands_kept = not event.orders
        yield w.AttemptsBeen(event.attempt)
        yield note("journal_damaged", loud=True, lost=event.lost or None, what=event.what)
        fits = self._fits(event)
        if event.events and not fits:
            yield w.ForgetAttempt("the journal has lost how it went on")
        if event.living and not self._core.is_over and (event.orders or not fits):
            what = "an operator's word may be among what is lost" if fits else "it is not known what was decided since"
            yield from self._pause(f"the journal was damaged, and {what}")

    def _fits(self, event: m.JournalDamaged) -> bool:
        """Whether the replay came to where the nodes were told to be."""
        attempt = self._attempts.current
        number, formed = (attempt.number, attempt.round is not None) if attempt is not None else (0, False)
        if not event.events:  # decisions may be lost: then it has come further than they tell
            return (number, formed) >= (event.attempt, event.formed)
        return (number, formed, self._core.is_over) == (event.attempt, event.formed, event.ended)

    def _pause(self, reason: str) -> Wants:
        if not self._core.paused:
            yield w.Pause(m.OverrideGiven(at=self._core.now, command="pause", reason=reason, by=OURS))
        yield note("paused_for", loud=True, reason=reason)

    def is_unknown(self, event: m.WorkersStarted) -> bool:
        """Ranks of an attempt that the journal does not know, or has lost the start of."""
        attempts, attempt = self._attempts, self._attempts.current
        known = attempt.number if attempt is not None else 0
        if self._core.is_over or not event.ranks or event.attempt < max(known, attempts.numbers_from):
            return False
        return self._is_other(event) or (attempt is not None and attempt.adopted and not attempt.over)

    def _is_other(self, event: m.WorkersStarted) -> bool:
        """The current attempt is an older one, or has not started."""
        attempt = self._attempts.current
        if attempt is None or event.attempt > attempt.number:
            return True
        return attempt.round is None and not attempt.over

    def adopt(self, event: m.WorkersStarted) -> Wants:
        """The attempt goes on as its ranks are."""
        if self._is_other(event):
            number, pause = event.attempt, self._core.pause
            yield w.ForgetAttempt(f"ranks of attempt {number} run, of which the journal does not tell")
            yield note("attempt_adopted", attempt=number)
            yield w.BeginAdopted(number)
            if not self._commands_kept:
                yield from self._pause(
                    "the journal does not tell of the attempt that runs: an operator's word may be lost as well"
                )
            elif pause is not None and pause.by == OURS:
                yield w.ActAgain()
                yield note("acts_again", loud=True)
        yield w.AdoptRanks(event)
