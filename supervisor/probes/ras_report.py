"""The report of NCCL's RAS: which processes are missing, which communicators have errors or ranks that lag.

It is a text for people that names only what is out of line, so its size follows the trouble and not the job. JSON,
which NCCL offers since 2.28, lists every rank of every communicator: tens of megabytes in a large job.
Facts: src/ras/client_support.cc of NVIDIA/nccl, from 2.24 to 2.30.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Final

from diagnosis.signals import clean_text


@dataclasses.dataclass(frozen=True)
class Peer:
    """A process or rank that a report names."""

    pid: int
    host: str
    rank: int | None = None


@dataclasses.dataclass
class Operation:
    """Ranks of one communicator that have launched one kind of collective a different number of times."""

    counts: dict[int, int] = dataclasses.field(default_factory=dict)
    """Collectives launched -> ranks."""
    named: dict[int, list[Peer]] = dataclasses.field(default_factory=dict)
    """Collectives launched -> the ranks that the report names: the fewer ones."""


@dataclasses.dataclass
class Status:
    """A report of RAS."""

    version: str = ""
    communicators: int = 0
    ending: int = 0
    """Communicators that are being finalized or aborted."""
    dead: int = 0
    missing: int = 0
    """Processes that are not dead and did not answer."""
    timeouts: int = 0
    peers: dict[str, list[Peer]] = dataclasses.field(default_factory=dict)
    """`DEAD` and `INCOMPLETE` -> the processes that are named."""
    errors: list[tuple[str, Peer | None]] = dataclasses.field(default_factory=list)
    operations: dict[tuple[str, str], Operation] = dataclasses.field(default_factory=dict)
    """(communicator, collective) -> counts that differ."""

    @property
    def is_report(self) -> bool:
        return bool(self.version or self.communicators)


_GROUP: Final = re.compile(
    r"\s*\d+\s+(\d+)\s+\d+\s+[\d-]+\s+\d+\s+\d+\s+(NOCOMM|INIT|RUNNING|FINALIZE|ABORT)\s+\S+\s*$"
)
_BLOCK: Final = re.compile(r"#\d+-\d+ \(([0-9a-f]{1,32})\) (INCOMPLETE|ERROR|MISMATCH)\b")
_COUNT: Final = re.compile(
    r"  (?:Missing communicator data from |Encountered )?(\d+) (?:job process|communication timeout)"
)
_OPERATION: Final = re.compile(r"  Communicator ranks have different (\w{1,40}) operation counts")
_RANKS: Final = re.compile(r"  (\d+) ranks have (?:launched up to operation (\d+)|not launched any operations)")
_RANK: Final = re.compile(r"  Rank (\d+) (?:has (?:launched up to operation (\d+)|(not) launched any operations) )?-- ")
_PROCESS: Final = re.compile(r"(?:managed by process|  Process) (\d+) on node ([\w.:%-]{1,64})")
_REPORTED: Final = re.compile(r"  (?:Rank (\d+)|\d+ ranks) reported ([\w ]{1,60})")


class _Reader:
    """Reads a report line by line: a block says what the lines below it are about."""

    def __init__(self) -> None:
        self.status = Status()
        self._block = ""
        self._communicator = ""
        self._operation: Operation | None = None
        self._launched = 0

    def read(self, line: str) -> None:
        status = self.status
        if not line.startswith("  "):
            self._operation = None
            if line.startswith("NCCL version "):
                status.version = clean_text(line.split()[2] if len(line.split()) > 2 else "", 32)
            elif block := _BLOCK.match(line):
                self._communicator, self._block = block[1], block[2]
            elif line.strip():
                self._block = line.strip()
        if group := _GROUP.match(line):
            status.communicators += int(group[1])
            status.ending += int(group[1]) if group[2] in ("FINALIZE", "ABORT") else 0
        elif self._block in ("DEAD", "INCOMPLETE", "TIMEOUT"):
            self._read_missing(line)
        elif self._block == "ERROR" and (reported := _REPORTED.match(line)):
            status.errors.append((clean_text(reported[2], 60).strip(), _peer(line, reported[1])))
        elif self._block == "MISMATCH":
            self._read_counts(line)

    def _read_missing(self, line: str) -> None:
        if process := _PROCESS.match(line):
            self.status.peers.setdefault(self._block, []).append(Peer(int(process[1]), process[2]))
        elif count := _COUNT.match(line):
            name = {"DEAD": "dead", "INCOMPLETE": "missing", "TIMEOUT": "timeouts"}[self._block]
            setattr(self.status, name, int(count[1]))

    def _read_counts(self, line: str) -> None:
        if begin := _OPERATION.match(line):
            self._operation = self.status.operations.setdefault((self._communicator, begin[1]), Operation())
        elif self._operation is None:
            return
        elif ranks := _RANKS.match(line):
            self._launched = int(ranks[2] or 0)
            self._operation.counts[self._launched] = int(ranks[1])
        elif rank := _RANK.match(line):
            if rank[2] or rank[3]:  # the only one with this count
                self._launched = int(rank[2] or 0)
                self._operation.counts[self._launched] = 1
            if (peer := _peer(line, rank[1])) is not None:
                self._operation.named.setdefault(self._launched, []).append(peer)


def _peer(line: str, rank: str | None) -> Peer | None:
    process = _PROCESS.search(line)
    return Peer(int(process[1]), process[2], int(rank)) if process and rank else None


def parse(report: str) -> Status:
    reader = _Reader()
    for line in report.splitlines():
        reader.read(line[:1000])
    return reader.status


@dataclasses.dataclass(frozen=True)
class Lag:
    """Ranks that did not launch what the others of their communicator have, from one report to the next."""

    communicator: str
    operation: str
    launched: int
    ahead: int
    """The most that any rank has launched."""
    ranks: int
    peers: tuple[Peer, ...] = ()


def lags(before: Status, now: Status) -> list[Lag]:
    """Who has stood still behind the others between two reports, furthest behind first.

    Counts that differ in one report mean nothing: launches run ahead of each other all the time.
    """
    found = []
    for key, operation in now.operations.items():
        old = before.operations.get(key)
        if old is None or not operation.counts or not old.counts:
            continue
        least, most = min(operation.counts), max(operation.counts)
        if least == min(old.counts) and least < most:
            peers = tuple(operation.named.get(least, ()))
            found.append(Lag(*key, least, most, operation.counts[least], peers))
    return sorted(found, key=lambda lag: lag.launched - lag.ahead)


def local_pids(peers: Iterable[Peer], own: frozenset[str]) -> tuple[int, ...]:
    """Pids of those that run on a node with these addresses."""
    return tuple(peer.pid for peer in peers if peer.host in own)
