"""From dumps to a straggler."""

from __future__ import annotations

import json

from diagnosis import arrivals, timings
from diagnosis.flight import read_dump


def dump(rank, late_ns):
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    entries = [
        {
            "record_id": seq,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": seq,
            "profiling_name": "gloo:all_reduce",
            "time_created_ns": 1_700_000_000_000_000_000 + seq * 200_000_000 + late_ns,
            "input_sizes": [[4]],
            "output_sizes": [[4]],
            "input_dtypes": ["Float"],
            "state": "scheduled",
            "retired": True,
            "is_p2p": False,
        }
        for seq in range(1, 50)
    ]
    send = entries[0] | {"is_p2p": True, "p2p_seq_id": 1, "profiling_name": "nccl:send 0->1", "collective_seq_id": 0}
    value = {"version": "2.10", "pg_config": config, "entries": [*entries, *([send] if rank < 2 else [])]}
    return read_dump(json.dumps(value).encode(), rank)


def test_a_rank_that_is_always_late():
    told = timings.of_dumps([dump(rank, 100_000_000 if rank == 3 else 0) for rank in range(4)])
    assert {one.group for one in told} == {"default_pg (ranks 0, 1, 2, 3)", "p2p 0->1"}
    found = arrivals.judge([one for one in told if not one.group.startswith("p2p")])
    assert [(one.kind, one.ranks) for one in found] == [("rank", (3,))]
    assert arrivals.judge(told) == ()  # a group of several stages: they wait for each other by nature


def test_nothing_gives_nothing():
    assert timings.of_dumps([]) == []
