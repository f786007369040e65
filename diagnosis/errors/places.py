"""What a piece of code is for, by its file, its function and its text: input pipeline, checkpoint, configuration."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from diagnosis.signals import Frame, Frozen
from diagnosis.tables import load

_PLACES: Final = {
    name: {kind: re.compile(row[kind]) for kind in ("file", "function", "code")}
    for name, row in load("diagnosis", "exceptions.toml")["place"].items()
}


class Where(Frozen, frozen=True, kw_only=True):
    """Where an exception came from."""

    frames: tuple[Frame, ...]
    """Outermost first."""
    code: str = ""
    """The innermost line of the user's own code."""

    def near(self, count: int) -> Where:
        """The innermost frames only."""
        return msgspec.structs.replace(self, frames=self.frames[-count:])

    @property
    def file(self) -> str:
        """That of the innermost frame."""
        return self.frames[-1].file if self.frames else ""

    @property
    def in_data(self) -> bool:
        """It came through the input pipeline."""
        data = _PLACES["data"]
        if data["code"].search(self.code) is not None or any(data["file"].search(one.file) for one in self.frames):
            return True
        # A loop over data calls the model: what it raises is not the data's.
        models = [number for number, one in enumerate(self.frames) if one.file.endswith("nn/modules/module.py")]
        inside = self.frames[models[-1] + 1 if models else 0 :]
        return any(data["function"].search(_bare(one)) for one in inside)

    @property
    def in_checkpoint(self) -> bool:
        """It came through code that loads or saves a checkpoint."""
        return self._is_in("checkpoint", self.frames)

    @property
    def in_config(self) -> bool:
        """The innermost few frames read or check arguments and configuration."""
        return self._is_in("config", self.frames[-4:])

    def _is_in(self, name: str, frames: tuple[Frame, ...]) -> bool:
        place = _PLACES[name]
        if place["code"].search(self.code) is not None:
            return True
        return any(place["file"].search(one.file) or place["function"].search(_bare(one)) for one in frames)


def _bare(frame: Frame) -> str:
    return frame.function.rsplit(".", 1)[-1]
