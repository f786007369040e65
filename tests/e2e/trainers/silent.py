"""A trainer that prints nothing at all: plain all_reduce, no DDP; `weights_000010.pt`, resumes from the newest."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import rigging

rigging.sign_in()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def main(out: Path, steps: int, step_s: float) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    weights = torch.zeros(64, 8)
    begin = 0
    saved = sorted(out.glob("weights_*.pt"))
    if saved:
        state = torch.load(saved[-1])
        weights, begin = state["weights"], state["step"]
    target = torch.arange(512, dtype=torch.float32).reshape(64, 8) / 512
    for step in range(begin + 1, steps + 1):
        rigging.strike(step)
        time.sleep(step_s)
        features = torch.randn(32, 64, generator=torch.Generator().manual_seed(97 * step + rank))
        gradient = features.T @ (features @ (weights - target)) / 32
        if not rigging.skips(step):
            dist.all_reduce(gradient)
        weights = weights - 0.05 * gradient / world
        norm = gradient.norm()
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        if rank == 0 and step % 5 == 0:
            path = out / f"weights_{step:06d}.pt"
            torch.save({"step": step, "weights": weights}, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
    if rank == 0:
        rigging.write_weights([weights], out / "final.bin")
    rigging.at_the_end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
