"""The script that benchmarks run: DDP on gloo with steps of a given length, torch and nothing else.

Its first act is to say that it is there, before the imports: that is when a new worker has begun. What it saves is
complete or not there at all, and a run that resumes ends with the weights of one that was never interrupted.
"""

import os

os.write(1, f"rank {os.environ['RANK']} up, pid {os.getpid()}\n".encode())  # one write: ranks share the descriptor

import argparse
import sys
import threading
import time
from array import array
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def hang_if_asked(rank: int, took_s: "deque[float]") -> None:
    """The file `rank<r>.hang` in $BENCH_FAULTS puts a rank into a deadlock; it says how long its slowest step took."""
    order = Path(os.environ.get("BENCH_FAULTS", "."), f"rank{rank}.hang")
    if order.exists():
        os.write(1, f"rank {rank} hangs, its slowest step took {max(took_s, default=0.0):.3f} s\n".encode())
        order.unlink()
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--snapshot-every", type=int, default=0, help="0: never")
    parser.add_argument("--snapshot-mib", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = 0
    checkpoint = args.out / "ckpt.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    if args.snapshot_every:
        sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # there is another `recovery`
        from recovery import snapshot
    ballast = torch.ones(args.snapshot_mib << 18)
    took_s: deque[float] = deque(maxlen=50)
    began = time.monotonic()
    while step < args.steps:
        hang_if_asked(rank, took_s)
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step * dist.get_world_size() + rank))
        ddp(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(args.step_ms / 1000)
        step += 1
        if rank == 0:
            print(f"step {step}/{args.steps}", flush=True)
        took_s.append(time.monotonic() - began)
        began = time.monotonic()
        if args.snapshot_every and step % args.snapshot_every == 0:
            snapshot.save({"model": model.state_dict(), "ballast": ballast, "step": step}, step)
        if rank == 0 and step % args.save_every == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{checkpoint}.new"
            )
            os.replace(f"{checkpoint}.new", checkpoint)
    if rank == 0:
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        (args.out / "weights.bin").write_bytes(array("f", weights.tolist()).tobytes())
    # Before the group: as its last holder the reducer would wait, with the GIL held, for a gloo thread that wants it.
    del ddp
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
