"""A trainer with FSDP2: each rank keeps its shards in memory after every step, and saves distributed checkpoints."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import rigging

rigging.sign_in()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from recovery import snapshot, worker  # noqa: E402


def newest(out: Path) -> Path | None:
    steps = [int(m[1]) for path in out.glob("step-*/.metadata") if (m := re.fullmatch(r"step-(\d+)", path.parent.name))]
    return out / f"step-{max(steps)}" if steps else None


def main(out: Path, steps: int, pace_s: float, saved_every: int, ballast_mb: int) -> None:
    """`ballast_mb`: more in each rank's snapshot."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.SiLU(), torch.nn.Linear(40, 24))
    fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    stager = snapshot.Stager()
    writing: Any = None

    def state() -> dict[str, Any]:
        model, optim = get_state_dict(net, optimizer)
        ballast = {f"ballast{rank}": torch.full((ballast_mb << 18,), float(rank))} if ballast_mb else {}
        return {"model": model, "optimizer": optim, "step": step, **ballast}

    step, path = 0, newest(out)
    if snapshot.step() is not None or path is not None:
        kept = state()
        dcp.load(kept, storage_reader=snapshot.reader(path))
        set_state_dict(net, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
        step = kept["step"]
        print(
            f"rank {rank} goes on from {'memory' if snapshot.step() is not None else path} at step {step}", flush=True
        )
    while step < steps:
        step += 1
        rigging.strike(step)
        inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (net(inputs) - inputs.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rigging.made(step)
        print(f"step {step}/{steps} loss {loss.item():.4f}", flush=True)
        worker.heartbeat(step)
        if step % saved_every == 0:
            if writing is not None:
                writing.result()
            writing = dcp.async_save(state(), checkpoint_id=str(out / f"step-{step}"), async_stager=stager)
        else:
            snapshot.save(state(), step)
        time.sleep(pace_s)
    if writing is not None:
        writing.result()
    whole = [one.full_tensor() for one in net.parameters()]  # type: ignore[attr-defined]
    if rank == 0:
        rigging.write_weights(whole, out / "final.bin")
    rigging.at_the_end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:6]))
