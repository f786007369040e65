"""An OpenAI-compatible server, asked by a process of its own that lives for one question."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from diagnosis.llm import Question
from supervisor.opinion import process
from supervisor.opinion.backend import Answer
from supervisor.services import daemon_argv, daemon_env

MEMORY_BYTES: Final = 512 << 20


class Endpoint:
    """Asks `model` at `url` (`https://host/v1`), with the key in `key_file` where there is one."""

    def __init__(self, url: str, model: str, key_file: str, timeout_s: float) -> None:
        self._asked = {"url": url, "model": model, "key_file": key_file, "timeout_s": timeout_s}
        self._model = model
        self._timeout_s = timeout_s

    async def ask(self, question: Question) -> Answer:
        said = await process.ask(
            daemon_argv("supervisor.opinion.ask_endpoint"),
            {**self._asked, "question": question},
            env=daemon_env(os.environ, Path.cwd()),
            timeout_s=self._timeout_s,
            memory_bytes=MEMORY_BYTES,
        )
        return Answer(said.answer, said.lines, self._model)
