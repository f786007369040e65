"""Errors in the host's memory, as the kernel's EDAC drivers count them for each memory controller and module."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from diagnosis.health import Check, Reading, healthy, not_applicable, unhealthy
from diagnosis.signals import Word, clean_text
from diagnosis.taxonomy import FailureClass
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
_T = TypeVar("_T")
_EDAC: Final = "sys/devices/system/edac/mc"
HOUR_S: Final = 3600.0
STORM_S: Final = 300.0
KEPT: Final = 12
"""Looks of a controller that are kept for the next process: enough for `STORM_S`."""


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


def judge_uncorrected(seen: MemoryController, at_first: int, modules: list[Module]) -> Reading:
    """`at_first`: what its counter said when it was first seen in this boot."""
    values = {"uncorrected": seen.uncorrected}
    where = _where(modules, "uncorrected")
    if seen.uncorrected > at_first:
        text = f"{seen.uncorrected - at_first} uncorrected memory errors{where}"
        return unhealthy("edac_uncorrected", text, device=seen.name, values=values)
    if seen.uncorrected:
        text = f"{seen.uncorrected} uncorrected memory errors since the node was booted{where}"
        return unhealthy("edac_uncorrected", text, device=seen.name, level="warning", values=values)
    return healthy("edac_uncorrected", seen.name, "none since the node was booted", values=values)


def judge_corrected(
    seen: MemoryController, history: list[tuple[float, int]], modules: list[Module], limits: dict[str, float]
) -> Reading:
    """`history`: (monotonic seconds, count) of the last hour, oldest first, this look included."""
    last = history[-1][0]
    hour = seen.corrected - history[0][1]
    minutes = seen.corrected - next(count for at, count in history if at >= last - STORM_S)
    values = {"corrected": seen.corrected, "corrected_last_hour": hour}
    text = f"{hour} corrected memory errors within an hour, {minutes} within 5 minutes{_where(modules, 'corrected')}"
    if minutes >= limits["storm"]:
        return unhealthy("edac_corrected", text, device=seen.name, values=values)
    if hour >= limits["per_hour"]:
        return unhealthy("edac_corrected", text, device=seen.name, level="warning", values=values)
    return healthy("edac_corrected", seen.name, f"{hour} within an hour, {seen.corrected} since boot", values=values)


def _kept(place: Place, name: str, kind: type[_T]) -> _T:
    """What was kept in this boot, as a `kind` of dict; empty where nothing (that fits) was."""
    try:
        return msgspec.convert(place.load(name) or {}, kind)
    except msgspec.ValidationError:
        return kind()


class EdacLooks:
    """The looks at memory errors of one station: it remembers the counts of before."""

    def __init__(self) -> None:
        self._at_first: dict[str, int] | None = None
        """Uncorrected errors of each controller when it was first seen in this boot."""
        self._corrected: dict[str, list[tuple[float, int]]] | None = None
        """Corrected errors of each controller over the last hour."""
        self._counts: dict[str, int] = {}

    def look(self, place: Place, now: Moment) -> list[Reading]:
        controllers = read_controllers(place)
        if not controllers:
            why = "no EDAC driver counts memory errors here"
            return [not_applicable("edac_uncorrected", why), not_applicable("edac_corrected", why)]
        at_first = self._baseline(place, controllers)
        limits = place.limits(CHECKS[1])
        readings = []
        if self._corrected is None:
            # What another process saw in this boot: checks that are run now and then see a storm, too.
            self._corrected = _kept(place, "edac_corrected", dict[str, list[tuple[float, int]]])
        before = self._corrected
        for seen in controllers:
            history = [one for one in before.get(seen.name, []) if now.mono - HOUR_S <= one[0] < now.mono]
            if history and seen.corrected < history[-1][1]:
                history = []  # someone reset the counters
            history.append((now.mono, seen.corrected))
            before[seen.name] = history
            grew = seen.corrected > history[0][1]
            modules = read_modules(place, seen.name) if seen.uncorrected or grew else []
            readings.append(judge_uncorrected(seen, at_first[seen.name], modules))
            readings.append(judge_corrected(seen, history, modules, limits))
        counts = {seen.name: seen.corrected for seen in controllers}
        if counts != self._counts:
            self._counts = counts
            place.keep("edac_corrected", {name: [*past[:1], *past[1:][-KEPT:]] for name, past in before.items()})
        return readings

    def _baseline(self, place: Place, controllers: list[MemoryController]) -> dict[str, int]:
        known = self._at_first
        if known is None:
            known = _kept(place, "edac", dict[str, int])
        first = {seen.name: min(known.get(seen.name, seen.uncorrected), seen.uncorrected) for seen in controllers}
        if first != self._at_first:
            place.keep("edac", first)
        self._at_first = first
        return first
