"""The commands that are about one job: reading it, and giving it orders.

Its controller is asked; when none answers, reading commands fold the journal, which gives the same.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from supervisor import config

if TYPE_CHECKING:
    from supervisor.controller.client import Client

NOT_DONE, UNKNOWN_NODE, NO_JOB, NO_CONTROLLER, NOT_ALLOWED, WRONG_CONFIG = 1, 3, 66, 69, 77, config.EXIT_CODE
"""Exit codes; docs/protocol.md lists them for people."""

ASK_PATIENCE_S = 150.0
"""How long `why --ask` waits for a model."""

COMMANDS: list[click.Command] = []


def fail(code: int, text: str) -> NoReturn:
    """Say on stderr what is wrong, and end."""
    click.echo(f"unbroken: {text}", err=True)
    sys.exit(code)


def load_config(flags: dict[str, object]) -> config.Loaded:
    """The configuration; ends the program when it is wrong."""
    try:
        return config.load(flags, os.environ, Path.cwd())
    except config.ConfigError as error:
        fail(WRONG_CONFIG, str(error))


def print_answer(value: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """As `write_answer`; where that is not possible, the program ends with a sentence."""
    with _writing():
        write_answer(value, as_json, show)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Ends the program with a sentence where what is written on stdout does not get there."""
    try:
        yield
    except BrokenPipeError:
        raise  # `| head`: the end of it, and no fault
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it goes with the program
        fail(NOT_DONE, f"the answer cannot be written: {error.strerror}")


def write_answer(value: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """As JSON on one line, or as `show` shows it. Raises OSError."""
    if sys.stdout is None:  # `>&-`: nobody wants it
        return
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(value).decode())
    else:
        show(value)
    sys.stdout.flush()


def command_of_job(function: Callable[..., None]) -> click.Command:
    command = click.command()(function)
    COMMANDS.append(command)
    return command


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options with which every other command finds its job; it gets the `Job` as its first argument."""

    @functools.wraps(command)
    def found(job_dir: str, slurm_job: str, address: str, token_file: str, **others: Any) -> None:
        if job_dir and slurm_job:
            raise click.UsageError("--job and --job-dir each name a job: give one of them")
        command(Job(job_dir, address, token_file, slurm_job), **others)

    options = [
        click.option("--job-dir", default="", help="Job folder.  [the newest under unbroken-jobs]"),
        click.option("--job", "slurm_job", default="", metavar="ID", help="The job with this id of Slurm."),
        click.option("--controller", "address", default="", metavar="HOST:PORT", help="Ask this controller."),
        click.option("--token-file", default="", help="[`token` in the job folder]"),
        click.option("--json", "as_json", is_flag=True, help="JSON, documented in docs/protocol.md."),
    ]
    return functools.reduce(lambda function, option: option(function), reversed(options), found)


class Job:
    """The job a command is about."""

    def __init__(self, job_dir: str, address: str, token_file: str, slurm_job: str = "") -> None:
        from supervisor.controller.client import NoJob, find_job, find_slurm_job

        settings = load_config({}).settings
        self._address = address or settings.run.controller
        self._token_file = token_file or settings.run.token_file
        self._tls_ca = settings.controller.tls_ca
        self.folder: Path | None = None
        self._warned = False
        self.is_guessed = not (job_dir or slurm_job or settings.run.job_dir)
        """Nobody named it: it is the newest one here."""
        if self._address and self._token_file and not (job_dir or slurm_job):
            return
        try:
            if slurm_job:
                self.folder = find_slurm_job(slurm_job, Path.cwd())
            else:
                self.folder = find_job(job_dir or settings.run.job_dir, Path.cwd())
        except NoJob as error:
            fail(NO_JOB, str(error))

    @property
    def is_gone_from_its_port(self) -> bool:
        """What a refused token means: nobody named an address or a token, so another job's controller answers."""
        return not (self._address or self._token_file)

    def client(self) -> Client:
        """Raises Unreachable."""
        from supervisor.controller.client import Client

        return Client.of_job(
            self.folder or Path(),
            controller=self._address,
            token_file=self._token_file,
            tls_ca=self._tls_ca,
        )

    def read(self, path: str, otherwise: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """What the controller answers; when none does, what the journal says."""
        from supervisor.controller.client import Denied, Unreachable, Unusable

        try:
            if self.folder is None or self.folder.is_dir():
                return self.client().get(path)
        except Unreachable as error:
            if self.folder is None:
                fail(NO_CONTROLLER, str(error))
            if isinstance(error, Unusable) and not self._warned:
                self._warned = True
                click.echo(f"unbroken: {error}\nunbroken: the journal is read instead", err=True)
        except Denied as error:
            if error.status != 401 or not self.is_gone_from_its_port:
                fail(NOT_ALLOWED if error.status == 401 else NOT_DONE, str(error))
            # Our controller is gone, and another job's has its port now.
        assert self.folder is not None
        try:
            return otherwise(self.folder)
        except OSError as error:
            fail(NO_JOB, f"the journal of {self.folder} cannot be read: {error.strerror or error}")


def _status_from_journal(where: Path) -> dict[str, Any]:
    from supervisor.controller.report import fold, status_of

    folded = fold(where)
    if folded.history.damaged:
        click.echo(f"unbroken: the journal is damaged: {'; '.join(folded.history.problems)[:1000]}", err=True)
    return status_of(folded.job.view(), None)


def _incidents_from_journal(where: Path) -> dict[str, Any]:
    from supervisor.controller.report import fold, incidents_of

    return incidents_of(fold(where).job.view())


def _timeline_from_journal(where: Path) -> dict[str, Any]:
    from supervisor.controller.journal import read_history
    from supervisor.controller.report import timeline_rows

    return {"schema": 1, "rows": timeline_rows(read_history(where))}


def _with_pending(job: Job, answer: dict[str, Any]) -> dict[str, Any]:
    """With the rules that wait for an operator; they are in a file of the job folder."""
    from supervisor.opinion import pending

    return answer | {"pending_rules": pending.names(job.folder) if job.folder is not None else []}


@command_of_job
@job_options
@click.option("--exit-code", is_flag=True, help="Print the exit code of the job's end and nothing else, for scripts.")
def status(job: Job, as_json: bool, exit_code: bool) -> None:
    """What the job is doing now, its nodes, and its newest incidents."""
    from supervisor.cli import render as show

    answer = job.read("/v1/status", _status_from_journal)
    if not exit_code:
        print_answer(_with_pending(job, answer), as_json, show.status)
    elif answer["outcome"] is None:
        fail(NOT_DONE, "the job has not ended")
    else:
        click.echo(answer["outcome"]["exit_code"])


@command_of_job
@job_options
def incidents(job: Job, as_json: bool) -> None:
    """Every incident: what it was, who did it, what was done, how long it took."""
    from supervisor.cli import render as show

    print_answer(_with_pending(job, job.read("/v1/incidents", _incidents_from_journal)), as_json, show.incidents)


@command_of_job
@click.argument("incident")
@job_options
@click.option("--ask", is_flag=True, help="Have the language model asked, where one is configured, and wait for it.")
def why(job: Job, incident: str, as_json: bool, ask: bool) -> None:
    """Why INCIDENT (i-1, or `last`) was judged as it was, on what evidence, what was done, and how long it took."""
    from supervisor.cli import render as show

    found = _incident(job, incident)
    if ask:
        found = _asked(job, found)
    job_dir = "" if job.folder is None else str(job.folder.absolute())
    print_answer({"schema": 1, "incident": found, "job_dir": job_dir}, as_json, show.why)


def _incident(job: Job, name: str) -> dict[str, Any]:
    everything = job.read("/v1/incidents", _incidents_from_journal)["incidents"]
    wanted = name if name.startswith("i-") or name == "last" else f"i-{name}"
    found = [one for one in everything if one["id"] == wanted or wanted == "last"]
    if not found:
        known = ", ".join(one["id"] for one in everything[-8:]) or "none"
        fail(NO_JOB, f"there is no incident {name}; there is: {known}")
    incident: dict[str, Any] = found[-1]
    return incident


def _asked_here(job: Job, incident: dict[str, Any]) -> dict[str, Any]:
    """Without a controller, as after the job's end."""
    from diagnosis import llm
    from supervisor.controller.report import fold, plain
    from supervisor.opinion import settings as of_opinion
    from supervisor.opinion.queue import ask_here
    from supervisor.run.torchrun_options import CommandRefused

    if job.folder is None:
        fail(NO_CONTROLLER, "no controller answers, and without one the job folder is needed: --job-dir")
    settings = load_config({}).settings.opinion
    try:
        of_opinion.check(settings)
    except config.ConfigError as error:
        fail(WRONG_CONFIG, str(error))
    if lacking := of_opinion.missing(settings, Path.cwd()):
        fail(WRONG_CONFIG, lacking)
    if settings.backend != "none":
        click.echo("unbroken: no controller answers: the model is asked from here", err=True)
    folded = fold(job.folder).job
    try:
        python = _training_python(folded.spec.command) if settings.backend == "transformers" else ""
        told = plain(ask_here(folded, job.folder, incident["id"], settings, python))
    except CommandRefused as error:
        told = plain(llm.no_opinion(str(error)))
    has_one = incident["opinion"] is not None and not incident["opinion"]["problem"]
    return incident | {"opinion_failed" if told["problem"] and has_one else "opinion": told}


def _training_python(command: Sequence[str]) -> str:
    """The interpreter that the job's command would run with here. Raises CommandRefused."""
    from supervisor.run.interpreter import training_python

    program = command[0] if command else "python"
    return training_python(program, os.path.basename(program).startswith("python"), os.environ)


def _asked(job: Job, incident: dict[str, Any]) -> dict[str, Any]:
    """The incident with what the model said, or as it is when nothing came in time."""
    from supervisor.controller.client import Denied, Unreachable

    try:
        job.client().ask_model(incident["id"])
    except Unreachable:
        return _asked_here(job, incident)
    except Denied as error:
        if error.status == 401 and job.is_gone_from_its_port:
            return _asked_here(job, incident)
        fail(NOT_ALLOWED if error.status == 401 else NOT_DONE, str(error))
    click.echo("unbroken: the model is asked; Ctrl-C ends the waiting, not the asking", err=True)
    patience_s = max(ASK_PATIENCE_S, load_config({}).settings.opinion.timeout_s + 30.0)
    until = time.monotonic() + patience_s
    now = incident
    while now["opinions"] == incident["opinions"] and time.monotonic() < until:
        time.sleep(0.5)
        now = _incident(job, incident["id"])
    if now["opinions"] == incident["opinions"]:
        click.echo(f"unbroken: no opinion came within {patience_s:.0f} s", err=True)
    return now


@command_of_job
@job_options
@click.option("--all", "everything", is_flag=True, help="Details too.")
@click.option("--since", type=int, default=0, metavar="SEQ", help="Only what came after this record.")
def timeline(job: Job, as_json: bool, everything: bool, since: int) -> None:
    """The story of the job, event by event."""
    from supervisor.cli import render as show

    answer = job.read(f"/v1/timeline?since={since}", _timeline_from_journal)
    rows = [row for row in answer["rows"] if row["seq"] > since and (everything or as_json or not row["detail"])]
    print_answer({**answer, "rows": rows}, as_json, show.timeline)


@command_of_job
@job_options
@click.option("--every", type=click.FloatRange(0.2), default=0.2, help="Seconds between looks.  [0.2]")
def watch(job: Job, as_json: bool, every: float) -> None:
    """The job, live, until it ends (with --json: one status a line, when something changed)."""
    from supervisor.cli import render as show

    if sys.stdout is None:
        return
    with _writing():
        show.watch(lambda: job.read("/v1/status", _status_from_journal), every, as_json)
