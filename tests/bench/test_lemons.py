"""The bench of the ledger's score, on a trace in which one node is a lemon and the others failed once."""

from __future__ import annotations

from typing import Any

from tests.bench.lemons import RULES, days, lift


def fault(node: str, at: float, description: str = "GPU lost") -> list[dict[str, Any]]:
    kind = {"Level": "Hardware Failure", "Class": "GPU", "Desc": description}
    starts = {"node_id": node, "event_time": at, "event_type": "fault_start", "fault_type": kind}
    return [starts, {**starts, "event_time": at + 0.5, "event_type": "fault_end"}]


def test_a_planted_lemon_is_found_and_nobody_else() -> None:
    trace = [one for at in range(5, 100, 5) for one in fault("bad", at)]
    trace += [one for number in range(20) for one in fault(f"n{number}", 10.0 + number, "Stress Test Failure")]
    found = days(trace, 40, 70)
    nodes, share, others, _ = lift(found, RULES["lemons"]())
    assert (nodes, share, others) == (1.0, 1.0, 0.0)
