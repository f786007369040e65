"""Collecting evidence before anything is torn down, within a budget of time and bytes.

A crash costs what reading a few files costs. A hang takes stacks of the ranks twice, a second apart (py-spy, from
outside), and the flight recorder of each rank. Whatever is not there in time is left out, and the evidence says so.
"""

from __future__ import annotations

import asyncio
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from diagnosis.errors.tracebacks import collect
from diagnosis.redact import hide_keys
from diagnosis.signals import Finding, NodeEvidence, RankOutput, RankSample, RankStack, clean_text
from diagnosis.stacks import parse
from supervisor.agent.flight import flight_of
from supervisor.agent.output import Stream, last_bytes, read_streams
from supervisor.agent.sending import sends
from supervisor.agent.threads import thread_waits_for_ever
from supervisor.deadline import timeout
from supervisor.keeper_client import WorkerProcess
from supervisor.paths import LocalPaths

STACK_DEADLINE_S = 3.0
BETWEEN_SAMPLES_S = 1.0
TAIL_LINES = 40
OUTPUT_BYTES = 24 * 1024
"""Of all ranks together in one evidence."""


class Sampler(Protocol):
    """Gives the newest samples of the node's ranks."""

    def __call__(self) -> tuple[RankSample, ...]: ...


def read_output(attempt: int, rank: int, streams: Sequence[Stream], paths: LocalPaths) -> RankOutput:
    """The end of a rank's output, its last traceback and its error file, without secrets."""
    lines: list[str] = []
    error_file = ""
    for stream in (stream for stream in streams if stream.rank == rank):
        data = last_bytes(stream.path)
        lines.extend(data.decode(errors="replace").replace("\r", "\n").splitlines()[-400:])
        error_file = stream.error_file or error_file
    path = Path(error_file) if error_file else paths.rank_file(attempt, rank, "error.json")
    return RankOutput(
        rank=rank,
        tail=tuple(hide_keys([clean_text(line, 300) for line in lines[-TAIL_LINES:]])),
        traceback=collect(lines),
        error_file=_error_message(path),
    )


def _error_message(path: Path) -> str:
    data = last_bytes(str(path), 64 * 1024)
    try:
        message = msgspec.json.decode(data)["message"]
    except (msgspec.DecodeError, ValueError, RecursionError, KeyError, TypeError):  # hostile or cut off
        return ""
    text = message.get("message", "") if isinstance(message, dict) else message
    return clean_text(str(text), 2000)


def _bounded(outputs: list[RankOutput]) -> tuple[RankOutput, ...]:
    """The first outputs whole, as far as the byte budget goes; of the others only what says most."""
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


def crash_evidence(
    node: str,
    attempt: int,
    workers: Sequence[WorkerProcess],
    samples: Sequence[RankSample],
    findings: Sequence[Finding],
    paths: LocalPaths,
) -> NodeEvidence:
    """What the files tell of a rank that ended, now. Takes milliseconds."""
    started = time.monotonic()
    streams = read_streams(paths.streams(attempt))
    ended = sorted((w for w in workers if w.status is not None), key=lambda worker: worker.order or 0)
    outputs = [read_output(attempt, worker.rank, streams, paths) for worker in ended[:16]]
    return NodeEvidence(
        node=node,
        attempt=attempt,
        request=0,
        exits=tuple(record for worker in ended if (record := worker.exit_record()) is not None),
        outputs=_bounded(outputs),
        samples=tuple(samples),
        findings=tuple(findings)[-50:],
        took_s=round(time.monotonic() - started, 4),
    )


async def hang_evidence(
    node: str,
    attempt: int,
    number: int,
    workers: Sequence[WorkerProcess],
    sampler: Sampler,
    findings: Sequence[Finding],
    paths: LocalPaths,
    *,
    budget_s: float,
    flight: bool,
) -> NodeEvidence:
    """Stacks of all living ranks twice, a second apart, and their flight recorders."""
    started = time.monotonic()
    until = started + budget_s - 0.3
    alive = [worker for worker in workers if worker.alive]
    flights = asyncio.gather(*(flight_of(worker, paths, until) for worker in alive)) if flight else None
    stacks = await _stacks(alive, 0, STACK_DEADLINE_S)
    pause = min(BETWEEN_SAMPLES_S, budget_s - (time.monotonic() - started) - 0.2)
    complete = pause > 0
    if complete:
        await asyncio.sleep(max(0.0, BETWEEN_SAMPLES_S - (time.monotonic() - started)))
        left = budget_s - (time.monotonic() - started) - 0.2
        stacks += await _stacks(alive, 1, max(0.2, min(STACK_DEADLINE_S, left)))
    streams = read_streams(paths.streams(attempt))
    outputs = [read_output(attempt, worker.rank, streams, paths) for worker in workers[:16]]
    return NodeEvidence(
        node=node,
        attempt=attempt,
        request=number,
        exits=tuple(record for worker in workers if (record := worker.exit_record()) is not None),
        stacks=tuple(stacks),
        flights=tuple(await flights) if flights is not None else (),
        outputs=_bounded(outputs),
        samples=sampler(),
        findings=tuple(findings)[-50:],
        took_s=round(time.monotonic() - started, 4),
        complete=complete,
    )


async def _stacks(workers: Sequence[WorkerProcess], sample: int, deadline_s: float) -> list[RankStack]:
    return list(await asyncio.gather(*(_stack(worker, sample, deadline_s) for worker in workers)))


async def _stack(worker: WorkerProcess, sample: int, deadline_s: float) -> RankStack:
    command = (f"{sysconfig.get_path('scripts')}/py-spy", "dump", "--json", "--nonblocking", "--pid", str(worker.pid))
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        return RankStack(rank=worker.rank, frames=(), sample=sample, error=f"py-spy cannot be started: {error}")
    try:
        async with timeout(deadline_s):
            out, err = await process.communicate()
    except asyncio.TimeoutError:
        process.kill()
        return RankStack(
            rank=worker.rank, frames=(), sample=sample, error=f"py-spy gave no answer in {deadline_s:.1f} s"
        )
    if process.returncode:
        reason = clean_text(err.decode(errors="replace").strip().split("\n")[0], 200)
        return RankStack(rank=worker.rank, frames=(), sample=sample, error=reason or "py-spy failed")
    stack = parse(worker.rank, out, sample=sample, waits=lambda tid: thread_waits_for_ever(worker.pid, tid))
    return msgspec.structs.replace(stack, sends=True) if sends(worker.pid) else stack
