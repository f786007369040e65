"""A small GPT as in nanoGPT: one `ckpt.pt` overwritten in place, AdamW, DDP, data from a file of tokens."""

from __future__ import annotations

import os
import time

import common
import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class GPT(torch.nn.Module):
    def __init__(self, vocabulary: int = 65, width: int = 64, context: int = 32) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, width)
        self.places = torch.nn.Embedding(context, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.blocks(self.tokens(x) + self.places(torch.arange(x.shape[1])), mask=mask))


def main() -> None:
    given = common.arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1337)
    data = numpy.random.default_rng(5).integers(0, 65, 100_000, dtype=numpy.uint16)
    core = GPT()
    step, path = 0, given.out / "ckpt.pt"
    optimizer = torch.optim.AdamW(core.parameters(), lr=3e-3)
    if path.exists():
        state = torch.load(path, weights_only=True)
        core.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["iter_num"]
    model = DistributedDataParallel(core)
    while step < given.steps:
        rng = numpy.random.default_rng(step * dist.get_world_size() + rank)
        starts = rng.integers(0, len(data) - 33, 8)
        batch = torch.from_numpy(numpy.stack([data[at : at + 33] for at in starts]).astype(numpy.int64))
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        time.sleep(given.step_ms / 1000)
        step += 1
        common.say_step(step, given.steps)
        if rank == 0 and step % 20 == 0:
            content = {"model": core.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": step}
            torch.save(content, f"{path}.new")
            os.replace(f"{path}.new", path)
    if rank == 0:
        common.write_weights(core.parameters(), given.out)
    del model
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
