"""A model from a folder, asked in a process of its own that lives for one question.

The process runs in the training environment, at the lowest priority, without GPUs, as the first that the kernel ends
when memory runs short; it is killed when its time is up or when it takes more memory than its model explains.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Final

import psutil

from diagnosis import llm
from diagnosis.llm import Question
from supervisor.blocking import Aside
from supervisor.opinion import process
from supervisor.opinion.backend import Answer, NoAnswer

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
        self._files = Aside("opinion model")

    async def ask(self, question: Question) -> Answer:
        try:
            weights = await self._files.run(self._weights, READ_S)
        except (asyncio.TimeoutError, OSError):
            raise NoAnswer(f"{self._folder} cannot be read") from None
        if not weights:
            raise NoAnswer(f"there is no *.safetensors in {self._folder}")
        available = psutil.virtual_memory().available
        if weights + OVERHEAD_BYTES / 4 > available / 2:
            raise NoAnswer(f"the model needs some {weights >> 20} MiB and {available >> 20} MiB of memory are left")
        said = await process.ask(
            [self._python, str(PROGRAM)],
            self._request(question),
            env=self._environment(),
            timeout_s=self._timeout_s,
            memory_bytes=2 * weights + OVERHEAD_BYTES,
        )
        return Answer(said.answer, said.lines, self._folder.name)

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
