from __future__ import annotations

from diagnosis.logs.compared import compare
from diagnosis.logs.phase_changes import PhaseBook


def book(*start: str, steps: int = 100, end: tuple[str, ...] = (), every: int = 0) -> PhaseBook:
    lines = list(start)
    for step in range(steps):
        lines.append(f"step {step} loss 2.{step:04}")
        if every and step % every == 0:
            lines.append(f"retrying read of shard {step}")
    found = PhaseBook()
    found.feed("log", "\n".join([*lines, *end]).encode(), 1)
    return found


def test_what_start_up_no_longer_says() -> None:
    healthy = book("NCCL INFO Using network IB", "loading 3 shards")

    found = compare(book("NCCL INFO Using network Socket", "loading 4 shards"), healthy)

    assert [one.sample for one in found.new] == ["NCCL INFO Using network Socket"]
    assert [one.sample for one in found.gone] == ["NCCL INFO Using network IB"]


def test_who_made_no_step_has_not_come_to_say_it() -> None:
    assert compare(book("NCCL INFO Using network IB", steps=0), book("NCCL INFO start", "model is built")).gone == []


def test_the_last_words_of_an_attempt_that_failed_are_new_again() -> None:
    failed = book("hello", end=("port 1 is down",))

    assert compare(book("hello", end=("port 2 is down",)), failed).new == []
    again = compare(book("hello", end=("port 2 is down",)), failed, failed=True)
    assert [one.sample for one in again.new] == ["port 2 is down"]


def test_what_is_said_far_more_often() -> None:
    found = compare(book("hello", steps=400, every=2), book("hello", steps=400, every=20))

    (rate,) = found.rates
    assert rate.template.text == "retrying read of shard #"
    assert (round(rate.healthy), round(rate.now)) == (5, 50)
