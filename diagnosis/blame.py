"""Who is to blame, by comparing ranks: flight recorder entries that disagree, stacks that stand out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from diagnosis import stacks as stack_reading
from diagnosis.signals import CollectiveEntry, Evidence, RankFlight, RankStack


def mismatch(flights: Iterable[RankFlight]) -> tuple[tuple[int, ...], str]:
    """The ranks that disagree with most on the first collective that differs, and why; empty when none differs."""
    calls: dict[tuple[str, int], dict[int, CollectiveEntry]] = {}
    for flight in flights:
        for entry in flight.entries:
            if any(word in entry.op.lower() for word in ("send", "recv")):
                continue  # partners honestly differ
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
        said = " against ".join(
            f"{_words(shape)} (rank {', '.join([str(rank) for rank in sorted(shapes) if shapes[rank] == shape][:6])})"
            for shape in (usual, other)
        )
        return odd, f"the ranks disagree on collective {seq} of group {group}: {said}"
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


def stack_evidence(stacks: Iterable[RankStack], nodes: dict[int, str]) -> tuple[Evidence, ...]:
    """Where the ranks are, the odd ones first: one line for each group of equal stacks."""
    groups = stack_reading.group(stacks)
    groups.sort(key=lambda one: (one.activity in ("collective", "teardown"), len(one.ranks)))
    lines = []
    for one in groups[:5]:
        ranks = ", ".join(str(rank) for rank in one.ranks[:8]) + (", ..." if len(one.ranks) > 8 else "")
        where = stack_reading.place(RankStack(rank=one.ranks[0], frames=one.frames))
        leaf = one.frames[0].function
        lines.append(
            Evidence(
                text=f"rank {ranks}: {one.activity} in {where}, at {leaf}",
                source="stacks",
                rank=one.ranks[0],
                node=nodes.get(one.ranks[0], ""),
            )
        )
    return tuple(lines)
