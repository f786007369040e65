"""What a complaint is about, in words that no rule knows: a name with a fixed meaning, else what is wrong with what.

The words are data: `complaints.toml`. This is read where rules are silent, so it costs healthy output nothing.
"""

from __future__ import annotations

import functools
import re
from typing import Final, NamedTuple

from diagnosis.tables import load
from diagnosis.taxonomy import FailureClass

MAX_TEXT: Final = 1000
BY_NAME: Final = 0.6
"""How sure a name is, a trouble with its subject, and a trouble alone."""
BY_WORDS: Final = 0.47
BY_TROUBLE: Final = 0.4


class Complaint(NamedTuple):
    """A class that a complaint may be of."""

    failure_class: FailureClass
    confidence: float
    by_name: bool = False


class _Table(NamedTuple):
    names: list[tuple[FailureClass, re.Pattern[str]]]
    troubles: list[tuple[str, re.Pattern[str]]]
    subjects: list[tuple[str, re.Pattern[str]]]
    cells: dict[str, dict[str, FailureClass]]
    drained: list[tuple[FailureClass, re.Pattern[str]]]


_DRAINED: Final = re.compile(
    r"^(?P<reason>\S.{1,78}?)\s{1,20}[\w-]{1,32}(?:\(\d{1,10}\))?\s{1,20}\d{4}-\d\d-\d\dT[\d:]{8}\s{1,20}"
    r"(?:[A-Z]{3,12}\S{0,3}\s{1,20})?(?:[\w.,-]|\[[\d,-]{1,120}\]){1,200}\s*$"
)
"""A row of `sinfo -R`: reason, user, time, perhaps state, nodes."""


@functools.cache
def _table() -> _Table:
    """Compiled when a complaint is read for the first time: most processes never read one."""
    rows = load("diagnosis", "complaints.toml")
    words = {
        kind: [(name, re.compile(regex, re.IGNORECASE)) for name, regex in rows[kind].items()]
        for kind in ("trouble", "subject")
    }
    names = [
        (FailureClass(row["class"]), re.compile(rf"(?<![A-Za-z])(?:{row['regex']})(?!\w)")) for row in rows["name"]
    ]
    alone = rows["cell"]["nothing"]
    always = {trouble: FailureClass(alone[trouble]) for trouble in ("denied", "full")}
    cells = {
        subject: always | {trouble: FailureClass(one) for trouble, one in row.items()}
        for subject, row in rows["cell"].items()
    }
    drained = [(FailureClass(name), re.compile(regex, re.IGNORECASE)) for name, regex in rows["drained"].items()]
    return _Table(names, words["trouble"], words["subject"], cells, drained)


_COUNT_OF_NONE: Final = re.compile(
    r"\b(?!\S{0,60}(?:Error|Exception)\b)[A-Za-z][\w /()-]{2,60}?"
    r"(?:\s?[:=]\s{0,4}|(?<=lost )|(?<=failed )|(?<=killed ))0(?=\s*(?:[,;|)\]]|$))"
)


def without_zeros(text: str) -> str:
    """The text without counts of nothing (`workers killed by user: 0`)."""
    return _COUNT_OF_NONE.sub("", text)


def named(text: str) -> FailureClass | None:
    """The class that a name with a fixed meaning tells."""
    return next((one for one, regex in _table().names if regex.search(without_zeros(text[:MAX_TEXT]))), None)


def readings(text: str) -> list[Complaint]:
    """What a line may be about, the most telling first; empty if it does not complain."""
    text, table = without_zeros(text[:MAX_TEXT]), _table()
    row = _DRAINED.match(text)
    if row is not None:
        of_row = [one for one, regex in table.drained if regex.search(row["reason"])]
        return [Complaint(one, BY_NAME, by_name=True) for one in of_row[:1]]
    found = [Complaint(one, BY_NAME, by_name=True) for one, regex in table.names if regex.search(text)]
    troubles = [name for name, regex in table.troubles if regex.search(text)]
    subjects = [name for name, regex in table.subjects if regex.search(text)]
    for subject in subjects if troubles else ():
        known = table.cells[subject]
        cell = next((known[trouble] for trouble in troubles if trouble in known), known.get("any"))
        found += [Complaint(cell, BY_WORDS)] if cell is not None else []
    alone = table.cells["nothing"]
    found += [Complaint(alone[trouble], BY_TROUBLE) for trouble in troubles if trouble in alone]
    first: dict[FailureClass, Complaint] = {}
    for one in found:
        first.setdefault(one.failure_class, one)
    return list(first.values())
