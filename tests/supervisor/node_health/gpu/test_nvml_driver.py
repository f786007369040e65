"""The same probe on a real driver: what each call costs, and that a healthy GPU has no flaw. Run with -s to see it."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest

from supervisor.node_health.contract import Moment, ProbeContext
from supervisor.node_health.gpu import nvml as calls
from supervisor.node_health.gpu.facts import Fact, Gap
from supervisor.node_health.gpu.nvml import Nvml, NvmlCall
from supervisor.node_health.gpu.probe import NvmlProbe

pytestmark = pytest.mark.gpu
TIMES = 20


def _moment() -> Moment:
    return Moment(wall=time.time(), mono=time.monotonic())


@pytest.fixture(scope="module")
def probe() -> NvmlProbe:
    probe = NvmlProbe()
    began = time.monotonic()
    probe.look(ProbeContext(), _moment())
    print(f"\nfirst look, with nvmlInit: {time.monotonic() - began:.3f} s")
    return probe


def _cost(nvml: Nvml, row: NvmlCall) -> tuple[float, float, Fact]:
    """Wall and CPU milliseconds of one call (median, mean), and its answer."""
    gpu = next(iter(nvml.handles.values()))
    walls, cpu, answer = [], time.thread_time(), None
    for _ in range(TIMES):
        gpu.missing.clear()
        began = time.perf_counter()
        answer = nvml.call(gpu, row)
        walls.append((time.perf_counter() - began) * 1000)
    assert answer is not None
    return statistics.median(walls), (time.thread_time() - cpu) / TIMES * 1000, answer


def test_every_call_and_its_cost(probe: NvmlProbe) -> None:
    nvml = probe._nvml
    rows = (*calls.FAST, *calls.SLOW, *calls.FABRIC, *calls.ONCE, *calls.PREFLIGHT)
    for row in rows:
        wall_ms, cpu_ms, answer = _cost(nvml, row)
        shown = answer.words if isinstance(answer, Gap) else str(answer)
        print(f"{row.function:45} {wall_ms:8.3f} ms wall {cpu_ms:8.3f} ms CPU  {shown[:60]}")
        assert not isinstance(answer, Gap) or answer.code > 0, "the binding understands every call"
    gpu = next(iter(nvml.handles.values()))
    for name, ask in (
        ("fast fields", lambda: nvml.named_fields(gpu, calls.FAST_FIELDS)),
        ("link states", lambda: nvml.link_states(gpu)),
        ("link errors", lambda: nvml.link_errors(gpu, tuple([1] * 18))),
    ):
        began, cpu = time.perf_counter(), time.thread_time()
        answer = ask()
        wall_ms, cpu_ms = (time.perf_counter() - began) * 1000, (time.thread_time() - cpu) * 1000
        print(f"{name:45} {wall_ms:8.3f} ms wall {cpu_ms:8.3f} ms CPU  {str(answer)[:150]}")


def test_a_look_in_steady_state(probe: NvmlProbe) -> None:
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.thread_time()
        results = probe.look(ProbeContext(), _moment())
        wall_ms, cpu_ms = (time.perf_counter() - wall) * 1000, (time.thread_time() - cpu) * 1000
        print(f"look: {wall_ms:.2f} ms wall, {cpu_ms:.2f} ms CPU, {len(results)} readings")
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    print(resident)


def test_a_healthy_gpu_is_healthy(probe: NvmlProbe) -> None:
    place = ProbeContext(preflight=True)
    results = probe.look(place, _moment())
    for result in results:
        if result.status != "healthy":
            print(result.check, result.device, result.status, result.level, result.text)
    # What a virtual machine may leave off is no fault of the GPU.
    mine = {"gpu_application_clocks", "gpu_modes", "gpu_processes_foreign"}
    assert not {result.check for result in results if result.status == "unhealthy"} - mine
    assert any(result.check == "gpu_present" and result.status == "healthy" for result in results)
