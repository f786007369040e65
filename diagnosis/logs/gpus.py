"""Which rank uses which GPU, and which GPU `nvidia-smi` means: NCCL's first lines, and the headings above a line."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

from diagnosis.story import LineMatch, LogStory

MAX_RANKS: Final = 1 << 16
MAX_LINES: Final = 256
FIRST_BYTES: Final = 16 << 20
"""So much of a log is looked at: NCCL tells it at the start, and a report of `nvidia-smi` is short."""
HINTS: Final = (b"busId ", b"GPU Current Temp", b" Slowdown")
"""A block that has none of them tells nothing."""
_LINE: Final = re.compile(
    rb"\brank (?P<rank>\d{1,6}) nranks (?P<nranks>\d{1,6}) cudaDev (?P<index>\d{1,3}) (?:nvmlDev \d{1,3} )?"
    rb"busId (?P<bus>[0-9a-f]{1,16})\b"
    rb"|^GPU (?P<gpu>[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2})\.\d[ \t\r]*$"
    rb"|^[ \t]+GPU UUID[ \t]{1,60}: (?P<uuid>GPU-[0-9a-f-]{36})"
    rb"|^[ \t]+GPU Current Temp[ \t]{1,60}: (?P<temp>\d{1,3}) C"
    rb"|(?P<slow>(?:HW|SW) (?:Thermal|Power Brake) Slowdown[ \t]{0,60}: Active)",
    re.MULTILINE,
)


class _Gpu:
    """What `nvidia-smi -q` tells of one GPU, as far as it was read."""

    def __init__(self, pci: str) -> None:
        self.pci = pci
        self.uuid = self.temperature = ""


class GpuOfRank(NamedTuple):
    number: int
    """As the process counts them."""
    pci: str
    """`dddd:bb:dd`."""


class GpuReader:
    """Reads one log."""

    def __init__(self) -> None:
        self._ranks: dict[int, GpuOfRank] = {}
        self._nranks = self._bytes = 0
        self._gpu: _Gpu | None = None
        self._slow: dict[int, _Gpu] = {}
        """Lines that say that this GPU is slowed down."""

    def feed(self, block: bytes, first_line: int) -> None:
        """Whole lines; `first_line`: the number of the first."""
        self._bytes += len(block)
        if self._bytes > FIRST_BYTES or not any(hint in block for hint in HINTS):
            return
        for match in _LINE.finditer(block):
            if match["rank"] is not None:
                self._of_rank(match)
            elif match["gpu"] is not None:
                self._gpu = _Gpu(match["gpu"].decode().lower()[-10:])
            elif self._gpu is None:
                continue
            elif match["uuid"] is not None:
                self._gpu.uuid = match["uuid"].decode()
            elif match["temp"] is not None:
                self._gpu.temperature = match["temp"].decode()
            elif len(self._slow) < MAX_LINES:
                self._slow[first_line + block.count(b"\n", 0, match.start())] = self._gpu

    def _of_rank(self, match: re.Match[bytes]) -> None:
        """Ranks are of the whole job in the largest communicator only."""
        nranks, bus = int(match["nranks"]), int(match["bus"], 16)
        if nranks > self._nranks:
            self._ranks, self._nranks = {}, nranks
        if nranks == self._nranks and len(self._ranks) < MAX_RANKS:
            pci = f"{bus >> 20:04x}:{bus >> 12 & 0xFF:02x}:{bus >> 4 & 0xFF:02x}"
            self._ranks[int(match["rank"])] = GpuOfRank(int(match["index"]), pci)

    def told(self, story: LogStory) -> LogStory:
        """The story of this log with the GPUs that it names."""
        ranks = self._ranks
        if story.rank is not None:
            ranks = {story.rank: next(reversed(ranks.values()))} if ranks else {}
        if not ranks and not self._slow:
            return story
        return msgspec.structs.replace(
            story,
            gpus={rank: (one.number, one.pci) for rank, one in ranks.items()},
            matches=tuple(map(self._with_gpu, story.matches)),
        )

    def _with_gpu(self, match: LineMatch) -> LineMatch:
        gpu = self._slow.get(match.line)
        if gpu is None or match.fields.get("device"):
            return match
        fields = {**match.fields, "device": gpu.pci, **({"uuid": gpu.uuid} if gpu.uuid else {})}
        said = " ".join(match.text.split())
        text = f"{said} at {gpu.temperature} °C" if gpu.temperature else said
        return msgspec.structs.replace(match, fields=fields, text=text)
