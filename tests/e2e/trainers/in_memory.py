"""A trainer that keeps snapshots in memory and writes no checkpoint at all. It may flip a bit of a rank's weights."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import rigging

rigging.sign_in()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from recovery import snapshot, worker  # noqa: E402


def main(out: Path, steps: int, pace_s: float, flip: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 64)
    step = 0
    state = snapshot.load()
    if state is not None:
        net.load_state_dict(state["net"])
        step = state["step"]
        print(f"rank {rank} goes on from memory at step {step}", flush=True)
    while step < steps:
        step += 1
        rigging.strike(step)
        loss = net(torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))).square().mean()
        loss.backward()
        with torch.no_grad():
            for one in net.parameters():
                assert one.grad is not None
                dist.all_reduce(one.grad)
                one.sub_(one.grad, alpha=0.05)
                one.grad = None
        if flip == f"{step}:{rank}":
            net.weight.data.view(torch.int32)[3, 3] ^= 1 << 20
        print(f"step {step}/{steps}", flush=True)
        worker.heartbeat(step)
        snapshot.save({"net": net.state_dict(), "step": step}, step, replicas=True)
        time.sleep(pace_s)
    if rank == 0:
        rigging.write_weights(net.parameters(), out / "final.bin")
    rigging.at_the_end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "")
