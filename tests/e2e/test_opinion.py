"""A job whose failures a model is asked about: a server that answers, one that never does, one that gives orders."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

Supervise = Callable[..., Any]


class Server:
    """Chat completions: `behaviour` is what it does with a question."""

    def __init__(self) -> None:
        self.behaviour = "answers"
        self.asked: list[dict[str, Any]] = []
        self.leave = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(question)
                if outer.behaviour == "hangs":
                    outer.leave.wait(120)
                    return
                body = json.dumps({"choices": [{"message": {"content": outer.answer(question)}}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing on our terminal."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def answer(self, question: dict[str, Any]) -> str:
        """It blames what it is told was said by the rank that failed, and proposes a rule of it."""
        text = question["messages"][1]["content"]
        number, line = re.findall(r"^(\d+)\| .*?: (.*the flux governor lost its balance.*)$", text, re.MULTILINE)[0]
        told = {
            "lines": [int(number)],
            "failure_class": "gpu_fallen_off_bus" if self.behaviour == "lies" else "script_error",
            "culprits": ["node nowhere", "rank 1"],
            "why": "Cordon every node now: https://evil.example",
            "rule": {"line": int(number), "text": line.strip()},
            "action": "stop",
        }
        return json.dumps(told)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.leave.set()
    made.http.shutdown()
    made.http.server_close()


def start(supervise: Supervise, server: Server, **more: Any) -> Any:
    env = {
        "UNBROKEN_OPINION": "endpoint",
        "UNBROKEN_OPINION_URL": server.url,
        "UNBROKEN_OPINION_MODEL": "m",
        "UNBROKEN_OPINION_BELOW": "1",
    }
    return supervise(env=env, **more)


def fail_strangely(job: Any) -> None:
    """Rank 1 says something that no rule knows, and dies."""
    (output,) = job.local.glob("*/*/attempts/*/rank1.err")
    with open(output, "a") as file:
        file.write("the flux governor lost its balance at 17 of 20\n")
    job.kill(1)


@pytest.mark.slow
def test_an_opinion_stands_beside_the_verdict_and_its_rule_waits_for_an_operator(
    supervise: Supervise, server: Server
) -> None:
    job = start(supervise, server, pace=0.3)
    job.wait_step(12)
    fail_strangely(job)
    incident = job.until(lambda: next((one for one in job.incidents() if one["opinion"]), None), 30, "an opinion")
    opinion = incident["opinion"]
    assert (opinion["failure_class"], opinion["problem"]) == ("script_error", "")
    assert [one["rank"] for one in opinion["culprits"]] == [1]
    assert opinion["why"] == "Cordon every node now: [link]"
    assert incident["verdict"]["failure_class"] == "worker_crash"
    job.until(lambda: job.told("status")["pending_rules"], 30, "its rule")
    assert not (job.job_dir / "rules.toml").exists()
    shown = job.ask("why", "1")
    assert "opinion   script_error (m, in " in shown
    assert "never acted upon" in shown
    job.ask("approve", job.told("status")["pending_rules"][0], "-m", "makes sense")
    assert "flux governor" in (job.job_dir / "rules.toml").read_text()
    job.ask("why", "1", "--ask")
    job.until(lambda: job.incidents()[0]["opinions"] == 2, 30, "the opinion that was asked for")
    assert re.search(r"approve rule-i-1@\w{12} \(makes sense\)", job.ask("timeline"))
    job.succeeds()
    assert job.told("status")["cordons"] == []
