"""`unbroken token`: rights of others to a job, for its owner to give and to withdraw."""

from __future__ import annotations

import secrets
import time
from typing import Any

import click

from diagnosis.signals import clean_line
from supervisor.cli.job_commands import JobHandle, job_options
from supervisor.cli.output import print_answer, warn
from supervisor.errors import JobNotFound, UnbrokenError
from supervisor.view import rfc3339
from supervisor.wire.access import ROLES, derived_token, is_token_id, read_access_token

NAME_LIMIT = 60


@click.command()
@job_options
@click.option("--role", type=click.Choice(ROLES), help="Make a token with these rights.")
@click.option("--name", default="", help="What it is for; it stands in the audit trail.")
@click.option(
    "--user", default="", metavar="USER", help="No token: the rights are USER's, proven by munge; `*`: all users'."
)
@click.option("--withdraw", default="", metavar="ID", help="The token or right ID does not count any more.")
def token(job: JobHandle, as_json: bool, role: str | None, name: str, user: str, withdraw: str) -> None:
    """Make a token for others, list or withdraw them.

    read: see everything. operate: pause, approve, swap, restart, stop and the like. admin: decide about rules that a
    model proposed, too. alerts: Alertmanager may send alerts, and nothing else (docs/access.md).

    Without an option: list what was given. Only the job's owner can; the token is printed on stdout.
    """
    if bool(role) + bool(withdraw) > 1 or (not role and (name or user)):
        raise click.UsageError("give --role (with --name, --user), or --withdraw, or nothing")
    if job.folder is None or not job.folder.is_dir():
        raise JobNotFound("rights are kept in the job folder: give it with --job-dir")
    try:
        if withdraw:
            answer = _withdraw(job, withdraw)
        elif role:
            answer = _make(job, role, name, user)
        else:
            answer = _listed(job)
    except OSError as error:
        raise UnbrokenError(f"{error.filename or job.folder}: {error.strerror or error}. Nothing was done.") from None
    print_answer(answer, as_json, _show)


def _make(job: JobHandle, role: str, name: str, user: str) -> dict[str, Any]:
    from supervisor.controller.access import Grant, add_grant
    from supervisor.files import read_token

    assert job.folder is not None
    if user and (role == "alerts" or (user == "*" and role != "read")):
        raise click.UsageError("`--user '*'` goes with `--role read` alone, and alerts come with a token")
    grant = Grant(
        id=secrets.token_hex(4),
        role=role,  # type: ignore[arg-type]
        name=clean_line(name or ("" if user in ("", "*") else user), NAME_LIMIT),
        uid=None if user in ("", "*") else _uid(user),
        anybody=user == "*",
        made_at=time.time(),
    )
    job_token = read_token(job.token_path, shared=job.token_path.parent != job.folder)
    if read_access_token(job_token) is not None:
        raise UnbrokenError(f"{job.token_path} is not the job's own token: only that makes others. Nothing was done.")
    add_grant(job.folder, grant)
    made = {"schema": 1, "id": grant.id, "role": role, "name": grant.name, "uid": grant.uid, "anybody": grant.anybody}
    return made | {"token": derived_token(job_token, grant.role, grant.id) if grant.is_token else ""}


def _uid(user: str) -> int:
    import pwd

    try:
        return int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise UnbrokenError(f"there is no user {user} on this host: give the user id. Nothing was done.") from None


def _withdraw(job: JobHandle, grant_id: str) -> dict[str, Any]:
    from supervisor.controller.access import FRESH_S, withdraw_grant

    assert job.folder is not None
    if not is_token_id(grant_id) or not withdraw_grant(job.folder, grant_id):
        raise JobNotFound(f"there is no token or right {clean_line(grant_id, 40)}: `unbroken token` lists them")
    return {"schema": 1, "withdrawn": grant_id, "within_s": FRESH_S}


def _listed(job: JobHandle) -> dict[str, Any]:
    from supervisor.controller.access import read_grants

    assert job.folder is not None
    rows = sorted(read_grants(job.folder).values(), key=lambda one: one.made_at)
    keys = ("id", "role", "name", "uid", "anybody")
    return {
        "schema": 1,
        "grants": [{key: getattr(one, key) for key in keys} | {"made_at": rfc3339(one.made_at)} for one in rows],
    }


def _show(answer: dict[str, Any]) -> None:
    if "withdrawn" in answer:
        click.echo(f"{answer['withdrawn']} does not count any more (within {answer['within_s']:.0f} s)")
    elif "grants" in answer:
        for one in answer["grants"]:
            click.echo(f"{one['id']}  {one['role']:8}{_holder(one):20}{one['made_at']}  {one['name']}")
        if not answer["grants"]:
            click.echo("nobody but the job's owner has rights")
    elif answer["token"]:
        warn(f"token {answer['id']} with the rights of {answer['role']}; it is not kept and not shown again:")
        click.echo(answer["token"])
    else:
        click.echo(f"{answer['id']}: {_holder(answer)} may {answer['role']}")


def _holder(one: dict[str, Any]) -> str:
    return "every user" if one["anybody"] else "a token" if one["uid"] is None else f"user {one['uid']}"
