"""Many agents in one process, for `unbroken bench control-plane`: real sockets, real messages, no ranks.

Each fake agent speaks the whole protocol of `supervisor.agent.link`: the challenge, signed frames, a heartbeat every
second, a ping after silence, the assignment that it follows. What a node would do in between (kill ranks, start a
launcher) takes a fixed time. The bench drives this process by JSON lines on stdin, one answer each on stdout.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import random
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from diagnosis.signals import Evidence, ExitRecord, Finding, Frame, NodeEvidence, RankOutput, RankSample, RankStack
from diagnosis.taxonomy import FailureClass
from supervisor import messages as m
from supervisor.wire import websocket as ws
from supervisor.wire.authentication import (
    CHALLENGE_HEADER,
    CHALLENGE_PATH,
    Session,
    SharedSecret,
    exchange_of,
    new_nonce,
)
from supervisor.wire.limits import raise_descriptor_limit

RANKS = 8
"""Of each node."""
BEAT_S = 1.0
STEP_S = 0.5
KILLED_S = 0.05
"""From the order to form an attempt to the launcher in rendezvous."""
COLLECT_S = 0.03
PING_AFTER_S, PONG_WITHIN_S = 4.0, 20.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
PATIENCE_S = 60.0
MAX_BYTES = 8 << 20
PROBES = 32
"""So many agents measure the time from a heartbeat to the assignment that answers it."""
FINDINGS_A_BEAT = 50
_FRAMES = tuple(Frame(function=f"forward_{i}", file=f"torch/nn/modules/module{i}.py", line=100 + i) for i in range(10))
_TRACE = (
    *(f'  File "/opt/train/model/layer_{i}.py", line {100 + i}, in forward' for i in range(24)),
    "RuntimeError: CUDA error: an illegal memory access was encountered",
)
_INVENTORY = {f"package_{i}": f"{i}.{i}.0+build.{i}" for i in range(12)} | {"gpu": "NVIDIA H100 80GB HBM3", "gpus": "8"}


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a controller's message that a fake agent follows; the rest is not decoded."""

    type: str
    epoch: int = 0
    version: int = 0
    role: str = ""
    attempt: int = 0
    stage: str = ""
    round: msgspec.Raw = msgspec.Raw(b"null")
    evidence: m.EvidenceRequest | None = None
    evidence_seen: int = -1
    findings_seen: int = 0
    paused: bool = False
    outcome: m.Outcome | None = None
    why: str = ""
    asked_at: float = 0.0


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What the bench asks of this process."""

    do: Literal["join", "die", "silence", "find", "stats", "reset", "leave"]
    first: int = 0
    count: int = 0


_decode_held = msgspec.json.Decoder(Held).decode


class Fleet:
    """All fake agents, and what they have counted."""

    def __init__(self, job_dir: Path, nodes: int, spares: int) -> None:
        self.job_dir = job_dir
        self.loop = asyncio.get_running_loop()
        self.spec = m.JobSpec(
            name="bench", nodes_min=max(1, nodes // 2), nodes_max=nodes - spares, spares=spares, gather_s=20.0
        )
        self.agents = [FakeAgent(self, index, index >= nodes - spares) for index in range(nodes)]
        for agent in self.agents[:: max(1, nodes // PROBES)][:PROBES]:
            agent.probes = True
        self.runs: dict[int, Run] = {}
        self._places: dict[tuple[int, int], dict[str, int]] = {}
        self._found: tuple[float, tuple[str, int], str] | None = None
        self.reset()

    def reset(self) -> None:
        self.answered_s: list[float] = []
        self.arrived: dict[str, list[float]] = collections.defaultdict(list)
        """`attempt stage` -> Unix times at which nodes were told so first."""
        self.epochs: dict[str, list[float]] = collections.defaultdict(list)
        """Epoch -> Unix times of each node's first assignment of it."""
        self.dropped = self.unanswered = self.refused = self.beats = self.bytes_in = self.bytes_out = 0

    def stats(self) -> dict[str, Any]:
        return {
            "connected": sum(agent.is_open for agent in self.agents),
            "findings_left": sum(len(agent.findings) for agent in self.agents if not agent.silent),
            "done": sum(agent.done for agent in self.agents),
            "attempt": max(agent.held.attempt for agent in self.agents),
            "answered_s": self.answered_s,
            "arrived": self.arrived,
            "epochs": self.epochs,
            "dropped": self.dropped,
            "unanswered": self.unanswered,
            "refused": self.refused,
            "beats": self.beats,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "cpu_s": time.process_time(),
        }

    def take(self, command: Command) -> None:
        chosen = self.agents[command.first : command.first + command.count]
        if command.do == "join":
            for agent in self.agents:
                self.loop.call_later(random.random(), agent.connect)
        elif command.do == "reset":
            self.reset()
        elif command.do == "find":
            for agent in self.agents:
                if not agent.silent:
                    self.loop.call_later(random.random(), agent.find, command.count)
        for agent in chosen:
            if command.do == "die":
                agent.lose_rank()
            elif command.do == "silence":
                agent.fall_silent()
            elif command.do == "leave":
                agent.leave()

    def where(self) -> tuple[tuple[str, int], str]:
        """The controller's address and the job's token, as the job folder has them. Raises OSError and ValueError."""
        now = time.monotonic()
        if self._found is None or now - self._found[0] > 0.02:
            url = str(msgspec.json.decode((self.job_dir / "controller.json").read_bytes())["address"])
            host, _, port = url.partition("//")[2].rpartition(":")
            self._found = (now, (host, int(port)), (self.job_dir / "token").read_text().strip())
        return self._found[1], self._found[2]

    def place_of(self, node: str, held: Held) -> tuple[int, int]:
        """(index of the node among the members, how many there are)."""
        told = msgspec.json.decode(held.round)
        if "count" in told:
            return int(told.get("rank", 0)), int(told["count"])
        key = (held.epoch, held.attempt)
        if key not in self._places:
            self._places[key] = {name: index for index, name in enumerate(told["nodes"])}
        return self._places[key][node], len(self._places[key])


class Run:
    """The ranks of one attempt on all nodes: they step together, once all have started."""

    def __init__(self, members: int, base: int) -> None:
        self._missing = members
        self._base = base
        self._since: float | None = None
        self._stuck_at: float | None = None

    def start(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._since = time.monotonic() + 0.1

    def stick(self) -> None:
        """A rank is gone: nobody steps any more."""
        self._stuck_at = self._stuck_at or time.monotonic()

    def step(self, now: float) -> int | None:
        if self._since is None or now < self._since:
            return None
        return self._base + 1 + int((max(self._since, self._stuck_at or now) - self._since) / STEP_S)

    def quiet_s(self, now: float) -> float:
        return now - self._stuck_at if self._stuck_at is not None else 0.0


class FakeAgent(asyncio.Protocol):
    """One fake agent: its connection, and the node that it stands for."""

    def __init__(self, fleet: Fleet, index: int, spare: bool) -> None:
        self.fleet = fleet
        self.index = index
        self.spare = spare
        self.name = f"node{index:05d}"
        self.address = f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}"
        self.incarnation = time.time_ns()
        self.held = Held(type="")
        self.probes = self.silent = self.done = self.is_open = self._connecting = False
        self.findings: list[Finding] = []
        self._found = 0
        self._seq = 0
        self._transport: asyncio.Transport | None = None
        self._session: Session | None = None
        self._shaking: tuple[str, SharedSecret] | None = None
        self._buffer = b""
        """Of the handshake."""
        self._frames = ws.FrameReader(MAX_BYTES, masked=False)
        self._received = 0
        self._opened_at = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._beats_regularly = False
        self._beat_soon = False
        self._probed_at: float | None = None
        self._asks = 0
        self._told_inventory = False
        self._launcher: m.LauncherState = "absent"
        self._prepared = self._joined = self._collected = 0
        self._ranks: tuple[int, ...] = ()
        self._exits: dict[int, ExitRecord] = {}
        self._evidence: dict[int, NodeEvidence] = {}

    # ----- the connection -----

    def connect(self) -> None:
        if not (self.silent or self.done or self._connecting or self._transport is not None):
            self._connecting = True
            self.fleet.loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            address, _ = self.fleet.where()
            await self.fleet.loop.create_connection(lambda: self, *address)
        except (OSError, ValueError):
            self._again()
        finally:
            self._connecting = False

    def _again(self) -> None:
        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 1.5)
        self.fleet.loop.call_later(self._pause_s * random.uniform(0.5, 1.0), self.connect)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._buffer = transport, b""
        self._frames = ws.FrameReader(MAX_BYTES, masked=False)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = new_nonce()
        self._shaking = (nonce, SharedSecret(self.fleet.where()[1]))
        transport.write(f"GET {CHALLENGE_PATH} HTTP/1.1\r\nHost: bench\r\n{CHALLENGE_HEADER}: {nonce}\r\n\r\n".encode())
        self.fleet.loop.call_later(PATIENCE_S, self._give_up_shaking, transport)

    def _give_up_shaking(self, transport: asyncio.Transport) -> None:
        if transport is self._transport and not self.is_open:
            transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self.fleet.dropped += self.is_open and not self.done
        if self.is_open and time.monotonic() - self._opened_at > 2.0:
            self._pause_s = FIRST_PAUSE_S
        self.is_open, self._transport, self._session, self._shaking = False, None, None, None
        self._again()

    def data_received(self, data: bytes) -> None:
        self._received += 1
        if not self.is_open:
            self._buffer += data
            while self._transport is not None and not self.is_open and self._handshake():
                pass
            if not self.is_open:
                return
            data, self._buffer = self._buffer, b""
        for opcode, payload in self._frames.feed(data):
            self._hear(opcode, payload)

    def _handshake(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found or self._transport is None:
            return False
        status = head[9:12]
        if status == b"101":
            self._buffer = rest
            self._open()
            return True
        size = next((int(line[15:]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:"), 0)
        if len(rest) < size:
            return False
        self._buffer = rest[size:]
        if status != b"200" or self._shaking is None:
            self.fleet.refused += 1
            self._transport.abort()
            return False
        nonce, secret = self._shaking
        try:
            exchange = exchange_of(msgspec.json.decode(rest[:size]), nonce, secret)
        except ValueError:
            self._transport.abort()
            return False
        self._session = secret.session(exchange, controller=False)
        signed = secret.authorization(exchange, "GET", "/v1/agent")
        self._transport.write(
            f"GET /v1/agent HTTP/1.1\r\nHost: bench\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
            f"Authorization: {signed}\r\n\r\n".encode()
        )
        return True

    def _open(self) -> None:
        self.is_open, self._opened_at, self._told_inventory, self._asks = True, time.monotonic(), False, 3
        hello = m.Hello(
            protocol=m.PROTOCOL,
            node=self.name,
            host=self.name,
            address=self.address,
            spec=self.fleet.spec,
            index=self.index,
            spare=self.spare,
            scheduler_node=self.name,
            run=f"run-{self.index}",
        )
        self._say(m.encode(hello))
        self._beat()
        assert self._transport is not None
        self.fleet.loop.call_later(PING_AFTER_S, self._watch, self._transport, self._received)
        if not self._beats_regularly:
            self._beats_regularly = True
            self.fleet.loop.call_later(random.random() * BEAT_S, self._regular)

    def _hear(self, opcode: int, payload: bytes) -> None:
        assert self._transport is not None
        if opcode == ws.BINARY:
            self.fleet.bytes_in += len(payload)
            assert self._session is not None
            self._take(_decode_held(self._session.into.open(payload)))
        elif opcode == ws.PING:
            self._write(ws.PONG, payload)
        elif opcode == ws.CLOSE:
            self._transport.abort()

    def _say(self, message: bytes) -> None:
        if self._session is not None:
            self._write(ws.BINARY, self._session.out.seal(message))

    def _write(self, opcode: int, payload: bytes) -> None:
        """The mask is 0: to undo it costs the controller nearly the same, and to apply it would only cost us."""
        if self._transport is not None:
            sent = ws.frame(opcode, payload, bytes(4))
            self.fleet.bytes_out += len(sent)
            self._transport.write(sent)

    def _watch(self, transport: asyncio.Transport, received: int, asked: bool = False) -> None:
        """As the real one does: a ping after a silence, and the end of the connection when nothing answers it."""
        if transport is not self._transport or self.silent:
            return
        silent = self._received == received
        if silent and asked:
            self.fleet.unanswered += 1
            transport.abort()
            return
        if silent:
            self._write(ws.PING, b"")
        self.fleet.loop.call_later(
            PONG_WITHIN_S if silent else PING_AFTER_S, self._watch, transport, self._received, silent
        )

    # ----- what the controller wants -----

    def _take(self, told: Held) -> None:
        if told.type == "refused":
            self.fleet.refused += 1
        if told.type != "assignment" or (told.epoch, told.version) < (self.held.epoch, self.held.version):
            return
        now = time.time()
        if self._probed_at is not None:
            self.fleet.answered_s.append(time.monotonic() - self._probed_at)
            self._probed_at = None
        if told.epoch != self.held.epoch:
            self.fleet.epochs[str(told.epoch)].append(now)
        if (told.attempt, told.stage) != (self.held.attempt, self.held.stage):
            self.fleet.arrived[f"{told.attempt} {told.stage}"].append(now)
        self.held = told
        acknowledged = told.findings_seen - self._found
        if acknowledged > 0:
            del self.findings[:acknowledged]
            self._found = told.findings_seen
        if told.attempt == self._joined:
            self._evidence = {key: one for key, one in self._evidence.items() if key > told.evidence_seen}
        self._reconcile()

    def _reconcile(self) -> None:
        held = self.held
        if self.silent:
            return
        if held.evidence is not None and held.evidence.number > self._collected and self._joined == held.attempt:
            self._collected = held.evidence.number
            self.fleet.loop.call_later(COLLECT_S, self._collect, held.evidence.number)
        if held.outcome is not None:
            self._kill()
            self._launcher = "absent"
            if not self.done:
                self.done = True
                self._soon()
        elif held.role != "member":
            if held.stage != "hold":
                self._kill()
        elif held.stage in ("form", "run") and held.attempt > self._joined and not held.paused:
            if self._prepared < held.attempt:
                self._prepared = held.attempt
                self._kill()
                self.fleet.loop.call_later(KILLED_S, self._come, held.attempt)
            elif self._launcher == "joining" and held.stage == "run":
                self._begin()

    def _come(self, attempt: int) -> None:
        if self._prepared == attempt and self._joined < attempt and not self.silent:
            self._launcher = "joining"
            self._reconcile()
            self._soon()

    def _begin(self) -> None:
        fleet, held = self.fleet, self.held
        index, count = fleet.place_of(self.name, held)
        self._joined, self._launcher = held.attempt, "running"
        self._ranks = tuple(range(index * RANKS, (index + 1) * RANKS))
        self._exits, self._evidence = {}, {}
        if held.attempt not in fleet.runs:
            base = max((run.step(time.monotonic()) or 0 for run in fleet.runs.values()), default=0)
            fleet.runs = {held.attempt: Run(count, base)}
        fleet.runs[held.attempt].start()
        self._soon()

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank not in self._exits:
                self._ended(rank, None, 9, by_us=True)

    def _collect(self, number: int) -> None:
        stacks = tuple(RankStack(rank=rank, frames=_FRAMES) for rank in self._ranks if rank not in self._exits)
        exits = tuple(self._exits.values())
        self._evidence[number] = NodeEvidence(
            node=self.name, attempt=self._joined, request=number, exits=exits, stacks=stacks, took_s=COLLECT_S
        )
        self._soon()

    # ----- what happens to it -----

    def _ended(self, rank: int, code: int | None, number: int | None, by_us: bool) -> None:
        self._exits[rank] = ExitRecord(
            rank=rank,
            local_rank=rank - self._ranks[0],
            pid=4000 + rank,
            code=code,
            signal=number,
            ended_at=time.time(),
            stopped_by_us=by_us,
            order=len(self._exits),
        )
        run = self.fleet.runs.get(self._joined)
        if run is not None:
            run.stick()

    def lose_rank(self) -> None:
        rank = self._ranks[3]
        self._ended(rank, 1, None, by_us=False)
        output = RankOutput(rank=rank, tail=_TRACE, traceback=_TRACE)
        self._evidence[0] = NodeEvidence(
            node=self.name, attempt=self._joined, exits=tuple(self._exits.values()), outputs=(output,), took_s=COLLECT_S
        )
        self._soon()

    def fall_silent(self) -> None:
        """As a node whose power is cut: its connection stays, and says nothing."""
        self.silent = True
        run = self.fleet.runs.get(self._joined)
        if run is not None:
            run.stick()
        if self._transport is not None:
            self._transport.pause_reading()

    def leave(self) -> None:
        self.silent = True
        if self._transport is not None:
            self._transport.abort()

    def find(self, count: int) -> None:
        """The kernel's log of this node tells of `count` rows of GPU memory that are to be remapped."""
        now = time.time()
        for number in range(self._found + len(self.findings), self._found + len(self.findings) + count):
            gpu = number % RANKS
            address = f"0000:{0x19 + gpu:02x}:00"
            rank = self._ranks[gpu] if self._ranks else None
            row = f"Row Remapper: New row (0x{number:016x}) marked for remapping, reset gpu to activate"
            text = f"NVRM: Xid (PCI:{address}): 63, pid={4000 + number}, name=python3, {row}"
            self.findings.append(
                Finding(
                    rule="xid.63",
                    failure_class=FailureClass.GPU_ECC_UNCORRECTABLE,
                    confidence=0.6,
                    scope="gpu",
                    severity="warning",
                    evidence=Evidence(text=text, source="/dev/kmsg", node=self.name, rank=rank, at=now),
                    node=self.name,
                    rank=rank,
                    gpu=address,
                    at=now,
                    gpu_uuid=f"GPU-{self.index:08x}-{gpu:04x}",
                    mono=time.monotonic(),
                    boot_id="5b1c6c3e-7e1f-4f06-a8d1-2f1d0f8b9a11",
                )
            )
        self._soon()

    # ----- heartbeats -----

    def _regular(self) -> None:
        if self.silent or (self.done and not self.is_open):
            return
        self._beat()
        self.fleet.loop.call_later(BEAT_S, self._regular)

    def _soon(self) -> None:
        if not self._beat_soon:
            self._beat_soon = True
            self.fleet.loop.call_soon(self._beat_now)

    def _beat_now(self) -> None:
        self._beat_soon = False
        self._beat()

    def _samples(self, now: float) -> tuple[RankSample, ...]:
        run = self.fleet.runs.get(self._joined)
        if run is None:
            return ()
        step, quiet_s = run.step(now), run.quiet_s(now)
        done = (step or 0) * 40
        groups = {} if step is None else {"0": (done + (quiet_s > 0), done), "1": (done * 2, done * 2)}
        return tuple(
            [
                RankSample(
                    rank=rank,
                    local_rank=local,
                    pid=4000 + rank,
                    state="S",
                    step=step,
                    last_step=None if step is None else 10_000_000,
                    groups=groups,
                    moved_age_s=round(quiet_s, 3) if quiet_s else 0.18,
                    waiting_s=round(quiet_s, 3) if quiet_s else None,
                    beat_age_s=0.07,
                    cpu_s=round(now % 100_000, 2),
                    switches=int(now * 37) % 1_000_000,
                    io_bytes=123_456_789,
                    exit=self._exits.get(rank),
                )
                for local, rank in enumerate(self._ranks)
            ]
        )

    def _beat(self) -> None:
        if not self.is_open or self.silent:
            return
        now = time.monotonic()
        self._seq += 1
        self._asks -= 1
        version = self.held.version
        if self.probes and self._probed_at is None and self._seq % 2 and version:
            version, self._probed_at = version - 1, now  # the controller answers with the newest
        offers = self._launcher == "joining"
        inventory, self._told_inventory = None if self._told_inventory else _INVENTORY, True
        beat = m.Heartbeat(
            node=self.name,
            incarnation=self.incarnation,
            seq=self._seq,
            epoch=self.held.epoch,
            version=version,
            attempt=self._joined,
            launcher=self._launcher,
            keeper="ready",
            offer=m.StoreOffer(host=self.address, port=20_000 + self._prepared, local_world_size=RANKS)
            if offers
            else None,
            prepared=self._prepared,
            ranks=self._samples(now),
            evidence=tuple(self._evidence.values()),
            findings=tuple(self.findings[:FINDINGS_A_BEAT]),
            findings_from=self._found,
            done=self.done,
            inventory=inventory,
            asked_at=time.time() if self._asks > 0 else None,
            clock_offset_s=0.000123,
        )
        self.fleet.beats += 1
        self._say(m.encode(beat))


async def _serve(job_dir: Path, nodes: int, spares: int) -> None:
    fleet = Fleet(job_dir, nodes, spares)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1000)
    reader = asyncio.StreamReader()
    await fleet.loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    answer: Callable[[], dict[str, Any]] = fleet.stats
    while line := await reader.readline():
        command = msgspec.json.decode(line, type=Command)
        fleet.take(command)
        sys.stdout.buffer.write(msgspec.json.encode(answer() if command.do == "stats" else {}) + b"\n")
        sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """`JOB_DIR NODES SPARES`: until stdin ends."""
    raise_descriptor_limit()
    job_dir, nodes, spares = arguments
    asyncio.run(_serve(Path(job_dir), int(nodes), int(spares)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
