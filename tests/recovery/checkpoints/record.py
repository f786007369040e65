"""Writes small checkpoints with the real libraries: `python -m tests.recovery.checkpoints.record FOLDER [NAME ...]`.

The tests unpack what it packed (`NAME.tar.xz` beside this file), so that they need none of these libraries. It wants
a Python that has them; `versions.txt` says which versions wrote the files that are there. Each writer runs in
processes of its own under torchrun, two ranks on gloo where the format has a part for each rank.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEPS = (10, 20)
"""Each writer leaves two checkpoints, of weights that differ: a shard of the other step can be put in place."""


def model(scale: float = 1.0) -> Any:
    import torch

    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.LayerNorm(24), torch.nn.Linear(24, 8))
    made.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))
    with torch.no_grad():
        made[0].weight.mul_(scale)
    return made


def trained(net: Any, kind: Any = None) -> Any:
    import torch

    optimizer = (kind or torch.optim.AdamW)(net.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
    return optimizer


def in_group() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")


def torch_save(root: Path) -> None:
    import torch

    net = model()
    for step in STEPS:
        optimizer = trained(net)
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": step, "best": float("inf")}
        torch.save(state, root / f"ckpt_{step:06d}.pt")
        torch.save(state, root / f"legacy_step_{step:06d}.pth", _use_new_zipfile_serialization=False)


def safetensors(root: Path) -> None:
    from safetensors.torch import save_file

    net = model()
    for step in STEPS:
        trained(net)
        save_file(net.state_dict(), root / f"model_{step}.safetensors", metadata={"step": str(step)})


def dcp(root: Path) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    in_group()
    net = model()
    fully_shard(net)
    for step in STEPS:
        weights, states = get_state_dict(net, trained(net))
        checkpoint.save({"model": weights, "optimizer": states, "step": step}, checkpoint_id=root / f"step-{step}")


def hf(root: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=32, bos_token_id=0, eos_token_id=0)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(200)]
    arguments = TrainingArguments(
        str(root), max_steps=STEPS[-1], save_steps=STEPS[0], per_device_train_batch_size=1, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_steps=5,
    )  # fmt: skip
    Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=rows).train()


def accelerate(root: Path) -> None:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(project_dir=str(root), automatic_checkpoint_naming=True)
    )
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    for _ in STEPS:
        net(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        accelerator.save_state()


def lightning(root: Path) -> None:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    saves = ModelCheckpoint(dirpath=root, save_top_k=-1, every_n_train_steps=STEPS[0], save_last=True)
    data = torch.utils.data.DataLoader(torch.randn(STEPS[-1] * 4, 16), batch_size=4)
    Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[saves], logger=False, enable_progress_bar=False, barebones=False
    ).fit(Module(), data)


def lightning_sharded(root: Path) -> None:
    """FSDP2's strategy wants GPUs; its own functions write the folder, in its own order."""
    import torch
    from lightning.fabric.strategies.model_parallel import _distributed_checkpoint_save  # what the strategy calls
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    in_group()
    net = model()
    fully_shard(net)
    for step in STEPS:
        folder = root / f"epoch=0-step={step}.ckpt"
        folder.mkdir(parents=True, exist_ok=True)
        weights, states = get_state_dict(net, trained(net))
        _distributed_checkpoint_save({"state_dict": weights, "optimizer_0": states}, folder)
        if torch.distributed.get_rank() == 0:
            torch.save({"epoch": 0, "global_step": step, "loops": {}}, folder / "meta.pt")


def megatron_state(step: int, tensor: int, pipeline: int, world: int) -> dict[str, Any]:
    from argparse import Namespace

    args = Namespace(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, world_size=world, iteration=step,
        data_parallel_size=world // (tensor * pipeline), num_layers=2,
    )  # fmt: skip
    return {"args": args, "checkpoint_version": 3.0, "iteration": step, "num_floating_point_operations_so_far": 1}


def megatron(root: Path) -> None:
    """Megatron-LM's `torch` format, laid out by torch: its training loop is not in the package."""
    import torch

    for step in STEPS:
        for tensor in (0, 1):
            for pipeline in (0, 1):
                folder = root / f"iter_{step:07d}" / f"mp_rank_{tensor:02d}_{pipeline:03d}"
                folder.mkdir(parents=True)
                net = model(1 + tensor + pipeline)
                optimizer = trained(net)
                state = megatron_state(step, 2, 2, 8) | {"model": net.state_dict()}
                torch.save(state, folder / "model_optim_rng.pt")
                torch.save({0: optimizer.state_dict()}, folder / "distrib_optim.pt")
        (root / "latest_checkpointed_iteration.txt").write_text(str(step))


def megatron_dist(root: Path, name: str = "iter_{step:07d}", tracker: bool = True) -> None:
    import torch
    from megatron.core import dist_checkpointing as distributed
    from megatron.core import parallel_state

    in_group()
    torch.cuda.synchronize = lambda: None  # both are called although every tensor is on the CPU
    torch.cuda.current_device = lambda: torch.device("cpu")
    rank = torch.distributed.get_rank()
    parallel_state.initialize_model_parallel(2, 1)
    net = model()
    for step in STEPS:
        optimizer = trained(net)
        state: dict[str, Any] = megatron_state(step, 2, 1, 2)
        for key in ("0.weight", "2.weight"):
            half = net.state_dict()[key].chunk(2)[rank].contiguous()
            state[key] = distributed.ShardedTensor.from_rank_offsets(f"model.{key}", half, (0, rank, 2))
        moment = next(iter(optimizer.state.values()))["exp_avg"].chunk(2)[rank].contiguous()
        key = "optimizer.state.exp_avg.model.0.weight"
        state["exp_avg"] = distributed.ShardedTensor.from_rank_offsets(key, moment, (0, rank, 2))
        folder = root / name.format(step=step)
        folder.mkdir(parents=True, exist_ok=True)
        distributed.save(state, str(folder))
        if tracker and rank == 0:
            (root / "latest_checkpointed_iteration.txt").write_text(str(step))


def nemo(root: Path) -> None:
    """NeMo 2: a folder with `weights` (Megatron's distributed checkpoint) and `context`; NeMo 1: a tar. Laid out as
    NeMo does, since its package brings hundreds of others."""
    import torch

    megatron_dist(root, "llama--val_loss=1.50-step={step}-consumed_samples=640/weights", tracker=False)
    if torch.distributed.get_rank():
        return
    for step in STEPS:
        context = next(root.glob(f"*step={step}-*")) / "context"
        context.mkdir()
        (context / "model.yaml").write_text("_target_: llama\n")
        (context / "io.json").write_text(json.dumps({"objects": {}}))
        weights = io.BytesIO()
        torch.save(model().state_dict(), weights)
        with tarfile.open(root / f"llama-step={step}.nemo", "w:") as archive:
            for name, data in (("model_config.yaml", b"precision: bf16\n"), ("model_weights.ckpt", weights.getvalue())):
                member = tarfile.TarInfo(f"./{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def deepspeed(root: Path, stage: int = 1) -> None:
    import deepspeed as engine
    import torch

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # it would be compiled
    net = model()
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    made, *_ = engine.initialize(
        model=net, optimizer=torch.optim.AdamW(net.parameters()), config=config, dist_init_required=True
    )
    for step in range(1, STEPS[-1] + 1):
        made.backward(made(torch.randn(4, 16, dtype=torch.bfloat16)).square().mean())
        made.step()
        if step in STEPS:
            made.save_checkpoint(str(root))


def deepspeed3(root: Path) -> None:
    deepspeed(root, 3)


class Flat:
    """What torchtitan's containers of optimizers and schedulers are to its manager: states by name."""

    def __init__(self, states: dict[str, Any]) -> None:
        self.states = states

    def state_dict(self) -> dict[str, Any]:
        return self.states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        self.states = states


def torchtitan(root: Path) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpoint import CheckpointManager

    in_group()
    net = model()
    fully_shard(net)
    optimizers = Flat({})
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True, interval=STEPS[0], last_save_model_only=False),
        dataloader=Flat({"rank": torch.tensor(0)}), model_parts=[net], optimizers=optimizers,
        lr_schedulers=Flat({"last_epoch": 1}), states={"train_state": Flat({"step": torch.tensor(STEPS[0])})},
        sd_adapter=None, base_folder=str(root),
    )  # fmt: skip
    for step in STEPS:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        optimizers.states = get_optimizer_state_dict(net, trained(net), options=flat)
        manager.save(step)


WRITERS: dict[str, tuple[Callable[[Path], None], int, tuple[str, ...]]] = {
    "torch_save": (torch_save, 1, ("torch",)),
    "safetensors": (safetensors, 1, ("safetensors",)),
    "dcp": (dcp, 2, ("torch",)),
    "hf": (hf, 2, ("transformers",)),
    "accelerate": (accelerate, 2, ("accelerate",)),
    "lightning": (lightning, 1, ("lightning",)),
    "lightning_sharded": (lightning_sharded, 2, ("lightning", "torch")),
    "megatron": (megatron, 1, ("torch",)),
    "megatron_dist": (megatron_dist, 2, ("megatron-core",)),
    "nemo": (nemo, 2, ("megatron-core",)),
    "deepspeed": (deepspeed, 2, ("deepspeed",)),
    "deepspeed3": (deepspeed3, 2, ("deepspeed",)),
    "torchtitan": (torchtitan, 2, ("torchtitan",)),
}


def main(scratch: Path, names: list[str]) -> None:
    for name in names or WRITERS:
        _, ranks, packages = WRITERS[name]
        root = scratch / name
        root.mkdir(parents=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
        subprocess.run([*command, "--write", name, str(root)], check=True, timeout=300)
        with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(root, ".")
        note(name, packages)


def note(name: str, packages: tuple[str, ...]) -> None:
    """Keep which versions wrote it."""
    path = HERE / "versions.txt"
    known = dict(line.split(": ", 1) for line in path.read_text().splitlines()) if path.exists() else {}
    told = []
    for package in dict.fromkeys((*packages, "torch")):
        try:
            told.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            told.append(package)
    known[name] = ", ".join(told)
    path.write_text("".join(f"{key}: {known[key]}\n" for key in sorted(known)))


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        WRITERS[sys.argv[2]][0](Path(sys.argv[3]))
        os._exit(0)  # some libraries leave threads behind
    main(Path(sys.argv[1]), sys.argv[2:])
