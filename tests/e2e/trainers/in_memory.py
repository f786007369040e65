"""A trainer with DDP that keeps snapshots in memory. With EVERY it keeps them so seldom, and writes checkpoints, too.

Its faults are `flip` (of a bit of this rank's weights) and `nan` (one of them).
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import rigging

rigging.sign_in()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from recovery import snapshot, worker  # noqa: E402

SAVED_EVERY = 5


def resumed(out: Path, rank: int) -> dict[str, Any] | None:
    state: dict[str, Any] | None = snapshot.load()
    if state is not None:
        print(f"rank {rank} goes on from memory at step {state['step']}", flush=True)
        return state
    saves = sorted(out.glob("step-*.pt"))
    if not saves:
        return None
    state = torch.load(saves[-1])
    print(f"rank {rank} goes on from {saves[-1].name} at step {state['step']}", flush=True)
    return state


def main(out: Path, steps: int, pace_s: float, every: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 64)
    step = 0
    state = resumed(out, rank)
    if state is not None:
        net.load_state_dict(state["net"])
        step = state["step"]
    replica = DistributedDataParallel(net)
    while step < steps:
        step += 1
        rigging.strike(step)
        loss = replica(torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))).square().mean()
        loss.backward()
        with torch.no_grad():
            for one in net.parameters():
                assert one.grad is not None
                one.sub_(one.grad, alpha=0.1)
                one.grad = None
        if rigging.damages("flip", step):
            net.weight.data.view(torch.int32)[3, 3] ^= 1 << 20
        if rigging.damages("nan", step):
            net.weight.data[3, 3] = math.nan
        print(f"step {step}/{steps} loss {loss.item():.4f}", flush=True)
        worker.heartbeat(step)
        kept = {"net": net.state_dict(), "step": step}
        if step % every == 0:
            snapshot.save(kept, step, replicas=replica)
        if every > 1 and step % SAVED_EVERY == 0 and rank == 0:
            torch.save(kept, out / f"step-{step:04}.pt")
        time.sleep(pace_s)
    if rank == 0:
        rigging.write_weights(net.parameters(), out / "final.bin")
    rigging.at_the_end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 1)
