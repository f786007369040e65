"""Which model is configured, and whether it answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from supervisor.cli import llm
from supervisor.config import OpinionSettings
from supervisor.errors import UnbrokenError


class Server(BaseHTTPRequestHandler):
    said = ""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        choice = {"message": {"content": self.said}}
        body = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 900, "completion_tokens": 30}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is told."""


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def checked(given: OpinionSettings) -> dict[str, object]:
    return asyncio.run(llm._checked(given))


@pytest.mark.parametrize(
    ("said", "answers", "words"),
    [
        ('{"lines": [5], "failure_class": "gpu_oom"}', True, "which is right"),
        ('{"lines": [5], "failure_class": "disk_full"}', True, "which is wrong: gpu_oom is right"),
        ("I am a teapot", False, "not in the form"),
    ],
)
def test_a_model_that_answers(url: str, said: str, answers: bool, words: str) -> None:
    Server.said = said
    found = checked(OpinionSettings(backend="endpoint", url=url, model="m", timeout_s=60.0))
    assert found["answers"] is answers
    assert words in str(found["lines"])
    assert not answers or "900 read, 30 written" in str(found["lines"])


def test_the_price_is_said_and_what_the_question_cost(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Server.said = '{"lines": [5], "failure_class": "gpu_oom"}'
    given = OpinionSettings(backend="endpoint", url=url, model="m", timeout_s=60.0)
    monkeypatch.setenv("UNBROKEN_OPINION_PRICE", "10/100")
    assert "this question cost 0.012" in str(checked(given)["lines"])
    for wrong in ("10", "a/b", "1e9/2", "-1/2", "1/2/3"):
        monkeypatch.setenv("UNBROKEN_OPINION_PRICE", wrong)
        assert "UNBROKEN_OPINION_PRICE" in str(checked(given)["problem"])


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    nobody = OpinionSettings(backend="endpoint", url="http://127.0.0.1:9/v1", model="m", timeout_s=60.0)
    for given in (nobody, OpinionSettings(), OpinionSettings(backend="transformers", model=str(tmp_path))):
        found = checked(given)
        assert found["answers"] is False
        assert found["problem"]


def test_the_command_fails_where_there_is_no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(llm.llm, ["check", "--json"])
    assert isinstance(result.exception, UnbrokenError)
    assert json.loads(result.stdout)["backend"] == "none"
