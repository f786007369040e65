"""What ranks do, by their stacks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis import stacks
from diagnosis.signals import Frame, RankStack
from tests.tables import table

CASES = table(__file__)

LIB = "/env/lib/python3.11/site-packages/"


def stack(*frames, rank=0):
    """Innermost first: `("name", "file")`."""
    return RankStack(rank=rank, frames=tuple(Frame(function=name, file=file, line=3) for name, file in frames))


def dump(*threads):
    return json.dumps(
        [
            {
                "pid": 7,
                "os_thread_id": number,
                "thread_name": name,
                "frames": [{"name": f, "filename": "a.py", "line": 2}],
            }
            for number, name, f in threads
        ]
    )


def test_the_main_thread_is_read():
    found = stacks.parse(3, dump((8, "MainThread2", "other"), (7, "MainThread", "main")), sample=1)
    assert (found.rank, found.sample, found.error) == (3, 1, "")
    assert found.frames == (Frame(function="main", file="a.py", line=2),)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "Error: Permission denied", '[{"frames": 3}]', "[1]", '"x"', "[" * 5000]
)
def test_what_is_no_dump_becomes_an_error(text):
    found = stacks.parse(0, text)
    assert found.frames == ()
    assert found.error


@given(st.binary(max_size=80))
def test_any_bytes_are_survived(data):
    stacks.parse(0, data)


@pytest.mark.parametrize(("frames", "activity"), CASES["activities"])
def test_activities(frames, activity):
    assert stacks.activity(stack(*frames)) == activity


def test_equal_stacks_are_grouped_and_the_odd_one_named(at):
    seen = [at("collective", 0), at("collective", 1), at("sleep", 2), at("collective", 3)]
    groups = stacks.group(seen)
    assert [group.ranks for group in groups] == [(0, 1, 3), (2,)]


def test_the_users_own_frame_is_the_place():
    frames = [("all_reduce", LIB + "torch/distributed/distributed_c10d.py"), ("step", "/home/u/train.py")]
    assert stacks.place(stack(*frames)) == "step (train.py:3)"
    assert stacks.place(RankStack(rank=0, frames=(), error="no permission")) == "no permission"
