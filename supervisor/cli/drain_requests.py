"""Root's side of requests to drain this node, which jobs of ordinary users have left (`recovery.drain_requests`).

Slurm's Epilog and HealthCheckProgram run it. What a user may have made is opened as what it should be, or not at all.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
import time
from collections.abc import Mapping
from typing import Final

import click

from recovery.drain_requests import (
    SIZE_LIMIT,
    DrainRequest,
    file_name,
    read_request,
    too_many,
)
from recovery.schedulers.slurm import Slurm
from recovery.scheduling import Answer
from supervisor.node_health.contract import ProbeContext

_ID: Final = re.compile(r"[0-9]{1,10}")


class Refused(Exception):
    """Why the folder is not used, in words."""


def serve(spool: str, per_hour: int, node: str, *, dry_run: bool) -> None:
    """Drain this node where a request says so. What is wrong is said on stderr, and never ends in an error."""
    node = node or os.environ.get("SLURMD_NODENAME", "") or os.uname().nodename.partition(".")[0]
    try:
        folder = _folder(spool or _of_site())
    except FileNotFoundError:
        return  # the site does not use it
    except (OSError, Refused) as error:
        click.echo(f"unbroken: requests to drain this node are not read: {error}", err=True)
        return
    try:
        asyncio.run(_serve(folder, node, per_hour, dry_run))
    finally:
        os.close(folder)


def _of_site() -> str:
    from supervisor.site import load_or_default

    site, problem = load_or_default(os.environ.get("UNBROKEN_SITE", ""))
    if problem:
        click.echo(f"unbroken: {problem}", err=True)
    return site.drain_requests


def _folder(path: str) -> int:
    """A descriptor of the folder. Raises OSError, and Refused where users could put things in each other's place."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if found.st_uid != 0 or (found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX):
        os.close(descriptor)
        raise Refused(f"{path} must be root's, and sticky (`install -d -m 1733 {path}`)")
    return descriptor


async def _serve(folder: int, node: str, per_hour: int, dry_run: bool) -> None:
    slurm = Slurm(os.environ)
    for job, uid in (await _jobs(slurm, node, os.environ)).items():
        request = _request(folder, job, uid, node, dry_run)
        if request is None:
            continue
        answer = await _drain(slurm, request, per_hour, dry_run)
        click.echo(f"unbroken: job {job} of user {uid} asks to drain {node}: {answer.outcome}: {answer.text}", err=True)
        if answer.outcome in ("done", "already", "foreign", "failed") and not dry_run:
            _remove(folder, file_name(job, uid))


async def _jobs(slurm: Slurm, node: str, environment: Mapping[str, str]) -> dict[str, int]:
    """Job -> user, of those that run here or have ended here just now, by Slurm's own word."""
    found = dict(await slurm.jobs_on(node))
    job, uid = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_UID", "")
    if _ID.fullmatch(job) and _ID.fullmatch(uid):  # slurmd's, in an Epilog
        found[job] = int(uid)
    return found


def _request(folder: int, job: str, uid: int, node: str, dry_run: bool) -> DrainRequest | None:
    """What the job asks for; what is no request is said and removed."""
    name = file_name(job, uid)
    try:
        data = _read(folder, name, uid)
    except FileNotFoundError:
        return None
    except (OSError, Refused) as error:
        why = str(error)
    else:
        request = read_request(data, job=job, node=node, boot_id=ProbeContext().boot_id, now=time.time())
        if isinstance(request, DrainRequest):
            return request
        why = request
    click.echo(f"unbroken: the request {name} is not taken: {why}", err=True)
    if not dry_run:
        _remove(folder, name)
    return None


def _read(folder: int, name: str, uid: int) -> bytes:
    """A small regular file that this user has made. Raises OSError and Refused."""
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):
        raise Refused("it is no file")
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise Refused("it is no file of its own")
        if found.st_uid != uid:
            raise Refused(f"it is user {found.st_uid}'s, and the job is user {uid}'s")
        return file.read(SIZE_LIMIT + 1)


def _remove(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError as error:
        click.echo(f"unbroken: the request {name} stays: {error.strerror}", err=True)


async def _drain(slurm: Slurm, request: DrainRequest, per_hour: int, dry_run: bool) -> Answer:
    """Drain the node, if not too many were within the hour; also by others at this moment, who may have been faster."""
    before = await slurm.drained()
    if isinstance(before, Answer):
        return before
    if many := too_many(before, request.node, per_hour, time.time()):
        return Answer(outcome="unavailable", text=f"{many} nodes were drained within the hour: a person has to look")
    if dry_run:
        return Answer(outcome="done", text=f"it would be drained ({request.reason})")
    answer = await slurm.drain(request.node, request.reason)
    if answer.outcome != "done":
        return answer
    after = await slurm.drained()
    if not isinstance(after, Answer) and (many := too_many(after, request.node, per_hour, time.time())):
        await slurm.undrain(request.node, request.job)
        text = f"{many} nodes were drained at the same time, and {request.node} is given back: a person has to look"
        return Answer(outcome="unavailable", text=text)
    return answer
