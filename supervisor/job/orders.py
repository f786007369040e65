"""Orders to the scheduler, until each is done with: what may go out now, what is tried again, and when.

Pure. Orders are harmless when repeated, so one that may or may not have been carried out is simply given again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from recovery.actions import OrderOutcome
from supervisor.messages import SchedulerOrder

FIRST_PAUSE_S = 5.0
"""Before an order that found no scheduler is given again; it doubles from there."""
LONGEST_PAUSE_S = 300.0
TRIES = 12
"""About half an hour, then it is given up."""
UNANSWERED_S = 120.0
"""An order without any answer for so long is given again: whoever carried it out has died."""


@dataclasses.dataclass
class Pending:
    """One order that is not done with. Times are Unix seconds."""

    order: SchedulerOrder
    name: str
    """The job's own name for the node."""
    by_policy: bool
    incident: str
    tries: int = 0
    under_way: bool = False
    due: float = 0.0
    """When it may go out; while under way: when it counts as unanswered."""


class OrderBook:
    """Mutable; owned by the job. Of one node an order waits until the one before it is answered."""

    def __init__(self) -> None:
        self._number = 0
        self._pending: list[Pending] = []

    def add(
        self,
        kind: Literal["drain", "undrain", "requeue", "cancel", "look", "end_step"],
        *,
        node: str = "",
        name: str = "",
        reason: str = "",
        exclude: tuple[str, ...] = (),
        avoid: tuple[str, ...] = (),
        by_policy: bool,
        incident: str = "",
    ) -> Pending:
        """A new order; it takes the place of those about the same node that nobody is carrying out."""
        self._pending = [held for held in self._pending if held.order.node != node or held.under_way]
        self._number += 1
        order = SchedulerOrder(number=self._number, kind=kind, node=node, reason=reason, exclude=exclude, avoid=avoid)
        pending = Pending(order, name, by_policy, incident)
        self._pending.append(pending)
        return pending

    @property
    def under_way(self) -> bool:
        return any(held.under_way for held in self._pending)

    @property
    def requeue(self) -> Pending | None:
        return next((held for held in self._pending if held.order.kind == "requeue"), None)

    @property
    def of_nodes(self) -> list[Pending]:
        return [held for held in self._pending if held.order.node]

    def open(self, allowed: Callable[[Pending], bool]) -> bool:
        """Whether an answer may still come."""
        return any(held.under_way or allowed(held) for held in self._pending)

    def hasten(self, now: float) -> None:
        """What is to be tried again is tried now."""
        for held in self._pending:
            if not held.under_way:
                held.due = min(held.due, now)

    def give_up(self) -> list[Pending]:
        """Nothing more is waited for: the orders that were still to be answered."""
        given_up, self._pending = self._pending, []
        return given_up

    def about(self, node: str) -> bool:
        """Whether anything is still to be told about this node."""
        return any(held.order.node == node for held in self._pending)

    def drop_requeue(self) -> None:
        """It is not wanted any more. (One that is under way cannot be taken back.)"""
        self._pending = [held for held in self._pending if held.order.kind != "requeue" or held.under_way]

    def drop_cancel(self) -> None:
        """There is nothing to be taken back."""
        self._pending = [held for held in self._pending if held.order.kind != "cancel"]

    def forget_requeue(self) -> None:
        """The job was started again: whatever became of it is of no interest."""
        self._pending = [held for held in self._pending if held.order.kind not in ("requeue", "look")]

    def take(self, now: float, allowed: Callable[[Pending], bool]) -> list[SchedulerOrder]:
        """The orders to be given out now."""
        self._pending = [held for held in self._pending if held.due > now or not self._is_overtaken(held)]
        taken: list[SchedulerOrder] = []
        busy: set[str] = set()
        for held in self._pending:
            if held.order.node not in busy and held.due <= now and allowed(held):
                held.under_way, held.tries, held.due = True, held.tries + 1, now + UNANSWERED_S
                taken.append(held.order)
            busy.add(held.order.node)
        return taken

    def next_due(self, allowed: Callable[[Pending], bool]) -> float | None:
        """When `take` would have something to give out, if it took everything that is due just now."""
        first: dict[str, Pending] = {}
        for held in self._pending:
            first.setdefault(held.order.node, held)
        return min((held.due for held in first.values() if allowed(held)), default=None)

    def again(self, now: float) -> None:
        """A new controller: what was under way is to be given out once more, as soon as it may."""
        for held in self._pending:
            if held.under_way:
                held.under_way, held.due = False, now

    def _is_overtaken(self, held: Pending) -> bool:
        """Whether a newer order about the same node makes it needless to give this one again."""
        node, number = held.order.node, held.order.number
        return any(other.order.node == node and other.order.number > number for other in self._pending)

    def answered(
        self, number: int, outcome: OrderOutcome, now: float, longest_s: float = LONGEST_PAUSE_S
    ) -> tuple[Pending, bool] | None:
        """The order that was answered, and whether it is done with; None: it was before. `longest_s`: pause at most."""
        held = next((held for held in self._pending if held.order.number == number), None)
        if held is None:
            return None
        if outcome == "unavailable" and held.tries < TRIES and not self._is_overtaken(held):
            held.under_way = False
            held.due = now + min(longest_s, FIRST_PAUSE_S * 2 ** max(0, held.tries - 1))
            return held, False
        self._pending.remove(held)
        return held, True
