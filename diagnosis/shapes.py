"""Lines that differ in their numbers only: what one of them can never mean, none of them can.

The shape of a line is the line with every digit a zero. A log of a gigabyte has some thousand shapes, so
that most of its lines are read by looking their shapes up in a set. A pattern that is `blind` to digits finds
something in a shape whenever the pattern itself finds something in any line of that shape (the reverse need not hold).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_ZEROS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_TOKEN: Final = re.compile(
    r"\\x[0-9a-f]{2}|\\.|\(\?P<\w+>|\(\?<?[!=]|\(\?[a-z:]|\{\d*,?\d*\}|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL
)
_DIGITS: Final = re.compile(r"(\\x[0-9a-f]{2}|\\.)|\d-\d|\d")


def shape(text: bytes) -> bytes:
    """The shape of a line, or of several."""
    return text.translate(_ZEROS)


def literal(text: str) -> str:
    """What a literal looks like in a shape, in lower case."""
    return re.sub(r"\d", "0", text.lower())


def tokens(pattern: str) -> list[str]:
    """A pattern's pieces: escapes, classes, openings of groups, repeats and single characters."""
    return _TOKEN.findall(pattern)


def blind(pattern: str) -> str:
    """The pattern with every digit in it standing for any digit; empty (finds everything) where that cannot be had."""
    told = _blind(tokens(pattern))
    try:
        re.compile(told)
    except re.error:
        return ""
    return told


def _blind(tokens: Sequence[str]) -> str:
    told: list[str] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        end = at + 1
        if token in ("(?!", "(?<!"):
            end = closing(tokens, at)
            # What must not be there, and has a digit, may be missed: then more is found, which is safe.
            if not any(_has_own_digits(one) for one in tokens[at:end]):
                told += tokens[at:end]
        elif token[0] == "[" and _has_own_digits(token):
            without = _DIGITS.sub(lambda match: match[1] or "", token).replace("[^]", r"[\s\S]")
            told.append(without if token[1] == "^" else _DIGITS.sub(lambda match: match[1] or "0-9", token))
        else:
            told.append(r"\d" if token.isdigit() else token)
        at = end
    return "".join(told)


def closing(tokens: Sequence[str], at: int) -> int:
    """Where what follows the group that is opened at `at` begins."""
    depth = 0
    for end in range(at, len(tokens)):
        depth += (tokens[end][0] == "(") - (tokens[end] == ")")
        if depth == 0:
            return end + 1
    return len(tokens)


def _has_own_digits(token: str) -> bool:
    """Whether it tells digits from each other."""
    if token[0] == "[":
        return any(match[1] is None for match in _DIGITS.finditer(token.replace("0-9", "")))
    return token.isdigit()


class Words:
    """Which of many rules a text may match: those of whose literals it has one. Each word is looked for once."""

    def __init__(self, rules: Sequence[Sequence[str]]) -> None:
        literals = {literal for rule in rules for literal in rule}
        self.words: tuple[str, ...] = tuple(
            sorted(one for one in literals if not any(o in one for o in literals - {one}))
        )
        """Every literal has one of them in it."""
        self._rules: dict[str, list[int]] = {
            word: [n for n, rule in enumerate(rules) if any(word in literal for literal in rule)] for word in self.words
        }

    def rules_for(self, text: str) -> list[int] | None:
        """The numbers of the rules that may match, in order; None where no word is in the text."""
        found = [word for word in self.words if word in text]
        if not found:
            return None
        return self._rules[found[0]] if len(found) == 1 else sorted({n for word in found for n in self._rules[word]})
