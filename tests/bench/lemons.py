"""How well the ledger's score tells which nodes will fail, on a real trace of faults.

    python -m tests.bench.lemons TRACE.json [--days 348] [--split]

TRACE.json: the `fault_trace.json` of the InfiniteHBD trace (see docs/benchmarks.md). Each day the nodes are ranked by
the score of what was known by then; what they do within the next 28 days is compared with all other nodes.
`--split` also prints the two halves of the trace: the weights were chosen on the first.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from recovery.ledger import (
    DAY_S,
    PROBATION_S,
    WINDOW_S,
    CordonLifted,
    LedgerEntry,
    NodeCordoned,
    NodeFailed,
    NodeScore,
    TestResult,
    score,
)

NODES = 400
LATER = 28


def entries_of(trace: list[dict[str, Any]]) -> dict[str, list[LedgerEntry]]:
    """Node -> what the ledger would have of it: failure (or failed test), cordon, and its end with a repair."""
    found: dict[str, list[LedgerEntry]] = defaultdict(list)
    for number, event in enumerate(sorted(trace, key=lambda one: one["event_time"])):
        node, at, kind = event["node_id"], event["event_time"] * DAY_S, event["fault_type"]

        def entry(what: Any, suffix: str, at: float = at, number: int = number) -> LedgerEntry:
            return LedgerEntry(v=1, id=f"{number}-{suffix}", at=at, by="policy", job="trace", what=what)

        if event["event_type"] != "fault_start":
            found[node].append(entry(CordonLifted(node=node, repair="repaired"), "end"))
        elif "stress" in kind["Desc"].lower():
            found[node].append(entry(TestResult(node=node, test="stress", verdict="fail", at=at), "test"))
            found[node].append(entry(NodeCordoned(node=node, scope="cluster", reason=kind["Desc"]), "out"))
        else:
            found[node].append(entry(NodeFailed(node=node, failure_class=kind["Class"]), "failed"))
            found[node].append(entry(NodeCordoned(node=node, scope="cluster", reason=kind["Desc"]), "out"))
    return found


class Day(NamedTuple):
    day: int
    scores: dict[str, NodeScore]
    later: dict[str, int]
    """Faults within the next 28 days."""


def days(trace: list[dict[str, Any]], first: int, last: int) -> list[Day]:
    entries = entries_of(trace)
    starts: dict[str, list[float]] = defaultdict(list)
    for event in trace:
        if event["event_type"] == "fault_start":
            starts[event["node_id"]].append(event["event_time"])
    nodes = [*entries, *(f"without a fault {number}" for number in range(NODES - len(entries)))]
    found = []
    for day in range(first, last + 1):
        now = day * DAY_S
        scores = {node: score([one for one in entries.get(node, ()) if one.at <= now], now) for node in nodes}
        later = {node: sum(day < at <= day + LATER for at in starts.get(node, ())) for node in nodes}
        found.append(Day(day, scores, later))
    return found


def lift(found: list[Day], chosen: Any) -> tuple[float, float, float, float]:
    """How many are chosen a day; the share of them, and of the others, that fail later; and the quotient."""
    hits = hit_nodes = misses = others = 0
    for day in found:
        for node, number in day.later.items():
            if chosen(day, node):
                hits, hit_nodes = hits + (number > 0), hit_nodes + 1
            else:
                misses, others = misses + (number > 0), others + 1
    share, rest = hits / max(1, hit_nodes), misses / max(1, others)
    return hit_nodes / max(1, len(found)), share, rest, share / rest if rest else float("inf")


def top(share: float) -> Any:
    """The nodes with the most points, as many as `share` of all (and with any points)."""
    chosen: dict[int, set[str]] = {}

    def is_chosen(day: Day, node: str) -> bool:
        if day.day not in chosen:
            ranked = sorted(day.scores, key=lambda name: (-day.scores[name].points, name))
            most = ranked[: int(share * len(ranked))]
            chosen[day.day] = {name for name in most if day.scores[name].points}
        return node in chosen[day.day]

    return is_chosen


RULES: dict[str, Any] = {
    "lemons": lambda: lambda day, node: day.scores[node].lemon,
    "top 1 %": lambda: top(0.01),
    "top 5 %": lambda: top(0.05),
    "any points": lambda: lambda day, node: day.scores[node].points > 0,
    "4 points": lambda: lambda day, node: day.scores[node].points >= 4,
}


def table(found: list[Day]) -> list[str]:
    lines = [f"{'chosen':<12}{'nodes a day':>12}{'fail later':>12}{'others':>9}{'lift':>7}"]
    for name, rule in RULES.items():
        nodes, share, rest, times = lift(found, rule())
        lines.append(f"{name:<12}{nodes:>12.1f}{share:>11.1%} {rest:>8.1%} {times:>6.1f}")
    return lines


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("trace", type=Path)
    parse.add_argument("--days", type=int, default=348)
    parse.add_argument("--split", action="store_true")
    options = parse.parse_args()
    trace = json.loads(options.trace.read_text())
    first, last = int(WINDOW_S / DAY_S), options.days - LATER
    middle = (first + last) // 2
    parts = {f"days {first} to {last}": (first, last)}
    if options.split:
        parts |= {
            f"days {first} to {middle}": (first, middle),
            f"days {middle + LATER} to {last}": (middle + LATER, last),
        }
    for title, (begin, end) in parts.items():
        print(title, *table(days(trace, begin, end)), "", sep="\n")
    print(f"probation: {PROBATION_S / DAY_S:.0f} days")


if __name__ == "__main__":
    main()
