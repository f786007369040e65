"""Losses and gradients that are no numbers, in the formats of real trainers: read live, step by step."""

from __future__ import annotations

import pytest

from diagnosis import rules
from diagnosis.logs import curves as logs_curves
from diagnosis.logs.curves import CurveReader
from diagnosis.logs.steps import StepReader

MEGATRON = (
    " [2026-11-22 10:00:{step:02d}] iteration {step:8d}/     100 | consumed samples: {step:12d} | elapsed time per"
    " iteration (ms): 812.1 | learning rate: 1.500000E-04 | global batch size:    16 |{loss}"
    " loss scale: 1.0 |{norm} number of skipped iterations: {skipped:3d} | number of nan iterations: {nan:3d} |\n"
)


def megatron(step: int, loss: str = "", norm: str = "", skipped: int = 0, nan: int = 0) -> str:
    return MEGATRON.format(
        step=step,
        loss=f" lm loss: {loss} |" if loss else "",
        norm=f" grad norm: {norm} |" if norm else "",
        skipped=skipped,
        nan=nan,
    )


def titan(step: int, loss: str, norm: str) -> str:
    return (
        f"[rank0]:[titan] 2026-11-22 10:00:{step:02d},123 - root - INFO - \x1b[31mstep: {step:2d}  "
        f"\x1b[32mloss: {loss:>8}  "
        f"\x1b[38;2;180;60;0mgrad_norm: {norm:>7}  \x1b[38;2;54;234;195mmemory:  1.05GiB(1.32%)  \x1b[34mtps: 7,217  "
        "\x1b[36mtflops: 0.52  \x1b[35mmfu: 0.17%\x1b[39m\n"
    )


def lightning(step: int, loss: str, name: str = "train_loss") -> str:
    return f"\rEpoch 0:  {step}%|#         | {step}/100 [00:0{step % 10}<00:10,  8.53it/s, v_num=0, {name}={loss}]"


def hf(step: int, loss: str, norm: str, quote: str = "") -> str:
    loss, norm, rate = (f"{quote}{one}{quote}" for one in (loss, norm, "4.9e-05"))
    return f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': {rate}, 'epoch': 0.{step}}}\n"


def read(*texts: str) -> StepReader:
    reader = StepReader()
    for text in texts:
        reader.feed(text.encode())
    return reader


GOOD = {
    "megatron": "".join(megatron(step, "2.100000E+00", "1.234") for step in (1, 2, 3)),
    "titan": "".join(titan(step, "2.1000", "1.2345") for step in (1, 2, 3)),
    "lightning": "".join(lightning(step, "2.100") for step in (1, 2, 3)),
    "hf": "".join(hf(step, "2.1", "1.2") for step in (1, 2, 3)),
    "hf5": "".join(hf(step, "2.1", "1.2", "'") for step in (1, 2, 3)),
    "nanogpt": "".join(f"iter {step}: loss 2.1000, time 12.34ms, mfu 1.23%\n" for step in (1, 2, 3)),
}

BAD = [
    ("megatron", megatron(4, "NAN", "nan", nan=1)),
    ("megatron", megatron(4, "", "nan", nan=1)),
    ("megatron", megatron(4, "", "", skipped=1, nan=1)),
    ("megatron", megatron(4, "", "", skipped=10, nan=10)),
    ("titan", titan(4, "nan", "nan")),
    ("lightning", lightning(4, "nan.0") + lightning(5, "nan.0")),
    ("lightning", lightning(4, "nan") + lightning(5, "nan")),
    ("lightning", lightning(4, "nan.0", "train_loss_step") + lightning(5, "nan.0", "train_loss_step")),
    ("hf", hf(4, "0.0", "nan")),
    ("hf", hf(4, "nan", "nan")),
    ("hf5", hf(4, "0", "nan", "'")),
    ("hf5", hf(4, "nan", "nan", "'")),
    ("nanogpt", "iter 4: loss nan, time 12.34ms, mfu 1.23%\n"),
]


@pytest.mark.parametrize(("trainer", "line"), BAD)
def test_a_loss_that_is_no_number_is_seen_in_what_trainers_print(trainer: str, line: str) -> None:
    reader = read(GOOD[trainer], line * (2 if _zero(line) else 1))
    assert reader.bad_reports > 0
    assert reader.bad_loss
    reader.feed(GOOD[trainer].encode() + b"\r")
    assert reader.bad_reports == 0


def _zero(line: str) -> bool:
    """HF Trainer's way to print a NaN: one line alone may be a step that a loss scaler skipped."""
    return "'loss': 0.0" in line or "'loss': '0'" in line


@pytest.mark.parametrize(("trainer", "line"), [one for one in BAD if not _zero(one[1])])
def test_a_rule_means_that_line(trainer: str, line: str) -> None:
    found = list(rules.default().scan(line.replace("\r", "\n").encode() + b"\n"))
    assert {match.rule for match in found} <= {"nan_loss", "nan_iterations"}
    assert found
    logged = "INFO" in line  # what a line of that level says is a warning; its numbers count all the same
    assert all(match.severity == ("warning" if logged else "error") for match in found)
    assert not list(rules.default().scan(GOOD[trainer].encode()))


@pytest.mark.parametrize(("trainer", "line"), BAD)
def test_a_log_that_ends_so_is_told(trainer: str, line: str) -> None:
    curves = CurveReader()
    lines = (GOOD[trainer] + line * 6).replace("\r", "\n").splitlines()
    for number, one in enumerate(lines, 1):
        curves.feed(one.encode(), number)
    told = logs_curves.anomalies(curves.curves())
    if "nan iterations" in line and "lm loss" not in line and "grad norm" not in line:
        return  # the rule tells of it: no curve has a value there
    assert told
    assert told[0].kind == "nan"
    assert told[0].confidence >= logs_curves.LASTING


HARMLESS = [
    "loading /data/nan/inf.bin\n",
    "reading nan_values.parquet\n",
    "NaN handling: enabled, skip_nan_loss=True\n",
    "banana loss function\n",
    "Loss function: nanmean\n",
    "detect_anomaly: will raise on nan\n",
    "best_loss: inf\n",
    "early stopping: best loss inf\n",
    "val_loss: nan\n",
    "the loss is info only\n",
    "loss scale: inf\n",
    "Ferdinand: loss of packets nanoseconds=5\n",
    megatron(4, "2.100000E+00", "1.234", nan=0),
    hf(4, "0.1", "nan"),
    hf(4, "0.0", "nan"),
    hf(4, "0.0", "0.1"),
]


@pytest.mark.parametrize("line", HARMLESS)
def test_other_words_are_no_bad_loss(line: str) -> None:
    reader = read(GOOD["nanogpt"], line)
    assert not reader.bad_loss
    assert not reader.bad_reports


def test_a_gradient_norm_that_is_no_number_once_is_no_failure() -> None:
    reader = read(GOOD["hf5"], hf(4, "1.2", "nan", "'"))
    assert not reader.bad_reports
    reader.feed(hf(5, "1.2", "0.9", "'").encode())
    assert not reader.bad_reports


def test_one_that_stays_so_is() -> None:
    steps = "".join(f"step {step} loss 2.0 grad_norm nan\n" for step in range(4, 12))
    reader = read("step 1 loss 2.0 grad_norm 1.0\nstep 2 loss 2.0 grad_norm 1.0\n", steps)
    assert reader.bad_reports >= logs_curves.TO_STAY
    assert reader.bad_since is not None


def test_the_step_from_which_on_is_kept() -> None:
    reader = read(GOOD["nanogpt"], *(f"iter {step}: loss nan, time 1.00ms\n" for step in range(4, 30)))
    assert reader.bad_since == 4
    assert reader.bad_reports == 26
    assert read(
        GOOD["nanogpt"], "".join(f"iter {step}: loss nan, time 1.00ms\n" for step in range(4, 30))
    ).bad_since in (4, 29)


@pytest.mark.parametrize(
    "line",
    [
        "step {step} loss: 1.2{step} itc_loss: nan",
        '{{"step": {step}, "loss": 1.2, "aux_loss": NaN}}',
        "step {step} | loss: 1.2 | lowest loss: inf",
        "step {step} | loss: 1.2 | last loss: inf",
        "step {step} loss: 1.2 grad_norm: nan",
    ],
)
def test_what_is_no_number_beside_the_loss_is_no_alarm(line: str) -> None:
    reader = read(*(line.format(step=step) + "\n" for step in range(1, 60)))
    assert reader.loss_alarm is None
    assert reader.bad_loss == ("grad_norm" in line), "told, as ever"
    assert read(*(line.format(step=step).replace("1.2", "nan ") + "\n" for step in range(1, 60))).loss_alarm
