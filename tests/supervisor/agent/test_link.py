"""The agent's end of the wire against ports that misbehave."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from supervisor.agent.link import ControllerAddress, Link, NoController, address_reader, token_reader
from supervisor.messages import (
    PROTOCOL,
    AgentMessage,
    Assignment,
    ClockReply,
    ControllerMessage,
    Heartbeat,
    Hello,
    JobSpec,
    decode_agent_message,
    encode,
)
from supervisor.wire.authentication import CHALLENGE_HEADER, CHALLENGE_PATH, Authenticator, Session

HELLO = Hello(protocol=PROTOCOL, node="n0", host="h", address="", spec=JobSpec(name="j"))
ANSWER = encode(Assignment(epoch=1, version=1, node="n0", role="member", attempt=1, stage="hold"))


class Sealed:
    """A controller's end of a WebSocket whose agent has proven itself."""

    def __init__(self, socket: web.WebSocketResponse, session: Session) -> None:
        self.socket = socket
        self.session = session

    async def receive_bytes(self) -> bytes:
        return self.session.into.open(await self.socket.receive_bytes())

    async def send_bytes(self, message: bytes) -> None:
        await self.socket.send_bytes(self.session.out.seal(message))

    async def frames(self) -> AsyncIterator[bytes]:
        async for message in self.socket:
            yield self.session.into.open(message.data)


Talk = Callable[[Sealed], Awaitable[None]]


class Port:
    """A WebSocket port where each connection is met by `talk`."""

    def __init__(self, talk: Talk, *, autoping: bool = True) -> None:
        self.address = ""
        self.met: list[float] = []
        self._talk = talk
        self._autoping = autoping
        self._authenticator = Authenticator("secret", epoch=1)
        self.challenges = 0
        self.hold = asyncio.Event()
        """No challenge is answered before it is set."""
        self.hold.set()

    async def challenge(self, request: web.Request) -> web.Response:
        self.challenges += 1
        await self.hold.wait()
        return web.json_response(self._authenticator.answer(request.headers[CHALLENGE_HEADER], time.monotonic()))

    async def meet(self, request: web.Request) -> web.WebSocketResponse:
        given = request.headers["Authorization"]
        exchange = self._authenticator.admit(given, "GET", "/v1/agent", b"", time.monotonic())
        assert exchange is not None
        socket = web.WebSocketResponse(autoping=self._autoping)
        await socket.prepare(request)
        self.met.append(time.monotonic())
        await self._talk(Sealed(socket, self._authenticator.secret.session(exchange, controller=True)))
        return socket


@asynccontextmanager
async def listening(talk: Talk, *, autoping: bool = True) -> AsyncIterator[Port]:
    port = Port(talk, autoping=autoping)
    app = web.Application()
    app.router.add_get(CHALLENGE_PATH, port.challenge)
    app.router.add_get("/v1/agent", port.meet)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield port
    finally:
        await runner.cleanup()


@asynccontextmanager
async def linked(link: Link, told: list[ControllerMessage] | None = None) -> AsyncIterator[Link]:
    heard = [] if told is None else told
    task = asyncio.create_task(link.run(heard.append))
    try:
        yield link
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.005)


def beat(seq: int, *, done: bool = False) -> Heartbeat:
    return Heartbeat(node="n0", incarnation=1, seq=seq, done=done)


def go(scenario: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, 100.0)

    asyncio.run(bounded())


def test_the_newest_heartbeat_is_sent_again_on_a_new_connection() -> None:
    async def scenario() -> None:
        seen: list[list[AgentMessage]] = []

        async def two_messages_then_cut(socket: Sealed) -> None:
            seen.append([decode_agent_message(await socket.receive_bytes()) for _ in range(2)])

        async with listening(two_messages_then_cut) as port, linked(link_to(port)) as link:
            for seq in (1, 2, 3):
                link.post(beat(seq))
            await until(lambda: len(seen) >= 3)
            for first, second in seen:
                assert isinstance(first, Hello)
                assert first.address == "127.0.0.1"
                assert isinstance(second, Heartbeat)
                assert second.asked_at is not None  # each new connection asks for the controller's clock
                assert msgspec.structs.replace(second, asked_at=None) == beat(3)
            assert link.connections >= 3

    go(scenario())


def link_to(port: Port, ping_s: float = 4.0) -> Link:
    return Link(lambda: ControllerAddress(port.address), lambda: "secret", HELLO, ping_s=ping_s)


def test_a_port_that_keeps_closing_is_tried_more_and_more_slowly() -> None:
    async def scenario() -> None:
        async def nothing(socket: Sealed) -> None:
            await socket.socket.close()

        async with listening(nothing) as port, linked(link_to(port)):
            await until(lambda: len(port.met) >= 10)
            pauses = [later - sooner for sooner, later in itertools.pairwise(port.met[:10])]
            assert min(pauses[-3:]) > min(pauses[:3])
            assert pauses[-1] > 0.1

    go(scenario())


def test_a_port_that_no_longer_answers_is_given_up() -> None:
    async def scenario() -> None:
        async def deaf(socket: Sealed) -> None:
            while not socket.socket.closed:
                await socket.socket.receive()

        async with listening(deaf, autoping=False) as port, linked(link_to(port, ping_s=0.4)) as link:
            await until(lambda: link.connected)
            await until(lambda: len(port.met) >= 2)

    go(scenario())


def test_a_message_that_cannot_be_read_is_a_problem_and_the_connection_stays() -> None:
    async def scenario() -> None:
        told: list[ControllerMessage] = []

        async def rubbish(socket: Sealed) -> None:
            await socket.send_bytes(b'{"type":"of the future"}')
            await socket.send_bytes(b"\x1b[31mnot json")
            await socket.send_bytes(ANSWER)
            await socket.socket.receive()
            await socket.socket.receive()

        async with listening(rubbish) as port, linked(link_to(port), told) as link:
            await until(lambda: told)
            assert len(told) == 1
            assert link.connections == 1

    go(scenario())


def test_the_link_has_ended_once_the_last_heartbeat_was_answered() -> None:
    async def scenario() -> None:
        async def answer(socket: Sealed) -> None:
            async for _ in socket.frames():
                await socket.send_bytes(ANSWER)

        told: list[ControllerMessage] = []
        async with listening(answer) as port, linked(link_to(port), told) as link:
            link.post(beat(1))
            await until(lambda: told)
            assert not link.ended
            link.post(beat(2, done=True))
            await until(lambda: link.ended)

    go(scenario())


def test_an_unsent_checkpoint_list_is_not_lost_with_its_heartbeat() -> None:
    async def scenario() -> None:
        seen: list[AgentMessage] = []

        async def keep(socket: Sealed) -> None:
            while len(seen) < 2:
                seen.append(decode_agent_message(await socket.receive_bytes()))

        async with listening(keep) as port:
            link = link_to(port)
            link.post(Heartbeat(node="n0", incarnation=1, seq=1, checkpoints=(), inventory={"kernel": "6.8"}))
            link.post(beat(2))
            async with linked(link):
                await until(lambda: len(seen) == 2)
            sent = seen[1]
            assert isinstance(sent, Heartbeat)
            assert (sent.seq, sent.checkpoints, sent.inventory) == (2, (), {"kernel": "6.8"})

    go(scenario())


def test_the_answer_about_the_controllers_clock_is_no_assignment() -> None:
    async def scenario() -> None:
        asked: list[Heartbeat] = []

        async def an_hour_behind(socket: Sealed) -> None:
            async for frame in socket.frames():
                message = decode_agent_message(frame)
                if isinstance(message, Heartbeat) and message.asked_at is not None:
                    asked.append(message)
                    now = time.time() - 3600.0
                    told = ClockReply(asked_at=message.asked_at, heard_at=now, told_at=now)
                    await socket.send_bytes(encode(told))

        told: list[ControllerMessage] = []
        async with listening(an_hour_behind) as port, linked(link_to(port), told) as link:
            link.post(beat(1))
            await until(lambda: link.clock.best(time.monotonic()))
            offset_s, error_s = link.clock.best(time.monotonic()) or (0.0, 9.9)
            assert abs(offset_s - 3600.0) <= error_s < 5.0
            link.post(beat(2, done=True))
            await until(lambda: port.met)
            assert (told, link.ended) == ([], False)
            assert asked[0].clock_offset_s is None

    go(scenario())


def test_a_job_folder_that_does_not_answer_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.agent.link.CONNECT_TIMEOUT_S", 0.05)
    answers, asked = threading.Event(), []

    def address() -> ControllerAddress:
        asked.append(1)
        answers.wait(30)
        raise NoController("it answers")

    async def scenario() -> None:
        try:
            async with linked(Link(address, lambda: "secret", HELLO)) as link:
                await until(lambda: "no connection" in link.problem)  # the loop runs
                await asyncio.sleep(0.2)
                assert len(asked) == 1, "one thread waits, not one for each try"
                answers.set()
                await until(lambda: link.problem == "it answers")
                await until(lambda: len(asked) > 1)
        finally:
            answers.set()

    go(scenario())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.agent.link.CONNECT_TIMEOUT_S", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_controller_that_answers_late_is_not_asked_again() -> None:
    """The next try would be at the end of its queue, and the same work once more."""

    async def scenario() -> None:
        async def answer(socket: Sealed) -> None:
            await socket.send_bytes(ANSWER)
            await socket.socket.receive()

        told: list[ControllerMessage] = []
        async with listening(answer) as port:
            port.hold.clear()
            async with linked(link_to(port), told) as link:
                await until(lambda: "has not answered" in link.problem)
                await asyncio.sleep(0.3)
                port.hold.set()
                await until(lambda: told)
                assert (port.challenges, link.connections) == (1, 1)

    go(scenario())


@pytest.mark.usefixtures("impatient")
def test_one_that_does_not_answer_is_left_when_another_has_taken_over() -> None:
    async def scenario() -> None:
        async def stay(socket: Sealed) -> None:
            await socket.socket.receive()

        async with listening(stay) as old, listening(stay) as new:
            old.hold.clear()
            places = [old.address]
            link = Link(lambda: ControllerAddress(places[-1]), lambda: "secret", HELLO)
            async with linked(link):
                await until(lambda: "has not answered" in link.problem)
                places.append(new.address)
                await until(lambda: link.connected)
                assert link.url == new.address
            old.hold.set()

    go(scenario())


def test_address_and_token_are_read_again_for_each_try(tmp_path: Path) -> None:
    address, token = address_reader(tmp_path), token_reader(tmp_path)
    for read in (address, token):
        with pytest.raises(NoController, match=str(tmp_path)):
            read()
    (tmp_path / "controller.json").write_text("{")
    with pytest.raises(NoController):
        address()
    (tmp_path / "controller.json").write_text(json.dumps({"address": "http://a:1"}))
    (tmp_path / "token").write_text("abc\n")
    (tmp_path / "token").chmod(0o600)
    assert (address(), token()) == (ControllerAddress("http://a:1"), "abc")
    (tmp_path / "controller.json").write_text(json.dumps({"address": "http://b:2"}))
    assert address().url == "http://b:2"
    assert address_reader(tmp_path, "c:3")().url == "http://c:3"
