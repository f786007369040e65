"""What one look learned of one GPU: a frozen snapshot of facts by name, and gaps where a fact could not be had."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

from diagnosis.health import Level, Status
from supervisor.node_health.protocol import NOT_YET

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


Judgement = Bad | Skip | None
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


_COUNTERS: Final = {"ecc_corrected": 300.0, "pcie_replays": 300.0, "nvlink_crc": 60.0, "nvlink_replays": 60.0}
_EVENTS: Final = {"nvlink_recoveries": 600.0, "nvlink_failures": 600.0}
"""Fact -> seconds over which its rate, or its growth, is taken."""
BEST: Final = ("pcie_generation",)
SLOWED_S: Final = 600.0
_NOT_YET: Final = Gap(UNTOLD, "", f"{NOT_YET}: its rate is known from the second look on")


class GpuHistory:
    """Of one GPU. Bounded; `kept` and `restore` carry what must outlive this process, within one boot of the node."""

    def __init__(self) -> None:
        self.windows = {name: Window(span) for name, span in {**_COUNTERS, **_EVENTS}.items()}
        self.slowed = {"hw_slowdown": Window(SLOWED_S), "sw_thermal": Window(SLOWED_S)}
        self.links: set[int] = set()
        self.fabric = False
        self.best: dict[str, float] = {}
        """Highest PCIe generation that it had."""
        self.errors_before: float | None = None
        self.active_links: int | None = None

    def derive(self, facts: dict[str, Fact], mono: float) -> dict[str, Fact]:
        """Facts that only several looks can tell, from those of this look."""
        self._count(facts, mono)
        found: dict[str, Fact] = {}
        found.update(self._ecc(facts))
        found.update(self._clocks(facts, mono))
        found.update(self._rates(facts))
        found.update(self._once_had(facts))
        return found

    def _count(self, facts: dict[str, Fact], mono: float) -> None:
        for name, window in self.windows.items():
            value = facts.get(name)
            if isinstance(value, (int, float)):
                window.count(mono, value)

    def _ecc(self, facts: dict[str, Fact]) -> dict[str, Fact]:
        found: dict[str, Fact] = {}
        errors = facts.get("ecc_uncorrected")
        if isinstance(errors, (int, float)):
            # A smaller count is a GPU that was reset: what it counts from now on is new.
            self.errors_before = errors if self.errors_before is None else min(errors, self.errors_before)
            found["ecc_uncorrected_before"] = self.errors_before
        corrected, window = facts.get("ecc_corrected"), self.windows["ecc_corrected"]
        if isinstance(corrected, Gap):
            found["ecc_corrected_rate"] = corrected
        elif corrected is not None:
            newest = window.newest_per_s
            known = newest is not None and window.per_s is not None
            found["ecc_corrected_rate"] = (window.per_s, newest, window.age_s) if known else _NOT_YET
        return found

    def _clocks(self, facts: dict[str, Fact], mono: float) -> dict[str, Fact]:
        reasons = facts.get("clock_reasons")
        if reasons is None:
            return {}
        if not isinstance(reasons, (int, float)):
            return dict.fromkeys(self.slowed, reasons)
        # What slows an idle GPU down harms nobody; a brake that stays will be seen when it works.
        bits = 0 if int(reasons) & IDLE else int(reasons)
        found: dict[str, Fact] = {}
        for name, mask in (("hw_slowdown", HW_SLOWDOWN | HW_THERMAL | HW_POWER_BRAKE), ("sw_thermal", SW_THERMAL)):
            window = self.slowed[name]
            window.add(mono, float(bool(bits & mask)))
            found[name] = (window.mean or 0.0, window.age_s)
        return found

    def _rates(self, facts: dict[str, Fact]) -> dict[str, Fact]:
        found: dict[str, Fact] = {}
        replays = facts.get("pcie_replays")
        if replays is not None:
            window = self.windows["pcie_replays"]
            found["pcie_replays_per_min"] = replays if isinstance(replays, Gap) else _NOT_YET
            if window.age_s > 0 and not isinstance(replays, Gap):
                # One burst (a link that retrained) between the first two looks is no rate.
                found["pcie_replays_per_min"] = window.grown / max(window.age_s, window.span_s) * 60
        counted = [facts[name] for name in ("nvlink_crc", "nvlink_replays", *_EVENTS) if name in facts]
        if counted and all(isinstance(each, Gap) for each in counted):
            found["nvlink_rates"] = counted[0]
        elif counted:
            windows = [self.windows[name] for name in ("nvlink_crc", "nvlink_replays", *_EVENTS)]
            known = any(window.per_s is not None for window in windows)
            rates = (windows[0].per_s or 0.0, windows[1].per_s or 0.0, windows[2].grown, windows[3].grown)
            found["nvlink_rates"] = rates if known else _NOT_YET
        return found

    def _once_had(self, facts: dict[str, Fact]) -> dict[str, Fact]:
        found: dict[str, Fact] = {}
        links = facts.get("links")
        if isinstance(links, tuple):
            found["links_before"] = tuple(sorted(self.links))
            active = {link for link, state in enumerate(links) if state == 1}
            self.links |= active
            self.active_links = len(active)
        for name in BEST:
            fact = facts.get(name)
            if isinstance(fact, (int, float)):
                self.best[name] = max(fact, self.best.get(name, 0))
        fabric = facts.get("fabric")
        if isinstance(fabric, tuple):
            found["fabric_before"] = float(self.fabric)
            self.fabric = self.fabric or fabric[0] == 3
        return found

    def kept(self) -> dict[str, Any]:
        # NVLink errors count from the start of this process.
        totals = (name for name in self.windows if not name.startswith("nvlink"))
        newest = {name: self.windows[name].seen[-1] for name in totals if self.windows[name].seen}
        return {
            "links": sorted(self.links),
            "fabric": self.fabric,
            "best": dict(self.best),
            "ecc_uncorrected": self.errors_before,
            "counters": newest,
        }

    def restore(self, kept: Any, mono: float) -> None:
        """Take over what an earlier process of this boot kept; anything that does not fit is left out."""
        if not isinstance(kept, dict):
            return
        try:
            self.links = {int(link) for link in kept["links"]}
            self.fabric = bool(kept["fabric"])
            self.errors_before = None if kept["ecc_uncorrected"] is None else float(kept["ecc_uncorrected"])
            self.best = {name: float(kept["best"][name]) for name in BEST if name in kept["best"]}
            for name, (at, value) in kept["counters"].items():
                if name in self.windows and float(at) < mono:
                    self.windows[name].add(float(at), float(value))
        except (KeyError, TypeError, ValueError, AttributeError):
            return


def usual(counts: Iterable[float | None]) -> float | None:
    """What most have, where at least three have it and they are more than half: cards are bridged in pairs, and two of
    three that are say nothing about the third."""
    known = [count for count in counts if count is not None]
    if not known:
        return None
    count, times = Counter(known).most_common(1)[0]
    return count if times >= 3 and times * 2 > len(known) else None
