"""Patterns made simpler for a scan: they find what the pattern finds and more, at a fraction of the cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from diagnosis import shapes

_AROUND: Final = ("(?=", "(?!", "(?<=", "(?<!")
_LIMITS: Final = re.compile(r"\{(\d*),(\d*)\}")
COMMON: Final = ("loss", "grad", "step", "iter", "mlx5", "nvme", "timeout", "failed", "checkpoint", "not found")
"""Healthy lines are full of them."""
LETTERS: Final = 5
FEW_LETTERS: Final = 3
"""Letters that are enough to look for; and where none of the common words is near."""

NO_NUMBERS: Final = frozenset({"nan", "inf", "non-finite", "nonfinite"})
_NAN: Final = r"^f? ?nan|(?:[^ ]|[^f] |[^o]f )nan|of nan .*(?:loss|grad)"
"""Not that of "number of nan iterations: 0", which Megatron-LM writes at the end of each line."""
_FEW_BYTES: Final = 20
"""A class of so many at most a scan takes for part of a word."""


def scanned(expression: str, words: Sequence[str]) -> list[str]:
    """What to scan for instead of a pattern: `simplified`, or what costs less by the words one of which it needs.

    That a loss is no number begins with words of every line, and ends in one that others begin with (INFO): then the
    ends of the word are told apart.
    """
    if not set(words) <= NO_NUMBERS:
        return [simplified(expression)]
    ends = [byte for byte in range(256) if not re.match(rb"\w", bytes([byte]))]
    classes = [
        "".join(f"\\x{byte:02x}" for byte in ends[at : at + _FEW_BYTES]) for at in range(0, len(ends), _FEW_BYTES)
    ]
    return [f"{_NAN}|infinity|inf$|finite", *(f"inf[{one}]" for one in classes)]


def simplified(expression: str) -> str:
    """Finds something in every line in which `expression` does, and more; scanned faster.

    Of each alternative the most telling part without a gap, where one says enough. Of others limits of repeats are
    lifted, as counting is what costs a scan most; lookarounds and anchors are left out.
    """
    alternatives = _split(_plain_tokens(shapes.tokens(expression)), lambda token, _: token == "|")
    return "|".join("".join(_most_telling(one)) for one in alternatives)


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
    """The part without a gap that says most, where it says enough: a scan that waits for the end of a gap costs more,
    and Vectorscan 5.4.12 (which the wheel of hyperscan is made of) now and then jumps over it.
    """
    found = _sure(tokens)
    enough = LETTERS if _telling_letters(tokens) < _letters(tokens) else FEW_LETTERS
    return found.tokens if found.letters >= enough else tokens


class _Part(NamedTuple):
    """Something is in every text that matches."""

    letters: int
    tokens: list[str]


def _sure(tokens: Sequence[str]) -> _Part:
    """Of the parts without a gap the one with the most letters; of groups with gaps, one for each of their options."""
    parts = [_Part(0, [])]
    run: list[str] = []
    at = 0
    while at < len(tokens):
        end = shapes.closing(tokens, at) if tokens[at][0] == "(" else at + 1
        repeat = tokens[end] if end < len(tokens) and (tokens[end] in "*+?" or _LIMITS.fullmatch(tokens[end])) else ""
        element, at = tokens[at:end], end + bool(repeat)
        if not (_is_loose(repeat) or any(map(_is_loose, element))):
            run += [*element, *([repeat] if repeat else [])]
            continue
        parts.append(_Part(_telling_letters(run), run))
        run = []
        if element[0][0] == "(" and (not repeat or repeat == "+"):
            options = [_sure(one) for one in _split(element[1:-1], lambda token, _: token == "|")]
            joined = [token for one in options for token in ("|", *one.tokens)][1:]
            parts.append(_Part(min(one.letters for one in options), ["(?:", *joined, ")"]))
    parts.append(_Part(_telling_letters(run), run))
    return max(parts, key=lambda one: one.letters)


def _is_loose(token: str) -> bool:
    """It repeats what stands before it as often as that comes."""
    return token in ("*", "+") or (_LIMITS.fullmatch(token) is not None and token.endswith(",}"))


def _telling_letters(tokens: Sequence[str]) -> int:
    """How many, without those of common words."""
    text = "".join(tokens).lower()
    return _letters(tokens) - sum(len(word) for word in COMMON if word in text)


def _is_class(token: str) -> bool:
    """It stands for one character of many."""
    return token in (".", r"\S", r"\w", r"\s") or token[0] == "["


def _letters(tokens: Sequence[str]) -> int:
    """How many letters each text that matches has at least."""
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
                count += token.isalpha()
        at = end
    return count
