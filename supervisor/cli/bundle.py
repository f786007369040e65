"""`unbroken bundle`: one incident as one file to hand to somebody else."""

from __future__ import annotations

import contextlib
import gzip
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from diagnosis.signals import clean_text
from diagnosis.text import hide_keys, redact
from supervisor.cli.job_commands import (
    JobHandle,
    find_incident,
    job_options,
    read_timeline,
    status_from_journal,
)
from supervisor.cli.output import print_answer
from supervisor.errors import JobNotFound, UnbrokenError
from supervisor.files import open_regular

STORY = "story.txt"
STORY_BYTES = 60_000
"""It is first in the file: whoever gets only the first 64 KiB can read it."""
MIB = 1 << 20
LINE_CHARS = 4000
EVIDENCE_BYTES = 256 * MIB
"""So much is read of one file; one that is larger is damaged."""
LINES_BEFORE = 30


@click.command()
@click.argument("incident")
@job_options
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="[JOB-INCIDENT.tar.gz]")
@click.option("--limit", type=click.IntRange(1), default=20, metavar="MIB", help="Size limit, unpacked.  [20]")
def bundle(job: JobHandle, incident: str, as_json: bool, output: Path | None, limit: int) -> None:
    """Pack INCIDENT (i-1, or `last`) into one file to hand on.

    The story first, then verdict, timeline and the evidence of all nodes, culprits first, until the limit. Passwords,
    tokens and keys are replaced; names of hosts, users and paths stay.
    """
    if job.folder is None:
        raise JobNotFound("the evidence is in the job folder: give it with --job-dir")
    found = find_incident(job, incident)
    target = output or Path(f"{job.folder.name}-{found['id']}.tar.gz")
    try:
        contents = write(target, pieces(job, found), limit * MIB)
    except OSError as error:
        raise UnbrokenError(f"{target} cannot be written: {error.strerror}") from None
    left_out = [name for name, why in contents if why]
    lines = [str(target), *(clean_text(f"left out: {name}: {why}", LINE_CHARS) for name, why in contents if why)]
    answer = {"schema": 1, "path": str(target), "holds": [name for name, why in contents if not why]}
    print_answer(answer | {"left_out": left_out}, as_json, lambda _: click.echo("\n".join(lines)))


def pieces(job: JobHandle, incident: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Names and contents, the most telling first; secrets are replaced."""
    assert job.folder is not None
    status = job.read("/v1/status", status_from_journal)
    rows = read_timeline(job)["rows"]
    near = _near(rows, incident)
    yield STORY, _story(job.folder, incident, status, near).encode()[:STORY_BYTES]
    for name, value in (("incident.json", incident), ("timeline.json", near), ("status.json", status)):
        yield name, msgspec.json.format(msgspec.json.encode(without_secrets(value)))
    for path in evidence_files(job.folder, incident):
        try:
            with open(open_regular(path, follow=False), "rb") as file:
                value = msgspec.json.decode(file.read(EVIDENCE_BYTES))
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            yield str(path.relative_to(job.folder)) + ".problem", str(error).encode()
        else:
            yield str(path.relative_to(job.folder)), msgspec.json.encode(without_secrets(value))


def _near(rows: list[dict[str, Any]], incident: dict[str, Any]) -> list[dict[str, Any]]:
    """The timeline from a little before the incident to its end."""
    before = [row for row in rows if row["at"] < incident["opened_at"] and not row["detail"]]
    end = incident["closed_at"] or rows[-1]["at"]
    return before[-LINES_BEFORE:] + [row for row in rows if incident["opened_at"] <= row["at"] <= end]


def _story(folder: Path, incident: dict[str, Any], status: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """What `unbroken why`, `timeline` and `status` print."""
    from supervisor.cli import render

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        print(f"Incident {incident['id']} of job {status['name']}\n")
        render.why({"incident": incident, "job_dir": str(folder)})
        print("\nWhat happened:\n")
        render.timeline({"rows": [row for row in rows if not row["detail"]]})
        print("\nThe job when this file was made:\n")
        render.status(status)
    lines = [clean_text(line, LINE_CHARS) for line in text.getvalue().splitlines()]
    return "\n".join(hide_keys([redact(line) for line in lines])) + "\n"


def evidence_files(job_dir: Path, incident: dict[str, Any]) -> list[Path]:
    """What agents have kept of the incident: those of the culprits' nodes first."""
    verdict = incident["verdict"] or {"culprits": []}
    culprits = [one["node"] for one in verdict["culprits"]]
    found: dict[Path, int] = {}
    for entry in incident["folders"]:
        node, _, name = entry.partition(":")
        folder = (job_dir / name).resolve()
        if not folder.is_relative_to(job_dir.resolve() / "attempts"):  # the journal is read, not believed
            continue
        for path in sorted(folder.glob("evidence-*.json")):
            if not path.is_symlink():
                found[job_dir / path.relative_to(job_dir.resolve())] = 0 if node in culprits else 1
    return sorted(found, key=lambda path: (found[path], str(path)))


def without_secrets(value: Any) -> Any:
    """The same JSON, each text of it redacted."""
    if isinstance(value, str):
        return "\n".join(hide_keys([redact(line) for line in value.split("\n")]))
    if isinstance(value, list):
        if value and all(isinstance(one, str) for one in value):
            return hide_keys([_behind(before, one) for before, one in zip(["", *value], value, strict=False)])
        return [without_secrets(one) for one in value]
    if isinstance(value, dict):
        return {key: _behind(f"{key}=", without_secrets(one)) for key, one in value.items()}
    return value


def _behind(name: str, value: Any) -> Any:
    """`value`, unless it is a secret because of the name before it: a key, or an option of a command (`--password`)."""
    if not isinstance(value, str):
        return value
    name = name if name.endswith("=") else f"{name} " if name.startswith("-") else ""
    hidden, shown = redact(name + value), redact(value)
    return hidden[len(name) :] if hidden.startswith(name) else shown


def write(target: Path, found: Iterator[tuple[str, bytes]], limit: int) -> list[tuple[str, str]]:
    """Each name, and why it was left out. Raises OSError; nothing half written stays then."""
    contents: list[tuple[str, str]] = []
    part = target.with_name(f"{target.name}.part")
    used = 0
    try:
        with gzip.open(part, "wb") as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
            for name, data in found:
                if used + len(data) > limit:
                    contents.append((name, f"{len(data)} bytes more would be over the limit"))
                    continue
                used += len(data)
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(data), 0o600
                archive.addfile(member, io.BytesIO(data))
                contents.append((name, ""))
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return contents
