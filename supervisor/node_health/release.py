"""How long an operator has the GPUs. The agent keeps it in a file, for the agent that is started after it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import msgspec

from diagnosis.signals import Frozen
from supervisor.paths import write_atomically

LONGEST_RELEASE_S: Final = 86400.0


class GpuRelease(Frozen, frozen=True, kw_only=True):
    """`until`: Unix seconds; 0: the GPUs are not released."""

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
        """Does not fail on a full disk: then only the next agent does not know."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "release.json", msgspec.json.encode(self))
        except OSError:
            pass
