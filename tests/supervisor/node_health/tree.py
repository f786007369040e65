"""A node's files in a folder, and a probe that looks at them every ten seconds."""

from __future__ import annotations

from pathlib import Path

from diagnosis.health import CheckResult
from supervisor.node_health.contract import Moment, Probe, ProbeContext, Site

BASE = 1_800_000_000.0


class Tree:
    def __init__(self, folder: Path, probe: Probe, site: Site | None = None) -> None:
        self.root = folder / "root"
        self.at = 0.0
        self.place = ProbeContext(root=self.root, site=site or Site(), state_dir=folder / "state")
        self.probe = probe
        self.boot("b00t")

    def boot(self, boot_id: str) -> None:
        self.write("proc/sys/kernel/random/boot_id", boot_id)

    def write(self, path: str, content: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")

    def look(self, after_s: float = 10.0) -> list[CheckResult]:
        self.at += after_s
        return list(self.probe.look(self.place, Moment(wall=BASE + self.at, mono=self.at)))

    def bad(self, after_s: float = 10.0) -> dict[tuple[str, str], str]:
        """(check, device) -> level, of all that is unhealthy."""
        return {(one.check, one.device): one.level for one in self.look(after_s) if one.status == "unhealthy"}


def of(results: list[CheckResult], check: str, device: str) -> CheckResult:
    return next(one for one in results if one.check == check and one.device == device)
