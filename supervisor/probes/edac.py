"""Errors in the host's memory, as the kernel's EDAC drivers count them for each memory controller and module."""

from __future__ import annotations

from typing import Final

from diagnosis.health import Check, Level, Reading, judged, not_applicable
from diagnosis.signals import Word, clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.probes.counters import Baseline, Rates
from supervisor.probes.probe import Moment, Place

# fmt: off
CHECKS: Final = (
    Check(id="edac_uncorrected", failure_class=FailureClass.CPU_OR_MEMORY_HW, scope="node", clears=False,
        what="uncorrected errors in the host's memory",
        source="/sys/devices/system/edac/mc/*/ue_count",
        # A node that was booted after its repair counts from 0 again, so any count is of this boot.
        threshold="grew since it was first seen in this boot: critical; any before that: warning"),
    Check(id="edac_corrected", failure_class=FailureClass.CPU_OR_MEMORY_HW, scope="node", calm_looks=20,
        what="a storm of corrected errors in the host's memory",
        source="/sys/devices/system/edac/mc/*/ce_count",
        # Single corrected errors are normal. A module that gives hundreds an hour is failing, and thousands in
        # minutes cost the CPUs themselves: each is an interrupt, or firmware that stops all CPUs.
        threshold="{per_hour} in an hour: warning; {storm} in 5 minutes: critical",
        limits={"per_hour": 100, "storm": 3000}),
)
# fmt: on
_EDAC: Final = "sys/devices/system/edac/mc"


class Module(Word, frozen=True, kw_only=True):
    """A memory module (DIMM), by the label of its slot where the board tells it."""

    label: str
    corrected: int
    uncorrected: int


class MemoryController(Word, frozen=True, kw_only=True):
    name: str
    corrected: int
    uncorrected: int


def read_controllers(place: Place) -> list[MemoryController]:
    found = []
    for name in place.names(_EDAC, "mc[0-9]*", 64):
        corrected, uncorrected = (place.number(f"{_EDAC}/{name}/{kind}_count") for kind in ("ce", "ue"))
        if corrected is not None and uncorrected is not None and min(corrected, uncorrected) >= 0:
            found.append(MemoryController(name=name, corrected=corrected, uncorrected=uncorrected))
    return found


def read_modules(place: Place, controller: str) -> list[Module]:
    """Only read when there is something to tell: a node may have 32 of them."""
    found = []
    base = f"{_EDAC}/{controller}"
    for name in place.names(base, "*[0-9]", 64):
        prefix = "" if name.startswith("csrow") else "dimm_"
        if not name.startswith(("dimm", "rank", "csrow")):
            continue
        label = place.text(f"{base}/{name}/{prefix or 'ch0_dimm_'}label", 256) or ""
        counts = [place.number(f"{base}/{name}/{prefix}{kind}_count") for kind in ("ce", "ue")]
        found.append(
            Module(label=clean_text(label.strip(), 60) or name, corrected=counts[0] or 0, uncorrected=counts[1] or 0)
        )
    return found


def _where(modules: list[Module], kind: str) -> str:
    """The modules that have errors, the worst first; empty where the board does not tell."""
    counts = {module.label: int(getattr(module, kind)) for module in modules}
    worst = sorted((label for label, count in counts.items() if count), key=lambda label: -counts[label])
    return f" ({', '.join(worst[:3])})" if worst else ""


def judge_uncorrected(seen: MemoryController, at_first: int, where: str) -> Reading:
    """`at_first`: what its counter said when it was first seen in this boot."""
    new = seen.uncorrected - at_first
    level: Level | None = "critical" if new else "warning" if seen.uncorrected else None
    since = "" if new else " since the node was booted"
    text = f"{new or seen.uncorrected or 'no'} uncorrected memory errors{since}{where}"
    return judged("edac_uncorrected", level, text, seen.name, values={"uncorrected": seen.uncorrected})


def judge_corrected(seen: MemoryController, hour: int, minutes: int, where: str, limits: dict[str, float]) -> Reading:
    """`hour`, `minutes`: errors in the last hour and in the last five minutes."""
    level: Level | None = (
        "critical" if minutes >= limits["storm"] else "warning" if hour >= limits["per_hour"] else None
    )
    text = f"{hour} corrected memory errors within an hour, {minutes} within 5 minutes{where}"
    values = {"corrected": seen.corrected, "corrected_last_hour": hour}
    return judged("edac_corrected", level, text, seen.name, values=values)


class EdacLooks:
    """The looks at memory errors of one station: it remembers the counts of before."""

    def __init__(self) -> None:
        self._at_first = Baseline("edac")
        self._rates = Rates()

    def look(self, place: Place, now: Moment) -> list[Reading]:
        controllers = read_controllers(place)
        if not controllers:
            return [not_applicable(check.id, "no EDAC driver counts memory errors here") for check in CHECKS]
        at_first = self._at_first.of(place, {seen.name: seen.uncorrected for seen in controllers})
        readings = []
        for seen in controllers:
            self._rates.add(seen.name, seen.corrected, now.mono)
            hour, minutes = (self._rates.increase(seen.name, window, now.mono) for window in (3600, 300))
            modules = read_modules(place, seen.name) if seen.uncorrected or hour else []
            readings += [
                judge_uncorrected(seen, at_first[seen.name], _where(modules, "uncorrected")),
                judge_corrected(seen, hour, minutes, _where(modules, "corrected"), place.limits(CHECKS[1])),
            ]
        return readings
