"""The real Trainer of transformers with a tiny Llama, resuming as its documentation says."""

from __future__ import annotations

import time
from typing import Any

import common
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 128, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Pace(TrainerCallback):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        time.sleep(self.seconds)
        common.say_step(state.global_step, state.max_steps)


def main() -> None:
    given = common.arguments()
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    arguments = TrainingArguments(
        output_dir=str(given.out),
        max_steps=given.steps,
        save_steps=20,
        save_total_limit=3,
        logging_steps=1000,
        per_device_train_batch_size=4,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(shape), args=arguments, train_dataset=Tokens(), callbacks=[Pace(given.step_ms / 1000)]
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(given.out)))
    if trainer.is_world_process_zero():
        common.write_weights(trainer.model.parameters(), given.out)


if __name__ == "__main__":
    main()
