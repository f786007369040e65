from __future__ import annotations

import threading

import pytest

from supervisor.node_health import worker
from supervisor.node_health.worker import BEAT_S, Schedule


@pytest.mark.parametrize("every_s", [10.0, 30.0, 60.0])
def test_looks_that_take_a_moment_keep_their_period_and_meet(every_s: float) -> None:
    of_station = Schedule()
    due = of_station.due(1000.0, every_s)
    assert abs(due - 1000.0 - every_s) <= BEAT_S / 2
    assert of_station.due(due + 0.3, every_s) == pytest.approx(due + every_s)
    other = of_station.due(1003.0, 10.0)
    assert (due - other) / BEAT_S == pytest.approx(round((due - other) / BEAT_S)), "they wake the process together"


def test_frequent_looks_are_only_spread() -> None:
    assert all(0.9 <= Schedule().due(5.0, 1.0) - 5.0 <= 1.1 for _ in range(50))


def test_one_that_never_returns_holds_the_others_up_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "TURN_S", 0.01)
    of_station, hung, over, looks = Schedule(), threading.Event(), threading.Event(), []

    def hang() -> None:
        with of_station.taken():
            hung.set()
            over.wait(60)

    thread = threading.Thread(target=hang)
    thread.start()
    assert hung.wait(60)
    for number in range(3):
        with of_station.taken():
            looks.append(number)
    over.set()
    thread.join(60)
    with of_station.taken():
        looks.append(3)
    assert looks == [0, 1, 2, 3]
