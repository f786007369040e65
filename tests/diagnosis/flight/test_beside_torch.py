"""Dumps that real processes write, and torchrun's own analyser as an oracle where it is right."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from diagnosis.flight import analyse, read_dump
from tests.bench.flight import _torchrun

pytestmark = [pytest.mark.slow, pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")]

SCRIPT = """
import os, sys, threading, time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

folder, fault = sys.argv[1:]

def entries():
    import json
    return len(json.loads(_dump_fr_trace_json(True, False)).get("entries", []))

def dump(rank):
    waits = not (fault == "missing" and rank == 2)
    while entries() < 4 + waits:
        time.sleep(0.01)
    open(f"{folder}/ready_{rank}", "w").close()
    all_have("ready")
    open(f"{folder}/json_{rank}", "wb").write(_dump_fr_trace_json(True, False))
    open(f"{folder}/rank_{rank}", "wb").write(_dump_fr_trace(True, True, False))
    open(f"{folder}/done_{rank}", "w").close()
    all_have("done")
    os._exit(0)

def all_have(what):
    while len([name for name in os.listdir(folder) if name.startswith(what)]) < 4:
        time.sleep(0.01)

def work(rank):
    dist.init_process_group("gloo", rank=rank, world_size=4, init_method=f"file://{folder}/store")
    tensor = torch.ones(8)
    for _ in range(4):
        dist.all_reduce(tensor)
    threading.Thread(target=dump, args=(rank,)).start()
    if fault == "missing" and rank == 2:
        time.sleep(60)
    elif fault == "other" and rank == 3:
        dist.all_gather([torch.ones(8) for _ in range(4)], tensor)
    else:
        dist.all_reduce(tensor)
    time.sleep(60)

pids = []
for rank in range(4):
    pid = os.fork()
    if not pid:
        work(rank)
    pids.append(pid)
for pid in pids:
    os.waitpid(pid, 0)
"""


@pytest.mark.parametrize(
    ("fault", "kind", "culprit"), [("missing", "missing_rank", 2), ("other", "collective_type_mismatch", 3)]
)
def test_dumps_of_real_gloo_ranks(tmp_path, fault, kind, culprit):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    subprocess.run([sys.executable, str(script), str(tmp_path), fault], check=True, timeout=90)
    for prefix in ("json", "rank"):
        dumps = [read_dump((tmp_path / f"{prefix}_{rank}").read_bytes(), rank) for rank in range(4)]
        report = analyse(dumps)
        assert (report.kind, report.culprit_ranks, report.collective_seq) == (kind, (culprit,), 5)
        assert report.problems == ()
    assert "work (train.py:" in report.evidence[-1].text  # the pickle tells stacks


def stuck(world):
    return world(waiting=(0, 1, 3))


def other(world):
    rings = world(waiting=(0, 1, 2))
    rings[3].waits("all_gather")
    return rings


def smaller(world):
    rings = world(waiting=(0, 1, 2))
    rings[3].waits(sizes=((4, 7),))
    return rings


def other_by_the_first(world):
    rings = world(waiting=(1, 2, 3))
    rings[0].waits("broadcast")
    return rings


def test_right_where_torchs_own_is_right_and_where_it_is_not(tmp_path, world):
    cases = {"stuck": (stuck, 2), "other": (other, 3), "smaller": (smaller, 3), "first": (other_by_the_first, 0)}
    for name, (make, culprit) in cases.items():
        (tmp_path / name).mkdir()
        rings = make(world)
        for rank, one in rings.items():
            (tmp_path / name / f"rank_{rank}").write_bytes(one.pickled())
        assert analyse(one.dump() for one in rings.values()).culprit_ranks == (culprit,)
    told = _torchrun(sys.executable, [str(tmp_path / name) for name in cases], print)
    named = {name: {rank for ranks in told[str(tmp_path / name)]["named"] for rank in ranks} for name in cases}
    assert named["stuck"] == {2}
    for name, (_, culprit) in list(cases.items())[1:]:  # it takes the first file's rank for right, whoever that is
        assert named[name] in ({culprit}, {0, 1, 2, 3} - {culprit})
