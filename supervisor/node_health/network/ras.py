"""NCCL's RAS: what the ranks of a job know of each other, asked of a thread that runs beside each rank (NCCL >= 2.24).

The protocol is lines of text over TCP: a greeting each way, `TIMEOUT n`, then `VERBOSE STATUS`, answered with a report
for people and the end of the connection. The report names only what is out of line, so its size follows the trouble and
not the job; JSON, which NCCL offers since 2.28, is tens of megabytes in a large one.
Facts: src/ras/client.cc and client_support.cc of NVIDIA/nccl, from 2.24 to 2.30.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import socket
import time
from collections.abc import Iterable
from typing import Final

from diagnosis.signals import clean_text
from supervisor.node_health.contract import Place

PORT: Final = 28028
LIMIT: Final = 1 << 20
"""Bytes of a report that are read."""
GREETING_S: Final = 1.5
TRIES: Final = 4
LEG_S: Final = 5
"""So long a RAS thread waits for the next one; it is NCCL's default."""


class NoAnswerError(Exception):
    """Nothing came, or nothing that is RAS; the text says what."""


class Refused(NoAnswerError):
    """Nobody listens there."""


def find_listener(text: str, text6: str, port: int) -> tuple[str, int] | None:
    """Address and user of who listens on a port, from `/proc/net/tcp` and `tcp6` (listening sockets come first)."""
    wanted = f":{port:04X}"
    for table in (text, text6):
        for line in table.splitlines()[1:]:
            fields = line.split()
            if len(fields) > 7 and fields[3] == "0A" and fields[1].endswith(wanted) and fields[7].isdecimal():
                host = _host(fields[1].partition(":")[0])
                if host:
                    return host, int(fields[7])
    return None


def _host(digits: str) -> str:
    """`0100007F` -> 127.0.0.1; an address that means all of them becomes the loopback one."""
    try:
        words = bytes.fromhex(digits)
        packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
        host = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
    except (OSError, ValueError):
        return ""
    return _LOOPBACK.get(host, host)


_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def reachable(listener: tuple[str, int] | None) -> tuple[str, int] | None:
    """The same under an address that one can connect to."""
    return listener and (_LOOPBACK.get(listener[0], listener[0]), listener[1])


def port_of(address: str) -> int:
    """Of a `NCCL_RAS_ADDR` (`localhost:28028`, `[::1]:4711`); the default for what is not one."""
    port = address.rpartition(":")[2]
    return int(port) if port.isdecimal() and 0 < int(port) < 65536 else PORT


class _Line:
    """A connection with one deadline for all of it. Raises `TimeoutError` past it, `OSError` and `NoAnswerError`."""

    def __init__(self, host: str, port: int, deadline: float) -> None:
        self._deadline = deadline
        self._rest = b""
        self._socket = socket.create_connection((host, port), self._left())
        self.close = self._socket.close

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left

    def _say(self, line: str) -> None:
        self._socket.settimeout(self._left())
        self._socket.sendall(line.encode() + b"\n")

    def _read(self) -> bytes:
        self._socket.settimeout(self._left())
        return self._socket.recv(64 * 1024)

    def _hear(self) -> str:
        while b"\n" not in self._rest:
            data = self._read()
            if not data or len(self._rest) > 4096:
                raise NoAnswerError("what answers there does not speak RAS")
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode(errors="replace").strip()

    def greet(self) -> None:
        self._say("CLIENT PROTOCOL 2")
        if not self._hear().startswith("SERVER PROTOCOL "):
            raise NoAnswerError("what answers there does not speak RAS")

    def report(self, deadline: float) -> str:
        """The answer to `VERBOSE STATUS`: everything up to the end of the connection, or to the limit."""
        self._deadline = deadline
        self._say(f"TIMEOUT {LEG_S}")
        self._hear()  # `OK`; a version that does not know the word says so, and waits for as long as it likes
        self._say("VERBOSE STATUS")
        answer = bytearray(self._rest)
        while len(answer) < LIMIT and (data := self._read()):
            answer += data
        return answer[:LIMIT].decode(errors="replace")


def ask(host: str, port: int, deadline_s: float, *, status: bool, greeting_s: float = GREETING_S) -> tuple[str, int]:
    """Greet RAS and, with `status`, have it ask all ranks of the job. Raises `NoAnswerError`.

    The report (empty without `status`), and how many connections were taken and not answered before one was: all ranks
    of a node share the port, and which of them a connection comes to is chance.
    """
    end, silent = time.monotonic() + deadline_s, 0
    while silent < TRIES and time.monotonic() < end:
        greeted = False
        try:
            with contextlib.closing(_Line(host, port, min(end, time.monotonic() + greeting_s))) as line:
                line.greet()
                greeted = True
                return line.report(end) if status else "", silent
        except TimeoutError as error:
            if greeted:
                raise NoAnswerError("its report did not come in time") from error
            silent += 1
        except ConnectionRefusedError as error:
            raise Refused(str(error)) from error
        except OSError as error:
            raise NoAnswerError(str(error)) from error
    raise NoAnswerError("it takes connections and does not answer")


def local_addresses(place: Place) -> frozenset[str]:
    """This node's own addresses, as `fib_trie` and `if_inet6` list them."""
    found, last = set(), ""
    for line in (place.text("proc/net/fib_trie") or "").splitlines():
        words = line.split()
        if words[:1] == ["|--"]:
            last = words[-1]
        elif words[:3] == ["/32", "host", "LOCAL"]:
            found.add(last)
    for line in (place.text("proc/net/if_inet6") or "").splitlines():
        try:
            found.add(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])))
        except (OSError, ValueError, IndexError):
            continue
    return frozenset(found)


# --- its report


@dataclasses.dataclass(frozen=True)
class Peer:
    """A process or rank that a report names."""

    pid: int
    host: str
    rank: int | None = None


@dataclasses.dataclass
class Status:
    """What a report says of processes that are missing and communicators with an error."""

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

    @property
    def is_report(self) -> bool:
        return bool(self.version or self.communicators)


_GROUP: Final = re.compile(
    r"\s*\d+\s+(\d+)\s+\d+\s+[\d-]+\s+\d+\s+\d+\s+(NOCOMM|INIT|RUNNING|FINALIZE|ABORT)\s+\S+\s*$"
)
_BLOCK: Final = re.compile(r"#\d+-\d+ \([0-9a-f]{1,32}\) (INCOMPLETE|ERROR|MISMATCH)\b")
_COUNT: Final = re.compile(
    r"  (?:Missing communicator data from |Encountered )?(\d+) (?:job process|communication timeout)"
)
_PROCESS: Final = re.compile(r"(?:managed by process|  Process) (\d+) on node ([\w.:%-]{1,64})")
_REPORTED: Final = re.compile(r"  (?:Rank (\d+)|\d+ ranks) reported ([\w ]{1,60})")
_COUNTED: Final = {"DEAD": "dead", "INCOMPLETE": "missing", "TIMEOUT": "timeouts"}


def parse(report: str) -> Status:
    """Line by line: a block says what the lines below it are about."""
    status, block = Status(), ""
    for line in (line[:1000] for line in report.splitlines()):
        if line.startswith("NCCL version "):
            status.version = clean_text(" ".join(line.split()[2:3]), 32)
        elif line.strip() and not line.startswith("  "):
            named = _BLOCK.match(line)
            block = named[1] if named else line.strip()
        if group := _GROUP.match(line):
            status.communicators += int(group[1])
            status.ending += int(group[1]) if group[2] in ("FINALIZE", "ABORT") else 0
        elif block in _COUNTED and (process := _PROCESS.match(line)):
            status.peers.setdefault(block, []).append(Peer(int(process[1]), process[2]))
        elif block in _COUNTED and (count := _COUNT.match(line)):
            setattr(status, _COUNTED[block], int(count[1]))
        elif block == "ERROR" and (reported := _REPORTED.match(line)):
            process = _PROCESS.search(line)
            peer = Peer(int(process[1]), process[2], int(reported[1])) if process and reported[1] else None
            status.errors.append((clean_text(reported[2], 60).strip(), peer))
    return status


def local_pids(peers: Iterable[Peer], own: frozenset[str]) -> tuple[int, ...]:
    """Pids of those that run on a node with these addresses."""
    return tuple(peer.pid for peer in peers if peer.host in own)
