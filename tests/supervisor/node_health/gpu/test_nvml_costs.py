"""What the NVML probe asks of a driver, and what a driver that is slow or silent costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FakeNvml, Start = Any, Callable[..., Any]
GPUS = [f"0000:{0x10 + index:02x}:00" for index in range(8)]


def test_a_call_that_never_returns_is_named(fake_nvml: FakeNvml, looker: Start) -> None:
    fake_nvml.state(**{"5.hang.nvmlDeviceGetPowerUsage": -1})
    child = looker("listen")
    child.ask(100.0)
    child.next("doing", lambda call: call == f"nvmlDeviceGetPowerUsage {GPUS[5]}")
    # The GIL is free and events are still heard.
    child.wait_until(lambda: fake_nvml.calls().get("nvmlEventSetWait_v2", 0) > 0)
    fake_nvml.event(5, 8, 119)
    assert child.next("signal")["text"] == f"NVRM: Xid (PCI:{GPUS[5]}): 119, reported by NVML"
    assert fake_nvml.calls()["nvmlDeviceGetPowerUsage"] == 6


def test_a_slow_call_delays_its_look_only(fake_nvml: FakeNvml, looker: Start) -> None:
    fake_nvml.state(**{"5.hang.nvmlDeviceGetTemperature": 300})
    assert looker().look(100.0).flaws == {}


def test_a_look_is_cheap_and_nothing_is_hammered(fake_nvml: FakeNvml, looker: Start) -> None:
    child = looker()
    child.look(100.0)
    before, cpu_s = fake_nvml.calls(), 0.0
    for look in range(1, 81):
        child.look(100.0 + look * 10)
        cpu_s += child.cpu_s
    calls = {name: count - before.get(name, 0) for name, count in fake_nvml.calls().items()}
    assert sum(calls.values()) / 80 < 8 * 14 + 60, "calls of one look at eight GPUs"
    assert calls["nvmlDeviceGetNvLinkState"] <= 80 * 18
    assert calls["nvmlInitWithFlags"] == calls["nvmlDeviceGetHandleByIndex_v2"] == 0
    assert not [name for name in fake_nvml.calls() if "cu" in name.lower() and name.startswith("cu")]
    print(f"a look at eight GPUs: {cpu_s / 80 * 1000:.2f} ms of CPU, {sum(calls.values()) / 80:.0f} calls")
    assert cpu_s / 80 < 0.05


def test_a_driver_whose_calls_are_costly_is_asked_less_often(fake_nvml: FakeNvml, looker: Start) -> None:
    child = looker()
    for look in range(3):
        child.look(100.0 + look * 10)
    assert child.every_s == 10.0
    fake_nvml.state(**{"burn.nvmlDeviceGetPowerUsage": 8})
    for look in range(12):
        child.look(200.0 + look * 10)
    assert 20.0 < child.every_s <= 60.0
    fake_nvml.state()
    for look in range(12):
        child.look(400.0 + look * 10)
    assert child.every_s == 10.0


def test_processes_are_listed_in_turns_only(fake_nvml: FakeNvml, looker: Start) -> None:
    child = looker()
    child.look(100.0)
    fake_nvml.state(**{"2.graphics": "1 900", "2.memory_used": 900 << 20})
    before = fake_nvml.calls()["nvmlDeviceGetComputeRunningProcesses_v3"]
    for look in range(1, 17):
        assert child.look(100.0 + look * 10).flaws == {}, "a display's memory is somebody's"
    assert fake_nvml.calls()["nvmlDeviceGetComputeRunningProcesses_v3"] - before <= 2 * 8
    assert fake_nvml.calls()["nvmlDeviceGetGraphicsRunningProcesses_v3"] <= 2 * 2
