"""Ranks that call different collectives at one place, as lines of their output tell: watchdogs and NCCL."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from diagnosis.incident import Candidate, Culprit, LogEvidence
from diagnosis.signals import Evidence, rank_names
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict.weights import current

# ----- time-outs of watchdogs -----

_TIMED_OUT: Final = re.compile(
    r"(?:PG (?:ID \d{1,6} PG )?GUID (?P<guid>[\w()]{1,80}) )?Rank (?P<rank>\d{1,7})\].{0,120}?"
    r"WorkNCCL\(SeqNum=(?P<seq>\d{1,18}), OpType=(?P<op>\w{2,40})(?:, NumelIn=(?P<count>\d{1,18}))?"
)
_ANY_SIZE: Final = frozenset(("SEND", "RECV", "COALESCED", "ALLTOALL", "ALLTOALL_BASE", "GATHER", "SCATTER", "BARRIER"))
"""Calls whose sizes differ between ranks by nature, or that say nothing of them."""


def of_watchdogs(evidence: LogEvidence) -> list[Candidate]:
    """Ranks that timed out in one call of one group, and called something else there, or with another size."""
    calls: dict[tuple[str, int], dict[int, tuple[str, int | None, Evidence]]] = {}
    for log in evidence.logs:
        for match in log.matches:
            found = _TIMED_OUT.search(match.text)
            if found is None or found["op"] in ("SEND", "RECV"):
                continue
            rank, count = int(found["rank"]), int(found["count"]) if found["count"] else None
            line = Evidence(text=match.text, source=log.source, line=match.line, node=log.node, rank=rank, at=match.at)
            calls.setdefault((found["guid"] or "", int(found["seq"])), {}).setdefault(rank, (found["op"], count, line))
    for (_, seq), told in sorted(calls.items()):
        ops = Counter(op if op in _ANY_SIZE else f"{op} of {count}" for op, count, _ in told.values())
        if len(ops) > 1:
            return [_of_differing(seq, told, ops)]
    return []


def _of_differing(seq: int, told: Mapping[int, tuple[str, int | None, Evidence]], ops: Counter[str]) -> Candidate:
    called = {rank: op if op in _ANY_SIZE else f"{op} of {count}" for rank, (op, count, _) in told.items()}
    usual, many = ops.most_common(1)[0]
    odd = {rank for rank, call in called.items() if call != usual} if 2 * many > len(called) else set()
    groups = {call: {rank for rank, one in called.items() if one == call} for call in ops}
    why = " and ".join(f"{rank_names(ranks)} called {call}" for call, ranks in list(groups.items())[:3])
    lines = sorted((line for _, _, line in told.values()), key=lambda one: one.rank not in odd)
    return Candidate(
        failure_class=FailureClass.COLLECTIVE_MISMATCH,
        confidence=current().confidence["calls_of_watchdogs_differ"],
        why=f"as collective {seq}, {why}",
        culprits=tuple(Culprit(node=told[rank][2].node, rank=rank) for rank in sorted(odd)),
        evidence=tuple(lines[:4]),
    )


# ----- collectives as NCCL prints them at the level INFO -----

_CALL: Final = re.compile(
    r"(?P<process>[\w.-]{1,80}:\d{1,9}):\d{1,9} \[(?P<device>\d{1,3})\] NCCL INFO "
    r"(?P<op>[A-Z]\w{2,30}): opCount (?P<number>[0-9a-f]{1,16}) "
    r".{0,120}?\bcount (?P<count>\d{1,18}) .{0,120}?\bcomm (?P<comm>\w{1,40}) \[nranks=(?P<size>\d{1,6})\]"
)
_UNEVEN: Final = frozenset(("Send", "Recv"))
"""Calls that differ at both ends by nature."""


class Disagreement(NamedTuple):
    """The ranks of one communicator call different collectives at the same place."""

    why: str
    line: int
    """Position among the lines given."""
    text: str


def disagreement(lines: Sequence[str]) -> Disagreement | None:
    """The first call in which the ranks of a communicator differ; None if they agree, or if some are not seen.

    NCCL names a communicator by an address in each process. So ranks are certain to share one only if every process
    has one communicator of that size, and there are as many processes as ranks in it.
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


def of_lines(evidence: LogEvidence) -> list[Candidate]:
    """Ranks that call different collectives, at the ends of logs in which nothing else shows a failure."""
    tails = [(log, index, line) for log in evidence.logs for index, line in enumerate(log.tail)]
    found = disagreement([line for _, _, line in tails])
    if found is None or any(log.finished_line is not None for log in evidence.logs):
        return []
    log, index, _ = tails[found.line]
    number = log.lines - len(log.tail) + 1 + index
    line = Evidence(text=found.text[:300], source=log.source, line=number, node=log.node, rank=log.rank)
    sure = current().confidence["calls_differ"]
    return [Candidate(failure_class=FailureClass.COLLECTIVE_MISMATCH, confidence=sure, why=found.why, evidence=(line,))]
