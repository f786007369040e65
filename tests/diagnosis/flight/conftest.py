"""Dumps of small jobs, as torch writes them."""

from __future__ import annotations

import json
import pickle

import pytest

from diagnosis.flight import read_dump

WORLD = {"0": ("default_pg", (0, 1, 2, 3))}


class Ring:
    """What one rank's recorder holds. Groups are name -> (description, ranks)."""

    def __init__(self, rank, groups=WORLD, backend="nccl"):
        self.rank, self.backend = rank, backend
        self.groups = {name: told for name, told in groups.items() if rank in told[1]}
        self.entries = []
        self.seqs = {}
        self.record = 0

    def calls(self, *ops, group="0", sizes=((4, 8),), dtype="Float", state="completed", at=0, count=1):
        """Calls of a group; `send 0->1` and `recv 1<-0` are point-to-point."""
        for op in ops * count:
            p2p = op.startswith(("send", "recv"))
            seq = self.seqs[group, p2p] = self.seqs.get((group, p2p), 0) + 1
            gloo = self.backend == "gloo"
            entry = {
                "record_id": self.record,
                "pg_id": list(self.groups).index(group),
                "process_group": (group, self.groups[group][0]),
                "collective_seq_id": 0 if p2p else seq,
                "p2p_seq_id": seq if p2p else 0,
                "op_id": seq,
                "profiling_name": f"{self.backend}:{op}",
                "time_created_ns": at or 1_795_000_000_000_000_000 + self.record * 1_000_000,
                "input_sizes": [list(one) for one in sizes],
                "input_dtypes": [dtype],
                "output_sizes": [list(one) for one in sizes],
                "output_dtypes": [dtype],
                "state": "scheduled" if gloo else state,
                "retired": state == "completed",
                "is_p2p": p2p,
                "frames": [{"name": "step", "filename": "/job/train.py", "line": 10 + seq}],
            }
            self.entries.append(entry)
            self.record += 1
        return self

    def waits(self, op="all_reduce", **more):
        """A call that does not complete."""
        return self.calls(op, state=more.pop("state", "started"), **more)

    def value(self):
        told = {
            name: {"name": name, "desc": desc, "ranks": str(list(ranks))} for name, (desc, ranks) in self.groups.items()
        }
        if self.backend == "gloo":
            ranks = list(self.groups["0"][1]) if len(self.groups) == 1 else []
            told = {"": {"name": "", "desc": "", "ranks": str(ranks)}}  # as it is, of the first group only
        return {"version": "2.10", "pg_config": told, "pg_status": {}, "entries": self.entries}

    def pickled(self):
        return pickle.dumps(self.value(), protocol=2)

    def as_json(self):
        return json.dumps(self.value()).encode()

    def dump(self):
        return read_dump(self.pickled(), self.rank)


@pytest.fixture
def ring():
    return Ring


@pytest.fixture
def world(ring):
    """Four ranks after `done` collectives; the given ones wait in the next."""

    def make(waiting=(), done=4, **more):
        rings = {rank: ring(rank, **more).calls("all_reduce", count=done) for rank in range(4)}
        for rank in waiting:
            rings[rank].waits()
        return rings

    return make
