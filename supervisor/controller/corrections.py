"""`corrections.jsonl` of a job folder: what operators say of its incidents while no controller is there to journal it.

Whoever replays the journal adds them; they change nothing but what is shown. A line names the job by its id, which is
another one once the job has begun anew in the same folder, so that no correction is taken for one of an incident of the
same name. Lines that are damaged are left out.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from diagnosis.signals import Frozen
from recovery.incident_memory import Correction, bounded_correction, unknown_class
from supervisor.files import open_regular
from supervisor.job.memory import add_correction

if TYPE_CHECKING:
    from supervisor.job.job import Job

NAME: Final = "corrections.jsonl"
MOST_BYTES: Final = 4 << 20


class _Line(Frozen, frozen=True, kw_only=True):
    job_id: str
    incident: str
    correction: Correction


_DECODE = msgspec.json.Decoder(_Line).decode


def add(job_dir: Path, job_id: str, incident: str, correction: Correction) -> None:
    """On stable storage when it returns. Raises OSError."""
    line = msgspec.json.encode(_Line(job_id=job_id, incident=incident, correction=correction))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(job_dir / NAME, flags, 0o644)
    try:
        os.write(descriptor, b"\n" + line + b"\n")  # what somebody left half is a line of its own
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def apply(job_dir: Path, job: Job) -> None:
    """To a job whose journal was replayed. A file that cannot be read says nothing."""
    try:
        with open(open_regular(job_dir / NAME, follow=False), "rb") as file:
            lines = file.read(MOST_BYTES).split(b"\n")
    except OSError:
        return
    for raw in filter(None, lines):
        try:
            line = _DECODE(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            continue
        record = job.incidents.log.get(line.incident)
        if record is not None and line.job_id == job.memory.job_id and not unknown_class(line.correction.failure_class):
            add_correction(record, bounded_correction(line.correction))
