"""Patterns made simpler for a scan: they find what the pattern finds and more, at a fraction of the cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from diagnosis import shapes

_AROUND: Final = ("(?=", "(?!", "(?<=", "(?<!")
_LIMITS: Final = re.compile(r"\{(\d*),(\d*)\}")
COMMON: Final = ("loss", "grad", "step", "iter")
LETTERS: Final = 5
"""Letters that are enough to look for."""


def simplified(expression: str, *, shorter: bool = True) -> str:
    """Finds something in every line in which `expression` does, and more; scanned faster.

    Limits of repeats are lifted, as counting is what costs a scan most; lookarounds and anchors are left out. If
    `shorter`, so is a beginning that says little with a gap after it: each line with it would wait for the gap's end.
    """
    alternatives = _split(_plain_tokens(shapes.tokens(expression)), lambda token, _: token == "|")
    return "|".join("".join(_most_telling(one) if shorter else one) for one in alternatives)


def _plain_tokens(tokens: Sequence[str]) -> list[str]:
    told: list[str] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        if token in _AROUND:
            at = shapes.closing(tokens, at)
            if at < len(tokens) and (tokens[at] in "*+?" or _LIMITS.fullmatch(tokens[at])):
                at += 1
            continue
        at += 1
        limits = _LIMITS.fullmatch(token)
        if token.startswith("(?P<"):
            told.append("(?:")
        elif token in ("^", "$", r"\A", r"\Z"):
            continue
        elif limits is not None:
            low = int(limits[1] or 0)
            few = limits[2].isdigit() and int(limits[2]) <= 3
            told.append(token if few else ("*", "+")[low] if low < 2 else f"{{{low},}}")
        else:
            told.append(token)
        if (limits is not None or token in ("*", "+", "?")) and at < len(tokens) and tokens[at] in ("?", "+"):
            at += 1  # lazy or greedy: all the same to a scan
    return told


def _split(tokens: Sequence[str], divides: Callable[[str, str], bool]) -> list[list[str]]:
    """Parts of a pattern, outside of groups; `divides` is asked of each token and the one after it."""
    parts: list[list[str]] = [[]]
    depth = 0
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        depth += (token[0] == "(") - (token == ")")
        if depth == 0 and divides(token, following):
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _most_telling(tokens: list[str]) -> list[str]:
    """Without a beginning that lines of healthy output may have, where what comes after a gap says more."""
    first, *others = _split(tokens, lambda token, following: _is_class(token) and following in ("*", "+"))
    if not others:
        return tokens
    if _letters(first) >= LETTERS - 1 and not any(word in "".join(first).lower() for word in COMMON):
        return tokens
    rest = tokens[len(first) + 2 :]  # behind the gap: a class and its repeat
    best = max((part[1:] for part in others), key=_letters)
    return next((one for one in (best, rest) if _letters(one) >= LETTERS), tokens)


def _is_class(token: str) -> bool:
    """It stands for one character of many."""
    return token in (".", r"\S", r"\w", r"\s") or token[0] == "["


def _letters(tokens: Sequence[str]) -> int:
    """How many letters and digits each text that matches has at least."""
    count = at = 0
    while at < len(tokens):
        token = tokens[at]
        end = shapes.closing(tokens, at) if token[0] == "(" else at + 1
        following = tokens[end] if end < len(tokens) else ""
        if following not in ("?", "*") and not following.startswith("{0"):
            if token[0] == "(":
                inside = tokens[at + 1 : end - 1]
                count += min(_letters(one) for one in _split(inside, lambda token, _: token == "|"))
            else:
                count += token.isalnum()
        at = end
    return count
