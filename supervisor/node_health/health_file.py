"""Files about a node's health: check states (`HealthFile`), and how long an operator has the GPUs (`GpuRelease`).

Where files of check states are, and whether to believe one.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from diagnosis.health import CheckState
from diagnosis.signals import Frozen
from supervisor.node_health.contract import keep_file
from supervisor.node_health.protocol import PollReport

BELIEVED_S: Final = 120.0
"""An agent writes at least once a minute."""
FILE_LIMIT: Final = 16 << 20
FILES_LOOKED_AT: Final = 200


class Cost(Frozen, frozen=True, kw_only=True):
    """What the looks of one probe cost since the agent started."""

    looks: int = 0
    cpu_s: float = 0.0
    took_s: float = 0.0

    def plus(self, report: PollReport) -> Cost:
        return Cost(looks=self.looks + 1, cpu_s=self.cpu_s + report.cpu_s, took_s=self.took_s + report.took_s)


class HealthFile(Frozen, frozen=True, kw_only=True):
    """`health.json` of the local folder: what stands on this node, for whoever asks. Replaced when something changed
    (every 5 s at most), and every 60 s; who reads it believes it for two minutes, and only in the same boot."""

    schema: int
    """1."""
    node: str
    boot_id: str
    at: float
    """Unix seconds."""
    mono: float
    """Monotonic seconds of the node."""
    pid: int
    """The agent's."""
    waiting: tuple[str, ...] = ()
    """Probes that have not reported yet: for their checks this file is no answer."""
    unseen: tuple[str, ...] = ()
    """What cannot be seen here, in words."""
    problems: tuple[str, ...] = ()
    """What is wrong with the probes themselves: plug-ins that cannot be loaded, workers that end."""
    gpus_released_until: float = 0.0
    """Unix seconds; 0 where no operator has asked for the GPUs."""
    check_states: tuple[CheckState, ...] = msgspec.field(default=(), name="standings")
    costs: dict[str, Cost] = {}
    """Probe -> what its looks took (`unbroken bench overhead`)."""


def of_agent(boot_id: str, local_dir: str = "", node: str = "") -> HealthFile | None:
    """The newest believable file of an agent that runs on this node (under this name, where one is given)."""
    now = time.monotonic()
    fresh = []
    for path in _places(local_dir):
        file = read(path, boot_id)
        if file is not None and 0 <= now - file.mono <= BELIEVED_S and _runs(file.pid):
            fresh.append(file)
    return max((file for file in fresh if not node or file.node == node), key=lambda file: file.mono, default=None)


def _places(local_dir: str) -> Iterator[Path]:
    own = f"unbroken-{os.getuid()}"
    named = local_dir or os.environ.get("UNBROKEN_LOCAL_DIR", "")
    standard = [] if local_dir else [f"{tempfile.gettempdir()}/{own}", f"/tmp/{own}"]
    for folder in dict.fromkeys([named, *standard] if named else standard):
        if not _ours(folder):  # in /tmp anybody may have made a folder of this name, and filled it
            continue
        yield Path(folder) / "health.json"
        yield from sorted(Path(folder).glob("*/*/health.json"))[:FILES_LOOKED_AT]


def read(path: Path, boot_id: str) -> HealthFile | None:
    """None unless it is of this boot, and nobody but root and we ourselves could have written it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        ours = found.st_uid in (0, os.getuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not ours or not stat.S_ISREG(found.st_mode) or found.st_size > FILE_LIMIT:
            return None
        try:
            health = msgspec.json.decode(file.read(FILE_LIMIT), type=HealthFile)
        except (OSError, msgspec.DecodeError):
            return None
    return health if health.schema == 1 and boot_id and health.boot_id == boot_id else None


def _ours(folder: str) -> bool:
    try:
        return os.stat(folder).st_uid in (0, os.getuid())
    except (OSError, ValueError):
        return False


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return pid > 0


LONGEST_RELEASE_S: Final = 86400.0


class GpuRelease(Frozen, frozen=True, kw_only=True):
    """How long an operator has the GPUs. The agent keeps it for the agent that is started after it.

    `until`: Unix seconds; 0: the GPUs are not released.
    """

    until: float = 0.0
    by: str = ""

    @property
    def clock(self) -> str:
        return time.strftime("%H:%M", time.localtime(self.until))

    @classmethod
    def read(cls, folder: Path) -> GpuRelease:
        """What an earlier agent was asked for."""
        try:
            return msgspec.json.decode((folder / "release.json").read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return cls()

    def keep(self, folder: Path) -> None:
        """On a full disk only the next agent does not know."""
        keep_file(folder / "release.json", self)
