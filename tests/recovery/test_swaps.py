"""Whether a node that degrades leaves at the next checkpoint, is only recommended to, or stays."""

from __future__ import annotations

from typing import Any

import pytest

from recovery.swaps import SwapCase, decide, have_a_common_cause

BAD = {"cause": "device", "proven": True, "spares": 1}


@pytest.mark.parametrize(
    ("case", "state"),
    [
        (BAD, "planned"),
        ({**BAD, "proven": False}, "recommended"),
        ({**BAD, "cause": "straggler", "proven": False}, "recommended"),
        ({**BAD, "cause": "drained"}, "planned"),
        ({**BAD, "cause": "drained", "storm": True}, "recommended"),
        ({**BAD, "cause": "maintenance", "storm": True}, "recommended"),
        ({**BAD, "cause": "cordoned"}, "planned"),
        ({**BAD, "cause": "cordoned", "may_cordon": False}, "recommended"),
        ({**BAD, "setting": "recommend"}, "recommended"),
        ({**BAD, "mode": "recommend"}, "recommended"),
        ({**BAD, "mode": "observe"}, "recommended"),
        ({**BAD, "may_cordon": False}, "recommended"),
        ({**BAD, "within_day": 5, "per_day": 5}, "recommended"),
        ({**BAD, "within_day": 4, "per_day": 5}, "planned"),
        ({**BAD, "spares": 0}, "blocked"),
        ({**BAD, "paused": True}, "blocked"),
        ({**BAD, "storm": True}, "blocked"),
        ({**BAD, "left_s": 30.0, "cost_s": 40.0}, "blocked"),
        ({**BAD, "left_s": 50.0, "cost_s": 40.0}, "planned"),
    ],
)
def test_what_becomes_of_it(case: dict[str, Any], state: str) -> None:
    found = decide(SwapCase(**case))
    assert found.state == state
    assert bool(found.because) == (state != "planned")


@pytest.mark.parametrize(
    "more",
    [
        {"proven": False},
        {"setting": "recommend"},
        {"mode": "observe"},
        {"paused": True},
        {"storm": True},
        {"may_cordon": False},
        {"within_day": 99},
    ],
)
def test_an_operators_word_is_enough_but_makes_no_spare(more: dict[str, Any]) -> None:
    assert decide(SwapCase(**{**BAD, **more}, wanted=True)).state == "planned"
    assert decide(SwapCase(**{**BAD, **more, "spares": 0}, wanted=True)).state == "blocked"


@pytest.mark.parametrize(
    ("failed", "domains", "common"),
    [
        ("a", {"a": "r1", "b": "r1", "c": "r2"}, False),
        ("ab", {"a": "r1", "b": "r1", "c": "r2"}, True),
        ("ac", {"a": "r1", "b": "r1", "c": "r2"}, False),
        ("ab", {"a": "r1", "b": "r1", "c": "r1"}, False),  # all of the job is there: that tells nothing
        ("ab", {"a": "", "b": "", "c": ""}, False),
        ("ab", {"a": "r1", "b": "", "c": "r2"}, False),
        ("ab", {"a": "r1", "b": "r1", "c": ""}, False),  # nobody knows that c is elsewhere
        ("ab", dict.fromkeys("abdefghi", "r1") | {"c": "r2"}, True),
        ("ab", dict.fromkeys(("a", "b", *map(str, range(63))), "fabric") | {"c": "r2"}, False),  # no rack is so large
        ("abc", {"a": "", "b": "", "c": ""}, True),
        ("acd", {"a": "r1", "c": "r2", "d": "r3"}, True),
    ],
)
def test_what_several_nodes_share(failed: str, domains: dict[str, str], common: bool) -> None:
    assert have_a_common_cause(set(failed), domains) == common
