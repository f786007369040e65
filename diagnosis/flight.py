"""What flight recorder entries of several ranks tell: do they disagree on a collective?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from diagnosis.signals import CollectiveEntry, RankFlight


def mismatch(flights: Iterable[RankFlight]) -> tuple[tuple[int, ...], str]:
    """The ranks that disagree with most on the first collective that differs, and why; empty when none differs."""
    calls: dict[tuple[str, int], dict[int, CollectiveEntry]] = {}
    for flight in flights:
        for entry in flight.entries:
            calls.setdefault((entry.group, entry.seq), {})[flight.rank] = entry
    for (group, seq), by_rank in sorted(calls.items(), key=lambda item: item[0][1]):
        shapes = {rank: _shape(entry) for rank, entry in by_rank.items()}
        common = Counter(shapes.values()).most_common()
        if len(common) < 2:
            continue
        usual = common[0][0]
        odd = tuple(sorted(rank for rank, shape in shapes.items() if shape != usual))
        if common[0][1] == common[1][1]:
            odd = ()  # one against one: nobody can say who is right
        other = next(shape for shape in shapes.values() if shape != usual)
        return odd, f"the ranks disagree on collective {seq} of group {group}: {_words(usual)} against {_words(other)}"
    return (), ""


def laggards(flights: Iterable[RankFlight]) -> tuple[int, ...]:
    """Ranks whose last entry of a group comes before that of most others in the same group."""
    last: dict[str, dict[int, int]] = {}
    for flight in flights:
        for entry in flight.entries:
            seqs = last.setdefault(entry.group, {})
            seqs[flight.rank] = max(seqs.get(flight.rank, -1), entry.seq)
    for seqs in last.values():
        newest = max(seqs.values())
        behind = tuple(sorted(rank for rank, seq in seqs.items() if seq < newest))
        if behind and 2 * len(behind) <= len(seqs):
            return behind
    return ()


def _shape(entry: CollectiveEntry) -> tuple[str, str, str]:
    # all_to_all and broadcast may honestly differ in sizes between ranks.
    op = entry.op.lower()
    loose = any(word in op for word in ("all_to_all", "alltoall", "send", "recv", "gather", "scatter"))
    return (op, "" if loose else entry.sizes, "" if loose else entry.dtypes)


def _words(shape: tuple[str, str, str]) -> str:
    return " ".join(part for part in shape if part)
