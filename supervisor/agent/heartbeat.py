"""What an agent tells its controller: the whole state of its node, once a second and whenever it changes.

Findings are kept until the controller has acknowledged them; notices are said once, to the user as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec

from diagnosis.exits import from_wait_status
from diagnosis.signals import Finding, RankSample, clean_line
from supervisor.agent.actions import Deeds
from supervisor.agent.checkpoints import CheckpointProbe
from supervisor.agent.collector import Collector
from supervisor.agent.launcher_socket import Desk
from supervisor.agent.link import Link
from supervisor.agent.rankwatch import RankWatch
from supervisor.agent.reconcile import NodeSituation, launcher_state
from supervisor.agent.space import SpaceWatch
from supervisor.agent.state import Notebook
from supervisor.keeper_client import Keeper
from supervisor.messages import Assignment, Heartbeat, StoreOffer
from supervisor.node_health.monitor import Health
from supervisor.paths import LocalPaths, NodePlan

FINDINGS_KEPT = 200
FINDINGS_SENT = 50
NOTICE_LIMIT = 8000

log = logging.getLogger("unbroken.agent")


class Outgoing:
    """`post` sends a heartbeat; `note` and `mention` say what is to be in it."""

    def __init__(
        self,
        plan: NodePlan,
        book: Notebook,
        keeper: Keeper,
        desk: Desk,
        ranks: RankWatch,
        collector: Collector,
        checkpoints: CheckpointProbe,
        health: Health,
        space: SpaceWatch,
    ) -> None:
        self._plan = plan
        self._notices_file = LocalPaths(plan.local_dir).notices
        self._book = book
        self._keeper = keeper
        self._desk = desk
        self._ranks = ranks
        self._collector = collector
        self._checkpoints = checkpoints
        self._health = health
        self._space = space
        self._incarnation = time.time_ns()
        self._seq = 0
        self._findings: list[Finding] = []
        self._notices: list[str] = []
        self._keeper_gone_since: float | None = time.monotonic()
        self._sent_changes = (-1, -1)
        self._sent_stock = (-1, -1)

    def note(self, found: Sequence[Finding]) -> None:
        self._findings += found
        too_many = max(0, len(self._findings) - FINDINGS_KEPT)
        del self._findings[:too_many]
        self._book.findings_from += too_many

    def acknowledge(self, findings_seen: int) -> None:
        seen = findings_seen - self._book.findings_from
        if seen > 0:
            del self._findings[:seen]
            self._book.findings_from = findings_seen

    def say(self, text: str) -> None:
        """A line for the user's terminal."""
        try:
            with open(self._notices_file, "a", encoding="utf-8") as file:
                file.write(clean_line(text, NOTICE_LIMIT) + "\n")
        except OSError as error:  # a full disk is no reason to end
            log.warning("not shown (%s): %s", error.strerror, text)

    def mention(self, text: str) -> None:
        """Something the agent cannot do or see: told once, to the user and the controller."""
        if text and text not in self._notices:
            self._notices = [*self._notices, text][-16:]
            self.say(text)

    def post(self, link: Link, assignment: Assignment | None, situation: NodeSituation, deeds: Deeds) -> None:
        state = self._keeper.state
        self._seq += 1
        launcher, how = launcher_state(situation, self._keeper_gone_s())
        ended = state.launcher if launcher == "ended" and state is not None else None
        changes = (self._checkpoints.changes, link.connections)
        fresh = changes != self._sent_changes
        attempt = max(self._book.joined, state.newest_attempt if state is not None else 0)
        self._sent_changes = changes
        stock = (self._health.stock_taken, link.connections)
        new_stock = stock != self._sent_stock and bool(self._health.inventory)
        self._sent_stock = stock
        link.post(
            Heartbeat(
                node=self._plan.node,
                incarnation=self._incarnation,
                seq=self._seq,
                epoch=assignment.epoch if assignment is not None else 0,
                version=assignment.version if assignment is not None else 0,
                attempt=attempt,
                launcher=launcher,
                launcher_exit=how,
                launcher_code=None if ended is None or ended.status is None else from_wait_status(ended.status)[0],
                keeper="absent" if state is None else "ready" if state.ready else "starting",
                offer=self._offer(link),
                prepared=self._book.prepared,
                prepare_error=deeds.prepare_error,
                ranks=self._samples(attempt, deeds),
                evidence=self._collector.pending,
                findings=tuple(self._findings[:FINDINGS_SENT]),
                findings_from=self._book.findings_from,
                checkpoints=self._checkpoints.checkpoints if fresh else None,
                checkpoint_folders=tuple(map(str, self._checkpoints.learned)) if fresh else None,
                stop_request=self._book.stop_request,
                notices=tuple(self._notices),
                inventory=self._health.inventory if new_stock else None,
                space=self._space.told,
                done=deeds.done_at is not None,
            )
        )

    def _keeper_gone_s(self) -> float:
        if self._keeper.state is not None:
            self._keeper_gone_since = None
            return 0.0
        if self._keeper_gone_since is None:
            self._keeper_gone_since = time.monotonic()
        return time.monotonic() - self._keeper_gone_since

    def _offer(self, link: Link) -> StoreOffer | None:
        """The launcher's store, under the address by which other nodes reach this one."""
        offer = self._desk.offer
        if offer is None or offer.host:
            return offer
        return msgspec.structs.replace(offer, host=link.address or "127.0.0.1")

    def _samples(self, attempt: int, deeds: Deeds) -> tuple[RankSample, ...]:
        """The ranks of `attempt`; the end of one that failed is held back until its evidence can go with it."""
        if self._ranks.attempt != attempt:
            return ()  # a launcher was let in, its ranks are still to come
        samples = self._ranks.samples()
        if not deeds.collects_crash:
            return samples
        return tuple(msgspec.structs.replace(sample, exit=None) for sample in samples)
