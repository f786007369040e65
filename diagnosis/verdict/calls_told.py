"""What NCCL prints of each collective at the level INFO, compared over the ranks that the end of a log shows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

_CALL: Final = re.compile(
    r"(?P<process>[\w.-]{1,80}:\d{1,9}):\d{1,9} \[(?P<device>\d{1,3})\] NCCL INFO "
    r"(?P<op>[A-Z]\w{2,30}): opCount (?P<number>[0-9a-f]{1,16}) "
    r".{0,120}?\bcount (?P<count>\d{1,18}) .{0,120}?\bcomm (?P<comm>\w{1,40}) \[nranks=(?P<size>\d{1,6})\]"
)
_UNEVEN: Final = frozenset(("Send", "Recv"))
"""Of these, both ends call another one."""


class Disagreement(NamedTuple):
    """Ranks of one communicator that call different collectives as their next one."""

    why: str
    line: int
    """Position among the lines given."""
    text: str


def disagreement(lines: Sequence[str]) -> Disagreement | None:
    """The first call in which the ranks of a communicator differ; None where they agree, or not all of them are seen.

    NCCL's words name a communicator by an address of each process: ranks are of the same one for certain only where
    every process has one communicator of that size, and there are as many processes.
    """
    calls: dict[tuple[int, int], dict[str, tuple[str, int, int]]] = {}
    comms: dict[int, set[tuple[str, str]]] = {}
    for index, line in enumerate(lines):
        found = _CALL.search(line)
        if found is None or found["op"] in _UNEVEN:
            continue
        size, rank = int(found["size"]), f"{found['process']} {found['device']}"
        comms.setdefault(size, set()).add((rank, found["comm"]))
        told = calls.setdefault((size, int(found["number"], 16)), {})
        told.setdefault(rank, (found["op"], int(found["count"]), index))
    for (size, number), told in sorted(calls.items()):
        is_whole = len(comms[size]) == size == len({rank for rank, _ in comms[size]}) and len(told) == size
        if is_whole and len({(op, count) for op, count, _ in told.values()}) > 1:
            kinds = sorted({f"{op} of {count}" for op, count, _ in told.values()})
            last = max(index for _, _, index in told.values())
            why = f"the {size} ranks of a communicator call {' and '.join(kinds[:3])} as operation {number}"
            return Disagreement(why, last, lines[last])
    return None
