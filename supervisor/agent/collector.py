"""Evidence of this node: collected, kept until the controller has it, and filed in the job folder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from diagnosis import rules
from diagnosis.errors import exceptions, tracebacks
from diagnosis.incident import Incident
from diagnosis.signals import Finding, NodeEvidence, RankOutput
from diagnosis.verdict import accounts
from supervisor.agent.disk import full_disks
from supervisor.agent.evidence import crash_evidence, hang_evidence, read_output
from supervisor.agent.output import read_streams
from supervisor.agent.rankwatch import RankWatch
from supervisor.blocking import Aside
from supervisor.keeper_client import Keeper, WorkerProcess
from supervisor.messages import Assignment, EvidenceRequest
from supervisor.paths import LocalPaths, NodePlan, write_atomically

SETTLE_S = 0.5
"""How long a crash whose first error only blames a peer waits for the peer's own end ..."""
ENDING_S = 5.0
"""... and for that of one that raised something of its own: its interpreter is going down, slowly on a busy machine."""
LAST_LINES = 5
DISK_DEADLINE_S = 0.05
FILE_DEADLINE_S = 60.0
FILES_AT_ONCE = 4
RECENT_FINDINGS = 50


class Collector:
    """`pending` is what the controller has not acknowledged; `problem` why it cannot be filed, in words."""

    def __init__(
        self,
        plan: NodePlan,
        paths: LocalPaths,
        ranks: RankWatch,
        keeper: Keeper,
        on_change: Callable[[], None],
        written: Callable[[], Sequence[Path]] = tuple,
        standing: Callable[[], Sequence[Finding]] = tuple,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        """`written`: folders that the ranks write to. `standing`: what is wrong with the node at this moment.
        `look`: reads what the ranks have written until now.
        """
        self._plan = plan
        self._paths = paths
        self._ranks = ranks
        self._keeper = keeper
        self._on_change = on_change
        self._written = written
        self._standing = standing
        self._look = look
        self._recent: list[Finding] = []
        self._held: dict[tuple[int, int], NodeEvidence] = {}
        self._disks = Aside("full disks")
        self._files = Aside("evidence", FILES_AT_ONCE)
        self._filing: set[asyncio.Task[None]] = set()
        self.problem = ""

    @property
    def pending(self) -> tuple[NodeEvidence, ...]:
        return tuple(self._held.values())

    def note_findings(self, found: Sequence[Finding]) -> None:
        self._recent = [*self._recent, *found][-RECENT_FINDINGS:]

    def acknowledge(self, assignment: Assignment) -> None:
        for attempt, number in list(self._held):
            if attempt < assignment.attempt or (attempt == assignment.attempt and number <= assignment.evidence_seen):
                del self._held[attempt, number]

    async def crash(self, attempt: int) -> None:
        """What the first failed rank left, and once more while all that failed only blames a peer that still runs."""
        began = time.monotonic()
        await self._look_at_disks()
        while True:
            workers = self._workers(attempt)
            evidence = self._at_once(attempt, workers)
            alive = [worker for worker in workers if worker.alive]
            if not alive or not only_blames_peers(evidence):
                break
            waited_s = time.monotonic() - began
            if waited_s > ENDING_S or (waited_s > SETTLE_S and not self._any_is_ending(attempt, alive)):
                break
            await asyncio.sleep(0.05)
        self._keep(evidence)

    def _any_is_ending(self, attempt: int, alive: Sequence[WorkerProcess]) -> bool:
        streams = read_streams(self._paths.streams(attempt))
        return any(is_ending(read_output(attempt, one.rank, streams, self._paths)) for one in alive[:16])

    async def _look_at_disks(self) -> None:
        """In a thread and not for long: a file system that hangs must not hold up the evidence.

        The ranks' output goes to the local folder: a rank that cannot write there ends, and cannot say why.
        """
        folders, now, node = [*self._written(), self._paths.folder], time.time(), self._plan.node
        try:
            full = await self._disks.run(lambda: full_disks(folders, now, node), DISK_DEADLINE_S)
        except asyncio.TimeoutError:
            return
        line_rules = rules.default()
        self.note_findings([found for signal in full if (found := line_rules.match(signal)) is not None])

    async def requested(self, request: EvidenceRequest) -> None:
        attempt = self._ranks.attempt
        self._look()
        workers = [w for w in self._workers(attempt) if not request.ranks or w.rank in request.ranks]
        if not request.stacks:
            self._keep(msgspec.structs.replace(self._at_once(attempt, workers), request=request.number))
            return
        evidence = await hang_evidence(
            self._plan.node,
            attempt,
            request.number,
            workers,
            self._ranks.samples,
            self._findings_of(attempt),
            self._paths,
            budget_s=request.budget_s,
            flight=request.flight,
        )
        self._keep(evidence)

    def _at_once(self, attempt: int, workers: Sequence[WorkerProcess]) -> NodeEvidence:
        found = self._findings_of(attempt)
        return crash_evidence(self._plan.node, attempt, workers, self._ranks.samples(), found, self._paths)

    def _findings_of(self, attempt: int) -> list[Finding]:
        """What ranks said when they were ended for the attempt before is no evidence of anything in this one."""
        recent = [finding for finding in self._recent if finding.attempt in (0, attempt)]
        return [*recent, *self._standing()]

    def _workers(self, attempt: int) -> tuple[WorkerProcess, ...]:
        return self._keeper.state.workers_of(attempt) if self._keeper.state is not None else ()

    def _keep(self, evidence: NodeEvidence) -> None:
        folder = f"attempts/{evidence.attempt}/{self._plan.node}"
        evidence = msgspec.structs.replace(evidence, folder=folder)
        self._held[evidence.attempt, evidence.request] = evidence
        task = asyncio.create_task(self._file(evidence))
        self._filing.add(task)
        task.add_done_callback(self._filing.discard)
        self._on_change()

    async def _file(self, evidence: NodeEvidence) -> None:
        """Into the job folder, in a thread: a slow shared file system must not hold up the restart."""

        job_dir = Path(self._plan.job_dir)

        def write() -> None:
            """What ranks said may hold secrets: it is for this user alone."""
            job_dir.mkdir(parents=True, exist_ok=True)
            for folder in (*reversed(Path(evidence.folder).parents[:-1]), Path(evidence.folder)):
                (job_dir / folder).mkdir(mode=0o700, exist_ok=True)
            whole = msgspec.json.format(msgspec.json.encode(evidence), indent=1)
            write_atomically(job_dir / evidence.folder / f"evidence-{evidence.request}.json", whole, 0o600)

        try:
            await self._files.run(write, FILE_DEADLINE_S)
        except asyncio.TimeoutError:
            self.problem = "evidence cannot be kept in the job folder: it does not answer"
        except OSError as error:
            self.problem = f"evidence cannot be kept in the job folder: {error.strerror}"


def is_ending(output: RankOutput) -> bool:
    """The last that it wrote is a traceback, and not one over a peer that is gone."""
    found = tracebacks.last(output.traceback)
    if found is None or exceptions.read(found, []).is_cascade:
        return False
    return any(found.line[:80] in line for line in output.tail[-LAST_LINES:])


def only_blames_peers(evidence: NodeEvidence) -> bool:
    """Whether every rank that failed so far only says that another one is gone."""
    incident = Incident(id="", opened_at=0.0, attempt=evidence.attempt, trigger="exit", evidence=(evidence,))
    failed = [account for account in accounts.gather(incident) if account.failed]
    return bool(failed) and all(account.blames_peer for account in failed)
