"""What an attempt says that a healthy one did not, what it no longer says, and what it says at another rate."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from diagnosis.logs.phase_changes import PhaseBook, is_of_traceback
from diagnosis.logs.templates import OTHERS, Template

TIMES: Final = 5.0
LEAST_LINES: Final = 20
LEAST_STEPS: Final = 32
_WORD: Final = re.compile(r"[A-Za-z]{3,}")


class Rate(NamedTuple):
    """Lines in 100 steps of all logs together."""

    template: Template
    healthy: float
    now: float


class Compared(NamedTuple):
    """Each the first that was said first, of rates the greatest change."""

    new: list[Template]
    gone: list[Template]
    rates: list[Rate]


def compare(book: PhaseBook, healthy: PhaseBook, *, failed: bool = False) -> Compared:
    """`failed`: the other attempt went well until its last step; what it said after that does not count."""
    said = {one.text: one for one in book.templates()}
    usual = {one.text: one for one in healthy.templates()}
    phase_of = healthy.only_in()
    if failed:
        usual = {text: one for text, one in usual.items() if phase_of.get(text) != "the end"}
    new = [one for text, one in said.items() if text not in usual and not is_of_traceback(one.sample)]
    steps, healthy_steps = (sum(one.steps for one in each.phases()) for each in (book, healthy))
    # Whoever made no step has not come to what the healthy attempt said later, and perhaps not through its start-up.
    gone = (
        [one for text, one in usual.items() if text not in said and phase_of.get(text) == "start-up"] if steps else []
    )
    return Compared(
        new=sorted(new, key=_order),
        gone=sorted(filter(_is_of_most, gone), key=_order),
        rates=_rates(said, usual, steps, healthy_steps) if min(steps, healthy_steps) >= LEAST_STEPS else [],
    )


def _is_of_most(one: Template) -> bool:
    """Words, not a table or a dump."""
    return one.text != OTHERS and len(_WORD.findall(one.text)) >= 2


def _rates(said: dict[str, Template], usual: dict[str, Template], steps: int, healthy_steps: int) -> list[Rate]:
    found = []
    for text in said.keys() & usual.keys():
        now, before = 100 * said[text].count / steps, 100 * usual[text].count / healthy_steps
        often, seldom = max(now, before), min(now, before)
        lines = said[text].count if now >= before else usual[text].count
        if lines >= LEAST_LINES and often >= TIMES * seldom:
            found.append(Rate(said[text], before, now))
    return sorted(found, key=lambda one: (-abs(one.now - one.healthy), one.template.text))


def _order(one: Template) -> tuple[float, int, str]:
    return one.first_at or 0.0, one.first_line, one.text
