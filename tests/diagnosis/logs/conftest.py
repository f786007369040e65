"""Texts that a pattern matches, at random: gaps of any length, any of its alternatives, any case."""

from __future__ import annotations

import random
import re
import sys
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    from re import _constants as of  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]
else:
    import sre_constants as of
    import sre_parse as parser

PLAIN = [chr(code) for code in range(32, 127)]
LONGEST = 60
CATEGORIES = {
    of.CATEGORY_DIGIT: r"\d",
    of.CATEGORY_NOT_DIGIT: r"\D",
    of.CATEGORY_SPACE: r"\s",
    of.CATEGORY_NOT_SPACE: r"\S",
    of.CATEGORY_WORD: r"\w",
    of.CATEGORY_NOT_WORD: r"\W",
}


class Texts:
    """Of one pattern. Lookarounds and anchors are left alone: not every text that is made matches."""

    def __init__(self, pattern: str, chance: random.Random) -> None:
        self._tree = parser.parse(pattern, re.IGNORECASE)
        self._chance = chance

    def one(self) -> str:
        """The next one."""
        text = self._made(self._tree)
        return self._chance.choice([str, str.upper, str.lower, str.swapcase])(text)

    def _made(self, tree: Any) -> str:
        return "".join(self._part(code, told) for code, told in tree)

    def _part(self, code: Any, told: Any) -> str:
        if code == of.LITERAL:
            return chr(told)
        if code == of.ANY:
            return self._chance.choice(PLAIN)
        if code == of.NOT_LITERAL:
            return self._chance.choice([one for one in PLAIN if one != chr(told)])
        if code == of.IN:
            return self._chance.choice([one for one in PLAIN if _is_in(one, told)] or ["x"])
        if code == of.BRANCH:
            return self._made(self._chance.choice(told[1]))
        if code == of.SUBPATTERN:
            return self._made(told[3])
        if code in (of.MAX_REPEAT, of.MIN_REPEAT):
            return self._repeated(*told)
        return ""

    def _repeated(self, least: int, most: int, tree: Any) -> str:
        times = min(most, least + self._chance.choice([0, 0, 1, 2, self._chance.randint(0, LONGEST)]))
        return "".join(self._made(tree) for _ in range(times))


def _is_in(one: str, items: Any) -> bool:
    """Whether a class has a character."""
    found = False
    for code, told in items:
        if code == of.LITERAL:
            found = found or one == chr(told)
        elif code == of.RANGE:
            found = found or told[0] <= ord(one) <= told[1]
        elif code == of.CATEGORY:
            found = found or re.match(CATEGORIES[told], one) is not None
    return found != (items[0][0] == of.NEGATE)


@pytest.fixture
def texts_of():
    """`Texts` of a pattern."""
    return Texts
