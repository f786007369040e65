"""The agent's end of the wire against ports that misbehave; its WebSocket; the offset of two clocks."""

import asyncio
import base64
import hashlib
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import WSMsgType, web
from hypothesis import example, given
from hypothesis import strategies as st

from recovery.snapshot_choice import RankSnapshot
from supervisor.agent.link import (
    ASK_CLOCK_EVERY_S,
    FIRST_CLOCK_QUESTIONS,
    ClockOffset,
    ControllerAddress,
    Link,
    LinkTimeouts,
    NoController,
    WebSocket,
    WebSocketError,
    address_reader,
    connect,
    token_reader,
)
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


def link_to(port: Port, **timeouts: float) -> Link:
    return Link(lambda: ControllerAddress(port.address), lambda: "secret", HELLO, timeouts=LinkTimeouts(**timeouts))


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


def test_a_silent_controller_is_left_when_it_was_replaced() -> None:
    """The first one hangs: its connection stays. Nothing is left as long as the job folder names it, or nobody."""

    async def scenario() -> None:
        async def deaf(socket: Sealed) -> None:
            while not socket.socket.closed:
                await socket.socket.receive()

        async with listening(deaf, autoping=False) as first, listening(deaf) as second:
            named = [first.address]
            asked: list[str] = []

            def address() -> ControllerAddress:
                asked.append(named[0])
                if not named[0]:
                    raise NoController("no address")
                return ControllerAddress(named[0])

            async with linked(Link(address, lambda: "secret", HELLO, timeouts=LinkTimeouts(ping_s=0.5))) as link:
                await until(lambda: asked.count(first.address) >= 2)
                named[0] = ""
                await until(lambda: "" in asked)
                assert (link.connections, len(second.met)) == (1, 0)
                named[0] = second.address
                await until(lambda: second.met)
                assert len(first.met) == 1

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


def test_unsent_reports_are_not_lost_with_their_heartbeat() -> None:
    async def scenario() -> None:
        seen: list[AgentMessage] = []

        async def keep(socket: Sealed) -> None:
            while len(seen) < 2:
                seen.append(decode_agent_message(await socket.receive_bytes()))

        async with listening(keep) as port:
            link = link_to(port)
            held = (RankSnapshot(rank=0, world=1, attempt=1, step=7, at=1.0),)
            link.post(
                Heartbeat(node="n0", incarnation=1, seq=1, checkpoints=(), inventory={"kernel": "6.8"}, snapshots=held)
            )
            link.post(beat(2))
            async with linked(link):
                await until(lambda: len(seen) == 2)
            sent = seen[1]
            assert isinstance(sent, Heartbeat)
            assert (sent.seq, sent.checkpoints, sent.inventory) == (2, (), {"kernel": "6.8"})
            assert sent.snapshots == held

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


IMPATIENT = LinkTimeouts(connect_s=0.05)


def test_a_job_folder_that_does_not_answer_holds_up_nothing_else() -> None:
    answers, asked = threading.Event(), []

    def address() -> ControllerAddress:
        asked.append(1)
        answers.wait(30)
        raise NoController("it answers")

    async def scenario() -> None:
        try:
            async with linked(Link(address, lambda: "secret", HELLO, timeouts=IMPATIENT)) as link:
                await until(lambda: "no connection" in link.problem)  # the loop runs
                await asyncio.sleep(0.2)
                assert len(asked) == 1, "one thread waits, not one for each try"
                answers.set()
                await until(lambda: link.problem == "it answers")
                await until(lambda: len(asked) > 1)
        finally:
            answers.set()

    go(scenario())


def test_a_controller_that_answers_late_is_not_asked_again() -> None:
    """The next try would be at the end of its queue, and the same work once more."""

    async def scenario() -> None:
        async def answer(socket: Sealed) -> None:
            await socket.send_bytes(ANSWER)
            await socket.socket.receive()

        told: list[ControllerMessage] = []
        async with listening(answer) as port:
            port.hold.clear()
            async with linked(link_to(port, connect_s=0.05), told) as link:
                await until(lambda: "has not answered" in link.problem)
                await asyncio.sleep(0.3)
                port.hold.set()
                await until(lambda: told)
                assert (port.challenges, link.connections) == (1, 1)

    go(scenario())


def test_one_that_does_not_answer_is_left_when_another_has_taken_over() -> None:
    async def scenario() -> None:
        async def stay(socket: Sealed) -> None:
            await socket.socket.receive()

        async with listening(stay) as old, listening(stay) as new:
            old.hold.clear()
            places = [old.address]
            link = Link(lambda: ControllerAddress(places[-1]), lambda: "secret", HELLO, timeouts=IMPATIENT)
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


def ask(clock: ClockOffset, mono: float, offset_s: float, there_s: float, back_s: float, thinks_s: float = 0.0) -> None:
    """One question and answer: the controller's clock shows `mono`, ours `mono + offset_s`."""
    received = mono + there_s
    sent = received + thinks_s
    clock.answered(mono + offset_s, received, sent, sent + back_s + offset_s, sent + back_s)


@example(offset_s=3096.0, ways=[(0.0, 0.0, 0.6266162765481454)])
@given(
    offset_s=st.floats(-1e4, 1e4),
    ways=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 1)), min_size=1, max_size=20),
)
def test_the_true_offset_lies_within_the_error_whatever_the_way(
    offset_s: float, ways: list[tuple[float, float, float]]
) -> None:
    clock = ClockOffset()
    for number, (there_s, back_s, thinks_s) in enumerate(ways):
        ask(clock, 1000.0 + 60 * number, offset_s, there_s, back_s, thinks_s)
    found = clock.best(1000.0 + 60 * len(ways))
    assert abs(found[0] - offset_s) <= found[1] + 1e-6


def test_the_quickest_answer_counts() -> None:
    clock = ClockOffset()
    assert clock.best(0.0) is None
    ask(clock, 0.0, 0.2, 1.5, 0.0)
    ask(clock, 60.0, 0.2, 0.001, 0.001)
    ask(clock, 120.0, 0.2, 0.0, 0.9)
    offset_s, error_s = clock.best(121.0) or (0.0, 0.0)
    assert offset_s == pytest.approx(0.2, abs=1e-6)
    assert error_s < 0.01


def test_a_clock_that_was_set_is_noticed_with_the_next_answer() -> None:
    clock = ClockOffset()
    for number in range(8):
        ask(clock, 60.0 * number, 0.0, 0.001, 0.001)
    ask(clock, 480.0, -3.0, 0.3, 0.001)
    offset_s, error_s = clock.best(481.0) or (0.0, 0.0)
    assert abs(offset_s + 3.0) <= error_s < 0.2


def test_an_answer_is_ignored_if_a_clock_was_set_meanwhile() -> None:
    clock = ClockOffset()
    clock.answered(asked_at=100.0, received_at=100.0, sent_at=100.0, now=40.0, mono=1.0)
    clock.answered(asked_at=100.0, received_at=100.0, sent_at=90.0, now=101.0, mono=1.0)
    assert clock.best(2.0) is None


def test_it_asks_a_few_times_at_first_then_seldom() -> None:
    clock = ClockOffset()
    clock.connected()
    asked = [second for second in range(601) if clock.due(float(second))]
    assert asked[:FIRST_CLOCK_QUESTIONS] == [0, 2, 4]
    assert len(asked) <= FIRST_CLOCK_QUESTIONS + 600 / ASK_CLOCK_EVERY_S
    clock.connected()
    assert clock.due(601.0)


GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


@asynccontextmanager
async def served(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]):  # type: ignore[no-untyped-def]
    app = web.Application()
    app.router.add_get("/v1/agent", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/agent"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def answering(*raw: bytes, accept: str = ""):  # type: ignore[no-untyped-def]
    """A port that shakes hands and then sends these bytes, whatever they are; it hands over what it got."""
    heard: list[bytes] = []

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        key = head.split(b"Sec-WebSocket-Key: ", 1)[1].split(b"\r\n", 1)[0]
        proof = accept or base64.b64encode(hashlib.sha1(key + GUID).digest()).decode()
        lines = ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: upgrade"]
        writer.write("\r\n".join([*lines, f"Sec-WebSocket-Accept: {proof}", "", ""]).encode())
        for piece in raw:
            writer.write(piece)
            await writer.drain()
        heard.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", heard


async def opened(url: str, ping_s: float = 60.0, max_bytes: int = 1 << 20) -> WebSocket:
    async def introduce(*_: object) -> dict[str, str]:
        return {"Authorization": "Bearer secret"}

    return await connect(url, introduce, connect_s=5.0, ping_s=ping_s, max_bytes=max_bytes)


async def all_of(socket: WebSocket) -> list[bytes]:
    return [message async for message in socket.messages()]


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 300_001])
def test_messages_of_any_size_come_back_as_they_were(size: int) -> None:
    async def echo(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret"
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_bytes(await socket.receive_bytes())
        await socket.close()
        return socket

    async def scenario() -> None:
        message = bytes(number * 7 % 251 for number in range(size))
        async with served(echo) as url:
            socket = await opened(url)
            assert socket.local_address == "127.0.0.1"
            socket.write(message)
            await socket.drain()
            assert await all_of(socket) == [message]

    go(scenario())


def test_the_close_is_sent_to_the_server_and_pings_are_answered() -> None:
    ended: list[object] = []

    async def meet(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        await socket.ping(b"there?")
        pong = await socket.receive()
        await socket.send_str("go on")
        ended.extend([(pong.type, pong.data), (await socket.receive()).type, socket.close_code])
        return socket

    async def scenario() -> None:
        async with served(meet) as url:
            socket = await opened(url)
            async for message in socket.messages():
                assert message == b"go on"
                socket.close()
            while len(ended) < 3:
                await asyncio.sleep(0.005)
        assert ended == [(WSMsgType.PONG, b"there?"), WSMsgType.CLOSE, 1000]

    go(scenario())


def test_parts_make_one_message_with_pings_between_them() -> None:
    async def scenario() -> None:
        raw = [b"\x01\x03one", b"\x89\x00", b"\x00\x02 a", b"\x80\x03nd.", b"\x82\x01x", b"\x88\x00"]
        async with answering(*raw) as (url, heard):
            assert await all_of(await opened(url)) == [b"one and.", b"x"]
            while not heard:
                await asyncio.sleep(0.005)
            assert heard[0][:2] == b"\x8a\x80"  # the pong, masked

    go(scenario())


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"\x82\x81\x00\x00\x00\x00x", "is masked"),
        (b"\xc2\x01x", "reserved bit"),
        (b"\x80\x01x", "a part of a message"),
        (b"\x01\x01x\x82\x01y", "a part of a message"),
        (b"\x82\x02" + b"xx" + b"\x02\x7f\x00\x00\x00\x00\x40\x00\x00\x00" + b"x" * 1100000, "over 1048576 bytes"),
    ],
)
def test_what_breaks_the_protocol_ends_the_connection(raw: bytes, why: str) -> None:
    async def scenario() -> None:
        async with answering(raw) as (url, _):
            with pytest.raises(WebSocketError, match=why):
                await all_of(await opened(url))

    go(scenario())


def test_a_frame_that_is_cut_off_is_the_end() -> None:
    async def scenario() -> None:
        async with served(_refuse) as url:
            with pytest.raises(WebSocketError, match="401"):
                await opened(url)
        async with answering(accept="nonsense") as (url, _):
            with pytest.raises(WebSocketError, match="has not read the request's key"):
                await opened(url)
        async with answering(b"\x82\x05ab") as (url, _):
            socket = await opened(url, ping_s=0.05)
            began = time.monotonic()
            assert await all_of(socket) == []  # given up: nothing whole came for so long
            assert time.monotonic() - began >= 0.07

    go(scenario())


async def _refuse(_: web.Request) -> web.StreamResponse:
    return web.Response(status=401, text="no")
