"""What answers at a controller's address may be anything: its port may be another program's by now."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from supervisor.controller import client as client_module
from supervisor.controller.client import ControllerClient, CpuUse, why_silent
from supervisor.errors import CommandDenied, ControllerSilent, ControllerUnreachable, ControllerUnusable
from supervisor.messages import CommandRequest
from supervisor.wire.authentication import CHALLENGE_PATH, PROOF_HEADER, Authenticator, Exchange


def http_answer(body: bytes, status: str = "200 OK", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n%s\r\n%s" % (status.encode(), len(body), more, body)


class Controller:
    """What one proves, and how it signs its answers."""

    def __init__(self, token: str = "token") -> None:
        self._secret = Authenticator(token, epoch=1)
        self._exchange: Exchange | None = None

    def proof(self, asked: bytes, more: bytes = b"") -> bytes:
        """The answer to a challenge."""
        nonce = re.search(rb"Unbroken-Challenge: (\w+)", asked)
        assert nonce is not None
        answer = self._secret.answer(nonce[1].decode(), time.monotonic())
        self._exchange = Exchange(nonce[1].decode(), str(answer["nonce"]), 1)
        return http_answer(msgspec.json.encode(answer), more=more)

    def signed(self, body: bytes, status: str = "200 OK", more: bytes = b"") -> Callable[[bytes], bytes]:
        """An answer to what is asked after that."""

        def answer(asked: bytes) -> bytes:
            assert b"Authorization: Unbroken " in asked
            assert self._exchange is not None
            proof = self._secret.secret.answer_proof(self._exchange, int(status[:3]), body)
            return http_answer(body, status, more + f"{PROOF_HEADER}: {proof}\r\n".encode())

        return answer


Answer = bytes | Callable[[bytes], bytes]


def whole_request(connection: socket.socket) -> bytes:
    """Headers, and as much of a body as they say; empty at the end of the connection."""
    heard = b""
    while True:
        head, ended, body = heard.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if ended and len(body) >= (int(length[1]) if length is not None else 0):
            return heard
        more = connection.recv(65536)
        if not more:
            return b""
        heard += more


class Stranger:
    """A server that answers the first, second, ... request of a connection, and keeps what it hears."""

    def __init__(self, *answers: Answer, drip: bytes = b"", flood: bytes = b"", closes: bool = False) -> None:
        self.heard = b""
        self._answers, self._drip, self._flood, self._closes = answers, drip, flood, closes
        # Its own address: at 127.0.0.1 agents of other tests may look for a controller that is gone.
        host = f"127.1.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
        self._socket = socket.create_server((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._over = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        asked = 0
        while not self._over.is_set():
            with contextlib.suppress(OSError), self._socket.accept()[0] as connection:
                while said := whole_request(connection):
                    self.heard += said
                    if asked < len(self._answers):
                        answer = self._answers[asked]
                        connection.sendall(answer if isinstance(answer, bytes) else answer(said))
                    asked += 1
                    while (self._drip or self._flood) and asked >= len(self._answers) and not self._over.wait(0.02):
                        connection.sendall(self._drip)
                        while self._flood:
                            connection.sendall(self._flood)
                    if self._closes:
                        break

    def close(self) -> None:
        self._over.set()
        self._socket.close()


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stranger]]:
    monkeypatch.setattr(client_module, "ALIVE_S", 20.0)
    monkeypatch.setattr(client_module, "ANSWER_BYTES", 1 << 20)
    made: list[Stranger] = []

    def make(*answers: Answer, drip: bytes = b"", flood: bytes = b"", closes: bool = False) -> Stranger:
        made.append(Stranger(*answers, drip=drip, flood=flood, closes=closes))
        return made[-1]

    yield make
    for one in made:
        one.close()


OTHERS = {
    "an object": http_answer(b"{}"),
    "a list": http_answer(b"[]"),
    "a page": http_answer(b"<html>hello"),
    "not found": http_answer(b"nope", "404 Not Found"),
    "closes": http_answer(b"{}", more=b"Connection: close\r\n"),
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "long": http_answer(b" " * 200_000),
    "deep": http_answer(b"[" * 50_000),
    "elsewhere": http_answer(b"", "307 Go", b"Location: http://127.0.0.1:1/\r\n"),
}


@pytest.mark.parametrize("answer", OTHERS.values(), ids=OTHERS.keys())
def test_another_program_at_the_address_gets_no_token(stranger: Callable[..., Stranger], answer: bytes) -> None:
    other = stranger(answer, answer)
    with pytest.raises(ControllerUnreachable, match="no controller answers at"):
        ControllerClient(other.address, "secret-token").command(CommandRequest(command="stop", by="me"))
    assert CHALLENGE_PATH.encode() in other.heard
    assert b"secret-token" not in other.heard


def test_one_that_drips_is_not_waited_for(stranger: Callable[..., Stranger], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ALIVE_S", 0.4)
    other = stranger(b"HTTP/1.1 200 OK\r\n\r\n", drip=b" ")
    with pytest.raises(ControllerUnusable, match="hangs"):
        ControllerClient(other.address, "token").get("/v1/status")


@pytest.mark.parametrize(
    ("ran_s", "queued_s", "stopped", "kind", "kill"),
    [
        (0.1, 2.7, False, "is slow: it waits for a CPU", False),
        (2.9, 0.1, False, "is busy", True),
        (0.0, 0.1, False, "hangs", True),
        (0.1, 2.7, True, "hangs", True),
    ],
)
def test_one_that_only_waits_for_a_cpu_is_not_to_be_killed(
    ran_s: float, queued_s: float, stopped: bool, kind: str, kill: bool
) -> None:
    before = CpuUse(10.0, 5.0, 1.0, False)
    said = why_silent(before, CpuUse(13.0, 5.0 + ran_s, 1.0 + queued_s, stopped), "process 7 on n1")
    assert said.startswith(kind)
    assert ("kill -9" in said) == kill


def test_the_cpu_use_of_a_process_is_read() -> None:
    before = client_module._cpu_use(os.getpid())
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    after = client_module._cpu_use(os.getpid())
    assert before is not None
    assert after is not None
    assert after.ran_s - before.ran_s > 0.04
    assert not after.stopped
    assert client_module._cpu_use(2**22 + 1) is None


def test_an_answer_that_drips_is_no_answer(stranger: Callable[..., Stranger], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "WHOLE_S", 1.0)
    other = stranger(Controller().proof, b"HTTP/1.1 200 OK\r\n\r\n", drip=b" ")
    with pytest.raises(ControllerSilent, match="timed out"):
        ControllerClient(other.address, "token").command(CommandRequest(command="pause", by="me"))


def test_an_endless_answer_is_read_up_to_a_limit(stranger: Callable[..., Stranger]) -> None:
    other = stranger(Controller().proof, b"HTTP/1.1 200 OK\r\n\r\n", flood=b" " * 65536)
    with pytest.raises(ControllerUnreachable, match="something else does"):
        ControllerClient(other.address, "token").get("/v1/timeline?since=0")


def test_a_proxy_that_closes_after_each_answer_is_no_hindrance(stranger: Callable[..., Stranger]) -> None:
    close = b"Connection: close\r\n"
    controller = Controller()
    answers = (lambda asked: controller.proof(asked, close)), controller.signed(b'{"state":"IDLE"}', more=close)
    proxy = stranger(*answers, closes=True)
    assert ControllerClient(proxy.address, "token").get("/v1/status") == {"state": "IDLE"}


def test_what_it_refuses_is_told_in_its_words_cleaned(stranger: Callable[..., Stranger]) -> None:
    controller = Controller()
    other = stranger(controller.proof, controller.signed(b'{"error":"\\u001b[31mno\\u0007"}', "400 Bad Request"))
    with pytest.raises(CommandDenied) as denied:
        ControllerClient(other.address, "token").get("/v1/status")
    assert denied.value.status == 400
    assert "\x1b" not in str(denied.value)


@pytest.mark.parametrize(
    "address", ["", "h:x", "h:99999999", "[::1", "a b:1", "http://", "x" * 80 + ":1", "ftp://h:1", "h:1/../x"]
)
def test_an_address_that_is_none_is_told(address: str) -> None:
    with pytest.raises(ControllerUnreachable):
        ControllerClient(address, "token").get("/v1/status")


def test_one_that_does_not_know_the_token_is_asked_nothing(stranger: Callable[..., Stranger]) -> None:
    other = stranger(Controller("guessed").proof, Controller("guessed").proof)
    with pytest.raises(CommandDenied, match="this job's token") as denied:
        ControllerClient(other.address, "token").command(CommandRequest(command="stop", reason="why", by="me"))
    assert denied.value.status == 401
    assert b"Authorization" not in other.heard
    assert b"a reason" not in other.heard


@pytest.mark.parametrize("forged", [b'{"ok":true}', b'{"error":"no"}'])
def test_an_answer_that_is_not_signed_is_none(stranger: Callable[..., Stranger], forged: bytes) -> None:
    """Somebody between the two: the order may have come through, and its answer may be another's."""
    other = stranger(Controller().proof, http_answer(forged))
    with pytest.raises(ControllerSilent, match="not signed by the controller"):
        ControllerClient(other.address, "token").command(CommandRequest(command="pause", by="me"))


def test_a_controller_of_another_version_is_told_apart(stranger: Callable[..., Stranger]) -> None:
    other = stranger(http_answer(b'{"schema":1,"error":"this request needs the job\'s token"}', "401 Unauthorized"))
    with pytest.raises(ControllerUnusable, match="another version"):
        ControllerClient(other.address, "token").get("/v1/status")


def test_certificates_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ControllerUnusable, match=r"the certificates in .*none\.pem cannot be used"):
        ControllerClient("https://127.0.0.1:1", "token", str(tmp_path / "none.pem")).get("/v1/status")


def test_a_controller_that_only_another_host_reaches_is_told_as_that(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    told = {"address": "http://127.0.0.1:9", "epoch": 1, "host": "elsewhere", "pid": 1}
    (tmp_path / "controller.json").write_bytes(msgspec.json.encode(told))
    with pytest.raises(ControllerUnreachable, match="listens on elsewhere alone"):
        ControllerClient.of_job(tmp_path).get("/v1/status")


@pytest.mark.root
def test_among_jobs_of_several_users_ones_own_come_first() -> None:
    """And what another has closed is none, not an error."""
    with tempfile.TemporaryDirectory() as open_folder:
        jobs = Path(open_folder) / "unbroken-jobs"
        of_users = [("mine", 4001, 0o700), ("open", 4002, 0o755), ("shut", 4002, 0o700)]
        for number, (name, user, mode) in enumerate(of_users):
            (jobs / name / "epochs").mkdir(parents=True)
            journal = jobs / name / "journal.1.jsonl"
            journal.touch()
            os.utime(journal, (number, number))
            for path in (jobs / name, jobs / name / "epochs"):
                os.chown(path, user, user)
                path.chmod(mode)
        for folder in (Path(open_folder), jobs):
            folder.chmod(0o755)

        def found(user: int) -> str:
            read, write = os.pipe()
            if (pid := os.fork()) == 0:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
                os.write(write, client_module.find_job("", Path(open_folder)).name.encode())
                os._exit(0)
            os.close(write)
            os.waitpid(pid, 0)
            with open(read, "rb") as pipe:
                return pipe.read().decode()

        assert [found(user) for user in (4001, 4002, 4003)] == ["mine", "shut", "open"]
