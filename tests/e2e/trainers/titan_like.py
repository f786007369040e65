"""A trainer with torchtitan's habits: coloured log lines on every rank, distributed checkpoints `step-N/`."""

from __future__ import annotations

import argparse
import logging
import re
import time
from pathlib import Path

import rigging

rigging.sign_in()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

CYAN, GREEN, YELLOW, RED, RESET = "\033[36m", "\033[32m", "\033[33m", "\033[31m", "\033[39m"
logger = logging.getLogger()


def newest(folder: Path) -> int | None:
    steps = [int(m[1]) for p in folder.glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name))]
    complete = [step for step in steps if (folder / f"step-{step}" / ".metadata").exists()]
    return max(complete, default=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint.folder", dest="folder", type=Path, required=True)
    parser.add_argument("--training.steps", dest="steps", type=int, default=60)
    parser.add_argument("--checkpoint.interval", dest="interval", type=int, default=10)
    parser.add_argument("--pace", type=float, default=0.05)
    parser.add_argument("--ballast-mb", dest="ballast_mb", type=int, default=0, help="more in each save, of each rank")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="[titan] %(asctime)s - root - %(levelname)s - %(message)s")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(24, 48), torch.nn.SiLU(), torch.nn.Linear(48, 24))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    last = newest(args.folder)
    if last is not None:
        logger.info(f"Loading the checkpoint at step {last}.")
        state = {"model": net.state_dict()}
        dcp.load(state, checkpoint_id=str(args.folder / f"step-{last}"))
        net.load_state_dict(state["model"])
    dist.barrier()
    for step in range((last or 0) + 1, args.steps + 1):
        rigging.strike(step)
        time.sleep(args.pace)
        inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info(
            f"{RED}step: {step:2}  {GREEN}loss: {loss.item():7.4f}  {YELLOW}memory:  1.42GiB(1.78%)  "
            f"{CYAN}tps: {9_000 + step:,}  {CYAN}tflops: 41.3  mfu: 13.2%{RESET}"
        )
        rigging.made(step)
        if step % args.interval == 0:
            logger.info("Saving the checkpoint (or staging if async is enabled).")
            state = {"model": net.state_dict()}
            if args.ballast_mb:
                state[f"ballast{rank}"] = torch.full((args.ballast_mb << 18,), float(step))
            dcp.save(state, checkpoint_id=str(args.folder / f"step-{step}"))
            logger.info("Finished saving the checkpoint.")
    if rank == 0:
        rigging.write_weights(net.parameters(), args.folder / "final.bin")
    logger.info("Training completed")
    rigging.at_the_end()
    # Before the group: as its last holder the reducer would wait, with the GIL held, for a gloo thread that wants it.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
