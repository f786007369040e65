"""What each node is told: its whole desired state, worked out again when something touched it, sent when it changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from supervisor.job.attempts import Attempts, Space
from supervisor.job.core import Core
from supervisor.job.ledger import ClusterLedger
from supervisor.job.mirrors import SnapshotPlan
from supervisor.job.node_tests import NodeTests
from supervisor.job.nodes import Node, Nodes
from supervisor.job.scheduler import SchedulerRequests
from supervisor.job.traces import Traces
from supervisor.messages import Assign, Assignment, Stage

NOTICES_KEPT = 20


class Assignments:
    """`settle` after each event gives out what has changed."""

    def __init__(
        self,
        core: Core,
        nodes: Nodes,
        attempts: Attempts,
        scheduler: SchedulerRequests,
        space: Space,
        traces: Traces,
        tests: NodeTests,
        ledger: ClusterLedger,
    ) -> None:
        self._core, self._nodes, self._attempts = core, nodes, attempts
        self._scheduler, self._space, self._traces = scheduler, space, traces
        self._tests, self._ledger = tests, ledger
        self.sent: dict[str, Assignment] = {}
        """Node -> its newest assignment."""
        self._version = 0
        self._all_know: Assignment | None = None
        """What all nodes were told alike when all were told last."""
        self._told_notices: set[str] = set()
        """Nodes whose newest assignment has notices."""
        self._told_excluded: set[str] = set()
        """Nodes whose newest assignment says that they are cordoned."""
        self._notices: deque[tuple[int, str]] = deque(maxlen=NOTICES_KEPT)
        self._notice_number = 0

    # ----- queries -----

    @property
    def speaker(self) -> str:
        """The node whose terminal shows the job's notices: the first of the attempt."""
        attempt = self._attempts.current
        if attempt is not None and attempt.members:
            return attempt.members[0]
        return next((node.name for node in self._nodes if node.present), "")

    @property
    def stage(self) -> Stage:
        if self._core.is_over:
            return "stop"
        attempt = self._attempts.current
        if attempt is None:
            return "hold"
        if attempt.round is None:
            return "form"
        return "finish" if attempt.finishing else "run"

    # ----- changes -----

    def add_notice(self, text: str) -> None:
        """A line for the user's terminal."""
        self._notice_number += 1
        self._notices.append((self._notice_number, text))
        self._nodes.touch(self.speaker)

    def forget_sent(self, names: Iterable[str]) -> None:
        """Whatever these nodes were told before, tell them again."""
        for name in names:
            self.sent.pop(name, None)

    def begin_life(self) -> None:
        self._notices.clear()
        self.sent.clear()
        self._all_know = None
        self._told_notices.clear()
        self._told_excluded.clear()

    def settle(self) -> Iterator[Assign]:
        """Give out what changed."""
        nodes = self._nodes
        if not (nodes.touched or nodes.touched_all or nodes.touched_members):
            return
        common, cordoned, speaker = self._common(), nodes.cordoned(), self.speaker
        snapshots = self._attempts.snapshot_plan()
        touched = self._to_tell(common, cordoned, speaker)
        nodes.touched, nodes.touched_all, nodes.touched_members = set(), False, False
        for node in touched:
            name = node.name
            wanted = self._desired(node, common, snapshots, name in cordoned, name == speaker)
            sent = self.sent.get(name)
            if sent is not None and msgspec.structs.replace(wanted, version=sent.version) == sent:
                continue
            self._version += 1
            self.sent[name] = msgspec.structs.replace(wanted, version=self._version)
            _put(self._told_notices, name, bool(wanted.notices))
            _put(self._told_excluded, name, wanted.role == "excluded")
            yield Assign(assignment=self.sent[name])

    def _to_tell(self, common: Assignment, cordoned: set[str], speaker: str) -> list[Node]:
        """Nodes whose assignment may have changed, in the order in which they are told."""
        names, touched_members, same = self._nodes.touched, self._nodes.touched_members, self._all_know == common
        if self._nodes.touched_all or touched_members:
            self._all_know = common
        elif not same:
            self._all_know = None  # some know more than others
        if self._nodes.touched_all or (touched_members and not same):
            return list(self._nodes)
        if touched_members:
            names = names | (cordoned ^ self._told_excluded) | self._told_notices | {speaker}
        touched = [node for name in sorted(names) if (node := self._nodes.get(name)) is not None]
        return sorted(touched, key=lambda node: node.joined) if touched_members else touched

    def _common(self) -> Assignment:
        """What all members are told alike."""
        core, attempt, wanted = self._core, self._attempts.current, self._space.wanted
        common = Assignment(
            epoch=core.epoch,
            version=0,
            node="",
            role="spare",
            attempt=attempt.number if attempt is not None else 0,
            stage=self.stage,
            checkpoint_folders=self._attempts.checkpoints.folders,
            grace_s=core.grace_s,
            stop_signal=core.stop_signal,
            outcome=core.outcome,
            may_requeue=self._scheduler.may_requeue_by_itself,
        )
        if attempt is None:
            return common
        return msgspec.structs.replace(
            common,
            space=wanted,
            save_awaited=self._nodes.save_awaited,
            round=None if attempt.adopted else attempt.round,  # where its ranks met is not known, nor needed
            resume=attempt.resume,
            paused=(core.paused or wanted is not None or self._tests.is_awaited) and core.state == "RECOVERING",
        )

    def _desired(
        self, node: Node, common: Assignment, snapshots: SnapshotPlan | None, cordoned: bool, speaks: bool
    ) -> Assignment:
        attempt = self._attempts.current
        member = attempt is not None and node.name in attempt.member_set
        stage = common.stage
        if attempt is not None and not member and not self._core.is_over:
            # No worker of an older attempt may live on a node that is not a member: it may be one that came back. Of an
            # adopted attempt it may have ranks, and has not told yet.
            stage = "hold" if attempt.adopted else "form"
        tiers = self._attempts.checkpoints.tiers
        forming = member and attempt is not None and attempt.round is None
        prepares = attempt is not None and (node.name == attempt.preparer or (member and tiers.are_on))
        own = msgspec.structs.replace(
            common,
            node=node.name,
            tiers=tiers.orders(
                node.name,
                attempt.bring if forming and attempt is not None else None,
                snapshots.of(node.name) if snapshots is not None else None,
            ),
            role="member" if member else "excluded" if cordoned else "spare",
            stage=stage,
            prepare=attempt.prepare if attempt is not None and prepares else (),
            evidence=node.request,
            trace=self._traces.of(node.name),
            tests=self._tests.order(node.name),
            gpus=attempt.without[node.name].others if member and attempt and node.name in attempt.without else (),
            on_probation=self._ledger.on_probation(node.name),
            wake=node.wake,
            wake_number=node.wake_number,
            ask=node.ask if member else "",
            ask_number=node.ask_number,
            evidence_seen=node.evidence_seen,
            findings_seen=node.findings_seen,
            drain_request=self._scheduler.drain_requests.get(node.name, ""),
            notices=tuple(self._notices) if speaks else (),
        )
        if member:
            return own
        return msgspec.structs.replace(
            own, space=None, save_awaited=False, round=None, resume=None, prepare=(), paused=False
        )


def _put(names: set[str], name: str, is_in: bool) -> None:
    if is_in:
        names.add(name)
    else:
        names.discard(name)
