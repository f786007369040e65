"""Dumps with anything in them: they are refused in words, or judged; quickly, and never with another error."""

from __future__ import annotations

import json
import pickle
import random
import time

import pytest

from diagnosis.flight import analyse, from_rank_flights, read_dump
from diagnosis.flight.dumps import reduced
from tests.bench.flight import case, judged
from tests.bench.flight_jobs import FAULTS, dump

ODD = [
    None,
    -1,
    1 << 70,
    0.5,
    float("nan"),
    [],
    {},
    "x",
    "nccl:send 0->99999",
    "nccl:recv 3<-3",
    "gloo:all_reduce",
    True,
]
ODD += [[0, 1], "[0, 1, 5]", "[-1]", "[9999999]", 0, 1, 2, 10**9, [[["a"]]], {"last_enqueued_collective": 5}]


def spoiled(value, dice):
    """The same with a few fields replaced, of entries, groups or the whole."""
    for _ in range(dice.randrange(6)):
        entries, groups = value.get("entries"), value.get("pg_config")
        targets = [value]
        targets += [dice.choice(entries)] * 6 if isinstance(entries, list) and entries else []
        targets += [dice.choice(list(groups.values()))] * 2 if isinstance(groups, dict) and groups else []
        target = dice.choice(targets)
        if isinstance(target, dict) and target:
            target[dice.choice(list(target))] = dice.choice(ODD)
    return value


@pytest.mark.parametrize("seed", range(30))
def test_spoiled_dumps(seed):
    dice = random.Random(seed)
    job = case(dice.choice(FAULTS), seed)
    dumps = []
    for rank in job.programs:
        try:
            dumps.append(read_dump(pickle.dumps(spoiled(dump(job, rank), dice), 2), dice.choice((rank, rank, None, 0))))
        except ValueError:
            continue
    for report in (judged(dumps), analyse(from_rank_flights([reduced(one) for one in dumps]))):
        assert report is None or (report.why.isprintable() and 0 <= report.confidence <= 1)


def test_groups_without_end(ring):
    everyone = json.dumps(list(range(60_000)))
    value = ring(0).waits().value()
    value["pg_config"] = {str(n): {"name": str(n), "desc": f"g{n}", "ranks": everyone} for n in range(30)}
    value["entries"] = [
        {**value["entries"][0], "pg_id": n, "process_group": (str(n), f"g{n}"), "collective_seq_id": n}
        for n in range(2_500)
    ]
    began = time.process_time()
    assert judged([read_dump(pickle.dumps(value, 2), rank) for rank in range(4)]).kind == "dead_rank"
    assert time.process_time() - began < 30
