"""The inquirer of a controller: what it is asked about comes from the job, and its answers go into the journal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from diagnosis.incident import Opinion
from supervisor.config import ConfigError, OpinionSettings
from supervisor.messages import AnyEvent, OpinionArrived, OpinionAsked
from supervisor.opinion import settings
from supervisor.opinion.inquirer import Asked, Inquirer, backend_of

if TYPE_CHECKING:
    from supervisor.job.job import Job

log = logging.getLogger("unbroken.opinion")


def inquirer_of(
    job: Job,
    post: Callable[[AnyEvent], None],
    now: Callable[[], float],
    job_dir: Path,
    environment: Mapping[str, str],
    python: str,
) -> Inquirer:
    """Asks the model that the environment names (`supervisor.opinion.settings`), or nobody."""
    try:
        given = settings.from_environment(environment)
    except ConfigError as error:
        log.warning("no model is asked: %s", error)
        given = OpinionSettings()

    def answered(incident: str, opinion: Opinion) -> None:
        post(OpinionArrived(at=now(), incident=incident, opinion=opinion))

    def asked(incident: str) -> None:
        post(OpinionAsked(at=now(), incident=incident))

    return Inquirer(backend_of(given, python), job_dir, lambda incident: asked_of(job, incident), answered, asked)


def asked_of(job: Job, incident: str) -> Asked | None:
    """An incident of the job as it is now."""
    case = job.casebook.get(incident)
    if case is None:
        return None
    attempt = job.attempt
    findings = job.casebook.findings_near(case.failed_at, case.attempt)
    if attempt is None or attempt.number != case.attempt:
        return Asked(case.incident(findings, {}, 0), case.verdict, case.folders)
    seen = case.incident(findings, attempt.rank_nodes, attempt.world_size)
    if not seen.evidence:  # closed at once; agents may not have filed it yet
        seen = msgspec.structs.replace(seen, evidence=tuple(attempt.evidence.values()))
    return Asked(seen, case.verdict, case.folders)
