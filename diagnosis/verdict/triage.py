"""From an incident, live or read from old logs, to a verdict: which rank or node failed first, and why.

Each rank that ended badly has an account: its wait status, its traceback, the lines that rules know. Most accounts are
consequences (a peer's connection closed, the launcher's SIGTERM). The first account that is no consequence is the
fault. Findings of kernel, GPU or host in the same window outrank what ranks say. Text is only matched, never run.
"""

from __future__ import annotations

from typing import Final

import msgspec

from diagnosis.incident import Incident, Verdict
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import accounts, attribution, log_accounts, log_ends, origin, other_evidence, statements
from diagnosis.verdict.accounts import Accounts
from diagnosis.verdict.candidates import MAX_EVIDENCE, Candidate, action_for, nothing, ranked, verdict

__all__ = ["MAX_EVIDENCE", "action_for", "conclude"]

ADJUSTMENTS: Final = (*statements.ROWS, *log_accounts.ROWS, *attribution.ROWS)
"""All rows that adjust a verdict; `weights.toml` has their factors."""


def conclude(incident: Incident) -> Verdict:
    """The verdict on an incident of a live job, or on what old logs show.

    There is always one. `unknown`: nothing is known. `none` (old logs only): nothing shows a failure.
    """
    logs = incident.logs
    described = accounts.describe(incident) if logs is None else log_accounts.describe(logs, incident.rank_nodes)
    lost_elsewhere = bool(incident.lost_nodes) or incident.hang is not None
    candidates = [
        *attribution.from_findings(described),
        *other_evidence.from_nodes(incident),
        *other_evidence.from_hang(incident),
        *(other_evidence.from_logs(logs, incident.rank_nodes, described.accounts) if logs is not None else ()),
        *origin.from_accounts(
            described.accounts,
            incident.world_size,
            lost_elsewhere=lost_elsewhere or (logs is not None and logs.flight is not None),
        ),
        *described.others,
    ]
    if logs is None:
        return _weighed(candidates or [nothing(incident.trigger)], described)
    candidates = log_ends.explained(candidates, logs)
    if not candidates:
        return log_ends.no_failure(logs, described)
    made_steps = any(log.progress_line is not None for log in logs.logs)
    candidates = [_once_and_again(one) if one.is_of_all or not made_steps else one for one in candidates]
    return _weighed(candidates, described)


def _once_and_again(one: Candidate) -> Candidate:
    """The next attempt fails as well from a bug that all ranks have, or that prevents the first step."""
    return msgspec.structs.replace(one, action="stop") if one.failure_class is FailureClass.SCRIPT_ERROR else one


def _weighed(candidates: list[Candidate], described: Accounts) -> Verdict:
    return verdict(
        ranked(candidates),
        symptoms=(symptom for account in described.accounts for symptom in account.symptoms),
        more_evidence=(
            *(finding.evidence for finding in described.shown),
            *(line for account in described.accounts if account.is_cascade for line in account.evidence[:1]),
        ),
        seen=described.hints,
    )
