"""`unbroken controller`, and what `unbroken run` starts on the first node: claim an epoch, replay, listen, run.

Exit codes: 0 the job has ended or a signal asked to stop, 1 it could not start, 4 a newer controller took over (do
not start this one again), 78 the journal of a living job was written by another version (it may be put back).
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import hashlib
import logging
import os
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from supervisor import config
from supervisor.controller import corrections
from supervisor.controller.journal import History, Journal, open_journal
from supervisor.controller.loop import UNHEARD_AFRESH_S, UNHEARD_S, ControlLoop
from supervisor.controller.server import Scrape, Server
from supervisor.errors import ConfigError, OtherVersion
from supervisor.files import Here, read_token
from supervisor.logs import configure
from supervisor.messages import JobRequeued, JobSpec, JournalDamaged
from supervisor.metrics.targets import AGAIN_S, RETRY_S, TargetFile
from supervisor.paths import Fence, RequeueRecord, incidents_folder, start_time, write_atomically
from supervisor.wire.access import job_mark
from supervisor.wire.limits import raise_descriptor_limit

if TYPE_CHECKING:
    from supervisor.controller.alerts import AlertReceiver
    from supervisor.job.job import Job

log = logging.getLogger("unbroken.controller")

SUPERSEDED_EXIT_CODE = 4
OTHER_VERSION = (
    "its journal tells of attempt {lived}, and this version makes attempt {known} of the same events: another version "
    "wrote it. The run goes on without a controller. Put that version back, or end the job (scancel, or SIGTERM to "
    "`unbroken run`)"
)
"""A version that decides otherwise would come to another history of a living job, and act upon it."""
COLLECT_AFTER = (20_000, 20, 200)
"""For `gc.set_threshold`."""
SWITCH_S = 0.001
"""A thread that reads a journal or writes a long answer holds up heartbeats for no longer."""
LAST_SCRAPE_S = 30.0
"""So long at most a controller that is scraped stays to tell Prometheus that its job failed."""
LAST_WORDS_S = 2.0
"""So long the removal of target files may take."""


class ControllerFile(msgspec.Struct, frozen=True, kw_only=True):
    """`controller.json` of the job folder: how agents and the command line find the controller."""

    address: str
    """`http://host:port` (`https://` with TLS)."""
    epoch: int
    host: str
    pid: int
    started_at: float = 0.0
    start_time: int = 0
    boot_id: str = ""
    pid_namespace: str = ""
    """With these whoever sees the same processes can tell whether it lives."""
    service: bool = False
    """Somebody started it by itself: no front ends with it."""
    socket: str = ""
    """Its unix socket, for this user's processes on its own node; empty where there is none."""
    job: str = ""
    """The job's mark: what munge says for one job is not for another of the same owner."""


def read_controller_file(job_dir: Path) -> ControllerFile | None:
    """The newest one; None when there is none (yet)."""
    try:
        return msgspec.json.decode((job_dir / "controller.json").read_bytes(), type=ControllerFile)
    except (OSError, msgspec.DecodeError):
        return None


def ensure_token(job_dir: Path) -> str:
    """The job's token; made, readable by the owner only, when there is none. Raises OSError."""
    path = job_dir / "token"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
    except FileExistsError:
        return _whole_token(path)
    try:
        with open(fd, "w") as file:
            file.write(os.urandom(24).hex() + "\n")
    except OSError:
        path.unlink(missing_ok=True)  # an empty one would stop every later start
        raise
    return _whole_token(path)


def _whole_token(path: Path) -> str:
    deadline = time.monotonic() + 2.0
    while not (token := read_token(path)):
        if time.monotonic() > deadline:
            raise OSError(f"{path} is empty: remove it, then a new token is made")
        time.sleep(0.01)  # somebody else is writing it just now
    return token


def own_address() -> str:
    """An address of this host that others can use: of its name, else of its default route, else of any interface."""
    try:
        for *_, (host, *_rest) in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET):
            if not str(host).startswith("127."):
                return str(host)
    except OSError:
        pass  # a host without a resolvable name
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks the kernel which address it would use
            return str(probe.getsockname()[0])
    except OSError:
        pass  # a host without a default route
    import psutil  # seldom needed

    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    return "127.0.0.1"


def parse_listen(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `HOST` or `:PORT`. Raises ValueError."""
    host, _, port = text.rpartition(":") if ":" in text else (text, "", "0")
    if not port.isdigit() or int(port) > 65535:
        raise ValueError(f"--listen {text!r}: expected HOST:PORT, for example 0.0.0.0:7461")
    return host.strip("[]") or "0.0.0.0", int(port)


def _server_tls(cert: str, key: str) -> ssl.SSLContext | None:
    if not cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key or None)
    except OSError as error:
        files = f"{cert} and {key}" if key else cert
        raise OSError(f"the certificate in {files} cannot be used: {error.strerror or error}") from None
    return context


def build(
    job_dir: Path,
    settings: config.Settings,
    *,
    restarted: bool = False,
    scheduler_job: str = "",
    requeues: int = 0,
    training_python: str = sys.executable,
    of_front: bool = False,
) -> ControlLoop:
    """Claim the next epoch and replay the journal. Raises OSError.

    A job that has ended is begun again, with an empty history in the same folder, unless `restarted`: then it was our
    own controller that died after the end. Where nodes have not told that they are done, they are known to be gone
    only `of_front`, whose start is that of the first node. One that its scheduler has started again (`requeues` is up)
    goes on. Raises OtherVersion where the journal of a living job was written by a version that decided otherwise.
    """
    # The core is imported here so that reading `controller.json` does not cost it.
    from supervisor.controller.heartbeats import HeartbeatEvents
    from supervisor.controller.report import live_view
    from supervisor.job.job import Job
    from supervisor.opinion.queue import opinion_queue

    def loop_of(journal: Journal, history: History) -> ControlLoop:
        job = Job()
        unheard_s = UNHEARD_S if restarted else UNHEARD_AFRESH_S

        def watch() -> HeartbeatEvents:
            return HeartbeatEvents(job.skew, lambda: job.core.spec.mirror_snapshots)

        loop = ControlLoop(job, watch, journal, history, live_view, unheard_s, requeues)
        memory = _memory_folder(settings, job_dir)
        asks = opinion_queue(job, loop.post, loop.clock.now, job_dir, settings.opinion, training_python, memory)
        loop.opinion_wanted, loop.ask_model = asks.wanted, asks.want
        return loop

    journal, history = open_journal(job_dir, living=restarted or not of_front)
    _use_rules(job_dir, settings.run.site_file, begun=bool(history.records))
    loop = loop_of(journal, history)
    job = loop.job
    if restarted and loop.lived_attempt != loop.folded_attempt:
        journal.close()
        raise OtherVersion(OTHER_VERSION.format(lived=loop.lived_attempt, known=loop.folded_attempt))
    if requeues > job.spec.requeues and scheduler_job == job.spec.scheduler_job and job.goes_on_when_requeued:
        loop.begin_again(_requeued(loop.clock.now(), job_dir, job.spec, requeues))
    elif (loop.outcome is not None or (of_front and job.is_over)) and not restarted:
        journal.close()
        _use_rules(job_dir, settings.run.site_file, begun=False)
        loop = loop_of(*open_journal(job_dir, forget=True))
    elif lost := _behind_its_fence(job_dir, history, job):
        loop.post(msgspec.structs.replace(lost, at=loop.clock.now(), living=restarted or not of_front))
    return loop


def _behind_its_fence(job_dir: Path, history: History, job: Job) -> JournalDamaged | None:
    """Nodes were told of a newer attempt than the journal tells of: its end is gone, cut between two records."""
    try:
        fence = Fence.read(job_dir)
    except OSError:
        return None
    known = job.attempt.number if job.attempt is not None else 0
    begun = history.records[0].epoch if history.records else 1
    if fence is None or fence.epoch < begun or fence.attempt <= max(known, job.attempts.numbers_from):
        return None
    what = f"fence.json tells of attempt {fence.attempt}, the journal of none after {known}"
    return JournalDamaged(at=0.0, what=what, events=True, orders=True, attempt=fence.attempt, formed=True)


def _requeued(now: float, job_dir: Path, spec: JobSpec, requeues: int) -> JobRequeued:
    """With what a node that had lost its controller has left on record of this new start."""
    record = RequeueRecord.read(job_dir)
    if record is None or (record.job, record.requeues) != (spec.scheduler_job, spec.requeues):
        return JobRequeued(at=now, requeues=requeues)
    return JobRequeued(at=now, requeues=requeues, by=record.by, lost=record.lost, lost_at=record.lost_at)


def _use_rules(job_dir: Path, named: str, *, begun: bool) -> None:
    """Read output as the agents do, with the rules of the site and of the job; one that has `begun` keeps its own."""
    site_file, problem = config.load_site_or_default(named)
    for flaw in (problem, config.use_rules_of_job(site_file, job_dir, begun=begun)):
        if flaw:
            log.warning("%s", flaw)


async def serve(options: argparse.Namespace, settings: config.Settings) -> int:
    """Run a controller to its end; its exit code. Raises OSError when it cannot start."""
    job_dir = Path(options.job_dir).absolute()
    job_dir.mkdir(parents=True, exist_ok=True)
    token_file = options.token_file or settings.run.token_file
    token = read_token(Path(token_file), shared=True) if token_file else ensure_token(job_dir)
    before = read_controller_file(job_dir)
    control = build(
        job_dir,
        settings,
        restarted=options.restarted,
        scheduler_job=options.scheduler_job,
        requeues=options.requeues,
        training_python=options.training_python,
        of_front=options.of_front,
    )
    await _read_ledger(control, settings.ledger.folder)
    corrections.apply(job_dir, control.job)
    _notify(control, settings.notify, job_dir.name)
    _remember(control, _memory_folder(settings, job_dir))
    tls_cert, tls_key = options.tls_cert or settings.controller.tls_cert, options.tls_key or settings.controller.tls_key
    metrics, target = settings.metrics, TargetFile(str(job_dir), settings.metrics.targets_dir, "controller")
    scrape, alerts = _scrape_of(control) if metrics.enabled else None, alert_receiver(control, settings.run.site_file)
    server = Server(control, token, _server_tls(tls_cert, tls_key), scrape, alerts)
    # Under a scheduler orders and scrapes come from other hosts, of a job of one node, too.
    alone = options.nodes == 1 and not options.scheduler_job
    host, port = parse_listen(options.listen or settings.controller.listen or ("127.0.0.1:0" if alone else "0.0.0.0:0"))
    port = await _listen(server, host, port, before)
    here = Here.find()
    address = own_address() if host in ("0.0.0.0", "::") else host
    shown = ControllerFile(
        address=f"{'https' if tls_cert else 'http'}://{address}:{port}",
        epoch=control.epoch,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_at=time.time(),
        start_time=start_time(os.getpid()) or 0,
        boot_id=here.boot_id,
        pid_namespace=here.pid_namespace,
        service=not options.of_front,
        socket=await _listen_nearby(server, Path(options.socket or _default_socket(job_dir))),
        job=job_mark(token),
    )
    if metrics.enabled:  # before any agent can come, and write its own
        _aside(lambda: target.tidy(anew=not options.restarted, now=shown.started_at)).join(LAST_WORDS_S)
    write_atomically(job_dir / "controller.json", msgspec.json.encode(shown) + b"\n")
    telling = asyncio.create_task(_tell_prometheus(control, target, shown.address)) if metrics.enabled else None
    log.info("controller of %s, epoch %d, listens on %s (%s)", job_dir, control.epoch, shown.address, host)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Slurm's SIGTERM reaches every process of the job; this one is needed to end it in order.
        answer = (lambda: None) if options.of_front else control.stop
        asyncio.get_running_loop().add_signal_handler(number, answer)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # likewise; they are the ranks'
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    _collect_rarely()
    try:
        outcome = await control.run()
        if outcome is not None and outcome.state == "failed":
            await server.scraped_once_more(LAST_SCRAPE_S)
    finally:
        if telling is not None:
            telling.cancel()
        await server.stop()
    if control.superseded:
        return SUPERSEDED_EXIT_CODE
    if outcome is not None:
        _aside(lambda: target.remove(all_of_job=True)).join(LAST_WORDS_S)
        log.info("the job has ended: %s (%s)", outcome.state, outcome.line)
    return 0


async def _read_ledger(control: ControlLoop, folder: str) -> None:
    """What all jobs know of the nodes, before any node can join."""
    if not folder:
        return
    from recovery.ledger_folder import LedgerFolder
    from supervisor.controller.ledger_watch import ENTRIES_KEPT, LedgerWatch

    nodes = control.job.nodes
    control.ledger = LedgerWatch(
        LedgerFolder(folder, all_tests=False, most_entries=ENTRIES_KEPT),
        control.post,
        control.clock.now,
        lambda: [one.scheduler_name or one.name for one in nodes],
    )
    await control.ledger.first_look()


def _notify(control: ControlLoop, settings: config.NotifySettings, job: str) -> None:
    if settings.to:
        from supervisor.controller.notify import Notifier

        def state() -> str:
            step = control.watch.newest.step
            return control.job.state + ("" if step is None else f", step {step}")

        control.notifier = Notifier(settings, job, state)


def _memory_folder(settings: config.Settings, job_dir: Path) -> Path:
    return incidents_folder(Path(settings.ledger.folder) if settings.ledger.folder else None, job_dir)


def alert_receiver(control: ControlLoop, named: str) -> AlertReceiver:
    """With the site's rules before ours. One that cannot be used is left out, and told of."""
    from supervisor.controller.alerts import RULES, AlertReceiver, JobOfAlerts, KnownNode, read_rules, site_rules

    job, own = control.job, read_rules(config.read_toml(RULES)["alert"], RULES.name)
    site_file, _ = config.load_site_or_default(named)
    site = site_rules(site_file.alert, site_file.path)
    own = (*site.rules, *own)
    for problem in site.problems:
        log.warning("%s", problem)

    def nodes() -> list[KnownNode]:
        return [
            KnownNode(one.name, tuple(filter(None, (one.host, one.scheduler_name, one.address)))) for one in job.nodes
        ]

    asked = JobOfAlerts(
        nodes, lambda: job.alerts.firing, control.submit, lambda: control.stall, lambda: control.outcome is not None
    )
    return AlertReceiver(own, asked)


def _remember(control: ControlLoop, folder: Path) -> None:
    """Past incidents are kept beside the job, and a Python without SQLite has none."""
    try:
        from recovery.incident_store import IncidentStore
        from supervisor.controller.memory_watch import MemoryWatch
    except ImportError as error:
        log.warning("no memory of incidents: %s", error)
        return
    control.memory = MemoryWatch(IncidentStore(folder), control.job, control.post, control.clock.now)


def _collect_rarely() -> None:
    """What is there now stays to the end: it is not looked through again. Of 4,096 nodes there is so much besides that
    looking through all of it takes 0.4 s, in which nobody is answered; cycles are few here."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    gc.enable()
    sys.setswitchinterval(SWITCH_S)


def _scrape_of(control: ControlLoop) -> Scrape:
    """`/metrics` of a controller."""
    from supervisor.controller.metrics import controller_samples
    from supervisor.metrics.port import page, process_samples
    from supervisor.metrics.table import CONTROLLER, job_name

    job = control.job

    def scrape() -> Callable[[str, str], tuple[bytes, dict[str, str]]]:
        samples = [*controller_samples(control, job), *process_samples("controller", os.getpid())]
        return functools.partial(page, CONTROLLER, samples, [("job", job_name(job.spec.name))])

    return scrape


async def _tell_prometheus(control: ControlLoop, target: TargetFile, address: str) -> None:
    """Where to find us, once it is known whose controller this is; again and again, for only the dead grow old."""
    job = control.job
    while not job.spec.name:
        await asyncio.sleep(0.5)
    scheme, _, place = address.partition("://")

    def tell() -> None:
        while not target.write(job.spec.name, place, scheme):
            time.sleep(RETRY_S)

    telling = _aside(tell)
    while True:
        await asyncio.sleep(AGAIN_S)
        telling = telling if telling.is_alive() else _aside(tell)


def _aside(work: Callable[[], None]) -> threading.Thread:
    """Do what may hang with its file system; nobody's end waits for it."""
    thread = threading.Thread(target=work, name="targets", daemon=True)
    thread.start()
    return thread


async def _listen(server: Server, host: str, port: int, before: ControllerFile | None) -> int:
    """Take `port`; when any will do, the one the last controller on this host had, so that addresses stay good."""
    if port == 0 and before is not None and before.host == socket.gethostname():
        try:
            return await server.start(host, int(before.address.rpartition(":")[2]))
        except (OSError, ValueError):
            pass  # somebody else has it now
    return await server.start(host, port)


def _default_socket(job_dir: Path) -> Path:
    root = os.environ.get("UNBROKEN_LOCAL_DIR") or f"{tempfile.gettempdir()}/unbroken-{os.getuid()}"
    return Path(root) / "controllers" / f"{hashlib.sha256(bytes(job_dir)).hexdigest()[:16]}.sock"


async def _listen_nearby(server: Server, path: Path) -> str:
    """Its path, once the unix socket is there; without one everybody comes by the port, as from other nodes."""
    try:
        await server.start_socket(path)
    except OSError as error:
        log.warning("no unix socket for this node: %s: %s", path, error.strerror or error)
        return ""
    return str(path)


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="unbroken controller", description=(__doc__ or "").partition("\n\n")[0])
    parse.add_argument("--job-dir", required=True, help="the job folder (journal, token, controller.json)")
    parse.add_argument(
        "--listen", default="", help="HOST:PORT (default: a free port, on 127.0.0.1 for one node without scheduler)"
    )
    parse.add_argument(
        "--nodes", type=int, default=1, help="most nodes the job may have; with 1 only this host can connect"
    )
    parse.add_argument("--token-file", default="", help="default: `token` in the job folder, made if absent")
    parse.add_argument(
        "--socket", default="", help="unix socket for this user's processes on this node (default: in the local folder)"
    )
    parse.add_argument("--tls-cert", default="", help="PEM; switches TLS on (default: UNBROKEN_TLS_CERT)")
    parse.add_argument("--tls-key", default="", help="PEM (default: UNBROKEN_TLS_KEY, else in --tls-cert)")
    parse.add_argument(
        "--training-python", default=sys.executable, help="runs the model that is asked for opinions, where one is"
    )
    parse.add_argument(
        "--scheduler-job", default=os.environ.get("SLURM_JOB_ID", ""), help="the job's id there (default: of Slurm)"
    )
    parse.add_argument(
        "--requeues",
        type=int,
        default=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        help="how often the scheduler has started the job again",
    )
    parse.add_argument(
        "--of-front", action="store_true", help="`unbroken run` started it, and handles the job's signals"
    )
    parse.add_argument("--plan", default="", help="node.json of the node that it runs on: its settings")
    parse.add_argument("--restarted", action="store_true", help="an ended job stays ended")
    parse.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parse


def main(arguments: Sequence[str] | None = None, settings: config.Settings | None = None) -> int:
    """`settings`: those of the user who starts it; else of the node that it runs on, else of its environment."""
    options = parser().parse_args(arguments)
    raise_descriptor_limit()
    gc.disable()  # until the journal is replayed: nearly all that is made of it stays
    configure(options.log_level.upper())
    try:
        if settings is None:
            settings = config.read_plan(Path(options.plan)).settings if options.plan else config.received(os.environ)
        return asyncio.run(serve(options, settings))
    except OtherVersion as error:
        print(f"unbroken controller: cannot go on in {options.job_dir}: {error}", file=sys.stderr)
        return error.exit_code
    except (OSError, ValueError, ConfigError) as error:
        print(f"unbroken controller: cannot start in {options.job_dir}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
