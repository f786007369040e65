"""A journal that was damaged: what is whole has been replayed, and may not be where the nodes are.

The layer of `Job` below `course`. Nothing is done by itself on a past that nobody knows: where ranks may live, and an
event or an operator's word may be lost, the job is paused and says so. What nodes tell of their ranks is believed over
the journal: an attempt that is newer than any it knows is adopted as it runs.
"""

from __future__ import annotations

from recovery.actions import Resume
from supervisor import messages as m
from supervisor.job.attempt import Attempt
from supervisor.job.casework import Conclude
from supervisor.job.lifecycle import Choose
from supervisor.job.oversight import Oversight

OURS = "unbroken"
"""Who paused, where no person did."""


class Damage(Oversight):
    """What the job makes of `JournalDamaged`, and of ranks that it cannot know."""

    def __init__(self, choose: Choose, conclude: Conclude) -> None:
        super().__init__(choose, conclude)
        self._orders_kept = False
        """What was damaged last cannot have been an operator's word."""

    def _journal_damaged(self, event: m.JournalDamaged) -> None:
        self._numbers_from = max(self._numbers_from, event.attempt)
        self._orders_kept = not event.orders
        lost = f"{event.lost} record{'s' * (event.lost != 1)} lost" if event.lost else "nothing is lost"
        self._note(f"the journal was damaged ({lost}): {event.what}. What is whole counts", loud=True)
        fits = self._fits(event)
        if event.events and not fits:
            self._forget_attempt("the journal has lost how it went on")
        if event.living and not self.is_over and (event.orders or not fits):
            what = "an operator's word may be among what is lost" if fits else "it is not known what was decided since"
            self._pause_for(f"the journal was damaged, and {what}")
        self._wait_for_word()

    @property
    def numbers_from(self) -> int:
        return self._numbers_from

    def _fits(self, event: m.JournalDamaged) -> bool:
        """Whether the replay came to where the nodes were told to be."""
        attempt = self.attempt
        number, formed = (attempt.number, attempt.round is not None) if attempt is not None else (0, False)
        if not event.events:  # decisions may be lost: then it has come further than they tell
            return (number, formed) >= (event.attempt, event.formed)
        return (number, formed, self.is_over) == (event.attempt, event.formed, event.ended)

    def _forget_attempt(self, why: str) -> None:
        """Nodes are left as they are until they have told what they have."""
        if self.attempt is not None:
            self._numbers_from = max(self._numbers_from, self.attempt.number)
            self.attempt.over = True
        for case in self.casebook.unclosed():
            case.close(self.now, why)
        self.attempt, self.outcome, self.ended_at, self._ended, self.held = None, None, None, False, ""
        self.state = "IDLE"
        self._cancel(*list(self.timers))
        self._touch_all()

    def _pause_for(self, reason: str) -> None:
        told = f"paused: {reason}. What runs goes on; look, then `unbroken resume`, `restart` or `stop`"
        if self.pause is None:
            self._operator_pause(m.OverrideGiven(at=self.now, command="pause", reason=reason, by=OURS))
        self._note(told, loud=True)

    def _adopted(self, event: m.WorkersStarted) -> bool:
        """Ranks of an attempt that the journal does not know, or has lost the start of: it goes on as they are."""
        attempt, known = self.attempt, self.attempt.number if self.attempt is not None else 0
        if self.is_over or not event.ranks or event.attempt < max(known, self._numbers_from):
            return False
        if attempt is None or event.attempt > known or (attempt.round is None and not attempt.over):
            self._begin_adopted(event)
            attempt = self.attempt
        elif not attempt.adopted or attempt.over:
            return False
        assert attempt is not None
        node, spoke = self.roster.get(event.node), self._speaker()
        attempt.adopt(event.node, event.ranks, node.address if node is not None else "")
        attempt.stood_at = self.now if attempt.stood_at is None else attempt.stood_at
        self._places = attempt.members
        # Nothing changes for the others: telling all of them for each that reports would cost the square of the nodes.
        self._touched.update((event.node, spoke, self._speaker()))
        return True

    def _begin_adopted(self, event: m.WorkersStarted) -> None:
        self._forget_attempt(f"ranks of attempt {event.attempt} run, of which the journal does not tell")
        self._note(f"attempt {event.attempt} runs, and the journal does not tell of its start: it goes on as it is")
        self.attempt = Attempt(
            number=event.attempt, members=(), formed_at=self.now, resume=Resume(), adopted=True, compared=True
        )
        self._numbers_from = max(self._numbers_from, event.attempt)
        self.started_at = self.now if self.started_at is None else self.started_at
        self.state = "RUNNING"
        if not self._orders_kept:
            self._pause_for(
                "the journal does not tell of the attempt that runs: an operator's word may be lost as well"
            )
        elif self.pause is not None and self.pause.by == OURS:
            self.pause = None
            self._note("what runs is known again, and no operator's word can be lost: the job acts again", loud=True)
