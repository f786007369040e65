"""The real Trainer of transformers with a tiny Llama on random tokens, resuming as its documentation says."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import rigging

rigging.sign_in(collected=True)

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402


class RandomTokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 128, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Pace(TrainerCallback):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:  # noqa: ARG002
        rigging.strike(state.global_step + 1)  # type: ignore[attr-defined]
        time.sleep(self.seconds)


def main(out: Path, steps: int, pace_s: float, kept: int | None = None, every: int = 5, jit: int = 0) -> None:
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
    model = LlamaForCausalLM(shape)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        save_steps=every,
        save_total_limit=kept,
        logging_steps=5,
        per_device_train_batch_size=4,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        dataloader_num_workers=0,
        seed=0,
        enable_jit_checkpoint=bool(jit),
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=RandomTokens(), callbacks=[Pace(pace_s)])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out)))
    if trainer.is_world_process_zero():
        rigging.write_weights(model.parameters(), out / "final.bin")
    rigging.at_the_end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:]))
