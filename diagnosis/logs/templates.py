"""The lines of logs, counted: those that differ only in their numbers are one template.

A log of gigabytes has some hundred templates. Lines are counted by their shape (every digit a zero), a block at a time:
a line costs two look-ups in a dictionary. Only the shapes themselves, some thousand, are read as text. (Why no template
miner: docs/adr/0010.)
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from diagnosis.kernel.log import read_stamp
from diagnosis.signals import Frozen, clean_text
from diagnosis.text import shape
from diagnosis.tracebacks import split_prefix

MAX_SHAPES: Final = 20_000
"""Shapes of one log that are kept; lines of further ones are counted as one template."""
MAX_BYTES: Final = 300
"""Lines that are equal in this many bytes are one template."""
MAX_FORM: Final = 1_000
"""Longer lines are looked up by their key."""
NEW_FORMS: Final = 300
"""The last so many lines of new forms in a block are read. (Logs where each line is new are none that a reader could
compare; and they are to be read at the speed of the others.)"""
LINES_OF_A_SHAPE: Final = 5
LEAST_LINES: Final = 10_000
SAMPLED: Final = 8
LEAST_SAMPLE: Final = 16 * 1024
"""After so many lines for each shape that is kept, or in all, and a block with many new ones, only the end of the next
block is read: it is so many times smaller, or has so many bytes."""
PREFIX_BYTES: Final = 20
OTHERS: Final = b"(lines of other forms)"

_PREFIX: Final = re.compile(rb"[ \t]{0,2}(?:\[(?:rank|default)?(\d{1,6})\]:?|(\d{1,6}): |)", re.IGNORECASE)
_VARIES: Final = (
    (re.compile(rb"0x[0-9a-f]+|\b(?=[a-f]+0)[0-9a-f]{6,}\b"), b"0x"),
    (re.compile(rb"0[0,.:]+"), b"0"),
    (re.compile(rb" {2,}"), b" "),
)
"""What varies, and what is left of it: numbers and addresses still differ from words."""
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
    """The lines of one form in one log."""

    __slots__ = ("count", "first_line", "form", "last", "last_line", "ranks", "sample")

    def __init__(self, form: bytes, sample: bytes, line: int) -> None:
        self.form = form
        self.sample = self.last = sample
        self.first_line = self.last_line = line
        self.count = 0
        self.ranks: dict[int, int] = {}


class _Log:
    """One log. Lines are looked up as they are, and where that fails by their key, without what varies."""

    __slots__ = ("by_form", "by_key", "is_noisy")

    def __init__(self) -> None:
        self.is_noisy = False
        self.by_form: dict[bytes, _Tally] = {}
        self.by_key: dict[bytes, _Tally] = {}


class TemplateBook:
    """Counts the lines of any number of logs."""

    def __init__(self, max_shapes: int = MAX_SHAPES) -> None:
        self._max_shapes = max_shapes
        self._all_lines = max(LEAST_LINES, LINES_OF_A_SHAPE * max_shapes)
        self._logs: dict[str, _Log] = {}
        self.lines: Counter[str] = Counter()
        """Source -> lines that were counted."""

    def feed(self, source: str, block: bytes, first_line: int, rank: int | None = None) -> None:
        """Whole lines of one log, without the last newline; `first_line`: the number of the first, from 1."""
        log = self._logs.setdefault(source, _Log())
        sampled = log.is_noisy and self.lines[source] > self._all_lines
        if sampled:
            start = block.find(b"\n", max(0, len(block) - max(len(block) // SAMPLED, LEAST_SAMPLE))) + 1
            skipped = block.count(b"\n", 0, start)
            block, first_line = block[start:], first_line + skipped
            self.lines[source] += skipped
        forms = shape(block).split(b"\n")
        ends = list(itertools.accumulate(map(len, forms)))

        def line(at: int) -> bytes:
            """A form is as long as its line, so only lines that are kept are cut out."""
            end = ends[at] + at
            return block[end - len(forms[at]) : end]

        counts = Counter(forms)
        last = dict(zip(forms, range(len(forms)), strict=True))
        here = {form: log.by_form[form] for form in counts.keys() & log.by_form.keys()}
        unknown = counts.keys() - here.keys()
        first = last
        log.is_noisy = len(unknown) * (SAMPLED if sampled else 1) > NEW_FORMS // SAMPLED
        if len(unknown) > NEW_FORMS:
            # Those near the end, whose only line most likely is the last one.
            kept = set(itertools.islice(filter(unknown.__contains__, reversed(forms)), NEW_FORMS))
            others = self._tally(log, OTHERS, OTHERS, line(0), first_line)
            others.count += sum(counts.values()) - sum(counts[form] for form in itertools.chain(kept, here))
            unknown = kept
        elif unknown:
            first = dict(zip(reversed(forms), range(len(forms) - 1, -1, -1), strict=True))
        ordered = sorted(unknown, key=first.__getitem__)
        for form, key in zip(ordered, _keys([_shown(form) for form in ordered]), strict=True) if ordered else ():
            here[form] = self._tally(log, form, key, line(first[form]), first_line + first[form])
        for form, tally in here.items():
            tally.count += counts[form]
            at = last[form]
            if first_line + at >= tally.last_line:
                tally.last_line, tally.last = first_line + at, line(at)
            if rank is not None:
                tally.ranks[rank] = tally.ranks.get(rank, 0) + counts[form]
        if rank is None:
            _count_ranks(here, block, forms)
        for tally in here.values():
            tally.last = _shown(tally.last)
        self.lines[source] += len(forms)

    def _tally(self, log: _Log, form: bytes, key: bytes, line: bytes, number: int) -> _Tally:
        """The tally of a form that was not looked up before."""
        shown = _shown(form)
        tally = log.by_key.get(key)
        if tally is None:
            if len(log.by_key) >= self._max_shapes:
                shown = key = OTHERS
                tally = log.by_key.get(OTHERS)
            tally = tally or log.by_key.setdefault(key, _Tally(shown, _shown(line), number))
        if len(form) <= MAX_FORM and len(log.by_form) < 2 * self._max_shapes:
            log.by_form[form] = tally
        return tally

    def join(self, other: TemplateBook) -> None:
        """Add the lines of other logs."""
        self._logs.update(other._logs)
        self.lines.update(other.lines)

    def templates(self) -> list[Template]:
        """All templates in order; those of equal text are joined."""
        found: dict[str, Template] = {}
        for source, log in self._logs.items():
            for tally in log.by_key.values():
                new = _template(tally, source)
                if new.text:
                    old = found.get(new.text)
                    found[new.text] = new if old is None else _joined(old, new)
        return list(found.values())


def _shown(line: bytes) -> bytes:
    """What a terminal shows of a line at last: a progress bar goes back to its beginning again and again."""
    return (line.rstrip(b"\r").rpartition(b"\r")[2] if b"\r" in line else line)[:MAX_BYTES]


def _keys(shown: Sequence[bytes]) -> list[bytes]:
    """What equal lines have in common. All at once: a pattern costs more to start than to go on."""
    text = b"\n".join(shown)
    for pattern, left in _VARIES:
        text = pattern.sub(left, text)
    return text.split(b"\n")


def _count_ranks(here: Mapping[bytes, _Tally], block: bytes, forms: Iterable[bytes]) -> None:
    """Count the lines of each rank, by their prefixes: the form tells whether there is one."""
    prefixed = {form for form in here if (found := _PREFIX.match(form)) is not None and (found[1] or found[2])}
    if not prefixed:
        return
    counted = Counter(zip(forms, [line[:PREFIX_BYTES] for line in block.split(b"\n")], strict=True))
    for (form, start), count in counted.items():
        found = _PREFIX.match(start) if form in prefixed else None
        if found is not None and (found[1] or found[2]):
            ranks, rank = here[form].ranks, int(found[1] or found[2])
            ranks[rank] = ranks.get(rank, 0) + count


def _template(tally: _Tally, source: str) -> Template:
    first, last = _plain(tally.sample), _plain(tally.last)
    return Template(
        text=mask(tally.form),
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
