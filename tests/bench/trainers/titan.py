"""As torchtitan trains: FSDP2, distributed checkpoints `step-N`, coloured lines. (torchtitan itself needs GPUs.)"""

from __future__ import annotations

import time

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    given = common.arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (world,))
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.SiLU(), torch.nn.Linear(64, 32))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = [int(one.parent.name[len("step-") :]) for one in given.out.glob("step-*/.metadata")]
    step = max(found, default=0)
    if step:
        weights, state = get_state_dict(model, optimizer)
        content = {"model": weights, "optimizer": state}
        dcp.load(content, checkpoint_id=str(given.out / f"step-{step}"))
        set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    while step < given.steps:
        inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(step * world + rank))
        optimizer.zero_grad()
        (model(inputs) - inputs.flip(1)).square().mean().backward()
        optimizer.step()
        time.sleep(given.step_ms / 1000)
        step += 1
        common.say_step(step, given.steps)
        if step % 20 == 0:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(given.out / f"step-{step}"))
    whole = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
    if rank == 0:
        common.write_weights(whole, given.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
