"""A program that is asked one question on stdin, answers on stdout, and ends: by itself, or because its time is up.

Whatever a model or a server does is done to that process, not to the controller: its loop never parses a byte of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import psutil

from diagnosis.signals import clean_line
from supervisor.deadline import timeout
from supervisor.opinion.backend import NoAnswer

ANSWER_BYTES: Final = 1 << 19
ERRORS_BYTES: Final = 1 << 14
GRACE_S: Final = 5.0
"""Beyond its own deadline, which leaves time to say that it was too short."""
LOOK_S: Final = 0.5
REAP_S: Final = 5.0


class Said(msgspec.Struct, frozen=True):
    """What a program answers."""

    answer: str = ""
    lines: int = 0
    problem: str = ""


async def ask(
    argv: Sequence[str], request: Mapping[str, object], *, env: Mapping[str, str], timeout_s: float, memory_bytes: int
) -> Said:
    """Ask the program once; it is gone afterwards. Raises NoAnswer, soon after `timeout_s` at the latest."""
    process = await _start(argv, env)
    watch = asyncio.create_task(_watch_memory(process.pid, memory_bytes))
    try:
        async with timeout(timeout_s + GRACE_S):
            said = await _converse(process, msgspec.json.encode({**request, "parent": os.getpid()}))
    except asyncio.TimeoutError:
        raise NoAnswer(f"no answer within {timeout_s:.0f} s") from None
    except NoAnswer:
        if watch.done():
            raise NoAnswer(f"its process took more than {memory_bytes >> 20} MiB of memory") from None
        raise
    finally:
        watch.cancel()
        await _end(process)
    if said.problem or not said.answer:
        raise NoAnswer(said.problem or "its process ended without an answer")
    return said


async def _start(argv: Sequence[str], env: Mapping[str, str]) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(env),
            start_new_session=True,
        )
    except OSError as error:
        raise NoAnswer(f"{argv[0]} cannot be started: {error.strerror}") from None


async def _converse(process: asyncio.subprocess.Process, request: bytes) -> Said:
    """Raises NoAnswer."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(_last_bytes(process.stderr))
    try:
        try:
            process.stdin.write(request)
            await process.stdin.drain()
            process.stdin.close()
        except OSError:
            pass  # it ended at once, and has said why
        answer = b""
        while chunk := await process.stdout.read(ANSWER_BYTES):
            answer += chunk
            if len(answer) > ANSWER_BYTES:
                raise NoAnswer("its process says too much")
        try:
            return msgspec.json.decode(answer, type=Said)
        except msgspec.DecodeError:
            words = (await errors).decode(errors="replace").strip().rpartition("\n")[2]
            how = f"ended with {await process.wait()}"
            raise NoAnswer(f"its process {how}: {clean_line(words, 150) or 'no word from it'}") from None
    finally:
        errors.cancel()


async def _last_bytes(stream: asyncio.StreamReader) -> bytes:
    """Whatever comes, so that it never waits for us; the end of it."""
    kept = b""
    while chunk := await stream.read(ERRORS_BYTES):
        kept = (kept + chunk)[-ERRORS_BYTES:]
    return kept


async def _watch_memory(pid: int, limit: int) -> None:
    """Returns once it has taken (and been killed for) more than `limit`."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            memory = psutil.Process(pid).memory_info()
        except psutil.Error:
            await asyncio.Event().wait()  # it has ended: nothing left to watch
            return
        if memory.rss - memory.shared > limit:
            _signal(pid)
            return


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        _signal(process.pid)
    try:
        async with timeout(REAP_S):
            await process.wait()
    except asyncio.TimeoutError:
        pass  # it hangs in the kernel, and is reaped when it does not any more


def _signal(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass  # it has ended by itself
