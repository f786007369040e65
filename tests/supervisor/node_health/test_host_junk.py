"""Captured trees whose files hold anything at all: the host's probes answer, and accuse nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.node_health.contract import JobInfo, Moment, Probe, ProbeContext
from supervisor.node_health.machine import HardwareProbe
from supervisor.node_health.memory import MemoryProbe
from supervisor.node_health.processes import ProcessProbe

CPUS, EDAC = "sys/devices/system/cpu", "sys/devices/system/edac/mc"
FILES = f"""
proc/meminfo proc/vmstat proc/loadavg proc/mounts proc/sys/fs/file-nr proc/sys/kernel/pid_max
proc/pressure/cpu proc/pressure/io proc/pressure/memory
proc/7/stat proc/7/cgroup proc/7/limits proc/7/status proc/7/wchan proc/7/schedstat
sys/fs/cgroup/memory.max sys/fs/cgroup/memory.current sys/fs/cgroup/memory.events sys/fs/cgroup/pids.max
sys/class/infiniband/mlx5_0/node_desc
{EDAC}/mc0/ce_count {EDAC}/mc0/ue_count {EDAC}/mc0/dimm0/dimm_label
{CPUS}/online {CPUS}/present {CPUS}/cpu0/thermal_throttle/package_throttle_count {CPUS}/cpufreq/policy0/scaling_max_freq
sys/class/nvme/nvme0/state sys/class/nvme/nvme0/address sys/class/nvme/nvme0/model
""".split()


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\x00\xff\xfe\x1b[2J",
        b"0::/" + b"x" * 5000,
        b"9" * 6000,
        "MemTotal: ² kB\nMemAvailable: ٣ kB\nsome avg60=1.2.3 avg300=.\noom_kill ²\n".encode(),
        b"7 (x) D " + b"x " * 30,
        b"7 (x) Z " + b"- " * 30,
        b"shm /dev/shm tmpfs size=99999999999999999999k 0 0\nMax locked memory   ? ?\n",
        b"-1",
    ],
)
@pytest.mark.parametrize("make", [MemoryProbe, HardwareProbe, ProcessProbe])
def test_junk(tmp_path: Path, junk: bytes, make: type[Probe]) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(junk)
    place = ProbeContext(root=tmp_path, job=JobInfo(ranks={7: 0}), preflight=True, state_dir=tmp_path / "state")
    probe = make()
    for mono in (0.0, 60.0):
        results = probe.look(place, Moment(wall=0.0, mono=mono))
        assert {result.check for result in results} == {check.id for check in probe.checks}
        if not junk[:1].isdigit():  # a file with a number in front has that number
            assert not [result for result in results if result.status == "unhealthy"]
