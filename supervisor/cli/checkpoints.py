"""`unbroken checkpoints`: what a job has saved, and what a restart would lose. `verify` needs no job."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import msgspec

from diagnosis.signals import clean_line
from recovery.checkpoint import judgement
from supervisor.cli.job_commands import JobHandle, job_options, status_from_journal
from supervisor.cli.output import print_answer, warn
from supervisor.errors import ExitCode
from supervisor.view import rfc3339


def _listed(job: JobHandle, as_json: bool) -> None:
    from supervisor.cli import render

    answer = job.read("/v1/status", status_from_journal)
    shown = {key: answer.get(key) for key in ("name", "state", "step", "now", "checkpoints", "restart", "left")}
    shown |= {key: answer[key] for key in ("snapshot", "mirrored_snapshot") if answer.get(key)}
    print_answer({"schema": 1, **shown}, as_json, render.checkpoints)


listed = job_options(_listed)


def checkpoints(context: click.Context, **options: Any) -> None:
    """List the job's checkpoints, and what a restart would lose now.

    `unbroken checkpoints verify PATH` needs no job.
    """
    if context.invoked_subcommand is None:
        listed(**options)


checkpoints.__click_params__ = list(listed.__click_params__)  # type: ignore[attr-defined]
group: click.Group = click.group("checkpoints", invoke_without_command=True)(click.pass_context(checkpoints))


@group.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--json", "as_json", is_flag=True, help="JSON, documented in docs/protocol.md.")
def verify(paths: tuple[str, ...], as_json: bool) -> None:
    """Read checkpoints as a whole: every checksum, every tensor.

    PATH: a checkpoint, a folder of checkpoints, or a URL that fsspec knows (s3://, gs://, ...), which is copied to
    TMPDIR first. Nothing in a checkpoint is executed, and nothing is changed.

    Exit codes: 0 all are whole; 1 one is not; 66 there was nothing to verify at one of the paths.
    """
    from supervisor.cli import render

    problems: list[str] = []
    rows = list(_verified(paths, problems))
    for problem in problems:
        warn(clean_line(problem, 1000))
    answer = {"schema": 1, "checkpoints": rows, "problems": problems}
    if rows or as_json:
        print_answer(answer, as_json, render.verified)
    bad = any(row["verdict"] != "whole" for row in rows)
    sys.exit(ExitCode.NOT_FOUND if problems else ExitCode.NOT_DONE if bad else ExitCode.DONE)


def _verified(paths: Iterable[str], problems: list[str]) -> Iterable[dict[str, Any]]:
    """A row for each checkpoint; `problems` gets a sentence for each path at which there is nothing to verify."""
    from recovery.formats import DEEP, load_formats
    from recovery.formats.remote import fetch, is_remote
    from recovery.formats.verify import NotVerifiable, find_checkpoints
    from recovery.formats.verify import verify as read_whole

    formats, skipped = load_formats(built_in=DEEP)
    for sentence in skipped:
        warn(sentence)
    for path in paths:
        with tempfile.TemporaryDirectory(prefix="unbroken-verify-") as scratch:
            try:
                there = fetch(path, Path(scratch)) if is_remote(path) else Path(path)
                found, cut_short = find_checkpoints(there, formats)
            except NotVerifiable as error:
                problems.append(_named(str(error), scratch, path))
                continue
            except OSError as error:
                problems.append(f"{path} cannot be read: {error.strerror or error}")
                continue
            if cut_short:
                problems.append(f"{path} holds more than is looked at: name the checkpoints one by one")
            for one in found:
                result = read_whole(one, formats)
                if result is None:
                    problems.append(f"{_named(str(one), scratch, path)} went while it was read")
                    continue
                checkpoint = result.checkpoint
                yield {
                    **msgspec.to_builtins(checkpoint),
                    "path": _named(checkpoint.path, scratch, path),
                    "verdict": judgement(checkpoint),
                    "why": _named(checkpoint.why, scratch, path),
                    "complete": checkpoint.complete,
                    "modified_at": rfc3339(checkpoint.modified_at),
                    "size_bytes": checkpoint.size_bytes,
                    "tensors": result.tensors,
                    "tensor_bytes": result.tensor_bytes,
                    "remarks": list(result.remarks),
                }


def _named(text: str, scratch: str, path: str) -> str:
    """With the name that the user gave, in place of our copy's."""
    return text.replace(f"{scratch}/{path.rstrip('/').rpartition('/')[2]}", path.rstrip("/"))
