"""From an incident, or from a case of old logs, to a verdict: who failed first, and of what.

Every rank that ended badly gives an account of itself: its wait status, its traceback, what rules read in its output.
Most accounts are consequences (a peer's connection closed, the launcher's SIGTERM); the first that is not, is the
fault. Findings of the kernel, the GPU or the host in the same window outrank what the ranks say. Text is only matched.
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

    There is always one. `unknown`: nothing is known. `none` (of logs only): nothing tells of a failure.
    """
    logs = incident.logs
    told = accounts.describe(incident) if logs is None else log_accounts.describe(logs, incident.rank_nodes)
    lost_elsewhere = bool(incident.lost_nodes) or incident.hang is not None
    candidates = [
        *attribution.from_findings(told),
        *other_evidence.from_nodes(incident),
        *other_evidence.from_hang(incident),
        *(other_evidence.from_logs(logs, incident.rank_nodes, told.accounts) if logs is not None else ()),
        *origin.from_accounts(
            told.accounts,
            incident.world_size,
            lost_elsewhere=lost_elsewhere or (logs is not None and logs.flight is not None),
        ),
        *told.others,
    ]
    if logs is None:
        return _weighed(candidates or [nothing(incident.trigger)], told)
    candidates = log_ends.explained(candidates, logs)
    if not candidates:
        return log_ends.no_failure(logs, told)
    made_steps = any(log.progress_line is not None for log in logs.logs)
    candidates = [_once_and_again(one) if one.is_of_all or not made_steps else one for one in candidates]
    return _weighed(candidates, told)


def _once_and_again(one: Candidate) -> Candidate:
    """A bug that all ranks have, or that lets no step be made, is there in the next attempt as well."""
    return msgspec.structs.replace(one, action="stop") if one.failure_class is FailureClass.SCRIPT_ERROR else one


def _weighed(candidates: list[Candidate], told: Accounts) -> Verdict:
    return verdict(
        ranked(candidates),
        symptoms=(symptom for account in told.accounts for symptom in account.symptoms),
        more_evidence=(
            *(finding.evidence for finding in told.shown),
            *(line for account in told.accounts if account.is_cascade for line in account.evidence[:1]),
        ),
        seen=told.hints,
    )
