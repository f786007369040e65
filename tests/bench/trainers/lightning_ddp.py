"""Lightning's Trainer with DDP on gloo, resuming from the `last.ckpt` that it writes."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import common
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

warnings.filterwarnings("ignore")


class Tokens(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(32, generator=torch.Generator().manual_seed(index))


class Module(lightning.LightningModule):
    def __init__(self, steps: int, pace_s: float) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
        self.steps, self.pace_s = steps, pace_s

    def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
        return (self.net(batch) - batch.flip(1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(self.pace_s)
        common.say_step(self.global_step, self.steps)


def main() -> None:
    given = common.arguments()
    lightning.seed_everything(1, verbose=False)
    module = Module(given.steps, given.step_ms / 1000)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_steps=given.steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(given.out, every_n_train_steps=20, save_last=True, save_top_k=0)],
        num_nodes=1,
    )
    last = given.out / "last.ckpt"
    data = torch.utils.data.DataLoader(Tokens(), batch_size=8)
    trainer.fit(module, data, ckpt_path=str(last) if last.exists() else None)
    if trainer.is_global_zero:
        common.write_weights(module.net.parameters(), given.out)


if __name__ == "__main__":
    main()
