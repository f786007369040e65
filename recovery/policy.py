"""What is done about a verdict, and when about a silence that nothing explains. Pure.

The verdict may be wrong: every plan either restarts the run, ends it, or waits for a person with a reason, and none can
restart for ever: `RestartBudget` bounds that. The first restart comes at once, because most failures do not repeat.
Progress gives the whole budget back; a limit for the hour holds all the same, because a job that fails every minute is
not kept alive but kept broken.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Final, Literal

from diagnosis.incident import Culprit, Verdict
from diagnosis.signals import Frozen
from diagnosis.taxonomy import TAXONOMY, FailureClass
from recovery.checkpoint import ResumeSituation
from recovery.cordon import Cordon

NOT_WORTH_RETRYING = 90
BUDGET_SPENT = 91

SURE_ENOUGH = 0.5
"""Below this confidence nobody is cordoned."""
WAIT_S = 5.0
"""First back-off of the `wait` classes."""
FABRIC_WAIT_S = 5.0
FULL_DISK_TRIES = 12
"""Starts in a row that found room and came no further, over half an hour: then a person has to look."""
_QUOTA = re.compile(r"\[Errno 122\]|disk quota exceeded", re.IGNORECASE)
"""A quota is a `storage_error`, and what helps is what helps a full disk."""
_UNREADABLE = re.compile(
    r"PytorchStreamReader failed|archive is corrupted|central directory|pickle data was truncated|ran out of input"
    r"|unexpected EOF|invalid load key|MetadataIncompleteBuffer|HeaderTooLarge|InvalidHeaderDeserialization|BadZipFile",
    re.IGNORECASE,
)
"""Said of a checkpoint's bytes. One that does not fit the model is another matter: nor do the ones before it."""
FREE_PREEMPTIONS = 5
"""Preemptions are not charged to the budget; so many in a row without progress are something else."""

_ONCE = frozenset(
    {
        FailureClass.COLLECTIVE_MISMATCH,
        FailureClass.CUDA_ILLEGAL_ACCESS,
        FailureClass.GPU_OOM,
        FailureClass.HOST_OOM,
        FailureClass.FRAMEWORK_BUG,
        FailureClass.SCRIPT_ERROR,
    }
)
"""Restarted once, also if the verdict says `stop`; the second time without progress in between it stops. So is a class
that a restart repeats, if the verdict says `restart`: only a line of output says it (`Account.is_aside`)."""

Mode = Literal["observe", "recommend", "enforce"]


class Plan(Frozen, frozen=True, kw_only=True):
    """What is done about a verdict. `why` is one sentence."""

    kind: Literal["restart", "stop", "hold", "succeed", "ignore", "requeue"]
    """`requeue`: the scheduler is asked to start the job again on other nodes, if no node comes back in time."""
    why: str
    cordons: tuple[Cordon, ...] = ()
    delay_s: float = 0.0
    """Back-off before the next attempt."""
    counts: bool = True
    """Whether it is charged to the budget."""
    exit_code: int | None = None
    """For `stop`: what `unbroken run` exits with (90: not worth retrying, 91: budgets spent)."""
    until: Literal["", "space", "progress"] = ""
    """`space`, for `hold`: it goes on by itself when there is room on disks again. `progress`, for `ignore`: a hang is
    left to a person, and its incident is open until progress comes back."""
    breaker: bool = False
    """For `hold`: the circuit breaker stood in the way of the cordons that were wanted."""
    needs_approval: bool = False
    """In mode `recommend`: proposed, not done until `unbroken approve`."""
    rollback: ResumeSituation | None = None
    """For `restart`: not from the newest checkpoint, but from one that is old enough for this."""
    skip_batches: int = 0
    """After that checkpoint."""


class Situation(Frozen, frozen=True, kw_only=True):
    """What policy must know besides the verdict."""

    incident: str
    at: float
    mode: Mode = "enforce"
    broken: bool = True
    """The attempt cannot go on as it is (a rank, launcher or node is gone)."""
    work_may_be_complete: bool = False
    """No rank ended badly, and no step count says that work is left."""
    launcher_code: int | None = None
    """A launcher ended by itself, with this exit code, before any rank was started, and would do so again."""
    deterministic: bool = False
    """The same line of code failed at the same step before."""
    repeats: int = 0
    """Earlier incidents of this class since the last progress."""
    culprit_repeats: int = 0
    """Incidents of the last 5 minutes that named one of these culprits."""
    delay_s: float | None = 0.0
    """What the restart budget says; None: it is spent."""
    nodes: int = 1
    """Members of the attempt."""
    replacements: int = 0
    """Nodes that could take a place."""
    nodes_min: int = 1
    lost: tuple[str, ...] = ()
    """Nodes that are gone anyway."""
    loaded: str = ""
    """The checkpoint that the attempt resumed from, if it came no further than that."""
    may_cordon: tuple[str, ...] = ()
    """Culprit nodes that the circuit breaker lets policy cordon."""
    vouched: tuple[str, ...] = ()
    """Nodes that an operator, knowing of this incident, said may be used."""
    on_probation: tuple[str, ...] = ()
    """Culprit nodes that were repaired lately: what is said of them is not the first bad word."""
    unproven: bool = False
    """A silence that is acted on because of what it has cost: it may have been an honest wait."""
    did_not_help: int = 0
    """Restarts for a hang of the same kind at the same place and step; 0 where the attempt cannot go on."""
    may_requeue: bool = False
    """The scheduler can be asked to start the job again on other nodes."""
    without_gpu: tuple[str, ...] = ()
    """Culprit nodes that can go on without the GPU that is to blame, where no other node can take their place."""
    fewer_failed: tuple[str, ...] = ()
    """Nodes that ran fewer processes in this attempt, which made no step."""
    failed_tests: bool = False
    """Active tests name the culprits: each failed with two partners that do well with others."""


def plan(verdict: Verdict, situation: Situation) -> Plan:
    """The plan for `verdict`, with one sentence why."""
    name = verdict.failure_class.value
    retry = TAXONOMY[verdict.failure_class].retry
    if situation.launcher_code is not None:
        return _stop("torchrun's own error: a restart would repeat it", situation.launcher_code)
    if retry == "none" or verdict.action == "none":
        return _nothing_to_restart(verdict, situation)
    if situation.fewer_failed:
        nodes = ", ".join(situation.fewer_failed)
        return _restart(verdict, situation, f"with fewer processes on {nodes} no step was made ({name})")
    if situation.deterministic and retry in ("same", "back", "never"):
        return _stop(f"{name} at the same step from the same line again: a restart would repeat it")
    by_a_line = retry == "never" and verdict.action == "restart"
    if verdict.failure_class in _ONCE or by_a_line:
        if situation.repeats >= 1:
            return _stop(f"{name} again without progress in between")
    elif verdict.action == "stop" or retry == "never":
        return _stop(f"{name}: a restart would repeat it")
    if verdict.action == "hold" and retry != "wait":
        return Plan(kind="hold", why=f"{name}: somebody has to look first")
    if lacks_room(verdict):
        if situation.repeats >= FULL_DISK_TRIES:
            return Plan(kind="hold", why=f"{name}: {situation.repeats} starts found room at first, and none in the end")
        return Plan(
            kind="hold",
            why=f"{name}: nothing is started before there is room; it goes on by itself then",
            delay_s=_back_off_s(situation),
            counts=False,
            until="space",
            needs_approval=situation.mode == "recommend",
        )
    return _restart(verdict, situation)


def lacks_room(verdict: Verdict) -> bool:
    """A disk is full, or a quota used up."""
    if verdict.failure_class is FailureClass.DISK_FULL:
        return True
    of_storage = verdict.failure_class is FailureClass.STORAGE_ERROR
    return of_storage and any(_QUOTA.search(one.text) is not None for one in verdict.evidence)


def _back_off_s(situation: Situation) -> float:
    """Of what takes time to cure."""
    return float(min(300.0, WAIT_S * 2 ** min(situation.repeats, 10)))


def _stop(why: str, exit_code: int = NOT_WORTH_RETRYING) -> Plan:
    return Plan(kind="stop", why=why, exit_code=exit_code, counts=False)


def _nothing_to_restart(verdict: Verdict, situation: Situation) -> Plan:
    name = verdict.failure_class.value
    if verdict.failure_class is FailureClass.EXIT_HANG:
        if situation.work_may_be_complete:
            return Plan(kind="succeed", why="all work was done, only the end hung", counts=False)
        return _restart(verdict, situation, "it looks like a hang at the end, but work is left")
    if situation.broken:
        return _restart(verdict, situation, f"the verdict is {name}, but the run cannot go on as it is")
    return Plan(kind="ignore", why=f"{name}: nothing to restart", counts=False)


def _restart(verdict: Verdict, situation: Situation, because: str = "") -> Plan:
    preempted = verdict.failure_class is FailureClass.PREEMPTED_OR_CANCELLED
    counts = not preempted or situation.repeats >= FREE_PREEMPTIONS
    stands = situation.did_not_help >= TRIES
    delay_s = situation.delay_s
    if delay_s is None:
        if counts and not stands:  # waiting costs no restart
            return _stop("the restart budget is spent without progress", BUDGET_SPENT)
        delay_s = 0.0
    retry = TAXONOMY[verdict.failure_class].retry
    if retry == "wait":
        delay_s = max(delay_s, _back_off_s(situation))
    cordons: tuple[Cordon, ...] = ()
    requeue = situation.may_requeue and bool(situation.lost) and _short(situation)
    name = verdict.failure_class.value
    cure = f"{name} is not proven, but the silence has reached its limit" if situation.unproven else ""
    why = because or cure or f"this may cure the failure ({name})"
    if _wants_cordon(verdict, situation):
        blamed = _nodes_to_cordon(verdict, situation)
        held = [c.node for c in blamed if c.node not in situation.may_cordon]
        if held:
            return Plan(
                kind="hold",
                why=f"{', '.join(held)} should be cordoned, but too many were within the hour: an operator decides "
                "(`unbroken cordon` leaves a node out)",
                breaker=True,
            )
        if not blamed:
            vouched = any(culprit.node in situation.vouched for culprit in verdict.culprits)
            how = "the nodes stay, because an operator vouched for them" if vouched else "lost nodes are left out"
            why = f"{how} ({name})"
        elif _go_on(blamed, situation):
            cordons = blamed
            why = f"no node can replace {_names(blamed)}, so the run goes on there with a GPU less ({name})"
        elif _short(situation, len(blamed)) and not situation.may_requeue:
            why = f"no node can replace {_names(blamed)}, so the job restarts on {'it' if len(blamed) == 1 else 'them'}"
        else:
            requeue = _short(situation, len(blamed))
            cordons = blamed
            why = f"without node{'s' * (len(blamed) > 1)} {_names(blamed)} ({name})"
    elif verdict.failure_class is FailureClass.NCCL_NETWORK:
        delay_s = max(delay_s, FABRIC_WAIT_S)
    if requeue:
        gone = ", ".join((*situation.lost, *(cordon.node for cordon in cordons)))
        why = f"no node is left to replace {gone} ({name}); the scheduler is to start the job again on others"
    if stands and not cordons and not requeue:
        why = f"{situation.did_not_help} restarts at this place and step did not help: a person has to look"
        return Plan(kind="ignore", why=why, counts=False, until="progress")
    return Plan(
        kind="requeue" if requeue else "restart",
        why=why,
        cordons=cordons,
        delay_s=delay_s,
        counts=counts,
        needs_approval=situation.mode == "recommend",
        rollback=_the_one_before(verdict, situation),
    )


def _the_one_before(verdict: Verdict, situation: Situation) -> ResumeSituation | None:
    """Where the checkpoint that was to be loaded cannot be read, although all that is known of it says it is whole."""
    if verdict.failure_class is not FailureClass.CHECKPOINT_CORRUPT_OR_MISMATCH or not situation.loaded:
        return None
    if verdict.confidence < SURE_ENOUGH or not any(_UNREADABLE.search(one.text) for one in verdict.evidence):
        return None
    return ResumeSituation(kind="mismatch", path=situation.loaded)


def _short(situation: Situation, cordoned: int = 0) -> bool:
    """Whether too few nodes are left, with so many more cordoned."""
    return situation.nodes - cordoned + situation.replacements < situation.nodes_min


def _go_on(blamed: tuple[Cordon, ...], situation: Situation) -> bool:
    """Whether a node that is blamed is to go on without its bad GPU."""
    others = [cordon for cordon in blamed if cordon.node not in situation.without_gpu]
    return len(others) < len(blamed) > situation.replacements and not _short(situation, len(others))


def _names(cordons: tuple[Cordon, ...]) -> str:
    return ", ".join(cordon.node for cordon in cordons)


def _wants_cordon(verdict: Verdict, situation: Situation) -> bool:
    """Whether the culprits' nodes should be left out."""
    if situation.failed_tests:
        return True
    if verdict.confidence < SURE_ENOUGH:
        return False
    if verdict.failure_class is FailureClass.NCCL_NETWORK:
        # One bad word from a link is not a bad node: the second within minutes is, and the first after a repair.
        return situation.culprit_repeats >= 1 or bool(situation.on_probation)
    if verdict.action in ("cordon_gpu_and_restart", "cordon_node_and_restart", "restart_excluding"):
        return True
    return TAXONOMY[verdict.failure_class].retry == "exclude" and verdict.action != "restart"


_SUSPICIONS: Final = frozenset({FailureClass.NCCL_TIMEOUT})
"""Symptoms behind which a bad node may be, besides the classes whose cure is to leave a node out."""


def suspects(verdict: Verdict, situation: Situation, plan: Plan, alerted: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Nodes whose hardware or network is suspected and not proven to be the cause: worth a test before the restart.

    `alerted`: nodes that the site's own monitoring suspects; they count where the verdict does not speak against it.
    Not where the answer could change nothing: the plan is no restart, or no node could take the place of a bad one.
    """
    entry = TAXONOMY[verdict.failure_class]
    machine = entry.retry == "exclude" and entry.domain in ("accelerator", "host", "network", "performance")
    unclear = verdict.failure_class is FailureClass.UNKNOWN and bool(alerted)
    if not (machine or unclear or verdict.failure_class in _SUSPICIONS) or _wants_cordon(verdict, situation):
        return ()
    if plan.kind != "restart" or (_short(situation, 1) and not situation.may_requeue):
        return ()
    spared = {*situation.lost, *situation.vouched}
    named = [*alerted] if unclear else [*(one.node for one in verdict.culprits), *alerted]
    return tuple(dict.fromkeys(name for name in named if name and name not in spared))


def _nodes_to_cordon(verdict: Verdict, situation: Situation) -> tuple[Cordon, ...]:
    """One cordon for each culprit's node. A lost node needs none: it is not used until it registers again."""
    found: dict[str, Cordon] = {}
    for culprit in verdict.culprits:
        spared = culprit.node in situation.lost or culprit.node in situation.vouched
        if culprit.node and not spared and culprit.node not in found:
            found[culprit.node] = _cordon(verdict, culprit, situation)
    return tuple(found.values())


def _cordon(verdict: Verdict, culprit: Culprit, situation: Situation) -> Cordon:
    return Cordon(
        node=culprit.node,
        gpu=culprit.gpu if verdict.action == "cordon_gpu_and_restart" else "",
        culprit_gpu=culprit.gpu if verdict.action != "cordon_gpu_and_restart" else "",
        reason=verdict.why,
        failure_class=verdict.failure_class,
        incident=situation.incident,
        at=situation.at,
    )


WINDOW_S = 3600.0
FIRST_DELAY_S = 1.0
"""Back-off before the second restart without progress; it doubles from there."""
LONGEST_DELAY_S = 300.0
HOUR_FACTOR = 10
"""Restarts within the window, progress or not: `HOUR_FACTOR` times `max_restarts`."""


class RestartBudget:
    """Restarts charged so far. Mutable; owned by the job. Times are Unix seconds."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.used = 0
        """Restarts since the last progress."""
        self._charged: deque[float] = deque(maxlen=max(1, HOUR_FACTOR * max_restarts))

    def in_window(self, now: float) -> int:
        while self._charged and self._charged[0] <= now - WINDOW_S:
            self._charged.popleft()
        return len(self._charged)

    def next_delay_s(self, now: float) -> float | None:
        """Back-off before the next restart, or None when the budget is spent."""
        if self.used >= self.max_restarts or self.in_window(now) >= HOUR_FACTOR * self.max_restarts:
            return None
        if self.used == 0:
            return 0.0
        return float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(self.used - 1, 20)))

    def charge(self, now: float) -> None:
        """One more restart. The caller has asked `next_delay_s` first."""
        assert self.next_delay_s(now) is not None, "a spent budget was charged"
        self.used += 1
        self._charged.append(now)

    def progressed(self) -> None:
        """The run got further than ever before."""
        self.used = 0


# ----- how long an unproven silence may last -----
#
# The rule is that of ski rental. A restart costs a recovery plus the steps since the last checkpoint. When the wait has
# cost as much, the job restarts: so it never costs more than twice the best choice. But an honest wait begins again
# after a restart. So the shortest limit is generous, the time that a place in the code has needed before counts several
# times over, a restart that did not help makes the next limit longer, and after two of them there is none.

LEAST_S: Final = 60.0
"""Never earlier, whatever is set."""
AUTOMATIC_LEAST_S: Final = 600.0
"""The same where nobody has set anything: honest waits of minutes are common; torch waits as long with NCCL."""
AGAIN_FACTOR: Final = 4.0
"""By how much longer is waited where a restart did not help."""
TRIES: Final = 2
"""Restarts of the same ranks at the same place and step; then a person has to look."""
BEFORE_TIMEOUT_S: Final = 15.0
"""A restart comes at the latest so long before the collective's own time-out would end the run."""


class SilenceFigures(Frozen, frozen=True, kw_only=True):
    """What is known of this run and this silence; seconds."""

    recovery_s: float = 0.0
    """From the decision to restart to the first step: the slowest so far, else the first start."""
    redo_s: float = 0.0
    """Training since what the next attempt would go on from: of the whole attempt where there is no checkpoint."""
    needed_s: float = 0.0
    """The longest honest wait at this place before."""
    did_not_help: int = 0
    """Restarts of the same ranks at the same place and step."""
    timeout_s: float | None = None
    """After so long the waiting ranks' own collective ends the run."""
    over: bool = False
    """Ranks have ended well and only the end is waited for: a restart would win nothing, and may lose what is saved."""


class SilenceLimit(Frozen, frozen=True, kw_only=True):
    """`seconds` of silence after which the job restarts; None: it does not. `why` says so in words."""

    seconds: float | None
    why: str


def silence_limit(
    figures: SilenceFigures, *, patience_s: float | None = None, factor: float = 3.0, off: bool = False
) -> SilenceLimit:
    """When this silence may be acted on. `patience_s`: what the user has set; None: by the run's own figures."""
    if off:
        return SilenceLimit(seconds=None, why="Nothing is done about it (hang.off)")
    if figures.over:
        return SilenceLimit(
            seconds=None,
            why="Nothing is done about it: ranks have ended well, and what still runs may save what came of it",
        )
    if figures.did_not_help >= TRIES:
        return SilenceLimit(
            seconds=None, why=f"Nothing is done about it: {figures.did_not_help} restarts at this place did not help"
        )
    cost_s = figures.recovery_s + figures.redo_s
    if patience_s is not None:
        seconds = max(LEAST_S, patience_s)
        why = f"If this lasts {seconds:.0f} s (--patience), the job restarts"
    elif cost_s > AUTOMATIC_LEAST_S:
        seconds = cost_s
        again = f"{figures.redo_s:.0f} s of steps made again"
        why = f"If this lasts {cost_s:.0f} s, the job restarts: that is what a restart costs ({again})"
    else:
        seconds, why = AUTOMATIC_LEAST_S, f"If this lasts {AUTOMATIC_LEAST_S:.0f} s, the job restarts"
    if figures.needed_s * factor > seconds:
        seconds = figures.needed_s * factor
        before = f"this place has taken up to {figures.needed_s:.0f} s before"
        why = f"If this lasts {seconds:.0f} s, the job restarts: {before}"
    if figures.did_not_help:
        seconds *= AGAIN_FACTOR**figures.did_not_help
        why = f"If this lasts {seconds:.0f} s, the job restarts: the restart before did not help"
    if figures.timeout_s is not None and LEAST_S <= figures.timeout_s - BEFORE_TIMEOUT_S < seconds:
        seconds = figures.timeout_s - BEFORE_TIMEOUT_S
        ends = f"at {figures.timeout_s:.0f} s the collective's own time-out would end the run"
        why = f"If this lasts {seconds:.0f} s, the job restarts: {ends}"
    return SilenceLimit(seconds=round(seconds, 1), why=why)
