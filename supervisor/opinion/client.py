"""Asks a language model: each question in a process of its own, which is killed when its time is up.

If a model or a server misbehaves, only that process suffers: the controller parses none of its bytes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import psutil

from diagnosis import llm
from diagnosis.llm import Question
from diagnosis.signals import clean_line
from supervisor.blocking import BlockingCalls, timeout
from supervisor.errors import ModelUnavailable
from supervisor.paths import daemon_argv, daemon_env


class ModelAnswer(NamedTuple):
    """What a model said: anything at all, until it is grounded (`diagnosis.llm.ground`)."""

    text: str
    lines: int
    """How many lines of the question the model was shown."""
    model: str
    tokens_read: int = 0
    tokens_written: int = 0


ANSWER_BYTES: Final = 1 << 19
ERRORS_BYTES: Final = 1 << 14
GRACE_S: Final = 5.0
"""Seconds beyond the program's own deadline, in which it can say that the time was too short."""
LOOK_S: Final = 0.5
REAP_S: Final = 5.0


class ProcessAnswer(msgspec.Struct, frozen=True):
    """What a program answers."""

    answer: str = ""
    lines: int = 0
    problem: str = ""
    tokens_read: int = 0
    tokens_written: int = 0


async def ask_process(
    argv: Sequence[str], request: Mapping[str, object], *, env: Mapping[str, str], timeout_s: float, memory_bytes: int
) -> ProcessAnswer:
    """Ask the program once; it is gone afterwards. Raises ModelUnavailable, soon after `timeout_s` at the latest."""
    process = await _start(argv, env)
    watch = asyncio.create_task(_watch_memory(process.pid, memory_bytes))
    try:
        async with timeout(timeout_s + GRACE_S):
            reply = await _converse(process, msgspec.json.encode({**request, "parent": os.getpid()}))
    except asyncio.TimeoutError:
        raise ModelUnavailable(f"no answer within {timeout_s:.0f} s") from None
    except ModelUnavailable:
        if watch.done():
            raise ModelUnavailable(f"its process took more than {memory_bytes >> 20} MiB of memory") from None
        raise
    finally:
        watch.cancel()
        await _end(process)
    if reply.problem or not reply.answer:
        raise ModelUnavailable(reply.problem or "its process ended without an answer")
    return reply


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
        raise ModelUnavailable(f"{argv[0]} cannot be started: {error.strerror}") from None


async def _converse(process: asyncio.subprocess.Process, request: bytes) -> ProcessAnswer:
    """Raises ModelUnavailable."""
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
                raise ModelUnavailable("its process wrote too much")
        try:
            return msgspec.json.decode(answer, type=ProcessAnswer)
        except msgspec.DecodeError:
            words = (await errors).decode(errors="replace").strip().rpartition("\n")[2]
            how = f"ended with {await process.wait()}"
            raise ModelUnavailable(f"its process {how}: {clean_line(words, 150) or 'it wrote no error'}") from None
    finally:
        errors.cancel()


async def _last_bytes(stream: asyncio.StreamReader) -> bytes:
    """Read everything, so that the program never blocks on us; returns the end of it."""
    kept = b""
    while chunk := await stream.read(ERRORS_BYTES):
        kept = (kept + chunk)[-ERRORS_BYTES:]
    return kept


async def _watch_memory(pid: int, limit: int) -> None:
    """Kill the process and return, once it takes more memory than `limit`."""
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


MEMORY_BYTES: Final = 512 << 20


class Endpoint:
    """Asks `model` at `url` (`https://host/v1`), with the key in `key_file` where there is one."""

    def __init__(self, url: str, model: str, key_file: str, timeout_s: float) -> None:
        self._asked = {"url": url, "model": model, "key_file": key_file, "timeout_s": timeout_s}
        self._model = model
        self._timeout_s = timeout_s

    async def ask(self, question: Question) -> ModelAnswer:
        reply = await ask_process(
            daemon_argv("supervisor.opinion.ask_endpoint"),
            {**self._asked, "question": question},
            env=daemon_env(os.environ, Path.cwd()),
            timeout_s=self._timeout_s,
            memory_bytes=MEMORY_BYTES,
        )
        return ModelAnswer(reply.answer, reply.lines, self._model, reply.tokens_read, reply.tokens_written)


PROGRAM: Final = Path(__file__).with_name("local_model.py")
OVERHEAD_BYTES: Final = 4 << 30
"""torch, transformers, the prompt's cache."""
READ_S: Final = 10.0


class LocalModel:
    """Asks the model in `folder` with the interpreter `python`, which has transformers."""

    def __init__(self, folder: str, python: str, timeout_s: float) -> None:
        self._folder = Path(folder)
        self._python = python
        self._timeout_s = timeout_s
        self._files = BlockingCalls("opinion model")

    async def ask(self, question: Question) -> ModelAnswer:
        try:
            weights = await self._files.run(self._weights, READ_S)
        except (asyncio.TimeoutError, OSError):
            raise ModelUnavailable(f"{self._folder} cannot be read") from None
        if not weights:
            raise ModelUnavailable(f"there is no *.safetensors in {self._folder}")
        available = psutil.virtual_memory().available
        if weights + OVERHEAD_BYTES / 4 > available / 2:
            raise ModelUnavailable(
                f"the model needs some {weights >> 20} MiB and {available >> 20} MiB of memory are left"
            )
        reply = await ask_process(
            [self._python, str(PROGRAM)],
            self._request(question),
            env=self._environment(),
            timeout_s=self._timeout_s,
            memory_bytes=2 * weights + OVERHEAD_BYTES,
        )
        return ModelAnswer(reply.answer, reply.lines, self._folder.name, reply.tokens_read, reply.tokens_written)

    def _weights(self) -> int:
        """Bytes. In a thread: a file system may hang."""
        return sum(file.stat().st_size for file in self._folder.glob("*.safetensors"))

    def _environment(self) -> dict[str, str]:
        threads = str(self._threads())
        return {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
        }

    def _threads(self) -> int:
        return max(1, min(8, (os.cpu_count() or 1) // 4))

    def _request(self, question: Question) -> dict[str, Any]:
        return {
            **{name: getattr(question, name) for name in question.__struct_fields__},
            "model": str(self._folder),
            "threads": self._threads(),
            "seconds": self._timeout_s,
            "max_lines": llm.MAX_LINES,
            "max_culprits": llm.MAX_CULPRITS,
            "why_chars": llm.WHY_CHARS,
        }
