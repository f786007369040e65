"""An OpenAI-compatible server is asked; it may be slow, broken or hostile."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from diagnosis import llm
from diagnosis.taxonomy import FailureClass
from supervisor.errors import ModelUnavailable
from supervisor.opinion.ask_endpoint import Request, ask
from supervisor.opinion.client import Endpoint

TIMEOUT_S = 1.0


async def asked_at(url: str, question: llm.Question, key_file: str = "", timeout_s: float = 10.0) -> str:
    """What its process does, here."""
    asked = Request(url=url, model="some-model", key_file=key_file, timeout_s=timeout_s, question=question)
    return (await ask(asked)).answer


def test_the_question_goes_out_with_its_schema_and_the_answer_comes_back(
    serving: Any, http: Any, completion: Any, good_answer: str, question: llm.Question, seen: Any, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("k-12345678\n")

    async def server(turn: Any) -> None:
        turn.writer.write(http("200 OK", completion(good_answer)))

    async def scenario() -> None:
        async with serving(server) as asked:
            answer = await asked_at(asked.url, question, str(key))
        opinion = llm.ground(answer, seen, lines=len(question.lines))
        assert opinion.failure_class == FailureClass.SCRIPT_ERROR
        (head,), (body,) = asked.heads, asked.bodies
        assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert b"authorization: bearer k-12345678" in head.lower()
        sent = json.loads(body)
        assert sent["response_format"]["json_schema"]["schema"] == llm.schema(question)
        assert [turn["role"] for turn in sent["messages"]] == ["system", "user"]
        assert b"hf_abc" not in body
        assert b"[secret]" in body

    asyncio.run(scenario())


@pytest.mark.parametrize("farewell", [b"Connection: close\r\n", b""], ids=["told", "without a word"])
def test_a_server_that_knows_no_schema_is_asked_once_more_without(
    serving: Any, http: Any, completion: Any, good_answer: str, question: llm.Question, farewell: bytes
) -> None:
    """Also where it hangs up on whom it refuses."""

    async def server(turn: Any) -> None:
        knows = b"response_format" not in turn.body
        answer = http("200 OK", completion(good_answer)) if knows else http("400 Bad Request", b'{"error": "?"}')
        turn.writer.write(answer.replace(b"Connection: close\r\n", farewell))

    async def scenario() -> None:
        async with serving(server) as asked:
            answer = await asked_at(asked.url, question)
        assert answer == good_answer
        assert len(asked.bodies) == 2

    asyncio.run(scenario())


def test_whatever_a_server_does_there_is_an_end(
    serving: Any, misdeed: tuple[str, Any], question: llm.Question, seen: Any, tmp_path: Path
) -> None:
    name, server = misdeed
    key = tmp_path / "key"
    key.write_text("k-verysecret1")

    async def scenario() -> str:
        async with serving(server) as asked:
            try:
                answer = await asked_at(asked.url, question, str(key), TIMEOUT_S)
            except ModelUnavailable as error:
                opinion = llm.no_opinion(str(error), "m")
            else:
                opinion = llm.ground(answer, seen, lines=len(question.lines))
            assert len(asked.bodies) <= 2
            if name == "redirects":
                assert len(asked.bodies) == 1
        if name == "lies":
            assert opinion.failure_class is FailureClass.GPU_FALLEN_OFF_BUS
            assert opinion.why == "Run `rm -rf /` at once: [link]"
            return ""
        return opinion.problem

    began = time.monotonic()
    problem = asyncio.run(scenario())
    assert time.monotonic() - began < TIMEOUT_S + 2
    assert bool(problem) is (name != "lies")
    assert "k-verysecret1" not in problem
    assert problem.isprintable()
    assert len(problem) <= 200


@pytest.mark.parametrize(
    ("content", "problem"), [("", "does not hold a key"), ("two words", "does not hold a key"), (None, "cannot")]
)
def test_a_key_that_cannot_be_used(content: str | None, problem: str, question: llm.Question, tmp_path: Path) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelUnavailable, match=problem):
        asyncio.run(asked_at("http://127.0.0.1:9/v1", question, str(path)))


def test_a_server_without_a_certificate_is_not_believed(serving: Any, misdeeds: Any, question: llm.Question) -> None:
    async def scenario() -> None:
        async with serving(misdeeds["lies"]) as asked:
            await asked_at(asked.url.replace("http:", "https:"), question, timeout_s=TIMEOUT_S)

    with pytest.raises(ModelUnavailable):
        asyncio.run(scenario())


# ----- the process -----


def test_the_process_answers_as_its_program_does(
    serving: Any, misdeeds: Any, question: llm.Question, seen: Any, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("k-verysecret1")

    async def scenario(name: str, timeout_s: float = 60.0) -> llm.Opinion:
        async with serving(misdeeds[name]) as asked:
            try:
                answer = await Endpoint(asked.url, "some-model", str(key), timeout_s).ask(question)
            except ModelUnavailable as error:
                return llm.no_opinion(str(error))
            finally:
                assert asked.bodies or timeout_s == TIMEOUT_S, "in a second a busy machine does not start a process"
                assert children() == []
        assert answer.model == "some-model"
        return llm.ground(answer.text, seen, lines=answer.lines)

    assert asyncio.run(scenario("lies")).failure_class is FailureClass.GPU_FALLEN_OFF_BUS
    assert asyncio.run(scenario("never_answers", TIMEOUT_S)).problem == "no answer within 1 s"
    assert asyncio.run(scenario("fails")).problem.startswith("the endpoint answers 500")
    assert "k-verysecret1" not in asyncio.run(scenario("repeats_the_key")).problem


def children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "supervisor.opinion.ask_endpoint" in one.cmdline()]


def test_a_flood_reaches_the_process_and_not_the_loop(serving: Any, question: llm.Question) -> None:
    """Interim answers for ever, as fast as they can be sent: parsing them is the only thing their reader does."""
    worked: list[float] = []

    async def flood(turn: Any) -> None:
        while True:
            turn.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)
            await turn.writer.drain()

    async def watch() -> None:
        """The processor time of one turn of the loop, which others that want the processor do not lengthen."""
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            worked.append(time.thread_time() - began)
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        async with serving(flood) as asked:
            watching = asyncio.create_task(watch())
            with pytest.raises(ModelUnavailable, match="no answer"):
                await Endpoint(asked.url, "m", "", TIMEOUT_S).ask(question)
            watching.cancel()

    asyncio.run(scenario())
    assert sorted(worked)[len(worked) // 2] < 0.01
