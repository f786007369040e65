"""The command `unbroken`.

`unbroken run` must start at once: everything that one command needs and others do not is imported by that command.

Exit codes of all commands but `run`, `demo` and `bench`: 0 done, 1 not done (refused, or a replay that differs),
2 wrong usage, 66 no such job or incident, 69 no controller answers, 77 the token was not accepted, 78 wrong
configuration.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from supervisor import config

if TYPE_CHECKING:
    from supervisor.client import Client

NOT_DONE, NO_JOB, NO_CONTROLLER, NOT_ALLOWED, WRONG_CONFIG = 1, 66, 69, 77, config.EXIT_CODE

F = TypeVar("F", bound=Callable[..., Any])


def fail(code: int, text: str) -> NoReturn:
    """Say on stderr what is wrong, and end."""
    click.echo(f"unbroken: {text}", err=True)
    sys.exit(code)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("unbroken")
    except PackageNotFoundError:
        return "unknown"


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"unbroken {_version()}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version)
def main() -> None:
    """Keeps a distributed pretraining run alive.

    Put `unbroken run --` in front of the command you start it with:

        unbroken run -- torchrun --nproc-per-node 8 train.py
    """


# ----- running -----


def _run_options(command: F) -> F:
    options = [
        click.option("--job-dir", help="Job folder, shared between nodes.  [unbroken-jobs/NAME]"),
        click.option("--name", help="Name of the job.  [script and time]"),
        click.option("--controller", metavar="HOST:PORT", help="A controller that runs elsewhere."),
        click.option("--listen", metavar="HOST:PORT", help="Where our own controller listens.  [a free port]"),
        click.option("--node-name", help="Name of this node.  [host name]"),
        click.option("--token-file", help="File with the job's token.  [`token` in the job folder]"),
        click.option("--spare", is_flag=True, help="This node stays idle until it is needed."),
        click.option("--spares", type=int, metavar="N", help="How many nodes are kept idle.  [0]"),
        click.option("--max-restarts", type=int, metavar="N", help="Restarts without progress in between.  [10]"),
        click.option("--mode", type=click.Choice(["observe", "recommend", "enforce"]), help="[enforce]"),
        click.option("--checkpoint-dir", "checkpoint_dirs", multiple=True, help="Where checkpoints are; repeatable."),
        click.option("--restart-args", metavar="ARGS", help="Added to the script's arguments after a restart."),
        click.option("--nproc-per-node", metavar="N", help="For `-- python train.py`: processes on this node."),
        click.option("--kernel-log", metavar="PATH", help="Kernel log device or file.  [/dev/kmsg]"),
        click.option("--gather", "gather_s", type=float, metavar="S", help="Wait this long for more nodes.  [30]"),
        click.option("--wait-for-nodes", "wait_for_nodes_s", type=float, metavar="S", help="Then give up.  [600]"),
        click.option("--quiet", "-q", is_flag=True, default=None, help="No lines of our own but the last."),
        click.option("--json", "as_json", is_flag=True, help="The outcome as JSON on the last line of stderr."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@main.command("run", context_settings={"allow_interspersed_args": False})
@_run_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...], spare: bool, nproc_per_node: str | None, as_json: bool, **flags: Any) -> None:
    """Run COMMAND, watch it, and restart it from its newest good checkpoint when it breaks.

    The exit code is COMMAND's own, or 75 requeued or preempted, 78 wrong configuration, 90 stopped as not worth
    retrying, 91 restarts used up, 130 interrupted, 143 terminated.
    """
    listen = flags.pop("listen")
    flags["checkpoint_dirs"] = flags["checkpoint_dirs"] or None
    given = {f"run.{name}": value for name, value in flags.items()} | {"controller.listen": listen}
    settings = _load(given)
    for name in ("tls_cert", "tls_key", "tls_ca"):
        if value := getattr(settings.controller, name):
            os.environ[f"UNBROKEN_{name.upper()}"] = value  # for the controller and agent that this process starts
    sys.exit(_front(settings, command, spare=spare, nproc_per_node=nproc_per_node, as_json=as_json))


def _front(
    settings: config.Settings, command: tuple[str, ...], *, spare: bool, nproc_per_node: str | None, as_json: bool
) -> int:
    import shlex

    from supervisor import front

    try:
        restart_args = tuple(shlex.split(settings.run.restart_args))
    except ValueError as error:
        fail(WRONG_CONFIG, f"--restart-args {settings.run.restart_args!r}: {error}")
    values = {name: getattr(settings.run, name) for name in settings.run.__struct_fields__}
    values["restart_args"] = restart_args
    options = front.RunOptions(
        **values,
        listen=settings.controller.listen,
        spare=spare,
        nproc_per_node=nproc_per_node,
        json=as_json,
    )
    return front.main(options, list(command))


@main.command("demo", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> None:
    """A supervised Llama pretraining on this machine, with faults injected while you watch."""
    from supervisor import demo as show

    sys.exit(show.main(list(arguments)))


@main.command("bench", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure recovery, side by side with torchrun; break things at random (`bench chaos`)."""
    from supervisor import bench as measure

    sys.exit(measure.main(list(arguments)))


@main.command("controller", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def controller(arguments: tuple[str, ...]) -> None:
    """Run a controller by itself (`unbroken run` starts one on the first node)."""
    from supervisor import controller as service

    settings = _load({}).controller
    given = list(arguments)
    for flag, value in (
        ("--listen", settings.listen),
        ("--tls-cert", settings.tls_cert),
        ("--tls-key", settings.tls_key),
    ):
        if value and flag not in given:
            given += [flag, value]
    sys.exit(service.main(given))


def _load(flags: dict[str, object]) -> config.Settings:
    return _load_all(flags).settings


def _load_all(flags: dict[str, object]) -> config.Loaded:
    try:
        return config.load(flags, os.environ, Path.cwd())
    except config.ConfigError as error:
        fail(WRONG_CONFIG, str(error))


# ----- reading -----


def _job_options(command: F) -> F:
    """The options with which every other command finds its job."""
    options = [
        click.option("--job-dir", default="", help="Job folder.  [the newest under unbroken-jobs]"),
        click.option("--controller", "address", default="", metavar="HOST:PORT", help="Ask this controller."),
        click.option("--token-file", default="", help="[`token` in the job folder]"),
        click.option("--json", "as_json", is_flag=True, help="JSON, documented in docs/protocol.md."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


class Job:
    """The job a command is about."""

    def __init__(self, job_dir: str, address: str, token_file: str) -> None:
        from supervisor.client import NoJob, find_job

        settings = _load({})
        self._address = address or settings.run.controller
        self._token_file = token_file or settings.run.token_file
        self._tls_ca = settings.controller.tls_ca
        self.folder: Path | None = None
        if self._address and not job_dir and self._token_file:
            return
        try:
            self.folder = find_job(job_dir or settings.run.job_dir, Path.cwd())
        except NoJob as error:
            fail(NO_JOB, str(error))

    def client(self) -> Client:
        """Raises Unreachable."""
        from supervisor.client import Client

        return Client.of_job(
            self.folder or Path(),
            controller=self._address,
            token_file=self._token_file,
            tls_ca=self._tls_ca,
        )

    def read(self, path: str, otherwise: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """What the controller answers; when none does, what the journal says."""
        from supervisor.client import Denied, Unreachable

        try:
            if self.folder is None or self.folder.is_dir():
                return self.client().get(path)
        except Unreachable as error:
            if self.folder is None:
                fail(NO_CONTROLLER, str(error))
        except Denied as error:
            fail(NOT_ALLOWED if error.status == 401 else NOT_DONE, str(error))
        assert self.folder is not None
        try:
            return otherwise(self.folder)
        except OSError as error:
            fail(NO_JOB, f"the journal of {self.folder} cannot be read: {error.strerror or error}")


def _status_from_journal(where: Path) -> dict[str, Any]:
    from supervisor.report import fold, status_of

    return status_of(fold(where).job.view(), None)


def _incidents_from_journal(where: Path) -> dict[str, Any]:
    from supervisor.report import fold, incidents_of

    return incidents_of(fold(where).job.view())


def _timeline_from_journal(where: Path) -> dict[str, Any]:
    from supervisor.journal import read_history
    from supervisor.report import timeline_rows

    return {"schema": 1, "rows": timeline_rows(read_history(where))}


def _print(value: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(value).decode())
    else:
        show(value)


@main.command()
@_job_options
def status(job_dir: str, address: str, token_file: str, as_json: bool) -> None:
    """What the job is doing now, its nodes, and its newest incidents."""
    from supervisor import show

    _print(Job(job_dir, address, token_file).read("/v1/status", _status_from_journal), as_json, show.status)


@main.command()
@_job_options
def incidents(job_dir: str, address: str, token_file: str, as_json: bool) -> None:
    """Every incident: what it was, who did it, what was done, how long it took."""
    from supervisor import show

    _print(Job(job_dir, address, token_file).read("/v1/incidents", _incidents_from_journal), as_json, show.incidents)


@main.command()
@click.argument("incident")
@_job_options
def why(incident: str, job_dir: str, address: str, token_file: str, as_json: bool) -> None:
    """Why INCIDENT (i-1, or `last`) was judged as it was, on what evidence, what was done, and how long it took."""
    from supervisor import show

    everything = Job(job_dir, address, token_file).read("/v1/incidents", _incidents_from_journal)["incidents"]
    wanted = incident if incident.startswith("i-") or incident == "last" else f"i-{incident}"
    found = [one for one in everything if one["id"] == wanted or wanted == "last"]
    if not found:
        known = ", ".join(one["id"] for one in everything[-8:]) or "none"
        fail(NO_JOB, f"there is no incident {incident}; there is: {known}")
    _print({"schema": 1, "incident": found[-1]}, as_json, show.why)


@main.command()
@_job_options
@click.option("--all", "everything", is_flag=True, help="Details too.")
@click.option("--since", type=int, default=0, metavar="SEQ", help="Only what came after this record.")
def timeline(job_dir: str, address: str, token_file: str, as_json: bool, everything: bool, since: int) -> None:
    """The story of the job, event by event."""
    from supervisor import show

    answer = Job(job_dir, address, token_file).read(f"/v1/timeline?since={since}", _timeline_from_journal)
    rows = [row for row in answer["rows"] if row["seq"] > since and (everything or as_json or not row["detail"])]
    _print({**answer, "rows": rows}, as_json, show.timeline)


@main.command()
@_job_options
@click.option("--every", type=click.FloatRange(0.2), default=1.0, help="Seconds between looks.  [1]")
def watch(job_dir: str, address: str, token_file: str, as_json: bool, every: float) -> None:
    """The job, live, until it ends (with --json: one status a line, when something changed)."""
    from supervisor import show

    job = Job(job_dir, address, token_file)
    show.watch(lambda: job.read("/v1/status", _status_from_journal), every, as_json)


# ----- operators' orders -----


def _order(
    name: str, what: str, *, argument: str = "", needed: bool = True, hurts: bool = False, choices: tuple[str, ...] = ()
) -> None:
    """Add the command `name`, which sends the override of that name."""

    def command(
        job_dir: str, address: str, token_file: str, as_json: bool, reason: str, yes: bool, dry_run: bool, **given: str
    ) -> None:
        value = given.get("argument") or ""
        job = Job(job_dir, address, token_file)
        if dry_run:
            _print(_would(name, value, job), as_json, lambda answer: click.echo(answer["would"]))
            return
        if hurts and not yes:
            if not sys.stdin.isatty():
                fail(2, f"`{name}` interrupts the run: say --yes when there is nobody to ask")
            click.confirm(f"{name} {value} interrupts the run. Go on?", abort=True, err=True)
        _print(_send(job, name, value, reason), as_json, lambda answer: _print_answer(name, answer))

    command.__doc__ = what
    function: Callable[..., None] = command
    function = click.option("--dry-run", is_flag=True, help="Only say what it would do.")(function)
    function = click.option("--yes", "-y", is_flag=True, help="Do not ask.")(function)
    function = click.option("--reason", "-m", default="", help="Why; kept in the journal.")(function)
    function = _job_options(function)
    if argument:
        kind = click.Choice(choices) if choices else None
        function = click.argument("argument", metavar=argument, required=needed, type=kind)(function)
    main.command(name)(function)


def _would(name: str, argument: str, job: Job) -> dict[str, Any]:
    state = job.read("/v1/status", _status_from_journal)
    text = (
        f"would send `{' '.join(filter(None, (name, argument)))}` to job {state['name']}, which is {state['state']} in "
        f"attempt {state['attempt']}{', paused' if state['paused'] else ''}"
    )
    return {"schema": 1, "would": text, "command": name, "argument": argument, "state": state["state"]}


def _send(job: Job, name: str, argument: str, reason: str) -> dict[str, Any]:
    import getpass
    import socket

    from supervisor.client import Denied, Unreachable

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    try:
        return job.client().override(name, argument, reason, f"{user}@{socket.gethostname()}")
    except Unreachable as error:
        fail(NO_CONTROLLER, f"{error}. Nothing was done.")
    except Denied as error:
        fail(NOT_ALLOWED if error.status == 401 else NOT_DONE, f"{error}. Nothing was done.")


def _print_answer(name: str, answer: dict[str, Any]) -> None:
    for note in answer["notes"] or [f"{name}: taken"]:
        click.echo(note)


_order("pause", "Watch and record, but do nothing, until `resume`.")
_order("resume", "Act again after `pause`; let a held job go on.")
_order("restart", "Stop the workers and start the next attempt now.", hurts=True)
_order("stop", "End the job: the workers get SIGTERM, later SIGKILL.", hurts=True)
_order("cordon", "Do not use NODE (or NODE/GPU) from the next attempt on.", argument="NODE[/GPU]")
_order("uncordon", "NODE may be used again.", argument="NODE")
_order(
    "mode",
    "observe: only watch; recommend: ask before acting; enforce: act.",
    argument="MODE",
    choices=("observe", "recommend", "enforce"),
)
_order("approve", "Do what was proposed for INCIDENT (mode recommend).", argument="[INCIDENT]", needed=False)
_order("reject", "Do not do what was proposed for INCIDENT (mode recommend).", argument="[INCIDENT]", needed=False)


# ----- looking into things -----


@main.command("config")
@click.option("--json", "as_json", is_flag=True)
def print_config(as_json: bool) -> None:
    """Every setting, its value, and where that came from."""
    from supervisor import show

    loaded = _load_all({})
    rows = [
        {
            "key": knob.key,
            "value": getattr(getattr(loaded.settings, knob.key.split(".")[0]), knob.key.split(".")[1]),
            "from": loaded.origins.get(knob.key, "default"),
            "what": knob.what,
        }
        for knob in config.knobs().values()
    ]
    _print({"schema": 1, "settings": rows}, as_json, show.settings)


@main.command()
@click.argument("journal", type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True)
def replay(journal: Path, as_json: bool) -> None:
    """Feed JOURNAL (a job folder or one file) through this version: does it decide the same?"""
    from supervisor import show
    from supervisor.journal import read_history
    from supervisor.report import differences

    history = read_history(journal)
    count, found = differences(history)
    answer = {
        "schema": 1,
        "events": count,
        "problems": history.problems,
        "differences": [difference._asdict() for difference in found],
    }
    _print(answer, as_json, show.replay)
    sys.exit(NOT_DONE if found else 0)


if __name__ == "__main__":
    main()
