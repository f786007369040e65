"""Which of the ranks' accounts is the first fault, and which are its consequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from diagnosis.incident import Culprit
from diagnosis.taxonomy import TAXONOMY, FailureClass
from diagnosis.verdict import candidates as verdict_candidates
from diagnosis.verdict.accounts import Account
from diagnosis.verdict.candidates import Candidate
from diagnosis.verdict.weights import current

ENDING_S: Final = 5.0
"""A rank may take this long to end after it raised, on a busy machine."""
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
            factor = factors.failed_together if together else factors.failed_later
            candidates.append(_candidate(one, 0, (), factor))
    return candidates


def _first_fault(first: list[Account]) -> tuple[Account, float]:
    """The first account that explains something, and how much of its confidence holds.

    A time-out explains nothing: an account after it still counts. Among accounts without an order the surest wins.
    """
    causes = [one for one in first if TAXONOMY[one.failure_class].kind != "symptom"]
    if not causes:
        return first[0], 1.0
    # The interpreter of a rank that raised closes its connections, and takes longer to end than the peers that miss it.
    raised = [one for one in causes if not one.blames_peer and one.when <= causes[0].when + ENDING_S]
    causes = raised if causes[0].blames_peer and raised else causes
    # The rank with the broken device may report it late.
    broken = [one for one in causes if TAXONOMY[one.failure_class].domain == "accelerator"]
    causes = broken or causes
    origin = max((one for one in causes if one.when == causes[0].when), key=lambda one: one.confidence)
    return origin, 1.0 if broken or origin.when <= first[0].when else current().factor.failed_together


def _perhaps_memory(account: Account) -> Candidate:
    return Candidate(
        failure_class=FailureClass.HOST_OOM,
        confidence=current().confidence.sigkill_perhaps_memory,
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
        confidence=current().confidence.ended_with_code_0,
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
                confidences.only_consequences_with_a_lost_node
                if lost_elsewhere
                else min(confidences.only_consequences, origin.confidence)
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
        confidence=current().confidence.all_terminated,
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


def _instead(account: Account) -> dict[FailureClass, float] | None:
    if account.exit is None or account.failure_class is not FailureClass.WORKER_CRASH:
        return None
    return dict(verdict_candidates.instead_by_end(account.exit))
