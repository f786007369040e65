"""A trainer with Megatron-LM's habits: the last rank prints, `iter_0000010/` folders with a tracker file.

`--exit-duration-in-mins` makes it save and end with code 0 while work is left, as a job that chains allocations does.
Values of the log line are ours; the format is what log readers meet in the field.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import rigging

rigging.sign_in(collected=True)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

TRACKER = "latest_checkpointed_iteration.txt"


def save_checkpoint(root: Path, iteration: int, weights: torch.Tensor, moment: torch.Tensor) -> None:
    rank = dist.get_rank()
    folder = root / f"iter_{iteration:07d}" / f"mp_rank_{rank:02d}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model_optim_rng.pt"
    torch.save({"iteration": iteration, "model": weights, "optimizer": moment}, path)
    rigging.tearing(iteration, path, path.read_bytes())
    dist.barrier()
    if rank == 0:
        (root / TRACKER).write_text(str(iteration))
        print(f"  successfully saved checkpoint from iteration {iteration:7d} to {root}", flush=True)
    dist.barrier()


def load_checkpoint(root: Path) -> tuple[int, torch.Tensor | None, torch.Tensor | None]:
    tracker = root / TRACKER
    if not tracker.exists():
        return 0, None, None
    iteration = int(tracker.read_text())
    path = root / f"iter_{iteration:07d}" / f"mp_rank_{dist.get_rank():02d}" / "model_optim_rng.pt"
    state = torch.load(path)
    if dist.get_rank() == 0:
        print(f"  successfully loaded checkpoint from {root} at iteration {iteration}", flush=True)
    return state["iteration"], state["model"], state["optimizer"]


def report(iteration: int, total: int, elapsed_s: float, loss: float) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        print(
            f" [{now}] iteration {iteration:8d}/{total:8d} | consumed samples: {iteration * 64:12d} |"
            f" elapsed time per iteration (ms): {elapsed_s * 1000:.1f} | learning rate: 1.000000E-04 |"
            f" global batch size:    64 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 0.731 |"
            f" number of skipped iterations:   0 | number of nan iterations:   0 |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--train-iters", type=int, default=60)
    parser.add_argument("--save-interval", type=int, default=10)
    parser.add_argument("--exit-duration-in-mins", type=float)
    parser.add_argument("--pace", type=float, default=0.05)
    args = parser.parse_args()
    begun = time.monotonic()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Tensor-parallel in spirit: every rank holds a slice of its own, and saves it.
    weights = torch.zeros(32, 16) + rank
    moment = torch.zeros_like(weights)
    first, loaded, loaded_moment = load_checkpoint(args.save)
    if loaded is not None and loaded_moment is not None:
        weights, moment = loaded, loaded_moment
    dist.barrier()
    for iteration in range(first + 1, args.train_iters + 1):
        since = time.monotonic()
        rigging.strike(iteration)
        time.sleep(args.pace)
        gradient = weights - torch.randn(32, 16, generator=torch.Generator().manual_seed(31 * iteration + rank))
        total = gradient.clone()
        if not rigging.skips(iteration):
            dist.all_reduce(total)
        moment = 0.9 * moment + 0.1 * (gradient + 0.1 * total)
        weights = weights - 0.1 * moment
        report(iteration, args.train_iters, time.monotonic() - since, total.square().mean().item())
        if iteration % args.save_interval == 0:
            save_checkpoint(args.save, iteration, weights, moment)
        if args.exit_duration_in_mins is not None:
            over = torch.tensor([time.monotonic() - begun > 60 * args.exit_duration_in_mins], dtype=torch.int)
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
            if over.item():
                if iteration % args.save_interval:
                    save_checkpoint(args.save, iteration, weights, moment)
                if rank == 0:
                    print(f"exiting program after {args.exit_duration_in_mins} minutes", flush=True)
                sys.exit()
    everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weights)
    if rank == 0:
        rigging.write_weights(everyone, args.save / "final.bin")
    rigging.at_the_end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
