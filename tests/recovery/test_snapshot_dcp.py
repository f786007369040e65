"""Snapshots with torch's distributed checkpoints: plain tensors in one process; DTensors and DDP on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recovery import snapshot_memory

ROOT = Path(snapshot_memory.__file__).parents[1]

RANK = """
import copy, os, sys
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, Replicate, distribute_tensor
from recovery import snapshot, snapshot_memory
folder, rank, world = sys.argv[2], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if world > 1:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
if world > 1:
    mesh = init_device_mesh("cpu", (world,))
    saves = dist.new_group()  # a save in the background must not meet the collectives of training
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
group = {"process_group": saves} if world > 1 else {}
stager = snapshot.Stager(replicas=model if world > 1 else None)

def state_of(step):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "text": ["a", 1]}
    if world > 1:
        state["uneven"] = distribute_tensor(torch.arange(5.0) + step, mesh, [Shard(0)])
        state["tiny"] = distribute_tensor(torch.ones(1, 3) * step, mesh, [Shard(0)])
        state["whole"] = distribute_tensor(torch.ones(2) * step, mesh, [Replicate()])
    return state

def train():
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()

def full(state):
    local = lambda one: one._local_tensor if hasattr(one, "_local_tensor") else one
    return torch.utils._pytree.tree_map(lambda one: local(one).clone() if isinstance(one, torch.Tensor) else one, state)

def equal(one, other):
    pairs = zip(torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other))
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)

kept = {}
futures = []
for step in range(1, 5):
    train()
    state = state_of(step)
    kept[step] = full(state)
    path = f"{folder}/save{step}"
    if step < 4:
        future = dcp.async_save(state, checkpoint_id=path, async_stager=stager, **group)
    else:
        future = dcp.async_save(state, storage_writer=snapshot.writer(path, stager), **group)
    train()  # while it is saved
    future.result()
    kept[step, "after"] = full(state_of(step))
snapshot._memory.summing.join()
held = [slot.header() for slot in snapshot._memory.slots]
assert sorted(one.step for one in held) == [3, 4], held
sums = [slot.sums(one.sequence) for slot, one in zip(snapshot._memory.slots, held)]
print("replicas", sorted(sums[0]["replicas"].items()), sorted(sums[1]["replicas"].items()))
assert not equal(kept[4], kept[4, "after"])
os.environ["UNBROKEN_SNAPSHOT"] = "1:4"
for reader in (snapshot.reader(f"{folder}/none"), dcp.FileSystemReader(f"{folder}/save4")):
    for one in model.parameters():
        one.data.zero_()
    state = state_of(0)
    dcp.load(state, storage_reader=reader)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert equal(full(state), kept[4]), (full(state), kept[4])
    assert equal(full(state_of(4)), kept[4])
del os.environ["UNBROKEN_SNAPSHOT"]
state = state_of(0)
dcp.load(state, storage_reader=snapshot.reader(f"{folder}/save2"))
assert equal(full(state), kept[2])
print("good", flush=True)
"""


def run(ranks: int, folder: Path) -> list[str]:
    made = snapshot_memory.make_slots(ranks)
    files = ":".join(snapshot_memory.addresses(made))
    own: dict[str, Any] = {
        **os.environ,
        snapshot_memory.FILES_VARIABLE: files,
        "UNBROKEN_ATTEMPT": "1",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(ROOT), str(folder)],
            env={**own, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    for descriptor in made:
        os.close(descriptor)
    assert [process.returncode for process in processes] == [0] * ranks
    return outputs


@pytest.mark.slow
def test_one_rank(tmp_path: Path) -> None:
    assert "good" in run(1, tmp_path)[0]


@pytest.mark.slow
def test_two_ranks_with_shards_and_replicas(tmp_path: Path) -> None:
    one, other = run(2, tmp_path)
    assert "good" in one
    assert one == other
    assert "replicas [('0-" in one
