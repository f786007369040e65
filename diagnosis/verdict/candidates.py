"""All readings of an incident, each as a `Candidate`: what the accounts, findings and other evidence say that it was.

`from_accounts`: which of the ranks' accounts is the first fault. `from_findings`: findings of kernel, GPU, host and
scheduler, joined to the ranks whose failure they explain. `from_nodes`, `from_hang`, `from_logs`: lost nodes,
launchers, hangs, flight recorders, stacks, curves. `explained`: the ends of old logs that no account explains.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from diagnosis import exceptions, flight, stacks
from diagnosis.incident import (
    Anomaly,
    Candidate,
    Culprit,
    FlightKind,
    FlightReport,
    HangReport,
    Incident,
    LogEvidence,
    LogKind,
    LogSummary,
    Slowdown,
)
from diagnosis.kernel.causes import is_of_training
from diagnosis.signals import Evidence, ExitRecord, Finding, RankStack, rank_names
from diagnosis.stacks import Activity, StackGroup, activity, bare, group, is_native, place, tells_of
from diagnosis.taxonomy import TAXONOMY, FailureClass, RemedyAction
from diagnosis.tracebacks import split_prefix
from diagnosis.verdict import calls
from diagnosis.verdict.accounts import OUTRANKS, Account, Accounts
from diagnosis.verdict.log_accounts import last_counted, last_training, lines_after, shows_life
from diagnosis.verdict.weights import Row, current, first_factor

ENDING_S: Final = 5.0
"""A rank may take this long to end after it raised, on a busy machine."""
_CRASHES: Final = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
TOGETHER_S: Final = 1.0
"""What fails within this time fails together: buffers and clocks blur the order."""


def from_accounts(accounts: Sequence[Account], world_size: int, *, lost_elsewhere: bool = False) -> list[Candidate]:
    """Readings of what the ranks say, in the order of `accounts` (the first that ended first).

    `lost_elsewhere`: a node was lost or the job hung before: that explains lost connections.
    """
    factors = current().factor
    failed = [one for one in accounts if one.failed]
    if not failed:
        return []
    if all(one.ended_by("SIGTERM") for one in failed) and len(failed) >= max(2, world_size):
        return [_all_terminated(failed)]
    first = [one for one in failed if not one.is_cascade]
    quitter = _quitter(accounts, first)
    if quitter is not None:
        return [_quit_candidate(quitter, failed)]
    if not first:
        return _only_cascades(failed, lost_elsewhere)
    origin, sure = _first_fault(first)
    same = [one for one in first if one.fingerprint and one.fingerprint == origin.fingerprint]
    everyone = len(same) > 1 and len(same) >= max(len(accounts), world_size)
    candidates = [_of_the_wire(origin, first) or _candidate(origin, len(same) if everyone else 0, failed, sure)]
    if origin.failure_class is FailureClass.WORKER_CRASH and origin.ended_by("SIGKILL"):
        candidates.append(_perhaps_memory(origin))
    for one in first:
        if one is not origin and one not in same and len(candidates) < 6:
            together = abs(one.when - origin.when) <= TOGETHER_S
            factor = factors["failed_together"] if together else factors["failed_later"]
            candidates.append(_candidate(one, 0, (), factor))
    return candidates


def _first_fault(first: list[Account]) -> tuple[Account, float]:
    """The first account that explains something, and how much of its confidence holds.

    A time-out explains nothing: an account after it still counts. Among accounts without an order the surest wins.
    """
    causes = [one for one in first if TAXONOMY[one.failure_class].kind != "symptom"]
    if not causes:
        # A crash comes before the time-outs and lost connections of those that miss the rank.
        return next((one for one in first if one.ended_by(*_CRASHES)), first[0]), 1.0
    # The interpreter of a rank that raised closes its connections, and takes longer to end than the peers that miss it.
    raised = [one for one in causes if not one.blames_peer and one.when <= causes[0].when + ENDING_S]
    causes = raised if causes[0].blames_peer and raised else causes
    # The rank with the broken device may report it late.
    broken = [one for one in causes if TAXONOMY[one.failure_class].domain == "accelerator"]
    causes = broken or causes
    origin = max((one for one in causes if one.when == causes[0].when), key=lambda one: one.confidence)
    return origin, 1.0 if broken or origin.when <= first[0].when else current().factor["failed_together"]


def _perhaps_memory(account: Account) -> Candidate:
    return Candidate(
        failure_class=FailureClass.HOST_OOM,
        confidence=current().confidence["sigkill_perhaps_memory"],
        why=f"{account.who} was killed by SIGKILL: most often for the host's memory, but no kernel log tells",
        culprits=account.culprits,
        evidence=account.exit_evidence,
    )


def _quitter(accounts: Sequence[Account], first: list[Account]) -> Account | None:
    """A rank that ended with code 0, before the others failed only because it was gone."""
    # gloo aborts a rank whose peer left a transfer unfinished: an abort without words is a consequence as well.
    # So is a time-out.
    if not all(
        one.failure_class is FailureClass.NCCL_TIMEOUT
        or (one.failure_class is FailureClass.WORKER_CRASH and one.ended_by("SIGABRT"))
        for one in first
    ):
        return None
    earliest = min(one.when for one in accounts if one.failed)
    gone = [one for one in accounts if one.exit is not None and one.exit.code == 0 and not one.exit.stopped_by_us]
    return next((one for one in gone if one.when <= earliest + 1.0), None)


def _quit_candidate(account: Account, failed: list[Account]) -> Candidate:
    others = f"{len(failed)} other rank{'s' * (len(failed) > 1)}"
    return Candidate(
        failure_class=FailureClass.WORKER_CRASH,
        confidence=current().confidence["ended_with_code_0"],
        why=f"{account.who} ended with code 0 while the others still trained; {others} failed because of it",
        culprits=account.culprits,
        evidence=(*account.exit_evidence, *(line for one in failed[:3] for line in one.evidence[:1])),
        instead=_instead(account),
        # The line at which the others lost it: the same line at the same step again is no accident.
        fingerprint=f"code 0 before {failed[0].fingerprint}" if failed[0].fingerprint else "",
    )


def _only_cascades(failed: list[Account], lost_elsewhere: bool) -> list[Candidate]:
    """Every rank blames another: the dead peer is elsewhere, or the network failed."""
    origin, confidences = failed[0], current().confidence
    gone = _blamed(failed)
    if gone:
        names = f"{len(failed)} ranks name" if len(failed) > 1 else f"{origin.who} names"
        why = f"{names} {gone} as the one that is gone, and nothing tells why; {origin.who} {origin.summary}"
    elif len(failed) > 1:
        why = f"{len(failed)} ranks lost their connections and none failed of itself; {origin.who} {origin.summary}"
    else:
        why = f"a connection was lost and nothing tells who failed before; {origin.who} {origin.summary}"
    return [
        Candidate(
            failure_class=origin.failure_class,
            confidence=(
                confidences["only_consequences_with_a_lost_node"]
                if lost_elsewhere
                else min(confidences["only_consequences"], origin.confidence)
            ),
            why=why,
            culprits=(Culprit(node=gone),) if gone else () if len(failed) > 1 else origin.culprits,
            evidence=origin.evidence,
        )
    ]


def _blamed(failed: list[Account]) -> str:
    """The host or address that most of the accounts with one name."""
    named = Counter(one.blames for one in failed if one.blames).most_common(2)
    return named[0][0] if named and 2 * named[0][1] > sum(count for _, count in named) else ""


def _of_the_wire(origin: Account, first: list[Account]) -> Candidate | None:
    """Several ranks lost the same peer: the peer is the culprit, not the rank that reported it first."""
    alike = [one for one in first if one.failure_class is FailureClass.NCCL_NETWORK]
    gone = _blamed(alike) if origin in alike and len(alike) > 2 else ""
    if not gone:
        return None
    count = sum(one.blames == gone for one in alike)
    return Candidate(
        failure_class=FailureClass.NCCL_NETWORK,
        confidence=origin.confidence,
        why=f"{count} of {len(alike)} that lost a connection lost the one to {gone}; {origin.who} {origin.summary}",
        culprits=(Culprit(node=gone),),
        evidence=origin.evidence,
        fingerprint=origin.fingerprint,
    )


def _all_terminated(accounts: list[Account]) -> Candidate:
    return Candidate(
        failure_class=FailureClass.PREEMPTED_OR_CANCELLED,
        confidence=current().confidence["all_terminated"],
        why=f"all {len(accounts)} ranks got SIGTERM from outside",
        evidence=tuple(line for one in accounts[:3] for line in one.exit_evidence),
    )


def _candidate(account: Account, everyone: int, failed: Sequence[Account], factor: float) -> Candidate:
    why = f"all {everyone} ranks {account.summary}" if everyone else f"{account.who} {account.summary}"
    return Candidate(
        failure_class=account.failure_class,
        confidence=account.confidence * factor,
        why=why if everyone else why + _of_others(account, failed),
        # The same line of code on all ranks: the code is the culprit, not a rank or a node.
        culprits=() if everyone else account.culprits,
        evidence=account.evidence,
        fingerprint=account.fingerprint,
        action="restart" if account.is_aside else None,
        instead=_instead(account),
        is_of_all=bool(everyone),
    )


def _of_others(account: Account, failed: Sequence[Account]) -> str:
    """`; 2 others say the same, 61 ended because of it`."""
    others = [one for one in failed if one is not account and one.rank is not None]
    if account.rank is None or not others:
        return ""
    alike = [one for one in others if not one.is_cascade and one.failure_class is account.failure_class]
    led = [one for one in others if one.is_cascade or (one.failure_class is FailureClass.NCCL_TIMEOUT and not alike)]
    counts = [
        (len(alike), "says the same" if len(alike) == 1 else "say the same"),
        (len(led), "ended because of it"),
        (len(others) - len(alike) - len(led), "failed in another way"),
    ]
    words = [f"{count} {how}" for count, how in counts if count]
    first, _, rest = words[0].partition(" ")
    return f"; {first} other{'s' * (first != '1')} {', '.join([rest, *words[1:]])}"


def instead_by_end(record: ExitRecord) -> Mapping[FailureClass, float]:
    """What ends processes in this way, if nothing else is known."""
    ends = current().by_end
    by_signal = next((others for name, others in ends.items() if record.ended_by(name)), None)
    return by_signal or ends["1" if record.code else "0"]


def _instead(account: Account) -> dict[FailureClass, float] | None:
    if account.exit is None or account.failure_class is not FailureClass.WORKER_CRASH:
        return None
    return dict(instead_by_end(account.exit))


BEFORE_S: Final = 600.0
AFTER_S: Final = 300.0
"""A finding may explain a failure if it lies in this window around it."""
KILLED_S: Final = 10.0
"""A rank that is killed so soon before or after another process may have been killed for the same lack of memory."""
ZONE_S: Final = 3600.0
MAX_ZONE_S: Final = 14 * 3600.0

_ASKED: Final[dict[str, RemedyAction]] = {
    "restart": "restart",
    "cordon_gpu_and_restart": "cordon_gpu_and_restart",
    "cordon_node_and_restart": "cordon_node_and_restart",
}
"""The actions that tables of kernel messages can ask for."""


def from_findings(described: Accounts) -> list[Candidate]:
    """A reading for each serious finding."""
    accounts = described.accounts
    candidates = []
    for finding in described.findings:
        if finding.severity == "warning":
            continue
        struck = _struck(finding, accounts)
        late_s = None if described.failed_at is None or not finding.at else finding.at - described.failed_at
        seen = _Seen(finding, struck, accounts, _is_elsewhere(finding, described), late_s)
        if described.well is None and _is_killed_process(seen) and not any(_is_soon(one, finding) for one in accounts):
            continue  # all ranks of a live job are known: the killed process is none, and no rank died of it
        node = finding.node or next((one.node for one in struck), "")
        ranks = [finding.rank] if finding.rank is not None else [one.rank for one in struck if one.rank is not None]
        where = f" on {finding.node}" if finding.node else ""
        gpu = f" (GPU {finding.gpu})" if finding.gpu else ""
        source = finding.evidence.source.rsplit("/", 1)[-1] or "a check"
        # Only an output and a log speak for a rank. Checks, plug-ins' too, and the kernel name it by its process.
        of_a_rank = finding.rank is not None and (source == "output" or finding.evidence.line is not None)
        who = f"rank {finding.rank}'s output" if of_a_rank else source
        candidates.append(
            Candidate(
                failure_class=finding.failure_class,
                confidence=finding.confidence * first_factor(BEARING, seen) * first_factor(TIMELY, seen),
                why=f"{who}{where}{gpu} says: {finding.evidence.text[:200]}",
                culprits=_culprits(finding, node, ranks),
                evidence=(finding.evidence,),
                action=_ASKED.get(finding.fields.get("action", "")),
            )
        )
    return candidates


def _culprits(finding: Finding, node: str, ranks: list[int]) -> tuple[Culprit, ...]:
    if finding.scope == "job":
        return ()
    if ranks:
        return tuple(Culprit(node=node, gpu=finding.gpu, rank=rank) for rank in ranks)
    return (Culprit(node=node, gpu=finding.gpu),) if node or finding.gpu else ()


def _is_elsewhere(finding: Finding, described: Accounts) -> bool:
    """It happened on a node where nothing failed."""
    if not finding.node or not described.places or _host(finding.node) in map(_host, described.places):
        return False
    return described.well is None or _host(finding.node) in map(_host, described.well)


class _Seen(NamedTuple):
    """A finding beside an incident."""

    finding: Finding
    struck: Sequence[Account]
    """The accounts that it concerns."""
    accounts: Sequence[Account]
    elsewhere: bool
    """It happened on a node where nothing failed."""
    late_s: float | None
    """Seconds after the first failure; None: not known."""


def _is_near(late_s: float | None) -> bool:
    return late_s is None or -BEFORE_S <= late_s <= AFTER_S


def _is_in_another_zone(late_s: float | None) -> bool:
    """Logs without a zone may be whole hours apart and mean the same moment."""
    zone_s = round((late_s or 0.0) / ZONE_S) * ZONE_S
    return late_s is not None and abs(zone_s) <= MAX_ZONE_S and _is_near(late_s - zone_s)


def _is_killed_process(seen: _Seen) -> bool:
    """The OOM killer names a process that is no rank of this job."""
    finding = seen.finding
    is_oom = finding.failure_class is FailureClass.HOST_OOM
    return is_oom and not seen.struck and finding.rank is None and bool(_pids(finding))


def _is_unexplained_training(seen: _Seen) -> bool:
    """The process has the name of a training process, and no rank explains its own failure."""
    ours = is_of_training(seen.finding.fields.get("process", ""))
    return ours and not any(TAXONOMY[one.failure_class].kind == "cause" and not one.is_cascade for one in seen.accounts)


BEARING: Final = (
    Row[_Seen]("elsewhere", "factor", lambda seen: seen.elsewhere, "a_xid_on_another_node"),
    Row[_Seen](
        "killed_process_of_ours",
        "factor",
        lambda seen: _is_killed_process(seen) and _is_unexplained_training(seen),
        "an_oom_kill_of_a_trainer_that_nobody_knows",
    ),
    Row[_Seen]("killed_process_of_others", "factor", _is_killed_process, "an_oom_kill_of_another_program"),
    Row[_Seen](
        "kernel_that_does_not_outrank",
        "factor",
        lambda seen: seen.finding.failure_class not in OUTRANKS and seen.finding.evidence.source == "kernel",
        "a_fault_of_an_access_beside_a_missing_module",
    ),
    Row[_Seen](
        "error_not_fatal",
        "factor",
        lambda seen: seen.finding.failure_class in OUTRANKS and seen.finding.severity == "error",
        "a_stack_without_a_headline",
    ),
)
"""How much of a finding's confidence holds for this incident: the first row that applies."""
TIMELY: Final = (
    Row[_Seen](
        "whole_hours_apart",
        "factor",
        lambda seen: not _is_near(seen.late_s) and _is_in_another_zone(seen.late_s),
        "a_kernel_log_in_another_zone",
    ),
    Row[_Seen]("at_another_time", "factor", lambda seen: not _is_near(seen.late_s), "a_xid_of_the_day_before"),
)
"""How much of it holds by its time."""
ROWS: Final = (*BEARING, *TIMELY)


def _struck(finding: Finding, accounts: Sequence[Account]) -> list[Account]:
    """The accounts that a finding concerns: by process id, else the first failures on its node."""
    pids = _pids(finding)
    by_pid = [one for one in accounts if _has_pid(one, pids)]
    known = any(one.exit is not None and one.exit.pid for one in accounts)
    is_oom = finding.failure_class is FailureClass.HOST_OOM
    if by_pid or (pids and known and not is_oom):
        return by_pid
    first = [one for one in accounts if one.failed and not one.is_cascade]
    here = [one for one in first if _is_there(one, finding.node)] or [one for one in first if not one.node]
    if is_oom:
        here = [one for one in here if one.ended_by("SIGKILL") or one.failure_class is FailureClass.HOST_OOM]
        if pids and known and finding.at:  # another process was killed: the same lack of memory kills within seconds
            here = [one for one in here if _is_soon(one, finding)]
    elif pids or not all(one.node for one in here):
        # No process id is known: a single account is meant, and not one that shows only a symptom.
        causes = [one for one in here if TAXONOMY[one.failure_class].kind == "cause"]
        return causes if len(causes) == 1 else here if len(here) == 1 else []
    return here[:1]


def _is_soon(account: Account, finding: Finding) -> bool:
    """The rank failed within seconds of a kill, as far as times are known."""
    ended_at = account.exit.ended_at if account.exit is not None and finding.at else None
    return account.failed and (ended_at is None or abs(ended_at - finding.at) <= KILLED_S)


def _pids(finding: Finding) -> set[str]:
    return {finding.fields.get("pid", ""), finding.fields.get("pid2", "")} - {""}


def _is_there(account: Account, node: str) -> bool:
    return not node or _host(account.node) == _host(node)


def _host(node: str) -> str:
    """`n1` of `n1.cluster.example`; an address stays whole."""
    first = node.partition(".")[0]
    return node if first.isdigit() else first


def _has_pid(account: Account, pids: set[str]) -> bool:
    """It is that process, or names it as one of its own (a data loader's worker)."""
    if account.exit is not None and str(account.exit.pid) in pids:
        return True
    return any(pid in re.findall(r"\bpid\D{0,8}(\d+)", line.text) for line in account.evidence[:1] for pid in pids)


# ----- lost nodes, launchers, preparations -----

USAGE_ERROR: Final = 2
"""The exit code of argparse, which torchrun uses, for arguments that are wrong."""


def from_nodes(incident: Incident) -> list[Candidate]:
    candidates, confidences = [], current().confidence
    if incident.lost_nodes:
        names, several = ", ".join(incident.lost_nodes[:6]), len(incident.lost_nodes) > 1
        who, whose = ("nodes", "their") if several else ("node", "its")
        ranks = {
            node: [rank for rank, where in incident.rank_nodes.items() if where == node] for node in incident.lost_nodes
        }
        candidates.append(
            Candidate(
                failure_class=FailureClass.NODE_FAILURE,
                confidence=confidences["node_lost"],
                why=f"{who} {names} fell silent and {whose} ranks made no progress",
                culprits=tuple(
                    Culprit(node=node, rank=ranks[node][0] if len(ranks[node]) == 1 else None)
                    for node in incident.lost_nodes
                ),
                evidence=tuple(
                    Evidence(text=f"no word from {node}", source="agent", node=node) for node in incident.lost_nodes[:4]
                ),
            )
        )
    if incident.trigger == "setup":
        why = "the preparations of an attempt (moving or restoring a checkpoint) failed"
        candidates.append(
            Candidate(failure_class=FailureClass.STORAGE_ERROR, confidence=confidences["setup_failed"], why=why)
        )
    if incident.trigger == "launcher" or (incident.launcher_exits and incident.trigger != "setup"):
        usage = incident.launcher_code == USAGE_ERROR and not incident.ranks_started
        when = "while its workers still ran" if incident.ranks_started else "before any rank was started"
        for node, how in sorted(incident.launcher_exits.items())[:4]:
            first = incident.trigger == "launcher"
            candidates.append(
                Candidate(
                    failure_class=FailureClass.CONFIG_OR_ARGUMENT_ERROR if usage else FailureClass.WORKER_CRASH,
                    confidence=confidences["launcher_first"] if first else confidences["launcher_later"],
                    why=f"{how or 'the launcher ended'} on {node} {when}",
                    culprits=(Culprit(node=node),),
                    evidence=(Evidence(text=how or "the launcher ended", source="agent", node=node),),
                )
            )
    return candidates


# ----- hangs -----


def from_hang(incident: Incident) -> list[Candidate]:
    report = incident.hang
    if report is None:
        return []
    failure_class, confidence = current().hang[report.kind]
    confidence = confidence if report.proven else current().confidence["unproven_hang"]
    ranks, why = report.ranks, report.why
    stacks = [stack for one in incident.evidence for stack in one.stacks]
    flights = [one for part in incident.evidence for one in part.flights]
    report_of_calls = flight.analyse(flight.from_rank_flights(flights), stacks)
    if report_of_calls is not None and report.proven and report.kind in ("all_waiting", "mismatch"):
        if report_of_calls.kind not in _FLIGHTS:
            failure_class, confidence = FailureClass.COLLECTIVE_MISMATCH, max(report_of_calls.confidence, confidence)
            ranks, why = report_of_calls.culprit_ranks or ranks, report_of_calls.why
        elif not ranks and report_of_calls.kind in ("missing_rank", "stalled_rank"):
            ranks, why = report_of_calls.culprit_ranks, f"{why}: {report_of_calls.why}"
    return [
        Candidate(
            failure_class=failure_class,
            confidence=confidence,
            why=_stopped_why(report) if report.kind == "stopped" else why,
            culprits=tuple(_culprit(incident, rank) for rank in ranks[:16]),
            evidence=(
                Evidence(text=report.why, source="agent"),
                *where_ranks_are(stacks, nodes=incident.rank_nodes),
            ),
        )
    ]


def _stopped_why(report: HangReport) -> str:
    # A stopped process has not crashed: for the job it is a rank that does nothing and says nothing.
    return f"{report.why}: somebody sent it SIGSTOP, or the host froze it"


def _culprit(incident: Incident, rank: int) -> Culprit:
    return Culprit(node=incident.rank_nodes.get(rank, ""), rank=rank)


# ----- dumps, stacks and curves -----

_FLIGHTS: Final[dict[FlightKind, FailureClass]] = {
    "missing_rank": FailureClass.SILENT_HANG,
    "stalled_rank": FailureClass.SILENT_HANG,
    "dead_rank": FailureClass.WORKER_CRASH,
    "straggler": FailureClass.STRAGGLER_OR_SLOW,
}
"""The other kinds are ranks that disagree."""
_STUCK_IN: Final[dict[Activity, FailureClass]] = {
    "teardown": FailureClass.EXIT_HANG,
    "collective": FailureClass.SILENT_HANG,
    "data": FailureClass.SILENT_HANG,
}
LASTING: Final = 0.5
"""A slowdown or anomaly that is less sure will pass."""


def from_logs(evidence: LogEvidence, nodes: dict[int, str], accounts: Sequence[Account]) -> list[Candidate]:
    """What flight recorders, stacks and curves beside old logs show."""
    return [
        *from_flight(evidence.flight, evidence.stacks, nodes, accounts),
        *calls.of_watchdogs(evidence),
        *from_curves(evidence.slow, evidence.anomalies, accounts),
    ]


def from_flight(
    report: FlightReport | None, stacks: Sequence[RankStack], nodes: dict[int, str], accounts: Sequence[Account] = ()
) -> list[Candidate]:
    """The culprits by the flight recorders of all ranks, else by their stacks, and what these ranks do."""
    weights, origin = current(), waited_for(stacks)
    doing: Activity | None = None
    if report is None:
        if origin is None:
            return []
        ranks, doing, why = origin
        found = Candidate(failure_class=FailureClass.SILENT_HANG, confidence=weights.confidence["by_stacks"], why=why)
    else:
        ranks, why = report.culprit_ranks, report.why
        found = Candidate(
            failure_class=_FLIGHTS.get(report.kind, FailureClass.COLLECTIVE_MISMATCH),
            confidence=report.confidence,
            why=why,
        )
        if origin is not None and set(origin[0]) & set(ranks):
            doing = origin[1]
    if any(_explains(account, ranks) for account in accounts):
        found = msgspec.structs.replace(found, confidence=found.confidence * weights.factor["explained_wait"])
    found = msgspec.structs.replace(
        found,
        culprits=tuple(Culprit(node=nodes.get(rank, ""), rank=rank) for rank in ranks[:16]),
        evidence=(*(report.evidence if report is not None else ()), *where_ranks_are(stacks, report, nodes)),
    )
    if report is not None and report.kind == "dead_rank":
        return [msgspec.structs.replace(found, instead=weights.instead["no_dump"])]
    if found.failure_class is not FailureClass.SILENT_HANG or doing not in ("data", "checkpoint"):
        return [found]
    if report is not None:
        found = msgspec.structs.replace(found, why=f"{why}: by its stack it is {DOING[doing]}")
    if doing == "data":
        # An input stall slows a run that goes on. Here the others wait for one rank without end: a hang.
        return [msgspec.structs.replace(found, instead=weights.instead["in_its_loader"])]
    confidence = found.confidence * weights.factor["wait_in_a_checkpoint"]
    held = msgspec.structs.replace(found, failure_class=FailureClass.STORAGE_ERROR, confidence=confidence)
    return [held, found]


def from_stack(stacks: Sequence[RankStack]) -> list[Candidate]:
    """Stacks in which no rank differs, with no other sign of a failure: somebody asked where the ranks are."""
    doing = {activity(one) for one in stacks if one.frames}
    failure_class = _STUCK_IN.get(next(iter(doing))) if len(doing) == 1 else None
    if failure_class is None:
        return []
    why = f"{rank_names({one.rank for one in stacks})}, asked for the stack: {DOING[doing.pop()]}"
    confidence = current().confidence["one_moment"]
    return [Candidate(failure_class=failure_class, confidence=confidence, why=why, evidence=where_ranks_are(stacks))]


def _explains(account: Account, ranks: Sequence[int]) -> bool:
    """It explains why one of these ranks did not come."""
    is_cause = TAXONOMY[account.failure_class].kind == "cause" and not account.is_cascade
    return account.failed and is_cause and (account.rank is None or account.rank in ranks)


def class_of(one: Slowdown | Anomaly) -> FailureClass:
    """The class of what curves show."""
    if isinstance(one, Anomaly):
        return FailureClass.LOSS_SPIKE_OR_NAN
    return FailureClass.INPUT_STALL if one.kind == "input" else FailureClass.STRAGGLER_OR_SLOW


def from_curves(slow: Sequence[Slowdown], anomalies: Sequence[Anomaly], accounts: Sequence[Account]) -> list[Candidate]:
    """Readings of slowdowns and of anomalies in numbers."""
    factors = current().factor
    factor = factors["beside_a_failure"] if accounts else 1.0
    # An error message about the loss says more than the loss itself.
    named = any(one.failure_class is FailureClass.LOSS_SPIKE_OR_NAN for one in accounts)
    of_numbers = factors["numbers_already_named"] if named else 1.0
    found = [
        Candidate(
            failure_class=class_of(one),
            confidence=one.confidence * factor,
            why=one.why,
            culprits=tuple(Culprit(node=one.node, rank=rank) for rank in one.ranks[:16])
            or ((Culprit(node=one.node),) if one.node else ()),
            evidence=one.evidence,
        )
        for one in slow
        if one.confidence >= LASTING
    ]
    found += [
        Candidate(
            failure_class=class_of(one),
            confidence=one.confidence * (factor if one.kind in ("spike", "divergence") else of_numbers),
            why=one.why,
            evidence=one.evidence,
        )
        for one in anomalies
        if one.confidence >= LASTING
    ]
    return found


NEXT_TO_NOTHING: Final = 0.3
"""A traceback without its exception is so sure."""
WORDS_BEFORE: Final = 3
"""Lines before the report of an end in which the exception may stand."""


def explained(candidates: list[Candidate], evidence: LogEvidence) -> list[Candidate]:
    """The readings (the best first) with what the ends of the logs add; empty if nothing shows a failure."""
    if candidates and (
        candidates[0].confidence <= NEXT_TO_NOTHING
        or all(one.failure_class is FailureClass.WORKER_CRASH for one in candidates)
    ):
        return candidates + (_of_words_before(evidence, candidates[0]) or _of_names_before(evidence, candidates[0]))
    return (
        candidates
        or calls.of_lines(evidence)
        or _of_last_words(evidence)
        or from_stack(evidence.stacks or _stacks_at_the_end(evidence))
    )


def _of_words_before(evidence: LogEvidence, end: Candidate) -> list[Candidate]:
    """An exception without its traceback, right before the report of an end that nothing else explains."""
    found = []
    for log in evidence.logs:
        reports = [failure.line for failure in log.launcher]
        reports += [match.line for match in log.matches if match.failure_class is FailureClass.WORKER_CRASH]
        first = log.lines - len(log.tail) + 1
        before = log.tail[: max(min(reports) - first, 0)] if reports else ()
        words = exceptions.last_exception(before, WORDS_BEFORE)
        if words is not None:
            line = Evidence(text=words.text, source=log.source, line=first + words.line, node=log.node, rank=log.rank)
            found.append(
                Candidate(
                    failure_class=words.failure_class,
                    confidence=current().confidence["exception_before_the_end"],
                    why=f"before the end somebody wrote: {words.text[:180]}",
                    culprits=end.culprits,
                    evidence=(line, *end.evidence[:1]),
                )
            )
    return found


def _of_names_before(evidence: LogEvidence, end: Candidate) -> list[Candidate]:
    """A name of an error with a fixed meaning, where nothing else tells why a process ended."""
    for log in evidence.logs:
        words = None if log.kind == "kernel" else exceptions.last_words(log.tail[_ahead(log) :], 1, _known(log))
        if words is not None and words.failure_class is not FailureClass.PREEMPTED_OR_CANCELLED:
            number = log.lines - len(log.tail) + 1 + words.line + _ahead(log)
            return [
                Candidate(
                    failure_class=words.failure_class,
                    confidence=words.confidence,
                    why=f"beside the end somebody wrote: {words.text[:180]}",
                    culprits=end.culprits,
                    evidence=(
                        Evidence(text=words.text, source=log.source, line=number, node=log.node, rank=log.rank),
                        *end.evidence[:1],
                    ),
                )
            ]
    return []


def _stacks_at_the_end(evidence: LogEvidence) -> list[RankStack]:
    """Stacks at the end of logs that show no progress."""
    ends = ("\n".join(log.tail).encode() for log in evidence.logs if log.progress_line is None)
    return [stack for end in ends if stacks.is_dump(end) for stack in stacks.read_dump(end, "")]


def is_at_work(evidence: LogEvidence) -> bool:
    """Somebody asked what processes do, and one of them computes: that is all that stacks of one moment tell."""
    told = evidence.stacks or _stacks_at_the_end(evidence)
    return any(one.frames and activity(one) in ("compute", "compile", "evaluation") for one in told)


def _of_last_words(evidence: LogEvidence) -> list[Candidate]:
    """Errors that no rule knows, at the end of logs whose work was not completed."""
    found = []
    for log in evidence.logs:
        words = None if log.finished_line is not None else _last_words(log)
        if words is None:
            continue
        number = log.lines - len(log.tail) + 1 + words.line
        stopped = words.failure_class is FailureClass.PREEMPTED_OR_CANCELLED  # who is stopped may tell how it ends
        if log.kind != "kernel" and not stopped and shows_life(lines_after(log, number)):
            continue
        line = Evidence(text=words.text, source=log.source, line=number, node=log.node, rank=log.rank)
        how = "a task sleeps and cannot be woken" if words.is_asleep else "the log complains"
        found.append(
            Candidate(
                failure_class=words.failure_class,
                confidence=words.confidence,
                why=f"{how}: {words.text[:180]}",
                evidence=(line,),
            )
        )
    return found


def _last_words(log: LogSummary) -> exceptions.LastWords | None:
    words = exceptions.last_sleeper(log.tail) if log.kind == "kernel" else exceptions.last_exception(log.tail)
    if words is None:
        words = exceptions.last_words(log.tail[_ahead(log) :], _TIERS[log.kind], _known(log))
        return words if words is None else words._replace(line=words.line + _ahead(log))
    return words


def _known(log: LogSummary) -> frozenset[str]:
    """Lines of which a rule, a traceback or the kernel's table says what they are worth."""
    lines = {line for one in log.matches for line in (one.line, one.last_line)} | {one.line for one in log.events}
    first = log.lines - len(log.tail) + 1
    read = (split_prefix(text)[1].strip() for at, text in enumerate(log.tail) if first + at in lines)
    return frozenset([*read, *(one.traceback.line.strip() for one in log.tracebacks)])


_TIERS: Final[dict[LogKind, int]] = {"output": 3, "scheduler": 2, "mixed": 2, "kernel": 1}
"""The tables of the kernel and of schedulers know more: there fewer words count."""


def _ahead(log: LogSummary) -> int:
    """So many lines of the tail come before the last sign of progress, or are it."""
    return max(0, (last_progress(log) or 0) - log.lines + len(log.tail))


def last_progress(log: LogSummary) -> int | None:
    """The last line that shows work that goes on; lines before the tail count only where steps were read."""
    first = log.lines - len(log.tail) + 1
    seen = (last_training(log.tail), last_counted(log.tail))
    lines = [log.progress_line, *(None if at is None else first + at for at in seen)]
    return max((line for line in lines if line is not None), default=None)


# ----- whom the others wait for, by the stacks of all ranks -----

WAITING: Final[frozenset[Activity]] = frozenset({"collective", "gpu_sync"})
"""A rank that does this may be waiting for another one."""
MAX_EVIDENCE: Final = 6
DOING: Final[dict[Activity, str]] = {
    "collective": "waiting in a collective",
    "checkpoint": "saving or loading a checkpoint",
    "evaluation": "evaluating",
    "data": "getting data",
    "compile": "compiling",
    "teardown": "tearing the process group down already",
    "sleep": "sleeping",
    "lock": "waiting for a lock or another process",
    "gpu_sync": "waiting for its GPU",
    "compute": "running code",
    "unknown": "doing something unknown",
}


def waited_for(stacks: Iterable[RankStack]) -> tuple[tuple[int, ...], Activity, str] | None:
    """The ranks that the others wait for, what they do, and the reason in words; None if stacks do not show it.

    Processes whose ranks are not known (`read_dump`) count, and are named only in words.
    """
    known = list(stacks)
    groups = group(known)
    waiting = [one for one in groups if one.activity in WAITING]
    apart = [one for one in groups if one.activity not in WAITING]
    if _moves(known, {rank for one in apart for rank in one.ranks}):
        return None
    if not waiting or sum(len(one.ranks) for one in apart) > sum(len(one.ranks) for one in waiting):
        return None
    if apart:
        doing = (
            apart[0] if len(apart) == 1 else min(apart, key=lambda one: (one.activity == "teardown", len(one.ranks)))
        )
        ranks = sorted(rank for one in apart if one.activity == doing.activity for rank in one.ranks)
        peers = [rank for one in waiting for rank in one.ranks]
        why = f"{_are(ranks)} {DOING[doing.activity]} in {_where(doing)} while {_are(peers)} {_wait(waiting[0])}"
        return tuple(rank for rank in ranks if rank >= 0), doing.activity, why
    return _other_collective([one for one in groups if one.activity == "collective"], len(groups))


def _moves(stacks: Iterable[RankStack], ranks: Collection[int]) -> bool:
    """One of these ranks waited like the others in another sample: the job moves."""
    return any(one.rank in ranks and one.frames and activity(one) in WAITING for one in stacks)


def _other_collective(groups: list[StackGroup], of: int) -> tuple[tuple[int, ...], Activity, str] | None:
    """One rank, or few of many, wait in another call than all others. Stages of a pipeline do so normally."""
    calls: dict[tuple[str, str], list[int]] = {}
    for one in groups:
        calls.setdefault((_call(one), _where(one)), []).extend(one.ranks)
    if len(groups) < of or len(calls) != 2:
        return None
    (usual, many), (other, few) = sorted(calls.items(), key=lambda item: -len(item[1]))
    if usual[0] == other[0] or 3 * len(few) > len(many):
        return None
    why = f"{_are(few)} waiting in {other[0]} ({other[1]}), {_are(many)} in {usual[0]} ({usual[1]})"
    return tuple(sorted(rank for rank in few if rank >= 0)), "collective", why


def where_ranks_are(
    stacks: Iterable[RankStack], flight: FlightReport | None = None, nodes: Mapping[int, str] | None = None
) -> tuple[Evidence, ...]:
    """Where the ranks are, one line for each group of equal stacks: culprits of the flight recorder first, then the
    odd ones, then those that wait."""
    groups = group(stacks)
    culprits = frozenset(() if flight is None else flight.culprit_ranks)
    groups.sort(
        key=lambda one: (culprits.isdisjoint(one.ranks), one.activity in (*WAITING, "teardown"), len(one.ranks))
    )
    return tuple(_line(one, flight, culprits, nodes or {}) for one in groups[:MAX_EVIDENCE])


def _line(one: StackGroup, flight: FlightReport | None, culprits: frozenset[int], nodes: Mapping[int, str]) -> Evidence:
    note = ""
    if flight is not None and flight.collective_seq is not None and not culprits.isdisjoint(one.ranks):
        what = f"collective {flight.collective_seq} of group {flight.process_group}"
        if flight.kind == "missing_rank" and one.activity not in WAITING:
            note = f"; it did not enter {what}"
        elif flight.kind == "stalled_rank":
            note = f"; it does not complete {what}"
    call = f", at {_call(one)}" if one.frames and _call(one) != _where(one).split(" ", 1)[0] else ""
    rank = next((rank for rank in one.ranks if rank in culprits), one.ranks[0])
    text = f"{rank_names(one.ranks)}: {one.activity} in {_where(one)}{call}{note}"
    return Evidence(text=text, source="stacks", rank=rank if rank >= 0 else None, node=nodes.get(rank, ""))


def _call(one: StackGroup) -> str:
    """The function that waits: of Python, else the outermost of compiled code that has a name."""
    python = next((bare(frame) for frame in one.frames if not is_native(frame.file)), "")
    if python:
        return python
    told = next((frame.function for frame in one.frames if tells_of(frame) is not None), "")
    return told or one.frames[0].function


def _wait(biggest: StackGroup) -> str:
    return "waiting for the GPU" if biggest.activity == "gpu_sync" else f"waiting in {_call(biggest)}"


def _are(ranks: Iterable[int]) -> str:
    known = set(ranks)
    return f"{rank_names(known)} {'is' if len(known) == 1 else 'are'}"


def _where(one: StackGroup) -> str:
    return place(RankStack(rank=one.ranks[0], frames=one.frames))
