"""Carries out requests to drain this node that jobs of ordinary users have left (`recovery.cordon`). It runs as root.

Slurm's Epilog and HealthCheckProgram start it. A file that a user may have made is opened only if it is a regular file
of that user's.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
import subprocess
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from recovery.cordon import DRAINS_PER_HOUR, REQUEST_BYTES, DrainRequest, read_request, request_file, too_many
from recovery.scheduling import Answer
from supervisor.cli.output import warn
from supervisor.errors import ExitCode, RequestUntrusted, UnbrokenError
from supervisor.node_health.contract import ProbeContext

if TYPE_CHECKING:
    from recovery.schedulers import Slurm

_ID: Final = re.compile(r"[0-9]{1,10}")


@click.command("drain-requests")
@click.option(
    "--spool",
    default="",
    metavar="DIR",
    help="Folder with the requests.  [as the site file says, else /var/spool/unbroken]",
)
@click.option(
    "--per-hour",
    type=click.IntRange(1),
    default=DRAINS_PER_HOUR,
    help=f"Drain at most so many nodes of the cluster in an hour.  [{DRAINS_PER_HOUR}]",
)
@click.option("--node-name", default="", help="Name of this node.  [SLURMD_NODENAME, host name]")
@click.option("--dry-run", is_flag=True, help="Only say what it would do.")
def drain_requests(spool: str, per_hour: int, node_name: str, dry_run: bool) -> None:
    """Drain this node at the request of jobs (run as root).

    Only jobs whose user may not drain nodes leave such requests. For root's Epilog and HealthCheckProgram: the exit
    code is 0 whatever was found, because Slurm drains for another.
    """
    if os.geteuid() != 0:
        why = "drain-requests is for root: it reads what users have left, and drains this node"
        raise UnbrokenError(why, ExitCode.NOT_ALLOWED)
    serve(spool, per_hour, node_name, dry_run=dry_run)


def serve(spool: str, per_hour: int, node: str, *, dry_run: bool) -> None:
    """Drain this node if a request asks for it. Problems are printed on stderr; the exit code stays 0."""
    import asyncio

    node = node or os.environ.get("SLURMD_NODENAME", "") or os.uname().nodename.partition(".")[0]
    try:
        folder = _folder(spool or _of_site())
    except FileNotFoundError:
        return  # the site does not use it
    except (OSError, RequestUntrusted) as error:
        warn(f"requests to drain this node are not read: {error}")
        return
    try:
        asyncio.run(_serve(folder, node, per_hour, dry_run))
    finally:
        os.close(folder)


def _of_site() -> str:
    from supervisor.config import load_site_or_default

    site, problem = load_site_or_default(os.environ.get("UNBROKEN_SITE", ""))
    if problem:
        warn(f"{problem}")
    return site.drain_requests


def _folder(path: str) -> int:
    """A descriptor of the folder. Raises OSError, and RequestUntrusted if users could replace each other's files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if found.st_uid != 0 or (found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX):
        os.close(descriptor)
        raise RequestUntrusted(f"{path} must belong to root and have the sticky bit (`install -d -m 1733 {path}`)")
    return descriptor


async def _serve(folder: int, node: str, per_hour: int, dry_run: bool) -> None:
    from recovery.schedulers import Slurm

    slurm = Slurm(os.environ)
    for job, uid in (await _jobs(slurm, node, os.environ)).items():
        request = _request(folder, job, uid, node, dry_run)
        if request is None:
            continue
        answer = await _drain(slurm, request, per_hour, dry_run)
        warn(f"job {job} of user {uid} asks to drain {node}: {answer.outcome}: {answer.text}")
        if answer.outcome in ("done", "already", "foreign", "failed") and not dry_run:
            _remove(folder, request_file(job, uid))


async def _jobs(slurm: Slurm, node: str, environment: Mapping[str, str]) -> dict[str, int]:
    """Job -> user, of those that run here or have ended here just now, by Slurm's own word."""
    found = dict(await slurm.jobs_on(node))
    job, uid = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_UID", "")
    if _ID.fullmatch(job) and _ID.fullmatch(uid):  # slurmd's, in an Epilog
        found[job] = int(uid)
    return found


def _request(folder: int, job: str, uid: int, node: str, dry_run: bool) -> DrainRequest | None:
    """What the job asks for. A file that is no request is reported and removed."""

    name = request_file(job, uid)
    try:
        data = _read(folder, name, uid)
    except FileNotFoundError:
        return None
    except (OSError, RequestUntrusted) as error:
        why = str(error)
    else:
        request = read_request(data, job=job, node=node, boot_id=ProbeContext().boot_id, now=time.time())
        if isinstance(request, DrainRequest):
            return request
        why = request
    warn(f"the request {name} is ignored: {why}")
    if not dry_run:
        _remove(folder, name)
    return None


def _read(folder: int, name: str, uid: int) -> bytes:
    """A small regular file that this user has made. Raises OSError and RequestUntrusted."""
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):
        raise RequestUntrusted("it is not a regular file")
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise RequestUntrusted("it has a second name (a hard link)")
        if found.st_uid != uid:
            raise RequestUntrusted(f"the file belongs to user {found.st_uid}, the job to user {uid}")
        return file.read(REQUEST_BYTES + 1)


def _remove(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError as error:
        warn(f"the request {name} cannot be removed: {error.strerror}")


async def _drain(slurm: Slurm, request: DrainRequest, per_hour: int, dry_run: bool) -> Answer:
    """Drain the node, unless too many nodes were drained within the hour, also by other nodes at this moment."""
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


COMMAND_S: Final = 10.0
_SLURM_USER: Final = re.compile(r"^SlurmUser\s*=\s*([^\s(]+)\((\d+)\)", re.M)


class Rights(NamedTuple):
    may_drain: bool
    why: str


def judge(uid: int, config: str, admin_level: str) -> Rights:
    """`config`: of `scontrol show config`. `admin_level`: as sacctmgr has it, empty where there is no accounting."""
    if uid == 0:
        return Rights(True, "root may drain nodes")
    slurm_user = _SLURM_USER.search(config)
    if slurm_user is not None and int(slurm_user[2]) == uid:
        return Rights(True, f"{slurm_user[1]} is SlurmUser and may drain nodes")
    if admin_level == "Administrator":
        return Rights(True, "AdminLevel=Administrator may drain nodes")
    level = f"AdminLevel={admin_level}" if admin_level else "an ordinary user"
    return Rights(False, f"{level} may not drain nodes: root, SlurmUser and AdminLevel=Administrator may")


def request_folder(path: str) -> str:
    """Whether jobs of users who may not can leave requests for root's programs here, in words."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return f"there is no folder {path} on this node: root's programs are not asked (unbroken docs slurm#rights)"
    except OSError as error:
        return f"{path}: {error.strerror}"
    if found.st_uid != 0 or not os.access(path, os.W_OK | os.X_OK):
        return f"{path} cannot be used: it must be root's, with mode 1733"
    return f"jobs leave requests for root's programs in {path} (unbroken drain-requests)"


def rights(folder: str) -> tuple[Rights, str]:
    """Of this user, and whether requests can be left. Ends within some 20 s."""
    uid = os.getuid()
    config = _ask("scontrol", "show", "config") if uid else ""
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = ""
    level = (
        _ask("sacctmgr", "--noheader", "--parsable2", "show", "user", user, "format=AdminLevel") if user and uid else ""
    )
    return judge(uid, config, level.strip().partition("\n")[0]), request_folder(folder)


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
