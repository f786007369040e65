"""Messages to people, without Alertmanager: to a webhook that takes Slack's form, or to a program of the site's.

What the job tells loudly goes out, grouped by incident, and never more often than a person can read. Nothing waits for
it: a service that does not answer costs a message, not a recovery. The webhook's address is a secret: no log has it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from diagnosis.text import redact
from supervisor import messages as m
from supervisor.blocking import BlockingCalls
from supervisor.config import NotifySettings
from supervisor.notes import text_of

log = logging.getLogger("unbroken.controller")

QUIET_S: Final = 2.0
"""A group goes out when nothing was added to it for so long,"""
LONGEST_S: Final = 10.0
"""or when it began so long ago."""
HOUR_S: Final = 3600.0
IN_AN_HOUR: Final = 30
"""Messages. What comes after them is counted, and told with the next one that may go out."""
LINES: Final = 20
LINE_CHARS: Final = 500
GROUPS: Final = 100
TRIES_S: Final = (0.0, 2.0, 15.0)
DEADLINE_S: Final = 15.0
LOOK_S: Final = 0.25
LAST_S: Final = 3.0
"""So long the controller's end waits for the last message."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What a person gets: the lines of one incident, or those that belong to none."""

    job: str
    incident: str
    lines: tuple[str, ...]
    left_out: int = 0
    """Lines that were told to nobody since the last message: there were too many."""

    @property
    def text(self) -> str:
        more = [f"({self.left_out} more: see `unbroken timeline`)"] if self.left_out else []
        return f"{self.job}: " + "\n".join([*self.lines, *more])


class Outbox:
    """Which lines make a message, and when it may go out. Decides, and does nothing."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._groups: dict[str, tuple[float, float, list[str]]] = {}
        """Incident -> when it began, when the last line came, the lines."""
        self._sent: deque[float] = deque()
        self._left_out = 0

    @property
    def is_empty(self) -> bool:
        return not self._groups

    def add(self, incident: str, text: str, now: float) -> None:
        begun, _, lines = self._groups.get(incident, (now, now, []))
        if len(lines) >= LINES or (incident not in self._groups and len(self._groups) >= GROUPS):
            self._left_out += 1
            return
        self._groups[incident] = begun, now, [*lines, redact(text)[:LINE_CHARS]]

    def due(self, now: float, *, everything: bool = False) -> Iterator[Message]:
        for incident, (begun, last, lines) in list(self._groups.items()):
            if not everything and now - last < QUIET_S and now - begun < LONGEST_S:
                continue
            while self._sent and now - self._sent[0] >= HOUR_S:
                self._sent.popleft()
            del self._groups[incident]
            if len(self._sent) >= IN_AN_HOUR:
                self._left_out += len(lines)
                continue
            self._sent.append(now)
            left_out, self._left_out = self._left_out, 0
            yield Message(job=self._job, incident=incident, lines=tuple(lines), left_out=left_out)


class Notifier:
    """Sends what the outbox gives, one after the other."""

    def __init__(self, settings: NotifySettings, job: str) -> None:
        self._send, self._to = sender(settings), settings.to
        self._outbox = Outbox(job)
        self._waiting: deque[Message] = deque(maxlen=GROUPS)
        self._calls = BlockingCalls("notify")
        self._problem = ""

    def add(self, note: m.Note) -> None:
        self._outbox.add(note.incident, text_of(note), time.monotonic())

    def add_end(self, outcome: m.Outcome) -> None:
        self._outbox.add("", outcome.line, time.monotonic())

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._waiting.extend(self._outbox.due(time.monotonic()))
            while self._waiting:
                await self._deliver(self._waiting.popleft(), TRIES_S)

    async def stop(self) -> None:
        """The last message says how the job ended: it is tried once, for a short while."""
        end = time.monotonic() + LAST_S
        self._waiting.extend(self._outbox.due(time.monotonic(), everything=True))
        while self._waiting and time.monotonic() < end:
            await self._deliver(self._waiting.popleft(), (0.0,), LAST_S)

    async def _deliver(self, message: Message, tries: tuple[float, ...], deadline_s: float = DEADLINE_S) -> None:
        for wait_s in tries:
            await asyncio.sleep(wait_s)
            try:
                await self._calls.run(lambda: self._send(message), deadline_s)
            except asyncio.TimeoutError:
                self._tell("it does not answer")
            except Exception as error:  # of the network, of the command, of the service's answer
                self._tell(_reason(error))
            else:
                self._tell("")
                return

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("notifications by %s: %s", self._to, problem or "they can be sent again")
        self._problem = problem


def _reason(error: Exception) -> str:
    """Without the address, which is a secret: urllib's errors may name it."""
    code = getattr(error, "code", getattr(error, "returncode", ""))
    reason = getattr(error, "strerror", "") or getattr(getattr(error, "reason", None), "strerror", "")
    return " ".join(filter(None, (type(error).__name__, str(code), str(reason))))


def sender(settings: NotifySettings) -> Callable[[Message], None]:
    """Sends one message, and raises OSError, ValueError or SubprocessError when it could not."""

    def send(message: Message) -> None:
        if os.access(settings.to, os.X_OK):
            data = msgspec.json.encode({"text": message.text} | msgspec.to_builtins(message))
            silent = subprocess.DEVNULL
            subprocess.run([settings.to], input=data, stdout=silent, stderr=silent, timeout=DEADLINE_S, check=True)
            return
        address = Path(settings.to).read_text().strip()
        if not address.startswith(("https://", "http://")):
            raise OSError(errno.EINVAL, "it holds no address, and cannot be executed", settings.to)
        post(address, msgspec.json.encode({"text": escaped(message.text)}))

    return send


def post(address: str, body: bytes) -> None:
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        answer.read(1024)


def escaped(text: str) -> str:
    """For Slack's form: a log line must not call the whole channel (`<!channel>`) or hide a link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
