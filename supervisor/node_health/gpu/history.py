"""What is remembered of one GPU between looks: counters as rates, how often it was slowed, what it once had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from supervisor.node_health.gpu.facts import (
    HW_POWER_BRAKE,
    HW_SLOWDOWN,
    HW_THERMAL,
    IDLE,
    SW_THERMAL,
    UNTOLD,
    Fact,
    Gap,
    Window,
)
from supervisor.node_health.protocol import NOT_YET

_COUNTERS: Final = {"ecc_corrected": 300.0, "pcie_replays": 300.0, "nvlink_crc": 60.0, "nvlink_replays": 60.0}
_EVENTS: Final = {"nvlink_recoveries": 600.0, "nvlink_failures": 600.0}
"""Fact -> seconds over which its rate, or its growth, is taken."""
BEST: Final = ("pcie_generation",)
SLOWED_S: Final = 600.0
_NOT_YET: Final = Gap(UNTOLD, "", f"{NOT_YET}: its rate is known from the second look on")


class History:
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
