"""What an agent sends to its controller: the whole state of its node, at regular times and whenever it changes."""

from __future__ import annotations

import time

import msgspec

from diagnosis.signals import RankSample, from_wait_status
from supervisor.agent.checkpoints import CheckpointMonitor
from supervisor.agent.link import Link
from supervisor.agent.ranks import RankMonitor
from supervisor.agent.reconcile import launcher_state
from supervisor.agent.state import AgentState
from supervisor.messages import Heartbeat, StoreOffer
from supervisor.node_health.monitor import HealthMonitor

FINDINGS_SENT = 50


class HeartbeatSender:
    """`send` gives a new heartbeat to the link."""

    def __init__(
        self,
        state: AgentState,
        link: Link,
        ranks: RankMonitor,
        checkpoints: CheckpointMonitor,
        health: HealthMonitor,
    ) -> None:
        self._state = state
        self._link = link
        self._ranks = ranks
        self._checkpoints = checkpoints
        self._health = health
        self._incarnation = time.time_ns()
        self._seq = 0
        self._keeper_gone_since: float | None = time.monotonic()
        self._sent_checkpoints = (-1, -1)
        """Of the heartbeat before: how often the checkpoints had changed, and the number of the connection."""
        self._sent_inventory = (-1, -1)

    def send(self) -> None:
        state, saved, assignment = self._state, self._state.saved, self._state.assignment
        self._seq += 1
        launcher, how = launcher_state(state.situation(), self._keeper_gone_s())
        ended = state.keeper.launcher if launcher == "ended" and state.keeper is not None else None
        attempt = max(saved.joined, state.newest_attempt)
        new_checkpoints, new_inventory = self._is_new()
        self._link.post(
            Heartbeat(
                node=state.plan.node,
                incarnation=self._incarnation,
                seq=self._seq,
                epoch=assignment.epoch if assignment is not None else 0,
                version=assignment.version if assignment is not None else 0,
                attempt=attempt,
                launcher=launcher,
                launcher_exit=how,
                launcher_code=None if ended is None or ended.status is None else from_wait_status(ended.status)[0],
                keeper="absent" if state.keeper is None else "ready" if state.keeper.ready else "starting",
                offer=self._offer(),
                prepared=saved.prepared,
                prepare_error=state.prepare_error,
                ranks=self._samples(attempt),
                evidence=tuple(state.evidence.values()),
                findings=state.findings.oldest(FINDINGS_SENT),
                findings_from=saved.findings_from,
                checkpoints=self._checkpoints.checkpoints if new_checkpoints else None,
                checkpoint_folders=tuple(map(str, self._checkpoints.learned)) if new_checkpoints else None,
                stop_request=saved.stop_request,
                notices=state.notices.reported,
                inventory=self._health.inventory if new_inventory else None,
                space=state.space,
                done=state.done_at is not None,
            )
        )

    def _is_new(self) -> tuple[bool, bool]:
        """Whether checkpoints and inventory go with this heartbeat: once for each change and each connection."""
        checkpoints = (self._checkpoints.changes, self._link.connections)
        inventory = (self._health.inventory_version, self._link.connections)
        new_checkpoints = checkpoints != self._sent_checkpoints
        new_inventory = inventory != self._sent_inventory and bool(self._health.inventory)
        self._sent_checkpoints, self._sent_inventory = checkpoints, inventory
        return new_checkpoints, new_inventory

    def _keeper_gone_s(self) -> float:
        if self._state.keeper is not None:
            self._keeper_gone_since = None
            return 0.0
        if self._keeper_gone_since is None:
            self._keeper_gone_since = time.monotonic()
        return time.monotonic() - self._keeper_gone_since

    def _offer(self) -> StoreOffer | None:
        """The launcher's store, under the address by which other nodes reach this one."""
        offer = self._state.offer
        if offer is None or offer.host:
            return offer
        return msgspec.structs.replace(offer, host=self._link.address or "127.0.0.1")

    def _samples(self, attempt: int) -> tuple[RankSample, ...]:
        """The ranks of `attempt`. The end of a failed rank is held back until its evidence can go with it."""
        if self._ranks.attempt != attempt:
            return ()  # a launcher was let in, its ranks are still to come
        samples = self._ranks.samples()
        if not self._state.collecting_crash:
            return samples
        return tuple(msgspec.structs.replace(sample, exit=None) for sample in samples)
