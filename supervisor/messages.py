"""Everything that travels between agents and the controller, and every event the job can see.

Both directions are level-triggered: a heartbeat is the whole state of a node, the assignment in reply its whole
desired state. Lost, repeated and reordered messages are therefore harmless. docs/protocol.md tells the story.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec

from diagnosis.incident import HangReport, Opinion
from diagnosis.signals import Evidence, ExitRecord, Finding, Frozen, LossAlarm, NodeEvidence, RankSample, clean_line
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint, Preparation, Resume
from recovery.fewer_processes import NodeGpus
from recovery.group_tests import GroupPart
from recovery.incident_memory import Recurrence
from recovery.ledger import LedgerRecord, TestResult
from recovery.policy import Mode
from recovery.rollback import Guard
from recovery.scheduling import LeavingNode, RequestOutcome
from recovery.snapshot_choice import NodeSnapshot, RankSnapshot, SnapshotPart
from recovery.swaps import SwapMode, SwapSignal
from recovery.tiers import NodeTiers, TierOrders
from supervisor.node_diff import Difference

PROTOCOL = 3


class JobSpec(Frozen, frozen=True, kw_only=True):
    """What the user asked for. The first agent's spec is the job's; a differing one is noted and ignored."""

    name: str
    nodes_min: int = 1
    nodes_max: int = 1
    spares: int = 0
    max_restarts: int = 10
    """Restarts without progress in between (`recovery.policy`); progress resets it."""
    mode: Mode = "enforce"
    gather_s: float = 30.0
    """How long to wait for more than `nodes_min` nodes."""
    wait_for_nodes_s: float = 600.0
    """How long a job short of nodes waits before it is failed."""
    hold_limit_s: float = 24 * 3600.0
    """A job that is held, or waits for approval, this long is ended; 0: never."""
    checkpoint_dirs: tuple[str, ...] = ()
    publish_to: str = ""
    """The shared folder of checkpoints that the script writes to each node's own disk; empty: there are no tiers."""
    has_restart_args: bool = False
    command: tuple[str, ...] = ()
    scheduler: str = "local"
    """Who gave the nodes: a name of `recovery.scheduling` (`local`, `slurm`)."""
    scheduler_job: str = ""
    """The job's id there."""
    requeues: int = 0
    """How often the scheduler has started this job again (Slurm's SLURM_RESTART_COUNT)."""
    max_requeues: int = 1
    """How often we may ask for that when nodes are short and no spare is left."""
    ends_at: float | None = None
    """Unix time at which the scheduler ends the job (its time limit)."""
    opinion_below: float = 0.0
    """A language model is asked about verdicts less sure than this; 0: about none."""
    patience_s: float | None = None
    """Seconds of unproven silence before a restart; None: by the run's own figures (`recovery.policy`)."""
    patience_factor: float = 3.0
    """How often what a place in the code needed before it is given again."""
    patience_off: bool = False
    """Unproven silence is only told."""
    loss_guard: Guard = "recommend"
    """What is done about a loss that went wrong."""
    swap_mode: SwapMode = "off"
    """What is done about a node that degrades. (Journals of before have none.)"""
    swap_signal: SwapSignal = ""
    """With which ranks are asked for a checkpoint before a planned swap; empty: it waits for the next one."""
    traceable: bool = False
    """Ranks make a trace when they are asked (`unbroken run --traceable`)."""
    ledger: Literal["", "propose", "cordon"] = ""
    """What becomes of a node with a proven hardware fault in the ledger of all jobs; empty: there is none."""
    mirror_snapshots: bool = False
    """Snapshots in memory are copied to a peer's memory."""
    fewer_processes: bool = False
    """A node with one bad GPU may go on with the others, where no spare can take its place."""
    test_suspects: bool = False
    """Nodes that a verdict suspects without proof are tested before the restart. (Journals of before have none.)"""
    on_gpus: bool = False
    """The first node had a GPU for each of its ranks. False also where that is not known: people are told of ranks."""


class StoreOffer(Frozen, frozen=True, kw_only=True):
    """A launcher waits in rendezvous and offers a fresh store of its own."""

    host: str
    port: int
    local_world_size: int
    snapshots: tuple[NodeSnapshot, ...] = ()
    """What all ranks of the node hold in memory, now that none of them runs."""


class Round(Frozen, frozen=True, kw_only=True):
    """One formed rendezvous round: all that a launcher needs to start its workers.

    The job knows all names. A node is told its own place instead, and the journal has the names once (`names`).
    """

    attempt: int
    nodes: tuple[str, ...] = ()
    """In the order of their group ranks; empty where `names` stands for them."""
    store_host: str
    store_port: int
    names: str = ""
    """A digest of the nodes' names in their order; the journal keeps the names that belong to it."""
    rank: int | None = None
    """With `names`: the group rank of the node that this is for; None: it is no member."""
    count: int = 0
    """With `names`: how many nodes there are."""
    first: str = ""
    """With `names`: the node of group rank 0."""
    snapshot: tuple[int, int] | None = None
    """Attempt and step of the snapshot in memory from which all ranks start, if the script asks for it."""

    def rank_of(self, node: str) -> int | None:
        """The group rank of `node`; None: it is no member."""
        if self.names:
            return self.rank
        return self.nodes.index(node) if node in self.nodes else None

    @property
    def size(self) -> int:
        """How many nodes there are."""
        return self.count or len(self.nodes)

    @property
    def leader(self) -> str:
        """The node of group rank 0."""
        return self.first or (self.nodes[0] if self.nodes else "")


LauncherState = Literal["absent", "starting", "joining", "running", "ended"]


class SpaceWanted(Frozen, frozen=True, kw_only=True):
    """The job waits until there is room on disks: the node is to look, and to tell."""

    number: int
    folders: tuple[str, ...] = ()
    """Where something could not be written, as the ranks named it; where checkpoints go is looked at anyway."""
    need_bytes: int = 0
    """What a checkpoint takes."""


class SpaceReported(Frozen, frozen=True, kw_only=True):
    """Answer to `SpaceWanted`."""

    number: int
    full: tuple[str, ...] = ()
    """Folders without room, and why, in words; none: there is room."""


SuiteName = Literal["quick", "full"]


class NodeTestOrder(Frozen, frozen=True, kw_only=True):
    """Active tests that a node is to make: by itself (`suite`), or in one group after the other."""

    number: int
    budget_s: float
    """So long they may take altogether."""
    suite: SuiteName | None = None
    round: int = 0
    """0: get ready, and say where the node would keep a group's store."""
    world: int = 0
    """How many ranks the node's group of this round has; 0: the node is in none."""
    first_rank: int = 0
    host: str = ""
    port: int = 0
    """Where rank 0 keeps the store."""


class NodeTestReport(Frozen, frozen=True, kw_only=True):
    """How far a node is with its `NodeTestOrder`."""

    number: int
    round: int = 0
    """The newest that it has made; 0: it is ready."""
    problem: str = ""
    """Why it makes none of the tests, or no more of them, in words."""
    address: str = ""
    port: int = 0
    """Where it would keep the store of the next group."""
    devices: int = 0
    kind: str = ""
    part: GroupPart | None = None
    """Of that round."""
    results: tuple[TestResult, ...] = ()
    """Of a suite, which is over with them."""


class Heartbeat(Frozen, frozen=True, kw_only=True, tag="heartbeat"):
    """The whole state of a node. Sent every second, and at once when something changes."""

    node: str
    incarnation: int
    """Start time of the agent process in ns: with `seq` it orders a node's heartbeats."""
    seq: int
    epoch: int = 0
    """Of the newest assignment accepted; 0 before the first."""
    version: int = 0
    attempt: int = 0
    """The attempt whose workers the node runs or ran last; 0 before the first."""
    launcher: LauncherState = "absent"
    launcher_exit: str = ""
    """How the launcher ended, in words; set with `launcher` = `ended`."""
    launcher_code: int | None = None
    """With which exit code it ended by itself; None: by a signal, or it is not known."""
    keeper: Literal["absent", "starting", "ready", "gone"] = "absent"
    offer: StoreOffer | None = None
    """Set while the launcher is joining."""
    prepared: int = 0
    """The newest attempt whose preparations (set-aside, restore) are done."""
    prepare_error: str = ""
    ranks: tuple[RankSample, ...] = ()
    """Ranks of `attempt` on this node, ended ones included (with `exit`)."""
    evidence: tuple[NodeEvidence, ...] = ()
    """Not yet acknowledged (`Assignment.evidence_seen`)."""
    findings: tuple[Finding, ...] = ()
    """Not yet acknowledged (`Assignment.findings_seen`), numbered from `findings_from`."""
    findings_from: int = 0
    checkpoints: tuple[Checkpoint, ...] | None = None
    """The newest 8, newest first; None when unchanged since the last heartbeat on this connection."""
    checkpoint_folders: tuple[str, ...] | None = None
    """Where this node's ranks were seen to write checkpoints (none where the user has named them); goes with those."""
    snapshots: tuple[RankSnapshot, ...] | None = None
    """What the ranks hold in memory; None when unchanged since it was sent on this connection."""
    tiers: NodeTiers | None = None
    """Where this node's checkpoints are; None when unchanged since the last heartbeat on this connection."""
    stop_request: str = ""
    """`SIGINT` or `SIGTERM` once the front has received it; `FRONT_GONE` when the front was killed."""
    notices: tuple[str, ...] = ()
    """What the agent cannot do or see, in words, once."""
    done: bool = False
    """The outcome was received and everything on the node is ended."""
    inventory: dict[str, str] | None = None
    """Versions and sizes (`node_health.inventory`); None when unchanged since it was sent on this connection."""
    space: SpaceReported | None = None
    """While the job waits for room: what this node's disks have."""
    asked_at: float | None = None
    """Unix time on the node when this heartbeat left, where it asks for the controller's (`ClockReply`)."""
    clock_offset_s: float | None = None
    """The node's clock minus the controller's; None while it is not known."""
    tests: NodeTestReport | None = None
    """While the node is asked for active tests: how far they are."""
    gpus: NodeGpus | None = None
    """Which its processes have; only where it may be started without one of them."""


class Hello(Frozen, frozen=True, kw_only=True, tag="hello"):
    """The first message on a connection."""

    protocol: int
    node: str
    host: str
    address: str
    """Address under which other nodes reach this one."""
    spec: JobSpec
    index: int | None = msgspec.field(default=None, name="order")
    """Preferred position among the nodes (Slurm's node id, `--node-rank`)."""
    spare: bool = False
    scheduler_node: str = ""
    """What the scheduler calls this node; empty: as `node`."""
    domain: str = ""
    """What fails together with it: its switch or rack, as the scheduler names it; empty: not known."""
    can_test: bool = False
    """Its agent makes active tests (`NodeTestOrder`). (Those of before do not.)"""
    version: str = ""
    run: str = ""
    """Which `unbroken run` of this node: an agent that is started again has the same."""


class EvidenceRequest(Frozen, frozen=True, kw_only=True):
    """Collect evidence now; answered by a NodeEvidence with this number."""

    number: int
    budget_s: float
    stacks: bool = True
    flight: bool = False
    ranks: tuple[int, ...] = ()
    """Empty: all ranks of the node."""


class TraceRequest(Frozen, frozen=True, kw_only=True):
    """An operator wants to know where the time of a step goes; answered in the job folder, under this name."""

    number: int
    name: str
    what: Literal["steps", "input"]
    """`steps`: a Kineto trace of so many steps. `input`: what the data loader's workers do."""
    ranks: tuple[int, ...]
    steps: int
    budget_s: float


class Outcome(Frozen, frozen=True, kw_only=True):
    """How the job ended."""

    state: Literal["succeeded", "failed", "stopped", "requeued"]
    exit_code: int
    line: str
    """The last line the user sees."""
    first_failure: str = ""
    """The first failed rank's code or signal, in words."""


Stage = Literal["hold", "form", "run", "finish", "stop"]
"""`hold`: change nothing. `form`: workers of older attempts are gone and the launcher waits in rendezvous for
`attempt`. `run`: the workers of `attempt` run, by `round`. `finish`: every rank of the job ended well; let the
launcher end. `stop`: workers and launcher end (SIGTERM, then SIGKILL after `grace_s`)."""


class Assignment(Frozen, frozen=True, kw_only=True, tag="assignment"):
    """The whole desired state of a node. (epoch, version) only grows; an older one is ignored."""

    epoch: int
    version: int
    node: str
    role: Literal["member", "spare", "excluded"]
    attempt: int
    stage: Stage
    round: Round | None = None
    resume: Resume | None = None
    """For the workers of `attempt`; preparations are done by the first node of the attempt."""
    prepare: tuple[Preparation, ...] = ()
    """To be done, by this node, before its launcher joins `attempt`."""
    checkpoint_folders: tuple[str, ...] = ()
    """Where ranks of this job, on whatever node, were seen to write checkpoints."""
    tiers: TierOrders | None = None
    """What is asked of this node for checkpoints on nodes' own disks; None: there are no tiers."""
    paused: bool = False
    """Of `form`: workers of older attempts are ended, and nothing else is done."""
    drain_request: str = ""
    """The scheduler does not let this job drain the node: the reason, to be left there for root's programs."""
    may_requeue: bool = False
    """Should the controller be gone for good: the scheduler may be asked to start the job again."""
    evidence: EvidenceRequest | None = None
    trace: TraceRequest | None = None
    space: SpaceWanted | None = None
    tests: NodeTestOrder | None = None
    """Active tests to be made now, where no rank of the job runs on the node."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that its processes get, one each, where one of them is bad; empty: as it was started."""
    on_probation: bool = False
    """The node was repaired lately: its probes look twice as often."""
    wake: tuple[int, ...] = ()
    """Ranks to be continued with SIGCONT (once for each `wake_number`)."""
    wake_number: int = 0
    ask: SwapSignal = ""
    """The signal with which the ranks are asked for a checkpoint (once for each `ask_number`)."""
    ask_number: int = 0
    save_awaited: bool = False
    """A node leaves as soon as a checkpoint is complete: look for one more often."""
    evidence_seen: int = -1
    """Highest evidence number of this attempt that arrived; -1 for none (0 is the crash evidence)."""
    findings_seen: int = 0
    """How many findings of this agent arrived."""
    grace_s: float = 30.0
    stop_signal: str = "SIGTERM"
    outcome: Outcome | None = None
    notices: tuple[tuple[int, str], ...] = ()
    """Numbered lines for the user's terminal; only the first node of the attempt gets them."""


class Refused(Frozen, frozen=True, kw_only=True, tag="refused"):
    """The controller does not take this agent; `why` is for a person."""

    why: str


class ClockReply(Frozen, frozen=True, kw_only=True, tag="clock"):
    """The controller's clock, only ever sent in answer to a heartbeat that asks for it."""

    asked_at: float
    """As in the heartbeat."""
    heard_at: float
    """Unix time on the controller when it came in."""
    told_at: float
    """The same when this left."""


class WatchedNow(Frozen, frozen=True, kw_only=True, tag="watched"):
    """Somebody looks at the job: for `for_s` heartbeats come more often. Only ever sent in answer to a heartbeat."""

    for_s: float


AgentMessage = Hello | Heartbeat
ControllerMessage = Assignment | Refused
"""What an agent acts on."""


# ----- events: what the job sees, in the order in which the journal keeps them -----


class Event(Frozen, frozen=True, kw_only=True, tag_field="event"):
    """Base. `at`: the controller's clock, Unix seconds, never running backwards."""

    at: float


class ControllerStarted(Event, frozen=True, kw_only=True, tag="controller_started"):
    epoch: int


class JobDefined(Event, frozen=True, kw_only=True, tag="job_defined"):
    spec: JobSpec
    node: str = ""
    """Whose spec it is. (Journals of before have none.)"""


class JobRequeued(Event, frozen=True, kw_only=True, tag="job_requeued"):
    """The scheduler has started the job again, asked or not: the nodes are others, what was learned stays."""

    requeues: int
    """As in `JobSpec`."""
    by: str = ""
    """Who asked for it, when that was no controller: a node that the lost first one has left behind."""
    lost: str = ""
    """The node whose loss was the cause."""
    lost_at: float | None = None


class NodeJoined(Event, frozen=True, kw_only=True, tag="node_joined"):
    """An agent registered (again). `incarnation` tells a new agent process from a new connection."""

    node: str
    host: str
    address: str
    index: int | None = msgspec.field(default=None, name="order")
    spare: bool = False
    scheduler_node: str = ""
    """As in `Hello`."""
    domain: str = ""
    can_test: bool = True
    """As in `Hello`. (Journals of before have none.)"""


class NodeLost(Event, frozen=True, kw_only=True, tag="node_lost"):
    """No word from its agent for `silent_s` while the run makes no progress either (or it has no workers)."""

    node: str
    silent_s: float


class NodesLost(Event, frozen=True, kw_only=True, tag="nodes_lost"):
    """Several at once, as `NodeLost`: one failure of what they share."""

    nodes: tuple[str, ...]
    silent_s: float
    """Of the one that was silent longest."""


class NodeQuiet(Event, frozen=True, kw_only=True, tag="node_quiet"):
    """A node without workers has missed two heartbeats, or (0 s) is heard again: no loss yet, but no first choice."""

    node: str
    silent_s: float


class LauncherReady(Event, frozen=True, kw_only=True, tag="launcher_ready"):
    """The node's launcher waits in rendezvous, its preparations for `attempt` are done, no old worker is left."""

    node: str
    attempt: int
    offer: StoreOffer


class PreparationFailed(Event, frozen=True, kw_only=True, tag="preparation_failed"):
    node: str
    attempt: int
    error: str


class WorkersStarted(Event, frozen=True, kw_only=True, tag="workers_started"):
    node: str
    attempt: int
    ranks: tuple[int, ...]


class Progressed(Event, frozen=True, kw_only=True, tag="progressed"):
    """The first step of an attempt, then one every 10 s, and one before whatever the step matters to."""

    attempt: int
    step: int | None
    step_at: float | None = None
    """When that step was made; None: not known any better than `at`."""
    last_step: int | None = None
    first: bool = False
    counted: int = 0
    """Steps of the optimizers since the ranks started, by the step clock; 0: not counted."""
    counted_at: float | None = None
    """When the newest of them was made."""
    counted_step: int | None = None
    """Which step of the run that is, where the output and the clock go together."""
    loss: float | None = None
    """The newest finite loss that the first rank that tells one has told. It is only shown."""
    loss_step: int | None = None
    """The step of it, where it is known."""


class RankEnded(Event, frozen=True, kw_only=True, tag="rank_ended"):
    node: str
    attempt: int
    exit: ExitRecord
    step: int | None = None
    last_step: int | None = None


class RanksStopped(Event, frozen=True, kw_only=True, tag="ranks_stopped"):
    """Ranks of one node that we ended on purpose: never evidence of a fault."""

    node: str
    attempt: int
    ranks: tuple[int, ...]
    step: int | None = None
    last_step: int | None = None


class LauncherEnded(Event, frozen=True, kw_only=True, tag="launcher_ended"):
    node: str
    attempt: int
    how: str
    fresh: bool = True
    """False: it may have ended (and been told) before this controller started."""
    code: int | None = None
    """With which exit code it ended by itself; None: by a signal, or it is not known."""


class EvidenceArrived(Event, frozen=True, kw_only=True, tag="evidence_arrived"):
    evidence: NodeEvidence


class FindingArrived(Event, frozen=True, kw_only=True, tag="finding_arrived"):
    node: str
    finding: Finding
    number: int = 0
    """Its number at the agent, counted from 0 (`Heartbeat.findings_from`): a repeated one is known by it."""


class FindingsArrived(Event, frozen=True, kw_only=True, tag="findings_arrived"):
    """Several findings of one heartbeat. Those of one rule on one device are one, with their `count`."""

    node: str
    first: Finding
    others: tuple[dict[str, Any], ...] = ()
    """Of each further one what differs from the first; None: as it is by default."""
    number: int = 0
    """The first one's number at the agent, as in `FindingArrived`."""
    end: int = 0
    """The number behind the last one's."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        first = msgspec.to_builtins(self.first)
        return (self.first, *(msgspec.convert(_changed(first, other), Finding) for other in self.others))


def findings_arrived(at: float, node: str, findings: Sequence[Finding], number: int) -> FindingsArrived:
    """The event of `findings`, which the agent numbers from `number` on."""
    merged: dict[bytes, Finding] = {}
    for finding in findings:
        cause = msgspec.structs.replace(finding, evidence=_NOTHING, at=0.0, mono=0.0, step=None, count=1, fields={})
        key = encode(cause)
        known = merged.get(key)
        merged[key] = finding if known is None else msgspec.structs.replace(known, count=known.count + finding.count)
    first, *others = merged.values()
    base = msgspec.to_builtins(first)
    changes = tuple(_changes(base, msgspec.to_builtins(other)) for other in others)
    return FindingsArrived(at=at, node=node, first=first, others=changes, number=number, end=number + len(findings))


_NOTHING = Evidence(text="")


def _changes(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What of `other` is not as in `first`; None where it is not there."""
    found: dict[str, Any] = {key: None for key in first if key not in other}
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(first.get(key), dict):
            if value != first[key]:
                found[key] = _changes(first[key], value)
        elif key not in first or first[key] != value:
            found[key] = value
    return found


def _changed(first: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The opposite of `_changes`."""
    found = dict(first)
    for key, value in changes.items():
        if value is None:
            found.pop(key, None)
        else:
            nested = isinstance(value, dict) and isinstance(first.get(key), dict)
            found[key] = _changed(first[key], value) if nested else value
    return found


class HangSuspected(Event, frozen=True, kw_only=True, tag="hang_suspected"):
    attempt: int
    report: HangReport


class HangCleared(Event, frozen=True, kw_only=True, tag="hang_cleared"):
    attempt: int
    quiet_s: float


class RankWakeWanted(Event, frozen=True, kw_only=True, tag="rank_wake_wanted"):
    """Ranks are stopped (state T): try SIGCONT before anything else."""

    attempt: int
    ranks: tuple[int, ...]
    stopped_s: float = 0.0


class HangConfirmed(Event, frozen=True, kw_only=True, tag="hang_confirmed"):
    attempt: int
    report: HangReport


class SilenceSeen(Event, frozen=True, kw_only=True, tag="silence_seen"):
    """No progress, and nothing proves a hang: who is where. Said again when that changes."""

    attempt: int
    report: HangReport


class PaceLearned(Event, frozen=True, kw_only=True, tag="pace_learned"):
    """Of journals before `SilenceSeen`: phase -> longest honest pause, seconds."""

    longest_s: dict[str, float]


class CheckpointsSeen(Event, frozen=True, kw_only=True, tag="checkpoints_seen"):
    node: str
    checkpoints: tuple[Checkpoint, ...]
    folders: tuple[str, ...] = ()
    """Where the node's ranks were seen to write them, the one written to last at the end."""


class TiersSeen(Event, frozen=True, kw_only=True, tag="tiers_seen"):
    """Where a node's checkpoints are, when that has changed."""

    node: str
    tiers: NodeTiers


class SnapshotCopiesSeen(Event, frozen=True, kw_only=True, tag="snapshot_copies_seen"):
    """As `TiersSeen`, where nothing has changed but the copies of snapshots: they change with each step mirrored."""

    node: str
    snapshots: tuple[SnapshotPart, ...]


class VersionsCompared(Event, frozen=True, kw_only=True, tag="versions_compared"):
    """What is not the same on all nodes now; sent when that has changed."""

    differences: tuple[Difference, ...]


class StragglersSeen(Event, frozen=True, kw_only=True, tag="stragglers_seen"):
    """The others wait for these ranks at each step; none: not any more. Told, never acted on."""

    attempt: int
    ranks: tuple[int, ...]
    cost: float = 0.0
    """Share of each step."""
    since: float = 0.0
    """Unix seconds."""
    step_s: float = 0.0
    """How long a step takes; 0: not known. (Journals of before have none.)"""
    starved: float = 0.0
    """Share of its time that the slow rank waits for data, where that is what makes it slow."""


class OutsideAlert(Frozen, frozen=True, kw_only=True):
    """An alert of somebody else's monitoring that fires for a node of the job."""

    key: str
    """Of its node and labels: the same as long as it lasts."""
    node: str
    name: str
    text: str = ""
    failure_class: FailureClass = FailureClass.UNKNOWN
    """By a rule; nothing is proven."""
    gpu: str = ""
    suspect: bool = False
    """The site's rules want the node tested before a restart."""
    swap: bool = False
    """The site's rules want the node replaced at a checkpoint."""
    at: float = 0.0
    """When it was heard of last."""


class AlertsSeen(Event, frozen=True, kw_only=True, tag="alerts_seen"):
    """Alerts from outside that fire now, or have ended, as far as the job did not know it."""

    firing: tuple[OutsideAlert, ...] = ()
    ended: tuple[str, ...] = ()
    """Keys."""


class NodesLeaving(Event, frozen=True, kw_only=True, tag="nodes_leaving"):
    """The job's nodes that the scheduler takes out of service; sent when that has changed."""

    nodes: tuple[LeavingNode, ...] = ()


class InputWaitSeen(Event, frozen=True, kw_only=True, tag="input_wait_seen"):
    """These ranks wait for data; none: not any more. Told, never acted on."""

    attempt: int
    ranks: tuple[int, ...]
    """At most 16."""
    count: int = 0
    """How many there are."""
    share: float = 0.0
    """Of the time of the one that waits longest."""
    since: float = 0.0
    """Unix seconds."""


class NumbersSeen(Event, frozen=True, kw_only=True, tag="numbers_seen"):
    """The loss that ranks print is no number any more, or is one again; sent when that has changed."""

    attempt: int
    bad: bool
    step: int | None = None
    """Of the first report of the kind."""
    ranks: tuple[int, ...] = ()
    """Who prints it; of many the first 16."""


class LossSeen(Event, frozen=True, kw_only=True, tag="loss_seen"):
    """The loss that ranks print has gone wrong and does not come back by itself, or (no `alarm`) it is well again.

    Sent when that has changed, and once a minute while it lasts."""

    attempt: int
    alarm: LossAlarm | None = None
    ranks: tuple[int, ...] = ()
    """Who prints it; of many the first 16."""
    step: int | None = None
    """The newest."""


class ReplicasDiffer(Event, frozen=True, kw_only=True, tag="replicas_differ"):
    """Tensors that the script declares to be the same on all of its replicas are not, in a snapshot."""

    attempt: int
    step: int
    compared: int
    """How many replicas there are."""
    odd: tuple[int, ...] = ()
    """The ranks that differ from the majority, at most 16; none: there is no majority of at least three."""
    contents: int = 0
    """How many different ones there are; 0: not known."""
    since: float | None = None
    """When the newest snapshot before was written in which they were the same, by whichever attempt."""
    since_step: int | None = None
    """Its step, if this attempt wrote it."""


class SnapshotSeen(Event, frozen=True, kw_only=True, tag="snapshot_seen"):
    """All ranks have written a snapshot of this step. Told now and then, where snapshots are mirrored.

    Where a script goes back by itself, the newest step of a node before that and its newest now are told at once.
    """

    attempt: int
    step: int


class SpaceSeen(Event, frozen=True, kw_only=True, tag="space_seen"):
    """Whether a node's disks have room, while the job waits for it; sent when that has changed."""

    node: str
    number: int
    full: tuple[str, ...] = ()
    """As in `SpaceReported`."""


class NodeTested(Event, frozen=True, kw_only=True, tag="node_tested"):
    """How far a node is with its active tests; sent when that has changed."""

    node: str
    report: NodeTestReport


class GpusSeen(Event, frozen=True, kw_only=True, tag="gpus_seen"):
    """Which GPUs a node's processes have, where it may be started without one; sent when that has changed."""

    node: str
    gpus: NodeGpus


class StopRequested(Event, frozen=True, kw_only=True, tag="stop_requested"):
    node: str
    signal: str


class NodeDone(Event, frozen=True, kw_only=True, tag="node_done"):
    """The node received the outcome and has ended everything."""

    node: str


class TimerFired(Event, frozen=True, kw_only=True, tag="timer_fired"):
    timer: str


CommandName = Literal[
    "pause",
    "resume",
    "restart",
    "stop",
    "cordon",
    "uncordon",
    "mode",
    "approve",
    "reject",
    "rollback",
    "swap",
    "trace",
    "qualify",
    "correct",
]


class CommandRequest(Frozen, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What somebody asks for: the body of POST /v1/override."""

    command: CommandName
    argument: str = ""
    reason: str = ""
    by: str = ""
    """Who asks, as the client says."""
    munge: str = ""
    """A credential of munge's over `words`: who asks, as munge says."""
    dry_run: bool = False
    """Only say what the command would do."""
    confirm: Literal["", "if_it_interrupts", "always"] = ""
    """Say what it would do, and do nothing: always, or if it interrupts the run or drains a node. The client asks its
    user then, and sends the command again without this."""

    @property
    def words(self) -> tuple[str, str, str]:
        """What is signed of it."""
        return self.command, self.argument, self.reason

    def event(self, at: float, by: str, uid: int | None = None, role: str = "") -> OperatorCommand:
        """As the journal and the job have it. `by`, `uid`: who gave it, as far as that is proven."""
        return OperatorCommand(
            at=at,
            command=self.command,
            argument=clean_line(self.argument, 200),
            reason=clean_line(self.reason, 500),
            by=by,
            uid=uid,
            role=role,
        )


class OperatorCommand(Event, frozen=True, kw_only=True, tag="override_given"):
    """An operator's command. Operators win and are never undone by policy."""

    command: CommandName
    argument: str = ""
    reason: str = ""
    by: str = ""
    """Who gave it, as far as that is proven."""
    uid: int | None = None
    """The user who gave it, where the kernel or munge proves that."""
    role: str = ""
    """The role of the token or user that gave it (docs/access.md); empty: the job's own token, which gives all."""
    unrecorded: str = ""
    """It was acted upon before it was in the journal, which could not be written: why not."""


class JournalStalled(Event, frozen=True, kw_only=True, tag="journal_stalled"):
    """The journal could not be written for so long, and can again: nothing was decided meanwhile."""

    seconds: float


class JournalDamaged(Event, frozen=True, kw_only=True, tag="journal_damaged"):
    """Records of the journal were not whole any more, or gone: what is whole has been replayed before this."""

    what: str
    lost: int = 0
    events: bool = False
    """Events may be among what is lost: what was decided since may be unknown."""
    orders: bool = False
    """Words of operators may be among it."""
    living: bool = False
    """Ranks may have run on meanwhile."""
    attempt: int = 0
    """The newest that nodes were told of, as far as that is known."""
    formed: bool = False
    """Its ranks were let go."""
    ended: bool = False
    """Nodes were told that the job has ended."""


class SchedulerAnswered(Event, frozen=True, kw_only=True, tag="scheduler_answered"):
    """What became of a `SchedulerRequest`; `unavailable` ones are tried again."""

    number: int
    outcome: RequestOutcome
    text: str = ""


class LedgerNode(Frozen, frozen=True, kw_only=True):
    """What the ledger of all jobs says of a node that is not like any other."""

    node: str
    """As the scheduler calls it."""
    cordon: str = ""
    """Why no job uses it; empty: it may be used."""
    gpu: str = ""
    by: str = ""
    failure_class: str = ""
    cordoned_at: float = 0.0
    until: float | None = None
    """When the cordon ends."""
    probation_until: float | None = None
    """It was repaired, and has not proven itself until then."""
    retest_due: bool = False
    points: float = 0.0
    lemon: bool = False
    why: tuple[str, ...] = ()
    """What the points are for."""


class LedgerSeen(Event, frozen=True, kw_only=True, tag="ledger_seen"):
    """What the ledger of all jobs says now; sent when that has changed."""

    nodes: tuple[LedgerNode, ...] = ()
    """Those of the cluster with a cordon, on probation or with points; of too many those that are cordoned."""
    fleet: int = 0
    """How many nodes it knows."""
    problem: str = ""
    """Why it cannot be read: what was read before holds."""
    unwritten: str = ""
    """Why nothing can be written to it."""


class LedgerWritten(Event, frozen=True, kw_only=True, tag="ledger_written"):
    """The record of a `LedgerWrite` is on stable storage."""

    number: int


class OpinionAsked(Event, frozen=True, kw_only=True, tag="opinion_asked"):
    """An operator had a language model asked about an incident."""

    incident: str


class OpinionArrived(Event, frozen=True, kw_only=True, tag="opinion_arrived"):
    """A language model's opinion on an incident: shown, and never acted upon."""

    incident: str
    opinion: Opinion


class IncidentRecurred(Event, frozen=True, kw_only=True, tag="incident_recurred"):
    """What an incident has in common with earlier ones; none: nothing any more. Told, and never acted upon."""

    incident: str
    recurrences: tuple[Recurrence, ...] = ()


class IncidentMemorySeen(Event, frozen=True, kw_only=True, tag="incident_memory_seen"):
    """The store of past incidents cannot be used, or can again."""

    problem: str = ""


AnyEvent = (
    ControllerStarted
    | JobDefined
    | JobRequeued
    | NodeJoined
    | NodeLost
    | NodesLost
    | NodeQuiet
    | LauncherReady
    | PreparationFailed
    | WorkersStarted
    | Progressed
    | RankEnded
    | RanksStopped
    | LauncherEnded
    | EvidenceArrived
    | FindingArrived
    | FindingsArrived
    | HangSuspected
    | HangCleared
    | RankWakeWanted
    | HangConfirmed
    | SilenceSeen
    | PaceLearned
    | CheckpointsSeen
    | TiersSeen
    | SnapshotCopiesSeen
    | VersionsCompared
    | StragglersSeen
    | AlertsSeen
    | NodesLeaving
    | InputWaitSeen
    | NumbersSeen
    | LossSeen
    | ReplicasDiffer
    | SnapshotSeen
    | SpaceSeen
    | NodeTested
    | GpusSeen
    | StopRequested
    | NodeDone
    | TimerFired
    | OperatorCommand
    | JournalStalled
    | JournalDamaged
    | SchedulerAnswered
    | LedgerSeen
    | LedgerWritten
    | OpinionAsked
    | OpinionArrived
    | IncidentRecurred
    | IncidentMemorySeen
)


EVENT_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(AnyEvent))


# ----- actions: what the job wants done -----


class Assign(Frozen, frozen=True, kw_only=True, tag="assign"):
    """Make this the node's desired state, and send it at once."""

    assignment: Assignment


class SetTimer(Frozen, frozen=True, kw_only=True, tag="set_timer"):
    """Feed `TimerFired(timer)` back at `at`; replaces a timer of the same name. `at` None cancels it."""

    timer: str
    at: float | None


NoteValue = str | int | float | bool | tuple[str | int, ...] | None


class Note(Frozen, frozen=True, kw_only=True, tag="note"):
    """A line of the job's story: for `timeline`, and for the user's terminal when `loud`.

    `sentences.toml` has the kinds, and `supervisor.notes` makes the sentence.
    """

    kind: str = ""
    arguments: dict[str, NoteValue] = {}
    text: str = ""
    """Of a note without a kind, from a journal before there were any."""
    incident: str = ""
    loud: bool = False
    refused: bool = False
    """An operator's command that is not carried out, and why."""
    unknown_node: bool = False
    """An operator's command names a node that the job has never had: one that is yet to come, or a typing error."""


class SchedulerRequest(Frozen, frozen=True, kw_only=True, tag="scheduler_order"):
    """Ask the scheduler. Answered by `SchedulerAnswered` with this number; given again after a restart until then."""

    number: int
    kind: Literal["drain", "undrain", "requeue", "cancel", "look", "end_step"]
    """`look`: whether it starts the job again by itself; `done` says that it does. `end_step`: the run has ended, and
    the scheduler may still wait for processes of nodes that nobody hears of."""
    node: str = ""
    """As the scheduler calls it."""
    reason: str = ""
    exclude: tuple[str, ...] = ()
    """Of `requeue`: nodes that the job must not get again."""
    avoid: tuple[str, ...] = ()
    """Of `requeue`: nodes that it had better not get again: they were lost, and nothing else is known against them.
    Of `end_step`: the nodes that nobody hears of."""


class SchedulerComment(Frozen, frozen=True, kw_only=True, tag="scheduler_comment"):
    """What the scheduler's own record of the job is to say of it. Best effort: nothing answers, nothing waits."""

    text: str


class LedgerWrite(Frozen, frozen=True, kw_only=True, tag="ledger_write"):
    """Write a record to the ledger of all jobs. Answered by `LedgerWritten`; given again after a restart until then."""

    number: int
    id: str
    """The entry's: written twice, it counts once."""
    at: float
    by: str
    job: str
    what: LedgerRecord


class OpinionWanted(Frozen, frozen=True, kw_only=True, tag="opinion_wanted"):
    """Ask the language model, if there is one, about this incident. Nothing waits for the answer."""

    incident: str


class End(Frozen, frozen=True, kw_only=True, tag="end"):
    """The job has ended and every node knows (or is lost): the controller may go."""

    outcome: Outcome


Action = Assign | SetTimer | Note | SchedulerRequest | SchedulerComment | LedgerWrite | OpinionWanted | End

decode_agent_message = msgspec.json.Decoder(AgentMessage).decode
decode_controller_message = msgspec.json.Decoder(ControllerMessage | ClockReply | WatchedNow).decode
decode_command = msgspec.json.Decoder(CommandRequest).decode
decode_event = msgspec.json.Decoder(AnyEvent).decode
encode = msgspec.json.Encoder().encode
