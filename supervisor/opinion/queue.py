"""Asks a language model for opinions: one at a time, a few an hour. Every result is an event like any other.

Nothing waits for it. What is wanted while too much waits already is dropped, what a model takes too long for is told
as that, and neither a model nor a defect here can do more than leave an opinion out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from diagnosis import llm
from diagnosis.incident import Incident, Opinion, Verdict
from diagnosis.llm import ShownEvidence
from diagnosis.logs.steps import went_on
from diagnosis.proposals import Tried, may_learn
from diagnosis.signals import NodeEvidence, clean_line
from diagnosis.taxonomy import FailureClass
from supervisor.blocking import BlockingCalls
from supervisor.config import OpinionSettings, check_opinion, opinion_price
from supervisor.errors import ConfigError, ModelUnavailable
from supervisor.messages import AnyEvent, OpinionArrived, OpinionAsked, OpinionWanted
from supervisor.opinion import pending
from supervisor.opinion.client import Endpoint, LocalModel, ModelAnswer
from supervisor.opinion.past import PastIncidents
from supervisor.view import utc

if TYPE_CHECKING:
    from supervisor.job.job import Job

log = logging.getLogger("unbroken.opinion")

QUEUE: Final = 8
PER_HOUR: Final = 30
READ_DEADLINE_S: Final = 20.0
EVIDENCE_NODES: Final = 16
FILES_OF_A_NODE: Final = 4
FILE_BYTES: Final = 4 << 20
NO_MODEL: Final = "there is no model to ask: set opinion.backend (unbroken docs opinion)"
NO_INCIDENT: Final = "there is no incident {}"


class AskedIncident(NamedTuple):
    """An incident as it was when an opinion was wanted."""

    incident: Incident
    verdict: Verdict | None
    folders: tuple[str, ...]
    """`node:folder` where its evidence is kept: read when the incident holds none any more."""
    job: str = ""
    settled: FailureClass | None = None
    """The class that an operator gave it."""
    cases: tuple[tuple[FailureClass, str], ...] = ()
    """Lines that the verdicts on the job's other incidents rest on."""


def backend_of(settings: OpinionSettings, python: str) -> Endpoint | LocalModel | None:
    """Which model to ask; None: no model is configured. `python`: of the training environment."""
    if settings.backend == "transformers":
        return LocalModel(settings.model, python, settings.timeout_s)
    if settings.backend == "endpoint":
        return Endpoint(settings.url, settings.model, settings.key_file, settings.timeout_s)
    return None


class OpinionQueue:
    """`want` never blocks and never raises. `OpinionArrived` is posted once for each incident that was taken."""

    def __init__(
        self,
        backend: Endpoint | LocalModel | None,
        job_dir: Path,
        find: Callable[[str], AskedIncident | None],
        post: Callable[[AnyEvent], None],
        now: Callable[[], float],
        memory: Path | None = None,
    ) -> None:
        """`find`: an incident by its id. `now`: Unix time. `memory`: folder of past incidents to show, if any."""
        self._backend = backend
        self._past = PastIncidents(memory)
        self._job_dir = job_dir
        self._find = find
        self._post = post
        self._now = now
        self._waiting: deque[tuple[str, AskedIncident]] = deque()
        self._asking = ""
        self._asked_at: deque[float] = deque(maxlen=PER_HOUR)
        self._task: asyncio.Task[None] | None = None
        self._files = BlockingCalls("opinion")

    def wanted(self, action: OpinionWanted) -> None:
        """The job itself wants an opinion; why there is none becomes the opinion's `problem`."""
        if problem := self._take_up(action.incident):
            self._arrived(action.incident, llm.no_opinion(problem))

    def want(self, incident: str) -> str:
        """An operator asks about this incident. Returns why it cannot be, in words, or the empty string."""
        problem = self._take_up(incident)
        if not problem:
            self._post(OpinionAsked(at=self._now(), incident=incident))
        return problem

    def _arrived(self, incident: str, opinion: Opinion) -> None:
        self._post(OpinionArrived(at=self._now(), incident=incident, opinion=opinion))

    def _take_up(self, incident: str) -> str:
        if self._backend is None:
            return NO_MODEL
        if incident == self._asking or any(incident == name for name, _ in self._waiting):
            return ""
        problem = self._refusal()
        asked = None if problem else self._find(incident)
        if asked is None:
            problem = problem or NO_INCIDENT.format(incident)
            log.info("no opinion on %s: %s", incident, problem)
            return problem
        self._asked_at.append(time.monotonic())
        self._waiting.append((incident, asked))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())
        return ""

    def _refusal(self) -> str:
        if len(self._waiting) >= QUEUE:
            return f"{QUEUE} incidents wait for an opinion already"
        if len(self._asked_at) == PER_HOUR and time.monotonic() - self._asked_at[0] < 3600.0:
            return f"{PER_HOUR} opinions were asked for within the last hour"
        return ""

    async def close(self) -> None:
        """Drop all questions, the one under way too."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        while self._waiting and self._backend is not None:
            self._asking, asked = self._waiting.popleft()
            opinion = await opinion_on(asked, self._backend, self._job_dir, self._files, self._past)
            name, self._asking = self._asking, ""
            self._arrived(name, opinion)


async def opinion_on(
    asked: AskedIncident, backend: Endpoint | LocalModel, job_dir: Path, files: BlockingCalls, past: PastIncidents
) -> Opinion:
    """What the model says. What is missing for an opinion, and a defect here, is its `problem`."""
    name, began = asked.incident.id, time.monotonic()
    try:
        asked = await files.run(lambda: _with_evidence(asked, job_dir), READ_DEADLINE_S)
        seen = llm.shown_evidence(asked.incident, asked.verdict)
        seen = msgspec.structs.replace(seen, past=await past.like(seen, asked.incident.opened_at))
        answer = await backend.ask(llm.question(seen))
        opinion = await files.run(lambda: _ground(answer, seen, asked, job_dir), READ_DEADLINE_S)
    except ModelUnavailable as error:
        opinion = llm.no_opinion(str(error))
    except asyncio.TimeoutError:
        opinion = llm.no_opinion("the job folder does not answer")
    except Exception as error:
        log.exception("no opinion on %s", name)
        opinion = llm.no_opinion(f"a fault of ours: {type(error).__name__}")
    log.info("opinion on %s: %s", name, opinion.problem or opinion.failure_class.value)
    return msgspec.structs.replace(opinion, took_s=round(time.monotonic() - began, 2))


def _ground(answer: ModelAnswer, seen: ShownEvidence, asked: AskedIncident, job_dir: Path) -> Opinion:
    """In a thread: a rule is tried on many lines, and written to a file system that may be slow."""
    incident = asked.incident
    name = pending.rule_id(incident.id) if may_learn(asked.verdict, asked.settled) else ""
    outputs = [output for piece in incident.evidence for output in piece.outputs]
    tried = Tried(
        healthy=tuple(line for one in outputs for line in went_on(one.tail)),
        cases=asked.cases,
        hosts=frozenset((*incident.rank_nodes.values(), *(piece.node for piece in incident.evidence))),
    )
    opinion = llm.ground(
        answer.text, seen, lines=answer.lines, model=answer.model, id=name, settled=asked.settled, tried=tried
    )
    read, written = answer.tokens_read, answer.tokens_written
    opinion = msgspec.structs.replace(opinion, tokens_read=read, tokens_written=written, cost=_cost(read, written))
    if opinion.rule is None:
        return opinion
    when = f"{utc(time.time()):%Y-%m-%d %H:%M} UTC"
    origin = f"proposed by {answer.model} for {incident.id} of {asked.job or job_dir.name}, {when}"
    try:
        problem = "" if pending.add(job_dir, opinion.rule, origin) else f"{pending.MAX_PENDING} rules wait already"
    except (OSError, ConfigError) as error:
        problem = str(error)
    if problem:
        log.warning("the proposed rule %s is not kept: %s", name, problem)
        return msgspec.structs.replace(opinion, rule=None, rule_rejected=f"kept: {clean_line(problem, 200)}")
    return opinion


def _cost(tokens_read: int, tokens_written: int) -> float:
    try:
        price = opinion_price(os.environ)
    except ConfigError as error:
        log.warning("what opinions cost is not known: %s", error)
        price = None
    return round(price.of(tokens_read, tokens_written), 9) if price is not None else 0.0


def _with_evidence(asked: AskedIncident, job_dir: Path) -> AskedIncident:
    """In a thread: some megabytes are read."""
    if asked.incident.evidence:
        return asked
    kept = tuple(_kept(job_dir, asked.folders))
    return asked._replace(incident=msgspec.structs.replace(asked.incident, evidence=kept))


def _kept(job_dir: Path, folders: tuple[str, ...]) -> list[NodeEvidence]:
    """The evidence of an incident that is closed, as the agents kept it; what cannot be read is left out."""
    found = []
    for folder in [entry.partition(":")[2] for entry in dict.fromkeys(folders)][:EVIDENCE_NODES]:
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            continue
        files = sorted((job_dir / folder).glob("evidence-*.json"))[-FILES_OF_A_NODE:]
        found += [one for one in map(_evidence, files) if one is not None]
    return found


def _evidence(file: Path) -> NodeEvidence | None:
    try:
        with open(file, "rb") as content:
            return msgspec.json.decode(content.read(FILE_BYTES), type=NodeEvidence)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None


def opinion_queue(
    job: Job,
    post: Callable[[AnyEvent], None],
    now: Callable[[], float],
    job_dir: Path,
    given: OpinionSettings,
    python: str,
    memory: Path,
) -> OpinionQueue:
    """The queue of a controller: asks the model that the settings name, if any."""
    try:
        check_opinion(given)
    except ConfigError as error:
        log.warning("no model is asked: %s", error)
        given = OpinionSettings()
    backend = backend_of(given, python)
    return OpinionQueue(backend, job_dir, lambda incident: asked_incident(job, incident), post, now, memory)


def asked_incident(job: Job, incident: str) -> AskedIncident | None:
    case = job.incidents.log.get(incident)
    if case is None:
        return None
    attempt = job.attempt
    findings = job.incidents.log.findings_near(case.failed_at, case.attempt)
    if attempt is None or attempt.number != case.attempt:
        seen = case.incident(case.evidence, findings, {}, 0)
    else:
        evidence = case.evidence or attempt.evidence.values()  # closed at once; agents may not have filed it yet
        seen = case.incident(evidence, findings, attempt.rank_nodes, attempt.world_size)
    others = (one.verdict for one in job.incidents.log.records if one.id != incident and one.verdict is not None)
    cases = [(one.failure_class, line.text) for one in others if one.kind == "cause" for line in one.evidence]
    known = {each.value: each for each in FailureClass}
    settled = known.get(case.corrections[-1].failure_class) if case.corrections else None
    return AskedIncident(seen, case.verdict, case.folders, job.spec.name, settled, tuple(cases))


# ----- without a controller -----


def ask_here(
    job: Job, job_dir: Path, incident: str, settings: OpinionSettings, python: str, memory: Path | None = None
) -> Opinion:
    """The opinion on an incident of a job that has ended. What is missing for one is its `problem`.

    Nothing is journalled: no controller is left to do that. A proposed rule is kept all the same.
    `python`: of the training environment, where the settings name a model of our own.
    """
    backend, asked = backend_of(settings, python), asked_incident(job, incident)
    if backend is None or asked is None:
        return llm.no_opinion(NO_MODEL if backend is None else NO_INCIDENT.format(incident))
    past = PastIncidents(memory)
    return asyncio.run(opinion_on(asked, backend, job_dir, BlockingCalls("opinion"), past))
