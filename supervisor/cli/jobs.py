"""`unbroken jobs`, `logs`, `page` and `watch`: which jobs there are, what their ranks print, and a job live."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from supervisor.cli.job_commands import (
    JobHandle,
    is_starting,
    job_options,
    job_options_waiting,
    send,
    status_from_journal,
)
from supervisor.cli.output import operator_name, print_answer, warn, writing
from supervisor.config import read_plan, working_folder
from supervisor.errors import ControllerUnreachable, JobNotFound, JobStarting, UnbrokenError
from supervisor.messages import CommandName, CommandRequest
from supervisor.paths import LocalPaths, local_dir

ASKED_AT_ONCE = 16


# ----- jobs -----


@click.command()
@click.option("--dir", "where", default=".", help="Where the jobs were started.  [this folder]")
@click.option("--last", type=click.IntRange(1), default=20, metavar="N", help="Show the newest N.  [20]")
@click.option("--json", "as_json", is_flag=True, help="JSON, documented in docs/protocol.md.")
def jobs(where: str, last: int, as_json: bool) -> None:
    """List the jobs that were started here, the newest first.

    Those of this folder's `unbroken-jobs`. A job that runs is asked; the journals of the others are read.
    """
    from supervisor.controller.client import jobs_of

    folders = jobs_of(working_folder() / where, also=is_starting)
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        answers = list(pool.map(_asked, folders[:last]))
    rows = [_row(folder, answer) for folder, answer in zip(folders, answers, strict=False)]
    print_answer({"schema": 1, "jobs": rows, "left_out": len(folders) - len(rows)}, as_json, _print_jobs)


def _asked(folder: Path) -> dict[str, Any] | None:
    """What the job's controller answers; None where none does."""
    try:
        return JobHandle(str(folder), "", "").client().get("/v1/status")
    except UnbrokenError:
        return None


def _row(folder: Path, answer: dict[str, Any] | None) -> dict[str, Any]:
    """One job of the list. One whose journal cannot be read is listed too, with what is wrong."""
    row: dict[str, Any] = {"job_dir": str(folder), "controller": answer is not None}
    try:
        found = JobHandle(str(folder), "", "").by_journal(status_from_journal) if answer is None else answer
    except UnbrokenError as error:
        row["starting"] = isinstance(error, JobStarting)
        return row | {"name": folder.name, "problem": str(error)}
    fields = ("name", "state", "attempt", "step", "last_step", "incidents_total", "started_at", "ended_at", "waiting")
    return row | {field: found[field] for field in fields} | {"problem": "", "starting": False}


def _print_jobs(answer: dict[str, Any]) -> None:
    from supervisor.cli import render

    cells = []
    for one in answer["jobs"]:
        folder = os.path.relpath(one["job_dir"])
        if one["problem"]:
            state = "starting" if one["starting"] else "?"
            cells.append((one["name"], state, "", "", "", "", "", folder, one["problem"]))
            continue
        step = "" if one["step"] is None else str(one["step"])
        step += f" of {one['last_step']}" if one["last_step"] is not None else ""
        silent = "" if one["controller"] or one["ended_at"] is not None else "no controller answers"
        times = (render.clock(one["started_at"])[:19], render.clock(one["ended_at"])[:19])
        counts = (str(one["attempt"]), step, str(one["incidents_total"]))
        cells.append((one["name"], one["state"], *counts, *times, folder, silent or one["waiting"]))
    columns = ("job", "state", "attempt", "step", "incidents", "started", "ended", "folder", "why")
    left_out = answer["left_out"]
    render.rows(columns, cells, below=f"{left_out} older ones are left out: --last shows more" if left_out else "")


# ----- logs -----


class OutputFile(NamedTuple):
    """A file with what a rank printed."""

    node: str
    attempt: int
    rank: int
    stream: str
    path: str


@click.command()
@click.argument("rank", type=click.IntRange(0), required=False)
@job_options
@click.option("--attempt", type=click.IntRange(1), metavar="N", help="Of attempt N.  [the newest]")
@click.option("--lines", "-n", type=click.IntRange(0), default=40, metavar="N", help="The last N lines of each.  [40]")
@click.option("--follow", "-f", is_flag=True, help="Go on as the rank prints, until Ctrl-C.")
def logs(job: JobHandle, rank: int | None, as_json: bool, attempt: int | None, lines: int, follow: bool) -> None:
    """Show what RANK of the job printed on this node.

    Without RANK: list the files. A rank's output is on the node that ran it; the error for another node's rank says
    which node that is.
    """
    if job.folder is None:
        raise JobNotFound("give the job folder with --job-dir: the output is found by it")
    everything = sorted(outputs(job.folder.absolute(), local_dir("", "").absolute()))
    newest = max((one.attempt for one in everything if rank is None or one.rank == rank), default=0)
    wanted = [one for one in everything if one.attempt == (attempt or newest) and (rank is None or one.rank == rank)]
    if rank is None or as_json:
        files = [one._asdict() | {"bytes": _size(one.path)} for one in wanted]
        print_answer({"schema": 1, "job_dir": str(job.folder), "files": files}, as_json, _print_files)
    elif not wanted:
        raise JobNotFound(_elsewhere(job, rank, attempt, everything))
    else:
        _show(wanted, lines, follow)


def outputs(job_dir: Path, local_root: Path) -> Iterator[OutputFile]:
    """The output of all ranks of this job that ran here; the newest run of the job on each node counts."""
    from supervisor.agent.ranks import read_streams

    for file in sorted(local_root.glob("*/*/node.json")):
        if file.parent.name.endswith(".previous"):
            continue
        try:
            plan = read_plan(file)
        except (OSError, msgspec.DecodeError):
            continue
        if Path(plan.job_dir) != job_dir:
            continue
        paths = LocalPaths(file.parent)
        for folder in (file.parent / "attempts").glob("[0-9]*"):
            for one in read_streams(paths.streams(int(folder.name))):
                yield OutputFile(plan.node, int(folder.name), one.rank, one.stream, one.path)


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def _elsewhere(job: JobHandle, rank: int, attempt: int | None, here: Sequence[OutputFile]) -> str:
    """Why there is nothing to show, and where it is."""
    if known := sorted({one.attempt for one in here if one.rank == rank}):
        return f"rank {rank} did not run here in attempt {attempt}; it ran here in attempt {', '.join(map(str, known))}"
    try:
        nodes = job.read("/v1/status", status_from_journal)["nodes"]
    except ControllerUnreachable:
        nodes = []
    host = next((node["host"] or node["node"] for node in nodes if rank in node["ranks"]), "")
    if not host:
        return f"no output of rank {rank} is on this node, and the job knows no node with this rank now"
    return f"rank {rank} runs on {host}: ssh {host} unbroken logs {rank} --job-dir {job.folder}"


def _show(files: Sequence[OutputFile], lines: int, follow: bool) -> None:
    """Become `tail`, which knows how to follow files that are cut or replaced."""
    sizes = {one.path: _size(one.path) for one in files}
    paths = [path for path, size in sizes.items() if size is not None and (size or follow)]
    if not paths:
        gone = [path for path, size in sizes.items() if size is None]
        raise UnbrokenError(f"{gone[0]} is gone" if gone else f"rank {files[0].rank} has printed nothing")
    os.execvp("tail", ["tail", f"--lines={lines}", *(["--follow=name", "--retry"] if follow else []), "--", *paths])


def _print_files(answer: dict[str, Any]) -> None:
    from supervisor.cli import render

    cells = [
        (
            *(str(one["rank"]), one["stream"], str(one["attempt"]), one["node"]),
            *("gone" if one["bytes"] is None else render.size_text(one["bytes"]), one["path"]),
        )
        for one in answer["files"]
    ]
    empty = "" if cells else f"no rank of {answer['job_dir']} has printed anything on this node"
    render.rows(("rank", "stream", "attempt", "node", "size", "file"), cells, below=empty)


# ----- page -----


@click.command()
@job_options_waiting
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Of 127.0.0.1.  [a free one]")
def page(job: JobHandle, as_json: bool, port: int) -> None:
    """Show the job as a page in a browser, until Ctrl-C.

    It is served on this machine alone, at an address that only you are told; over ssh, the line for your own machine is
    printed. A job that has ended is shown from its journal.
    """
    from supervisor.cli.page_server import JobReader, PageServer

    reader = JobReader(job)
    reader.status()  # a job that cannot be read is told here, not in the browser
    try:
        server = PageServer(port, reader)
    except OSError as error:
        raise UnbrokenError(f"port {port} of 127.0.0.1 cannot be used: {error.strerror}. Choose another") from None
    print_answer({"schema": 1, "url": server.url}, as_json, lambda _: click.echo(server.url))
    if os.environ.get("SSH_CONNECTION"):
        number, host = server.server_address[1], os.uname().nodename
        warn(f"on your own machine: ssh -N -L {number}:127.0.0.1:{number} {host}, then open this address")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


# ----- watch -----


@click.command()
@job_options_waiting
@click.option("--every", type=click.FloatRange(0.2), default=0.2, help="Seconds between updates.  [0.2]")
def watch(job: JobHandle, as_json: bool, every: float) -> None:
    """Show the job, live, until it ends.

    On a terminal, keys pause the job and decide what waits for a decision: `?` lists them, `q` leaves. Each first says
    what it would do, and asks. Into a pipe: a line when something has changed. With --json: one status a line.
    """
    from supervisor.cli.page_server import JobReader
    from supervisor.cli.watch import watch as show

    if sys.stdout is None:
        return
    reader = JobReader(job)

    def act(command: CommandName, argument: str, dry: bool) -> dict[str, Any]:
        request = CommandRequest(command=command, argument=argument, by=operator_name(), dry_run=dry)
        return job.client().command(request) if dry else send(request, job)

    with writing():
        show(reader.status, act, every, as_json)
