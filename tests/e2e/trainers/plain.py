"""A small, honest trainer: checkpoints `step-N.pt` written atomically, resumes from the newest of its own folder.

Every batch follows from the step alone, so a run that was interrupted ends with the very weights of one that was not.
Gradients are averaged by hand; with `--ddp` by DistributedDataParallel, and AdamW steps: as in the field, but they
import half of torch's compiler, two seconds of a core for each rank of each attempt.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from pathlib import Path

import rigging

rigging.sign_in()

import torch  # noqa: E402 (signed in first: a test may strike while torch is being imported)
import torch.distributed as dist  # noqa: E402


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1_000 * step + rank)
    inputs = torch.randn(16, 32, generator=random)
    return inputs, inputs.roll(1, dims=1).tanh()


class Descent:
    """Gradient descent with momentum on the mean gradient of all ranks."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.parameters = list(net.parameters())
        self.momenta = [torch.zeros_like(one) for one in self.parameters]

    def state_dict(self) -> list[torch.Tensor]:
        return self.momenta

    def load_state_dict(self, state: list[torch.Tensor]) -> None:
        self.momenta = state

    def zero_grad(self) -> None:
        for one in self.parameters:
            one.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for one, momentum in zip(self.parameters, self.momenta, strict=True):
            assert one.grad is not None
            dist.all_reduce(one.grad)
            momentum.mul_(0.9).add_(one.grad, alpha=1 / dist.get_world_size())
            one.sub_(momentum, alpha=0.05)


def newest(folder: Path) -> Path | None:
    found = {int(m[1]): path for path in folder.glob("step-*.pt") if (m := re.fullmatch(r"step-(\d+)\.pt", path.name))}
    return found[max(found)] if found else None


def save(folder: Path, step: int, model: torch.nn.Module, optimizer: Descent | torch.optim.Optimizer) -> None:
    path = folder / f"step-{step}.pt"
    temporary = path.with_suffix(".tmp")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
    rigging.tearing(step, temporary, temporary.read_bytes())
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--show-every", type=int, default=1)
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--save-at-term", type=float, metavar="SECONDS", help="take so long to save when told to end")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
    model = torch.nn.parallel.DistributedDataParallel(net) if args.ddp else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2) if args.ddp else Descent(net)
    done = 0
    checkpoint = newest(args.out)
    if checkpoint is not None:
        state = torch.load(checkpoint)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
        if rank == 0:
            print(f"resumed {checkpoint.name}", flush=True)
    dist.barrier()
    told: list[int] = []
    if args.save_at_term is not None:
        signal.signal(signal.SIGTERM, lambda number, _: told.append(number))

    for step in range(done + 1, args.steps + 1):
        rigging.strike(step)
        inputs, targets = batch(step, rank)
        time.sleep(args.step_s)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            if step % args.show_every == 0:
                print(f"step {step}/{args.steps} loss {shown.item() / dist.get_world_size():.5f}", flush=True)
            rigging.made(step)
            if step % args.save_every == 0:
                save(args.out, step, net, optimizer)
        if step % args.save_every == 0:
            dist.barrier()
        if args.save_at_term is not None:
            leave = torch.tensor(len(told))
            dist.all_reduce(leave)
            if leave:
                if rank == 0:
                    time.sleep(args.save_at_term)
                    save(args.out, step, net, optimizer)
                    print(f"saved at SIGTERM: step {step}", flush=True)
                dist.barrier()
                sys.exit(128 + signal.SIGTERM)

    if rank == 0:
        rigging.write_weights(net.parameters(), args.out / "final.bin")
        print("training complete", flush=True)
    rigging.at_the_end()
    # Before the group: as its last holder the reducer would wait, with the GIL held, for a gloo thread that wants it.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
