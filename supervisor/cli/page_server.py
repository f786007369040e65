"""What `unbroken page` serves: the job as a page in a browser, served by this process on the loopback address.

The browser knows neither the job's token nor the controller: this process asks for it, as every other command does, so
a job that has ended opens from its journal. Who knows the random key in the address may act as this user.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from supervisor.cli.job_commands import (
    JobHandle,
    curve_from_journal,
    dry_run_answer,
    incidents_from_journal,
    read_timeline,
    send,
    status_from_journal,
)
from supervisor.cli.nodes import ledger_answer
from supervisor.cli.output import operator_name
from supervisor.cli.watch import differs
from supervisor.errors import CommandDenied, ControllerUnreachable, UnbrokenError
from supervisor.messages import CommandRequest

FILES = Path(__file__).with_name("page_files")
CONTENT = {
    "": ("page.html", "text/html"),
    "page.js": ("page.js", "text/javascript"),
    "charts.js": ("charts.js", "text/javascript"),
    "ranks.js": ("ranks.js", "text/javascript"),
    "page.css": ("page.css", "text/css"),
}
LOOK_EVERY_S = 0.5
LOOK_PART = 0.05
"""At most so much of the time is spent on reading: the status of thousands of nodes costs the controller's CPU."""
LOOK_RARELY_S = 5.0
ALIVE_EVERY_S = 10.0
"""So often a stream says that it lives; a browser that is gone is noticed then."""
SOCKET_S = 30.0
BODY_BYTES = 64 << 10
STREAMS = 32
AUDIT = ("override_given",)
"""Kinds of rows that tell who asked for what, also where another row tells what came of it."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageCommand(msgspec.Struct, forbid_unknown_fields=True):
    """What the page's buttons send."""

    command: str
    argument: str = ""
    reason: str = ""
    dry_run: bool = True
    agreed: dict[str, Any] | None = None
    """The answer to the dry run that somebody has said yes to."""


class JobReader:
    """The answers about one job. Its journal is read again only when it has changed."""

    def __init__(self, job: JobHandle) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[object, dict[str, Any]]] = {}

    def read(self, path: str, otherwise: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Raises UnbrokenError."""
        try:
            return self._job.client().get(path)
        except ControllerUnreachable:
            if self._job.folder is None:
                raise
        except CommandDenied:
            if not self._job.is_gone_from_its_port:
                raise
        with self._lock:  # the journal is folded by one thread at a time
            version = _version(self._job.folder)
            if path not in self._kept or self._kept[path][0] != version:
                self._kept[path] = version, self._job.by_journal(otherwise)
            return self._kept[path][1]

    def status(self) -> dict[str, Any]:
        return self.read("/v1/status", status_from_journal)

    def incidents(self, _: int) -> dict[str, Any]:
        return self.read("/v1/incidents", incidents_from_journal)

    def curve(self, _: int) -> dict[str, Any]:
        return self.read("/v1/curve", curve_from_journal)

    def ledger(self, _: int) -> dict[str, Any]:
        """The nodes of which there is something to tell, at most 200."""
        answer = ledger_answer()
        told = [one for one in answer["nodes"] if one["cordons"] or one["proposals"] or one["lemon"] or one["score"]]
        return {**answer, "nodes": told[:200], "left_out": len(answer["nodes"]) - len(told[:200])}

    def timeline(self, since: int) -> dict[str, Any]:
        """Rows after `since`, without details but for commands; at most the newest 2,000."""
        answer = read_timeline(self._job, since)
        rows = [row for row in answer["rows"] if row["seq"] > since and (not row["detail"] or row["kind"] in AUDIT)]
        return {**answer, "rows": rows[-2000:]}

    def act(self, asked: PageCommand) -> dict[str, Any]:
        """Carry out an operator's command, or say what it would do. Raises UnbrokenError and ValidationError."""
        fields = {"command": asked.command, "argument": asked.argument, "reason": asked.reason, "by": operator_name()}
        look = msgspec.convert(fields | {"dry_run": True}, CommandRequest)
        if asked.dry_run:
            return dry_run_answer(look, self._job)
        if asked.agreed is not None and differs(would := dry_run_answer(look, self._job), asked.agreed):
            raise UnbrokenError(f"Nothing was done: it would do something else now.\n{would['would']}")
        return send(msgspec.structs.replace(look, dry_run=False), self._job)


def _version(folder: Path | None) -> object:
    assert folder is not None
    files = [folder] if folder.is_file() else sorted(folder.glob("journal.*.jsonl"))
    return [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]


class Feed:
    """Reads the status again and again while somebody looks, and wakes those when it has changed."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read
        self._changed = threading.Condition()
        self._latest: dict[str, bytes] = {}
        self._version = 0
        self._watchers = 0
        self._reading = False

    def parts(self) -> Iterator[dict[str, bytes]]:
        """What has changed since the last part, event by event; empty when nothing has for a while."""
        with self._changed:
            full = self._watchers >= STREAMS
        if full:
            yield {"problem": msgspec.json.encode(f"{STREAMS} pages of this job are open: close some of them")}
            return
        with self._changed:
            self._watchers += 1
            if not self._reading:
                self._reading = True
                threading.Thread(target=self._look, daemon=True).start()
        sent: dict[str, bytes] = {}
        version = 0
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._version != version, ALIVE_EVERY_S)  # noqa: B023
                    version, latest = self._version, self._latest
                part = {name: data for name, data in latest.items() if sent.get(name) != data}
                sent = latest
                yield part
        finally:
            with self._changed:
                self._watchers -= 1

    def _look(self) -> None:
        while True:
            begun = time.monotonic()
            try:
                found = events(self._read())
            except UnbrokenError as error:
                found = {**self._latest, "problem": msgspec.json.encode(str(error))}
            except Exception as error:  # of a file that went, or of an answer of another version: pages go on asking
                problem = f"the job cannot be read: {type(error).__name__}: {error}"
                found = {**self._latest, "problem": msgspec.json.encode(problem)}
            with self._changed:
                if found != self._latest:
                    self._latest = found
                    self._version += 1
                    self._changed.notify_all()
                if not self._watchers:
                    self._reading = False
                    return
            time.sleep(pause_s(time.monotonic() - begun))


def pause_s(took_s: float) -> float:
    """Until the next look, after one that took so long."""
    return max(LOOK_EVERY_S, min(took_s / LOOK_PART, LOOK_RARELY_S))


def events(status: dict[str, Any]) -> dict[str, bytes]:
    """The status as events that change for themselves: thousands of nodes are not sent for each step."""
    rest = {key: value for key, value in status.items() if key not in ("nodes", "checkpoints")}
    parts = {"status": rest, "nodes": status["nodes"], "checkpoints": status["checkpoints"], "problem": ""}
    return {name: msgspec.json.encode(value) for name, value in parts.items()}


class PageServer(ThreadingHTTPServer):
    """One job's page."""

    daemon_threads = True

    def __init__(self, port: int, reader: JobReader) -> None:
        """Raises OSError: the port is taken."""
        super().__init__(("127.0.0.1", port), _Requests)
        self.key = secrets.token_urlsafe(18)
        self.reader = reader
        self.feed = Feed(reader.status)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{self.key}/"

    def handle_error(self, *_: object) -> None:
        """A browser that hangs up is no fault."""


class _Requests(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_S
    server_version = "unbroken"
    sys_version = ""

    def do_GET(self) -> None:
        path = self._path()
        answers: dict[str, Callable[[int], dict[str, Any]]] = {
            "api/incidents": self.server.reader.incidents,
            "api/timeline": self.server.reader.timeline,
            "api/curve": self.server.reader.curve,
            "api/ledger": self.server.reader.ledger,
        }
        if path is None:
            self._give(
                HTTPStatus.NOT_FOUND, b"there is no such page: use the whole address that was printed\n", "text/plain"
            )
        elif path in CONTENT:
            file, kind = CONTENT[path]
            self._give(HTTPStatus.OK, (FILES / file).read_bytes(), kind)
        elif path == "api/events":
            self._stream()
        elif path in answers:
            since = parse_qs(urlsplit(self.path).query).get("since", ["0"])[0]
            self._answer(lambda: answers[path](int(since) if since.isdecimal() else 0))
        else:
            self._give(HTTPStatus.NOT_FOUND, b"there is no such page\n", "text/plain")

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length", "")
        is_json = self.headers.get("Content-Type", "") == "application/json"  # no form of another site can send this
        if self._path() != "api/command" or not is_json or not size.isdecimal() or int(size) > BODY_BYTES:
            self.close_connection = True
            self._give(HTTPStatus.BAD_REQUEST, b"not a command\n", "text/plain")
            return
        body = self.rfile.read(int(size))
        self._answer(lambda: self.server.reader.act(msgspec.json.decode(body, type=PageCommand)))

    def _path(self) -> str | None:
        """The path behind the secret key; None without the key, or for another host name (DNS rebinding)."""
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        key, _, path = urlsplit(self.path).path.lstrip("/").partition("/")
        known = hmac.compare_digest(key.encode(errors="replace"), self.server.key.encode())
        return path if known and host in LOOPBACK else None

    def _answer(self, ask: Callable[[], dict[str, Any]]) -> None:
        """What could not be had or done is an answer too: `error` says why."""
        try:
            answer = ask()
        except (UnbrokenError, msgspec.DecodeError, msgspec.ValidationError) as error:
            answer = {"error": str(error)}
        self._give(HTTPStatus.OK, msgspec.json.encode(answer), "application/json")

    def _give(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self) -> None:
        """Server-sent events, until the browser goes."""
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for part in self.server.feed.parts():
            lines = [b"event: " + name.encode() + b"\ndata: " + data + b"\n\n" for name, data in part.items()]
            self.wfile.write(b"".join(lines) or b": alive\n\n")
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """The address, which holds the secret key, is not logged."""
