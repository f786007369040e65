"""One question at a time, a few in an hour; whatever becomes of it is told once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from diagnosis.incident import Incident, Opinion
from diagnosis.llm import Question
from diagnosis.taxonomy import FailureClass
from supervisor.errors import ModelUnavailable
from supervisor.messages import AnyEvent, OpinionArrived, OpinionWanted
from supervisor.opinion import pending, queue
from supervisor.opinion.client import ModelAnswer
from supervisor.opinion.queue import AskedIncident, OpinionQueue


class Patient:
    """Answers when it is let to; knows how many ask at once."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.go = asyncio.Event()
        self.asked: list[Question] = []
        self.at_once = self.most_at_once = 0

    async def ask(self, question: Question) -> ModelAnswer:
        self.asked.append(question)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self.go.wait()
        self.at_once -= 1
        if not self.text:
            raise ModelUnavailable("it does not know")
        if self.text == "bug":
            raise ZeroDivisionError
        return ModelAnswer(self.text, len(question.lines), "m")


class Asking:
    """A queue, its backend, and what was answered."""

    def __init__(self, tmp_path: Path, incident: Incident, text: str, folders: tuple[str, ...] = ()) -> None:
        self.told: list[tuple[str, Opinion]] = []
        self.backend = Patient(text)
        self.incident = incident
        self.folders = folders
        self.queue = OpinionQueue(self.backend, tmp_path, self.find, self.hear, time.time)

    def hear(self, event: AnyEvent) -> None:
        if isinstance(event, OpinionArrived):
            self.told.append((event.incident, event.opinion))

    def find(self, name: str) -> AskedIncident | None:
        if name == "i-404":
            return None
        return AskedIncident(msgspec.structs.replace(self.incident, id=name), None, self.folders)


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.002)


def test_the_answer_is_grounded_and_its_rule_kept(tmp_path: Path, incident: Incident, good_answer: str) -> None:
    async def scenario() -> None:
        asking = Asking(tmp_path, incident, good_answer)
        asking.backend.go.set()
        assert asking.queue.want("i-1") == ""
        await until(lambda: asking.told)
        ((name, opinion),) = asking.told
        assert (name, opinion.failure_class, opinion.problem) == ("i-1", FailureClass.SCRIPT_ERROR, "")
        assert opinion.took_s >= 0
        assert opinion.rule is not None
        assert [name.partition("@")[0] for name in pending.names(tmp_path)] == [opinion.rule.id] == ["rule-i-1"]
        assert not (tmp_path / "rules.toml").exists()

    asyncio.run(scenario())


def test_one_at_a_time_each_once_and_only_so_many(tmp_path: Path, incident: Incident) -> None:
    async def scenario() -> None:
        asking = Asking(tmp_path, incident, "")
        asking.queue.wanted(OpinionWanted(incident="i-1"))
        await until(lambda: asking.backend.asked)
        names = [f"i-{n}" for n in range(1, queue.QUEUE + 2)]
        assert [asking.queue.want(name) for name in names * 2] == [""] * len(names) * 2
        assert "wait" in asking.queue.want("i-99")
        asking.backend.go.set()
        await until(lambda: len(asking.told) == len(names))
        assert [name for name, _ in asking.told] == names
        assert asking.backend.most_at_once == 1
        assert {opinion.problem for _, opinion in asking.told} == {"it does not know"}

    asyncio.run(scenario())


def test_so_many_in_an_hour(tmp_path: Path, incident: Incident, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "QUEUE", 1000)

    async def scenario() -> None:
        asking = Asking(tmp_path, incident, "")
        answers = [asking.queue.want(f"i-{n}") for n in range(queue.PER_HOUR + 3)]
        assert [bool(problem) for problem in answers] == [False] * queue.PER_HOUR + [True] * 3
        await asking.queue.close()

    asyncio.run(scenario())


def test_a_closed_incident_is_read_from_where_agents_kept_its_evidence(tmp_path: Path, incident: Incident) -> None:
    folder = tmp_path / "attempts" / "1" / "n1"
    folder.mkdir(parents=True)
    (folder / "evidence-0.json").write_bytes(msgspec.json.encode(incident.evidence[0]))
    (folder / "evidence-1.json").write_bytes(b"torn")
    closed = msgspec.structs.replace(incident, evidence=())
    folders = ("n1:attempts/1/n1", "n2:attempts/1/n2", "n3:../../../../etc")

    async def scenario() -> None:
        asking = Asking(tmp_path, closed, "", folders)
        asking.queue.want("i-1")
        await until(lambda: asking.backend.asked)
        assert any("FluxError" in line for line in asking.backend.asked[0].lines)
        await asking.queue.close()

    asyncio.run(scenario())


def test_a_job_folder_that_cannot_be_written_keeps_no_rule(
    tmp_path: Path, incident: Incident, good_answer: str
) -> None:
    (tmp_path / pending.NAME).write_text("this is not TOML [")

    async def scenario() -> None:
        asking = Asking(tmp_path, incident, good_answer)
        asking.backend.go.set()
        asking.queue.want("i-1")
        await until(lambda: asking.told)
        assert asking.told[0][1].failure_class is FailureClass.SCRIPT_ERROR
        assert asking.told[0][1].rule is None
        assert (tmp_path / pending.NAME).read_text() == "this is not TOML ["

    asyncio.run(scenario())
