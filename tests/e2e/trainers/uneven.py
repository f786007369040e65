"""A trainer without checkpoints whose last rank needs a third more time for each step from step 50 on."""

from __future__ import annotations

import sys
import time

import rigging

rigging.sign_in()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

FROM = 50
SLOWER = 1.35


def main(steps: int, step_s: float) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(1, steps + 1):
        time.sleep(step_s * (SLOWER if rank == world - 1 and step > FROM else 1.0))
        gradient = torch.full((1024,), float(rank))
        dist.all_reduce(gradient)
        if rank == 0:
            print(f"step {step}/{steps} loss {1 / step:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
