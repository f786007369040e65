"""What is known of the nodes of a cluster, over all jobs that ran on it: records, and what follows from them.

Pure. Many writers add records to one shared folder (`recovery.ledger_folder`); nobody changes one. `merge` makes the
state of every node of them: the same records in any order, or twice, give the same state. A cordon is lifted by name,
so that no clock decides whether it is in force: one that the lifting hand had not read stays.

A score says which nodes fail again and again. It is told, and never acted on.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Final, Literal, NamedTuple

import msgspec

from diagnosis.signals import Frozen, clean_line
from recovery.cordon import breaker_limit

VERSION: Final = 1
DAY_S: Final = 86400.0
WINDOW_S: Final = 28 * DAY_S
"""What is older does not count for the score."""
PROBATION_S: Final = 7 * DAY_S
"""After a repair. A quarter of repaired nodes fail again within it."""
RETEST_S: Final = DAY_S
"""After a repair the node is to be tested again once so much time has gone by."""
KEEP_S: Final = 180 * DAY_S
"""Records that are older, and no longer in force, are left out when files are put together."""
PROPOSAL_S: Final = WINDOW_S
"""A proposal that nobody decided on is forgotten."""
AHEAD_S: Final = DAY_S
"""A time that lies further ahead is none."""
OUTAGE_S: Final = 6 * 3600.0
"""Failures of a node so close together are one outage."""
HOUR_S: Final = 3600.0
EVENTS_KEPT: Final = 200
"""Of a node; of more the newest."""
RESULTS_KEPT: Final = 5
"""Of one test of one device that did not fail, once files are put together."""
LINE_BYTES: Final = 64 << 10
NODES_IN_RECORD: Final = 256
NAME_LIMIT: Final = 128
TEXT_LIMIT: Final = 300
EVIDENCE_LINES: Final = 5
FLEET_LIMIT: Final = 1_000_000
UNTIL_LIMIT: Final = 250e9
"""An end that lies further ahead (in the year 9892) is none: calendars end soon after."""
CLASSES_KEPT: Final = 16
"""Of one outage."""

TestVerdict = Literal["pass", "fail", "unknown"]
"""`unknown`: the test could not say, as where too few nodes were there to compare with."""
CordonScope = Literal["job", "proposal", "cluster"]
"""`job`: the job that wrote it does not use the node. `proposal`: nobody should, and somebody is to decide. `cluster`:
no job uses it."""

# ----- the records -----


class TestResult(Frozen, frozen=True, kw_only=True, tag_field="record", tag="test"):
    """What one active test said of a node, or of one of its GPUs."""

    __test__: ClassVar[bool] = False
    """To pytest: this is no test of ours."""

    node: str
    gpu: str = ""
    """The GPU's UUID; empty: the test is about the node as a whole."""
    test: str
    """Its name: `matmul_bf16_4096`."""
    value: float | None = None
    unit: str = ""
    digest: str = ""
    """What a test gives that compares bits, and not a size."""
    verdict: TestVerdict
    reason: str = ""
    """Why, in words: against which nodes, and by how much."""
    peers: tuple[str, ...] = ()
    """The other nodes that took part."""
    at: float
    """When it ended, Unix time."""
    kind: str = ""
    """Device, torch and CUDA: only results of one kind are compared."""
    seconds: float = 0.0
    """How long it took."""


class NodeCordoned(Frozen, frozen=True, kw_only=True, tag_field="record", tag="cordoned"):
    node: str
    gpu: str = ""
    scope: CordonScope
    failure_class: str = ""
    """Empty: a person said so."""
    incident: str = ""
    reason: str = ""
    evidence: tuple[str, ...] = ()
    until: float | None = None
    """Unix time; None: until it is lifted."""
    fleet: int = 0
    """How many nodes the writer knew of: the circuit breaker's bound follows from it."""


class CordonLifted(Frozen, frozen=True, kw_only=True, tag_field="record", tag="lifted"):
    node: str
    lifts: tuple[str, ...] = ()
    """The entries that are not in force any more."""
    repair: str = ""
    """What was done to the node; with that, it is on probation. Empty: the cordon was taken back."""


class NodeFailed(Frozen, frozen=True, kw_only=True, tag_field="record", tag="failed"):
    """An incident whose proven culprit is the node."""

    node: str
    gpu: str = ""
    failure_class: str
    incident: str = ""
    reason: str = ""


class NodesSeen(Frozen, frozen=True, kw_only=True, tag_field="record", tag="seen"):
    """A job ran on these nodes: so they exist."""

    nodes: tuple[str, ...]


LedgerRecord = NodeCordoned | CordonLifted | NodeFailed | TestResult | NodesSeen


class LedgerEntry(Frozen, frozen=True, kw_only=True):
    """One line of a file."""

    v: Annotated[int, msgspec.Meta(ge=1)]
    """The format's version."""
    id: str
    """What is said twice (after a crash) has the same one."""
    at: float
    by: str = ""
    """`policy`, or who it was."""
    job: str = ""
    writer: str = ""
    """Whose file it was written to."""
    what: LedgerRecord


class _Envelope(msgspec.Struct):
    """As much of a line as every version has."""

    v: int
    at: float


class LedgerLine(NamedTuple):
    """One line of a file, as far as it can be read."""

    raw: bytes
    entry: LedgerEntry | None
    newer: bool = False
    """It is whole, and a newer version wrote it: kept, and not understood."""
    problem: str = ""


_ENTRY = msgspec.json.Decoder(LedgerEntry)
_ENVELOPE = msgspec.json.Decoder(_Envelope)
_ENCODER = msgspec.json.Encoder()


def encode_entry(entry: LedgerEntry) -> bytes:
    """Its line, without the end of the line."""
    return _ENCODER.encode(entry)


def read_line(raw: bytes, now: float) -> LedgerLine:
    """What a line says, cleaned; or what is wrong with it."""
    if len(raw) > LINE_BYTES:
        return LedgerLine(b"", None, problem=f"is longer than {LINE_BYTES} bytes")
    try:
        envelope = _ENVELOPE.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return LedgerLine(b"", None, problem="is damaged")
    if not -AHEAD_S < envelope.at <= now + AHEAD_S:
        return LedgerLine(raw, None, problem="has a time that cannot be")
    try:
        return LedgerLine(raw, _cleaned(_ENTRY.decode(raw)))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError):
        if envelope.v > VERSION:
            return LedgerLine(raw, None, newer=True, problem=f"is of version {envelope.v}")
        return LedgerLine(b"", None, problem="is damaged")


def _cleaned(entry: LedgerEntry) -> LedgerEntry:
    """The same with text that may be shown. Raises ValueError where what is left names nothing."""
    fields = {name: _clean(name, getattr(entry, name)) for name in ("id", "by", "job", "writer")}
    what = entry.what
    cleaned = {name: _clean(name, getattr(what, name)) for name in what.__struct_fields__}
    if not fields["id"] or ("node" in cleaned and not cleaned["node"]):
        raise ValueError("it names no node")
    if isinstance(what, NodeCordoned):
        cleaned["fleet"] = min(max(0, what.fleet), FLEET_LIMIT)
        cleaned["until"] = what.until if what.until is None or what.until < UNTIL_LIMIT else None
    elif isinstance(what, NodesSeen):
        cleaned["nodes"] = tuple(one for node in what.nodes[: _MOST["nodes"]] if (one := _clean("node", node)))
    return msgspec.structs.replace(entry, what=msgspec.structs.replace(what, **cleaned), **fields)


_NAMES: Final = frozenset({"node", "nodes", "gpu", "id", "lifts", "peers", "writer", "incident", "failure_class"})
_MOST: Final = {"evidence": EVIDENCE_LINES, "lifts": 64, "peers": NODES_IN_RECORD, "nodes": NODES_IN_RECORD}


_PLAIN: Final = re.compile(r"[A-Za-z0-9._:/+@-]{0,128}")
"""Nothing in it is to be cleaned, and there are many."""


def _clean(field: str, value: object) -> object:
    limit = NAME_LIMIT if field in _NAMES else TEXT_LIMIT
    if isinstance(value, tuple):
        return tuple(_clean(field, one) for one in value[: _MOST[field]])
    if not isinstance(value, str) or (field in _NAMES and _PLAIN.fullmatch(value)):
        return value
    return clean_line(value, limit).strip()


# ----- the state -----


class Outage(NamedTuple):
    """Failures and failed tests of a node that are close together."""

    at: float
    classes: tuple[str, ...]
    again_s: float | None
    """So long after a repair, on probation; None: it was not."""


class NodeScore(Frozen, frozen=True, kw_only=True):
    """After the signals of Meta's lemon nodes, over 28 days."""

    points: float = 0.0
    outages: int = 0
    lemon: bool = False
    why: tuple[str, ...] = ()
    """Each with its points, in words."""


class NodeRecord(Frozen, frozen=True, kw_only=True):
    """All that the ledger says of one node, at one moment."""

    node: str
    cordons: tuple[LedgerEntry, ...] = ()
    """In force for the cluster, oldest first."""
    proposals: tuple[LedgerEntry, ...] = ()
    """That nobody has decided on."""
    probation_until: float | None = None
    retest_due: bool = False
    """On probation, a day after the repair, and not tested since."""
    score: NodeScore = NodeScore()
    events: tuple[LedgerEntry, ...] = ()
    """Oldest first, the newest 200."""

    @property
    def state(self) -> Literal["CORDONED", "PROBATION", "IN USE"]:
        return "CORDONED" if self.cordons else "PROBATION" if self.probation_until is not None else "IN USE"


def in_order(entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """Each once, by time and writer. What two writers say in the same words counts once."""
    unique: dict[bytes, LedgerEntry] = {}
    for entry in entries:
        key = encode_entry(msgspec.structs.replace(entry, writer=""))
        known = unique.get(key)
        if known is None or entry.writer < known.writer:
            unique[key] = entry
    return [entry for _, entry in sorted(unique.items(), key=lambda one: (one[1].at, one[1].writer, one[0]))]


def merge(entries: Iterable[LedgerEntry], now: float) -> dict[str, NodeRecord]:
    """The state of every node that is named."""
    ordered = in_order(entries)
    lifted = {name for entry in ordered if isinstance(entry.what, CordonLifted) for name in entry.what.lifts}
    held_back = _held_back(ordered)
    by_node: dict[str, list[LedgerEntry]] = defaultdict(list)
    for entry in ordered:
        if isinstance(entry.what, NodesSeen):
            for node in entry.what.nodes:
                by_node[node]  # it is there, and nothing is known against it
        else:
            by_node[entry.what.node].append(entry)
    return {node: _record(node, by_node[node], lifted, held_back, now) for node in sorted(by_node)}


def _held_back(ordered: Sequence[LedgerEntry]) -> frozenset[int]:
    """Cordons of policy that are one too many within the hour, as the circuit breaker counts them over all jobs: they
    are proposals. By place in memory, for two may have one id. Several jobs write at the same time, and every reader
    comes to the same answer."""
    taken: deque[tuple[float, str]] = deque()
    within: Counter[str] = Counter()
    held: set[int] = set()
    for entry in ordered:
        what = entry.what
        if not isinstance(what, NodeCordoned) or what.scope != "cluster" or entry.by != "policy":
            continue
        while taken and taken[0][0] <= entry.at - HOUR_S:
            _, node = taken.popleft()
            within[node] -= 1
            if not within[node]:
                del within[node]
        if what.node in within or len(within) < breaker_limit(what.fleet):
            taken.append((entry.at, what.node))
            within[what.node] += 1
        else:
            held.add(id(entry))
    return frozenset(held)


def _record(
    node: str, events: Sequence[LedgerEntry], lifted: set[str], held_back: frozenset[int], now: float
) -> NodeRecord:
    cordons, proposals = [], []
    for entry in events:
        what = entry.what
        if not isinstance(what, NodeCordoned) or entry.id in lifted or what.scope == "job":
            continue
        if what.until is not None and what.until <= now:
            continue
        if what.scope == "cluster" and id(entry) not in held_back:
            cordons.append(entry)
        elif entry.at > now - PROPOSAL_S:
            proposals.append(entry)
    repairs = _repairs(events)
    until = repairs[-1] + PROBATION_S if repairs and not cordons and now < repairs[-1] + PROBATION_S else None
    retest_at = repairs[-1] + RETEST_S if repairs else 0.0
    tested = any(isinstance(one.what, TestResult) and one.at >= retest_at for one in events)
    return NodeRecord(
        node=node,
        cordons=tuple(cordons),
        proposals=tuple(proposals),
        probation_until=until,
        retest_due=until is not None and now >= retest_at and not tested,
        score=score(events, now),
        events=tuple(events[-EVENTS_KEPT:]),
    )


def _repairs(events: Sequence[LedgerEntry]) -> list[float]:
    return [one.at for one in events if isinstance(one.what, CordonLifted) and one.what.repair]


# ----- the score -----

OUTAGE_POINTS: Final = 2.0
AGAIN_POINTS: Final = 2.0
"""Besides, for an outage on probation."""
CLASSES_POINTS: Final = 1.0
"""For failures of more than one class: Meta counts different Xids."""
LEFT_OUT_POINTS: Final = 0.5
"""For each job or person that took it out and proved nothing: that says little (Meta)."""
LEFT_OUT_MOST: Final = 2
LEMON_POINTS: Final = 6.0
LEMON_OUTAGES: Final = 2
"""One outage makes no lemon, whatever else is said."""


def outages(events: Sequence[LedgerEntry]) -> list[Outage]:
    """`events` of one node, in order."""
    found: list[Outage] = []
    repairs = _repairs(events)
    newest = 0.0
    for entry in events:
        what = entry.what
        if isinstance(what, NodeFailed):
            name = what.failure_class
        elif isinstance(what, TestResult) and what.verdict == "fail":
            name = f"test {what.test}"
        else:
            continue
        if found and entry.at < newest + OUTAGE_S:
            classes = found[-1].classes
            if name not in classes and len(classes) < CLASSES_KEPT:
                found[-1] = found[-1]._replace(classes=tuple(sorted((*classes, name))))
        else:
            before = bisect_right(repairs, entry.at)
            since = repairs[before - 1] if before else None
            again_s = entry.at - since if since is not None and entry.at - since < PROBATION_S else None
            found.append(Outage(entry.at, (name,), again_s))
        newest = entry.at
    return found


def score(events: Sequence[LedgerEntry], now: float) -> NodeScore:
    """`events` of one node, in order."""
    recent = [one for one in outages(events) if one.at > now - WINDOW_S]
    classes = sorted({name for one in recent for name in one.classes})
    again = [one.again_s for one in recent if one.again_s is not None]
    near = [one.at for one in recent]
    left_out = {
        one.job or one.by
        for one in events
        if isinstance(one.what, NodeCordoned)
        and one.at > now - WINDOW_S
        and not any(abs(one.at - at) < OUTAGE_S for at in near)
    }
    jobs = min(LEFT_OUT_MOST, len(left_out))
    parts = [
        (OUTAGE_POINTS * len(recent), f"{_times(len(recent), 'outage')} in 28 days ({', '.join(classes[:6])})"),
        (AGAIN_POINTS * len(again), f"failed again {_ages(again)} after a repair"),
        (CLASSES_POINTS * (len(classes) > 1), f"{len(classes)} kinds of failure"),
        (LEFT_OUT_POINTS * jobs, f"taken out {_times(len(left_out), 'time')} without a proven failure"),
    ]
    points = sum(number for number, _ in parts)
    return NodeScore(
        points=points,
        outages=len(recent),
        lemon=points >= LEMON_POINTS and len(recent) >= LEMON_OUTAGES,
        why=tuple(f"{text}: {number:g}" for number, text in parts if number),
    )


def _times(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _ages(ages: Sequence[float]) -> str:
    hours = [f"{age / HOUR_S:.0f} h" if age >= HOUR_S else f"{age / 60:.0f} min" for age in ages]
    told = [f"{age / DAY_S:.0f} days" if age >= 2 * DAY_S else short for age, short in zip(ages, hours, strict=True)]
    return " and ".join(told[-3:])


# ----- keeping it small -----


def compacted(own: Sequence[LedgerLine], everything: Iterable[LedgerEntry], now: float) -> list[bytes]:
    """Of the lines of own files, those that are still needed, in order. `everything`: what all files say.

    A lift stays while what it lifts is in any file: it would come back into force otherwise.
    """
    ordered = in_order(everything)
    lifted = {name for entry in ordered if isinstance(entry.what, CordonLifted) for name in entry.what.lifts}
    proposals = _held_back(ordered)
    held_back = {entry.id for entry in ordered if id(entry) in proposals}
    named = {entry.id for entry in ordered}
    newest = _newest(ordered)

    def is_needed(entry: LedgerEntry) -> bool:
        what, young = entry.what, entry.at > now - KEEP_S
        if isinstance(what, CordonLifted):
            return young or any(name in named for name in what.lifts)
        if isinstance(what, NodesSeen):
            return young and entry.id in newest
        if isinstance(what, TestResult) and what.verdict != "fail":
            return young and entry.id in newest
        if not isinstance(what, NodeCordoned) or what.scope == "job":
            return young
        if what.scope == "proposal" or entry.id in held_back:
            return entry.at > now - PROPOSAL_S
        over = entry.id in lifted or (what.until is not None and what.until <= now)
        return young or not over

    kept = [encode_entry(entry) for entry in in_order(line.entry for line in own if line.entry) if is_needed(entry)]
    newer = {line.raw for line in own if line.newer and _ENVELOPE.decode(line.raw).at > now - KEEP_S}
    return [*kept, *sorted(newer)]


def _newest(ordered: Sequence[LedgerEntry]) -> set[str]:
    """The newest entry that saw each node, and the newest results of each test."""
    found: dict[tuple[str, ...], deque[str]] = defaultdict(lambda: deque(maxlen=RESULTS_KEPT))
    for entry in ordered:
        what = entry.what
        if isinstance(what, NodesSeen):
            for node in what.nodes:
                found[(node,)] = deque([entry.id])
        elif isinstance(what, TestResult):
            found[what.node, what.gpu, what.test, what.kind].append(entry.id)
    return {name for names in found.values() for name in names}


# ----- for people -----

_FOR = re.compile(r"(\d{1,6})([mhd])")
_SECONDS: Final = {"m": 60.0, "h": 3600.0, "d": DAY_S}


def duration_s(text: str) -> float | None:
    """Seconds of `90m`, `12h`, `3d`; None: it is no such thing."""
    found = _FOR.fullmatch(text.strip())
    return None if found is None else int(found[1]) * _SECONDS[found[2]]
