"""Traces on demand: answers the questions of torch's profiler in the ranks, as a dynolog daemon would.

A rank of a job that was started with `--traceable` asks every 5 s, through a socket with a name of its own in the
node's network namespace, whether it is to make a trace. Anybody there may send to that name: only our living ranks are
answered, by the process id that the kernel vouches for. Traces are moved into the job folder, bounded in number and
size; what cannot be had is said, rank by rank.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import gzip
import logging
import os
import shutil
import socket
import stat
import struct
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import IO, Final

import msgspec

from diagnosis.signals import Frozen, clean_line
from supervisor.agent.loader_watch import LoaderWatch, RankInput
from supervisor.agent.ranks import RankMonitor
from supervisor.agent.state import AgentState
from supervisor.blocking import BlockingCalls
from supervisor.errors import InternalError
from supervisor.files import write_atomically
from supervisor.keeper_client import WorkerProcess
from supervisor.messages import TraceRequest

NAME: Final = b"\0dynolog\0"
"""torch looks for its daemon under this name only; the NUL at its end is part of it."""
HEADER: Final = struct.Struct("<Q32s")
QUESTION: Final = struct.Struct("<iiq")
ACTIVITIES: Final = 2
"""A question with this bit takes an order for a trace as its answer."""
LONGEST_QUESTION: Final = 4096
QUESTIONS_AT_ONCE: Final = 64
MOST_IN_A_SECOND: Final = 256
"""Datagrams; the ranks of a node send two or three. Whoever sends more is not read until the second is over."""
ASKS_WITHIN_S: Final = 16.0
"""A rank asks every 5 s; one that makes a trace, or is busy, may leave out one."""
LOOK_EVERY_S: Final = 0.25
WITHOUT_STEPS_MS: Final = 1000
"""So long is traced where no optimizer of torch counts steps."""
MOST_BYTES: Final = 512 << 20
"""Of a trace, as its rank writes it."""
FREE_BYTES: Final = 1 << 30
"""Are left on the node's own disk and in the job folder, whose journal needs room."""
FILES_AT_ONCE: Final = 3
"""Of `FILE_CALLS`, so that one is left for the answer."""
FILE_CALLS: Final = 4
MOST_FILES: Final = 64
"""Of one node in one attempt, in the job folder."""
COPY_S: Final = 120.0
MOST_LOADERS: Final = 4
"""Of ranks of a node whose loaders are looked at for one request."""
TAIL: Final = 4096

log = logging.getLogger("unbroken.agent")


class TracedRank(Frozen, frozen=True, kw_only=True):
    """What came of one rank."""

    rank: int
    file: str = ""
    """In the folder of the answer."""
    size_bytes: int = 0
    problem: str = ""


class TraceAnswer(Frozen, frozen=True, kw_only=True):
    """`trace-NAME.json` in a node's evidence folder of an attempt: nothing more will come from this node."""

    node: str
    attempt: int
    ranks: tuple[TracedRank, ...] = ()
    inputs: tuple[RankInput, ...] = ()
    problem: str = ""


class NoTrace(InternalError):
    """The text says why."""


class Tracer:
    """`listen` once; then `answer` carries out one request after the other."""

    def __init__(self, state: AgentState, ranks: RankMonitor, name: bytes = NAME) -> None:
        self._state = state
        self._ranks = ranks
        self._input_watch = LoaderWatch()
        self._name = name
        self._socket: socket.socket | None = None
        self._orders: dict[int, bytes] = {}
        """Process id of a rank -> what it is told when it asks next."""
        self._asked_at: dict[int, float] = {}
        self._files = BlockingCalls("traces", FILE_CALLS)
        self._second = 0
        """Of the monotonic clock, in which ..."""
        self._heard = 0
        """... so many datagrams came."""
        self._is_answering = False

    # ----- the socket -----

    def listen(self) -> bool:
        """False: another program has the name."""
        if self._socket is not None:
            return True
        if not self._state.plan.spec.traceable:
            return False
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            listener.bind(self._name)
            asyncio.get_running_loop().add_reader(listener, self._receive)
        except OSError as error:
            listener.close()
            log.warning("traces: the name of the dynolog daemon is taken (%s)", error.strerror)
            return False
        self._socket = listener
        return True

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _receive(self) -> None:
        """Whatever is sent: no datagram raises, and none keeps the agent busy."""
        assert self._socket is not None
        for _ in range(QUESTIONS_AT_ONCE):
            if self._hears_too_much():
                return
            try:
                data, ancillary, flags, sender = self._socket.recvmsg(
                    LONGEST_QUESTION, socket.CMSG_SPACE(struct.calcsize("3i")) + socket.CMSG_SPACE(64)
                )
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                log.warning("traces: %s", error.strerror)
                return
            answer = self._reply(data, _sender_pid(ancillary)) if not flags & socket.MSG_TRUNC else None
            if answer is None or not isinstance(sender, bytes) or not sender.startswith(b"\0"):
                continue
            try:
                self._socket.sendto(answer, sender)
            except OSError:  # it is gone, or does not read
                pass

    def _hears_too_much(self) -> bool:
        """Whoever sends without end costs us nothing: the kernel makes him wait."""
        now = time.monotonic()
        if int(now) != self._second:
            self._second, self._heard = int(now), 0
        self._heard += 1
        if self._heard <= MOST_IN_A_SECOND or self._socket is None:
            return False
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.call_later(1.0 - now % 1.0, self._hear_again, self._socket)
        return True

    def _hear_again(self, listener: socket.socket) -> None:
        if self._socket is listener:
            asyncio.get_running_loop().add_reader(listener, self._receive)

    def _reply(self, data: bytes, pid: int | None) -> bytes | None:
        """None: whoever asks is no rank of ours, or does not ask as torch does."""
        if pid is None or len(data) < HEADER.size + 4 or all(worker.pid != pid for worker in self._living()):
            return None
        size, kind = HEADER.unpack_from(data)
        if size != len(data) - HEADER.size:
            return None
        kind = kind.rstrip(b"\0")
        if kind == b"ctxt":  # it says that it is there, and wants to know how many are
            return _message(b"ctxt", struct.pack("<i", 1))
        if kind != b"req" or size < QUESTION.size:
            return None
        self._asked_at[pid] = time.monotonic()
        takes_orders = QUESTION.unpack_from(data, HEADER.size)[0] & ACTIVITIES
        return _message(b"req", self._orders.pop(pid, b"") if takes_orders else b"")

    def _living(self) -> Sequence[WorkerProcess]:
        workers = self._state.workers_of(self._state.living_attempt)
        return [worker for worker in workers if worker.alive]

    # ----- a request -----

    async def answer(self, request: TraceRequest) -> None:
        """Make the traces, and say in the job folder that they are there, or why not."""
        attempt = self._state.living_attempt
        folder = Path(self._state.plan.job_dir) / "attempts" / str(attempt) / self._state.plan.node
        answer = TraceAnswer(node=self._state.plan.node, attempt=attempt)
        if self._is_answering:
            problem = "it is at work for an earlier `unbroken trace`: ask again when that has its answer"
            answer = msgspec.structs.replace(answer, problem=problem)
        else:
            self._is_answering = True
            try:
                answer = await self._answered(answer, request, folder)
            finally:
                self._is_answering = False
        try:
            await self._files.run(lambda: _write_answer(folder / f"trace-{request.name}.json", answer), COPY_S)
        except (OSError, asyncio.TimeoutError) as error:
            log.error("the answer to a request for traces cannot be written: %s", error)

    async def _answered(self, answer: TraceAnswer, request: TraceRequest, folder: Path) -> TraceAnswer:
        try:
            if request.what == "input":
                return msgspec.structs.replace(answer, inputs=await self._inputs(request.ranks))
            return msgspec.structs.replace(answer, ranks=tuple(await self._steps(request, folder)))
        except NoTrace as error:
            return msgspec.structs.replace(answer, problem=str(error))

    # ----- the input -----

    def watch_input(self, now: float) -> None:
        """A rank that has waited long for its data is looked at, and told about, once in an attempt."""
        if not self._input_watch.is_due(now, self._ranks.attempt):
            return
        rank = self._input_watch.look(now, self._ranks.samples())
        if rank is not None:
            self._state.work.start("input", self._tell_input(rank), wakes=False)

    async def _tell_input(self, rank: int) -> None:
        for found in await self._inputs((rank,)):
            more = f". {found.advice[0]}" if found.advice else ""
            self._state.notices.report(clean_line(f"{found.text}{more} (`unbroken trace --input`)"))

    async def _inputs(self, ranks: Collection[int]) -> tuple[RankInput, ...]:
        from supervisor.agent.input_sampling import look_at  # seldom needed

        clocks = {sample.rank: sample.clock for sample in self._ranks.samples()}
        living = self._living()
        found = []
        for worker in [one for one in living if one.rank in ranks][:MOST_LOADERS]:  # one after the other: it costs CPU
            clock = clocks.get(worker.rank)
            found.append(await look_at(worker, clock.input_share if clock is not None else None, len(living)))
        return tuple(found)

    # ----- traces -----

    async def _steps(self, request: TraceRequest, folder: Path) -> list[TracedRank]:
        if not self.listen():
            raise NoTrace(
                "another program has the name under which torch asks for traces (dynolog, or another job's agent): "
                "traces of this node are its to make"
            )
        workers = [worker for worker in self._living() if worker.rank in request.ranks]
        local = self._state.paths.folder / "traces" / request.name
        try:
            await self._files.run(lambda: _make_room(local, folder, len(workers)), COPY_S)
        except (OSError, asyncio.TimeoutError) as error:
            raise NoTrace(f"traces cannot be kept: {getattr(error, 'strerror', None) or error}") from None
        turns = asyncio.Semaphore(FILES_AT_ONCE)
        try:
            return list(await asyncio.gather(*(self._trace(one, request, local, folder, turns) for one in workers)))
        finally:
            self._orders.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await self._files.run(lambda: shutil.rmtree(local, ignore_errors=True), COPY_S)

    async def _trace(
        self, worker: WorkerProcess, request: TraceRequest, local: Path, folder: Path, turns: asyncio.Semaphore
    ) -> TracedRank:
        source = local / f"kt_{worker.pid}.json"
        self._orders[worker.pid] = _order(local / "kt.json", request.steps)
        began = time.monotonic()
        try:
            while not await self._in_turn(turns, lambda: _is_whole(source)):
                waited = time.monotonic() - began
                if not any(one.pid == worker.pid for one in self._living()):
                    raise NoTrace("it has ended")
                if waited > request.budget_s:
                    raise NoTrace(self._why_none(worker.pid, began, request.budget_s))
                if waited > ASKS_WITHIN_S and self._asked_at.get(worker.pid, 0.0) < began - ASKS_WITHIN_S:
                    raise NoTrace(self._why_none(worker.pid, began, ASKS_WITHIN_S))
                await asyncio.sleep(LOOK_EVERY_S)
            name = f"kt_{request.name}_rank{worker.rank}.json.gz"
            size = await self._in_turn(turns, lambda: _keep(source, folder / name))
        except NoTrace as error:
            return TracedRank(rank=worker.rank, problem=str(error))
        except (OSError, asyncio.TimeoutError) as error:
            why = getattr(error, "strerror", None) or f"it took over {COPY_S:.0f} s"
            return TracedRank(rank=worker.rank, problem=f"its trace cannot be kept in the job folder: {why}")
        return TracedRank(rank=worker.rank, file=name, size_bytes=size)

    async def _in_turn(self, turns: asyncio.Semaphore, work: Callable[[], int]) -> int:
        async with turns:
            return await self._files.run(work, COPY_S)

    def _why_none(self, pid: int, began: float, waited_s: float) -> str:
        if self._asked_at.get(pid, 0.0) < began - ASKS_WITHIN_S:
            return "it does not ask for orders: its torch is older than 2.7, or was built without Kineto"
        if pid in self._orders:
            return f"it has not asked for orders within {waited_s:.0f} s: is it stopped?"
        return f"it was told, and has no trace after {waited_s:.0f} s: does it make steps? (--wait gives it more time)"


def _sender_pid(ancillary: Iterable[tuple[int, int, bytes]]) -> int | None:
    """Who has sent it, by the kernel's word; None: another user."""
    found = None
    for level, kind, data in ancillary:
        if level != socket.SOL_SOCKET:
            continue
        if kind == socket.SCM_CREDENTIALS and len(data) >= struct.calcsize("3i"):
            pid, uid, _ = struct.unpack_from("3i", data)
            found = pid if uid == os.getuid() else None
        elif kind == socket.SCM_RIGHTS:  # descriptors that nobody asked for
            sent = array.array("i")
            sent.frombytes(data[: len(data) - len(data) % sent.itemsize])
            for descriptor in sent:
                os.close(descriptor)
    return found


def _message(kind: bytes, body: bytes) -> bytes:
    return HEADER.pack(len(body), kind) + body


def _order(file: Path, steps: int) -> bytes:
    """One step more than asked for: a whole step lies between the ends of two."""
    lines = {
        "ACTIVITIES_LOG_FILE": file,
        "PROFILE_START_TIME": 0,
        "ACTIVITIES_DURATION_MSECS": WITHOUT_STEPS_MS,
        "PROFILE_START_ITERATION": 0,
        "PROFILE_START_ITERATION_ROUNDUP": 1,
        "ACTIVITIES_ITERATIONS": steps + 1,
        "PROFILE_REPORT_INPUT_SHAPES": "true",
        "PROFILE_PROFILE_MEMORY": "false",
        "PROFILE_WITH_STACK": "false",
        "PROFILE_WITH_FLOPS": "false",
        "PROFILE_WITH_MODULES": "false",
    }
    return "".join(f"{name}={value}\n" for name, value in lines.items()).encode()


# ----- files: in threads, because a file system may hang -----


def _make_room(local: Path, folder: Path, count: int) -> None:
    """Raises NoTrace and OSError."""
    kept = len(list(folder.glob("kt_*"))) if folder.is_dir() else 0
    if kept + count > MOST_FILES:
        raise NoTrace(f"{folder} has {kept} traces already: remove some")
    local.mkdir(mode=0o700, parents=True, exist_ok=True)
    _need(local, FREE_BYTES)
    _need(folder.parents[2], FREE_BYTES)


def _need(folder: Path, count: int) -> None:
    """Raises NoTrace and OSError."""
    free = shutil.disk_usage(folder).free
    if free < count:
        raise NoTrace(f"{folder} has {free >> 20} MiB left, and traces need {count >> 20}")


def _is_whole(path: Path) -> bool:
    """Whether a trace has its end. Raises NoTrace where it is too large."""
    try:
        with _opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - TAIL))
            tail = file.read(TAIL).rstrip()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise NoTrace(f"its trace cannot be read: {error.strerror}") from None
    if size > MOST_BYTES:
        raise NoTrace(f"its trace is over {MOST_BYTES >> 20} MiB: ask for fewer steps")
    return tail.endswith(b"}") and b'"traceName"' in tail


def _opened(path: Path) -> IO[bytes]:
    """A regular file of ours. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(descriptor)
        raise FileNotFoundError
    return open(descriptor, "rb")


def _keep(source: Path, target: Path) -> int:
    """Pack the trace into the job folder. Raises NoTrace and OSError; then nothing of it is left there."""
    _make_private(target.parent)
    _need(target.parent, FREE_BYTES + source.stat().st_size)
    part = target.with_name(target.name + ".part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with _opened(source) as file, open(descriptor, "wb") as raw:
            with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=3) as packed:
                shutil.copyfileobj(file, packed, 1 << 20)
            raw.flush()
            size = raw.tell()
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return size


def _write_answer(path: Path, answer: TraceAnswer) -> None:
    _make_private(path.parent)
    cleaned = [msgspec.structs.replace(one, problem=clean_line(one.problem)) for one in answer.ranks]
    whole = msgspec.structs.replace(answer, ranks=tuple(cleaned), problem=clean_line(answer.problem))
    write_atomically(path, msgspec.json.encode(whole), 0o600)


def _make_private(folder: Path) -> None:
    """`attempts/N/NODE` of the job folder. Raises OSError."""
    for one in (*reversed(folder.parents[:2]), folder):
        one.mkdir(mode=0o700, exist_ok=True)
