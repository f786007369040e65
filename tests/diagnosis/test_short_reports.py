"""Short documents: reports of devices, nodes and pods, logs of other stacks; complaints; some show no trouble."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from supervisor.cli import diagnose


def reports(name: str = "short_reports.txt") -> list[object]:
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    found: list[object] = []
    for number, report in enumerate(text.split("\n@ ")[1:], start=1):
        accepted, _, log = report.partition("\n")
        found.append(pytest.param(accepted.split(), log + "\n", id=f"{number}-{accepted.split()[0]}"))
    return found


FILES = ("short_reports.txt", "short_complaints.txt", "short_ends.txt", "short_devices.txt")


@pytest.mark.parametrize(("accepted", "log"), [one for name in FILES for one in reports(name)])
def test_a_reader_on_call_would_say_the_same(accepted: list[str], log: str) -> None:
    verdict = diagnose.answer([diagnose.read(io.BytesIO(log.encode()), "given.txt")])["verdict"]
    assert verdict["failure_class"] in accepted, verdict["why"]


@pytest.mark.parametrize(("_name", "log"), reports("healthy_listings.txt"))
def test_listings_on_which_nothing_is_wrong_alarm_nobody(_name: list[str], log: str) -> None:
    verdict = diagnose.answer([diagnose.read(io.BytesIO(log.encode()), "given.txt")])["verdict"]
    assert verdict["failure_class"] in ("none", "unknown"), verdict["why"]


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("tux[12-13]", ["tux12", "tux13"]),
        ("a1,b[02-03]", ["a1", "b02", "b03"]),
        ("gpu[008-010]-ib", ["gpu008-ib", "gpu009-ib", "gpu010-ib"]),
        ("tux[12-99]", []),
        ("k[001-512]", []),
        ("k[1-3],m[1-3]", []),
        ("k[1-2-3]", []),
        ("k[3-1]", []),
    ],
)
@pytest.mark.parametrize(
    "line", ["error: Nodes {} not responding, setting DOWN", "Not responding   slurm   2026-01-01T00:00:00 {}"]
)
def test_a_list_of_few_nodes_names_each_and_a_list_of_many_none(line: str, nodes: str, names: list[str]) -> None:
    log = f"REASON  USER  TIMESTAMP  NODELIST\n{line.format(nodes)}\n"
    verdict = diagnose.answer([diagnose.read(io.BytesIO(log.encode()), "given.txt")])["verdict"]
    assert [one["node"] for one in verdict["culprits"]] == names


AT_WORK = "".join(f"step {step} loss {3 - step / 100:.4f} time 0.31s\n" for step in range(40))


@pytest.mark.parametrize(
    "line",
    [
        "NPU 3: HBM uncorrectable ECC error count: 0",
        "HBM uncorrectable ECC: 0, DDR double-bit ECC: 0",
        "HBM: 0 uncorrectable ECC errors",
        "DDR: no double-bit ECC errors",
        "IPU 3 parity errors: 0",
        "NRT_TIMEOUT: 600",
        "Tip: if you see GPU out of memory, take a smaller batch",
        "Stop with Ctrl+C",
        "CTRL+C to quit",
        "SIGINT handler removed",
        "keyboard interrupts ignored",
        "sensor signal 15 dBm",
        "search interrupted trials: 0",
        "user interrupts: none",
        "0 trials stopped by user",
    ],
)
@pytest.mark.parametrize("before", ["", AT_WORK], ids=["alone", "at_work"])
def test_a_count_of_nothing_or_an_offer_is_no_failure(before: str, line: str) -> None:
    verdict = diagnose.answer([diagnose.read(io.BytesIO(f"{before}{line}\n".encode()), "given.txt")])["verdict"]
    assert verdict["failure_class"] in ("none", "unknown"), verdict["why"]


def test_what_is_lost_may_be_another_device_than_a_gpu() -> None:
    verdict = diagnose.answer(
        [diagnose.read(io.BytesIO(f"{AT_WORK}OSError: NVMe device lost\n".encode()), "given.txt")]
    )["verdict"]
    assert verdict["failure_class"] != "gpu_fallen_off_bus", verdict["why"]


@pytest.mark.parametrize(
    "line",
    [
        "[0] Done loading dataset",
        "Early stopping on val_loss, patience=5",
        "early_stopping in use for each epoch",
        "early_stop: on",
        "val_loss did not improve for 3 epochs, early stopping counter 3/10",
        "no improvement in this epoch; early stop patience 3 of 10",
        "train: patience exceeded, reducing learning rate to 1e-5",
    ],
)
def test_a_setting_or_a_part_that_is_done_is_no_end_of_the_work(line: str) -> None:
    verdict = diagnose.answer([diagnose.read(io.BytesIO(f"{line}\nloading the model\n".encode()), "given.txt")])[
        "verdict"
    ]
    assert verdict["failure_class"] == "unknown", verdict["why"]
