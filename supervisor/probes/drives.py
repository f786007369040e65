"""Software RAID arrays without all of their drives."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Final

from diagnosis.health import Check, Reading, not_applicable, unhealthy
from diagnosis.signals import clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.probes.pcie import tally
from supervisor.probes.probe import Place

# fmt: off
CHECK: Final = Check(id="raid", failure_class=FailureClass.STORAGE_ERROR, scope="node", when="periodic",
    what="a software RAID array without all of its drives",
    source="/proc/mdstat",
    threshold="a drive is missing: warning; broken, or inactive after it was active: critical")
# fmt: on
_ARRAY: Final = re.compile(r"(md\S{0,60}) : (\w+)((?: \([\w-]+\))*)(?: (\w+))?")
_MEMBERS: Final = re.compile(r"\[(\d+)/(\d+)\] \[([U_]+)\]")


@dataclasses.dataclass(frozen=True)
class Array:
    name: str
    state: str
    """`active`, `inactive` or `broken`."""
    drives: str = ""
    """`U_`: the second is missing; empty where the level has no spare drives."""
    note: str = ""
    """`recovery = 12.6%`."""


def parse_mdstat(text: str) -> list[Array]:
    arrays: list[Array] = []
    for line in text.splitlines():
        if begin := _ARRAY.match(line):
            arrays.append(Array(begin[1], begin[2]))
        elif arrays and line.startswith(" "):
            if members := _MEMBERS.search(line):
                arrays[-1] = dataclasses.replace(arrays[-1], drives=members[3])
            elif action := re.search(r"(recovery|resync|reshape|check) *= *[\d.]+%", line):
                arrays[-1] = dataclasses.replace(arrays[-1], note=" ".join(action[0].split()))
    return arrays


def judge_arrays(arrays: list[Array], active: Iterable[str]) -> dict[str, Reading]:
    """`active`: arrays that were active in this boot. One that never was is left alone: containers are like that."""
    before, bad = frozenset(active), {}
    for array in arrays:
        if array.state == "broken" or (array.state == "inactive" and array.name in before):
            bad[array.name] = unhealthy("raid", f"RAID array {array.name} is {array.state}", array.name)
        elif "_" in array.drives:
            missing = f"{array.drives.count('_')} of {len(array.drives)} drives are missing"
            text = clean_text(f"RAID array {array.name}: {missing}{', ' * bool(array.note)}{array.note}")
            bad[array.name] = unhealthy("raid", text, array.name, "warning")
    return bad


def look(place: Place, active: set[str], spoken: set[str]) -> list[Reading]:
    """`active`: arrays that were active in this boot, and `spoken` (see `tally`) are changed."""
    arrays = parse_mdstat(place.text("proc/mdstat") or "")
    if not arrays:
        return [not_applicable(CHECK.id, "no software RAID here")]
    bad = judge_arrays(arrays, active)
    active |= {array.name for array in arrays if array.state == "active"}
    return tally(CHECK, bad, len(arrays), "RAID arrays are as they were", spoken)
