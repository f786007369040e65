"""Traces on demand: what the agent answers on the socket of torch's profiler, and to whom; what it keeps."""

from __future__ import annotations

import asyncio
import gzip
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diagnosis import rules
from supervisor.agent import tracing
from supervisor.agent.ranks import RankMonitor
from supervisor.agent.state import AgentState
from supervisor.agent.tracing import HEADER, TraceAnswer, Tracer
from supervisor.keeper_client import KeeperState, WorkerProcess
from supervisor.messages import JobSpec, TraceRequest

MakeState = Callable[..., AgentState]
WHOLE = b'{"schemaVersion": 1, "traceEvents": [\n], "traceName": "kt.json"\n}'


class Rank:
    """This process as torch's profiler of rank 0: it asks, and gets orders."""

    def __init__(self, daemon: bytes) -> None:
        self.daemon = daemon
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(b"\0client" + secrets.token_hex(8).encode() + b"\0")
        self.socket.settimeout(5)

    def say(self, data: bytes) -> None:
        self.socket.sendto(data, self.daemon)

    async def hear(self, wait_s: float = 5.0) -> tuple[bytes, bytes] | None:
        self.socket.settimeout(wait_s)
        try:
            data = await asyncio.to_thread(self.socket.recv, 65536)
        except TimeoutError:
            return None
        size, kind = HEADER.unpack_from(data)
        assert size == len(data) - HEADER.size
        return kind.rstrip(b"\0"), data[HEADER.size :]

    async def ask(self, kind: int = 3) -> bytes:
        self.say(question(kind))
        heard = await self.hear()
        assert heard is not None
        assert heard[0] == b"req"
        return heard[1]


def question(kind: int = 3, pids: tuple[int, ...] = (0,)) -> bytes:
    body = struct.pack("<iiq", kind, len(pids), 0) + struct.pack(f"<{len(pids)}i", *pids)
    return HEADER.pack(len(body), b"req") + body


def run(make_state: MakeState, work: Callable[[Tracer, Rank, Path], Coroutine[Any, Any, None]], **spec: Any) -> None:
    """`work` in an agent whose rank 0 is this process."""

    async def whole() -> None:
        state = make_state(spec=JobSpec(name="j", traceable=True, **spec))
        Path(state.plan.job_dir).mkdir()
        worker = WorkerProcess(pid=os.getpid(), rank=0, local_rank=0, attempt=1)
        state.keeper = KeeperState(ready=True, workers=(worker,))
        name = b"\0test" + secrets.token_hex(8).encode() + b"\0"
        tracer = Tracer(state, RankMonitor(state.paths, rules.default(), {}), name)
        assert tracer.listen()
        try:
            await asyncio.wait_for(work(tracer, Rank(name), Path(state.plan.job_dir) / "attempts/1/n1"), 60)
        finally:
            tracer.close()

    asyncio.run(whole())


def request(**more: Any) -> TraceRequest:
    fields: dict[str, Any] = {"number": 1, "name": "ab12", "what": "steps", "ranks": (0,), "steps": 3, "budget_s": 20.0}
    return TraceRequest(**{**fields, **more})


def answer_of(folder: Path) -> TraceAnswer:
    return msgspec.json.decode((folder / "trace-ab12.json").read_bytes(), type=TraceAnswer)


def file_of(order: bytes) -> Path:
    lines = dict(line.split("=", 1) for line in order.decode().splitlines())
    named = Path(lines["ACTIVITIES_LOG_FILE"])
    return named.with_name(f"{named.stem}_{os.getpid()}.json")


async def ordered(rank: Rank) -> bytes:
    """Ask as torch does, until there is an order."""
    while not (order := await rank.ask()):
        await asyncio.sleep(0.02)
    return order


def test_a_trace_is_ordered_once_and_kept(make_state: MakeState) -> None:
    async def work(tracer: Tracer, rank: Rank, folder: Path) -> None:
        assert await rank.ask() == b""
        answering = asyncio.create_task(tracer.answer(request()))
        await asyncio.sleep(0)
        order = await ordered(rank)
        assert b"ACTIVITIES_ITERATIONS=4\n" in order
        assert await rank.ask() == b""
        path = file_of(order)
        path.write_bytes(WHOLE[:20])  # being written
        await asyncio.sleep(2 * tracing.LOOK_EVERY_S)
        assert not answering.done()
        path.write_bytes(WHOLE)
        await answering
        (kept,) = answer_of(folder).ranks
        assert (kept.rank, kept.problem) == (0, "")
        assert gzip.decompress((folder / kept.file).read_bytes()) == WHOLE
        assert (folder / kept.file).stat().st_mode & 0o777 == 0o600
        assert not path.exists()

    run(make_state, work)


def test_all_ranks_of_a_large_node(make_state: MakeState) -> None:
    """More of them than files are looked at, or packed, at a time."""

    async def work(tracer: Tracer, rank: Rank, folder: Path) -> None:
        many, whole = 8, WHOLE.replace(b"\n", os.urandom(2 << 20).hex().encode(), 1)
        others = [subprocess.Popen(["sleep", "100"]) for _ in range(many - 1)]
        try:
            pids = [os.getpid(), *(one.pid for one in others)]
            tracer._state.keeper = KeeperState(
                ready=True,
                workers=tuple(WorkerProcess(pid=p, rank=at, local_rank=at, attempt=1) for at, p in enumerate(pids)),
            )
            answering = asyncio.create_task(tracer.answer(request(ranks=tuple(range(many)))))
            path = file_of(await ordered(rank))
            for pid in pids:
                path.with_name(f"kt_{pid}.json").write_bytes(whole)
            await answering
        finally:
            for one in others:
                one.kill()
                one.wait()
        assert [(one.rank, one.problem) for one in answer_of(folder).ranks] == [(at, "") for at in range(many)]

    run(make_state, work)


def test_a_request_while_another_is_under_way(make_state: MakeState) -> None:
    async def work(tracer: Tracer, rank: Rank, folder: Path) -> None:
        answering = asyncio.create_task(tracer.answer(request()))
        await asyncio.sleep(0)
        await tracer.answer(request(name="cd34"))
        other = msgspec.json.decode((folder / "trace-cd34.json").read_bytes(), type=TraceAnswer)
        assert "earlier" in other.problem
        file_of(await ordered(rank)).write_bytes(WHOLE)
        await answering
        assert answer_of(folder).ranks[0].file

    run(make_state, work)


def test_a_full_disk_is_not_left_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "kt_1.json", tmp_path / "job/attempts/1/n1/kt_a_rank0.json.gz"
    source.write_bytes(WHOLE)
    (tmp_path / "job").mkdir()
    monkeypatch.setattr(tracing, "FREE_BYTES", 1 << 60)
    with pytest.raises(tracing.NoTrace):
        tracing._keep(source, target)
    monkeypatch.setattr(tracing, "FREE_BYTES", 0)
    with monkeypatch.context() as patch:
        patch.setattr(tracing.shutil, "copyfileobj", full)
        with pytest.raises(OSError, match="full"):
            tracing._keep(source, target)
    assert list(target.parent.iterdir()) == []
    tracing._keep(source, target)
    assert list(target.parent.iterdir()) == [target]


def full(*_: object) -> None:
    raise OSError(28, "the disk is full")


def test_somebody_who_sends_without_end(make_state: MakeState) -> None:
    async def work(_: Tracer, rank: Rank, __: Path) -> None:
        began = time.monotonic()
        sender = threading.Thread(target=lambda: [rank.say(b"x") for _ in range(600)])
        sender.start()
        while sender.is_alive():
            await asyncio.sleep(0.01)
        assert time.monotonic() - began > 0.9, "two whole seconds' share, and more"
        assert await rank.ask() == b""  # and it is read again

    run(make_state, work)


def test_an_order_waits_for_a_question_that_takes_one(make_state: MakeState) -> None:
    async def work(tracer: Tracer, rank: Rank, _: Path) -> None:
        answering = asyncio.create_task(tracer.answer(request()))
        order = b""
        while not order:
            assert await rank.ask(kind=1) == b""
            order = await rank.ask(kind=3)
        answering.cancel()

    run(make_state, work)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 39,
        b"x" * 4096,
        b"x" * 70_000,
        HEADER.pack(2**63, b"req") + b"12345678",
        HEADER.pack(4, b"req") + b"1234",
        HEADER.pack(16, b"") + b"\xff" * 16,
        question()[:-1],
    ],
    ids=["empty", "short", "long", "longer", "size", "no question", "kind", "cut off"],
)
def test_hostile_datagrams(make_state: MakeState, data: bytes) -> None:
    async def work(_: Tracer, rank: Rank, __: Path) -> None:
        for _unused in range(20):
            rank.say(data)
            await asyncio.sleep(0)  # the kernel keeps ten that nobody has read
            await asyncio.sleep(0)
        assert await rank.ask() == b""  # and nothing was answered before

    run(make_state, work)


def test_descriptors_that_nobody_asked_for(make_state: MakeState) -> None:
    async def work(_: Tracer, rank: Rank, __: Path) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _unused in range(9):
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("3i", 0, 1, 2))
            rank.socket.sendmsg([question()], [rights], 0, rank.daemon)
            await rank.hear()
        assert len(os.listdir("/proc/self/fd")) <= before + 3

    run(make_state, work)


STRANGER = """
import socket, sys
one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
one.bind(b"\\0stranger" + sys.argv[1].encode())
one.settimeout(1)
one.sendto(bytes.fromhex(sys.argv[3]), bytes.fromhex(sys.argv[2]))
try:
    print("heard", one.recv(4096))
except TimeoutError:
    print("nothing")
"""


def test_a_stranger_gets_no_answer(make_state: MakeState) -> None:
    """Another process may name a rank's process id; the kernel tells the agent its own."""

    async def work(tracer: Tracer, rank: Rank, _: Path) -> None:
        answering = asyncio.create_task(tracer.answer(request()))
        data = question(pids=(os.getpid(), 1)).hex()
        command = [sys.executable, "-c", STRANGER, secrets.token_hex(8), rank.daemon.hex(), data]
        said = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30)
        assert said.stdout.strip() == "nothing"
        assert await ordered(rank)
        answering.cancel()

    run(make_state, work)


def test_a_rank_that_never_asks(make_state: MakeState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "ASKS_WITHIN_S", 0.2)

    async def work(tracer: Tracer, _: Rank, folder: Path) -> None:
        await tracer.answer(request())
        (told,) = answer_of(folder).ranks
        assert not told.file
        assert "torch" in told.problem

    run(make_state, work)


def test_a_trace_that_does_not_come(make_state: MakeState) -> None:
    async def work(tracer: Tracer, rank: Rank, folder: Path) -> None:
        answering = asyncio.create_task(tracer.answer(request(budget_s=0.5)))
        path = file_of(await ordered(rank))
        path.symlink_to("/etc/passwd")  # is not read
        await answering
        (told,) = answer_of(folder).ranks
        assert not told.file
        assert told.problem

    run(make_state, work)


def test_the_name_is_taken(make_state: MakeState) -> None:
    async def work(tracer: Tracer, rank: Rank, folder: Path) -> None:
        tracer.close()
        other = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        other.bind(rank.daemon)
        await tracer.answer(request())
        assert "dynolog" in answer_of(folder).problem
        other.close()
        assert tracer.listen()  # once it is free

    run(make_state, work)


def test_not_too_many_are_kept(make_state: MakeState) -> None:
    async def work(tracer: Tracer, _: Rank, folder: Path) -> None:
        folder.mkdir(parents=True)
        for number in range(tracing.MOST_FILES):
            (folder / f"kt_{number}.json.gz").touch()
        await tracer.answer(request())
        assert str(tracing.MOST_FILES) in answer_of(folder).problem

    run(make_state, work)
