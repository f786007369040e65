"""Templates, phases and comparisons of logs as lines of a digest."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Final

from diagnosis.logs.compared import Compared
from diagnosis.logs.phase_changes import Change, Phases, Span
from diagnosis.logs.phases import PhaseName
from diagnosis.logs.templates import Template

TEMPLATES: Final = 400
EACH: Final = 12
"""Changes of one kind in one phase."""
FEW: Final = 8
FEW_RANKS: Final = 4
LEAST_RANKS: Final = 3
_IN: Final[dict[PhaseName, str]] = {
    "start-up": "start-up (no step was made)",
    "training": "training",
    "checkpoint": "a checkpoint",
    "evaluation": "an evaluation",
    "the end": "the end of the work",
}


def told(one: Template, only_in: Mapping[str, PhaseName] | None = None) -> str:
    """A template; `only_in`: the phase of those that are said in one only."""
    phase = (only_in or {}).get(one.text, "training")
    where = f"{phase}: " if phase != "training" else ""
    if one.count == 1:
        return f"{where}{one.source}:{one.first_line} {one.sample}"
    few = f", rank {ranks_text(one.ranks)}" if one.ranks else ""
    ranks = few if len(one.ranks) <= FEW_RANKS else f", {len(one.ranks)} ranks"
    return f"{where}{one.count} lines{ranks}, {one.source}:{one.first_line} to {one.last_line}: {one.text}"


def where(source: str, line: int | None, rank: int | None) -> str:
    """`file:118 [rank 3]`."""
    place = f"{source}:{line}" if line else source
    return f"{place} [rank {rank}]" if rank is not None else place


def ranks_text(ranks: Iterable[int]) -> str:
    """`0-3, 7`; of many the first few."""
    runs = []
    for _, group in itertools.groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in group]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(runs[:8]) + (", ..." if len(runs) > 8 else "")


def phases(logs: Sequence[Phases], changes: Iterable[Change], culprits: Set[int]) -> list[str]:
    """How long each phase is, in the log that tells most, and what is not as it was in the phase before."""
    if not logs:
        return []
    shown = max(logs, key=lambda one: (one.rank in culprits, one.steps))
    per_kind: Counter[tuple[str, str]] = Counter()
    lines = []
    for one in changes:
        per_kind[one.kind, one.phase] += 1
        if per_kind[one.kind, one.phase] <= EACH:
            lines.append(_change(one, len(logs)))
    return [f"{shown.source}: {'; '.join(map(_span, shown.spans))}", *lines]


def _span(one: Span) -> str:
    took = f", {one.last_s:.0f} s" if one.last_s is not None else ""
    if one.phase == "training":
        return f"training {one.times} times a new step, {one.lines} lines"
    if one.phase in ("start-up", "the end"):
        return f"{one.phase} {one.lines} lines from line {one.first_line}{took}"
    usual = f", {one.usual_s:.0f} s before" if one.usual_s is not None else ""
    return f"{one.phase} {one.times} times, {one.lines} lines, the last at line {one.first_line}{took}{usual}"


def _change(one: Change, logs: int) -> str:
    who = f"rank {ranks_text(one.ranks)}: " if one.ranks and logs > 1 else ""
    at = f"{one.source}:{one.line}"
    if one.kind == "new":
        since = "after the last step" if one.phase == "the end" else f"in the last {one.phase}"
        return f"{who}new {since}: {at} {one.sample}"
    if one.kind == "missing":
        return f"{who}the last {one.phase} ({at}) does not say what the {one.before:.0f} before it said: {one.sample}"
    if one.kind == "long":
        return f"{who}the last {one.phase} ({at}) took {one.now:.0f} s, those before it {one.before:.0f} s"
    return f"{who}since {at} {one.now:.3g} lines in 100 steps, before {one.before:.3g}: {one.text}"


def since(found: Compared, name: str) -> Iterator[tuple[str, list[str]]]:
    """What is not as in another attempt: titles and lines."""
    yield f"new since {name}", [told(one) for one in found.new[:TEMPLATES]]
    yield (
        f"no longer as in {name}",
        [
            *(
                f"{one.now:.3g} lines in 100 steps, then {one.healthy:.3g}: {one.template.text}"
                for one in found.rates[:FEW]
            ),
            *(f"not said at start-up: {one.sample}" for one in found.gone[:FEW]),
        ],
    )


def elsewhere(ended: Mapping[int, PhaseName]) -> list[str]:
    """Ranks whose logs end in another phase than those of most."""
    (usual, count), *others = Counter(ended.values()).most_common() or [("start-up", 0)]
    # Many print no step: who does is odd by custom.
    if usual == "start-up" or 2 * count <= len(ended) or len(ended) < LEAST_RANKS:
        return []
    ranks = {phase: [rank for rank, own in ended.items() if own == phase] for phase, _ in others}
    return [f"rank {ranks_text(those)} ended in {_IN[phase]}, most in {_IN[usual]}" for phase, those in ranks.items()]
