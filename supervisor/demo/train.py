"""Pretrain a small Llama on the Python language reference: an ordinary DDP script that knows nothing of unbroken.

    torchrun --nproc-per-node 2 train.py --steps 300 --out runs/llama

It saves as many real scripts do, straight into `step-N.pt` without a temporary file, and resumes from the highest N. A
run that was interrupted ends with the very weights of one that was not: the checkpoint carries model, optimizer, data
position and every rank's random state.

For the demo only, it looks for a file `rank<r>.<fault>` in $DEMO_FAULTS before each step, and acts out that fault: the
ones that cannot be done to a process from outside.
"""

import argparse
import os
import re
import threading
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

CONTEXT = 128
KEEP = 4


def language_reference() -> torch.Tensor:
    """Every CPython carries its reference manual for `help()`: some 600 kB of prose, one token a byte."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode()), dtype=torch.long)


def batch_at(step: int, data: torch.Tensor, rows: int, rank: int, world: int, seed: int) -> torch.Tensor:
    """The rows of this rank: one shuffled pass over the data after another."""
    windows = len(data) // CONTEXT
    first = step * rows * world + rank * rows
    epoch, offset = divmod(first, windows - rows)
    order = torch.randperm(windows, generator=torch.Generator().manual_seed(seed + epoch))
    return torch.stack([data[i * CONTEXT : (i + 1) * CONTEXT] for i in order[offset : offset + rows].tolist()])


def newest_checkpoint(folder: Path) -> Path | None:
    found = [
        (int(match[1]), path) for path in folder.glob("step-*.pt") if (match := re.fullmatch(r"step-(\d+)", path.stem))
    ]
    return max(found)[1] if found else None


def act_out(fault: str) -> None:
    if fault == "hang":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if fault == "exception":
        raise IndexError("sample 5121 is out of range")
    # What CUDA tells every call after the driver lost the device.
    raise RuntimeError(
        "CUDA error: unspecified launch failure\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, "
        "so the stacktrace below might be incorrect.\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    )


def ordered_fault(rank: int) -> str:
    folder = os.environ.get("DEMO_FAULTS")
    for order in Path(folder).glob(f"rank{rank}.*") if folder else ():
        order.unlink()
        return order.suffix[1:]
    return ""


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        self.out = Path(args.out)
        self.data = language_reference()
        torch.manual_seed(args.seed)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=args.width,
            intermediate_size=args.width * 8 // 3,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
            attention_dropout=0.1,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = LlamaForCausalLM(config)
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0
        torch.manual_seed(args.seed + 1 + self.rank)

    def resume(self) -> None:
        path = newest_checkpoint(self.out)
        if path is None:
            return
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        torch.set_rng_state(state["rng"][self.rank])
        if self.rank == 0:
            print(f"resumed from {path.name}", flush=True)

    def save(self) -> None:
        mine = torch.get_rng_state()
        rng = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(rng, mine)
        if self.rank == 0:
            state = {
                "step": self.step,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "rng": rng,
            }
            torch.save(state, self.out / f"step-{self.step}.pt")
            (self.out / f"step-{self.step - KEEP * self.args.save_every}.pt").unlink(missing_ok=True)

    def train_step(self) -> float:
        batch = batch_at(self.step, self.data, self.args.rows, self.rank, self.world, self.args.seed)
        loss = self.ddp(input_ids=batch, labels=batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(loss.detach())

    def run(self) -> None:
        self.ddp.train()
        while self.step < self.args.steps:
            if fault := ordered_fault(self.rank):
                act_out(fault)
            loss = self.train_step()
            if self.rank == 0:
                print(f"step {self.step}/{self.args.steps} loss {loss:.4f}", flush=True)
            if self.step % self.args.save_every == 0:
                self.save()
        if self.rank == 0:
            self.model.save_pretrained(self.out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    trainer.resume()
    trainer.run()
    # Before the group: as its last holder the reducer would wait, with the GIL held, for a gloo thread that wants it.
    del trainer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
