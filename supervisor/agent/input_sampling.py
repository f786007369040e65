"""Looks at the workers of a rank's data loader, a bounded number of times, from outside (py-spy and /proc).

What they do is grouped by `diagnosis.input_stages`. It is only told: when an operator asks, and once in an attempt when
a rank has waited long for its data.
"""

from __future__ import annotations

import asyncio
import os
import platform
import stat
import time
from collections.abc import Mapping
from typing import Final

import msgspec

from diagnosis import input_stages
from diagnosis.input_stages import InputProfile, LoaderFrame, LoaderSample, WaitsFor, read_stack
from diagnosis.signals import clean_line
from recovery.snapshot_memory import free_bytes
from supervisor.agent.evidence import dump_stack
from supervisor.agent.loader_watch import RankInput, SlowStage
from supervisor.agent.procfs import descendants
from supervisor.keeper_client import WorkerProcess

SAMPLES: Final = 20
"""Of each worker ..."""
EVERY_S: Final = 0.25
"""... so often."""
MOST_WORKERS: Final = 4
"""Of a rank: they do alike."""
MOST_PROCESSES: Final = 32
AT_ONCE: Final = 4
DUMP_S: Final = 3.0
SOURCE_BYTES: Final = 1 << 20
SOURCE_LINE: Final = 200
CALLS: Final[Mapping[str, Mapping[int, str]]] = {
    "x86_64": {0: "read", 17: "read", 19: "read", 295: "read", 45: "read", 47: "read", 42: "socket"}
    | dict.fromkeys((2, 4, 5, 6, 78, 217, 257, 262, 332), "file"),
    "aarch64": {63: "read", 67: "read", 65: "read", 69: "read", 207: "read", 212: "read", 203: "socket"}
    | dict.fromkeys((56, 61, 79, 80, 291), "file"),
}
"""Machine -> number of a system call -> what it reads from: a descriptor, a socket, a file system by name."""


async def look_at(worker: WorkerProcess, input_share: float | None, ranks_here: int) -> RankInput:
    """LoaderSample the loader of a rank. Takes some seconds; raises nothing."""
    began = RankInput(rank=worker.rank, input_share=input_share)
    try:
        workers, found = await _samples(worker.pid)
    except OSError as error:
        return msgspec.structs.replace(began, problem=f"its loader cannot be looked at: {error.strerror}")
    if isinstance(found, str):
        return msgspec.structs.replace(began, problem=found)
    cpus = _cpus(worker.pid) / max(1, ranks_here)
    told = input_stages.advice(found, workers, cpus, _free_bytes())
    stages = tuple(SlowStage(stage=one.stage, what=one.what, share=round(one.share, 4)) for one in found.stages)
    return msgspec.structs.replace(
        began, workers=workers, samples=found.samples, idle=round(found.idle, 4), stages=stages, advice=told
    )


async def _samples(pid: int) -> tuple[int, InputProfile | str]:
    """How many workers its loader has, and what they do, or why that is not known."""
    pids = [pid, *descendants(pid, MOST_PROCESSES)]
    first = [await _dump(one) for one in pids]
    loaders = [one for one, (frames, _) in zip(pids[1:], first[1:], strict=True) if frames]
    chosen = loaders[:: max(1, len(loaders) // MOST_WORKERS)][:MOST_WORKERS] if loaders else [pid]
    problem = first[0][1] if loaders else next((why for _, why in first[1:] if why), first[0][1])
    limit, sources = asyncio.Semaphore(AT_ONCE), _Sources()

    async def look(one: int) -> LoaderSample:
        async with limit:
            waits_for = _waits_for(one)
            frames, _ = await _dump(one)
            return LoaderSample(tuple(map(sources.add, frames)), waits_for)

    found: list[LoaderSample] = []
    for number in range(SAMPLES):
        until = time.monotonic() + EVERY_S
        found += await asyncio.gather(*map(look, chosen))
        if number == SAMPLES - 1 or (not any(sample.frames for sample in found) and number >= SAMPLES // 2):
            break
        await asyncio.sleep(max(0.01, until - time.monotonic()))
    profile = input_stages.profile(found)
    if not profile.samples or (problem and not profile.stages):
        return len(loaders), problem or "it was never seen in a data loader of torch"
    return len(loaders), profile


async def _dump(pid: int) -> tuple[tuple[LoaderFrame, ...], str]:
    """The frames of the thread that loads, or why there are none."""
    out, problem = await dump_stack(pid, DUMP_S)
    return read_stack(out), problem


def _waits_for(pid: int) -> WaitsFor:
    """What its main thread waits for in the kernel at this moment."""
    try:
        with open(f"/proc/{pid}/syscall") as file:
            words = file.read(200).split()
        if not words or words[0] == "running":
            return ""
        if words[0] == "-1":  # a page of a mapped file
            return "file" if _is_in_disk_wait(pid) else ""
        call = CALLS.get(platform.machine(), {}).get(int(words[0]), "")
        if call != "read":
            return {"file": "file", "socket": "network"}.get(call, "")  # type: ignore[return-value]
        mode = os.stat(f"/proc/{pid}/fd/{int(words[1], 16)}").st_mode
    except (OSError, ValueError, IndexError):
        return ""
    return "network" if stat.S_ISSOCK(mode) else "file" if stat.S_ISREG(mode) or stat.S_ISBLK(mode) else ""


def _is_in_disk_wait(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read(1024).rpartition(b") ")[2][:1] == b"D"


def _free_bytes() -> int:
    try:
        return free_bytes()
    except (OSError, ValueError):
        return 0


def _cpus(pid: int) -> int:
    try:
        return len(os.sched_getaffinity(pid))
    except OSError:
        return os.cpu_count() or 1


class _Sources:
    """The source lines of frames: a library that is called in C shows in the line that calls it, and nowhere else."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int], str] = {}
        self._files: dict[str, list[str]] = {}

    def add(self, frame: LoaderFrame) -> LoaderFrame:
        key = (frame.file, frame.line)
        if key not in self._lines:
            if len(self._lines) > 500:
                return frame
            self._lines[key] = self._read(frame)
        return frame._replace(source=self._lines[key])

    def _read(self, frame: LoaderFrame) -> str:
        if not frame.file.startswith("/") or not frame.file.endswith(".py"):
            return ""
        lines = self._files.get(frame.file)
        if lines is None:
            lines = self._files[frame.file] = _lines_of(frame.file)
        return clean_line(lines[frame.line - 1].strip(), SOURCE_LINE) if 0 < frame.line <= len(lines) else ""


def _lines_of(file: str) -> list[str]:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as source:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return []
            return source.read(SOURCE_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
