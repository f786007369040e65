"""Dumps of all kinds are read, reduced; what is none is refused in words."""

from __future__ import annotations

import json
import math
import pickle
import time

import msgspec
import pytest

from diagnosis.flight import read_dump
from diagnosis.flight.dumps import COMPLETED, SCHEDULED, STARTED, both, read_flight, read_reduced
from diagnosis.signals import RankFlight


def test_pickle_and_json_say_the_same(ring):
    made = ring(1).calls("all_reduce", "all_gather", count=3).waits("broadcast").waits("send 1->2")
    dump, other = read_dump(made.pickled(), 1), read_dump(made.as_json(), 1)
    assert dump == other
    collectives, p2p = dump.channels
    assert (collectives.enqueued, collectives.waits_at, collectives.group.members) == (7, 7, (0, 1, 2, 3))
    assert list(collectives.states) == [COMPLETED] * 6 + [STARTED]
    assert (p2p.p2p, p2p.waits_at) == (True, 1)
    assert dump.front_at() == 0
    assert str(dump.known[collectives.calls[-1]]) == "nccl:broadcast 4x8 Float"
    assert dump.frames[0, 6][0].line == 17


def test_gloo_marks_completion_by_retiring(ring):
    dump = ring(0, backend="gloo").calls("all_reduce").waits().dump()
    assert list(dump.channels[0].states) == [COMPLETED, SCHEDULED]
    assert dump.channels[0].group == ("0", "default_pg", ())


def test_nccl_retires_what_timed_out_too(ring):
    made = ring(0).calls("all_reduce").waits()
    made.entries[-1]["retired"] = True
    assert made.dump().channels[0].waits_at == 2


def test_calls_that_were_coalesced_are_one(ring):
    made = ring(0).calls("all_gather_into_tensor_coalesced", count=3)
    for entry in made.entries[1:]:
        entry["collective_seq_id"] = 2
    assert list(made.dump().channels[0].seqs) == [1, 2]


def test_a_wrapped_ring_and_active_entries_only(ring):
    made = ring(0).calls("all_reduce", count=20).waits()
    made.entries = made.entries[12:]
    dump = made.dump()
    assert (dump.first_record, dump.partial, dump.channels[0].seqs[0]) == (12, False, 13)
    made.entries = made.entries[-1:]
    assert made.dump().partial


def test_numbers_as_text_and_the_status_of_a_group(ring):
    value = ring(0).calls("all_reduce").value()
    value["pg_status"] = {"0": {"last_enqueued_collective": "9", "last_completed_collective": "8"}, "3": {"x": 1}}
    dump = read_dump(json.dumps(value).encode(), 0)
    assert dump.channels[0].enqueued == 9
    assert list(dump.unnamed) == [3]


ODD_VALUES = [
    None,
    -1,
    1 << 70,
    math.nan,
    [],
    {},
    "x\x1b[31m" * 1000,
    [[[[[]]]]],
    [[1 << 70] * 500] * 500,
    True,
    [None],
    [{}],
]


FIELDS = """
collective_seq_id pg_id process_group profiling_name time_created_ns input_sizes output_sizes
input_dtypes state retired is_p2p frames record_id
""".split()


@pytest.mark.parametrize("field", FIELDS)
def test_no_value_of_any_field_breaks_the_reader(ring, field):
    for odd in ODD_VALUES:
        made = ring(0).calls("all_reduce", count=2)
        made.entries[0][field] = odd
        dump = made.dump()
        assert len(dump.order) >= 1
        assert all(one.isprintable() for call in dump.known.values() for one in call)


def test_values_that_hold_themselves_or_one_list_many_times_cost_nothing():
    deep = ("x",)
    for _ in range(200):
        deep = (deep, deep)
    ring = []
    ring.append(ring)
    entry = {"profiling_name": "nccl:all_reduce", "collective_seq_id": 1, "input_sizes": [[deep]], "output_sizes": ring}
    began = time.process_time()
    try:
        read_dump(pickle.dumps({"entries": [entry] * 500}, 2), 0)
    except ValueError:
        pass
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty file"),
        (b"GET / HTTP/1.1", "neither a pickle nor JSON"),
        (b'{"entries": [', "cut short"),
        (b"[" * 100_000, "JSON"),
        (b'{"a": 1}', "neither entries nor process groups"),
        (b'{"entries": {}, "pg_config": {"0": []}}', None),
        (b'{"entries": "x"}', "no list"),
        (pickle.dumps(5, 2), "neither entries"),
    ],
)
def test_what_is_no_dump_is_refused_in_words(data, why):
    if why is None:
        assert not read_dump(data, 0).order
        return
    with pytest.raises(ValueError, match=why):
        read_dump(data, 0)


def test_what_other_processes_read_shares_its_groups(ring):
    read = [pickle.loads(pickle.dumps(ring(rank).calls("all_reduce").dump())) for rank in (0, 1)]
    assert read[0].channels[0].group == ring(0).calls("all_reduce").dump().channels[0].group
    assert read[0].channels[0].group.members is read[1].channels[0].group.members


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
