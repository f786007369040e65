"""What operators say of incidents (`unbroken why --correct`), and the corpus of past ones (`export incidents`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from recovery.incident_memory import NAME_LIMIT, TEXT_LIMIT, Correction, unknown_class
from supervisor import config
from supervisor.cli.output import operator_name, warn
from supervisor.errors import (
    NOT_PROVEN,
    CommandDenied,
    ControllerUnreachable,
    ControllerUnusable,
    ExitCode,
    UnbrokenError,
)
from supervisor.messages import CommandRequest
from supervisor.paths import incidents_folder

if TYPE_CHECKING:
    from supervisor.cli.job_commands import JobHandle


def correct(job: JobHandle, incident: str, failure_class: str, note: str) -> None:
    """Have the controller journal it; where none answers, it is kept in the job folder. Raises UnbrokenError."""
    if problem := unknown_class(failure_class):
        raise UnbrokenError(f"{problem}. Nothing was done.", ExitCode.WRONG_USAGE)
    request = CommandRequest(command="correct", argument=f"{incident} {failure_class}", reason=note, by=operator_name())
    try:
        answer = job.client().command(request)
    except ControllerUnusable as error:
        raise error.add("Nothing was done.") from None
    except ControllerUnreachable:
        _correct_here(job, incident, failure_class, note)
        return
    except CommandDenied as error:
        if error.status != NOT_PROVEN or not job.is_gone_from_its_port:
            raise error.add("Nothing was done.") from None
        _correct_here(job, incident, failure_class, note)
        return
    if answer.get("refused"):
        raise UnbrokenError("; ".join(answer["notes"]))


def _correct_here(job: JobHandle, incident: str, failure_class: str, note: str) -> None:
    import os

    from diagnosis.signals import clean_line
    from supervisor.controller import corrections
    from supervisor.controller.report import fold

    if job.folder is None or not job.folder.is_dir():
        raise ControllerUnreachable("no controller answers: give the job folder with --job-dir. Nothing was done.")
    one = Correction(
        failure_class=failure_class,
        note=clean_line(note, TEXT_LIMIT),
        by=clean_line(operator_name(), NAME_LIMIT),
        uid=os.getuid(),
        at=time.time(),
    )
    try:
        corrections.add(job.folder, fold(job.folder).job.memory.job_id, incident, one)
        found = fold(job.folder).job
    except OSError as error:
        raise UnbrokenError(f"{error.filename or job.folder}: {error.strerror}. Nothing was done.") from None
    record = found.incidents.log.get(incident)
    if record is None or record.closed_at is None:
        return  # the next controller writes it
    try:
        from recovery.incident_store import IncidentStore
        from supervisor.cli.nodes import answered

        store = IncidentStore(folder_of(job.folder))
        closed = found.memory.closed(record)
        answered(lambda: store.write([closed], time.time()), store.folder, "the memory of incidents")
    except (UnbrokenError, ImportError) as error:
        warn(f"{error}. It is kept in the job folder only")


def folder_of(job_dir: Path) -> Path:
    """Of the store that a job's controller uses, if it has the settings of here."""
    ledger = config.load_here().settings.ledger.folder
    return incidents_folder(config.working_folder() / ledger if ledger else None, job_dir.absolute())
