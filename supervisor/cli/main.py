"""The command `unbroken`.

`unbroken run` must start at once: everything that one command needs and others do not is imported by that command.
The exit codes and errors of all commands are in `supervisor.errors`; here, and only here, an error becomes a line on
stderr and an exit code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import msgspec

from supervisor import config
from supervisor.cli.active import qualify
from supervisor.cli.advise import advise
from supervisor.cli.bundle import bundle
from supervisor.cli.check import alert_problems, check
from supervisor.cli.checkpoints import group as checkpoints
from supervisor.cli.docs import completion, docs, slurm_template
from supervisor.cli.drain_requests import drain_requests
from supervisor.cli.export import export
from supervisor.cli.job_commands import JOB_COMMANDS, OPERATOR_COMMANDS
from supervisor.cli.jobs import jobs, logs, page, watch
from supervisor.cli.llm import llm
from supervisor.cli.nodes import nodes
from supervisor.cli.output import print_answer, warn
from supervisor.cli.report import report
from supervisor.cli.tokens import token
from supervisor.cli.trace import trace
from supervisor.errors import ExitCode, JobNotFound, UnbrokenError

F = TypeVar("F", bound=Callable[..., Any])


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


HELP = {
    "Start a run": ("run", "demo", "controller"),
    "See a job": (
        "status",
        "watch",
        "page",
        "incidents",
        "why",
        "bundle",
        "timeline",
        "logs",
        "jobs",
        "checkpoints",
        "trace",
    ),
    "Act on a job": (
        *("pause", "resume", "approve", "reject", "restart", "rollback", "swap", "stop", "mode"),
        *("cordon", "uncordon", "token"),
    ),
    "Look after nodes": ("check", "qualify", "nodes", "drain-requests"),
    "Understand and plan": ("diagnose", "report", "advise", "export", "llm", "config", "replay", "bench"),
    "Read and set up": ("docs", "slurm-template", "completion"),
}
"""In which part of `unbroken --help` each command is listed."""


HELP_OPTIONS: Final = ["-h", "--help"]


class _Commands(click.Group):
    """Every error of ours ends the program with its sentence and its exit code."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.context_settings.setdefault("help_option_names", HELP_OPTIONS)  # also where it is called without `main`
        super().add_command(cmd, name)

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in HELP.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(80)) for name in names])
        formatter.write_paragraph()
        formatter.write_text("A page that a text names, such as docs/checkpoints.md: unbroken docs checkpoints")

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except UnbrokenError as error:
            warn(str(error))
            sys.exit(error.exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": HELP_OPTIONS})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version)
def main() -> None:
    """Keep a distributed pretraining run alive.

    Put `unbroken run --` in front of the command you start it with:

        unbroken run -- torchrun --nproc-per-node 8 train.py
    """


# ----- running -----


def _run_options(command: F) -> F:
    options = [
        click.option("--job-dir", help="Job folder, shared between nodes.  [unbroken-jobs/NAME]"),
        click.option("--name", help="Name of the job.  [script and time]"),
        click.option("--controller", metavar="HOST:PORT", help="Use the controller at HOST:PORT; start none here."),
        click.option("--listen", metavar="HOST:PORT", help="Where the job's controller listens.  [a free port]"),
        click.option("--node-name", help="Name of this node.  [host name]"),
        click.option("--token-file", help="File with the job's token.  [`token` in the job folder]"),
        click.option("--spare", is_flag=True, help="This node stays idle until it is needed."),
        click.option("--spares", type=int, metavar="N", help="How many nodes are kept idle.  [0]"),
        click.option("--max-restarts", type=int, metavar="N", help="Give up after N restarts without progress.  [10]"),
        click.option(
            "--mode", type=click.Choice(["observe", "recommend", "enforce"]), help="See `unbroken mode`.  [enforce]"
        ),
        click.option(
            "--patience",
            metavar="S|off",
            help="Restart after S seconds without progress, even if no hang is proven.  [automatic]",
        ),
        click.option(
            "--checkpoint-dir",
            "checkpoint_dirs",
            multiple=True,
            help="Folder that holds only this job's checkpoints; repeatable.",
        ),
        click.option(
            "--publish-to",
            metavar="DIR",
            help="Shared folder that gets the checkpoints; --checkpoint-dir is on each node's own disk then.",
        ),
        click.option("--restart-args", metavar="ARGS", help="Added to the script's arguments from attempt 2 on."),
        click.option("--nproc-per-node", metavar="N", help="For `-- python train.py`: processes on this node."),
        click.option("--kernel-log", metavar="PATH", help="Kernel log device or file.  [/dev/kmsg]"),
        click.option("--gather", "gather_s", type=float, metavar="S", help="Seconds to wait for more nodes.  [30]"),
        click.option(
            "--wait-for-nodes",
            "wait_for_nodes_s",
            type=float,
            metavar="S",
            help="Fail after S seconds with too few nodes.  [600]",
        ),
        click.option(
            "--hold-limit",
            "hold_limit_s",
            type=float,
            metavar="S",
            help="End a held job after S seconds; 0: never.  [86400]",
        ),
        click.option(
            "--traceable", is_flag=True, help="Let `unbroken trace` have ranks make traces (torch 2.7 and newer)."
        ),
        click.option(
            "--fewer-processes",
            is_flag=True,
            help="Where no spare is left, a node with one bad GPU may go on with a process less: a smaller world.",
        ),
        click.option(
            "--no-tests",
            "no_tests",
            is_flag=True,
            help="Do not test suspected nodes before a restart, nor repaired spares a day later.",
        ),
        click.option("--quiet", "-q", is_flag=True, default=None, help="Print only unbroken's final status line."),
        click.option("--json", "as_json", is_flag=True, help="The outcome as JSON on the last line of stderr."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@main.command("run", context_settings={"allow_interspersed_args": False})
@_run_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    command: tuple[str, ...],
    spare: bool,
    nproc_per_node: str | None,
    traceable: bool,
    fewer_processes: bool,
    no_tests: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run COMMAND under supervision.

    Watch it, and restart it from its newest good checkpoint when it breaks.

    The exit code is COMMAND's own, or 75 requeued or preempted, 78 wrong configuration, 90 stopped because a restart
    would fail in the same way, 91 restarts used up, 130 interrupted, 143 terminated.
    """
    from supervisor.run import front

    settings = config.load_here(settings_given(flags)).settings
    _check(settings)
    options = front.RunOptions(
        settings=settings,
        spare=spare,
        nproc_per_node=nproc_per_node,
        json=as_json,
        traceable=traceable,
        fewer_processes=fewer_processes,
        test_suspects=not no_tests,
    )
    sys.exit(front.main(options, list(command)))


def settings_given(flags: dict[str, Any]) -> dict[str, object]:
    """The keys of the configuration that options of `unbroken run` set; None: not given."""
    values = {f"run.{name}": value for name, value in flags.items() if name not in {"listen", "patience", "publish_to"}}
    values["run.checkpoint_dirs"] = flags.get("checkpoint_dirs") or None
    values["checkpoint.publish_to"] = flags.get("publish_to")
    values["controller.listen"] = flags.get("listen")
    patience = flags.get("patience")
    if patience is not None:
        values |= {"hang.off": True} if patience == "off" else {"hang.off": False, "hang.patience_s": patience}
    return values


def _check(settings: config.Settings) -> None:
    """What the controller or the agent could not use is refused before anything starts. Raises ConfigError."""
    settings.metrics.where(alone=True)
    config.check_opinion(settings.opinion)
    config.opinion_price(os.environ)
    if missing := config.missing_for_opinion(settings.opinion, config.working_folder()):
        warn(f"{missing}; without it there are no opinions")
    for problem in alert_problems(config.load_site_or_default(settings.run.site_file)[0]):
        warn(problem)
    if settings.notify.to:
        from supervisor.controller.notify import check_notify

        for problem in check_notify(settings.notify):
            warn(problem)


@main.command("demo", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> None:
    """Show faults and recoveries on this machine.

    A small Llama is pretrained, and faults are injected while you watch.
    """
    from supervisor import demo as show

    sys.exit(show.main(list(arguments)))


@main.command("bench", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure recovery, overhead and the controller."""
    from supervisor import bench as measure

    sys.exit(measure.main(list(arguments)))


@main.command("controller")
@click.option("--job-dir", required=True, help="Job folder: journal, token, controller.json.")
@click.option("--listen", metavar="HOST:PORT", help="Where it listens.  [a free port; one node: on 127.0.0.1]")
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Most nodes; with 1 only this host connects.  [1]")
@click.option("--token-file", help="File with the job's token.  [`token` in the job folder, made if absent]")
@click.option("--socket", metavar="PATH", help="Unix socket for this user on this node.  [in the local folder]")
@click.option("--tls-cert", metavar="FILE", help="PEM; switches TLS on.")
@click.option("--tls-key", metavar="FILE", help="PEM.  [in --tls-cert]")
@click.option("--training-python", metavar="FILE", help="Runs the model that is asked for opinions.")
@click.option("--scheduler-job", metavar="ID", help="The job's id at its scheduler.  [SLURM_JOB_ID]")
@click.option(
    "--requeues", type=click.IntRange(0), metavar="N", help="How often the scheduler has started the job again."
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="[info]")
def controller(**given: object) -> None:
    """Run a controller by itself, on a host without ranks.

    `unbroken run` starts one on the first node. Exit codes: 0 the job has ended, or a signal; 1 it cannot start;
    4 a newer controller has the job; 78 the journal is another version's. No restart cures the last two.
    """
    from supervisor.controller import main as service

    settings = config.load_here().settings
    _check(settings)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    sys.exit(service.main(words, config.absolute(settings, config.working_folder())))


# ----- looking into things -----


@main.command("config")
@click.option("--json", "as_json", is_flag=True, help="JSON, documented in docs/protocol.md.")
def print_config(as_json: bool) -> None:
    """Show every setting, its value, and its origin."""
    from supervisor.cli import render
    from supervisor.controller.notify import shown

    loaded = config.load_here()
    site, problem = config.load_site_or_default(loaded.settings.run.site_file)
    for wrong in (*filter(None, (problem,)), *alert_problems(site)):
        warn(wrong)
    to = loaded.settings.notify.to  # a webhook's address is a secret
    notify = config.NotifySettings(to=shown(to) if isinstance(to, str) else tuple(map(shown, to)))
    settings = msgspec.structs.replace(loaded.settings, notify=notify)
    rows = [
        {
            "key": knob.key,
            "value": getattr(getattr(settings, knob.key.split(".")[0]), knob.key.split(".")[1]),
            "from": loaded.origins.get(knob.key, "default"),
            "what": f"{knob.what} Default: {knob.default_text}." if knob.default_text else knob.what,
        }
        for knob in config.knobs().values()
    ]
    print_answer({"schema": 1, "settings": rows}, as_json, render.settings)


class DiagnoseCommand(click.Command):
    """All words after `--good` are its values, up to the next option: a shell makes many words of `good/*.log`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        found: list[str] = []
        name, values = "", 0
        for word in [*args, "--"]:
            is_option = word.startswith("-") and word != "-"
            if is_option and name and not values:
                raise click.UsageError(f"{name} needs a path", ctx)
            if word in ("--good", "--healthy"):
                name, values = word, 0
            elif is_option or not name:
                name = ""
                found.append(word)
            else:
                values += 1
                found += [name, word]
        return super().parse_args(ctx, found[:-1])


@main.command(cls=DiagnoseCommand)
@click.argument("paths", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="JSON, documented in docs/protocol.md.")
@click.option("--digest", is_flag=True, help="Print a summary, the most important lines first, and no verdict.")
@click.option(
    "--bytes", "limit", type=click.IntRange(200, 10_000_000), default=16_384, help="Size limit of the digest."
)
@click.option(
    "--good",
    "--healthy",
    multiple=True,
    metavar="PATH...",
    help="Runs that went well, to compare with: a log or a folder each. All words up to the next option.",
)
def diagnose(paths: tuple[str, ...], as_json: bool, digest: bool, limit: int, good: tuple[str, ...]) -> None:
    """Say what went wrong, from logs and dumps.

    PATHS: files, folders, or - for standard input.

    Logs of ranks, kernel and Slurm (packed or not), torchrun's and our own folders, flight recorder dumps, stacks.
    Exit codes: 0 done, whatever was found; 66 a file that was named cannot be read; 130 interrupted.
    """
    from supervisor.cli import diagnose as logs

    if digest:
        logs.main_digest(paths, limit, good)
    else:
        logs.main(paths, as_json, good)


@main.command()
@click.argument("journal", type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="JSON, documented in docs/protocol.md.")
def replay(journal: Path, as_json: bool) -> None:
    """Check that this version makes the decisions in JOURNAL.

    JOURNAL: a job folder, or one file of its journal.
    """
    from supervisor.cli import render
    from supervisor.config import use_begun_rules
    from supervisor.controller.journal import read_history
    from supervisor.controller.report import differences

    try:
        history = read_history(journal)
    except OSError as error:
        raise JobNotFound(f"{error.filename or journal} cannot be read: {error.strerror}") from None
    if not history.records:
        raise JobNotFound("; ".join([f"{journal} holds no record of a job", *history.problems]))
    use_begun_rules(journal if journal.is_dir() else journal.parent)
    count, found = differences(history)
    answer = {
        "schema": 1,
        "events": count,
        "problems": history.problems,
        "differences": [difference._asdict() for difference in found],
    }
    print_answer(answer, as_json, render.replay)
    sys.exit(ExitCode.NOT_DONE if found else ExitCode.DONE)


for each in (
    check,
    qualify,
    checkpoints,
    docs,
    slurm_template,
    completion,
    drain_requests,
    export,
    advise,
    nodes,
    trace,
    token,
    jobs,
    logs,
    page,
    watch,
    bundle,
    report,
    llm,
    *JOB_COMMANDS,
    *OPERATOR_COMMANDS,
):
    main.add_command(each)

if __name__ == "__main__":
    main()
