"""Phases of logs as trainers write them: Megatron, torchtitan, HF Trainer, nanoGPT."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from diagnosis.logs.phase_changes import Change, PhaseBook, Phases


def megatron(steps: int) -> Iterator[str]:
    yield from ("> initializing tensor model parallel with size 8", "loading checkpoint from /ckpt at iteration 0")
    for step in range(1, steps + 1):
        yield (
            f" iteration {step:8d}/  500000 | consumed samples: {step * 512} | elapsed time per iteration (ms): 1020.1 "
            f"| learning rate: 1.000E-05 | lm loss: 7.{step:06d}E+00 | loss scale: 1.0 |"
        )
        if step % 50 == 0:
            yield "Evaluating on 5120 samples"
            yield f" validation loss at iteration {step} | lm loss value: 3.{step}E+00 | lm loss PPL: 1.5E+01 |"
            yield f"saving checkpoint at iteration {step} to /ckpt in torch_dist format"
            yield f"  successfully saved checkpoint from iteration {step} to /ckpt"


def torchtitan(steps: int) -> Iterator[str]:
    yield from ("[rank0]:[titan] INFO - Building llama3 8B", "[rank0]:[titan] INFO - Training starts at step 1.")
    for step in range(1, steps + 1):
        yield f"[rank0]:[titan] INFO - step: {step:2}  loss: 8.{step:04}  memory: 42.4GiB(53.2%)  tps: 5,{step:03}"
        if step % 50 == 0:
            yield "[rank0]:[titan] INFO - Saving the checkpoint (or staging if async is enabled)."
            yield "[rank0]:[titan] INFO - Finished saving the checkpoint in 2.1 seconds."


def nanogpt(steps: int) -> Iterator[str]:
    yield from ("tokens per iteration will be: 491,520", "number of parameters: 123.59M", "compiling the model...")
    for step in range(steps):
        if step % 50 == 0 and step:
            yield f"step {step}: train loss 3.{step:04}, val loss 3.{step:04}"
            yield "saving checkpoint to out"
        yield f"iter {step}: loss 3.{step:04}, time 132.42ms, mfu 38.2%"


def hf_trainer(steps: int) -> Iterator[str]:
    yield from ("***** Running training *****", "  Num examples = 51,200")
    for step in range(1, steps + 1):
        percent = 100 * step // steps
        bar = "█" * (percent // 10)
        yield f"\r {percent:2d}%|{bar:10}| {step}/{steps} [00:{step % 60:02d}<10:00,  1.02s/it]"
        if step % 50 == 0:
            yield f"{{'loss': 2.{step}, 'grad_norm': 1.1, 'learning_rate': 2e-05, 'epoch': 0.{step}}}"
            yield "***** Running Evaluation *****"
            yield f"{{'eval_loss': 2.{step}, 'eval_runtime': 3.1}}"
            yield f"Saving model checkpoint to out/checkpoint-{step}"
            yield f"Model weights saved in out/checkpoint-{step}/model.safetensors"


def phases_of(lines: list[str], block: int = 300) -> tuple[Phases, list[Change]]:
    book = PhaseBook()
    for first in range(0, len(lines), block):
        book.feed("log", "\n".join(lines[first : first + block]).encode(), first + 1)
    (told,) = book.phases()
    return told, book.changes()


@pytest.mark.parametrize("log", [megatron, torchtitan, nanogpt, hf_trainer])
@pytest.mark.parametrize("steps", [210, 1210])
def test_the_phases_of_a_healthy_log_and_nothing_has_changed_in_them(
    log: Callable[[int], Iterator[str]], steps: int
) -> None:
    lines = list(log(steps))

    told, changes = phases_of(lines)

    spans = {one.phase: one for one in told.spans}
    assert told.steps == pytest.approx(steps, abs=steps // 40)
    assert spans["start-up"].lines <= 6
    assert spans["checkpoint"].times == steps // 50
    assert changes == []


@pytest.mark.parametrize("block", [1, 7, 10_000])
def test_blocks_make_no_difference(block: int) -> None:
    lines = list(megatron(230))

    assert phases_of(lines, block) == phases_of(lines)


def test_a_log_without_steps_has_no_phases() -> None:
    book = PhaseBook()
    book.feed("log", b"hello\nsaving checkpoint\nworld", 1)

    assert book.phases() == []


def test_a_template_is_told_by_the_only_phase_it_is_said_in() -> None:
    book = PhaseBook()
    book.feed("log", "\n".join(megatron(120)).encode(), 1)

    only_in = book.only_in()

    assert only_in["successfully saved checkpoint from iteration # to /ckpt"] == "checkpoint"
    assert only_in["Evaluating on # samples"] == "evaluation"
    assert only_in["loading checkpoint from /ckpt at iteration #"] == "start-up"


def test_memory_is_bounded() -> None:
    book = PhaseBook()
    words = [
        f"step {step} loss 1.0\nword {'abcdefghij'[step % 10] * (step % 97)} {'x' * (step % 89)}"
        for step in range(20_000)
    ]
    book.feed("log", "\n".join(words).encode(), 1)

    (told,) = book.phases()
    assert told.steps == pytest.approx(20_000, abs=500)
    assert len(book.changes()) < 100
