"""Lines that differ only in their numbers, counted as one template: a log of gigabytes has some hundred of them.

Lines are counted by their shape (every digit a zero), a block at a time: a line costs two look-ups in a dictionary.
Only the shapes themselves, some thousand, are read as text. (Why no template miner: docs/adr/0010.)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

from diagnosis.kernel.log import read_stamp
from diagnosis.signals import Frozen, clean_text
from diagnosis.text import shape
from diagnosis.tracebacks import split_prefix

MAX_SHAPES: Final = 20_000
"""Shapes of one log that are kept; lines of further ones are counted as one template."""
MAX_BYTES: Final = 300
"""Lines that are equal in this many bytes are one template."""
OTHERS: Final = "(lines of other forms)"

_PREFIX: Final = re.compile(
    rb"^[ \t]{0,2}(?:\[(?:rank|default)?(\d{1,6})\]:?|(\d{1,6}): |)", re.IGNORECASE | re.MULTILINE
)
_HEX: Final = re.compile(r"\b0x[0-9a-f]+\b|\b(?=[a-f]*0)(?=0*[a-f])[0-9a-f]{6,}\b", re.IGNORECASE)
_NUMBER: Final = re.compile(r"[-+]?0[0,.:]*(?:e[-+]?0+)?", re.IGNORECASE)
_SPACES: Final = re.compile(r"[ \t]{2,}")
"""Programs pad numbers to columns."""
_BAR: Final = re.compile("\\|[\u2588-\u258f# ]{1,120}\\|")


class Template(Frozen, frozen=True, kw_only=True):
    """Lines that differ only in their numbers."""

    text: str
    """With `#` for the numbers."""
    sample: str
    """The first line, as it is in the file."""
    source: str
    """The file of the first line; other lines may be in other files."""
    count: int
    first_line: int
    last_line: int
    """In `source`."""
    ranks: dict[int, int] = {}
    """Rank -> number of lines, if lines or files name a rank."""
    first_at: float | None = None
    last_at: float | None = None


class _Tally:
    __slots__ = ("count", "first_line", "last", "last_line", "ranks", "sample")

    def __init__(self, sample: bytes, line: int) -> None:
        self.sample = self.last = sample
        self.first_line = self.last_line = line
        self.count = 0
        self.ranks: Counter[int] = Counter()


class TemplateBook:
    """Counts the lines of any number of logs."""

    def __init__(self, max_shapes: int = MAX_SHAPES) -> None:
        self._max_shapes = max_shapes
        self._logs: dict[str, dict[bytes, _Tally]] = {}
        self.lines: Counter[str] = Counter()
        """Source -> lines that were counted."""

    def feed(self, source: str, block: bytes, first_line: int, rank: int | None = None) -> None:
        """Whole lines of one log, without the last newline; `first_line`: the number of the first, from 1."""
        tallies = self._logs.setdefault(source, {})
        lines = block.split(b"\n")
        forms = shape(block).split(b"\n")
        counts = Counter(forms)
        last = dict(zip(forms, range(len(forms)), strict=True))
        first = dict(zip(reversed(forms), range(len(forms) - 1, -1, -1), strict=True))
        for form, count in counts.items():
            key = form[:MAX_BYTES]
            tally = tallies.get(key)
            if tally is None:
                if len(tallies) >= self._max_shapes:
                    key = OTHERS.encode()
                tally = tallies.setdefault(key, _Tally(lines[first[form]][:MAX_BYTES], first_line + first[form]))
            tally.count += count
            tally.last_line = first_line + last[form]
            tally.last = lines[last[form]][:MAX_BYTES]
            if rank is not None:
                tally.ranks[rank] += count
        if rank is None:
            _count_ranks(tallies, block, forms)
        self.lines[source] += len(lines)

    def templates(self) -> list[Template]:
        """All templates in order; those of equal text are joined."""
        found: dict[str, Template] = {}
        for source, tallies in self._logs.items():
            for form, tally in tallies.items():
                new = _template(form, tally, source)
                if new.text:
                    old = found.get(new.text)
                    found[new.text] = new if old is None else _joined(old, new)
        return list(found.values())


def _count_ranks(tallies: dict[bytes, _Tally], block: bytes, forms: Iterable[bytes]) -> None:
    """Count the lines of each rank, by their prefixes."""
    names = [first or second for first, second in _PREFIX.findall(block)]
    if not any(names):
        return
    for (form, name), count in Counter(zip(forms, names, strict=False)).items():
        tally = tallies.get(form[:MAX_BYTES])
        if name and tally is not None:
            tally.ranks[int(name)] += count


def _template(form: bytes, tally: _Tally, source: str) -> Template:
    first, last = _plain(tally.sample), _plain(tally.last)
    return Template(
        text=mask(form),
        sample=clean_text(first, MAX_BYTES),
        source=source,
        count=tally.count,
        first_line=tally.first_line,
        last_line=tally.last_line,
        ranks=dict(sorted(tally.ranks.items())),
        first_at=read_stamp(split_prefix(first)[1]).at,
        last_at=read_stamp(split_prefix(last)[1]).at,
    )


def _plain(line: bytes) -> str:
    return line.decode(errors="replace")


def mask(form: bytes) -> str:
    """The form of a line as people read it: no prefix, no time, `#` for numbers and addresses."""
    text = clean_text(_plain(form[:MAX_BYTES]), MAX_BYTES)
    text = read_stamp(split_prefix(text)[1]).text
    text = _BAR.sub("|#|", text)
    return _SPACES.sub(" ", _NUMBER.sub("#", _HEX.sub("#", text)).strip())


def _joined(old: Template, new: Template) -> Template:
    ranks = Counter(old.ranks)
    ranks.update(new.ranks)
    same = old.source == new.source
    earlier = new if same and new.first_line < old.first_line else old
    return Template(
        text=old.text,
        sample=earlier.sample,
        source=earlier.source,
        count=old.count + new.count,
        first_line=earlier.first_line,
        last_line=max(old.last_line, new.last_line) if same else old.last_line,
        ranks=dict(sorted(ranks.items())),
        first_at=min((at for at in (old.first_at, new.first_at) if at is not None), default=None),
        last_at=max((at for at in (old.last_at, new.last_at) if at is not None), default=None),
    )
