"""Everything `unbroken run` settles before it starts anything: the training Python, names, folders, the node's plan.

Raises LaunchRefused or ConfigError with one sentence when something does not fit; nothing is running then.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from diagnosis.text import redact_words
from recovery.scheduling import JobThere, slurm_domain, slurm_job
from recovery.snapshot_memory import addresses, make_slots
from recovery.tiers import MIRRORS
from supervisor.config import NodePlan, RunSettings, Settings, absolute, load_site
from supervisor.errors import CommandDenied, ConfigError, ControllerUnreachable, JobRunsAlready, LaunchRefused
from supervisor.files import Here, make_shared, read_token
from supervisor.messages import JobSpec
from supervisor.mover.copying import CopyError, make_private
from supervisor.mover.publish import same_file_system, why_full, why_not_published
from supervisor.node_health.storage import mount_of, parse_mountinfo
from supervisor.paths import JOBS, LocalPaths, local_dir, start_time, write_atomically
from supervisor.run.lease import Lease, holder_here, newest_journal, take
from supervisor.run.namesakes import namesakes
from supervisor.run.torchrun_options import TorchrunCommand, read_command, starts_with_omp_default
from supervisor.training import launcher_variables, write_stub

PROFILER_DAEMON = "KINETO_USE_DAEMON"
"""torch's profiler asks for orders."""
RANKS_EXPECTED = 16
"""On a node whose number of ranks is not known before torchrun finds it out."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What `unbroken run` was given: the settings, and the options of this one start."""

    settings: Settings = field(default_factory=Settings)
    spare: bool = False
    nproc_per_node: str | None = None
    json: bool = False
    traceable: bool = False
    """Ranks make a trace when they are asked (`unbroken trace`)."""
    test_suspects: bool = True
    fewer_processes: bool = False
    """As in `JobSpec`, both."""

    @property
    def run(self) -> RunSettings:
        return self.settings.run

    def with_spares(self, spares: int) -> RunOptions:
        run = msgspec.structs.replace(self.run, spares=spares)
        return replace(self, settings=msgspec.structs.replace(self.settings, run=run))


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is settled: what will run on this node, and what it holds."""

    plan: NodePlan
    paths: LocalPaths
    keeper_env: dict[str, str]
    runs_controller: bool
    others_join: bool = True
    """Whether a person starts the other nodes: not within a Slurm step."""
    notices: tuple[str, ...] = field(default=())
    local: LocalFolder
    lease: Lease | None = None
    """Of the job: this node is the first of its life."""
    slots: tuple[int, ...] = ()
    """Descriptors of the memory for snapshots (`recovery.snapshot_memory`): there while this process is."""

    @property
    def job_dir(self) -> Path:
        return Path(self.plan.job_dir)

    def release(self) -> None:
        """Give up the local folder, the lease and the snapshots: nothing of this node runs any more."""
        for descriptor in self.slots:
            os.close(descriptor)
        _let_go(self.local, self.lease)


def _slots(read: TorchrunCommand, environment: Mapping[str, str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Two for each rank of this node, and what is to be said. They take no memory before a script keeps a snapshot."""
    try:
        return tuple(make_slots(_processes(read.nproc_per_node, environment) or RANKS_EXPECTED)), ()
    except OSError as error:
        hint = ": raise `ulimit -n`" if error.errno == errno.EMFILE else ""
        why = f"scripts cannot keep snapshots in memory on this node: memfd_create: {error.strerror}{hint}"
        return (), (why,)


def _let_go(local: LocalFolder, lease: Lease | None) -> None:
    release(local.lock)
    if lease is not None:
        lease.give_up()


def prepare(options: RunOptions, command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> Prepared:
    """Read the command, take the folders and the job's lease, write `node.json`. Raises LaunchRefused, ConfigError."""
    settings = _settled(options.settings, cwd)
    step_nodes, index = slurm_step(environment)
    scheduler, scheduler_node = scheduler_job(options.settings.scheduler.name, environment)
    if step_nodes > max(1, options.run.spares) and "PET_NNODES" not in environment:
        environment = {**environment, "PET_NNODES": str(step_nodes - options.run.spares)}
    read = read_command(command, nproc_per_node=options.nproc_per_node, environment=environment)
    if step_nodes:
        read, options = _fit_step(step_nodes, read, options)
    _check_script(read, environment, cwd)
    python = training_python(read.program, read.program_is_python, environment)
    index = read.node_rank if index is None else index
    job_id = str(scheduler.get("scheduler_job", "")) or environment.get("SLURM_JOB_ID", "")
    job_dir, name = _job_folder(options, read, index, job_id, Path(environment.get("SLURM_SUBMIT_DIR") or cwd), cwd)
    node = _node_name(options, environment)
    _check_token(job_dir, options)
    about_tiers = _check_publishing(settings, cwd)
    local = take_local_folder(name, job_dir, node)
    lease: Lease | None = None
    try:
        lease = _lease(options, read, index, job_dir, node, job_id, int(scheduler.get("requeues", 0)))
        slots, about_memory = _slots(read, environment)
        launcher_argv, launcher_env = _launcher(read, name, python, node, local.paths, environment)
        if options.traceable:
            launcher_env = {PROFILER_DAEMON: "1", **launcher_env, "UNBROKEN_TRACEABLE": "1"}
        processes = _processes(read.nproc_per_node, environment)
        on_gpus = 0 < (processes or 0) <= _gpus(environment)
        plan = NodePlan(
            node=node,
            job_dir=str(job_dir),
            local_dir=str(local.paths.folder),
            spec=msgspec.structs.replace(_spec(options, read, name, command, cwd, on_gpus), **scheduler),
            launcher_argv=launcher_argv,
            launcher_env=launcher_env,
            python=python,
            cwd=str(cwd),
            front_pid=os.getpid(),
            front_start_time=start_time(os.getpid()) or 0,
            run=secrets.token_hex(8),
            index=index,
            spare=options.spare or (step_nodes > 1 and (index or 0) >= read.nodes_max),
            scheduler_node=scheduler_node,
            domain=slurm_domain(environment),
            snapshot_files=tuple(addresses(slots)),
            processes=processes,
            torchrun_options=len(launcher_argv) - len(read.script_args) - 1,
            settings=settings,
        )
        _write_plan(plan, local.paths)
    except BaseException:
        _let_go(local, lease)
        raise
    return Prepared(
        plan=plan,
        paths=local.paths,
        keeper_env=_keeper_env(read, environment),
        runs_controller=lease is not None and not has_service(job_dir, settings),
        others_join=plan.spec.nodes_max + plan.spec.spares > 1 and not step_nodes,
        notices=(*read.notices, *about_tiers, *about_memory, *_namesakes(read, python, environment, cwd)),
        local=local,
        lease=lease,
        slots=slots,
    )


def _namesakes(read: TorchrunCommand, python: str, environment: Mapping[str, str], cwd: Path) -> tuple[str, ...]:
    folder = (cwd / read.script).parent if read.kind == "script" else cwd
    return namesakes(python, folder, environment.get("PYTHONPATH", ""))


def _node_name(options: RunOptions, environment: Mapping[str, str]) -> str:
    node = options.run.node_name or environment.get("SLURMD_NODENAME", "") or socket.gethostname()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", node):
        raise LaunchRefused(f"the node name {node!r} may have letters, digits, dots, dashes and underscores only")
    return node


def _write_plan(plan: NodePlan, paths: LocalPaths) -> None:
    try:
        write_atomically(paths.plan, msgspec.json.encode(plan), 0o600)
        write_atomically(paths.front, b'{"stop":""}', 0o600)
        paths.set_reserve()
    except OSError as error:
        raise LaunchRefused(
            f"the local folder {paths.folder} cannot be written ({error.strerror}): make room, or set "
            "UNBROKEN_LOCAL_DIR to where there is some"
        ) from None


def _settled(settings: Settings, cwd: Path) -> Settings:
    """For the agent and the controller of this node, and seen to be usable. Raises ConfigError."""
    try:
        shlex.split(settings.run.restart_args)
    except ValueError as error:
        raise ConfigError(f"--restart-args {settings.run.restart_args!r}: {error}") from None
    settings = absolute(settings, cwd)
    if settings.run.site_file:  # a default one may be mended any time
        load_site(settings.run.site_file)
    address = settings.run.controller.rstrip("/")
    address = f"http://{address}" if address and "://" not in address else address
    run = msgspec.structs.replace(settings.run, controller=address)
    return msgspec.structs.replace(settings, run=run)


def _check_publishing(settings: Settings, cwd: Path) -> tuple[str, ...]:
    """See that checkpoints on this node's own disk can be published; what is only a pity. Raises LaunchRefused."""
    publish_to, folders = settings.checkpoint.publish_to, settings.run.checkpoint_dirs
    if not publish_to:
        return ()
    if len(folders) != 1:
        raise LaunchRefused(
            "--publish-to needs one --checkpoint-dir: the folder on each node's own disk that the script writes to"
        )
    local = cwd / folders[0]
    if why := why_not_published(Path(publish_to), local):
        raise LaunchRefused(f"--publish-to {publish_to}: {why}")
    try:
        local.mkdir(parents=True, exist_ok=True)
        make_private(local / MIRRORS)
    except FileExistsError:
        raise LaunchRefused(f"--checkpoint-dir {local} is a file: name a folder on this node's own disk") from None
    except (OSError, CopyError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise LaunchRefused(f"--checkpoint-dir {local} cannot be written: {why}") from None
    told = [why] if (why := why_full(local)) else []
    if same_file_system(local, Path(publish_to)):
        told.append(
            f"{local} and {publish_to} are on the same file system: checkpoints are copied, and nothing is gained. "
            "Give --checkpoint-dir a folder on each node's own disk"
        )
    return tuple(told)


def _spec(
    options: RunOptions, read: TorchrunCommand, name: str, command: Sequence[str], cwd: Path, on_gpus: bool
) -> JobSpec:
    hang, opinion = options.settings.hang, options.settings.opinion
    spec = JobSpec(
        name=name,
        nodes_min=read.nodes_min,
        nodes_max=read.nodes_max,
        spares=options.run.spares,
        mode=options.run.mode,
        checkpoint_dirs=tuple(str(cwd / folder) for folder in options.run.checkpoint_dirs),
        publish_to=str(cwd / options.settings.checkpoint.publish_to) if options.settings.checkpoint.publish_to else "",
        has_restart_args=bool(options.run.restart_args),
        command=redact_words(command),
        opinion_below=opinion.below if opinion.backend != "none" else 0.0,
        hold_limit_s=options.run.hold_limit_s,
        patience_s=hang.patience_s,
        patience_factor=hang.factor,
        patience_off=hang.off,
        loss_guard=options.settings.loss.guard,
        mirror_snapshots=options.settings.checkpoint.mirror_snapshots,
        swap_mode=options.settings.swap.mode,
        swap_signal=options.settings.swap.signal,
        traceable=options.traceable,
        test_suspects=options.test_suspects,
        fewer_processes=options.fewer_processes,
        ledger=options.settings.ledger.cordons if options.settings.ledger.folder else "",
        on_gpus=on_gpus,
    )
    restarts = read.max_restarts if options.run.max_restarts is None else options.run.max_restarts
    given = {
        "max_restarts": restarts,
        "gather_s": options.run.gather_s,
        "wait_for_nodes_s": options.run.wait_for_nodes_s,
    }
    return msgspec.structs.replace(spec, **{key: value for key, value in given.items() if value is not None})


# ----- the scheduler -----


class SlurmStep(NamedTuple):
    nodes: int
    """0: there is none."""
    node_index: int | None
    """This node's place among them."""


def slurm_step(environment: Mapping[str, str]) -> SlurmStep:
    """Raises LaunchRefused where the step has more than one task a node."""
    if not environment.get("SLURM_JOB_ID") or not environment.get("SLURM_STEP_NUM_NODES", "").isdigit():
        return SlurmStep(0, None)
    nodes = int(environment["SLURM_STEP_NUM_NODES"])
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or nodes)
    if tasks > nodes:
        raise LaunchRefused(
            f"srun starts {tasks} tasks on {nodes} node{'s' * (nodes > 1)}, unbroken wants one a node: "
            "srun --ntasks-per-node=1 unbroken run --nproc-per-node N -- ..."
        )
    index = environment.get("SLURM_NODEID", "")
    return SlurmStep(nodes, int(index) if index.isdigit() and nodes > 1 else None)


def scheduler_job(name: str, environment: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """What the job's spec says of its scheduler, and what that calls this node. Raises LaunchRefused.

    `name`: as configured; empty: Slurm within one of its jobs, else none. All nodes of a job say the same.
    """
    if name == "local":
        return {}, ""
    job = slurm_job(environment, time.time()) if name in ("", "slurm") else _of_plug_in(name, environment)
    if job is None:
        if name:
            raise LaunchRefused(f"scheduler.name is {name}, but this process does not run in one of its jobs")
        return {}, ""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,79}", job.id):
        raise LaunchRefused(f"the scheduler's name for its job, {job.id[:80]!r}, cannot be the name of a folder")
    fields = {"scheduler": name or "slurm", "scheduler_job": job.id, "requeues": job.requeues, "ends_at": job.ends_at}
    return fields, job.node


def _of_plug_in(name: str, environment: Mapping[str, str]) -> JobThere | None:
    from recovery.schedulers import load_schedulers  # seldom needed

    found, problems = load_schedulers()
    scheduler = found.get(name)
    if scheduler is None:
        skipped = f" ({'; '.join(problems)})" if problems else ""
        raise LaunchRefused(f"there is no scheduler {name!r}: installed are {', '.join(sorted(found))}{skipped}")
    try:
        return scheduler.job_of(environment)
    except Exception as error:  # a plug-in's bug
        raise LaunchRefused(f"the scheduler {name} failed: {type(error).__name__}: {str(error)[:200]}") from error


# ----- the command -----


def _check_script(read: TorchrunCommand, environment: Mapping[str, str], cwd: Path) -> None:
    if read.has_unknown_options:
        return  # one of them may take what looks like the script as its value
    if read.kind == "script" and not (cwd / read.script).exists():
        raise LaunchRefused(f"there is no script {read.script} in {cwd}")
    if read.kind == "program" and not shutil.which(read.script, path=environment.get("PATH")):
        raise LaunchRefused(f"there is no program {read.script} (torchrun's --no-python runs it as it is)")


def _fit_step(nodes: int, read: TorchrunCommand, options: RunOptions) -> tuple[TorchrunCommand, RunOptions]:
    """The command and the options for a Slurm step of so many nodes, which are all that will ever come.

    The last ones are spares: as many as are more than torchrun's. For nodes that the step does not have nobody waits,
    but where the controller is elsewhere: then this step may be one of several.
    """
    if options.run.controller:
        return read, options.with_spares(max(options.run.spares, nodes - read.nodes_max))
    if nodes < read.nodes_min + options.run.spares:
        raise LaunchRefused(
            f"the Slurm step has {nodes} node{'s' * (nodes > 1)}, "
            f"torchrun wants {read.nodes_min} and --spares {options.run.spares}"
        )
    most = min(read.nodes_max, nodes - options.run.spares)
    return replace(read, nodes_max=most), options.with_spares(nodes - most)


def _gpus(environment: Mapping[str, str]) -> int:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in {"", "-1"}])
    try:
        return sum(1 for name in os.listdir("/dev") if re.fullmatch(r"nvidia[0-9]+", name))
    except OSError:
        return 0


def _processes(nproc: str, environment: Mapping[str, str]) -> int | None:
    """The number behind `auto`, `gpu` and `cpu`, as far as it is known without torch."""
    if nproc.isdigit():
        return int(nproc)
    gpus = _gpus(environment)
    if nproc == "gpu" or (nproc == "auto" and gpus):
        return gpus or None
    return len(os.sched_getaffinity(0)) if nproc in {"cpu", "auto"} else None


def _keeper_env(read: TorchrunCommand, environment: Mapping[str, str]) -> dict[str, str]:
    """The workers' environment as far as it decides how torch is loaded: the keeper loads it for them."""
    env = dict(environment)
    env.pop(PROFILER_DAEMON, None)  # a rank begins with it itself: a thread of the keeper would not be in a fork
    if starts_with_omp_default(_processes(read.nproc_per_node, environment), environment):
        env["OMP_NUM_THREADS"] = "1"
    return env


def _launcher(
    read: TorchrunCommand, name: str, python: str, node: str, paths: LocalPaths, environment: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """torchrun's arguments, and its environment on top of ours."""
    try:
        stub = write_stub(paths.folder, python)
    except OSError as error:
        raise LaunchRefused(f"the stub that torchrun starts cannot be written: {error}") from error
    env = {**read.environment, **launcher_variables(paths.folder, node, stub, environment)}
    if "PET_NNODES" in environment:
        env["PET_NNODES"] = environment["PET_NNODES"]  # from Slurm, perhaps
    if read.kind == "program":  # our stub stands for it: that is how the keeper comes to know the rank
        read = replace(read, script=str(stub), script_args=("--program", read.script, *read.script_args))
    elif theirs := environment.get("PYTHON_EXEC"):
        wrapper = paths.folder / "python-exec"
        theirs = shlex.quote(theirs)
        wrapper.write_text(f'#!/bin/sh\nPYTHON_EXEC={theirs} exec {shlex.quote(str(stub))} --program {theirs} "$@"\n')
        wrapper.chmod(0o755)
        if os.access(wrapper, os.X_OK):
            env["PYTHON_EXEC"] = str(wrapper)
    return read.launcher_argv(name), env


# ----- folders -----


def _job_folder(
    options: RunOptions, read: TorchrunCommand, index: int | None, job_id: str, base: Path, cwd: Path
) -> tuple[Path, str]:
    """The job folder, made, and the job's name. `job_id`: the scheduler's, whose jobs have their folders in `base`."""
    base = base if job_id else cwd
    if (index or 0) > 0 and not (options.run.controller or options.run.job_dir or options.run.name or job_id):
        raise LaunchRefused(
            f"node rank {index} cannot find the controller: "
            "give --controller HOST:PORT, or the first node's --job-dir or --name"
        )
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", options.run.name or job_id or f"{read.label}-{stamp}").strip("-.")[:80]
    folder = cwd / options.run.job_dir if options.run.job_dir else base / JOBS / (name or "job")
    if not options.run.name and options.run.job_dir:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip("-.")[:80]
    try:
        folder = _make_job_folder(folder, shared=bool(options.run.name or options.run.job_dir or job_id))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise LaunchRefused(
            f"the job folder {folder} cannot be written ({error.strerror}{_whose(folder)}): give another with --job-dir"
        ) from error
    return folder, (name if options.run.name or options.run.job_dir or job_id else folder.name) or "job"


def _whose(folder: Path) -> str:
    """The owner of the folder above, where that is the reason."""
    try:
        found = os.stat(folder.parent)
    except OSError:
        return ""
    if found.st_uid == os.geteuid() or os.access(folder.parent, os.W_OK | os.X_OK):
        return ""
    return f"; {folder.parent} is user {found.st_uid}'s, who lets others write there with `chmod g+rwxs,+t`"


def _make_job_folder(folder: Path, *, shared: bool) -> Path:
    """Make the folder. One that nobody named must be new: another job may start in the same second."""
    if folder.parent.name == JOBS:
        make_shared(folder.parent)
    if shared:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    for number in range(1, 1000):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            continue
        return candidate
    raise FileExistsError(17, "too many jobs of this name")


# ----- token, lease, controller -----


def _check_token(job_dir: Path, options: RunOptions) -> None:
    """Refuse a token file that somebody else put there: it would let them in. Raises LaunchRefused."""
    path = job_dir / "token"
    if options.run.token_file or not os.path.lexists(path):
        return
    try:
        read_token(path)
    except OSError as error:
        raise LaunchRefused(f"the job's token {path} is not used: {error.strerror or error}") from None


def _lease(
    options: RunOptions,
    read: TorchrunCommand,
    index: int | None,
    job_dir: Path,
    node: str,
    scheduler_job: str,
    requeues: int,
) -> Lease | None:
    """The lease of the job, if this is the first node of a new life; None: it joins one. Raises LaunchRefused."""
    several = read.nodes_max > 1 or options.run.spares > 0
    if options.run.controller or options.spare or (index and several):
        return None
    try:
        journal = None if has_service(job_dir, options.settings) else newest_journal(job_dir)
        mine = holder_here(node, scheduler_job, requeues, journal)
        return take(job_dir, mine, joins=several and index is None, say=say)
    except JobRunsAlready as error:
        raise LaunchRefused(str(error)) from None
    except OSError as error:
        raise LaunchRefused(f"the job's lease cannot be taken in {job_dir}: {error.strerror or error}") from None


def say(text: str) -> None:
    """On stderr, before our terminal is set up; stderr may be closed."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"unbroken: {text}", file=sys.stderr, flush=True)


def has_service(job_dir: Path, settings: Settings) -> bool:
    """Whether a controller that was started with `unbroken controller` serves this job. That of a front ends with it.

    It is looked for where `controller.json` says: on this boot and in this PID namespace the process, elsewhere its
    port, where it must prove that it knows the job's token: anybody may have that of one that is gone.
    """
    try:
        found = json.loads((job_dir / "controller.json").read_bytes())
        if not found.get("service"):
            return False
        if Here.find().sees(found["boot_id"], found["pid_namespace"]):
            return start_time(int(found["pid"])) == int(found["start_time"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    from supervisor.controller.client import ControllerClient

    try:
        ControllerClient.of_job(job_dir, token_file=settings.run.token_file, tls_ca=settings.controller.tls_ca).prove()
    except (CommandDenied, ControllerUnreachable):
        return False
    return True


# ----- the local folder -----
#
# It is made for this user alone, held by a lock while its `unbroken run` lives, and tidied up later. Who holds a folder
# is told by the lock (flock), not by process ids: they mean nothing in another container or on another host. On a
# network file system a lock may hold on one host only, so each boot of a host has folders of its own there.

SOCKET_PATH_LIMIT = 107
_LONGEST_SOCKET = "attempts/99999/rank999999.sock"
LOCK_WAIT_S = 2.0
"""A process that tidies up holds the locks of dead jobs for a moment."""
PREVIOUS = ".previous"


class LocalFolder(NamedTuple):
    """A local folder that is ours until `lock` is closed."""

    paths: LocalPaths
    lock: int
    """-1: this file system has no locks."""


def take_local_folder(name: str, job_dir: Path, node: str) -> LocalFolder:
    """The node's local folder, empty; what an earlier run left in it is kept once, as `<node>.previous`.

    Raises LaunchRefused where it is another user's, or open to others, or where its run still lives.
    """
    digest = hashlib.sha256(str(job_dir).encode()).hexdigest()[:8]
    root = local_dir("", "").absolute()
    node += _mark(root)
    folder = local_dir(f"{name}-{digest}", node).absolute()
    if len(os.fsencode(folder)) + len(_LONGEST_SOCKET) + 1 > SOCKET_PATH_LIMIT:
        short = hashlib.sha256(f"{folder}".encode()).hexdigest()[:12]
        folder = Path(f"/tmp/unbroken-{os.getuid()}/{short}/n")
    try:
        _own(folder.parent.parent, shared=True)
        _own(folder.parent)
        lock = _lock(folder, LOCK_WAIT_S)
        if lock is None:
            raise LaunchRefused(f"this job already runs on this node ({folder}): give --name or --node-name")
        try:
            if folder.exists():
                previous = folder.with_name(f"{folder.name}{PREVIOUS}")
                shutil.rmtree(previous, ignore_errors=True)
                folder.rename(previous)
            _own(folder)
        except OSError:
            release(lock)
            raise
    except OSError as error:
        raise LaunchRefused(
            f"the local folder {folder} cannot be made ({error.strerror}): set UNBROKEN_LOCAL_DIR to one that can"
        ) from error
    return LocalFolder(LocalPaths(folder), lock)


def _own(folder: Path, *, shared: bool = False) -> None:
    """Make `folder`, for this user alone. Sockets in it start processes: nobody else may own it, or put others there.

    `shared`: the one above all jobs. It may be root's, and read by others, and written to where none can remove
    another's (sticky, as /tmp).
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = os.lstat(folder)
    how = "set UNBROKEN_LOCAL_DIR to your own"
    if stat.S_ISLNK(found.st_mode):
        raise LaunchRefused(f"the local folder {folder} is a link: set UNBROKEN_LOCAL_DIR to the folder behind it")
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in ({os.getuid(), 0} if shared else {os.getuid()}):
        raise LaunchRefused(f"the local folder {folder} belongs to somebody else: {how}")
    others = found.st_mode & (0o022 if shared else 0o077)
    if others and not (shared and found.st_mode & stat.S_ISVTX):
        mode = "go-w" if shared else "700"
        raise LaunchRefused(
            f"the local folder {folder} is open to other users ({found.st_mode & 0o7777:o}). Check that its "
            f"files are yours, then `chmod {mode} {folder}`; or {how}"
        )


def _mark(root: Path) -> str:
    """Distinguishes this boot of this host from others that share the folders; empty on a file system of its own."""
    try:
        mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_text(errors="replace"))
        mount = mount_of(os.path.realpath(root), mounts)
        if mount is not None and not mount.network:
            return ""
        return "-" + Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return ""


# ----- locks -----


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name.removesuffix(PREVIOUS)}.lock")


def _lock(folder: Path, wait_s: float = 0.0) -> int | None:
    """Lock the folder: a descriptor; -1 without locks; None where another process holds it. Raises OSError."""
    path, deadline = _lock_file(folder), time.monotonic() + wait_s
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(descriptor, path):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                return None
            time.sleep(0.05)
        except OSError:
            os.close(descriptor)
            return -1
        os.close(descriptor)


def _is_still(descriptor: int, path: Path) -> bool:
    """Whether the file is still in its place: a process that tidies up may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def release(lock: int) -> None:
    if lock >= 0:
        os.close(lock)


def is_held(folder: Path) -> bool:
    """Whether a process holds the local folder, or may hold it, where there are no locks."""
    if not _lock_file(folder).exists():
        return True
    try:
        lock = _lock(folder)
    except OSError:
        return True
    if lock is not None:
        release(lock)
    return lock is None or lock < 0


# ----- afterwards -----


def remove_old_jobs(folder: Path, keep: int = 5) -> None:
    """Delete what earlier jobs left beside `folder`'s job: all but the newest `keep` that are provably over."""
    root, mark = folder.parent.parent, _mark(folder)
    jobs = []
    for job in root.iterdir():
        nodes = [path.parent for path in job.glob("*/node.json")]
        ours = all(node.name.removesuffix(PREVIOUS).endswith(mark) for node in nodes)
        if job != folder.parent and nodes and ours and not any(map(is_held, nodes)):
            jobs.append((max(node.stat().st_mtime for node in nodes), job, nodes))
    for _, job, nodes in sorted(jobs)[: -keep or None]:
        _remove(job, nodes)


def _remove(job: Path, nodes: list[Path]) -> None:
    """Delete a job's folder with all its locks held, so that no run starts in it meanwhile."""
    held: list[int] = []
    try:
        for name in {node.name.removesuffix(PREVIOUS) for node in nodes}:
            lock = _lock(job / name)
            if lock is None or lock < 0:
                return
            held.append(lock)
        shutil.rmtree(job, ignore_errors=True)
    except OSError:
        return
    finally:
        for lock in held:
            with contextlib.suppress(OSError):
                release(lock)


# ----- the training environment's Python, found behind `torchrun` or `python` -----

ASK_TIMEOUT_S = 60.0
"""A first import from a cold network file system takes its time."""


def training_python(program: str, is_python: bool, environment: Mapping[str, str]) -> str:
    """Path of the Python that `program` (torchrun, or a Python itself) runs with. Raises LaunchRefused.

    The path is not resolved: a virtual environment's Python is a link, and means something only by its place.
    """
    path = _find(program, environment)
    python = _behind_scripts(path) if is_python else python_of_script(path, environment) or _sibling(path)
    if not python:
        raise LaunchRefused(f"cannot find the Python that {path} runs: use `python -m torch.distributed.run` instead")
    if not _has_torch(python):
        raise LaunchRefused(f"{python} has no torch: activate the training environment, or give its torchrun's path")
    return python


def _find(program: str, environment: Mapping[str, str]) -> Path:
    found = shutil.which(program, path=environment.get("PATH"))
    beside = Path(sys.executable).parent / program
    if found is None and os.sep not in program and os.access(beside, os.X_OK):
        found = str(beside)  # .venv/bin/unbroken, with the environment not activated
    if found is None:
        raise LaunchRefused(f"{program} is not found: activate the training environment, or give its path")
    return Path(found).absolute()


def _head(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(4096).decode(errors="replace")
    except OSError:
        return ""


def python_word(head: str) -> str:
    """The interpreter that a script's first lines name: a path, or a bare word for PATH. Empty: not a Python."""
    lines = head.split("\n", 2)
    if not lines[0].startswith("#!"):
        return ""
    words = lines[0][2:].split()
    if words and words[0].endswith("/sh") and len(lines) > 1:
        # pip's and uv's way around long paths and spaces: '''exec' "/long path/python" "$0" "$@"
        quoted = re.match(r"""'''exec'\s+(?:"([^"]+)"|'([^']+)'|(\S+))""", lines[1])
        return next((part for part in quoted.groups() if part), "") if quoted else ""
    if words and words[0].endswith("/env"):
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    word = words[0] if words else ""
    return word if re.match(r"(python|pypy)", Path(word).name) else ""


def python_of_script(path: Path, environment: Mapping[str, str]) -> str:
    """The Python of a script like torchrun by its first lines; empty when they name none that exists."""
    word = python_word(_head(path))
    if not word:
        return ""
    found = shutil.which(word, path=environment.get("PATH"))
    return _behind_scripts(Path(found)) if found else ""


def _sibling(path: Path) -> str:
    for name in ("python", "python3"):
        beside = path.parent / name
        if os.access(beside, os.X_OK):
            return _behind_scripts(beside)
    return ""


def _behind_scripts(python: Path) -> str:
    """`python`, or what it runs when it is a script (pyenv's shims, wrappers)."""
    if not _head(python).startswith("#!"):
        return str(python)
    try:
        asked = subprocess.run(
            [str(python), "-c", "import sys; print(sys.executable)"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.strip().rpartition("\n")[2]


def _has_torch(python: str) -> bool:
    """Looked for where it usually is, which costs nothing; else the Python is asked."""
    prefix = Path(python).parent.parent
    for pattern in ("lib*/python3*/site-packages/torch/version.py", "lib*/python3*/dist-packages/torch/version.py"):
        if next(iter(prefix.glob(pattern)), None) is not None:
            return True
    question = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('torch') else 3)"
    try:
        return (
            subprocess.run(
                [python, "-c", question],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=ASK_TIMEOUT_S,
                check=False,
            ).returncode
            != 3
        )
    except (OSError, subprocess.SubprocessError):
        return False
