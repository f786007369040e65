"""Events of NVML: heard, told as lines of the kernel log, counted in a storm, waited for again after a loss."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from diagnosis.kernel.xid import read_xid
from supervisor.node_health.gpu.nvml import BURST, PAUSE_S, Storm, line

FakeNvml, Start = Any, Callable[..., Any]
GPUS = [f"0000:{0x10 + index:02x}:00" for index in range(8)]


def test_events_are_lines_of_the_kernel_log(fake_nvml: FakeNvml, looker: Start) -> None:
    child = looker("listen")
    child.look(100.0)
    child.wait_until(lambda: fake_nvml.calls().get("nvmlEventSetWait_v2", 0) > 0)
    fake_nvml.event(3, 8, 79)
    fake_nvml.event(4, 2, 0)
    fake_nvml.event(5, 8, 94, instance=5)
    fake_nvml.event(6, 1, 0)
    fake_nvml.event(6, 8, 154)
    fake_nvml.event(7, 8, 63)
    heard = [child.next("signal") for _ in range(4)]
    assert [each["text"] for each in heard] == [
        f"NVRM: Xid (PCI:{GPUS[3]}): 79, reported by NVML",
        f"NVRM: Xid (PCI:{GPUS[4]}): 48, reported by NVML",
        f"NVRM: Xid (PCI:{GPUS[5]} GPU-I:05): 94, reported by NVML",
        f"NVRM: Xid (PCI:{GPUS[7]}): 63, reported by NVML",
    ]
    assert heard[0]["source"] == "gpu"
    assert heard[0]["gpu"] == GPUS[3]
    assert heard[0]["gpu_uuid"] == "GPU-00000000-0000-0000-0000-000000000003"
    assert heard[0]["node"] == "n1"


def test_events_are_waited_for_again_after_the_library_was_started_again(fake_nvml: FakeNvml, looker: Start) -> None:
    child = looker("listen")
    child.look(100.0)
    child.wait_until(lambda: fake_nvml.calls().get("nvmlEventSetWait_v2", 0) > 0)
    fake_nvml.state(**{"3.ret.nvmlDeviceGetTemperature": 16})
    registered = fake_nvml.calls()["nvmlDeviceRegisterEvents"]
    child.look(800.0)
    assert fake_nvml.calls()["nvmlShutdown"] == 1
    child.wait_until(lambda: fake_nvml.calls()["nvmlDeviceRegisterEvents"] == registered + 8)
    waits = fake_nvml.calls()["nvmlEventSetWait_v2"]
    child.wait_until(lambda: fake_nvml.calls()["nvmlEventSetWait_v2"] > waits)
    fake_nvml.event(2, 8, 31)
    assert child.next("signal")["gpu"] == GPUS[2]


def test_events_that_may_not_be_heard_are_told_of(fake_nvml: FakeNvml, looker: Start) -> None:
    fake_nvml.state(**{"ret.nvmlDeviceRegisterEvents": 4})
    child = looker("listen")
    child.look(100.0)
    child.wait_until(lambda: fake_nvml.calls().get("nvmlEventSetFree", 0) > 0)
    nvml = child.look(110.0)["gpu_nvml", ""]
    assert nvml == {
        "check": "gpu_nvml",
        "status": "healthy",
        "text": "no Xid events: nvmlDeviceRegisterEvents: no permission",
    }
    assert "nvmlEventSetWait_v2" not in fake_nvml.calls()


def test_a_lost_gpu_does_not_make_the_listener_spin(fake_nvml: FakeNvml, looker: Start) -> None:
    child = looker("listen")
    child.look(100.0)
    child.wait_until(lambda: fake_nvml.calls().get("nvmlEventSetWait_v2", 0) > 0)
    fake_nvml.state(**{"3.lost": 1})
    child.wait_until(lambda: fake_nvml.calls().get("nvmlEventSetCreate", 0) == 2)
    waits = fake_nvml.calls()["nvmlEventSetWait_v2"]
    child.wait_until(lambda: fake_nvml.calls()["nvmlEventSetWait_v2"] > waits)
    fake_nvml.event(4, 8, 79)
    assert child.next("signal")["gpu"] == GPUS[4], "the others are heard"
    fake_nvml.state(**{"3.lost": 1, "ret.nvmlEventSetWait_v2": 999})
    child.wait_until(lambda: fake_nvml.calls()["nvmlEventSetFree"] == 2)
    child.look(110.0)
    assert fake_nvml.calls()["nvmlEventSetCreate"] == 2, "it rests before it tries again"


def test_a_storm_of_events_is_counted_and_costs_little(fake_nvml: FakeNvml, looker: Start) -> None:
    child = looker("listen")
    child.look(100.0)
    fake_nvml.state(**{"storm.per_s": 100_000, "storm.gpu": 1, "storm.xid": 13})
    told = [child.next("signal")["text"] for _ in range(5)]
    assert set(told) == {f"NVRM: Xid (PCI:{GPUS[1]}): 13, reported by NVML"}
    before, began = fake_nvml.calls()["nvmlEventSetWait_v2"], time.monotonic()
    child.wait_until(lambda: fake_nvml.calls()["nvmlEventSetWait_v2"] > before + 500)
    assert time.monotonic() - began > 500 / BURST * PAUSE_S * 0.8
    child.look(110.0)


@pytest.mark.parametrize(("instance", "times"), [("", 1), ("", 4321), (" GPU-I:05", 1)])
def test_the_lines_are_read_like_those_of_the_kernel(instance: str, times: int) -> None:
    read = read_xid(line(94, "0000:c1:00", instance, times))
    assert (read.code, read.device) == (94, "0000:c1:00")


def test_repeated_events_are_counted() -> None:
    storm = Storm(most=2, every_s=10.0)
    thirteen, other = (GPUS[1], "", 13), (GPUS[2], "", 13)
    assert storm.flush(100.0) == []
    assert [storm.note(key) for key in (thirteen, thirteen, thirteen, other, thirteen)] == [
        True,
        True,
        False,
        True,
        False,
    ]
    assert storm.flush(109.0) == []
    assert storm.flush(110.0) == [(thirteen, 2)]
    assert storm.note(thirteen)
    assert storm.flush(120.0) == []
