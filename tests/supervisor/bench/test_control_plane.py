"""`unbroken bench control-plane` with a few agents, and its arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.bench.control_plane import goals, growth, report


def test_growth_is_the_exponent_between_the_two_largest_jobs() -> None:
    rows = [
        {"nodes": 16.0, "restart_cpu_s": 9.0},
        {"nodes": 256.0, "restart_cpu_s": 1.0, "rss_peak_mb": 50.0},
        {"nodes": 1024.0, "restart_cpu_s": 16.0, "rss_peak_mb": 100.0},
    ]
    assert growth(rows) == {"restart_cpu_s": 2.0, "rss_peak_mb": 0.5}
    assert growth(rows[:1]) == {}


def test_goals_are_of_the_largest_job() -> None:
    assert goals([{"nodes": 16.0, "verdict_s": 0.5}, {"nodes": 4096.0, "verdict_s": 0.1}]) == [
        {"what": "verdict_s", "value": 0.1, "goal": 0.2, "met": True}
    ]


@pytest.mark.lasts(60)
def test_fake_agents_live_through_the_whole_story(tmp_path: Path) -> None:
    phases = ("reads", "death", "restart", "kill", "storm", "mass")
    [row] = report(tmp_path, [8], phases, lambda _: None)["rows"]
    assert row["reconnect_new_attempts"] == 0
    assert (row["mass_incidents"], row["mass_restarts"], row["mass_lost_wrongly"]) == (1, 1, 0)
    assert row["dropped"] == 0
