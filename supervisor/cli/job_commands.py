"""The commands about one job: those that read it, and those with which an operator acts on it.

Its controller is asked. When none answers, reading commands fold the journal, which gives the same; nothing else can
act, and `--dry-run` says from the journal what a command would do. A command that interrupts asks first.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import click
import msgspec

from diagnosis.incident import RULE_PREFIX
from supervisor import config
from supervisor.cli.nodes import cordon_for_all, for_all_jobs, uncordon_for_all
from supervisor.cli.output import operator_name, print_answer, warn
from supervisor.errors import (
    NOT_PROVEN,
    CommandDenied,
    ConfigError,
    ControllerSilent,
    ControllerUnreachable,
    ControllerUnusable,
    ExitCode,
    JobNotFound,
    JobStarting,
    LaunchRefused,
    RuleNotFound,
    UnbrokenError,
)
from supervisor.messages import CommandName, CommandRequest
from supervisor.view import utc

if TYPE_CHECKING:
    from supervisor.controller.client import ControllerClient

START_LOOK_S = 0.2
ASK_PATIENCE_S = 150.0
"""How long `why --ask` waits for a model."""


class WholeNumber(click.IntRange):
    name = "whole number"  # as it is called in an error


JOB_OPTIONS = (
    click.option("--job-dir", default="", help="Job folder.  [the newest under unbroken-jobs]"),
    click.option("--job", "slurm_job", default="", metavar="ID", help="The job with this id of Slurm."),
    click.option("--controller", "address", default="", metavar="HOST:PORT", help="Ask this controller."),
    click.option("--token-file", default="", help="[`token` in the job folder]"),
    click.option("--json", "as_json", is_flag=True, help="JSON, documented in docs/protocol.md."),
)


def with_options(command: Callable[..., None], options: Sequence[Callable[..., Any]]) -> Callable[..., None]:
    return functools.reduce(lambda function, option: option(function), reversed(options), command)


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options with which every other command finds its job; it gets the `JobHandle` as its first argument."""

    @functools.wraps(command)
    def found(job_dir: str, slurm_job: str, address: str, token_file: str, **others: Any) -> None:
        if job_dir and slurm_job:
            raise click.UsageError("--job and --job-dir both name a job: give only one of them")
        command(JobHandle(job_dir, address, token_file, slurm_job), **others)

    return with_options(found, JOB_OPTIONS)


def job_options_later(command: Callable[..., None]) -> Callable[..., None]:
    """The same options, of a command that looks for a job only where it needs one."""
    return with_options(command, JOB_OPTIONS)


def job_options_waiting(command: Callable[..., None]) -> Callable[..., None]:
    """The same options, of a command that goes on looking: one given with `unbroken run` waits until the job begins."""

    @functools.wraps(command)
    def found(job_dir: str, slurm_job: str, address: str, token_file: str, **others: Any) -> None:
        told = ""
        while True:
            try:
                job = JobHandle(job_dir, address, token_file, slurm_job)
                break
            except JobStarting as error:
                if str(error) != told:
                    told = str(error)
                    warn(told)
            time.sleep(START_LOOK_S)
        command(job, **others)

    return with_options(found, JOB_OPTIONS)


def starting(job_dir: str, cwd: Path) -> str:
    """That `unbroken run` has just begun the job of this name, or the newest of this user, in words; empty: it has not.

    It holds the lease of the folder, and its controller has not begun to write: there is no journal, or that of the
    life before.
    """
    from supervisor.paths import JOBS

    root = cwd / JOBS
    try:
        folders = [cwd / job_dir, root / job_dir] if job_dir else list(root.iterdir())
    except OSError:
        return ""
    for folder in folders:
        with contextlib.suppress(OSError):
            if (job_dir or folder.stat().st_uid == os.geteuid()) and (told := _starting(folder)):
                return told
    return ""


def is_starting(folder: Path) -> bool:
    """Whether `unbroken run` has begun a job there, and its controller has not begun to write."""
    try:
        return bool(_starting(folder))
    except OSError:
        return False


def _starting(folder: Path) -> str:
    """Raises OSError."""
    from supervisor.files import Here, start_time
    from supervisor.run.lease import DEAD_S, has_begun, lease_path, lease_state, newest_lease, read_lease, who_holds

    number = newest_lease(folder)
    holder = read_lease(lease_path(folder, number)) if number else None
    if holder is None or has_begun(folder, holder):
        return ""
    renewed_s = time.time() - lease_path(folder, number).stat().st_mtime
    state = lease_state(holder, holder, Here.find(), start_time)
    if state != "lives" and (state != "unknown" or renewed_s >= DEAD_S):
        return ""
    return f"job {folder.name} is starting ({who_holds(holder)}): it waits for its controller to begin the journal"


class JobHandle:
    """The job that a command is about: where its folder is, and how to ask its controller."""

    def __init__(self, job_dir: str, address: str, token_file: str, slurm_job: str = "") -> None:
        from supervisor.controller.client import find_job, find_slurm_job

        settings = config.load_here().settings
        self._address = address or settings.run.controller
        self._token_file = token_file or settings.run.token_file
        self._tls_ca = settings.controller.tls_ca
        self.folder: Path | None = None
        self._warned = False
        self.is_guessed = not (job_dir or slurm_job or settings.run.job_dir)
        """Nobody named a job, so this is the newest one here."""
        if self._address and self._token_file and not (job_dir or slurm_job):
            return
        if told := starting(job_dir or slurm_job or settings.run.job_dir, config.working_folder()):
            raise JobStarting(told)
        if slurm_job:
            self.folder = find_slurm_job(slurm_job, config.working_folder())
        else:
            self.folder = find_job(job_dir or settings.run.job_dir, config.working_folder())

    @property
    def is_gone_from_its_port(self) -> bool:
        """A refused token means that another job's controller has the port now: nobody named an address or a token."""
        return not (self._address or self._token_file)

    @property
    def token_path(self) -> Path:
        return Path(self._token_file) if self._token_file else (self.folder or Path()) / "token"

    def client(self) -> ControllerClient:
        """Raises ControllerUnreachable."""
        from supervisor.controller.client import ControllerClient

        return ControllerClient.of_job(
            self.folder or Path(),
            controller=self._address,
            token_file=self._token_file,
            tls_ca=self._tls_ca,
        )

    def read(self, path: str, otherwise: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """What the controller answers; when none does, what the journal says."""
        try:
            if self.folder is None or self.folder.is_dir():
                return self.client().get(path)
        except ControllerUnreachable as error:
            if self.folder is None:
                raise
            if isinstance(error, ControllerUnusable) and not self._warned:
                self._warned = True
                warn(str(error))
                warn("the journal is read instead")
        except CommandDenied as error:
            if error.status != NOT_PROVEN or not self.is_gone_from_its_port:
                raise
            # Our controller is gone, and another job's has its port now.
        return self.by_journal(otherwise)

    def by_journal(self, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """What the journal says. Raises JobNotFound where it cannot be read."""
        assert self.folder is not None
        try:
            return read(self.folder)
        except OSError as error:
            raise JobNotFound(f"the journal of {self.folder} cannot be read: {error.strerror or error}") from None


def status_from_journal(where: Path) -> dict[str, Any]:
    from supervisor.controller.report import fold, job_advice, status_of

    folded = fold(where)
    if folded.history.damaged:
        warn(f"the journal is damaged: {'; '.join(folded.history.problems)[:1000]}")
    return status_of(folded.job.view(), None, job_advice(folded.job, folded.job.now), folded.job.story)


def incidents_from_journal(where: Path) -> dict[str, Any]:
    from supervisor.controller.report import fold, incidents_of

    return incidents_of(fold(where).job.view())


def curve_from_journal(where: Path) -> dict[str, Any]:
    from supervisor.controller.report import curve_of, fold

    job = fold(where).job
    return curve_of(job.spec.name, job.curve.view())


def timeline_from_journal(where: Path, since: int = 0) -> dict[str, Any]:
    from supervisor.controller.journal import read_after
    from supervisor.controller.report import timeline_rows

    return {"schema": 1, "rows": timeline_rows(read_after(where, since))}


def read_timeline(job: JobHandle, since: int = 0) -> dict[str, Any]:
    """From the journal where it can be read here: of a long one that is work, and the controller has other work."""
    if job.folder is not None:
        with contextlib.suppress(JobNotFound):
            return job.by_journal(functools.partial(timeline_from_journal, since=since))
    return job.read(f"/v1/timeline?since={since}", timeline_from_journal)


def _with_pending(job: JobHandle, answer: dict[str, Any]) -> dict[str, Any]:
    """With the rules that wait for an operator; they are in a file of the job folder."""
    from supervisor.opinion import pending

    return answer | {"pending_rules": pending.names(job.folder) if job.folder is not None else []}


@click.command()
@job_options
@click.option("--exit-code", is_flag=True, help="Print the exit code of the job's end and nothing else, for scripts.")
def status(job: JobHandle, as_json: bool, exit_code: bool) -> None:
    """Show the job now: state, step, nodes, incidents."""
    from supervisor.cli import render

    answer = job.read("/v1/status", status_from_journal)
    if not exit_code:
        print_answer(_with_pending(job, answer), as_json, render.status)
    elif answer["outcome"] is None:
        raise UnbrokenError("the job has not ended")
    else:
        click.echo(answer["outcome"]["exit_code"])


@click.command()
@job_options
def incidents(job: JobHandle, as_json: bool) -> None:
    """List the incidents: verdict, culprit, time lost."""
    from supervisor.cli import render

    print_answer(_with_pending(job, job.read("/v1/incidents", incidents_from_journal)), as_json, render.incidents)


@click.command()
@click.argument("incident")
@job_options
@click.option("--ask", is_flag=True, help="Ask the configured language model too, and wait for its answer.")
@click.option("--correct", "failure_class", metavar="CLASS", help="Say what it was (docs/taxonomy.md).")
@click.option("--note", default="", metavar="TEXT", help="With --correct: how you know, or what was repaired.")
def why(job: JobHandle, incident: str, as_json: bool, ask: bool, failure_class: str | None, note: str) -> None:
    """Explain INCIDENT (i-1, or `last`).

    The verdict, its evidence, what was done, how long each phase took, where the evidence is kept, whether it has
    happened before, and how the output differs from that of earlier attempts. With --correct your word is kept beside
    the verdict; it changes nothing that was done.
    """
    from supervisor.cli import diagnose, render

    if note and failure_class is None:
        raise click.UsageError("--note goes with --correct CLASS")
    found = find_incident(job, incident)
    if failure_class is not None:
        from supervisor.cli.past_incidents import correct

        correct(job, found["id"], failure_class, note)
        found = find_incident(job, found["id"])
    if ask:
        found = _asked(job, found)
    job_dir = "" if job.folder is None else str(job.folder.absolute())
    beside = diagnose.of_attempt(job_dir, found["attempt"]) if job_dir else None
    compared = {} if beside is None else {"compared": beside["compared"]}

    def show(value: dict[str, Any]) -> None:
        render.why(value)
        diagnose.show_beside(beside)

    print_answer({"schema": 1, "incident": found, "job_dir": job_dir, **compared}, as_json, show)


def find_incident(job: JobHandle, name: str) -> dict[str, Any]:
    everything = job.read("/v1/incidents", incidents_from_journal)["incidents"]
    wanted = name if name.startswith("i-") or name == "last" else f"i-{name}"
    found = [one for one in everything if one["id"] == wanted or wanted == "last"]
    if not found:
        known = ", ".join(one["id"] for one in everything[-8:]) or "none"
        raise JobNotFound(f"there is no incident {name}; known incidents: {known}")
    incident: dict[str, Any] = found[-1]
    return incident


def _asked_here(job: JobHandle, incident: dict[str, Any]) -> dict[str, Any]:
    """As `_asked`, where no controller answers (the job has ended): this process asks the model."""
    from diagnosis import llm
    from supervisor.cli.past_incidents import folder_of
    from supervisor.controller.report import fold, plain
    from supervisor.opinion.queue import ask_here

    if job.folder is None:
        raise ControllerUnreachable("no controller answers: give the job folder with --job-dir")
    settings = config.load_here().settings.opinion
    config.check_opinion(settings)
    if missing := config.missing_for_opinion(settings, config.working_folder()):
        raise ConfigError(missing)
    if settings.backend != "none":
        warn("no controller answers: the model is asked from here")
    folded = fold(job.folder).job
    try:
        python = _training_python(folded.spec.command) if settings.backend == "transformers" else ""
        opinion = plain(ask_here(folded, job.folder, incident["id"], settings, python, folder_of(job.folder)))
    except LaunchRefused as error:
        opinion = plain(llm.no_opinion(str(error)))
    has_one = incident["opinion"] is not None and not incident["opinion"]["problem"]
    return incident | {"opinion_failed" if opinion["problem"] and has_one else "opinion": opinion}


def _training_python(command: Sequence[str]) -> str:
    """The Python that would run the job's command here. Raises LaunchRefused."""
    from supervisor.run.prepare import training_python

    program = command[0] if command else "python"
    return training_python(program, os.path.basename(program).startswith("python"), os.environ)


def _asked(job: JobHandle, incident: dict[str, Any]) -> dict[str, Any]:
    """The incident with the model's answer, or unchanged if none came in time."""

    try:
        job.client().ask_model(incident["id"])
    except ControllerUnreachable:
        return _asked_here(job, incident)
    except CommandDenied as error:
        if error.status == NOT_PROVEN and job.is_gone_from_its_port:
            return _asked_here(job, incident)
        raise
    warn("asking the model. Ctrl-C ends the waiting, not the request")
    patience_s = max(ASK_PATIENCE_S, config.load_here().settings.opinion.timeout_s + 30.0)
    until = time.monotonic() + patience_s
    now = incident
    while now["opinions"] == incident["opinions"] and time.monotonic() < until:
        time.sleep(0.5)
        now = find_incident(job, incident["id"])
    if now["opinions"] == incident["opinions"]:
        warn(f"no opinion came within {patience_s:.0f} s")
    return now


@click.command()
@job_options
@click.option("--all", "everything", is_flag=True, help="Show details as well.")
@click.option("--since", type=int, default=0, metavar="SEQ", help="Show only records after number SEQ.")
def timeline(job: JobHandle, as_json: bool, everything: bool, since: int) -> None:
    """Show what happened in the job, event by event."""
    from supervisor.cli import render

    answer = read_timeline(job, since)
    rows = [row for row in answer["rows"] if row["seq"] > since and (everything or as_json or not row["detail"])]
    print_answer({**answer, "rows": rows}, as_json, render.timeline)


JOB_COMMANDS = (status, incidents, why, timeline)


def command_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every command with which an operator acts; `give` gets them."""
    options = (
        click.option("--dry-run", is_flag=True, help="Only say what the command would do."),
        click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation."),
        click.option("--reason", "-m", default="", help="The reason; the journal keeps it."),
    )
    return with_options(job_options(command), options)


# ----- the commands -----


@click.command()
@command_options
def pause(job: JobHandle, **options: Any) -> None:
    """Watch and record, but do nothing, until `resume`."""
    give(job, "pause", **options)


@click.command()
@command_options
def resume(job: JobHandle, **options: Any) -> None:
    """Act again after `pause`; let a held job go on."""
    give(job, "resume", **options)


@click.command()
@command_options
def restart(job: JobHandle, **options: Any) -> None:
    """Stop the workers and start the next attempt now."""
    give(job, "restart", confirm="always", **options)


@click.command()
@click.argument("step", metavar="[STEP]", type=WholeNumber(0), required=False)
@click.option("--skip", type=WholeNumber(0, 1_000_000), metavar="N", help="Leave out N batches (docs/loss.md).")
@click.option("--undo", is_flag=True, help="Put back what the last rollback moved aside, and restart from the newest.")
@command_options
def rollback(job: JobHandle, step: int | None, skip: int | None, undo: bool, **options: Any) -> None:
    """Restart from an older checkpoint: that of STEP.

    Without STEP: the one that the loss guard recommends, else the one before the newest. Newer checkpoints are moved
    aside, not deleted. The command first says which steps are lost.
    """
    if undo and (step is not None or skip is not None):
        raise click.UsageError("--undo takes no STEP and no --skip: it goes back to the newest checkpoint")
    argument = "--undo" if undo else "" if step is None else str(step)
    give(job, "rollback", argument + (f" --skip {skip}" if skip else ""), confirm="always", **options)


@click.command()
@command_options
def stop(job: JobHandle, **options: Any) -> None:
    """End the job: the workers get SIGTERM, later SIGKILL."""
    give(job, "stop", confirm="always", **options)


@click.command()
@click.argument("node", metavar="NODE[/GPU]")
@for_all_jobs(cordon_for_all, ends=True)
@command_options
def cordon(job: JobHandle, node: str, **options: Any) -> None:
    """Do not use NODE (or NODE/GPU) from the next attempt on.

    The scheduler may be asked to drain NODE for the whole cluster. Before it drains a node or interrupts the run, the
    command asks you (not with `--yes`). Exit code 3: the job has no such node; it is cordoned all the same.

    With --cluster: no job uses NODE. It is written to the ledger of all jobs, and no scheduler is asked.
    """
    give(job, "cordon", node, confirm="if_it_interrupts", **options)


@click.command()
@click.argument("node", metavar="NODE")
@click.option("--now", "at_once", is_flag=True, help="Do not wait for a checkpoint: restart on the spare at once.")
@command_options
def swap(job: JobHandle, node: str, at_once: bool, **options: Any) -> None:
    """Replace NODE by a spare as soon as a checkpoint is complete.

    NODE is cordoned then, and the scheduler may be asked to drain it for the whole cluster: the command asks you first
    (not with `--yes`). `uncordon` takes NODE back as a spare. `reject NODE` keeps it while it still trains. With --now
    the steps since the last checkpoint are lost, and the command always asks.
    """
    argument = f"{node} --now" if at_once else node
    give(job, "swap", argument, confirm="always" if at_once else "if_it_interrupts", **options)


@click.command()
@click.argument("node", metavar="NODE[/GPU]")
@for_all_jobs(uncordon_for_all, ends=False)
@command_options
def uncordon(job: JobHandle, node: str, **options: Any) -> None:
    """Use NODE again, or NODE/GPU.

    With --cluster: all jobs may. --reason says what was repaired; NODE is on probation then.
    """
    give(job, "uncordon", node, **options)


@click.command()
@click.argument("mode", metavar="MODE", type=click.Choice(["observe", "recommend", "enforce"]))
@command_options
def mode(job: JobHandle, mode: str, **options: Any) -> None:
    """Set how much the job does by itself.

    observe: only watch; recommend: ask before acting; enforce: act.
    """
    give(job, "mode", mode, **options)


@click.command()
@click.argument("what", metavar="[INCIDENT|NODE|RULE]", default="")
@click.option("--site", is_flag=True, help="Accept RULE for all jobs of the site, not for this job folder only.")
@command_options
def approve(job: JobHandle, what: str, site: bool, **options: Any) -> None:
    """Carry out the plan that waits for approval.

    With INCIDENT: only if the plan belongs to it. With INCIDENT@VERSION, as `status` has it: only if it has not changed
    since. With NODE: swap it at the next checkpoint. With RULE@VERSION: accept that rule, which a model proposed;
    `--dry-run` shows it. Before it drains a node for the whole cluster or interrupts the run, the command asks you (not
    with `--yes`).
    """
    if site and not what.startswith(RULE_PREFIX):
        raise click.UsageError(f"--site is for rules that a model proposed: {RULE_PREFIX}...")
    give(job, "approve", what, confirm="if_it_interrupts", site=site, **options)


@click.command()
@click.argument("what", metavar="[INCIDENT|NODE|RULE]", default="")
@command_options
def reject(job: JobHandle, what: str, **options: Any) -> None:
    """Reject the plan that waits for approval.

    INCIDENT: only if it is the plan for this incident. NODE: it is not swapped. RULE: delete a rule
    that a model proposed, also if it was approved before.
    """
    give(job, "reject", what, **options)


OPERATOR_COMMANDS = (pause, resume, restart, rollback, stop, swap, cordon, uncordon, mode, approve, reject)


# ----- giving one -----


def give(
    job: JobHandle,
    name: CommandName,
    argument: str = "",
    *,
    confirm: Literal["", "if_it_interrupts", "always"] = "",
    site: bool = False,
    reason: str,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> NoReturn:
    """Have the controller carry the command out, or say what it would do, and end the program with a code for that."""
    request = CommandRequest(
        command=name,
        argument=argument,
        reason=reason,
        by=operator_name(),
        dry_run=dry_run,
        confirm="" if yes or dry_run else confirm,
    )
    if name in ("approve", "reject") and argument.startswith(RULE_PREFIX):
        answer = decide_rule(request, job.folder, job.client, for_site=site)
    elif dry_run:
        answer = dry_run_answer(request, job)
    else:
        if job.is_guessed and job.folder is not None and not as_json:
            warn(f"the job is {job.folder}, the newest here")
        answer = send(request, job)
        if answer.get("confirm"):
            answer = _confirmed(request, answer, job)
    lines = [answer["would"]] if dry_run else answer["notes"] or [f"{name}: done"]
    print_answer(answer, as_json, lambda _: click.echo("\n".join(lines)))
    unknown = ExitCode.UNKNOWN_NODE if answer.get("unknown_node") else ExitCode.DONE
    sys.exit(ExitCode.NOT_DONE if answer.get("refused") else unknown)


def send(request: CommandRequest, job: JobHandle) -> dict[str, Any]:
    """The controller's answer. Every error also says whether anything was done."""
    try:
        return job.client().command(request)
    except ControllerSilent as error:
        raise ControllerSilent(f"{error}. It may still be carried out: see `unbroken timeline`") from None
    except (ControllerUnusable, CommandDenied) as error:
        raise error.add("Nothing was done.") from None
    except ControllerUnreachable as error:
        if ended := _ended(job):
            raise UnbrokenError(f"the job has ended already: {ended}. Nothing was done.") from None
        raise error.add("Nothing was done. If the job runs, its controller is back in seconds: try again") from None


def dry_run_answer(request: CommandRequest, job: JobHandle) -> dict[str, Any]:
    """What the command would do: as the controller says, or as the journal tells when there is none."""
    try:
        return job.client().command(request)
    except ControllerUnreachable as error:
        if job.folder is None:
            raise
        if not _ended(job):  # else the journal's answer says so
            warn(f"{error}. What follows is read from the journal")
    from supervisor.controller.report import dry_run

    return job.by_journal(lambda folder: dry_run(folder, request.event(time.time(), request.by)))


def _confirmed(request: CommandRequest, would: dict[str, Any], job: JobHandle) -> dict[str, Any]:
    """Ask the user, and have done what was agreed to: where it has become another thing meanwhile, ask again."""
    from supervisor.cli.watch import differs

    while True:
        _confirm(request, would)
        now = send(request, job)
        if not now.get("confirm"):
            return now
        if not differs(now, would):
            return send(msgspec.structs.replace(request, confirm=""), job)
        warn("the job has changed since: it would now do another thing")
        would = now


def _confirm(request: CommandRequest, answer: dict[str, Any]) -> None:
    """Ask the user about a command that interrupts the run or drains a node, as the controller's answer says.

    Ends the program when the user says no, or nobody can be asked.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        drains = ", ".join(answer["drains"])
        what = f"drains {drains} for the whole cluster" if drains and not answer["interrupts"] else "interrupts the run"
        why = f"`{request.command}` {what}, and nobody can be asked here: give --yes. Nothing was done."
        raise UnbrokenError(why, ExitCode.WRONG_USAGE)
    click.echo(answer["would"], err=True)
    click.confirm(f"{request.command} {request.argument}".rstrip() + "?", abort=True, err=True)


def _ended(job: JobHandle) -> str:
    """How the job ended, by its journal; empty if it has not ended, or the journal cannot be read."""
    from supervisor.controller.report import fold

    try:
        outcome = fold(job.folder).job.outcome if job.folder is not None else None
    except OSError:
        return ""
    return outcome.line if outcome is not None else ""


# ----- rules that a model proposed -----


def decide_rule(
    request: CommandRequest, job_dir: Path | None, client: Callable[[], ControllerClient], *, for_site: bool = False
) -> dict[str, Any]:
    """`approve` or `reject` a rule, and have it journalled if a controller answers; as JSON types.

    Raises UnbrokenError; then nothing was done, and the text says so.
    """
    from supervisor.opinion import pending

    shown, approved = request.argument, request.command == "approve"
    name = shown.partition("@")[0]
    if job_dir is None:
        raise RuleNotFound(f"the rule {name} is in a job folder: give it with --job-dir. Nothing was done.")
    try:
        learned = config.learned_rules(config.load_here().settings.run.site_file)
        into = learned if for_site else job_dir / pending.APPROVED
        if approved:
            look = request.dry_run and shown == name
            rule = pending.find(job_dir, name) if look else pending.as_shown(job_dir, shown)
            pending.check(job_dir, rule, into)
            would = f"would put it into {into} (`unbroken approve {pending.version(rule)}`):\n{pending.toml(rule)}"
        else:
            rule, place = pending.where(job_dir, name, learned)
            would = f"would take {name} out of {place}"
        if request.dry_run:
            return {"schema": 1, "would": would, "command": request.command, "argument": name, "rule": rule}
        try:
            client().command(request)
        except ControllerUnusable:
            raise
        except ControllerUnreachable:
            pass  # a job that has ended has no controller, and needs none for this
        at = f"{utc(time.time()):%Y-%m-%d %H:%M} UTC"
        if approved:
            sentence = pending.approve(job_dir, shown, request.by, at, into)
        else:
            sentence = pending.reject(job_dir, name, learned)
    except ConfigError as error:
        raise UnbrokenError(f"{error}. Nothing was done.") from None
    except UnbrokenError as error:
        raise error.add("Nothing was done.") from None
    except OSError as error:
        raise UnbrokenError(f"{error.filename or job_dir}: {error.strerror}. Nothing was done.") from None
    return {"schema": 1, "ok": True, "notes": [sentence]}
