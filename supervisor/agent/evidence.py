"""Evidence of this node: collected before anything is torn down, and kept until the controller has it.

Evidence of a crash is read from a few files. A hang takes stacks of the ranks twice, a second apart (py-spy, from
outside), and the flight recorder of each rank. Whatever is not there in time is left out, and the evidence says so.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from diagnosis import exceptions, rules, tracebacks
from diagnosis.flight.dumps import both, read_flight, read_reduced, with_members
from diagnosis.pickles import PLAIN_BYTES
from diagnosis.signals import ExitRecord, Finding, NodeEvidence, RankFlight, RankOutput, RankStack, clean_text
from diagnosis.stacks import parse
from diagnosis.text import hide_keys
from diagnosis.verdict import accounts
from supervisor.agent.procfs import sends, thread_waits_for_ever
from supervisor.agent.ranks import BeaconFile, RankMonitor, Stream, last_bytes, read_streams
from supervisor.agent.space import full_disks
from supervisor.agent.state import AgentState
from supervisor.blocking import BlockingCalls, timeout
from supervisor.keeper_client import WorkerProcess
from supervisor.messages import Assignment, EvidenceRequest
from supervisor.paths import LocalPaths, write_atomically

PEER_WAIT_S = 0.5
"""How long a crash whose errors only blame a peer waits for the end of that peer ..."""
PEER_ENDING_S = 5.0
"""... and for the end of one that raised an exception of its own: its interpreter may take long on a busy machine."""
LAST_LINES = 5
DISK_DEADLINE_S = 0.05
FILE_DEADLINE_S = 60.0
FILES_AT_ONCE = 4
RECENT_FINDINGS = 50
RANKS_READ = 16
"""Evidence has the output of so many ranks of a node at most, the first that ended first."""
STACK_DEADLINE_S = 3.0
BETWEEN_SAMPLES_S = 1.0
TAIL_LINES = 40
NEAR_BYTES, FAR_BYTES, LINE_BYTES = 32 * 1024, 4 * 1024 * 1024, 4096
"""Of a rank's output: read at first, read where these hold few lines, and kept of a line."""
OUTPUT_BYTES = 24 * 1024
"""Of all ranks together in one evidence."""


class RankEnd(NamedTuple):
    record: ExitRecord
    output: RankOutput | None
    """What it wrote last; None: not read, because many ranks ended before it."""
    blames_peer: bool
    """It only reports that another rank is gone."""


class EvidenceCollector:
    """`state.evidence` is what the controller has not acknowledged; `problem` says why evidence cannot be filed."""

    def __init__(self, state: AgentState, ranks: RankMonitor, failing_checks: Callable[[], Sequence[Finding]]) -> None:
        """`failing_checks`: what is wrong with the node at this moment."""
        self._state = state
        self._node = state.plan.node
        self._ranks = ranks
        self._failing_checks = failing_checks
        self._recent: list[Finding] = []
        self._disks = BlockingCalls("full disks")
        self._files = BlockingCalls("evidence", FILES_AT_ONCE)
        self._filing: set[asyncio.Task[None]] = set()
        self.problem = ""

    def note_findings(self, found: Sequence[Finding]) -> None:
        self._recent = [*self._recent, *found][-RECENT_FINDINGS:]

    def acknowledge(self, assignment: Assignment) -> None:
        held = self._state.evidence
        for attempt, number in list(held):
            if attempt < assignment.attempt or (attempt == assignment.attempt and number <= assignment.evidence_seen):
                del held[attempt, number]

    def start_crash(self, attempt: int) -> None:
        """Collect what the failed ranks left behind, beside the agent's loop."""
        self._state.saved.crash_attempt = attempt
        self._state.collecting_crash = True
        self._state.work.start("crash", self.collect_crash(attempt))

    async def collect_crash(self, attempt: int) -> None:
        """While all failed ranks only blame a peer that still runs, wait for its end."""
        began = time.monotonic()
        try:
            await self._look_at_disks()
            ended: dict[int, RankEnd] = {}
            while True:
                workers = self._state.workers_of(attempt)
                ended = self._read_ends(attempt, workers, ended)
                alive = [worker for worker in workers if worker.alive]
                if not alive or not only_blame_peers(ended.values()):
                    break
                waited_s = time.monotonic() - began
                if waited_s > PEER_ENDING_S or (waited_s > PEER_WAIT_S and not self._any_is_ending(attempt, alive)):
                    break
                await asyncio.sleep(0.05)
            self._keep(self._crash_evidence(attempt, 0, began, ended))
        finally:
            self._state.collecting_crash = False

    def _crash_evidence(self, attempt: int, number: int, began: float, ended: dict[int, RankEnd]) -> NodeEvidence:
        outputs = [end.output for end in ended.values() if end.output is not None]
        return self._evidence(attempt, number, began, [end.record for end in ended.values()], outputs)

    def _read_ends(
        self, attempt: int, workers: Sequence[WorkerProcess], known: dict[int, RankEnd]
    ) -> dict[int, RankEnd]:
        """The ranks of `workers` that have ended, the first first. Each one's output is read and scanned once."""
        ended = sorted((one for one in workers if not one.alive), key=lambda worker: worker.order or 0)
        streams = (
            read_streams(self._state.paths.streams(attempt)) if any(one.rank not in known for one in ended) else ()
        )
        found: dict[int, RankEnd] = {}
        for index, worker in enumerate(ended):
            record, output = worker.exit_record(), None
            assert record is not None
            if worker.rank in known:
                found[worker.rank] = known[worker.rank]
                continue
            if index < RANKS_READ:
                output = read_output(attempt, worker.rank, streams, self._state.paths)
            found[worker.rank] = RankEnd(record, output, accounts.blames_peer(record, output))
        return found

    def _any_is_ending(self, attempt: int, alive: Sequence[WorkerProcess]) -> bool:
        paths = self._state.paths
        streams = read_streams(paths.streams(attempt))
        return any(is_ending(read_output(attempt, one.rank, streams, paths)) for one in alive[:RANKS_READ])

    async def _look_at_disks(self) -> None:
        """In a thread and not for long: a file system that hangs must not hold up the evidence.

        The ranks' output goes to the local folder: a rank that cannot write there ends without a message.
        """
        folders, now = [*self._state.written_folders, self._state.paths.folder], time.time()
        try:
            full = await self._disks.run(lambda: full_disks(folders, now, self._node), DISK_DEADLINE_S)
        except asyncio.TimeoutError:
            return
        line_rules = rules.default()
        self.note_findings([found for signal in full if (found := line_rules.match(signal)) is not None])

    async def collect_requested(self, request: EvidenceRequest) -> None:
        """What the controller asked for."""
        began, attempt = time.monotonic(), self._ranks.attempt
        workers = [w for w in self._state.workers_of(attempt) if not request.ranks or w.rank in request.ranks]
        if request.stacks:
            self._keep(await self._hang_evidence(attempt, request, workers))
            return
        self._keep(self._crash_evidence(attempt, request.number, began, self._read_ends(attempt, workers, {})))

    def _evidence(
        self, attempt: int, number: int, began: float, exits: Iterable[ExitRecord], outputs: Sequence[RankOutput]
    ) -> NodeEvidence:
        """What is known without stacks. `began`: monotonic time.

        What ranks wrote when they were ended for the attempt before is no evidence of this one.
        """
        recent = [finding for finding in self._recent if finding.attempt in (0, attempt)]
        return NodeEvidence(
            node=self._node,
            attempt=attempt,
            request=number,
            exits=tuple(exits),
            outputs=_bounded(outputs),
            samples=self._ranks.samples(),
            findings=(*recent, *self._failing_checks())[-RECENT_FINDINGS:],
            took_s=round(time.monotonic() - began, 4),
        )

    async def _hang_evidence(
        self, attempt: int, request: EvidenceRequest, workers: Sequence[WorkerProcess]
    ) -> NodeEvidence:
        """Stacks of all living ranks twice, a second apart, and their flight recorders."""
        paths, budget_s = self._state.paths, request.budget_s
        began = time.monotonic()
        until = began + budget_s - 0.3
        alive = [worker for worker in workers if worker.alive]
        flights = asyncio.gather(*(flight_of(worker, paths, until) for worker in alive)) if request.flight else None
        stacks = await _stacks(alive, 0, STACK_DEADLINE_S)
        complete = budget_s - 0.2 > max(BETWEEN_SAMPLES_S, time.monotonic() - began)
        if complete:
            await asyncio.sleep(max(0.0, BETWEEN_SAMPLES_S - (time.monotonic() - began)))
            left = budget_s - (time.monotonic() - began) - 0.2
            stacks += await _stacks(alive, 1, max(0.2, min(STACK_DEADLINE_S, left)))
        streams = read_streams(paths.streams(attempt))
        outputs = [read_output(attempt, worker.rank, streams, paths) for worker in workers[:RANKS_READ]]
        flights_found = tuple(await flights) if flights is not None else ()
        exits = [record for worker in workers if (record := worker.exit_record()) is not None]
        evidence = self._evidence(attempt, request.number, began, exits, outputs)
        return msgspec.structs.replace(evidence, stacks=tuple(stacks), flights=flights_found, complete=complete)

    def _keep(self, evidence: NodeEvidence) -> None:
        evidence = msgspec.structs.replace(evidence, folder=f"attempts/{evidence.attempt}/{self._node}")
        self._state.evidence[evidence.attempt, evidence.request] = evidence
        task = asyncio.create_task(self._file(evidence))
        self._filing.add(task)
        task.add_done_callback(self._filing.discard)
        self._state.wakeup.set()

    async def _file(self, evidence: NodeEvidence) -> None:
        """Into the job folder, in a thread: a slow shared file system must not hold up the restart."""
        job_dir = Path(self._state.plan.job_dir)

        def write() -> None:
            """For this user alone: the ranks' output may hold secrets."""
            job_dir.mkdir(parents=True, exist_ok=True)
            for folder in (*reversed(Path(evidence.folder).parents[:-1]), Path(evidence.folder)):
                (job_dir / folder).mkdir(mode=0o700, exist_ok=True)
            whole = msgspec.json.format(msgspec.json.encode(evidence), indent=1)
            write_atomically(job_dir / evidence.folder / f"evidence-{evidence.request}.json", whole, 0o600)

        try:
            await self._files.run(write, FILE_DEADLINE_S)
        except asyncio.TimeoutError:
            self.problem = "evidence cannot be kept in the job folder: it does not answer"
        except OSError as error:
            self.problem = f"evidence cannot be kept in the job folder: {error.strerror}"


def only_blame_peers(ends: Iterable[RankEnd]) -> bool:
    """Whether every rank that failed so far only reports that another one is gone."""
    failed = [end for end in ends if end.record.failed]
    return bool(failed) and all(end.blames_peer for end in failed)


def is_ending(output: RankOutput) -> bool:
    """Whether a rank wrote a traceback last, and not one over a peer that is gone."""
    found = tracebacks.last(output.traceback)
    if found is None or exceptions.read(found).is_cascade:
        return False
    return any(found.line[:80] in line for line in output.tail[-LAST_LINES:])


def read_output(attempt: int, rank: int, streams: Sequence[Stream], paths: LocalPaths) -> RankOutput:
    """The end of a rank's output, its last traceback and its error file, without secrets."""
    lines: list[str] = []
    error_file = ""
    for stream in (stream for stream in streams if stream.rank == rank):
        lines.extend(_last_lines(stream.path))
        error_file = stream.error_file or error_file
    path = Path(error_file) if error_file else paths.rank_file(attempt, rank, "error.json")
    return RankOutput(
        rank=rank,
        tail=tuple(hide_keys([clean_text(line, 300) for line in lines[-TAIL_LINES:]])),
        traceback=tracebacks.collect(lines),
        error_file=_error_message(path),
    )


def _last_lines(path: str) -> list[str]:
    """The end of a rank's output. Where a line is very long, from further back: an exception's message may be, and the
    traceback is before it."""
    data = last_bytes(path, NEAR_BYTES)
    if len(data) == NEAR_BYTES and data.count(b"\n") < TAIL_LINES:
        data = last_bytes(path, FAR_BYTES)
    lines = (one[:LINE_BYTES].decode(errors="replace") for one in data.splitlines()[-400:])
    return [part for line in lines for part in line.splitlines() or [""]]


def _error_message(path: Path) -> str:
    data = last_bytes(str(path), 64 * 1024)
    try:
        message = msgspec.json.decode(data)["message"]
    except (msgspec.DecodeError, ValueError, RecursionError, KeyError, TypeError):  # hostile or cut off
        return ""
    text = message.get("message", "") if isinstance(message, dict) else message
    return clean_text(str(text), 2000)


def _bounded(outputs: Sequence[RankOutput]) -> tuple[RankOutput, ...]:
    """The first outputs whole, as far as the byte budget goes; of the others only the last lines."""
    kept: list[RankOutput] = []
    left = OUTPUT_BYTES
    for output in outputs:
        size = sum(map(len, output.tail)) + sum(map(len, output.traceback)) + len(output.error_file)
        if size > left:
            output = RankOutput(
                rank=output.rank,
                tail=output.tail[-3:],
                traceback=output.traceback[-4:],
                error_file=output.error_file[:200],
            )
        else:
            left -= size
        kept.append(output)
    return tuple(kept)


async def _stacks(workers: Sequence[WorkerProcess], sample: int, deadline_s: float) -> list[RankStack]:
    return list(await asyncio.gather(*(_stack(worker, sample, deadline_s) for worker in workers)))


async def _stack(worker: WorkerProcess, sample: int, deadline_s: float) -> RankStack:
    out, problem = await dump_stack(worker.pid, deadline_s)
    if problem:
        return RankStack(rank=worker.rank, frames=(), sample=sample, error=problem)
    stack = parse(worker.rank, out, sample=sample, waits=lambda tid: thread_waits_for_ever(worker.pid, tid))
    return msgspec.structs.replace(stack, sends=True) if sends(worker.pid) else stack


async def dump_stack(pid: int, deadline_s: float) -> tuple[bytes, str]:
    """The stacks of a process as py-spy writes them, or why there are none. It is not stopped."""
    command = (f"{sysconfig.get_path('scripts')}/py-spy", "dump", "--json", "--nonblocking", "--pid", str(pid))
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        return b"", f"py-spy cannot be started: {error}"
    try:
        async with timeout(deadline_s):
            out, err = await process.communicate()
    except asyncio.TimeoutError:
        process.kill()
        return b"", f"py-spy gave no answer in {deadline_s:.1f} s"
    if process.returncode:
        return b"", clean_text(err.decode(errors="replace").strip().split("\n")[0], 200) or "py-spy failed"
    return out, ""


# ----- flight recorders -----
#
# From the rank's worker server, else through the pipe that torch makes on request. A rank that runs without our hooks
# has no worker server. Where its user has set TORCH_NCCL_DEBUG_INFO_PIPE_FILE, torch's heartbeat monitor reads the pipe
# `<that><rank>.pipe` about once a second, and writes a dump for whatever is in it.

SERVER_DEADLINE_S: Final = 1.0
DUMP_DEADLINE_S: Final = 3.0
"""The monitor reads its pipe once a second, and then asks NCCL before it writes."""
LOOK_EVERY_S: Final = 0.1
ENVIRON_LIMIT: Final = 1 << 20
PIPE: Final = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
FILES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The first that is set counts, with the rank behind it."""
DEFAULT_FILES: Final = (".cache/torch/comm_lib_trace_rank_", ".cache/torch/nccl_trace_rank_")
"""In the home directory, newest torch first; before torch 2.7 or so it was the last one, in /tmp."""
OLDEST_FILE: Final = "/tmp/nccl_trace_rank_"

_pipes = BlockingCalls("flight recorder", most=16)
"""Threads: one for each rank of a node that has only a pipe."""


async def flight_of(worker: WorkerProcess, paths: LocalPaths, until: float) -> RankFlight:
    """What the recorder of a rank has, by the monotonic time `until`; `error` says why there is nothing."""
    found = await _from_server(worker, paths)
    if found.entries:
        return with_members(found, _members(worker, paths))
    left = min(DUMP_DEADLINE_S, until - time.monotonic())
    try:
        dumped = await _pipes.run(lambda: by_pipe(worker.pid, worker.rank, time.monotonic() + left), left + 0.1)
    except Exception as error:  # no time or no thread left, or what a rank wrote has found a bug of ours
        return _failed(worker.rank, f"{found.error}; flight recorder pipe: {str(error) or 'its files do not answer'}")
    if dumped is None or (dumped.error and not found.error):
        return found
    return _failed(worker.rank, f"{found.error}; {dumped.error}") if dumped.error else dumped


def _failed(rank: int, why: str) -> RankFlight:
    return RankFlight(rank=rank, error=clean_text(why, 300).removeprefix("; "))


def _members(worker: WorkerProcess, paths: LocalPaths) -> Mapping[str, str]:
    """Who is in which group, from the rank's beacon."""
    file = BeaconFile(paths.rank_file(worker.attempt, worker.rank, "beacon"))
    beacon = file.read()
    file.close()
    return beacon.members if beacon is not None else {}


async def _from_server(worker: WorkerProcess, paths: LocalPaths) -> RankFlight:
    path = paths.rank_file(worker.attempt, worker.rank, "sock")
    nccl, gloo = await asyncio.gather(
        _ask(path, "dump_nccl_trace_json", worker.rank), _ask(path, "fr_trace_json", worker.rank)
    )
    return both(nccl, gloo)


async def _ask(path: Path, handler: str, rank: int) -> RankFlight:
    try:
        async with timeout(SERVER_DEADLINE_S):
            return read_flight(await _post(path, handler), rank)
    except Exception as error:  # whatever a rank answers, the others' evidence is kept
        return _failed(rank, f"worker server: {str(error) or f'no answer in {SERVER_DEADLINE_S:g} s'}")


async def _post(path: Path, handler: str) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path), limit=1 << 20)
    try:
        writer.write(
            f"POST /handler/{handler} HTTP/1.1\r\nHost: rank\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise ValueError(head.split(b"\r\n", 1)[0].decode(errors="replace"))
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                return await reader.readexactly(min(int(line.split(b":")[1]), 16 << 20))
        return await reader.read(16 << 20)
    finally:
        writer.close()


def by_pipe(pid: int, rank: int, until: float) -> RankFlight | None:
    """Request a dump and read it, by the monotonic time `until`. None: the rank has no pipe.

    Blocks where the file system does: for a thread of its own.
    """
    environ = _environ(pid)
    prefix = environ.get(PIPE, "")
    if not prefix:
        return None
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
        before = {path: _stamp(path) for path in dump_files(environ, rank, pid)}
        _request_dump(_absolute(f"{prefix}{rank}.pipe", pid), owner)
    except (OSError, ValueError) as error:
        return _failed(rank, f"flight recorder pipe: {error}")
    why = "no dump came"
    while time.monotonic() < until:
        for path, stamp in before.items():
            if (now := _stamp(path)) is None or now == stamp:
                continue
            try:
                return read_reduced(_read_own(path, owner), rank)
            except (OSError, ValueError) as error:  # it may be half written
                why = str(error)
        time.sleep(LOOK_EVERY_S)
    return _failed(rank, f"flight recorder pipe: {why}")


def dump_files(environ: Mapping[str, str], rank: int, pid: int) -> Iterator[str]:
    """Where torch may write the dump of a rank that was started with this environment."""
    named = next((environ[name] for name in FILES if environ.get(name)), "")
    if named:
        yield _absolute(f"{named}{rank}", pid)
        if environ.get("TORCH_FR_DUMP_DYNAMIC_FILE_NAME"):
            yield _absolute(named, pid)
        return
    home = environ.get("HOME") or "/tmp"
    yield from (_absolute(f"{home}/{name}{rank}", pid) for name in DEFAULT_FILES)
    yield f"{OLDEST_FILE}{rank}"


def _absolute(path: str, pid: int) -> str:
    return path if path.startswith("/") else f"/proc/{pid}/cwd/{path}"


def _environ(pid: int) -> dict[str, str]:
    """What the process was started with; empty when it is gone or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read(ENVIRON_LIMIT).split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, _, value in pairs if name in (PIPE, *FILES, "HOME") or name.startswith("TORCH_FR_")}


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _request_dump(path: str, owner: int) -> None:
    """Write into the pipe that the rank reads. Raises OSError and ValueError; never waits, and never creates a file."""
    found = os.lstat(path)
    if not stat.S_ISFIFO(found.st_mode) or found.st_uid != owner:
        raise ValueError(f"{path} is not a pipe of the rank's user")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"nobody reads {path} ({error.strerror})") from None
    try:
        opened = os.fstat(descriptor)
        if (opened.st_dev, opened.st_ino) != (found.st_dev, found.st_ino):
            raise ValueError(f"{path} was replaced")
        os.write(descriptor, b"1\n")
    except BlockingIOError:  # full: it has enough requests
        pass
    finally:
        os.close(descriptor)


def _read_own(path: str, owner: int) -> bytes:
    """Raises OSError, and ValueError where it is not a regular file of the rank's user."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner:
            raise ValueError(f"{path} is not a file of the rank's user")
        return file.read(PLAIN_BYTES + 1)
