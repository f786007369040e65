"""Gigabytes of logs in a few kilobytes, the most important part first: a reader may stop anywhere.

Lines that few ranks write come first, then lines that a good run never wrote. All text is cleaned and free of secrets.
Equal input gives an equal digest.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Final

from diagnosis import stacks as stack_reading
from diagnosis.incident import LogEvidence, LogSummary, Verdict
from diagnosis.logs.compare import FEW, GoodRun, KnownLines, new_lines
from diagnosis.logs.templates import Template, TemplateBook, mask
from diagnosis.signals import Frozen, RankStack, clean_text
from diagnosis.taxonomy import FailureClass
from diagnosis.text import redact, shape
from diagnosis.tracebacks import Traceback

MAX_LINE: Final = 500
FIRST_ERRORS: Final = 12
FRAMES: Final = 6
EVENTS: Final = 20
TAILS: Final = 8
TAIL_LINES: Final = 12
CULPRITS_TAIL_LINES: Final = 30
IN_FOLDER: Final = " in "
LATE: Final = 0.9
"""A template is late if it is new in the last tenth of a log."""
TEMPLATES: Final = 400
FEW_RANKS: Final = 4
"""Ranks of a template are named up to this many, else counted."""


class Section(Frozen, frozen=True, kw_only=True):
    """One part, its most important lines first."""

    title: str
    lines: tuple[str, ...]


class Digest(Frozen, frozen=True, kw_only=True):
    """The logs, reduced to their most important lines."""

    sections: tuple[Section, ...]


def build(
    case: LogEvidence, verdict: Verdict, book: TemplateBook | None = None, good: Sequence[GoodRun] = ()
) -> Digest:
    """The digest of everything that was given. Lines that no good run contains come before those that one does."""
    book = TemplateBook() if book is None else book
    templates = book.templates()
    culprits = {one.rank for one in verdict.culprits if one.rank is not None}
    parts = (
        ("verdict", _header(case, verdict)),
        ("first errors", _first_errors(case, culprits)),
        ("odd ranks", [*_odd_templates(templates), *_behind(case.logs), *_stacks(case.stacks)]),
        ("collectives, pace, numbers", _reports(case)),
        ("kernel", _events(case.logs)),
        *([(f"new since {', '.join(one.name for one in good)}", _new_since(good, templates))] if good else ()),
        ("new at the end", list(map(_template_line, _late(templates, book)))),
        ("last lines", _tails(case.logs, culprits)),
        ("everything else", list(map(_template_line, _by_weight(templates, book)[:TEMPLATES]))),
    )
    folder = _folder(case.logs)
    sections = [Section(title=title, lines=tuple(_clean(lines, folder))) for title, lines in parts]
    return Digest(sections=tuple(one for one in sections if one.lines))


def render(digest: Digest, limit_bytes: int) -> str:
    """The digest as text of at most this many bytes of UTF-8; a line that occurs twice is written once."""
    kept: list[str] = []
    left = limit_bytes
    for line in _lines(digest):
        cost = len(line.encode()) + 1
        if cost > left:
            if not kept:
                kept.append(line.encode()[: max(0, left - 1)].decode(errors="ignore"))
            break
        kept.append(line)
        left -= cost
    return "\n".join(kept) + "\n" if kept and limit_bytes > 0 else ""


def _lines(digest: Digest) -> Iterator[str]:
    told: set[str] = set()
    for number, section in enumerate(digest.sections):
        fresh = [line for line in section.lines if line not in told]
        if not fresh:
            continue
        yield f"== {section.title}"
        yield from fresh
        if number:  # a line that the verdict quotes is written again in its own section
            told.update(fresh)


# ----- sections -----


def _header(case: LogEvidence, verdict: Verdict) -> list[str]:
    who = [
        " ".join(filter(None, (one.node, one.gpu, f"rank {one.rank}" if one.rank is not None else "", one.part)))
        for one in verdict.culprits[:8]
    ]
    lines = [f"{verdict.failure_class.value} ({verdict.confidence:.0%}): {verdict.why}"]
    lines += [f"culprit: {', '.join(who)}"] if who else []
    lines += [f"{_place(one.source, one.line, one.rank)} {one.text}" for one in verdict.evidence]
    count = sum(log.lines for log in case.logs)
    ranks = {log.rank for log in case.logs} - {None}
    folder = _folder(case.logs)
    where = f"{IN_FOLDER}{folder}" if folder else ""
    lines.append(f"{len(case.logs)} logs, {count} lines{f', {len(ranks)} ranks' if ranks else ''}{where}")
    return lines


class _Said(Frozen, frozen=True, kw_only=True, order=True):
    """An error, with what it is sorted by."""

    by_others: bool
    is_consequence: bool
    at: float
    line: int
    lines: tuple[str, ...]
    form: str
    rank: int | None = None


def _first_errors(case: LogEvidence, culprits: Set[int | None]) -> list[str]:
    """The first errors of the culprits, then of the others; what many ranks say is written once."""
    said = [one for log in case.logs for one in _said(log, culprits)]
    said.sort(key=lambda one: (one.by_others, one.is_consequence, one.at, one.line))
    by_form: dict[str, list[_Said]] = {}
    for one in said:
        by_form.setdefault(one.form, []).append(one)
    lines: list[str] = []
    for first, *more in list(by_form.values())[:FIRST_ERRORS]:
        ranks = {one.rank for one in more if one.rank is not None} - {first.rank}
        also = f" (also rank {_ranks_text(ranks)})" if ranks else f" ({len(more) + 1} times)" if more else ""
        lines += [first.lines[0] + also, *first.lines[1:]]
    return lines


def _said(log: LogSummary, culprits: Set[int | None]) -> Iterator[_Said]:
    def said(rank: int | None, at: float | None, line: int, lines: Sequence[str], consequence: bool) -> _Said:
        rank = log.rank if rank is None else rank
        place = _place(log.source, line, rank)
        return _Said(
            by_others=rank not in culprits,
            is_consequence=consequence,
            at=float(line) if at is None else at,
            line=line,
            lines=(f"{place} {lines[0]}", *lines[1:]),
            form=mask(shape(lines[0].encode(errors="replace"))),
            rank=rank,
        )

    for match in log.matches:
        if match.severity != "warning" and match.failure_class is not FailureClass.NONE:
            times = f" ({match.count} times)" if match.count > 1 else ""
            yield said(match.rank, match.at, match.line, [match.text + times], match.role != "cause")
    for one in log.tracebacks:
        if not one.traceback.is_launchers:
            yield said(one.rank, one.at, one.line, _traceback(one.traceback), False)
    for failure in log.launcher:
        yield said(failure.rank, failure.at, failure.line, [failure.text], not failure.is_root)


def _traceback(traceback: Traceback) -> list[str]:
    return [
        traceback.line,
        *(f"    {frame.function} ({frame.file}:{frame.line})" for frame in reversed(traceback.frames[-FRAMES:])),
        *(f"    after {cause}" for cause in traceback.causes),
    ]


def _odd_templates(templates: list[Template]) -> list[str]:
    """Lines that few ranks write, or that some write far more often."""
    everyone = {rank for one in templates for rank in one.ranks}
    if len(everyone) < 3:
        return []
    few = max(1, int(FEW * len(everyone)))
    odd = [one for one in templates if 0 < len(one.ranks) <= few]
    # Rank 0 writes much that others do not: it comes last.
    odd.sort(key=lambda one: (set(one.ranks) == {0}, len(one.ranks), *_order(one)))
    lines = [f"only rank {_ranks_text(one.ranks)}: {one.sample}" for one in odd[:FIRST_ERRORS]]
    common = [(one, _loud(one.ranks)) for one in templates if len(one.ranks) > len(everyone) // 2]
    lines += [f"rank {_ranks_text(loud)} far more often than others: {one.sample}" for one, loud in common if loud]
    return lines[: 2 * FIRST_ERRORS]


def _loud(ranks: dict[int, int]) -> list[int]:
    usual = sorted(ranks.values())[len(ranks) // 2]
    loud = [rank for rank, count in ranks.items() if count > 10 * usual + 10]
    return loud if len(loud) <= max(1, int(FEW * len(ranks))) else []


def _behind(logs: Iterable[LogSummary]) -> list[str]:
    """Ranks whose last step is not that of most ranks."""
    steps = {log.rank: log.step for log in logs if log.rank is not None and log.step is not None}
    if len(steps) < 3:
        return []
    (usual, count), *others = Counter(steps.values()).most_common()
    if not others or count <= len(steps) // 2:
        return []
    by_step: dict[int, list[int]] = defaultdict(list)
    for rank, step in steps.items():
        if step != usual:
            by_step[step].append(rank or 0)
    return [
        f"rank {_ranks_text(ranks)} ended at step {step}, most at step {usual}"
        for step, ranks in sorted(by_step.items())[:8]
    ]


def _stacks(stacks: Iterable[RankStack]) -> list[str]:
    groups = stack_reading.group(stacks)
    lines = []
    for one in sorted(groups, key=lambda one: len(one.ranks))[:6]:
        where = " < ".join(
            f"{frame.function} ({frame.file.rsplit('/', 1)[-1]}:{frame.line})" for frame in one.frames[:5]
        )
        lines.append(f"stack of rank {_ranks_text(one.ranks)} ({one.activity}): {where}")
    return lines


def _reports(case: LogEvidence) -> list[str]:
    lines = []
    if case.flight is not None:
        lines.append(f"flight recorder: {case.flight.why}")
        lines += [one.text for one in case.flight.evidence[:4]]
    lines += [one.why for one in case.slow[:6]]
    lines += [one.why for one in case.anomalies[:6]]
    return lines


def _events(logs: Iterable[LogSummary]) -> list[str]:
    """Kernel messages; those of one kind, code and device as one."""
    lines: list[str] = []
    for log in logs:
        events = [one for one in log.events if one.severity != "info"]
        count = Counter((one.kind, one.code, one.device) for one in events)
        seen = set()
        for one in events:
            key = one.kind, one.code, one.device
            if key not in seen and len(lines) < EVENTS:
                seen.add(key)
                times = f" ({count[key]} times)" if count[key] > 1 else ""
                lines.append(f"{_place(log.source, one.line, None)} {one.text}{times}")
    return lines


def _tails(logs: Iterable[LogSummary], culprits: set[int]) -> list[str]:
    chosen = sorted(logs, key=lambda log: (log.rank not in culprits, log.rank is None, log.rank or 0))
    lines: list[str] = []
    for log in chosen[:TAILS]:
        length = CULPRITS_TAIL_LINES if log.rank in culprits or len(chosen) == 1 else TAIL_LINES
        tail = [line for line in log.tail if line.strip()][-length:]
        lines += [f"-- {log.source}", *tail] if tail else []
    return lines


def _new_since(good: Sequence[GoodRun], templates: Iterable[Template]) -> list[str]:
    """Lines that no good run contains, in order."""
    new = new_lines(templates, KnownLines(good))
    return [_template_line(one) for one in sorted(new, key=_order)[:TEMPLATES]]


def _by_weight(templates: list[Template], book: TemplateBook) -> list[Template]:
    """The rare and late templates first: a line that comes all the time says nothing."""
    lines = book.lines
    return sorted(
        templates,
        key=lambda one: (one.count * max(1, len(one.ranks)) / max(1, lines[one.source]), -one.first_line, one.text),
    )


def _late(templates: list[Template], book: TemplateBook) -> list[Template]:
    lines = book.lines
    late = [one for one in templates if lines[one.source] > 100 and one.first_line > LATE * lines[one.source]]
    return sorted(late, key=_order)[: 2 * FIRST_ERRORS]


def _order(one: Template) -> tuple[float, int, str]:
    return one.first_at or 0.0, one.first_line, one.text


# ----- words -----


def _template_line(one: Template) -> str:
    if one.count == 1:
        return f"{one.source}:{one.first_line} {one.sample}"
    few = f", rank {_ranks_text(one.ranks)}" if one.ranks else ""
    ranks = few if len(one.ranks) <= FEW_RANKS else f", {len(one.ranks)} ranks"
    return f"{one.count} lines{ranks}, {one.source}:{one.first_line} to {one.last_line}: {one.text}"


def _place(source: str, line: int | None, rank: int | None) -> str:
    """`file:118 [rank 3]`."""
    place = f"{source}:{line}" if line else source
    return f"{place} [rank {rank}]" if rank is not None else place


def _ranks_text(ranks: Iterable[int]) -> str:
    """`0-3, 7`; of many the first few."""
    runs = []
    for _, group in itertools.groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in group]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(runs[:8]) + (", ..." if len(runs) > 8 else "")


def _folder(logs: Sequence[LogSummary]) -> str:
    """The folder that all files are in: it need not be written with each line."""
    names = [log.source.split("#", 1)[0] for log in logs]
    first, last = min(names, default=""), max(names, default="")
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    folder = first[:same].rpartition("/")[0]
    return f"{folder}/" if len(folder) > 1 else ""


def _clean(lines: Iterable[str], folder: str) -> Iterator[str]:
    in_key = False
    for told in lines:
        line = told.replace(folder, "") if folder and not told.endswith(IN_FOLDER + folder) else told
        text = " ".join(redact(clean_text(line, MAX_LINE)).split("\n"))
        in_key = "PRIVATE KEY-----" not in line if in_key else "-----BEGIN" in line and "PRIVATE KEY" in line
        if text.strip() and not in_key:
            yield text[:MAX_LINE].replace("\t", " ")
