"""The commands with which an operator acts on a job: each asks before it hurts, is sent once, and says what was done.

Only the controller carries a command out. When none answers, the journal shows what it would do.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import click

from diagnosis.incident import RULE_PREFIX
from supervisor.cli.job_commands import JobHandle, job_options
from supervisor.cli.output import print_answer, warn
from supervisor.errors import (
    CommandDenied,
    ConfigError,
    ControllerSilent,
    ControllerUnreachable,
    ControllerUnusable,
    ExitCode,
    RuleNotFound,
    UnbrokenError,
)
from supervisor.messages import CommandName, OperatorCommand
from supervisor.view import utc

if TYPE_CHECKING:
    from supervisor.controller.client import ControllerClient

Interrupts = Literal["never", "perhaps", "always"]
"""Whether a command interrupts the run, or takes a node from others: then somebody is asked first."""


class CommandOptions(NamedTuple):
    """What every command of an operator is given beside its argument."""

    job: JobHandle
    as_json: bool
    reason: str
    yes: bool
    dry_run: bool


def command_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every command below; it gets them as `options`."""

    @functools.wraps(command)
    def given(job: JobHandle, as_json: bool, reason: str, yes: bool, dry_run: bool, **arguments: Any) -> None:
        command(options=CommandOptions(job, as_json, reason, yes, dry_run), **arguments)

    function: Callable[..., None] = job_options(given)
    function = click.option("--reason", "-m", default="", help="Why; kept in the journal.")(function)
    function = click.option("--yes", "-y", is_flag=True, help="Do not ask.")(function)
    return click.option("--dry-run", is_flag=True, help="Only say what it would do.")(function)


# ----- the commands -----


@click.command()
@command_options
def pause(options: CommandOptions) -> None:
    """Watch and record, but do nothing, until `resume`."""
    give(options, "pause")


@click.command()
@command_options
def resume(options: CommandOptions) -> None:
    """Act again after `pause`; let a held job go on."""
    give(options, "resume")


@click.command()
@command_options
def restart(options: CommandOptions) -> None:
    """Stop the workers and start the next attempt now."""
    give(options, "restart", interrupts="always")


@click.command()
@command_options
def stop(options: CommandOptions) -> None:
    """End the job: the workers get SIGTERM, later SIGKILL."""
    give(options, "stop", interrupts="always")


@click.command()
@click.argument("node", metavar="NODE[/GPU]")
@command_options
def cordon(options: CommandOptions, node: str) -> None:
    """Do not use NODE (or NODE/GPU) from the next attempt on.

    A scheduler may be asked to drain NODE for the whole cluster. Before that, and before it interrupts a run, the
    command asks you; `--yes` answers it. Exit code 3: the job has no such node.
    """
    give(options, "cordon", node, interrupts="perhaps")


@click.command()
@click.argument("node", metavar="NODE[/GPU]")
@command_options
def uncordon(options: CommandOptions, node: str) -> None:
    """Use NODE again, or stop leaving it out because of GPU."""
    give(options, "uncordon", node)


@click.command()
@click.argument("mode", metavar="MODE", type=click.Choice(["observe", "recommend", "enforce"]))
@command_options
def mode(options: CommandOptions, mode: str) -> None:
    """observe: only watch; recommend: ask before acting; enforce: act."""
    give(options, "mode", mode)


@click.command()
@click.argument("what", metavar="[INCIDENT|RULE]", default="")
@command_options
def approve(options: CommandOptions, what: str) -> None:
    """Do what was proposed for INCIDENT (mode recommend), or use RULE that a model proposed."""
    give(options, "approve", what)


@click.command()
@click.argument("what", metavar="[INCIDENT|RULE]", default="")
@command_options
def reject(options: CommandOptions, what: str) -> None:
    """Do not do what was proposed for INCIDENT (mode recommend), or forget RULE that a model proposed."""
    give(options, "reject", what)


OPERATOR_COMMANDS = (pause, resume, restart, stop, cordon, uncordon, mode, approve, reject)


# ----- giving one -----


def give(options: CommandOptions, name: CommandName, argument: str = "", interrupts: Interrupts = "never") -> NoReturn:
    """Have the controller carry the command out, or say what it would do, and end the program with a code for that."""
    job = options.job
    command = OperatorCommand(at=time.time(), command=name, argument=argument, reason=options.reason, by=_operator())
    if name in ("approve", "reject") and argument.startswith(RULE_PREFIX):
        answer = decide_rule(command, job.folder, job.client, dry_run=options.dry_run)
    elif options.dry_run:
        answer = _dry_run(command, job)
    else:
        if job.is_guessed and job.folder is not None and not options.as_json:
            warn(f"the job is {job.folder}, the newest here")
        if interrupts != "never" and not options.yes:
            _confirm(command, job, always=interrupts == "always")
        answer = _send(command, job)
    lines = [answer["would"]] if options.dry_run else answer["notes"] or [f"{name}: taken"]
    print_answer(answer, options.as_json, lambda _: click.echo("\n".join(lines)))
    unknown = ExitCode.UNKNOWN_NODE if answer.get("unknown_node") else ExitCode.DONE
    sys.exit(ExitCode.NOT_DONE if answer.get("refused") else unknown)


def _send(command: OperatorCommand, job: JobHandle) -> dict[str, Any]:
    """The controller's answer. Whatever else happens is said with whether anything was done."""
    try:
        return job.client().command(command)
    except ControllerSilent as error:
        raise ControllerSilent(f"{error}. It may still be carried out: see `unbroken timeline`") from None
    except (ControllerUnusable, CommandDenied) as error:
        raise error.add("Nothing was done.") from None
    except ControllerUnreachable as error:
        if ended := _ended(job):
            raise UnbrokenError(f"the job has ended already: {ended}. Nothing was done.") from None
        raise error.add("Nothing was done. If the job runs, its controller is back in seconds: try again") from None


def _dry_run(command: OperatorCommand, job: JobHandle) -> dict[str, Any]:
    """What the command would do: as the controller says, or as the journal tells when there is none."""
    try:
        return job.client().command(command, dry_run=True)
    except ControllerUnreachable as error:
        if job.folder is None:
            raise
        warn(f"{error}. What follows is read from the journal")
    from supervisor.controller.report import dry_run

    return job.by_journal(lambda folder: dry_run(folder, command))


def _confirm(command: OperatorCommand, job: JobHandle, *, always: bool) -> None:
    """Ask before what interrupts a run, or takes a node from the whole cluster. Ends the program when the answer is no,
    or nobody is there to give one."""
    answer = _dry_run(command, job)
    # A controller of another version may not tell what is drained.
    drains = ", ".join(answer.get("drains") or [one["node"] for one in answer["scheduler"] if one["kind"] == "drain"])
    if not always and not answer["interrupts"] and not drains:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        what = f"drains {drains} for the whole cluster" if drains and not answer["interrupts"] else "interrupts the run"
        why = f"`{command.command}` {what}: say --yes when there is nobody to ask. Nothing was done."
        raise UnbrokenError(why, ExitCode.WRONG_USAGE)
    click.echo(answer["would"], err=True)
    click.confirm(f"{command.command} {command.argument}".rstrip() + "?", abort=True, err=True)


def _operator() -> str:
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _ended(job: JobHandle) -> str:
    """How the job ended, by its journal; empty when it has not, or that cannot be told."""
    from supervisor.controller.report import fold

    try:
        outcome = fold(job.folder).job.outcome if job.folder is not None else None
    except OSError:
        return ""
    return outcome.line if outcome is not None else ""


# ----- rules that a model proposed -----


def decide_rule(
    command: OperatorCommand, job_dir: Path | None, client: Callable[[], ControllerClient], *, dry_run: bool = False
) -> dict[str, Any]:
    """`approve` or `reject` a rule, and have it journalled if a controller answers; as JSON types.

    Raises UnbrokenError; then nothing was done, and the text says so.
    """
    from supervisor.opinion import pending

    name, approved = command.argument, command.command == "approve"
    if job_dir is None:
        raise RuleNotFound(f"the rule {name} is in a job folder: name that folder with --job-dir. Nothing was done.")
    try:
        rule = pending.find(job_dir, name)
        if dry_run:
            would = f"would put {name} into {job_dir / pending.APPROVED}" if approved else f"would forget {name}"
            return {"schema": 1, "would": would, "command": command.command, "argument": name, "rule": rule}
        if approved:
            pending.check(job_dir, rule)
        try:
            client().command(command)
        except ControllerUnusable:
            raise
        except ControllerUnreachable:
            pass  # a job that has ended has no controller, and needs none for this
        at = f"{utc(command.at):%Y-%m-%d %H:%M} UTC"
        sentence = pending.approve(job_dir, name, command.by, at) if approved else pending.reject(job_dir, name)
    except ConfigError as error:
        raise UnbrokenError(f"{error}. Nothing was done.") from None
    except UnbrokenError as error:
        raise error.add("Nothing was done.") from None
    except OSError as error:
        raise UnbrokenError(f"{error.filename or job_dir}: {error.strerror}. Nothing was done.") from None
    return {"schema": 1, "ok": True, "notes": [sentence]}
