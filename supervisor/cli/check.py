"""The command `unbroken check`: its options, its forms for Slurm, its exit codes; and what it asks running agents."""

from __future__ import annotations

import contextlib
import getpass
import glob
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import click
import msgspec

from diagnosis.signals import clean_text
from supervisor import config
from supervisor.cli.output import warn, write_answer
from supervisor.errors import CheckRefused, ConfigError, ExitCode
from supervisor.node_health.health_file import LONGEST_RELEASE_S, GpuRelease

if TYPE_CHECKING:
    from supervisor.config import SiteFile
    from supervisor.node_health.check import AnsweredCheck, CheckAnswer, CheckRow, Options
    from supervisor.node_health.contract import Site


class SlurmForm(NamedTuple):
    preflight: bool
    only: tuple[str, ...]
    timeout_s: float


NODE_SCOPES: Final = ("gpu", "node", "fabric")
"""Checks of the node itself: not of a rank, a job, or storage that others use too."""
FORMS: Final = {
    "prolog": SlurmForm(True, (), 20.0),
    "epilog": SlurmForm(
        True, ("gpu_processes_foreign", "gpu_memory_zombie", "gpu_driver_responds", "shm_free", "process*"), 20.0
    ),
    # slurmd gives it 60 s; a driver call that hangs is critical from 45 s on.
    "health": SlurmForm(False, (), 55.0),
}


RIGHTS: Final = "rights"


@click.command()
@click.option("--only", multiple=True, metavar="PATTERN", help="Only these checks or probes (`gpu_*`); repeatable.")
@click.option("--skip", multiple=True, metavar="PATTERN", help="Leave these checks or probes out; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="JSON, documented in docs/checks.md.")
@click.option(
    "--list",
    "listed",
    is_flag=True,
    help="List the checks: threshold, source, whether each applies here.",
)
@click.option("--verbose", "-v", is_flag=True, help="Also show what is healthy or does not apply.")
@click.option("--preflight", is_flag=True, help="Also make the checks that belong before a job.")
@click.option(
    "--slurm",
    "form",
    type=click.Choice([*FORMS, RIGHTS]),
    help="Answer as Slurm's Prolog, Epilog or HealthCheckProgram should; rights: may this user drain nodes?",
)
@click.option(
    "--root", type=click.Path(path_type=Path), metavar="DIR", help="Check a captured tree: files of another machine."
)
@click.option("--site", "site_file", default="", metavar="FILE", help="Site file.  [/etc/unbroken/site.toml]")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(0.5, 3600), metavar="S", help="End after so many seconds.  [20]"
)
@click.option("--fresh", is_flag=True, help="Check now, even if an agent runs here.")
@click.option("--local-dir", default="", metavar="DIR", help="Local folder of the agent.")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder where this command keeps error counters between calls.",
)
@click.option(
    "--release-gpus",
    default="",
    metavar="TIME",
    help="Have the agents here let go of the GPUs: 10m; 0: use them again.",
)
@click.option("--node-name", default="", help="Name of this node.  [host name]")
@click.option(
    "--active",
    type=click.Choice(["quick", "full"]),
    is_flag=False,
    flag_value="quick",
    help="Test devices, and pairs of nodes under srun: quick within a minute, full within ten.  [quick]",
)
@click.option("--python", default="", metavar="PATH", help="With --active: the training Python.  [torchrun's]")
@click.option("--shapes", default="", metavar="TRACE", help="With --active: also repeat the work in a Kineto trace.")
@click.option("--beside-jobs", is_flag=True, help="With --active: test although a job runs here. It is slowed down.")
@click.option("--meet", default="", metavar="DIR", help="With --active, without Slurm: folder that all nodes share.")
@click.option("--nodes", type=click.IntRange(2, 4096), metavar="N", help="With --meet: how many nodes take part.")
@click.option("--node-rank", type=click.IntRange(0), metavar="R", help="With --meet: this one's number; 0 leads.")
def check(
    only: tuple[str, ...],
    skip: tuple[str, ...],
    as_json: bool,
    listed: bool,
    verbose: bool,
    preflight: bool,
    form: str | None,
    root: Path | None,
    site_file: str,
    timeout_s: float | None,
    fresh: bool,
    local_dir: str,
    state_dir: Path | None,
    release_gpus: str,
    node_name: str,
    active: str | None,
    python: str,
    shapes: str,
    beside_jobs: bool,
    meet: str,
    nodes: int | None,
    node_rank: int | None,
) -> None:
    """Say what is wrong with this node now.

    Exit code 0 ok, 1 warning, 2 critical (or wrong usage), 3 unknown, 78 wrong configuration.
    """
    if release_gpus:
        sys.exit(release_gpus_here(release_gpus, local_dir))
    if form == RIGHTS:
        sys.exit(_rights(site_file))
    if active:
        place = (meet, nodes or 0, node_rank)
        sys.exit(_active(active, form, site_file, as_json, node_name, python, place, only, shapes, beside_jobs))
    given = FORMS.get(form or "", SlurmForm(False, (), 20.0))
    timeout_s = given.timeout_s if timeout_s is None else timeout_s
    last_resort: threading.Timer | None = None
    try:
        last_resort = _end_at_last(timeout_s + 3.0, form, as_json)
        site = _site(site_file, root, lenient=form is not None, as_json=as_json)
        from supervisor.node_health.check import Options

        options = Options(
            only=only or given.only,
            skip=skip,
            root=Path("/") if root is None else Path(os.path.realpath(root)),
            preflight=preflight or given.preflight,
            site=site.site,
            fresh=fresh or bool(site_file),
            timeout_s=timeout_s,
            local_dir=local_dir,
            node=node_name,
            state_dir=state_dir.absolute() if state_dir is not None else None,
        )
        code = _answer(options, form, as_json=as_json, listed=listed, verbose=verbose)
    except Exception as error:
        if form is None and (isinstance(error, BrokenPipeError) or not isinstance(error, OSError)):
            raise
        # A fault of ours never drains a node, and is no warning about it.
        with contextlib.suppress(OSError):
            warn(f"the check failed: {error!r:.300}")
        os._exit(
            ExitCode.NOT_KNOWN if form is None else 0
        )  # at a usual end what could not be written is tried again, and fails
    finally:
        if last_resort is not None:
            last_resort.cancel()
    sys.exit(code)


def _active(
    suite: str,
    form: str | None,
    site_file: str,
    as_json: bool,
    node_name: str,
    python: str,
    place: tuple[str, int, int | None],
    only: tuple[str, ...],
    shapes: str,
    beside_jobs: bool,
) -> int:
    """The active tests. As Slurm's program: a fault of ours never drains a node."""
    from supervisor.active.tester import FLOORS
    from supervisor.cli.active import ActiveOptions, check_active

    meet, nodes, rank = place
    try:
        site = _site(site_file, None, lenient=form is not None, as_json=as_json)
        options = ActiveOptions(
            suite=suite,
            node=node_name,
            python=python,
            meet=meet,
            nodes=nodes,
            leads=None if rank is None else rank == 0,
            only=only,
            shapes=shapes,
            floors=site.site.limits.get(FLOORS, {}),
            as_json=as_json,
            slurm_form=form is not None,
            beside_jobs=beside_jobs,
        )
        return check_active(options)
    except Exception as error:
        if form is None:
            raise
        warn(f"the active tests failed: {error!r:.300}")
        return 0


def _rights(site_file: str) -> int:
    """Say whether this user may drain nodes; if not, whether jobs leave requests for root's programs."""
    from supervisor.cli.drain_requests import rights
    from supervisor.config import load_site_or_default

    may, requests = rights(load_site_or_default(site_file or os.environ.get("UNBROKEN_SITE", ""))[0].drain_requests)
    write_answer({}, False, lambda _: click.echo(may.why if may.may_drain else f"{may.why}\n{requests}"))
    return 0 if may.may_drain else 1


def _site(named: str, root: Path | None, *, lenient: bool, as_json: bool) -> SiteFile:
    """The site file; of a captured tree, its own. If it cannot be used, the program ends, or goes on without it."""
    from supervisor.node_health.contract import ProbeContext

    try:
        if root is not None and not named:
            own = ProbeContext(root=root).path(str(config.SITE_PATH))
            found = config.load_site(str(own)) if os.path.isfile(own) else config.SiteFile()
        else:
            found = config.load_site(named or config.load_here().settings.run.site_file)
        for problem in alert_problems(found):
            warn(problem)
        return found
    except (ConfigError, OSError) as error:
        if lenient:
            warn(f"the site file is not used: {error}")
            return config.SiteFile()
        if not as_json:
            raise ConfigError(str(error)) from None
        source = "standalone" if root is None else "root"
        write_answer(_nothing_seen(str(error), ExitCode.NOT_KNOWN, source), as_json, lambda _: None)
        sys.exit(ExitCode.NOT_KNOWN)


def alert_problems(site: SiteFile) -> tuple[str, ...]:
    """What is wrong with the site's rules of alerts."""
    if not site.alert:
        return ()
    from supervisor.controller.alerts import site_rules

    return site_rules(site.alert, site.path).problems


def _answer(options: Options, form: str | None, *, as_json: bool, listed: bool, verbose: bool) -> int:
    """Print what was asked for; the exit code."""
    import msgspec

    from supervisor.cli import render
    from supervisor.node_health.check import answer, chosen, table

    not_loaded: list[str] = []
    rows = table(not_loaded)
    try:
        answered = answer(rows, options, not_loaded)
    except CheckRefused as error:
        if form is not None or not as_json:
            raise
        code = error.exit_code
        source = "standalone" if options.root == Path("/") else "root"
        write_answer(_nothing_seen(str(error), code, source), as_json, lambda _: None)
        return code
    if form is not None:
        lines = slurm_lines(answered, node_only=form == "health")
        shown = lines if form == "health" else lines[:1]
        for flaw in answered.flaws:
            warn(f"not everything could be checked: {flaw}")
        write_answer(
            answer_as_json(answered, options.site), as_json, lambda _: click.echo("\n".join(shown), nl=bool(shown))
        )
        return 1 if lines and form != "health" else 0
    if listed:
        everything = chosen(rows, msgspec.structs.replace(options, preflight=True), all_known=not not_loaded)
        write_answer(list_as_json(everything, answered, options.site), as_json, render.check_list)
        return 0
    write_answer(
        answer_as_json(answered, options.site) if as_json else {},
        as_json,
        lambda _: render.check(answered, everything=verbose),
    )
    return answered.exit_code


# ----- what answers say, for programs and for Slurm -----


def _threshold(row: CheckRow, site: Site) -> str:
    return row.check.threshold_text({**row.check.limits, **site.limits.get(row.check.id, {})})


def answer_as_json(answer: CheckAnswer, site: Site) -> dict[str, Any]:
    from supervisor.view import rfc3339

    return {
        "schema": 1,
        "node": answer.node,
        "boot_id": answer.boot_id,
        "at": rfc3339(answer.at),
        "from": answer.source,
        "status": answer.word.lower(),
        "exit_code": answer.exit_code,
        "problems": list(answer.problems),
        "checks": [_entry(one, site) for one in answer.seen],
    }


def _entry(one: AnsweredCheck, site: Site) -> dict[str, Any]:
    from supervisor.view import rfc3339

    check, check_state, result = one.row.check, one.check_state, one.check_state.result
    return {
        "check": check.id,
        "probe": one.row.probe,
        "status": check_state.status,
        "level": check_state.level if check_state.status == "unhealthy" else None,
        "failure_class": one.row.failure_class,
        "scope": check.scope,
        "device": result.device,
        "gpu": result.gpu,
        "gpu_uuid": result.gpu_uuid,
        "rank": check_state.rank,
        "text": result.text,
        "values": result.values,
        "threshold": _threshold(one.row, site),
        "source": check.source,
        "since": rfc3339(check_state.since),
    }


def slurm_lines(answer: CheckAnswer, *, node_only: bool) -> list[str]:
    """`unbroken: <failure class> <device> <text>` for each critical failure."""
    lines = []
    for one in answer.unhealthy:
        if one.word == "critical" and (not node_only or one.row.check.scope in NODE_SCOPES):
            result = one.check_state.result
            what = f"{one.row.failure_class} {result.device or '-'} {one.text}"
            lines.append(f"unbroken: {what} ({result.check})")
    return lines


def list_as_json(rows: Mapping[str, CheckRow], answer: CheckAnswer, site: Site) -> dict[str, Any]:
    entries = []
    for row in rows.values():
        applies, why = _applies(row, answer)
        entries.append(
            {
                "check": row.check.id,
                "probe": row.probe,
                "what": row.check.what,
                "source": row.check.source,
                "threshold": _threshold(row, site),
                "limits": {**row.check.limits, **site.limits.get(row.check.id, {})},
                "when": row.check.when,
                "failure_class": row.failure_class,
                "scope": row.check.scope,
                "looks": row.check.looks,
                "applies": applies,
                "why": why,
            }
        )
    return {"schema": 1, "node": answer.node, "from": answer.source, "checks": entries}


def _applies(row: CheckRow, answer: CheckAnswer) -> tuple[bool | None, str]:
    """Whether a check applies here: None where that is not known. And why it does not, or is not known."""
    seen = [one.check_state for one in answer.seen if one.row.check.id == row.check.id]
    if any(one.status in ("healthy", "unhealthy") for one in seen):
        return True, ""
    unknown = [one.result.text for one in seen if one.status == "unknown"]
    if unknown:
        return None, unknown[0]
    if seen:
        return False, seen[0].result.text
    return None, "made before a job only (--preflight)" if row.check.when == "preflight" else "left out by the site"


def _nothing_seen(why: str, code: int, source: str = "standalone") -> dict[str, Any]:
    """The JSON answer where there is none."""
    return {
        "schema": 1,
        "node": "",
        "boot_id": "",
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "from": source,
        "status": "unknown",
        "exit_code": code,
        "problems": [why],
        "checks": [],
    }


def _end_at_last(after_s: float, form: str | None, as_json: bool) -> threading.Timer:
    """End the program after its deadline, even if a call of ours hangs (a plug-in, a home directory)."""

    def end() -> NoReturn:
        why = f"the check itself did not end within {after_s:g} s"
        line = json.dumps(_nothing_seen(why, ExitCode.NOT_KNOWN)) if as_json else f"UNKNOWN: {why}"
        os.write(1 if form is None else 2, f"{line}\n".encode())
        os._exit(ExitCode.NOT_KNOWN if form is None else 0)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()
    return timer


# ----- --release-gpus: the agents of the node are asked on their sockets -----

ANSWER_S: Final = 40.0
SOCKETS_ASKED: Final = 200
ANSWER_BYTES: Final = 4096
_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600}


def seconds_of(text: str) -> float:
    """`90`, `90s`, `10m`, `2h`. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,6})([smh]?)", text.strip())
    if match is None:
        raise ValueError("give a time, such as 90s, 10m or 2h; 0 ends the release")
    return min(float(int(match[1]) * _UNITS[match[2]]), LONGEST_RELEASE_S)


def sockets(local_dir: str) -> list[str]:
    """The sockets of the agents that this user may ask: this user's own, for root those of all users."""
    return list(dict.fromkeys(one for folder in _folders(local_dir) for one in _below(folder)))[:SOCKETS_ASKED]


def _folders(local_dir: str) -> Iterator[str]:
    if local_dir:
        yield local_dir
        return
    uid = os.getuid()
    named = os.environ.get("UNBROKEN_LOCAL_DIR", "")
    yield from ([named] if named else [])
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        yield from sorted(glob.glob(f"{glob.escape(base)}/unbroken-{'*' if uid == 0 else uid}"))


def _below(folder: str) -> list[str]:
    base = glob.escape(folder)
    found = [f"{folder}/agent.sock", *sorted(glob.glob(f"{base}/*/*/agent.sock"))]
    return [one for one in found if os.path.exists(one)]


def ask_agent(path: str, seconds: float) -> dict[str, Any]:
    """The agent's answer; empty where none is there (an agent that has ended leaves its socket). Raises OSError and
    ValueError.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(ANSWER_S)
        try:
            client.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return {}
        request = {"op": "release_gpus", "seconds": seconds, "by": getpass.getuser()}
        client.sendall(msgspec.json.encode(request) + b"\n")
        answer = b""
        while not answer.endswith(b"\n") and len(answer) < ANSWER_BYTES:
            piece = client.recv(ANSWER_BYTES)
            if not piece:
                raise ValueError("it gave no answer: it may be an older version of unbroken")
            answer += piece
    return msgspec.json.decode(answer, type=dict[str, Any])


def release_gpus_here(duration: str, local_dir: str) -> int:
    """The command: 0 when nothing of ours has a GPU open on this node, 1 when something has, or may have."""
    try:
        seconds = seconds_of(duration)
    except ValueError as error:
        warn(str(error))
        return 2
    asked, failed = 0, 0
    for path in sockets(local_dir):
        where = clean_text(os.path.dirname(path), 300)
        try:
            answer = ask_agent(path, seconds)
        except TimeoutError:
            answer = {"error": f"the agent gave no answer in {ANSWER_S:g} s; it may still do it"}
        except (OSError, ValueError) as error:
            answer = {"error": str(error) or "no answer"}
        if not answer:
            continue
        asked += 1
        failed += "error" in answer
        click.echo(_line(where, answer), err="error" in answer)
    if not asked:
        click.echo("no agent runs here that this user may ask" + ("" if os.getuid() == 0 else " (root may ask all)"))
    return 1 if failed else 0


def _line(where: str, answer: dict[str, Any]) -> str:
    if "error" in answer:
        return f"unbroken: {where}: {clean_text(str(answer['error']), 300)}"
    until = answer.get("until")
    if not isinstance(until, (int, float)) or not 0 < until < 1e11:
        return f"{where}: the GPUs are watched again"
    return f"{where}: the GPUs are released until {GpuRelease(until=float(until)).clock}"
