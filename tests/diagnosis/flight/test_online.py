"""The recorders' words, as JSON and as a pickle, reduced to what tells ranks apart."""

from __future__ import annotations

import json
import pickle

import msgspec
import pytest

from diagnosis.flight.dumps import both, read_flight, read_reduced
from diagnosis.signals import RankFlight


def entry(seq, op="nccl:all_reduce", **more):
    return {
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "profiling_name": op,
        "input_sizes": [[4, 8]],
        "input_dtypes": ["Float"],
        "state": "completed",
        "retired": False,
        "frames": [{"name": "f", "filename": "train.py", "line": 1}],
        **more,
    }


TRACE = {
    "version": "2.10",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "entries": [*(entry(seq) for seq in range(8)), entry(8, state="scheduled")],
}


def test_json_and_pickle_say_the_same():
    dumped = read_reduced(pickle.dumps(TRACE, 2), 1)
    assert dumped == read_flight(json.dumps(TRACE).encode(), 1)
    assert [one.seq for one in dumped.entries] == [5, 6, 7, 8]
    assert [one.completed for one in dumped.entries] == [True, True, True, False]
    assert dumped.entries[0].group == "[0, 1]"


@pytest.mark.parametrize("value", [[], {"entries": 1}, {"entries": [{"collective_seq_id": []}]}])
def test_a_pickle_of_something_else(value):
    with pytest.raises(ValueError, match="no flight recorder dump"):
        read_reduced(pickle.dumps(value, 2), 0)


def test_what_a_rank_writes_into_its_answer_can_always_be_told_on():
    hostile = entry(1 << 80, pg_id="x\x1b[31m" * 100, process_group=())
    read = read_reduced(pickle.dumps({"entries": [hostile]}, 2), 0)
    assert -1 <= read.entries[0].seq < 1 << 63
    assert read.entries[0].group.isprintable()
    assert msgspec.json.decode(msgspec.json.encode(read), type=RankFlight) == read
    assert read_flight(b'{"entries": [{"collective_seq_id": "no number"}]}', 0).error


def test_each_backend_has_a_recorder_of_its_own():
    nccl, gloo = RankFlight(rank=0, entries=(1,)), RankFlight(rank=0, entries=(2,))
    missing = RankFlight(rank=0, error="HTTP/1.1 404 Not Found")
    assert both(nccl, gloo).entries == (2, 1)
    assert both(nccl, nccl).entries == (1,)
    assert both(missing, gloo) is gloo
    assert both(nccl, missing) is nccl
    assert both(missing, missing).error
