"""The commands with which an operator gives a job orders: what they would do, asked before what hurts, sent once.

An order is given to the controller alone; what is said of it when none answers is told by the journal.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import click

from diagnosis.incident import RULE_PREFIX
from supervisor.cli.job_commands import (
    NO_CONTROLLER,
    NO_JOB,
    NOT_ALLOWED,
    NOT_DONE,
    UNKNOWN_NODE,
    Job,
    fail,
    job_options,
    print_answer,
)

if TYPE_CHECKING:
    from supervisor.controller.client import Client

ORDERS: list[click.Command] = []


def _order(
    name: str, what: str, *, argument: str = "", needed: bool = True, hurts: str = "", choices: tuple[str, ...] = ()
) -> None:
    """Add the command `name`, which sends the override of that name. `hurts`: it interrupts `always` or `perhaps`."""

    def command(job: Job, as_json: bool, reason: str, yes: bool, dry_run: bool, **given: str) -> None:
        value = given.get("argument") or ""
        if name in ("approve", "reject") and value.startswith(RULE_PREFIX):
            print_answer(_decide_rule(name, value, job, reason, dry_run), as_json, _tell_decision)
            return
        if dry_run:
            _end(_would(name, value, job), as_json, lambda answer: click.echo(answer["would"]))
        if job.is_guessed and job.folder is not None and not as_json:
            click.echo(f"unbroken: the job is {job.folder}, the newest here", err=True)
        if hurts and not yes:
            _confirm(name, value, job, always=hurts == "always")
        _end(_send(job, name, value, reason), as_json, lambda answer: _tell_order(name, answer))

    command.__doc__ = what
    function: Callable[..., None] = command
    function = click.option("--dry-run", is_flag=True, help="Only say what it would do.")(function)
    function = click.option("--yes", "-y", is_flag=True, help="Do not ask.")(function)
    function = click.option("--reason", "-m", default="", help="Why; kept in the journal.")(function)
    function = job_options(function)
    if argument:
        kind = click.Choice(choices) if choices else None
        function = click.argument("argument", metavar=argument, required=needed, type=kind)(function)
    ORDERS.append(click.command(name)(function))


def _end(answer: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> NoReturn:
    """Print the answer and end the program, with a code that tells whether the order is carried out, or would be."""
    print_answer(answer, as_json, show)
    sys.exit(NOT_DONE if answer.get("refused") else UNKNOWN_NODE if answer.get("unknown_node") else 0)


def _would(name: str, argument: str, job: Job) -> dict[str, Any]:
    """What the order would do: as the controller says, or as the journal tells when there is none."""
    from supervisor.controller.client import Denied, Unreachable

    try:
        return job.client().would(name, argument, _operator())
    except Denied as error:
        fail(NOT_ALLOWED if error.status == 401 else NOT_DONE, str(error))
    except Unreachable as error:
        if job.folder is None:
            fail(NO_CONTROLLER, str(error))
        click.echo(f"unbroken: {error}\nunbroken: what follows is told by the journal", err=True)
    from supervisor.controller.server import Override, make_override
    from supervisor.controller.would import would

    try:
        return would(job.folder, make_override(Override(command=name, argument=argument, by=_operator()), time.time()))
    except OSError as error:
        fail(NO_JOB, f"the journal of {job.folder} cannot be read: {error.strerror or error}")


def _confirm(name: str, argument: str, job: Job, *, always: bool) -> None:
    """Ask before what interrupts a run, or takes a node from the whole cluster. Ends the program when the answer is no,
    or nobody is there to give one."""
    answer = _would(name, argument, job)
    # A controller of another version may not tell what is drained.
    drains = ", ".join(answer.get("drains") or [one["node"] for one in answer["scheduler"] if one["kind"] == "drain"])
    if not always and not answer["interrupts"] and not drains:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        what = f"drains {drains} for the whole cluster" if drains and not answer["interrupts"] else "interrupts the run"
        fail(2, f"`{name}` {what}: say --yes when there is nobody to ask. Nothing was done.")
    click.echo(answer["would"], err=True)
    click.confirm(f"{' '.join(filter(None, (name, argument)))}?", abort=True, err=True)


def _operator() -> str:
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _send(job: Job, name: str, argument: str, reason: str) -> dict[str, Any]:
    return _done(lambda client: client.override(name, argument, reason, _operator()), job)


def _done(order: Callable[[Client], dict[str, Any]], job: Job) -> dict[str, Any]:
    """The controller's answer; ends the program when there is none, or it is no."""
    from supervisor.controller.client import Denied, Unanswered, Unreachable, Unusable

    try:
        return order(job.client())
    except Unusable as error:
        fail(NO_CONTROLLER, f"{error}. Nothing was done.")
    except Unanswered as error:
        fail(NO_CONTROLLER, f"{error}. It may be done yet, when the controller goes on: see `unbroken timeline`")
    except Unreachable as error:
        if ended := _ended(job):
            fail(NOT_DONE, f"the job has ended already: {ended}. Nothing was done.")
        fail(NO_CONTROLLER, f"{error}. Nothing was done. If the job runs, its controller is back in seconds: try again")
    except Denied as error:
        fail(NOT_ALLOWED if error.status == 401 else NOT_DONE, f"{error}. Nothing was done.")


def _ended(job: Job) -> str:
    """How the job ended, by its journal; empty when it has not, or that cannot be told."""
    from supervisor.controller.report import fold

    try:
        outcome = fold(job.folder).job.outcome if job.folder is not None else None
    except OSError:
        return ""
    return outcome.line if outcome is not None else ""


def _decide_rule(name: str, rule: str, job: Job, reason: str, dry_run: bool) -> dict[str, Any]:
    from supervisor.cli import rule_commands

    try:
        return rule_commands.decide(name, rule, job.folder, job.client, reason, _operator(), dry_run=dry_run)
    except rule_commands.NotDone as error:
        fail(error.code, f"{error}. Nothing was done.")


def _tell_decision(answer: dict[str, Any]) -> None:
    for line in answer.get("notes") or [answer["would"]]:
        click.echo(line)


def _tell_order(name: str, answer: dict[str, Any]) -> None:
    for note in answer["notes"] or [f"{name}: taken"]:
        click.echo(note)


_order("pause", "Watch and record, but do nothing, until `resume`.")
_order("resume", "Act again after `pause`; let a held job go on.")
_order("restart", "Stop the workers and start the next attempt now.", hurts="always")
_order("stop", "End the job: the workers get SIGTERM, later SIGKILL.", hurts="always")
_order("cordon", "Do not use NODE (or NODE/GPU) from the next attempt on.", argument="NODE[/GPU]", hurts="perhaps")
_order("uncordon", "NODE may be used again, or no longer left out for GPU.", argument="NODE[/GPU]")
_order(
    "mode",
    "observe: only watch; recommend: ask before acting; enforce: act.",
    argument="MODE",
    choices=("observe", "recommend", "enforce"),
)
_order(
    "approve",
    "Do what was proposed for INCIDENT (mode recommend), or use RULE that a model proposed.",
    argument="[INCIDENT|RULE]",
    needed=False,
)
_order(
    "reject",
    "Do not do what was proposed for INCIDENT (mode recommend), or forget RULE that a model proposed.",
    argument="[INCIDENT|RULE]",
    needed=False,
)
