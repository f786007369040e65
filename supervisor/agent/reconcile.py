"""What an agent does next to bring its node to the assigned state. Pure: compares both, returns actions.

Called after every change, and regularly. An action whose effect is not visible yet is simply returned again, so
every action must be harmless when repeated. Nothing here stops workers unless an assignment says so (fail static).
"""

from __future__ import annotations

from diagnosis import exits
from diagnosis.signals import Frozen
from supervisor.keeper_client import KeeperState
from supervisor.messages import Assignment, LauncherState, Round

KEEPER_GONE_S = 5.0
"""The front starts a keeper that died again within a second; one that stays away takes the attempt along."""


class NodeSituation(Frozen, frozen=True, kw_only=True):
    """The node as it is."""

    keeper: KeeperState | None
    joining: bool
    """A launcher waits in rendezvous."""
    store_port: int = 0
    """Where its store listens, for a round of which its node is the first; 0: not known."""
    watching: int | None
    """The attempt whose workers a launcher watches; None when none does."""
    prepared: int = 0
    joined: int = 0
    """The newest attempt that a launcher was let into."""
    collected: int = 0
    """The newest evidence request that was taken up."""
    woken: int = 0
    may_launch: bool = True
    """False while a launcher that ended before it started any rank is not to be followed by the next."""


class Launch(Frozen, frozen=True, kw_only=True, tag=True):
    """Start a launcher."""


class KillWorkers(Frozen, frozen=True, kw_only=True, tag=True):
    """SIGKILL to all workers of attempts up to `attempt`."""

    attempt: int


class Prepare(Frozen, frozen=True, kw_only=True, tag=True):
    """Do the assignment's preparations (set-aside, restore)."""

    attempt: int


class Join(Frozen, frozen=True, kw_only=True, tag=True):
    """Let the waiting launcher start the workers of this round."""

    round: Round
    rank: int


class AnswerLauncher(Frozen, frozen=True, kw_only=True, tag=True):
    """Answer the launcher that watches its workers: `look` at them, or `restart` them."""

    answer: str


class EndLauncher(Frozen, frozen=True, kw_only=True, tag=True):
    """Let the launcher that waits in rendezvous end."""


class Stop(Frozen, frozen=True, kw_only=True, tag=True):
    """End launcher and workers, with a signal first."""

    signal: str
    grace_s: float


class WakeRanks(Frozen, frozen=True, kw_only=True, tag=True):
    ranks: tuple[int, ...]
    number: int


class Collect(Frozen, frozen=True, kw_only=True, tag=True):
    """Take up the evidence request of the assignment."""


class Finished(Frozen, frozen=True, kw_only=True, tag=True):
    """The job has an outcome and nothing runs any more on this node."""


NodeAction = (
    Launch | KillWorkers | Prepare | Join | AnswerLauncher | EndLauncher | Stop | WakeRanks | Collect | Finished
)


def reconcile(assignment: Assignment, node: NodeSituation) -> list[NodeAction]:
    """What to do now, in this order."""
    actions: list[NodeAction] = []
    if assignment.wake and assignment.wake_number > node.woken:
        actions.append(WakeRanks(ranks=assignment.wake, number=assignment.wake_number))
    if assignment.evidence is not None and assignment.evidence.number > node.collected:
        actions.append(Collect())
    if assignment.stage == "stop" or assignment.outcome is not None:
        actions.extend(_stop(assignment, node))
    elif assignment.role != "member":
        actions.extend(_vacate(assignment, node))
    elif assignment.stage == "finish":
        actions.extend(_finish(assignment, node))
    elif assignment.stage in ("form", "run"):
        actions.extend(_form_or_run(assignment, node))
    return actions


def _stop(assignment: Assignment, node: NodeSituation) -> list[NodeAction]:
    keeper = node.keeper
    if keeper is not None and keeper.launcher_alive and not any(worker.alive for worker in keeper.workers):
        # Nothing is left to be stopped: the launcher reports what failed, comes back to rendezvous, and may end.
        if node.watching is not None:
            return [AnswerLauncher(answer="look")]
        if node.joining:
            return [EndLauncher()]
    if keeper is not None and (keeper.launcher_alive or any(worker.alive for worker in keeper.workers)):
        return [Stop(signal=assignment.stop_signal, grace_s=assignment.grace_s)]
    return [Finished()] if assignment.outcome is not None else []


def _vacate(assignment: Assignment, node: NodeSituation) -> list[NodeAction]:
    """Spare or excluded: no workers. The launcher waits in rendezvous, or ends if the node is excluded."""
    keeper = node.keeper
    if keeper is None or assignment.stage == "hold":
        return []
    if any(worker.alive for worker in keeper.workers):
        return [KillWorkers(attempt=assignment.attempt)]
    if node.watching is not None:
        return [AnswerLauncher(answer="restart")]
    if node.joining and assignment.role == "excluded":
        return [EndLauncher()]
    return []


def _finish(assignment: Assignment, node: NodeSituation) -> list[NodeAction]:
    """Every rank of the job ended well: the launcher may look at its workers, and end."""
    if node.watching == assignment.attempt:
        return [AnswerLauncher(answer="look")]
    return []


def _form_or_run(assignment: Assignment, node: NodeSituation) -> list[NodeAction]:
    keeper, attempt = node.keeper, assignment.attempt
    if keeper is None:
        return []
    if keeper.newest_attempt >= attempt or (node.joined >= attempt and not node.joining):
        return []  # its workers run, are being started, or have ended: the heartbeat reports that
    if any(worker.alive for worker in keeper.workers):
        return [KillWorkers(attempt=attempt - 1)]
    if assignment.paused:
        return []
    actions: list[NodeAction] = []
    if node.prepared < attempt:
        actions.append(Prepare(attempt=attempt))
    if node.watching is not None:
        failed = any(worker.status for worker in keeper.workers_of(node.watching))
        actions.append(AnswerLauncher(answer="look" if failed else "restart"))
    elif node.joining:
        formed = assignment.round
        if assignment.stage == "run" and formed is not None and formed.attempt == attempt and node.prepared >= attempt:
            rank = formed.rank_of(assignment.node)
            if rank is not None and (rank > 0 or not _is_of_another_launcher(formed, node)):
                actions.append(Join(round=formed, rank=rank))
    elif not keeper.launcher_alive and (keeper.ready or keeper.error) and node.may_launch:
        actions.append(Launch())
    return actions


def _is_of_another_launcher(formed: Round, node: NodeSituation) -> bool:
    """The first node's launcher has the store of the round. One with another store came after a crash of everything:
    no ranks are started for a round that is over; the controller forms the next one when it knows the launcher."""
    return 0 not in (formed.store_port, node.store_port) and formed.store_port != node.store_port


def launcher_state(node: NodeSituation, keeper_gone_s: float) -> tuple[LauncherState, str]:
    """The launcher's state for the heartbeat, and how it ended, in words."""
    keeper = node.keeper
    if node.joining:
        return "joining", ""
    if node.watching is not None:
        return "running", ""
    if keeper is None:
        gone = node.joined > 0 and keeper_gone_s > KEEPER_GONE_S
        return ("ended", "the keeper is gone") if gone else ("absent", "")
    if keeper.launcher_alive:
        return ("running" if any(worker.alive for worker in keeper.workers) else "starting"), ""
    if keeper.launcher is not None and keeper.launcher.status is not None:
        code, number, _ = exits.from_wait_status(keeper.launcher.status)
        how = f"was killed by {exits.signal_name(number)}" if number is not None else f"ended with code {code}"
        return "ended", f"torchrun {how}"
    if node.joined > 0 and keeper.newest_attempt < node.joined:
        return "ended", "the keeper was killed, and its ranks with it"
    return "absent", ""
