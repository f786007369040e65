"""`transformers serve` as the endpoint: a real server with a real model."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from diagnosis import llm
from diagnosis.incident import Culprit
from diagnosis.taxonomy import FailureClass
from supervisor.opinion.client import Endpoint

START_S = 90.0


@pytest.fixture
def server(model_folder: Path, tmp_path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [str(Path(sys.executable).with_name("transformers")), "serve", str(model_folder), "--device", "cpu"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    with open(tmp_path / "serve.log", "wb") as log:
        process = subprocess.Popen(
            [*argv, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None, (tmp_path / "serve.log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "serve.log").read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1.0).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_the_model_has_learnt_comes_back(
    server: str, model_folder: Path, question: llm.Question, seen: llm.ShownEvidence
) -> None:
    answer = asyncio.run(Endpoint(server, str(model_folder), "", 60.0).ask(question))
    opinion = llm.ground(answer.text, seen, lines=answer.lines, model=answer.model, id="rule-i-1")
    assert opinion.problem == ""
    assert opinion.failure_class is FailureClass.SCRIPT_ERROR
    assert opinion.culprits == (Culprit(node="n1", rank=1),)
    assert opinion.lines == ("n1 rank 1: FluxError: governor 17 lost its balance",)
    assert opinion.rule is not None
