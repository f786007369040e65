"""What an assignment may ask of an agent, and what the agent does next to bring its node to the assigned state. Pure.

`reconcile` compares assignment and node, and returns actions. It is called after every change, and regularly. An action
whose effect is not visible yet is simply returned again, so every action must be harmless when repeated. Nothing here
stops workers unless an assignment says so (fail static).
"""

from __future__ import annotations

import math
import re

from diagnosis.signals import Frozen, from_wait_status, signal_name
from recovery.snapshot_memory import MAX_LOCAL_RANKS
from recovery.tiers import SnapshotOrders, why_bad_save
from supervisor.agent.state import AgentState
from supervisor.messages import Assignment, LauncherState, Round

# ----- bounds, whoever the controller is -----
#
# An assignment names no program, argument or variable: what runs is in the node's own plan, which the front wrote from
# the user's command. Preparations are of known kinds only (`Preparation`), or the message cannot be read. Which files
# may be moved is decided where they are moved, by who wrote them. All other bounds are here.

LONGEST_GRACE_S = 3600.0
LONGEST_EVIDENCE_S = 300.0
LONGEST_TRACE_S = 600.0
LONGEST_TESTS_S = 600.0
TRACED_STEPS = 100
TRACED_RANKS = 64
ATTEMPTS = 10_000_000
RANKS = NODES = 1_000_000
PATH_CHARACTERS = 4096
FOLDERS = 64
PREPARATIONS = 256
SOURCES = 65_536
NOTICES = 10_000
KEPT_SNAPSHOTS = 16
SKIPPED_BATCHES = 1_000_000
STOP_SIGNALS = frozenset({"SIGINT", "SIGTERM"})
_TRACE_NAME = re.compile(r"[a-z0-9]{4,16}")
_GPU = re.compile(r"GPU-[0-9A-Za-z-]{8,64}")
_HOST = re.compile(r"[A-Za-z0-9._:%-]{0,255}")
"""Empty, with port 0, where a controller that lost its journal found ranks that run already."""


def out_of_bounds(assignment: Assignment, node: str) -> str:
    """Why `node` must not act on the assignment, in words; empty when it may."""
    if assignment.node != node:
        return f"it is for node {assignment.node[:64]!r}"
    if not 0 <= assignment.attempt < ATTEMPTS:
        return f"its attempt is {assignment.attempt}"
    if assignment.stop_signal not in STOP_SIGNALS:
        return f"its stop signal is {assignment.stop_signal[:20]!r}"
    if not _within(assignment.grace_s, LONGEST_GRACE_S):
        return f"its grace period is {assignment.grace_s} s"
    if len(set(assignment.gpus)) < len(assignment.gpus) or not all(map(_GPU.fullmatch, assignment.gpus)):
        return "it names impossible GPUs"
    bounds = (_round, _evidence, _trace, _tests, _paths, _tiers)
    return next((why for look in bounds if (why := look(assignment))), "")


def _round(assignment: Assignment) -> str:
    formed = assignment.round
    if formed is None:
        return ""
    if not _HOST.fullmatch(formed.store_host) or not 0 <= formed.store_port < 65536:
        return "its rendezvous has no address"
    rank = formed.rank_of(assignment.node)
    if assignment.role == "member" and formed.attempt == assignment.attempt and rank is None:
        return "its round leaves this node out"
    if rank is not None and not 0 <= rank < formed.size <= NODES:
        return f"its round gives this node the place {rank} of {formed.size}"
    return ""


def _evidence(assignment: Assignment) -> str:
    asked = assignment.evidence
    if asked is not None and not _within(asked.budget_s, LONGEST_EVIDENCE_S):
        return f"its evidence may take {asked.budget_s} s"
    ranks = (*assignment.wake, *(asked.ranks if asked is not None else ()))
    if len(ranks) > RANKS or not all(0 <= rank < RANKS for rank in ranks):
        return "it names impossible ranks"
    return ""


def _trace(assignment: Assignment) -> str:
    asked = assignment.trace
    if asked is None:
        return ""
    if not _TRACE_NAME.fullmatch(asked.name) or not 0 < asked.steps <= TRACED_STEPS:
        return "its trace has no name, or too many steps"
    if not _within(asked.budget_s, LONGEST_TRACE_S) or len(asked.ranks) > TRACED_RANKS:
        return f"its trace may take {asked.budget_s} s, of {len(asked.ranks)} ranks"
    return ""


def _tests(assignment: Assignment) -> str:
    asked = assignment.tests
    if asked is None:
        return ""
    if not _within(asked.budget_s, LONGEST_TESTS_S):
        return f"its tests may take {asked.budget_s} s"
    if asked.world and not (0 <= asked.first_rank < asked.world <= RANKS and _HOST.fullmatch(asked.host)):
        return f"its group of tests gives this node the place {asked.first_rank} of {asked.world}"
    return "" if 0 <= asked.port < 65536 else f"its group of tests meets at port {asked.port}"


def _paths(assignment: Assignment) -> str:
    watched = assignment.space.folders if assignment.space is not None else ()
    if len(assignment.prepare) > PREPARATIONS or max(len(assignment.checkpoint_folders), len(watched)) > FOLDERS:
        return "it names too many paths"
    if assignment.resume is not None and not 0 <= assignment.resume.skip_batches <= SKIPPED_BATCHES:
        return f"it skips {assignment.resume.skip_batches} batches"
    if len(assignment.notices) > NOTICES:
        return "it has too many notices"
    paths = [*assignment.checkpoint_folders, *watched]
    if assignment.resume is not None and assignment.resume.path:
        paths.append(assignment.resume.path)
    for preparation in assignment.prepare:
        paths.append(preparation.path)
        paths.extend([copy] if (copy := getattr(preparation, "copy", "")) else [])
    for path in paths:
        if not is_absolute_path(path):
            return f"{path[:80]!r} is no absolute path"
    return ""


def _tiers(assignment: Assignment) -> str:
    tiers = assignment.tiers
    if tiers is None:
        return ""
    bring = tiers.bring
    sources = (*(bring.sources if bring is not None else ()), *([tiers.peer] if tiers.peer is not None else ()))
    saves = (*tiers.commit, *([bring.save] if bring is not None else ()))
    snapshots = tiers.snapshots.bring if tiers.snapshots is not None else None
    sources = (*sources, *(snapshots.sources if snapshots is not None else ()))
    if why := _snapshots(tiers.snapshots):
        return why
    if len(sources) > SOURCES or len(saves) > FOLDERS:
        return "it names too many checkpoints, or nodes that have them"
    if not all(_HOST.fullmatch(source.address) and 0 < source.port < 65536 for source in sources):
        return "a node that has checkpoints has no address"
    return next((why for save in saves if (why := why_bad_save(save))), "")


def _snapshots(orders: SnapshotOrders | None) -> str:
    bring = orders.bring if orders is not None else None
    asked = [] if orders is None else [(orders.first_rank, orders.ranks, orders.world)]
    asked += [] if bring is None else [(bring.first_rank, bring.ranks, bring.world)]
    if not all(
        0 <= first <= RANKS and 0 <= ranks <= MAX_LOCAL_RANKS and 0 <= world <= RANKS for first, ranks, world in asked
    ):
        return "it names impossible ranks for snapshots"
    if (orders is not None and len(orders.keep) > KEPT_SNAPSHOTS) or (bring is not None and bring.size_bytes < 0):
        return "its snapshots are impossible"
    return ""


def is_absolute_path(path: str) -> bool:
    """Absolute and of a possible length. Users' folders may have any other characters in their names."""
    return path.startswith("/") and len(path) <= PATH_CHARACTERS and "\0" not in path


def _within(seconds: float, most: float) -> bool:
    return math.isfinite(seconds) and 0 <= seconds <= most


# ----- the next actions -----

KEEPER_GONE_S = 5.0
"""The front starts a keeper that died again within a second; one that stays away takes the attempt along."""


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


class AskRanks(Frozen, frozen=True, kw_only=True, tag=True):
    """Ask the ranks for a checkpoint."""

    signal: str
    number: int


class Collect(Frozen, frozen=True, kw_only=True, tag=True):
    """Take up the evidence request of the assignment."""


class MakeTrace(Frozen, frozen=True, kw_only=True, tag=True):
    """Take up the assignment's request for traces."""


class Finished(Frozen, frozen=True, kw_only=True, tag=True):
    """The job has an outcome and nothing runs any more on this node."""


NodeAction = (
    Launch
    | KillWorkers
    | Prepare
    | Join
    | AnswerLauncher
    | EndLauncher
    | Stop
    | WakeRanks
    | AskRanks
    | Collect
    | MakeTrace
    | Finished
)


def reconcile(assignment: Assignment, node: AgentState, *, may_launch: bool = True) -> list[NodeAction]:
    """What to do now, in this order. `may_launch`: False while a launcher that ended before it started any rank is not
    to be followed by the next."""
    actions: list[NodeAction] = []
    if assignment.wake and assignment.wake_number > node.saved.woken:
        actions.append(WakeRanks(ranks=assignment.wake, number=assignment.wake_number))
    if assignment.ask and assignment.ask_number > node.saved.asked and assignment.stage == "run":
        actions.append(AskRanks(signal=assignment.ask, number=assignment.ask_number))
    if assignment.evidence is not None and assignment.evidence.number > node.saved.collected:
        actions.append(Collect())
    if assignment.trace is not None and assignment.trace.number > node.saved.traced:
        actions.append(MakeTrace())
    if assignment.stage == "stop" or assignment.outcome is not None:
        actions.extend(_stop(assignment, node))
    elif assignment.role != "member":
        actions.extend(_vacate(assignment, node))
    elif assignment.stage == "finish":
        actions.extend(_finish(assignment, node))
    elif assignment.stage in ("form", "run"):
        actions.extend(_form_or_run(assignment, node, may_launch))
    return actions


def _stop(assignment: Assignment, node: AgentState) -> list[NodeAction]:
    keeper = node.keeper
    if keeper is not None and keeper.launcher_alive and not any(worker.alive for worker in keeper.workers):
        # Nothing is left to be stopped: the launcher reports what failed, comes back to rendezvous, and may end.
        if node.watching is not None:
            return [AnswerLauncher(answer="look")]
        if node.offer is not None:
            return [EndLauncher()]
    if keeper is not None and (keeper.launcher_alive or any(worker.alive for worker in keeper.workers)):
        return [Stop(signal=assignment.stop_signal, grace_s=assignment.grace_s)]
    return [Finished()] if assignment.outcome is not None else []


def _vacate(assignment: Assignment, node: AgentState) -> list[NodeAction]:
    """Spare or excluded: no workers. The launcher waits in rendezvous, or ends if the node is excluded."""
    keeper = node.keeper
    if keeper is None or assignment.stage == "hold":
        return []
    if any(worker.alive for worker in keeper.workers):
        return [KillWorkers(attempt=assignment.attempt)]
    if node.watching is not None:
        return [AnswerLauncher(answer="restart")]
    if node.offer is not None and assignment.role == "excluded":
        return [EndLauncher()]
    return []


def _finish(assignment: Assignment, node: AgentState) -> list[NodeAction]:
    """Every rank of the job ended well: the launcher may look at its workers, and end."""
    if node.watching == assignment.attempt:
        return [AnswerLauncher(answer="look")]
    return []


def _form_or_run(assignment: Assignment, node: AgentState, may_launch: bool) -> list[NodeAction]:
    keeper, attempt = node.keeper, assignment.attempt
    if keeper is None:
        return []
    if keeper.newest_attempt >= attempt or (node.saved.joined >= attempt and node.offer is None):
        return []  # its workers run, are being started, or have ended: the heartbeat reports that
    if any(worker.alive for worker in keeper.workers):
        return [KillWorkers(attempt=attempt - 1)]
    if assignment.paused:
        return []
    actions: list[NodeAction] = []
    if node.saved.prepared < attempt:
        actions.append(Prepare(attempt=attempt))
    if node.watching is not None:
        failed = any(worker.status for worker in keeper.workers_of(node.watching))
        actions.append(AnswerLauncher(answer="look" if failed else "restart"))
    elif node.offer is not None and assignment.gpus != node.saved.gpus:
        actions.append(EndLauncher())  # the number of processes is torchrun's for as long as it lives
    elif node.offer is not None:
        formed = assignment.round
        if (
            assignment.stage == "run"
            and formed is not None
            and formed.attempt == attempt
            and node.saved.prepared >= attempt
        ):
            rank = formed.rank_of(assignment.node)
            if rank is not None and (rank > 0 or not _is_of_another_launcher(formed, node)):
                actions.append(Join(round=formed, rank=rank))
    elif not keeper.launcher_alive and (keeper.ready or keeper.error) and may_launch:
        actions.append(Launch())
    return actions


def _is_of_another_launcher(formed: Round, node: AgentState) -> bool:
    """The first node's launcher has the store of the round. One with another store came after a crash of everything:
    no ranks are started for a round that is over; the controller forms the next one when it knows the launcher."""
    port = node.offer.port if node.offer is not None else 0
    return 0 not in (formed.store_port, port) and formed.store_port != port


def launcher_state(node: AgentState, keeper_gone_s: float) -> tuple[LauncherState, str]:
    """The launcher's state for the heartbeat, and how it ended, in words."""
    keeper = node.keeper
    if node.offer is not None:
        return "joining", ""
    if node.watching is not None:
        return "running", ""
    if keeper is None:
        gone = node.saved.joined > 0 and keeper_gone_s > KEEPER_GONE_S
        return ("ended", "the keeper is gone") if gone else ("absent", "")
    if keeper.launcher_alive:
        return ("running" if any(worker.alive for worker in keeper.workers) else "starting"), ""
    if keeper.launcher is not None and keeper.launcher.status is not None:
        code, number, _ = from_wait_status(keeper.launcher.status)
        how = f"was killed by {signal_name(number)}" if number is not None else f"ended with code {code}"
        return "ended", f"torchrun {how}"
    if node.saved.joined > 0 and keeper.newest_attempt < node.saved.joined:
        return "ended", "the keeper was killed, and its ranks with it"
    return "absent", ""
