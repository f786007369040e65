"""The flight recorder of a living rank: from its worker server, else through the pipe that torch makes on request.

A rank that runs without our hooks has no worker server. Where its user has set TORCH_NCCL_DEBUG_INFO_PIPE_FILE, torch's
heartbeat monitor reads the pipe `<that><rank>.pipe` about once a second, and writes a dump for whatever is in it.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from diagnosis.flight.dumps import both, read_flight, read_reduced, with_members
from diagnosis.pickles import PLAIN_BYTES
from diagnosis.signals import RankFlight, clean_text
from supervisor.agent.ranks import BeaconFile
from supervisor.blocking import BlockingCalls, timeout
from supervisor.keeper_client import WorkerProcess
from supervisor.paths import LocalPaths

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


# ----- the worker server -----


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


# ----- the pipe -----


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
