"""The machine as a whole: from trees as they are captured, and from this one."""

from pathlib import Path

import msgspec
import pytest

from diagnosis.health import CheckResult
from supervisor.node_health.contract import JobInfo, Moment, ProbeContext
from supervisor.node_health.machine import OFFSET, REBOOTED, MachineProbe, judge_offset, judge_reboot

from .tree import plant

NOW = 1_767_225_600.0  # 2026-01-01 00:00:00 UTC


def look(place: ProbeContext, probe: MachineProbe | None = None, wall: float = NOW) -> list[CheckResult]:
    return (probe or MachineProbe()).look(place, Moment(wall=wall, mono=wall))


def of(results: list[CheckResult], check: str, device: str = "") -> CheckResult:
    found = [result for result in results if result.check == check and (not device or result.device == device)]
    assert len(found) == 1, found
    return found[0]


def boot(folder: Path, boot_id: str, uptime_s: float, state: Path) -> ProbeContext:
    files = {"proc/sys/kernel/random/boot_id": f"{boot_id}\n", "proc/uptime": f"{uptime_s:.2f} 1000.00\n"}
    return ProbeContext(root=plant(folder, files), state_dir=state)


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
    assert NOW + 1200 <= msgspec.json.decode((state / "machine.json").read_bytes())["value"]["at"] <= NOW + 1860
    (state / "machine.json").write_text("garbage")
    assert of(look(boot(tmp_path, "two", 10, state)), "node_rebooted").status == "healthy"


def test_without_an_uptime_nothing_is_known() -> None:
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
    result = judge_offset(JobInfo(clock_offset_s=offset_s, clock_error_s=error_s), OFFSET.limits)
    assert result.status == status
    assert not level or result.level == level


def test_the_offset_is_told_in_words() -> None:
    result = judge_offset(JobInfo(clock_offset_s=-0.3, clock_error_s=0.012), OFFSET.limits)
    assert result.text == "0.3 s behind the controller's, give or take 0.012 s"


# ----- the probe -----
