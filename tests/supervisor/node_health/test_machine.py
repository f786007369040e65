"""The machine as a whole: from trees as they are captured, and from this one."""

import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diagnosis.health import Reading
from supervisor.node_health.contract import Expect, JobView, Moment, Place, Probe, Site
from supervisor.node_health.machine import (
    OFFSET,
    REBOOTED,
    UPTIME,
    Boot,
    MachineProbe,
    judge_modules,
    judge_offset,
    judge_ping,
    judge_reboot,
    judge_synchronized,
    judge_uptime,
    judge_versions,
    kernel_clock,
    ping_slurm,
    resolve,
)
from supervisor.node_health.programs import find_program
from supervisor.node_health.units import enabled_units, state_of

NOW = 1_767_225_600.0  # 2026-01-01 00:00:00 UTC


def tree(folder: Path, files: dict[str, str], **more: Any) -> Place:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Place(root=folder, **more)


def look(place: Place, probe: MachineProbe | None = None, wall: float = NOW) -> list[Reading]:
    return (probe or MachineProbe()).look(place, Moment(wall=wall, mono=wall))


def of(readings: list[Reading], check: str, device: str = "") -> Reading:
    found = [reading for reading in readings if reading.check == check and (not device or reading.device == device)]
    assert len(found) == 1, found
    return found[0]


def boot(folder: Path, boot_id: str, uptime_s: float, state: Path) -> Place:
    files = {"proc/sys/kernel/random/boot_id": f"{boot_id}\n", "proc/uptime": f"{uptime_s:.2f} 1000.00\n"}
    return tree(folder, files, state_dir=state)


# ----- boots -----


def test_a_reboot_is_told_for_an_hour_by_every_process_of_the_new_boot(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert of(look(boot(tmp_path, "one", 90_000, state)), "node_rebooted").status == "healthy"
    again = of(look(boot(tmp_path, "two", 300, state), wall=NOW + 900), "node_rebooted")
    assert (again.status, again.level) == ("unhealthy", "warning")
    assert again.text == "booted anew at 2026-01-01 00:10:00 UTC, last looked at before that at 2026-01-01 00:00:00 UTC"
    later = of(look(boot(tmp_path, "two", 2000, state), wall=NOW + 2600), "node_rebooted")
    assert later.text.endswith("2026-01-01 00:00:00 UTC")
    assert of(look(boot(tmp_path, "two", 3700, state), wall=NOW + 4300), "node_rebooted").status == "healthy"


def test_how_long_ago_the_node_was_looked_at_is_kept_now_and_then(tmp_path: Path) -> None:
    state = tmp_path / "state"
    probe = MachineProbe()
    for minute in range(31):
        look(boot(tmp_path, "one", 90_000 + 60 * minute, state), probe, NOW + 60 * minute)
    kept = msgspec.json.decode((state / "machine.json").read_bytes())
    assert NOW + 1200 <= kept["value"]["at"] <= NOW + 1860
    (state / "machine.json").write_text("garbage")
    assert of(look(boot(tmp_path, "two", 10, state)), "node_rebooted").status == "healthy"


def test_uptime() -> None:
    assert judge_uptime(Boot(599, None), UPTIME.limits).level == "warning"
    assert judge_uptime(Boot(601, None), UPTIME.limits).status == "healthy"
    assert judge_uptime(None, UPTIME.limits).status == "unknown"
    assert judge_reboot(None, NOW, REBOOTED.limits).status == "unknown"


# ----- the clock -----


@pytest.mark.parametrize(
    ("offset_s", "error_s", "status", "level"),
    [
        (None, 0.0, "not_applicable", ""),
        (0.004, 0.001, "healthy", ""),
        (0.3, 0.29, "healthy", ""),  # the way was slow: nothing is certain
        (-0.3, 0.01, "unhealthy", "warning"),
        (2.0, 0.01, "unhealthy", "warning"),
        (3600.0, 0.01, "unhealthy", "critical"),
    ],
)
def test_the_offset_to_the_controller(offset_s: float | None, error_s: float, status: str, level: str) -> None:
    reading = judge_offset(JobView(clock_offset_s=offset_s, clock_error_s=error_s), OFFSET.limits)
    assert reading.status == status
    assert not level or reading.level == level


def test_the_offset_is_told_in_words() -> None:
    reading = judge_offset(JobView(clock_offset_s=-0.3, clock_error_s=0.012), OFFSET.limits)
    assert reading.text == "0.3 s behind the controller's, give or take 0.012 s"


def test_an_unsynchronized_clock_is_a_fault_only_where_a_time_service_should_keep_it() -> None:
    alone, near = JobView(), JobView(clock_offset_s=0.001, clock_error_s=0.001)
    assert judge_synchronized((True, 0.01), True, alone, 0.05).status == "healthy"
    assert judge_synchronized((False, 16.0), True, alone, 0.05).level == "warning"
    assert judge_synchronized((False, 16.0), True, near, 0.05).status == "healthy"
    assert judge_synchronized((False, 16.0), False, alone, 0.05).status == "not_applicable"
    assert judge_synchronized(None, True, alone, 0.05).status == "unknown"


def test_the_kernel_tells_of_its_clock() -> None:
    found = kernel_clock()
    assert found is None or 0 <= found[1] <= 16.0  # 16 s is the most it says (NTP_PHASE_LIMIT)


# ----- services -----

UNIFIED = {
    "sys/fs/cgroup/system.slice/slurmd.service/cgroup.events": "populated 1\nfrozen 0\n",
    "sys/fs/cgroup/system.slice/systemd-journald.service/cgroup.events": "populated 1\nfrozen 0\n",
    "sys/fs/cgroup/system.slice/failed.service/cgroup.events": "populated 0\nfrozen 0\n",
    "etc/systemd/system/multi-user.target.wants/slurmd.service": "",
    "etc/systemd/system/multi-user.target.wants/munge.service": "",
    "etc/systemd/system/multi-user.target.wants/setup.service": "",
    "usr/lib/systemd/system/setup.service": "[Service]\nType = oneshot\nExecStart=/bin/true\n",
}
OLD = {
    "sys/fs/cgroup/systemd/system.slice/slurmd.service/cgroup.procs": "4711\n",
    "sys/fs/cgroup/systemd/system.slice/systemd-journald.service/cgroup.procs": "300\n",
    "sys/fs/cgroup/systemd/system.slice/gone.service/cgroup.procs": "",
}


def test_services_by_their_cgroups(tmp_path: Path) -> None:
    place = tree(tmp_path / "unified", UNIFIED)
    states = {
        unit: state_of(place, unit) for unit in ("slurmd", "munge", "failed", "setup", "systemd-journald.service")
    }
    assert states == {
        "slurmd": "running",
        "munge": "stopped",
        "failed": "stopped",
        "setup": "oneshot",
        "systemd-journald.service": "running",
    }
    old = tree(tmp_path / "old", OLD)
    assert [state_of(old, unit) for unit in ("slurmd", "gone")] == ["running", "stopped"]
    (tmp_path / "old/sys/fs/cgroup/systemd/system.slice/gone.service/worker").mkdir()
    assert state_of(old, "gone") == "running"  # its processes are further down
    assert state_of(Place(root=tmp_path / "nothing"), "slurmd") == "unknown"


def test_a_tree_with_some_cgroups_only_says_nothing_of_the_others(tmp_path: Path) -> None:
    some = {path: text for path, text in UNIFIED.items() if "journald" not in path}
    assert state_of(tree(tmp_path, some), "munge") == "unknown"


def test_what_is_enabled(tmp_path: Path) -> None:
    assert enabled_units(tree(tmp_path, UNIFIED)) == {"slurmd.service", "munge.service", "setup.service"}


def test_enabled_services_and_those_the_site_expects(tmp_path: Path) -> None:
    site = Site(expect=Expect(units=("slurmd", "dcgm.service", "setup")))
    readings = look(tree(tmp_path, UNIFIED, site=site))
    assert of(readings, "unit_running", "slurmd.service").status == "healthy"
    assert of(readings, "unit_running", "dcgm.service").level == "critical"
    assert of(readings, "unit_running", "setup.service").status == "not_applicable"
    munge = of(readings, "unit_running", "munge.service")
    assert (munge.status, munge.level) == ("unhealthy", "warning")
    assert munge.text == "munge.service does not run, and it is enabled"


def test_a_container_without_systemd_has_no_services(tmp_path: Path) -> None:
    files = {path: text for path, text in UNIFIED.items() if path.startswith("etc")}
    readings = look(tree(tmp_path, files))
    assert {reading.status for reading in readings if reading.check == "unit_running"} == {"not_applicable"}


# ----- modules, versions -----


def test_modules(tmp_path: Path) -> None:
    files = {"sys/module/lustre/refcnt": "3\n", "proc/modules": "nvidia_peermem 16384 0 - Live 0x0 (OE)\n"}
    site = Site(expect=Expect(modules=("lustre", "nvidia-peermem", "gdrdrv")))
    readings = look(tree(tmp_path, files, site=site))
    assert [(r.device, r.status) for r in readings if r.check == "module_loaded"] == [
        ("lustre", "healthy"),
        ("nvidia-peermem", "healthy"),
        ("gdrdrv", "unhealthy"),
    ]
    assert judge_modules(("lustre",), frozenset())[0].status == "unknown"


def test_expected_versions(tmp_path: Path) -> None:
    files = {"proc/sys/kernel/osrelease": "6.8.0-45-generic\n"}
    site = Site(expect=Expect(versions={"kernel": "6.8.0-48-generic", "driver": "550.54.15"}))
    readings = look(tree(tmp_path, files, site=site, preflight=True))
    assert of(readings, "versions_expected", "kernel").text == (
        "kernel is 6.8.0-45-generic, and the site expects 6.8.0-48-generic"
    )
    assert of(readings, "versions_expected", "driver").status == "unknown"
    assert judge_versions({}, {})[0].status == "not_applicable"


# ----- names and Slurm -----


def test_names() -> None:
    assert resolve("localhost", 20.0).status == "healthy"
    assert resolve("127.0.0.1", 20.0).status == "healthy"
    wrong = resolve("no such host.invalid", 20.0)
    assert wrong.status == "unhealthy"
    assert resolve("x" * 300, 20.0).status == "unhealthy"


@pytest.mark.parametrize(
    ("output", "status"),
    [
        ("Slurmctld(primary) at head1 is UP\n", "healthy"),
        ("Slurmctld(primary) at head1 is DOWN\nSlurmctld(backup) at head2 is UP\n", "healthy"),
        ("Slurmctld(primary) at head1 is DOWN\nSlurmctld(backup) at head2 is DOWN\n", "unhealthy"),
        ("Slurmctld(primary/backup) at head1/head2 are DOWN/UP\n", "healthy"),
        ("scontrol: error: fetch_config: DNS SRV lookup failed\n", "unknown"),
        ("", "unknown"),
        (None, "unhealthy"),
    ],
)
def test_scontrol_ping(output: str | None, status: str) -> None:
    assert judge_ping(output).status == status


def test_a_ping_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    began = time.monotonic()
    assert ping_slurm(str(program), 0.2).status == "unhealthy"
    assert time.monotonic() - began < 60.0
    program.write_text("#!/bin/sh\necho 'Slurmctld(primary) at head1 is UP'\n")
    assert ping_slurm(str(program), 20.0).status == "healthy"
    assert ping_slurm(str(tmp_path / "absent"), 20.0).status == "unknown"
    assert find_program("no-such-program") == ""


# ----- the probe -----


def test_an_empty_tree_is_neither_healthy_nor_unhealthy(tmp_path: Path) -> None:
    probe = MachineProbe()
    assert isinstance(probe, Probe)
    readings = look(Place(root=tmp_path, preflight=True), probe)
    assert {reading.check for reading in readings} == {check.id for check in probe.checks}
    assert {reading.status for reading in readings} <= {"unknown", "not_applicable"}


def test_this_machine_is_looked_at_without_alarm_but_for_what_is_so(tmp_path: Path) -> None:
    job = JobView(controller=f"http://{socket.gethostname()}:7461")
    readings = look(Place(state_dir=tmp_path, job=job, preflight=True), wall=time.time())
    assert {reading.check for reading in readings} == {check.id for check in MachineProbe.checks}
    assert of(readings, "node_rebooted").status == "healthy"
