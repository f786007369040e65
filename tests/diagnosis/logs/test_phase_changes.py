from __future__ import annotations

import datetime
import random
from collections.abc import Sequence

import pytest

from diagnosis.logs.phase_changes import Change, PhaseBook

SAVE = ("saving checkpoint at iteration {step}", "writing shard 3 of 8", "fsync took 0.31 s", "saved iteration {step}")


class Run:
    """The log of a training with times."""

    def __init__(self) -> None:
        self.at = 1_700_000_000.0
        self.lines = [self._dated("building the model"), self._dated("NCCL INFO Using network IB")]

    def _dated(self, text: str) -> str:
        return f"{datetime.datetime.fromtimestamp(self.at, datetime.timezone.utc):%Y-%m-%d %H:%M:%S} {text}"

    def say(self, text: str, seconds: float = 0.0) -> None:
        self.at += seconds
        self.lines.append(self._dated(text))

    def save(self, step: int, says: Sequence[str] = SAVE, seconds: float = 4.0) -> None:
        for line in says:
            self.say(line.format(step=step), seconds / len(says))

    def train(self, first: int, last: int, also: str = "", share: float = 1.0) -> None:
        rng = random.Random(first)
        for step in range(first, last):
            self.say(f"step {step}/9999 loss 2.{step:04}", 1.0)
            if also and rng.random() < share:
                self.say(also.format(n=rng.randrange(1000)))

    def changes(self, rank: int | None = None) -> list[Change]:
        book = PhaseBook()
        book.feed("log", "\n".join(self.lines).encode(), 1, rank)
        return book.changes()


def run(saves: int = 5) -> Run:
    told = Run()
    for number in range(saves):
        told.train(100 * number, 100 * (number + 1), "gc: {n} objects", 0.3)
        told.save(100 * number)
    return told


def test_a_checkpoint_like_those_before_it_is_not_told() -> None:
    told = run()
    told.train(500, 540, "gc: {n} objects", 0.3)

    assert told.changes() == []


def test_a_checkpoint_that_does_not_end() -> None:
    told = run()
    told.train(500, 600, "gc: {n} objects", 0.3)
    told.save(600, (*SAVE[:2], "lease lost, renewing"))

    changes = {(one.kind, one.text) for one in told.changes()}

    assert changes == {
        ("missing", "fsync took # s"),
        ("missing", "saved iteration #"),
        ("new", "lease lost, renewing"),
    }
    assert {one.phase for one in told.changes()} == {"checkpoint"}
    assert {one.before for one in told.changes() if one.kind == "missing"} == {5.0}


def test_a_line_of_the_training_that_came_in_each_checkpoint_but_the_last_is_not_missing() -> None:
    told = Run()
    for number in range(5):
        told.train(100 * number, 100 * (number + 1), "gc: {n} objects")
        told.save(100 * number, ("saving checkpoint to out", *(["gc: 3 objects"] if number < 4 else [])))
    told.train(500, 540, "gc: {n} objects")

    assert told.changes() == []


def test_a_checkpoint_that_takes_long() -> None:
    told = run()
    told.train(500, 600)
    told.save(600, seconds=400.0)
    told.train(600, 610)

    (change,) = (one for one in told.changes() if one.phase == "checkpoint")

    assert (change.kind, change.before, change.now) == ("long", pytest.approx(4, abs=2), pytest.approx(301, abs=3))
    assert "saving checkpoint" in told.lines[change.line - 1]


def test_what_follows_the_last_step() -> None:
    told = run()
    told.train(500, 540, "gc: {n} objects", 0.3)
    told.say("gc: 4 objects")
    told.say("NET/IB: port 1 is down", 30)
    told.say("Traceback (most recent call last):")
    told.say('  File "train.py", line 3, in main')

    changes = told.changes()

    assert [(one.kind, one.phase, one.text) for one in changes] == [("new", "the end", "NET/IB: port # is down")]


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_line_that_comes_from_some_step_on(share: float) -> None:
    told = run()
    began = len(told.lines)
    told.train(500, 900, "retrying read of shard {n}", share)

    more = {one.text: one for one in told.changes()}

    change = more["retrying read of shard #"]
    assert (change.kind, change.phase) == ("more", "training")
    assert (change.before, change.now) == (0.0, pytest.approx(100 * share, abs=15))
    assert change.line == pytest.approx(began, abs=80)
    assert more["gc: # objects"].kind == "less"


def test_a_burst_is_no_rate() -> None:
    told = run()
    told.train(500, 510, "retrying read of shard {n}")
    told.train(510, 900, "gc: {n} objects", 0.3)

    assert told.changes() == []


def test_what_several_ranks_tell_alike_is_told_once_and_what_one_tells_first() -> None:
    book = PhaseBook()
    for rank in range(4):
        told = run()
        told.train(500, 540, "gc: {n} objects", 0.3)
        told.say("peer is gone", 30)
        if rank == 2:
            told.say("port is down")
        book.feed(f"rank{rank}.log", "\n".join(told.lines).encode(), 1, rank)

    changes = book.changes()

    assert [(one.text, one.ranks) for one in changes] == [("port is down", (2,)), ("peer is gone", (0, 1, 2, 3))]
