"""`unbroken check --active` and `unbroken qualify`: who takes part, what is told beforehand, answer and exit code."""

from __future__ import annotations

import datetime
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click
import msgspec

from diagnosis.signals import clean_line
from diagnosis.taxonomy import FailureClass
from recovery.active_verdicts import node_verdict
from recovery.scheduling import slurm_domain
from supervisor import config
from supervisor.cli.job_commands import JobHandle, job_options_later, send, status_from_journal
from supervisor.cli.nodes import keep_results
from supervisor.cli.output import operator_name, print_answer, warn
from supervisor.errors import ActiveTestsImpossible, ConfigError, ExitCode, JobNotFound, LaunchRefused, UnbrokenError
from supervisor.messages import CommandRequest

if TYPE_CHECKING:
    from recovery.active_verdicts import Figure
    from recovery.ledger import TestResult
    from supervisor.active.meeting import SuiteAnswer
    from supervisor.active.shapes import JobShapes
    from supervisor.active.suite import ActiveSetup


class ActiveOptions(NamedTuple):
    """What was asked for."""

    suite: str
    node: str = ""
    python: str = ""
    meet: str = ""
    nodes: int = 0
    leads: bool | None = None
    shapes: str = ""
    only: tuple[str, ...] = ()
    floors: Mapping[str, float] = {}
    as_json: bool = False
    slurm_form: bool = False
    beside_jobs: bool = False


def check_active(options: ActiveOptions) -> int:
    """Make the tests, print what came of them; the exit code. Raises ActiveTestsImpossible."""
    from supervisor.active.suite import SUITES, warmed

    bench = _bench(options)
    _look_around(options)
    if not options.slurm_form:
        most = SUITES[options.suite].whole_s
        click.echo(f"unbroken: active tests ({options.suite}) with {bench.python}: at most {most:.0f} s", err=True)
    place = _meeting(options, os.environ)
    leads = place is None or place.leads
    # A change of the whole fleet since then must not drain it node by node: Slurm's program compares what is here.
    earlier = _earlier() if leads and not options.slurm_form else ()
    with warmed(bench, SUITES[options.suite]) as warm:
        answer = _alone(warm, options, earlier) if place is None else _together(warm, options, place, earlier)
    if leads:
        keep_results(sorted(answer.results, key=lambda one: one.verdict != "fail"))
    if options.slurm_form:
        lines = slurm_lines(answer)
        if lines:
            click.echo(lines[0])
        return 1 if lines else 0
    print_answer(as_json_answer(answer), options.as_json, lambda _: show(answer))
    return exit_code(answer)


def exit_code(answer: SuiteAnswer) -> int:
    """0: nothing failed. 2: something did. 3: nothing could be tested, or not every node came, or not to the end."""
    pairs = answer.pairs
    group = answer.group
    if answer.bad or (group is not None and group.failed and not group.busy):
        return 2
    if pairs is not None and (pairs.bad or pairs.links):
        return 2
    if answer.absent or (pairs is not None and pairs.unproven) or (group is not None and group.failed):
        return ExitCode.NOT_KNOWN
    return ExitCode.DONE if node_verdict(answer.results) == "pass" else ExitCode.NOT_KNOWN


def _bench(options: ActiveOptions) -> ActiveSetup:
    from supervisor.active.suite import ActiveSetup
    from supervisor.run.prepare import training_python

    program = options.python or "torchrun"
    try:
        python = training_python(program, bool(options.python), os.environ)
    except LaunchRefused as error:
        raise ActiveTestsImpossible(f"{error}, or name its Python with --python") from None
    products = _shapes(options.shapes).products
    node = options.node or os.environ.get("SLURMD_NODENAME", "") or socket.gethostname()
    return ActiveSetup(clean_line(node, 63), python, dict(os.environ), config.working_folder(), products)


def _look_around(options: ActiveOptions) -> None:
    """Raises ActiveTestsImpossible where a job runs."""
    from supervisor.active import neighbours
    from supervisor.active.suite import busy_gpus

    busy: dict[str, str] = {}
    try:
        busy = busy_gpus()
    except ActiveTestsImpossible as error:
        if not options.beside_jobs:
            raise
        warn(str(error))
    why = neighbours.why_occupied(busy, neighbours.PROC)
    if why and not options.beside_jobs:
        raise ActiveTestsImpossible(
            f"this node is in use: {why}. The tests would slow it down and take its memory, so nothing was tested. Run "
            "them when it is idle, or with `unbroken check --active --beside-jobs`"
        )
    if why:
        warn(f"this node is in use, and will be slowed down: {why}")
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY_LOAD * cpus:
        warn(f"the CPUs of this node are busy (load {load:.1f} on {cpus}): what is slow may be called unknown")


BUSY_LOAD = 0.5


def _shapes(path: str) -> JobShapes:
    """Of the job's own step. Raises TraceUnreadable."""
    from supervisor.active.shapes import JobShapes, shapes_of
    from supervisor.diagnose.traces import trace_events

    if not path:
        return JobShapes()
    found = shapes_of(event for event in trace_events(Path(path)) if not isinstance(event, int))
    if not found.products and not found.collectives:
        warn(f"{path} has no matrix products or collectives with shapes: record it with record_shapes=True")
    return found


# ----- with other nodes -----


class Meeting(NamedTuple):
    """Where the nodes of one test find each other."""

    folder: Path
    nodes: int
    leads: bool


def _meeting(options: ActiveOptions, environment: Mapping[str, str]) -> Meeting | None:
    """By the options, else by the Slurm step; None: this node alone."""
    if options.meet:
        if options.nodes < 2 or options.leads is None:
            raise ActiveTestsImpossible("--meet needs --nodes N, and --node-rank R: node 0 leads")
        return Meeting(Path(options.meet).absolute(), options.nodes, options.leads)
    step_nodes = environment.get("SLURM_STEP_NUM_NODES", "")
    if options.slurm_form or not step_nodes.isdigit() or int(step_nodes) < 2 or "SLURM_PROCID" not in environment:
        return None
    if environment.get("SLURM_STEP_NUM_TASKS", step_nodes) != step_nodes:
        raise ActiveTestsImpossible(
            "srun starts more than one task on a node: srun --ntasks-per-node=1 unbroken check --active"
        )
    job = re.sub(r"[^0-9A-Za-z]+", "", environment.get("SLURM_JOB_ID", ""))
    step = re.sub(r"[^0-9A-Za-z]+", "", environment.get("SLURM_STEP_ID", ""))
    base = Path(environment.get("SLURM_SUBMIT_DIR") or config.working_folder())
    from supervisor.paths import JOBS

    return Meeting(base / JOBS / f"check-{job}.{step}", int(step_nodes), environment["SLURM_PROCID"] == "0")


def _together(bench: ActiveSetup, options: ActiveOptions, place: Meeting, earlier: Sequence[Figure]) -> SuiteAnswer:
    from supervisor.active.meeting import meet
    from supervisor.controller.main import own_address
    from supervisor.files import make_shared

    if place.leads and place.folder.parent.name:
        make_shared(place.folder.parent)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # scancel: the file must go, and the children
    try:
        return meet(
            place.folder,
            leads=place.leads,
            nodes=place.nodes,
            bench=bench,
            suite_name=options.suite,
            own_address=own_address(),
            domain=slurm_domain(os.environ),
            floors=options.floors,
            only=options.only,
            earlier=earlier,
            collectives=_shapes(options.shapes).collectives if place.leads else (),
            say=lambda text: click.echo(f"unbroken: {text}", err=True),
        )
    finally:
        signal.signal(signal.SIGTERM, before)
        if place.leads:
            try:
                place.folder.rmdir()
            except OSError:  # something else is in it
                pass


def _alone(bench: ActiveSetup, options: ActiveOptions, earlier: Sequence[Figure]) -> SuiteAnswer:
    """This node's devices, compared with each other, and with what the ledger has of other nodes."""
    from supervisor.active.meeting import SuiteAnswer
    from supervisor.active.suite import NODE_FAMILIES, SUITES, find_devices, run_alone

    suite, started = SUITES[options.suite], time.monotonic()
    devices = find_devices(bench, suite)
    families = [one for one in NODE_FAMILIES if not options.only or any(fnmatch(one, key) for key in options.only)]
    results = run_alone(bench, devices, suite, families, earlier=earlier, floors=options.floors)
    return SuiteAnswer(suite=suite.name, seconds=round(time.monotonic() - started, 1), results=results)


# ----- the ledger of all jobs -----


def _earlier() -> tuple[Figure, ...]:
    """What other nodes gave before; nothing where there is no ledger, or it cannot be read."""
    from recovery.active_verdicts import earlier_figures
    from recovery.ledger import TestResult
    from supervisor.cli.nodes import answered, open_ledger

    now = time.time()
    try:
        ledger = open_ledger()
    except ConfigError:
        return ()
    try:
        read = answered(lambda: ledger.read(now), ledger.folder)
    except UnbrokenError as error:
        warn(f"compared without earlier figures: {error}")
        return ()
    return earlier_figures([one.what for one in read.entries if isinstance(one.what, TestResult)], now)


# ----- the answer -----


def as_json_answer(answer: SuiteAnswer) -> dict[str, Any]:
    word = {0: "ok", 2: "critical"}.get(exit_code(answer), "unknown")
    return {"schema": 1, "status": word, "exit_code": exit_code(answer), **msgspec.to_builtins(answer)}


CLASSES = (
    ("training_bits", FailureClass.SILENT_DATA_CORRUPTION),
    ("memory_patterns", FailureClass.SILENT_DATA_CORRUPTION),
    ("copy_", FailureClass.PCIE_ERROR),
    ("peer_copy", FailureClass.NVLINK_ERROR),
    ("pairs", FailureClass.NCCL_NETWORK),
    ("device", FailureClass.GPU_HANG),
    ("", FailureClass.STRAGGLER_OR_SLOW),
)
"""Start of a test's name -> what its failure is reported as."""


def slurm_lines(answer: SuiteAnswer) -> list[str]:
    """`unbroken: <failure class> <device> <text>` for each test that failed."""
    return [
        f"unbroken: {_class(one.test)} {one.gpu or '-'} {one.reason} ({one.test})"
        for one in answer.results
        if one.verdict == "fail"
    ]


def _class(test: str) -> str:
    return next(str(found.value) for start, found in CLASSES if test.startswith(start))


def show(answer: SuiteAnswer) -> None:
    """What failed, what is not known, and how many did well."""
    failed = [one for one in answer.results if one.verdict == "fail"]
    unknown = [one for one in answer.results if one.verdict == "unknown"]
    nodes = len({one.node for one in answer.results})
    for one in failed:
        click.secho(f"FAIL     {_where(one)} {one.test}: {one.reason}", fg="red")
    for text in _conclusions(answer):
        click.secho(text, fg="yellow")
    for one in unknown[:MOST_SHOWN]:
        click.echo(f"unknown  {_where(one)} {one.test}: {one.reason}")
    if len(unknown) > MOST_SHOWN:
        click.echo(f"unknown  {len(unknown) - MOST_SHOWN} more")
    passed = sum(one.verdict == "pass" for one in answer.results)
    click.echo(
        f"{nodes} node{'s' * (nodes != 1)}, {answer.seconds:.0f} s: "
        f"{passed} tests passed, {len(failed)} failed, {len(unknown)} unknown"
    )


MOST_SHOWN = 20


def _where(one: TestResult) -> str:
    return f"{one.node} {one.gpu}".strip()


def _conclusions(answer: SuiteAnswer) -> list[str]:
    """What is no fault of one node."""
    lines = [f"NOTE     {text}" for text in answer.missing]
    pairs = answer.pairs
    if pairs is not None:
        if pairs.domain:
            lines.append(f"NOTE     every bad node is in {pairs.domain}, and none of its nodes is good: look there")
        elif pairs.most:
            count = len(pairs.good) + len(pairs.bad) + len(pairs.unproven)
            lines.append(
                f"NOTE     only {len(pairs.good)} of {count} nodes are proven good: "
                "look for what they share before you blame one of them"
            )
        lines.extend(
            f"NOTE     {' and '.join(link)} do well with others, and not together: look between them"
            for link in pairs.links
        )
    if answer.group is not None and answer.group.failed:
        why = "; ".join(text for text in (answer.group.failed, answer.group.busy) if text)
        lines.append(f"NOTE     all {len(answer.group.nodes)} together fail: {why}")
    smallest = answer.smallest.groups if answer.smallest is not None else ()
    lines.extend(f"NOTE     a smallest group that fails: {', '.join(one[:16])} ({len(one)} nodes)" for one in smallest)
    return lines


# ----- the way back -----

LOOK_EVERY_S = 1.0


def _qualify_in_job(node: str, suite: str, as_json: bool, where: Mapping[str, str]) -> NoReturn:
    """The node's agent makes the tests. Ends with the exit code; raises ActiveTestsImpossible."""
    from recovery.ledger import TestResult
    from supervisor.active.meeting import SuiteAnswer
    from supervisor.active.suite import SUITES

    try:
        job = JobHandle(where["job_dir"], where["address"], where["token_file"], where["slurm_job"])
    except JobNotFound:
        raise ActiveTestsImpossible(
            f"this is not {node}, and there is no job here whose spare it could be: run it on {node} "
            f"(`srun -w {node} unbroken qualify`, or ssh), or name its job with --job-dir"
        ) from None
    answer = send(CommandRequest(command="qualify", argument=f"{node} {suite}", by=operator_name()), job)
    if answer.get("refused"):
        raise ActiveTestsImpossible("; ".join(answer["notes"]))
    if not as_json:
        warn(f"{node} tests itself: at most {SUITES[suite].whole_s:.0f} s")
    began = time.monotonic()
    while True:
        time.sleep(LOOK_EVERY_S)
        told = job.read("/v1/status", status_from_journal)
        found = next((one for one in told.get("tests") or () if one["node"] == node), None)
        if found is None or told["outcome"] is not None:
            raise ActiveTestsImpossible("the job ended before the tests did")
        if not found["running"]:
            break
    if found["problem"] and not found["results"]:
        raise ActiveTestsImpossible(f"{node} was not tested: {found['problem']}")
    # `status` shows times as people read them.
    times = [datetime.datetime.fromisoformat(one["at"].replace("Z", "+00:00")).timestamp() for one in found["results"]]
    results = tuple(
        msgspec.convert({**one, "at": at}, TestResult) for one, at in zip(found["results"], times, strict=True)
    )
    done = SuiteAnswer(suite=suite, seconds=round(time.monotonic() - began, 1), results=results)
    print_answer(as_json_answer(done), as_json, lambda _: show(done))
    code = exit_code(done)
    if code == 0 and not as_json:
        click.echo(f"nothing failed: `unbroken uncordon {node}` lets this job use a cordoned node again")
    sys.exit(code)


@click.command()
@click.argument("node", required=False, default="")
@click.option("--suite", type=click.Choice(["quick", "full"]), default="full", help="How long it may take.  [full]")
@click.option("--python", default="", metavar="PATH", help="The training environment's Python.  [torchrun's]")
@job_options_later
def qualify(as_json: bool, node: str, suite: str, python: str, **where: str) -> None:
    """Test NODE before it is used again.

    On the node itself its devices are tried, and compared with each other. Of a running job, a spare or a cordoned
    node can be named from anywhere: its agent makes the tests. It never changes a cordon: it ends with the command
    that would.

    Exit code 0 nothing failed, 2 a test failed, 3 nothing could be tested (on the node itself: ranks run there too), 1
    the job refuses (ranks run on the node).
    """
    here = os.environ.get("SLURMD_NODENAME", "") or socket.gethostname()
    if node and node not in (here, here.partition(".")[0]):
        _qualify_in_job(node, suite, as_json, where)
    code = check_active(ActiveOptions(suite=suite, node=here, python=python, as_json=as_json))
    if code == 0 and not as_json:
        click.echo(f"nothing failed: `unbroken uncordon {here}` lets jobs use it again")
    elif code == 2:
        warn(f"{here} is not fit: leave it cordoned")
    sys.exit(code)
