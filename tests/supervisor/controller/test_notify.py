"""Messages to people: what makes a message, what goes out, and what a broken service costs."""

import asyncio
import email
import email.policy
import http.server
import json
import os
import re
import threading
import urllib.error
from collections.abc import Iterator
from http.client import HTTPMessage
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import HTTPError, URLError

import pytest

from supervisor.config import NotifySettings, Settings, absolute
from supervisor.controller.notify import (
    GROUPS,
    IN_AN_HOUR,
    KEPT_S,
    LINES,
    LONGEST_S,
    PERHAPS_MOST,
    TRIES_S,
    Message,
    Notifier,
    Outbox,
    Recipient,
    check_notify,
    escaped,
    letter_of,
    mail_address,
    sender,
    shown,
)
from supervisor.errors import ConfigError
from supervisor.messages import Note, Outcome

MESSAGE = Message(job="llama", incident="i-1", lines=("rank 1 was killed",))
COMPLETE = Outcome(state="succeeded", exit_code=0, line="the run is complete")


def test_lines_of_one_incident_are_one_message() -> None:
    box = Outbox("llama")
    box.add("i-1", "rank 1 was killed", 0.0)
    box.add("i-2", "node n7 is lost", 0.5)
    box.add("i-1", "worker_crash", 1.5)
    assert [one.incident for one in box.due(2.9)] == ["i-2"]
    assert [one.lines for one in box.due(3.5)] == [("rank 1 was killed", "worker_crash")]
    assert not list(box.due(100.0))


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
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
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


def address_of(server: http.server.HTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/services/SECRET"


def address_file(tmp_path: Path, server: http.server.HTTPServer) -> str:
    file = tmp_path / "webhook"
    file.write_text(f"{address_of(server)}\n")
    return str(file)


def program(tmp_path: Path, body: str, name: str = "tell") -> str:
    file = tmp_path / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o700)
    return str(file)


def test_a_webhook_gets_slacks_form(tmp_path: Path, service: http.server.HTTPServer) -> None:
    sender(address_file(tmp_path, service))(MESSAGE)
    sender(address_of(service))(MESSAGE)
    assert service.got == [{"text": "llama: rank 1 was killed"}] * 2  # type: ignore[attr-defined]


def test_a_redirected_message_is_not_delivered(service: http.server.HTTPServer) -> None:
    service.answers = [302]  # type: ignore[attr-defined]
    with pytest.raises(urllib.error.HTTPError):
        sender(address_of(service))(MESSAGE)


def test_a_program_gets_all_of_it_as_json(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sender(program(tmp_path, f"cat > {out}"))(MESSAGE)
    assert json.loads(out.read_text())["incident"] == "i-1"
    with pytest.raises(Exception, match="exit status 3"):
        sender(program(tmp_path, "exit 3"))(MESSAGE)


def test_what_is_no_address_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "hook").write_text("file:///etc/passwd")
    with pytest.raises(OSError, match="holds no address"):
        sender(str(tmp_path / "hook"))(MESSAGE)


@pytest.mark.parametrize("by_file", [True, False])
def test_the_end_of_the_job_is_told_and_a_failure_is_logged_without_the_address(
    tmp_path: Path, service: http.server.HTTPServer, caplog: pytest.LogCaptureFixture, by_file: bool
) -> None:
    service.answers = [503]  # type: ignore[attr-defined]
    to = address_file(tmp_path, service) if by_file else address_of(service)
    notifier = Notifier(NotifySettings(to=to), "llama")
    notifier.add(Note(text="rank 1 was killed", incident="i-1", loud=True))
    notifier.add_end(COMPLETE)
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


def test_one_that_hangs_holds_no_other_up(tmp_path: Path, service: http.server.HTTPServer) -> None:
    hangs = program(tmp_path, "sleep 60")
    notifier = Notifier(NotifySettings(to=(hangs, address_of(service))), "llama")
    notifier.add_end(COMPLETE)
    asyncio.run(asyncio.wait_for(notifier.stop(), 20))
    assert [one["text"] for one in service.got] == ["llama: the run is complete"]  # type: ignore[attr-defined]


def test_in_a_storm_people_get_few_messages_and_the_end(service: http.server.HTTPServer) -> None:
    notifier = Notifier(NotifySettings(to=address_of(service)), "llama")
    for number in range(20_000):
        notifier.add(Note(text=f"rank {number} was killed", incident=f"i-{number % 500}", loud=True))
    notifier.add_end(COMPLETE)
    asyncio.run(notifier.stop())
    texts = [one["text"] for one in service.got]  # type: ignore[attr-defined]
    assert len(texts) <= IN_AN_HOUR + 1
    assert "the run is complete" in texts[-1]
    assert "more: see" in texts[-1]


def test_what_was_left_out_is_told_when_there_is_room_again() -> None:
    box = Outbox("llama")
    for number in range(IN_AN_HOUR + 10):
        box.add(f"i-{number}", "again", 0.0)
    assert len(list(box.due(5.0))) == IN_AN_HOUR
    assert list(box.due(3000.0)) == []
    assert [(one.lines, one.left_out) for one in box.due(4000.0)] == [((), 10)]
    assert list(box.due(4001.0)) == []


# ----- a service that does not answer for long -----


class _Down:
    """Takes what it is sent only when it is up."""

    def __init__(self) -> None:
        self.error: Exception | None = URLError(ConnectionRefusedError())
        self.got: list[Message] = []
        self.tries = 0

    def __call__(self, message: Any) -> None:
        self.tries += 1
        if self.error is not None:
            raise self.error
        self.got.append(message)


def recipient(service: _Down) -> Recipient:
    found = Recipient("/bin/true")
    found._send = service
    return found


def tried(one: Recipient, times: int) -> None:
    async def send() -> None:
        for _ in range(times):
            if one.waiting:
                await one.send_once()

    asyncio.run(send())


def test_what_could_not_be_sent_comes_late_in_one_message() -> None:
    service = _Down()
    one = recipient(service)
    one.add(MESSAGE, 3600.0)
    tried(one, 40)
    one.add(Message(job="llama", incident="i-2", lines=("node n7 is lost",), left_out=3), 7200.0)
    service.error = None
    tried(one, 5)
    (told,) = service.got
    assert told.lines[1:] == ("01:00 UTC: rank 1 was killed", "02:00 UTC: node n7 is lost")
    assert told.left_out == 3
    one.add(MESSAGE, 7300.0)
    tried(one, 1)
    assert service.got[1] == MESSAGE, "and then as ever"


def test_what_is_kept_is_bounded_in_number_and_time() -> None:
    service = _Down()
    one = recipient(service)
    for number in range(3 * GROUPS):
        one.add(Message(job="llama", incident=f"i-{number}", lines=("x",)), float(number))
    assert len(one.waiting) == GROUPS
    one.add(MESSAGE, 2 * KEPT_S)
    assert [kept.message for kept in one.waiting] == [MESSAGE]
    tried(one, 3)
    service.error = None
    tried(one, 1)
    assert service.got[0].left_out == 3 * GROUPS


@pytest.mark.parametrize("error", [TimeoutError(), ConnectionResetError()])
def test_what_may_have_come_is_sent_few_times(error: Exception) -> None:
    service = _Down()
    service.error = error
    one = recipient(service)
    one.add(MESSAGE, 0.0)
    tried(one, 20)
    assert (service.tries, list(one.waiting)) == (PERHAPS_MOST, [])


def test_each_message_has_its_own_tries() -> None:
    service = _Down()
    service.error = TimeoutError()
    one = recipient(service)
    for number in range(PERHAPS_MOST):
        one.add(Message(job="llama", incident=f"i-{number}", lines=(f"line {number}",)), 0.0)
        tried(one, 1)
    assert [kept.message.incident for kept in one.waiting] == ["i-1", "i-2"], "those were tried less often"
    service.error = None
    tried(one, 1)
    assert service.got[0].left_out == 1, "of what was given up, a person hears at least that there was something"


def test_what_comes_while_a_try_hangs_is_tried_at_once() -> None:
    service = _Down()
    one = recipient(service)
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(_: Any) -> None:
        one._send = service
        hangs.set()
        assert goes_on.wait(60.0)
        raise URLError(ConnectionRefusedError())

    async def story() -> None:
        one.add(MESSAGE, 0.0)
        tried_later = asyncio.create_task(one.deliver())
        await asyncio.to_thread(hangs.wait, 60.0)
        one.add(Message(job="llama", incident="i-2", lines=("node n7 is lost",)), 1.0)
        service.error = None
        goes_on.set()
        await asyncio.wait_for(tried_later, 60.0)

    one._send, one._failed = hang, 5  # the next try would be in an hour
    asyncio.run(story())
    assert [line for told in service.got for line in told.lines][-1].endswith("node n7 is lost")


def test_a_message_that_a_service_refuses_holds_no_other_up() -> None:
    service = _Down()
    service.error = HTTPError("http://x", 400, "invalid_payload", HTTPMessage(), None)
    one = recipient(service)
    one.add(MESSAGE, 0.0)
    tried(one, 20)
    assert (service.tries, list(one.waiting)) == (len(TRIES_S), [])


# ----- the dead man's switch -----


def test_a_dead_mans_switch_is_told_that_the_controller_lives(service: http.server.HTTPServer) -> None:
    notifier = Notifier(NotifySettings(to=f"alive:{address_of(service)}"), "llama", lambda: "RUNNING, step 7")

    async def live() -> None:
        running = asyncio.create_task(notifier.run())
        notifier.add(Note(text="rank 1 was killed", incident="i-1", loud=True))
        while not service.got:  # type: ignore[attr-defined]
            await asyncio.sleep(0.02)
        running.cancel()
        await notifier.stop()

    asyncio.run(asyncio.wait_for(live(), 60))
    assert service.got == [  # type: ignore[attr-defined]
        {"text": "llama: RUNNING, step 7", "job": "llama", "alive": True},
        {"text": "llama: its controller ends", "job": "llama", "alive": False},
    ]


# ----- mail -----


def test_a_program_called_sendmail_takes_mail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "letter"
    program(tmp_path, f'echo "$@" > {out}; cat >> {out}', "sendmail")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sender("mailto:ann@example.org,bob@example.org")(MESSAGE)
    first, _, letter = out.read_text().partition("\n")
    told = email.message_from_string(letter, policy=email.policy.default)
    assert first == "-i -- ann@example.org bob@example.org"
    assert told["Subject"] == "[unbroken] llama: rank 1 was killed"
    assert told["References"] == letter_of(mail_address("mailto:x@y"), MESSAGE)["References"]
    assert told.get_content() == "llama: rank 1 was killed\n"


def test_a_mail_server_takes_mail() -> None:
    from aiosmtpd.smtp import SMTP

    class Keep:
        letters: ClassVar[list[Any]] = []

        async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:
            self.letters.append(envelope)
            return "250 OK"

    async def live() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: SMTP(Keep()), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        notifier = Notifier(NotifySettings(to=f"mailto:ann@example.org?server=127.0.0.1:{port}"), "llama")
        notifier.add_end(COMPLETE)
        await notifier.stop()
        server.close()

    asyncio.run(live())
    assert [one.rcpt_tos for one in Keep.letters] == [["ann@example.org"]]
    assert b"the run is complete" in Keep.letters[0].content


def test_a_log_line_makes_no_header() -> None:
    hostile = Message(job="llama\nBcc: eve@example.org", incident="i-1\r\nX: y", lines=("\udc80 \x1b[2J",))
    letter = email.message_from_bytes(bytes(letter_of(mail_address("mailto:x@y"), hostile)))
    assert set(letter.keys()) == {
        *("To", "Subject", "Auto-Submitted", "References"),
        *("Content-Type", "Content-Transfer-Encoding", "MIME-Version"),
    }


@pytest.mark.parametrize(
    "to",
    [
        *("mailto:", "mailto:ann", "mailto:-oQ/tmp@x", "mailto:ann@x?cc=bob@y", "mailto:ann@x?server=h:x"),
        *("mailto:ann@x,,bob@x", "mailto:ann@x%0aBcc:eve@y", "https://", "alive:mailto:ann@x"),
    ],
)
def test_what_is_no_address_is_refused_before_the_start(to: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("notify.to")):
        list(check_notify(NotifySettings(to=to)))


def test_addresses_stay_what_they_are_and_files_become_absolute(tmp_path: Path) -> None:
    given = ("hook", "alive:bin/ping", "mailto:ann@x", "https://h/S", "alive:https://h/S")
    settings = Settings(notify=NotifySettings(to=given))
    there = (f"{tmp_path}/hook", f"alive:{tmp_path}/bin/ping", "mailto:ann@x", "https://h/S", "alive:https://h/S")
    assert absolute(settings, tmp_path).notify.addresses == there
    assert absolute(Settings(), tmp_path).notify.addresses == ()
    assert [*check_notify(NotifySettings(to=str(tmp_path / "no")))]


def test_only_the_host_of_a_webhook_is_shown() -> None:
    assert shown("https://hooks.example.org/T0/SECRET") == "https://hooks.example.org/..."
    assert shown("alive:https://me:SECRET@ping.example.org/x") == "alive:https://ping.example.org/..."
    assert shown("mailto:ann@example.org") == "mailto:ann@example.org"
    assert shown("alive:/home/ann/ping") == "alive:/home/ann/ping"
