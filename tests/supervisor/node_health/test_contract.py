"""What probes remember of counters."""

from __future__ import annotations

from pathlib import Path

from supervisor.node_health.contract import Baseline, ProbeContext, Rates, recall


def test_what_grew_between_two_looks_far_apart_is_not_of_the_last_minute() -> None:
    rates = Rates()
    for mono, value in ((0.0, 5), (3600.0, 3605), (3660.0, 3606)):
        rates.add("a", value, mono)
    assert rates.increase("a", 60, 3660.0) == 1
    assert rates.increase("a", 120, 3660.0) == 61
    assert rates.increase("a", 60, 3690.0) == 1, "half of it is in, and what grew at all is not nothing"
    assert rates.increase("a", 60, 9999.0) == rates.increase("b", 60, 0.0) == 0


def test_a_counter_that_became_smaller_starts_anew(tmp_path: Path) -> None:
    rates, place = Rates(), ProbeContext(root=tmp_path, state_dir=tmp_path / "state")
    for mono, value in ((0.0, 5), (10.0, 50), (20.0, 7)):
        rates.add("a", value, mono)
    assert rates.increase("a", 3600, 20.0) == 0
    assert Baseline("errors").of(place, {"a": 5}) == {"a": 5}
    assert Baseline("errors").of(place, {"a": 9, "b": 1}) == {"a": 5, "b": 1}
    assert Baseline("errors").of(place, {"a": 2}) == {"a": 2, "b": 1}


def test_what_was_kept_by_another_version_is_as_nothing(tmp_path: Path) -> None:
    place = ProbeContext(root=tmp_path, state_dir=tmp_path / "state")
    place.keep("size", "five")
    assert recall(place, "size", int) == 0
    assert recall(place, "size", dict[str, int]) == {}
