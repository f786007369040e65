"""Messages to people: what makes a message, what goes out, and what a broken service costs."""

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.config import NotifySettings
from supervisor.controller.notify import IN_AN_HOUR, LINES, LONGEST_S, Message, Notifier, Outbox, escaped, sender
from supervisor.messages import Note, Outcome

MESSAGE = Message(job="llama", incident="i-1", lines=("rank 1 was killed",))


def test_lines_of_one_incident_are_one_message() -> None:
    box = Outbox("llama")
    box.add("i-1", "rank 1 was killed", 0.0)
    box.add("i-2", "node n7 is lost", 0.5)
    box.add("i-1", "worker_crash", 1.5)
    assert [one.incident for one in box.due(2.9)] == ["i-2"]
    assert [one.lines for one in box.due(3.5)] == [("rank 1 was killed", "worker_crash")]
    assert box.is_empty


def test_a_group_that_never_rests_goes_out_all_the_same() -> None:
    box = Outbox("llama")
    for second in range(int(LONGEST_S) + 1):
        box.add("i-1", f"line {second}", float(second))
    assert [one.incident for one in box.due(LONGEST_S)] == ["i-1"]


def test_a_flood_is_counted_and_told_later() -> None:
    box = Outbox("llama")
    sent = 0
    for number in range(IN_AN_HOUR + 10):
        box.add(f"i-{number}", "again", float(number))
        sent += len(list(box.due(number + 5.0)))
    assert sent == IN_AN_HOUR
    box.add("i-99", "an hour later", 4000.0)
    assert [one.left_out for one in box.due(4005.0)] == [10]
    box.add("i-100", "and then", 4010.0)
    assert [one.left_out for one in box.due(4015.0)] == [0]


def test_a_message_is_bounded_and_holds_no_secret() -> None:
    box = Outbox("llama")
    for number in range(LINES + 5):
        box.add("i-1", f"{number} password=hunter2-hunter2 " + "x" * 5000, 0.0)
    told = next(iter(box.due(5.0)))
    assert len(told.lines) == LINES
    assert len(told.text) < 20_000
    assert "hunter2" not in told.text
    assert told.left_out == 5


def test_a_log_line_calls_no_channel() -> None:
    assert escaped("<!channel> <http://evil|click> & more").count("<") == 0


class _Service(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(json.loads(body))  # type: ignore[attr-defined]
        self.send_response(self.server.answers.pop(0) if self.server.answers else 200)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[http.server.HTTPServer]:
    server = http.server.HTTPServer(("127.0.0.1", 0), _Service)
    server.got, server.answers = [], []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def address_file(tmp_path: Path, server: http.server.HTTPServer) -> NotifySettings:
    file = tmp_path / "webhook"
    file.write_text(f"http://127.0.0.1:{server.server_address[1]}/services/SECRET\n")
    return NotifySettings(to=str(file))


def program(tmp_path: Path, body: str) -> NotifySettings:
    file = tmp_path / "tell"
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o700)
    return NotifySettings(to=str(file))


def test_a_webhook_gets_slacks_form(tmp_path: Path, service: http.server.HTTPServer) -> None:
    sender(address_file(tmp_path, service))(MESSAGE)
    assert service.got == [{"text": "llama: rank 1 was killed"}]  # type: ignore[attr-defined]


def test_a_program_gets_all_of_it_as_json(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sender(program(tmp_path, f"cat > {out}"))(MESSAGE)
    assert json.loads(out.read_text())["incident"] == "i-1"
    with pytest.raises(Exception, match="exit status 3"):
        sender(program(tmp_path, "exit 3"))(MESSAGE)


def test_what_is_no_address_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "hook").write_text("file:///etc/passwd")
    with pytest.raises(OSError, match="holds no address"):
        sender(NotifySettings(to=str(tmp_path / "hook")))(MESSAGE)


def test_the_end_of_the_job_is_told_and_a_failure_is_logged_without_the_address(
    tmp_path: Path, service: http.server.HTTPServer, caplog: pytest.LogCaptureFixture
) -> None:
    service.answers = [503]  # type: ignore[attr-defined]
    notifier = Notifier(address_file(tmp_path, service), "llama")
    notifier.add(Note(text="rank 1 was killed", incident="i-1", loud=True))
    notifier.add_end(Outcome(state="succeeded", exit_code=0, line="the run is complete"))
    asyncio.run(notifier.stop())  # once each: the first is refused
    assert [one["text"] for one in service.got] == [  # type: ignore[attr-defined]
        "llama: rank 1 was killed",
        "llama: the run is complete",
    ]
    assert "503" in caplog.text
    assert "SECRET" not in caplog.text


def test_a_service_that_is_not_there_costs_a_bounded_time(tmp_path: Path) -> None:
    (tmp_path / "hook").write_text("http://127.0.0.1:1/x")
    notifier = Notifier(NotifySettings(to=str(tmp_path / "hook")), "llama")
    for number in range(50):
        notifier.add(Note(text="x", incident=f"i-{number}"))
    asyncio.run(asyncio.wait_for(notifier.stop(), 20))
