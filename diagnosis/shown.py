"""What a language model is shown of an incident: some hundred lines, cleaned, bounded and without secrets.

Facts that we measured come first, then what the rules found telling, then the words of those who failed. What many
ranks say alike is told twice and then left out: it is the first and the odd that tell.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from diagnosis.incident import Culprit, Incident, Verdict
from diagnosis.redact import hide_keys
from diagnosis.signals import Evidence, ExitRecord, Finding, Frozen, RankOutput, clean_line
from diagnosis.stacks import doing

LINE_CHARS: Final = 300
MAX_CHARS: Final = 2000
MAX_LINES: Final = 300
MAX_CULPRITS: Final = 48
OUTPUTS: Final = 16
FIRST_OUTPUTS, FIRST_FINDINGS = 3, 10
"""What is shown before anything else of its kind: a model may have room for no more."""
ENDS: Final = 12
TAIL_LINES: Final = 20
TRACEBACK_LINES: Final = 24
SAME: Final = 2
"""So often lines are shown that differ in their numbers only."""
STACKS: Final = 6
FINDINGS: Final = 30
_LABEL: Final = re.compile(r"[\w.:/@ -]{1,80}", re.ASCII)
_DIGITS: Final = re.compile(r"\d+")


class ShownLine(Frozen, frozen=True, kw_only=True):
    """One line of the evidence."""

    text: str
    where: str = ""
    """Who said it; empty for what we measured ourselves."""
    said: bool = False
    """A rank wrote it: anything may be in it."""

    @property
    def whole(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


class Shown(Frozen, frozen=True, kw_only=True):
    """The evidence, and who in it may be named as the culprit: label -> who."""

    lines: tuple[ShownLine, ...]
    culprits: dict[str, Culprit]


def of_incident(incident: Incident, verdict: Verdict | None = None) -> Shown:
    """The evidence of `incident`. What the verdict concludes is not shown: a second reader should read for itself."""
    suspects = {one.rank for one in verdict.culprits if one.rank is not None} if verdict is not None else set()
    findings, outputs = list(_findings(incident)), _outputs(incident, suspects)
    found = [
        *_facts(incident),
        *(_quoted(one) for one in (verdict.evidence if verdict is not None else ())),
        *findings[:FIRST_FINDINGS],
        *itertools.chain(*outputs[:FIRST_OUTPUTS]),
        *_stacks(incident),
        *_flights(incident),
        *findings[FIRST_FINDINGS:],
        *itertools.chain(*outputs[FIRST_OUTPUTS:]),
    ]
    return Shown(lines=tuple(_bounded(_redacted(found))), culprits=_culprits(incident, verdict))


def _bounded(lines: Iterable[ShownLine]) -> Iterator[ShownLine]:
    shapes: Counter[str] = Counter()
    count = 0
    for line in lines:
        shape = _DIGITS.sub("0", line.text)
        shapes[shape] += 1
        if line.text.strip() and shapes[shape] <= SAME and count < MAX_LINES:
            count += 1
            yield line


def _redacted(lines: Iterable[ShownLine]) -> Iterator[ShownLine]:
    """Cleaned first (an escape in a secret hides it), then redacted, what one rank said as one: a secret may run on."""
    for where, group in itertools.groupby(lines, key=lambda line: line.where):
        together = list(group)
        texts = hide_keys([clean_line(line.text, MAX_CHARS) for line in together])
        for line, text in zip(together, texts, strict=True):
            yield ShownLine(text=clean_line(text, LINE_CHARS), where=clean_line(where, 80), said=line.said)


# ----- what we measured -----


def _facts(incident: Incident) -> Iterator[ShownLine]:
    step = "" if incident.step is None else f", newest step {incident.step}"
    # The size is not known any more once the next attempt is formed.
    size = f" of {incident.world_size} ranks" if incident.world_size else ""
    yield ShownLine(text=f"attempt {incident.attempt}{size}, seen by: {incident.trigger}{step}")
    if incident.hang is not None:
        yield ShownLine(text=f"hang ({incident.hang.kind}): {incident.hang.why}")
    for node in incident.lost_nodes[:16]:
        yield ShownLine(text=f"node {node} was lost")
    for node, how in list(incident.launcher_exits.items())[:16]:
        yield ShownLine(text=f"the launcher of {node} ended: {how}")
    ended = _own_ends(incident)
    for node, record in ended[:ENDS]:
        how = f"was killed by signal {record.signal}" if record.signal is not None else f"ended with code {record.code}"
        late = record.ended_at - ended[0][1].ended_at
        yield ShownLine(
            text=f"rank {record.rank} on {node} {how}" + (f", {late:.1f} s after the first" if late else "")
        )


def _own_ends(incident: Incident) -> list[tuple[str, ExitRecord]]:
    """What ended by itself, the first first; not what we ended."""
    found: dict[int, tuple[str, ExitRecord]] = {}
    for piece in incident.evidence:
        for record in piece.exits:
            if not record.stopped_by_us:
                found.setdefault(record.rank, (piece.node, record))
    return sorted(found.values(), key=lambda one: (one[1].ended_at, one[1].order))


# ----- what was said -----


def _quoted(evidence: Evidence) -> ShownLine:
    who = [evidence.node, f"rank {evidence.rank}" if evidence.rank is not None else "", evidence.source]
    return ShownLine(text=evidence.text, where=" ".join(filter(None, who)), said=evidence.rank is not None)


def _findings(incident: Incident) -> Iterator[ShownLine]:
    for one in _distinct(incident)[:FINDINGS]:
        rank = one.evidence.rank if one.evidence.rank is not None else one.rank
        yield _quoted(msgspec.structs.replace(one.evidence, node=one.evidence.node or one.node, rank=rank))


def _distinct(incident: Incident) -> list[Finding]:
    """What the rules found, the gravest first, each once."""
    every = [*incident.findings, *(finding for piece in incident.evidence for finding in piece.findings)]
    every.sort(key=lambda one: (one.severity != "fatal", -one.confidence))
    return list({(one.evidence.text, one.node, one.rank): one for one in reversed(every)}.values())[::-1]


def _outputs(incident: Incident, suspects: set[int]) -> list[list[ShownLine]]:
    """The words of each rank, the suspects first, then who ended first."""
    order = {record.rank: (record.ended_at, record.order) for _, record in _own_ends(incident)}
    every = {(piece.node, one.rank): one for piece in incident.evidence for one in piece.outputs}
    chosen = sorted(
        every.items(),
        key=lambda item: (item[0][1] not in suspects, order.get(item[0][1], (float("inf"), 0)), item[0][1]),
    )
    return [
        [ShownLine(text=text, where=f"{node} rank {rank}", said=True) for text in _words(output)]
        for (node, rank), output in chosen[:OUTPUTS]
    ]


def _words(output: RankOutput) -> list[str]:
    """In the order in which they were written, so that a secret over several lines stays in one piece."""
    known = {line.strip() for line in output.tail}
    traceback = [line for line in output.traceback if line.strip() not in known]
    error = [line for line in output.error_file.splitlines() if line.strip() not in known][:TAIL_LINES]
    return [*error, *traceback[-TRACEBACK_LINES:], *output.tail[-TAIL_LINES:]]


def _stacks(incident: Incident) -> Iterator[ShownLine]:
    stacks = [stack for piece in incident.evidence for stack in piece.stacks if stack.frames and not stack.sample]
    groups = sorted(doing.group(stacks), key=lambda one: len(one.ranks))
    for one in groups[:STACKS]:
        ranks = ", ".join(map(str, one.ranks[:8])) + (", ..." if len(one.ranks) > 8 else "")
        places = (f"{frame.function} ({frame.file.rsplit('/', 1)[-1]}:{frame.line})" for frame in one.frames[:5])
        yield ShownLine(text=f"stack of rank {ranks} ({one.activity}): {' < '.join(places)}")


def _flights(incident: Incident) -> Iterator[ShownLine]:
    for piece in incident.evidence:
        for flight in piece.flights[:OUTPUTS]:
            waiting = next((entry for entry in flight.entries if not entry.completed), None)
            if waiting is not None:
                what = f"{waiting.op} number {waiting.seq} of group {waiting.group} {waiting.sizes}"
                yield ShownLine(text=f"rank {flight.rank} has not completed {what}".rstrip())


# ----- who may be named -----


def _culprits(incident: Incident, verdict: Verdict | None) -> dict[str, Culprit]:
    """Whoever the evidence is about, the likely first, under names that cannot be taken for anything else."""
    found: dict[str, Culprit] = {}
    for one in _named(incident, verdict):
        label = _label(one)
        if _LABEL.fullmatch(label) and len(found) < MAX_CULPRITS:
            found.setdefault(label, one)
    return found


def _label(one: Culprit) -> str:
    if one.gpu:
        return f"gpu {one.gpu} of {one.node}"
    return f"rank {one.rank}" if one.rank is not None else f"node {one.node}"


def _named(incident: Incident, verdict: Verdict | None) -> Iterator[Culprit]:
    def of_rank(rank: int, node: str = "") -> Culprit:
        return Culprit(rank=rank, node=incident.rank_nodes.get(rank, node))

    if verdict is not None:
        yield from verdict.culprits
    for name in incident.lost_nodes:
        yield Culprit(node=name)
    for rank in incident.hang.ranks if incident.hang is not None else ():
        yield of_rank(rank)
    for finding in _distinct(incident)[:FIRST_FINDINGS]:
        if finding.node:
            yield Culprit(node=finding.node, gpu=finding.gpu)
    for node, record in _own_ends(incident):
        yield of_rank(record.rank, node)
    for piece in incident.evidence:
        yield Culprit(node=piece.node)
