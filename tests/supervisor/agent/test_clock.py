"""The offset of two clocks: bounded for certain, and begun anew when one of them was set."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from supervisor.agent.link import ASK_CLOCK_EVERY_S, FIRST_CLOCK_QUESTIONS, ClockOffset


def ask(clock: ClockOffset, mono: float, offset_s: float, there_s: float, back_s: float, thinks_s: float = 0.0) -> None:
    """One question and answer: the controller's clock shows `mono`, ours `mono + offset_s`."""
    received = mono + there_s
    sent = received + thinks_s
    clock.answered(mono + offset_s, received, sent, sent + back_s + offset_s, sent + back_s)


@example(offset_s=3096.0, ways=[(0.0, 0.0, 0.6266162765481454)])
@given(
    offset_s=st.floats(-1e4, 1e4),
    ways=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 1)), min_size=1, max_size=20),
)
def test_the_true_offset_lies_within_the_error_whatever_the_way(
    offset_s: float, ways: list[tuple[float, float, float]]
) -> None:
    clock = ClockOffset()
    for number, (there_s, back_s, thinks_s) in enumerate(ways):
        ask(clock, 1000.0 + 60 * number, offset_s, there_s, back_s, thinks_s)
    found = clock.best(1000.0 + 60 * len(ways))
    assert abs(found[0] - offset_s) <= found[1] + 1e-6


def test_the_quickest_answer_counts() -> None:
    clock = ClockOffset()
    assert clock.best(0.0) is None
    ask(clock, 0.0, 0.2, 1.5, 0.0)
    ask(clock, 60.0, 0.2, 0.001, 0.001)
    ask(clock, 120.0, 0.2, 0.0, 0.9)
    offset_s, error_s = clock.best(121.0) or (0.0, 0.0)
    assert offset_s == pytest.approx(0.2, abs=1e-6)
    assert error_s < 0.01


def test_a_clock_that_was_set_is_noticed_with_the_next_answer() -> None:
    clock = ClockOffset()
    for number in range(8):
        ask(clock, 60.0 * number, 0.0, 0.001, 0.001)
    ask(clock, 480.0, -3.0, 0.3, 0.001)
    offset_s, error_s = clock.best(481.0) or (0.0, 0.0)
    assert abs(offset_s + 3.0) <= error_s < 0.2


def test_an_answer_is_ignored_if_a_clock_was_set_meanwhile() -> None:
    clock = ClockOffset()
    clock.answered(asked_at=100.0, received_at=100.0, sent_at=100.0, now=40.0, mono=1.0)
    clock.answered(asked_at=100.0, received_at=100.0, sent_at=90.0, now=101.0, mono=1.0)
    assert clock.best(2.0) is None


def test_it_asks_a_few_times_at_first_then_seldom() -> None:
    clock = ClockOffset()
    clock.connected()
    asked = [second for second in range(601) if clock.due(float(second))]
    assert asked[:FIRST_CLOCK_QUESTIONS] == [0, 2, 4]
    assert len(asked) <= FIRST_CLOCK_QUESTIONS + 600 / ASK_CLOCK_EVERY_S
    clock.connected()
    assert clock.due(601.0)
