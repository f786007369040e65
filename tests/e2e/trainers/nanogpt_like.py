"""A trainer with nanoGPT's habits: `--key=value`, one `ckpt.pt` overwritten in place, resumes only when told to.

Its lines are `iter N: loss ..., time ...ms`; nothing tells how many iterations there will be.
"""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import rigging

rigging.sign_in(collected=True)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

config = {"out_dir": "out", "init_from": "scratch", "max_iters": "60", "eval_interval": "10", "pace": "0.05"}
for argument in sys.argv[1:]:
    key, _, value = argument.removeprefix("--").partition("=")
    if key not in config:
        raise SystemExit(f"unknown setting {key}")
    config[key] = value

out_dir = Path(config["out_dir"])
dist.init_process_group("gloo")
rank = dist.get_rank()
master = rank == 0
torch.manual_seed(1337)
tokens = torch.randint(0, 65, (20_000,), generator=torch.Generator().manual_seed(5))
core = torch.nn.Sequential(
    torch.nn.Embedding(65, 32), torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 65)
)
model = DistributedDataParallel(core)
optimizer = torch.optim.AdamW(core.parameters(), lr=3e-3)
iter_num = 0
if config["init_from"] == "resume":
    if master:
        print(f"Resuming training from {out_dir}", flush=True)
    state = torch.load(out_dir / "ckpt.pt")
    core.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    iter_num = state["iter_num"]
dist.barrier()


def get_batch(split: str, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(10 * at + rank + (5_000_000 if split == "val" else 0))
    starts = torch.randint(len(tokens) - 17, (8,), generator=random)
    return (torch.stack([tokens[i : i + 16] for i in starts]), torch.stack([tokens[i + 1 : i + 17] for i in starts]))


@torch.no_grad()
def estimate_loss(at: int) -> dict[str, float]:
    losses = {}
    for split in ("train", "val"):
        x, y = get_batch(split, at)
        losses[split] = torch.nn.functional.cross_entropy(core(x).flatten(0, 1), y.flatten()).item()
    return losses


def save(at: int) -> None:
    buffer = io.BytesIO()
    torch.save({"model": core.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": at}, buffer)
    rigging.tearing(at, out_dir / "ckpt.pt", buffer.getvalue())
    with open(out_dir / "ckpt.pt", "wb") as file:
        file.write(buffer.getvalue())


last = time.time()
while True:
    if iter_num % int(config["eval_interval"]) == 0 and master:
        losses = estimate_loss(iter_num)
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
        if iter_num > 0:
            print(f"saving checkpoint to {out_dir}", flush=True)
            save(iter_num)
    if iter_num >= int(config["max_iters"]):
        break
    rigging.strike(iter_num)
    x, y = get_batch("train", iter_num)
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    time.sleep(float(config["pace"]))
    now = time.time()
    if master:
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {(now - last) * 1000:.2f}ms, mfu -100.00%", flush=True)
        rigging.made(iter_num)
    last = now
    iter_num += 1

if master:
    rigging.write_weights(core.parameters(), out_dir / "final.bin")
rigging.at_the_end()
# Before the group: as its last holder the reducer would wait, with the GIL held, for a gloo thread that wants it.
del model
dist.destroy_process_group()
