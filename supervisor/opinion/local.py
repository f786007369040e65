"""A model from a folder, asked in a process of its own that lives for one question.

The process runs in the training environment, at the lowest priority, without GPUs, as the first that the kernel ends
when memory runs short; it is killed when its time is up or when it takes more memory than its model explains.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Final

import msgspec
import psutil

from diagnosis import llm
from diagnosis.llm import Question
from diagnosis.signals import clean_line
from supervisor.deadline import timeout
from supervisor.opinion.backend import Answer, NoAnswer

PROGRAM: Final = Path(__file__).with_name("local_model.py")
ANSWER_BYTES: Final = 1 << 17
ERRORS_BYTES: Final = 1 << 14
GRACE_S: Final = 5.0
"""Beyond its own deadline, which leaves time to say that it was too short."""
LOOK_S: Final = 0.5
REAP_S: Final = 5.0
OVERHEAD_BYTES: Final = 4 << 30
"""torch, transformers, the prompt's cache."""


class _Said(msgspec.Struct, frozen=True):
    answer: str = ""
    lines: int = 0
    problem: str = ""


class LocalModel:
    """Asks the model in `folder` with the interpreter `python`, which has transformers."""

    def __init__(self, folder: str, python: str, timeout_s: float) -> None:
        self._folder = Path(folder)
        self._python = python
        self._timeout_s = timeout_s

    async def ask(self, question: Question) -> Answer:
        weights = sum(file.stat().st_size for file in self._folder.glob("*.safetensors"))
        if not weights:
            raise NoAnswer(f"there is no *.safetensors in {self._folder}")
        limit = 2 * weights + OVERHEAD_BYTES
        available = psutil.virtual_memory().available
        if weights + OVERHEAD_BYTES / 4 > available / 2:
            raise NoAnswer(f"the model needs some {weights >> 20} MiB and {available >> 20} MiB of memory are left")
        process = await self._start()
        watch = asyncio.create_task(_watch_memory(process.pid, limit))
        try:
            async with timeout(self._timeout_s + GRACE_S):
                said = await _converse(process, self._request(question))
        except asyncio.TimeoutError:
            raise NoAnswer(f"no answer within {self._timeout_s:.0f} s") from None
        except NoAnswer:
            if watch.done():
                raise NoAnswer(f"the model's process took more than {limit >> 20} MiB of memory") from None
            raise
        finally:
            watch.cancel()
            await _end(process)
        if said.problem or not said.answer:
            raise NoAnswer(said.problem or "the model's process ended without an answer")
        return Answer(said.answer, said.lines, self._folder.name)

    async def _start(self) -> asyncio.subprocess.Process:
        threads = self._threads()
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
        }
        try:
            return await asyncio.create_subprocess_exec(
                self._python,
                str(PROGRAM),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            raise NoAnswer(f"{self._python} cannot be started: {error.strerror}") from None

    def _threads(self) -> int:
        return max(1, min(8, (os.cpu_count() or 1) // 4))

    def _request(self, question: Question) -> bytes:
        return msgspec.json.encode(
            {
                **{name: getattr(question, name) for name in question.__struct_fields__},
                "model": str(self._folder),
                "parent": os.getpid(),
                "threads": self._threads(),
                "seconds": self._timeout_s,
                "max_lines": llm.MAX_LINES,
                "max_culprits": llm.MAX_CULPRITS,
                "why_chars": llm.WHY_CHARS,
            }
        )


async def _converse(process: asyncio.subprocess.Process, request: bytes) -> _Said:
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
                raise NoAnswer("the model's process says too much")
        try:
            return msgspec.json.decode(answer, type=_Said)
        except msgspec.DecodeError:
            words = (await errors).decode(errors="replace").strip().rpartition("\n")[2]
            how = f"ended with {await process.wait()}"
            raise NoAnswer(f"the model's process {how}: {clean_line(words, 150) or 'no word from it'}") from None
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
