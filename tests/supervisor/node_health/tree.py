"""A node's files in a folder, and a probe that looks at them every ten seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from diagnosis.health import CheckResult
from supervisor.node_health.contract import Moment, Probe, ProbeContext, Site

BASE = 1_800_000_000.0


def plant(root: Path, files: Mapping[str, object]) -> Path:
    """Write these files below `root`: a captured tree. What is neither bytes nor text gets a newline, as in sysfs."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else f"{content}\n")
    return root


class Files:
    """A captured tree that a test changes file by file."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, content: object) -> None:
        plant(self.root, {name: content})


class Tree(Files):
    def __init__(self, folder: Path, probe: Probe, site: Site | None = None) -> None:
        super().__init__(folder / "root")
        self.at = 0.0
        self.place = ProbeContext(root=self.root, site=site or Site(), state_dir=folder / "state")
        self.probe = probe
        self.boot("b00t")

    def boot(self, boot_id: str) -> None:
        self.write("proc/sys/kernel/random/boot_id", boot_id)

    def look(self, after_s: float = 10.0) -> list[CheckResult]:
        self.at += after_s
        return list(self.probe.look(self.place, Moment(wall=BASE + self.at, mono=self.at)))

    def bad(self, after_s: float = 10.0) -> dict[tuple[str, str], str]:
        """(check, device) -> level, of all that is unhealthy."""
        return {(one.check, one.device): one.level for one in self.look(after_s) if one.status == "unhealthy"}


def of(results: list[CheckResult], check: str, device: str) -> CheckResult:
    return next(one for one in results if one.check == check and one.device == device)
