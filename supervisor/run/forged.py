"""Rank output that would look like a line of ours on a terminal is marked with who wrote it. Pure.

Our lines begin with `unbroken:`. A rank's line that begins so, or that moves the cursor and then says so, gets its rank
before the word; nothing else of it is changed. Control sequences and invisible characters hide nothing. (Who may
write to a terminal may move up and overwrite what stands there: against that only a file helps.)
"""

from __future__ import annotations

import re
from typing import Final

WORD: Final = b"unbroken:"
_CONTROL: Final = (
    rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~]|\x1b"
    rb"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]|\xc2[\x80-\x9f]"
)
_INVISIBLE: Final = rb"\xc2\xad|\xe2\x80[\x8b-\x8f\xaa-\xae]|\xe2\x81[\xa0-\xaf]|\xef\xbb\xbf|\xef\xb8[\x80-\x8f]"
_BETWEEN: Final = b"(?:" + _CONTROL + b"|" + _INVISIBLE + b"){0,64}"
_CUT: Final = rb"(?:\x1b\[[0-?]{0,60}[ -/]{0,9}|\x1b[ -/]{0,9}|\xe2[\x80\x81]?|\xef[\xbb\xb8]?|\xc2)?"
"""A control sequence or an invisible character of which the end is yet to come."""
_CUT_AT_END: Final = re.compile(_CUT + rb"\Z")
_LETTERS: Final = [bytes([letter]) for letter in WORD]
_WORD: Final = re.compile(_BETWEEN.join(_LETTERS))
_BEGUN: Final = re.compile(
    b"(?:".join(letter + _BETWEEN for letter in _LETTERS[:-1]) + b")?" * (len(_LETTERS) - 2) + _CUT + rb"\Z"
)
"""The word's beginning at the end of what there is."""
_COLOUR: Final = re.compile(rb"\x1b\[[0-9;:]*m")
_ANY: Final = re.compile(_CONTROL)
_UNSEEN: Final = re.compile(b"(?:" + _CONTROL + b"|" + _INVISIBLE + rb"|\s)+")


class Marker:
    """What one stream of a rank is shown as; lines may come in pieces."""

    def __init__(self, rank: int) -> None:
        self._mark = b"[rank%d] " % rank
        self._text = False
        """The line so far shows something."""
        self._moved = False
        """The cursor was moved in it: whatever comes may stand at its beginning."""
        self._cut = b""

    def shown(self, data: bytes) -> bytes:
        """`data` with the mark where it is needed."""
        parts: list[bytes] = []
        at = 0
        for match in self._words(data):
            start = match.start()
            self._pass(data[at:start])
            parts.append(data[at:start])
            hidden = match[0] != WORD[: len(match[0])]
            if hidden or self._moved or not self._text:
                parts.append(self._mark)
            at = start
        self._pass(data[at:])
        parts.append(data[at:])
        return b"".join(parts)

    @staticmethod
    def _words(data: bytes) -> list[re.Match[bytes]]:
        found = list(_WORD.finditer(data))
        begun = _BEGUN.search(data, max(found[-1].end() if found else 0, data.rfind(b"\n") + 1))
        return [*found, begun] if begun is not None else found

    def _pass(self, data: bytes) -> None:
        """What is before the next place that is looked at."""
        if not data:
            return
        data = self._cut + data
        line = data[data.rfind(b"\n") + 1 :]
        if len(line) < len(data):
            self._text = self._moved = False
        end = _CUT_AT_END.search(line)
        self._cut = end[0] if end is not None else b""
        line = line[: len(line) - len(self._cut)]
        self._text = self._text or bool(_UNSEEN.sub(b"", line))
        self._moved = self._moved or _ANY.search(_COLOUR.sub(b"", line)) is not None
