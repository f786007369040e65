"""What one look learned of one GPU: a frozen snapshot of facts by name, and gaps where a fact could not be had."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from diagnosis.health import Level, Status

NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND = 3, 4, 9, 12
FUNCTION_NOT_FOUND, CORRUPTED_INFOROM, GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH = 13, 14, 15, 16, 18
UNINITIALIZED, INVALID_ARGUMENT, TIMEOUT, UNKNOWN_ERROR = 1, 2, 10, 999
NO_ANSWER: Final = -1
"""Our own code: the binding itself could not make sense of the call or of its answer."""
UNTOLD: Final = -2
"""Our own code: the call was not needed, or its answer means nothing here; the gap's words say why."""

IDLE, HW_SLOWDOWN, HW_THERMAL, HW_POWER_BRAKE, SW_POWER_CAP, SW_THERMAL = 0x1, 0x8, 0x40, 0x80, 0x4, 0x20
"""Bits of the clock event reasons."""
_ABSENT: Final = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND, INVALID_ARGUMENT, 6, 22, 25, 26})
"""Codes that mean 'this GPU or driver has no such thing' (not found, vGPU without ECC, other version, deprecated)."""
_NAMES: Final = {
    UNINITIALIZED: "not initialized",
    INVALID_ARGUMENT: "invalid argument",
    NOT_SUPPORTED: "not supported",
    NO_PERMISSION: "no permission",
    6: "not found",
    DRIVER_NOT_LOADED: "driver not loaded",
    TIMEOUT: "timed out",
    11: "interrupt request issue",
    LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 not found",
    FUNCTION_NOT_FOUND: "function not found in this driver",
    CORRUPTED_INFOROM: "corrupted InfoROM",
    GPU_IS_LOST: "GPU is lost",
    RESET_REQUIRED: "GPU requires a reset",
    17: "blocked by the operating system",
    VERSION_MISMATCH: "driver and library versions differ",
    20: "out of memory",
    25: "other structure version",
    26: "deprecated",
    27: "not ready",
    28: "GPU not found",
    UNKNOWN_ERROR: "unknown error",
}


@dataclasses.dataclass(frozen=True)
class Gap:
    """A fact that could not be had: the NVML return code, and the call that gave it."""

    code: int
    call: str
    why: str = ""

    @property
    def absent(self) -> bool:
        return self.code in _ABSENT

    @property
    def words(self) -> str:
        return self.why or f"{self.call}: {_NAMES.get(self.code, f'NVML error {self.code}')}"


Owner = Literal["rank", "system", "other", "gone"]


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that holds memory on a GPU. `gone`: the driver still lists it, the kernel no longer does."""

    pid: int
    memory_bytes: int
    name: str
    owner: Owner


Fact = float | str | tuple[Any, ...] | Gap


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU as one look saw it. A name that is not in `facts` was not looked at this time."""

    device: str
    """PCI address, `dddd:bb:dd`."""
    uuid: str
    facts: Mapping[str, Fact]
    pids: tuple[int, ...] = ()
    """Processes on it, as last seen."""

    def number(self, name: str) -> float | None:
        fact = self.facts.get(name)
        return fact if isinstance(fact, (int, float)) else None

    def value(self, name: str) -> float:
        return self.number(name) or 0.0

    def numbers(self, name: str) -> tuple[Any, ...]:
        fact = self.facts.get(name)
        return fact if isinstance(fact, tuple) else ()

    def gaps(self) -> list[Gap]:
        return [fact for fact in self.facts.values() if isinstance(fact, Gap)]


Limits = Mapping[str, float]


class Bad(NamedTuple):
    level: Level
    text: str


class Skip(NamedTuple):
    status: Status
    why: str


Said = Bad | Skip | None
"""What a judge says; None: healthy."""


_PLAIN: Final = (
    "temperature_c margin_c memory_temperature_c sm_mhz ecc_uncorrected ecc_corrected ecc_aggregate_dram "
    "ecc_aggregate_sram pcie_replays pcie_width pcie_generation "
    "nvlink_crc nvlink_replays nvlink_recoveries nvlink_failures"
).split()


def metrics(gpu: Gpu) -> dict[str, float]:
    """Numbers of one look for metrics and for people; units in the names."""
    values = {name: number for name in _PLAIN if (number := gpu.number(name)) is not None}
    for name, fact in (("power_w", "power_mw"), ("power_limit_w", "power_limit_mw")):
        if (milliwatts := gpu.number(fact)) is not None:
            values[name] = milliwatts / 1000
    for names, fact in (
        (("utilization_percent", "memory_utilization_percent"), "utilization"),
        (("memory_used_bytes", "memory_total_bytes"), "memory"),
        (("remapped_corrected", "remapped_uncorrected", "remap_pending", "remap_failed"), "remapped_rows"),
    ):
        values.update(zip(names, map(float, gpu.numbers(fact)), strict=False))
    if (reasons := gpu.number("clock_reasons")) is not None:
        hardware = HW_SLOWDOWN | HW_THERMAL | HW_POWER_BRAKE
        for name, mask in (("power_cap", SW_POWER_CAP), ("sw_thermal", SW_THERMAL), ("hw", hardware)):
            values[f"slowed_{name}"] = float(bool(int(reasons) & mask))
    if states := gpu.numbers("links"):
        values["nvlinks_active"] = float(sum(state == 1 for state in states))
    return values


WINDOW_VALUES: Final = 256


class Window:
    """The newest values of something over `span_s` seconds, and always the one before: what rates are made of."""

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        self.seen: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, mono: float, value: float) -> None:
        while len(self.seen) > 1 and (self.seen[1][0] <= mono - self.span_s or len(self.seen) >= WINDOW_VALUES):
            self._sum -= self.seen.popleft()[1]
        self.seen.append((mono, value))
        self._sum += value

    def count(self, mono: float, value: float) -> None:
        """Add a counter's value; a counter that fell was reset, and what was before says nothing any more."""
        if self.seen and value < self.seen[-1][1]:
            self.seen.clear()
            self._sum = 0.0
        self.add(mono, value)

    @property
    def age_s(self) -> float:
        return self.seen[-1][0] - self.seen[0][0] if self.seen else 0.0

    @property
    def grown(self) -> float:
        return self.seen[-1][1] - self.seen[0][1] if self.seen else 0.0

    @property
    def per_s(self) -> float | None:
        """Growth by second over the window; None with less than two values."""
        return self.grown / self.age_s if self.age_s > 0 else None

    @property
    def newest_per_s(self) -> float | None:
        if len(self.seen) < 2:
            return None
        (before, low), (after, high) = self.seen[-2], self.seen[-1]
        return (high - low) / (after - before) if after > before else None

    @property
    def mean(self) -> float | None:
        """Mean of the values (for shares of looks: 0 and 1)."""
        return self._sum / len(self.seen) if self.seen else None
