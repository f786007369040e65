"""Messages to people, without Alertmanager: to a webhook that takes Slack's form, by mail, or by a program.

What the job tells loudly goes out, grouped by incident, and never more often than a person can read. Nothing waits for
it: a service that does not answer gets its messages late, and costs no recovery. The webhook's address is a secret: no
log has it. A dead man's switch is told each minute that the controller lives: who misses that knows that it does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.message
import errno
import getpass
import logging
import os
import re
import shutil
import smtplib
import socket
import ssl
import subprocess
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Final, NamedTuple
from urllib.error import URLError
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from diagnosis.signals import clean_line
from diagnosis.text import redact
from supervisor import messages as m
from supervisor.blocking import BlockingCalls, timeout
from supervisor.config import ALIVE, MAIL, WEB, NotifySettings
from supervisor.errors import ConfigError
from supervisor.notes import text_of
from supervisor.view import utc

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
"""From one try to the next of a message that could not be sent,"""
LATER_S: Final = (60.0, 300.0, 900.0, 3600.0)
"""and then, the last again and again."""
KEPT_S: Final = 86400.0
REFUSED: Final = (400, 413, 422)
"""Answers of a webhook that will not take this message later either."""
PERHAPS_MOST: Final = 3
"""A message that was sent so often, each time without an answer, is given up: it may have come each time."""
SERVICE_S: Final = 12.0
"""A service, or a program, has so long to answer,"""
DEADLINE_S: Final = 60.0
"""and a try takes so long at most, with the search for its name."""
LOOK_S: Final = 0.25
LAST_S: Final = 3.0
"""So long the controller's end waits for the last message."""
ALIVE_EVERY_S: Final = 60.0
SUBJECT_CHARS: Final = 120
_NO_ANSWER: Final = (ConnectionResetError, BrokenPipeError, RemoteDisconnected, subprocess.TimeoutExpired)
"""It was sent, and may have been delivered. (Who was not reached at all is an URLError.)"""
_PERSON: Final = re.compile(r"[\w.+%][\w.+%-]*@[\w.-]+", re.ASCII)


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


class LifeSign(msgspec.Struct, frozen=True, kw_only=True):
    """What a dead man's switch is told."""

    job: str
    text: str
    alive: bool
    """False: the job has ended, or goes on with another controller. It is not told again."""


class Outbox:
    """Which lines make a message, and when it may go out. Decides, and does nothing."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._groups: dict[str, tuple[float, float, list[str]]] = {}
        """Incident -> when it began, when the last line came, the lines."""
        self._sent: deque[float] = deque()
        self._left_out = 0

    def add(self, incident: str, text: str, now: float) -> None:
        begun, _, lines = self._groups.get(incident, (now, now, []))
        if len(lines) >= LINES or (incident not in self._groups and len(self._groups) >= GROUPS):
            self._left_out += 1
            return
        self._groups[incident] = begun, now, [*lines, redact(text)[:LINE_CHARS]]

    def due(self, now: float) -> Iterator[Message]:
        for incident, (begun, last, lines) in list(self._groups.items()):
            if now - last < QUIET_S and now - begun < LONGEST_S:
                continue
            del self._groups[incident]
            if self._may_send(now):
                yield self._message(incident, lines, now)
            else:
                self._left_out += len(lines)
        if self._left_out and not self._groups and self._may_send(now):
            yield self._message("", [], now)  # nobody should take silence for peace

    def last(self, text: str, now: float) -> Iterator[Message]:
        """Everything that waits, and how it ended. The end is told, however many messages there were."""
        for incident, (_, _, lines) in self._groups.items():
            if self._may_send(now):
                yield self._message(incident, lines, now)
            else:
                self._left_out += len(lines)
        self._groups.clear()
        if text:
            yield self._message("", [redact(text)[:LINE_CHARS]], now)

    def _may_send(self, now: float) -> bool:
        while self._sent and now - self._sent[0] >= HOUR_S:
            self._sent.popleft()
        return len(self._sent) < IN_AN_HOUR

    def _message(self, incident: str, lines: list[str], now: float) -> Message:
        self._sent.append(now)
        left_out, self._left_out = self._left_out, 0
        return Message(job=self._job, incident=incident, lines=tuple(lines), left_out=left_out)


class Kept(msgspec.Struct):
    """A message that waits for its recipient."""

    at: float
    """Since when (Unix time)."""
    message: Message
    perhaps: int = 0
    """Tries that may have delivered it."""


def late(kept: Sequence[Kept], lost: int) -> Message:
    """One message for all that could not be sent before. `lost`: messages that were not kept."""
    newest = kept[-1].message
    told = [f"{utc(one.at):%H:%M} UTC: {line}" for one in kept for line in one.message.lines]
    since = f"{utc(kept[0].at):%Y-%m-%d %H:%M} UTC"
    return Message(
        job=newest.job,
        incident=newest.incident if len({one.message.incident for one in kept}) == 1 else "",
        lines=(f"late, for it could not be delivered since {since}:", *told[-LINES:]),
        left_out=lost + max(0, len(told) - LINES) + sum(one.message.left_out for one in kept),
    )


class Recipient:
    """One address, and what waits for it: one that does not answer holds no other up.

    What could not be sent is kept for a day, and sent in one message when the address answers again. A duplicate is
    worse than a late message: one that may have come, although no answer did, is sent again a few times only, and late.
    """

    def __init__(self, to: str) -> None:
        self.waiting: deque[Kept] = deque()
        self._send = sender(to)
        self._shown = shown(to)
        self._calls = BlockingCalls("notify", most=2)  # the last message does not wait for one that hangs
        self._problem = ""
        self._is_refused = self._has_no_answer = False
        self._failed = 0
        """Tries in a row."""
        self._lost = 0
        self._fresh = asyncio.Event()
        """Another message: what waits is tried at once."""

    def add(self, message: Message, now: float) -> None:
        self.waiting.append(Kept(now, message))
        self._fresh.set()
        while len(self.waiting) > GROUPS or now - self.waiting[0].at > KEPT_S:
            self.waiting.popleft()
            self._lost += 1

    async def deliver(self) -> None:
        """Send what waits, however long it takes. One that is cut off in the middle of it is sent again."""
        waits_s = (*TRIES_S, *LATER_S)
        while self.waiting:
            with contextlib.suppress(asyncio.TimeoutError):
                async with timeout(waits_s[min(self._failed, len(waits_s) - 1)]):
                    await self._fresh.wait()
            self._fresh.clear()  # one that comes while this is sent is tried at once, too
            await self.send_once()

    async def send_once(self, deadline_s: float = DEADLINE_S) -> bool:
        """Try to send the oldest; all together where that has failed for a while."""
        is_late = self._failed >= len(TRIES_S)
        kept = list(self.waiting) if is_late else [self.waiting[0]]
        message = late(kept, self._lost) if is_late else kept[0].message
        sent = await self.tell(message, deadline_s)
        self._failed = 0 if sent else self._failed + 1
        for one in kept:
            one.perhaps += self._has_no_answer
        is_refused = self._is_refused and self._failed >= len(TRIES_S)
        done = {id(one) for one in kept if sent or is_refused or one.perhaps >= PERHAPS_MOST}
        if sent and is_late:
            self._lost = 0
        self._lost += 0 if sent else sum(id(one) in done for one in self.waiting)
        self.waiting = deque(one for one in self.waiting if id(one) not in done)
        return sent

    async def send_all(self, deadline_s: float) -> None:
        """Each once, for there is no later."""
        for _ in range(len(self.waiting)):
            if self.waiting and not await self.send_once(deadline_s):
                self.waiting.rotate(-1)  # the others have their turn

    async def tell(self, message: Message | LifeSign, deadline_s: float = DEADLINE_S) -> bool:
        self._is_refused = self._has_no_answer = False
        try:
            await self._calls.run(lambda: self._send(message), deadline_s)
        except Exception as error:  # of the network, of the command, of the service's answer; or its time is up
            is_late = isinstance(error, (asyncio.TimeoutError, TimeoutError))
            problem = "it does not answer" if is_late else _reason(error)
            if is_late or isinstance(error, _NO_ANSWER):
                self._has_no_answer = True
                self._failed = max(self._failed, len(TRIES_S) - 1)
            self._is_refused = getattr(error, "code", None) in REFUSED
        else:
            problem = ""
        if problem != self._problem:
            log.warning("notifications by %s: %s", self._shown, problem or "they can be sent again")
        self._problem = problem
        return not problem


class Notifier:
    """Sends what the outbox gives to every address."""

    def __init__(self, settings: NotifySettings, job: str, state: Callable[[], str] = str) -> None:
        """`state`: how the job is, in a few words."""
        self._job, self._state = job, state
        self._outbox = Outbox(job)
        self._end = ""
        self._people = [Recipient(to) for to in settings.addresses if not to.startswith(ALIVE)]
        self._switches = [Recipient(to.removeprefix(ALIVE)) for to in settings.addresses if to.startswith(ALIVE)]

    def add(self, note: m.Note) -> None:
        self._outbox.add(note.incident, text_of(note), time.monotonic())

    def add_end(self, outcome: m.Outcome) -> None:
        self._end = outcome.line

    async def run(self) -> None:
        await asyncio.gather(self._hand_out(), *map(self._keep_sending, self._people), *map(self._ping, self._switches))

    async def _hand_out(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for message in self._outbox.due(time.monotonic()):
                for one in self._people:
                    one.add(message, time.time())

    async def _keep_sending(self, one: Recipient) -> None:
        while True:
            await one.deliver()
            await asyncio.sleep(LOOK_S)

    async def _ping(self, switch: Recipient) -> None:
        while True:
            await switch.tell(LifeSign(job=self._job, text=f"{self._job}: {self._state()}", alive=True))
            await asyncio.sleep(ALIVE_EVERY_S)

    async def stop(self) -> None:
        """The last message says how the job ended: it is tried once, for a short while."""
        for message in self._outbox.last(self._end, time.monotonic()):
            for one in self._people:
                one.add(message, time.time())
        ended = LifeSign(job=self._job, text=f"{self._job}: {self._end or 'its controller ends'}", alive=False)
        calls = [one.send_all(LAST_S) for one in self._people]
        calls += [self._tell_last(one, ended) for one in self._switches]
        if calls:
            await asyncio.wait([asyncio.ensure_future(call) for call in calls], timeout=LAST_S)

    @staticmethod
    async def _tell_last(switch: Recipient, ended: LifeSign) -> None:
        await switch.tell(ended, LAST_S)


def _reason(error: Exception) -> str:
    """Without the address, which is a secret: urllib's errors may name it."""
    code = getattr(error, "code", getattr(error, "returncode", ""))
    reason = getattr(error, "strerror", "") or getattr(getattr(error, "reason", None), "strerror", "")
    return " ".join(filter(None, (type(error).__name__, str(code), str(reason))))


# ----- the addresses -----


def sender(to: str) -> Callable[[Message | LifeSign], None]:
    """Sends one message, and raises OSError, ValueError or SubprocessError when it could not."""

    def send(message: Message | LifeSign) -> None:
        if to.startswith(WEB):
            post(to, web_form(message))
        elif to.startswith(MAIL):
            mail(mail_address(to), message)
        elif os.access(to, os.X_OK):
            _run([to], msgspec.json.encode({"text": message.text} | msgspec.to_builtins(message)))
        else:
            address = Path(to).read_text().strip()
            if not address.startswith(WEB):
                raise OSError(errno.EINVAL, "it holds no address, and cannot be executed", to)
            post(address, web_form(message))

    return send


def shown(to: str) -> str:
    """For people and logs: of a webhook, only the host."""
    before = ALIVE if to.startswith(ALIVE) else ""
    address = urlsplit(to.removeprefix(ALIVE))
    return f"{before}{address.scheme}://{address.hostname}/..." if address.scheme in ("http", "https") else to


def check_notify(settings: NotifySettings) -> Iterator[str]:
    """What is named and not there, in words: it may be there where the controller runs. Raises ConfigError for an
    address that cannot be one."""
    for given in settings.addresses:
        to = given.removeprefix(ALIVE)
        if to.startswith(WEB):
            if not urlsplit(to).hostname:
                raise ConfigError(f"notify.to: {shown(to)} has no host")
        elif to.startswith(MAIL):
            if given != to:
                raise ConfigError(f"notify.to: {given}: a mail each minute is too much: name a URL or a program")
            if not mail_address(to).server and not _sendmail():
                yield "notify.to: there is no sendmail here: name a mail server (`mailto:...?server=HOST`)"
        elif not os.access(to, os.R_OK):
            yield f"notify.to: {to} cannot be read here; without it nobody is told"


def _run(argv: list[str], data: bytes) -> None:
    silent = subprocess.DEVNULL
    subprocess.run(argv, input=data, stdout=silent, stderr=silent, timeout=SERVICE_S, check=True)


class _NotFollowed(urllib.request.HTTPRedirectHandler):
    """A redirected POST would be repeated as a GET without its message, and count as delivered: it is an error."""

    def redirect_request(self, *_: object) -> None:
        return None


def post(address: str, body: bytes) -> None:
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.build_opener(_NotFollowed).open(request, timeout=SERVICE_S) as answer:
        answer.read(1024)


def web_form(message: Message | LifeSign) -> bytes:
    more = {"job": message.job, "alive": message.alive} if isinstance(message, LifeSign) else {}
    return msgspec.json.encode({"text": escaped(message.text), **more})


def escaped(text: str) -> str:
    """For Slack's form: a log line must not call the whole channel (`<!channel>`) or hide a link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


# ----- mail -----


class MailAddress(NamedTuple):
    people: tuple[str, ...]
    server: str
    """Host and port of a server that takes it; empty: the sendmail of this node does."""


def mail_address(to: str) -> MailAddress:
    """Of `mailto:ann@example.org,bob@example.org?server=mail.example.org:25`. Raises ConfigError."""
    path, _, query = to.removeprefix(MAIL).partition("?")
    people, options = tuple(unquote(path).split(",")), parse_qs(query)
    wrong = [one for one in people if not _PERSON.fullmatch(one)]
    server = options.pop("server", [""])[-1]
    _, _, port = server.partition(":")
    if wrong or options or (port and not port.isdecimal()):
        what = ", ".join([*wrong, *options]) or server
        raise ConfigError(f"notify.to: {to} is no address for mail ({what}): mailto:NAME@HOST[,...][?server=HOST:PORT]")
    return MailAddress(people, server)


def mail(address: MailAddress, message: Message | LifeSign) -> None:
    letter = letter_of(address, message)
    if not address.server:
        if not (program := _sendmail()):
            raise OSError(errno.ENOENT, "there is no sendmail")
        _run([program, "-i", "--", *address.people], bytes(letter))
        return
    host, _, port = address.server.partition(":")
    letter["From"] = sender_name = f"{getpass.getuser()}@{socket.gethostname()}"
    try:
        there = smtplib.SMTP(host, int(port or 25), timeout=SERVICE_S)
    except OSError as error:
        raise URLError(error) from None  # as urllib does: it was not reached
    with there as server:
        server.ehlo()
        if server.has_extn("starttls"):
            # As mail servers do it: no certificate is asked for, since no password is sent.
            server.starttls(context=ssl._create_unverified_context())
        server.send_message(letter, sender_name, address.people)


def letter_of(address: MailAddress, message: Message | LifeSign) -> email.message.EmailMessage:
    """Mails about one incident are one conversation."""
    letter = email.message.EmailMessage()
    letter["To"] = ", ".join(address.people)
    letter["Subject"] = f"[unbroken] {clean_line(message.text.partition(chr(10))[0], SUBJECT_CHARS)}"
    letter["Auto-Submitted"] = "auto-generated"
    if isinstance(message, Message) and message.incident:
        words = "-".join(re.findall(r"[\w.]+", f"{message.job}-{message.incident}", re.ASCII))
        letter["References"] = f"<{words}@{socket.gethostname()}>"
    letter.set_content(message.text.encode(errors="replace").decode() + "\n")
    return letter


def _sendmail() -> str:
    folders = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/lib"])
    return shutil.which("sendmail", path=folders) or ""
