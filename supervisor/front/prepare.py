"""Everything `unbroken run` settles before it starts anything: the training Python, names, folders, the node's plan.

Raises CommandRefused with one sentence when something does not fit; nothing is running then.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from diagnosis.redact import redact_words
from recovery.actions import Mode
from supervisor.front.placement import scheduler_job, slurm_step
from supervisor.launcher.interpreter import training_python
from supervisor.launcher.torchrun_options import CommandRefused, TorchrunCommand, read_command, starts_with_omp_default
from supervisor.messages import JobSpec
from supervisor.node import LocalPaths, NodePlan, local_dir, start_time, write_atomically
from supervisor.training import launcher_variables, write_stub

SOCKET_PATH_LIMIT = 107
_LONGEST_SOCKET = "attempts/99999/rank999999.sock"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of `unbroken run`. Empty or None: the default."""

    job_dir: str = ""
    name: str = ""
    controller: str = ""
    """`http://host:port` of a controller that runs elsewhere."""
    listen: str = ""
    """Where our own controller listens, `HOST:PORT`."""
    node_name: str = ""
    token_file: str = ""
    spare: bool = False
    spares: int = 0
    max_restarts: int | None = None
    mode: Mode = "enforce"
    checkpoint_dirs: tuple[str, ...] = ()
    restart_args: tuple[str, ...] = ()
    nproc_per_node: str | None = None
    kernel_log: str = "/dev/kmsg"
    site_file: str = ""
    gather_s: float | None = None
    wait_for_nodes_s: float | None = None
    quiet: bool = False
    json: bool = False
    scheduler: str = ""
    """Its name; empty: by the environment."""
    opinion_below: float = 0.0
    """A language model is asked about verdicts less sure than this; 0: there is none to ask."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What will run on this node."""

    plan: NodePlan
    paths: LocalPaths
    keeper_env: dict[str, str]
    runs_controller: bool
    listen: str = ""
    token_file: str = ""
    others_join: bool = True
    """Whether somebody starts the other nodes by hand: not within a Slurm step."""
    notices: tuple[str, ...] = field(default=())

    @property
    def job_dir(self) -> Path:
        return Path(self.plan.job_dir)


def prepare(options: RunOptions, command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> Prepared:
    """Read the command, make the folders, write `node.json`. Raises CommandRefused."""
    step_nodes, order = slurm_step(environment)
    scheduler, scheduler_node = scheduler_job(options.scheduler, environment)
    if step_nodes > max(1, options.spares) and "PET_NNODES" not in environment:
        environment = {**environment, "PET_NNODES": str(step_nodes - options.spares)}
    read = read_command(command, nproc_per_node=options.nproc_per_node, environment=environment)
    if step_nodes:
        read, options = _fit_step(step_nodes, read, options)
    _check_script(read, environment, cwd)
    python = training_python(read.program, read.program_is_python, environment)
    order = read.node_rank if order is None else order
    job_id = str(scheduler.get("scheduler_job", "")) or environment.get("SLURM_JOB_ID", "")
    job_dir, name = _job_folder(options, read, order, job_id, Path(environment.get("SLURM_SUBMIT_DIR") or cwd), cwd)
    node = options.node_name or environment.get("SLURMD_NODENAME", "") or socket.gethostname()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", node):
        raise CommandRefused(f"the node name {node!r} may have letters, digits, dots, dashes and underscores only")
    paths = _local_folder(name, job_dir, node)
    launcher_argv, launcher_env = _launcher(read, name, python, node, paths, environment)
    plan = NodePlan(
        node=node,
        job_dir=str(job_dir),
        local_dir=str(paths.folder),
        spec=msgspec.structs.replace(_spec(options, read, name, command, cwd), **scheduler),
        launcher_argv=launcher_argv,
        launcher_env=launcher_env,
        python=python,
        cwd=str(cwd),
        front_pid=os.getpid(),
        front_start_time=start_time(os.getpid()) or 0,
        controller=_address(options.controller),
        order=order,
        spare=options.spare or (step_nodes > 1 and (order or 0) >= read.nodes_max),
        scheduler_node=scheduler_node,
        restart_args=options.restart_args,
        kernel_log=str(cwd / options.kernel_log) if options.kernel_log else "",
        site_file=_site_file(options, cwd),
        token_file=str(cwd / options.token_file) if options.token_file else "",
    )
    write_atomically(paths.plan, msgspec.json.encode(plan))
    write_atomically(paths.front, b'{"stop":""}')
    return Prepared(
        plan=plan,
        paths=paths,
        keeper_env=_keeper_env(read, environment),
        runs_controller=_controller_is_ours(options, read, order, job_dir),
        listen=options.listen,
        token_file=plan.token_file,
        others_join=plan.spec.nodes_max + plan.spec.spares > 1 and not step_nodes,
        notices=read.notices,
    )


def _site_file(options: RunOptions, cwd: Path) -> str:
    """The site file that was named, once it has been seen to be usable. (A default one may be mended any time.)"""
    if not options.site_file:
        return ""
    path = str(cwd / options.site_file)
    from supervisor import config, site

    try:
        site.load(path)
    except config.ConfigError as error:
        raise CommandRefused(str(error)) from None
    return path


def _spec(options: RunOptions, read: TorchrunCommand, name: str, command: Sequence[str], cwd: Path) -> JobSpec:
    spec = JobSpec(
        name=name,
        nodes_min=read.nodes_min,
        nodes_max=read.nodes_max,
        spares=options.spares,
        mode=options.mode,
        checkpoint_dirs=tuple(str(cwd / folder) for folder in options.checkpoint_dirs),
        has_restart_args=bool(options.restart_args),
        command=redact_words(command),
        opinion_below=options.opinion_below,
    )
    restarts = read.max_restarts if options.max_restarts is None else options.max_restarts
    given = {
        "max_restarts": restarts,
        "gather_s": options.gather_s,
        "wait_for_nodes_s": options.wait_for_nodes_s,
    }
    return msgspec.structs.replace(spec, **{key: value for key, value in given.items() if value is not None})


def _address(text: str) -> str:
    return text.rstrip("/") if "://" in text or not text else f"http://{text}".rstrip("/")


# ----- the command -----


def _check_script(read: TorchrunCommand, environment: Mapping[str, str], cwd: Path) -> None:
    if read.has_unknown_options:
        return  # one of them may take what looks like the script as its value
    if read.kind == "script" and not (cwd / read.script).exists():
        raise CommandRefused(f"there is no script {read.script} in {cwd}")
    if read.kind == "program" and not shutil.which(read.script, path=environment.get("PATH")):
        raise CommandRefused(f"there is no program {read.script} (torchrun's --no-python runs it as it is)")


def _fit_step(nodes: int, read: TorchrunCommand, options: RunOptions) -> tuple[TorchrunCommand, RunOptions]:
    """The command and the options for a Slurm step of so many nodes, which are all that will ever come.

    The last ones are spares: as many as are more than torchrun's. For nodes that the step does not have nobody waits,
    but where the controller is elsewhere: then this step may be one of several.
    """
    if options.controller:
        return read, replace(options, spares=max(options.spares, nodes - read.nodes_max))
    if nodes < read.nodes_min + options.spares:
        raise CommandRefused(
            f"the Slurm step has {nodes} node{'s' * (nodes > 1)}, "
            f"torchrun wants {read.nodes_min} and --spares {options.spares}"
        )
    most = min(read.nodes_max, nodes - options.spares)
    return replace(read, nodes_max=most), replace(options, spares=nodes - most)


def _gpus(environment: Mapping[str, str]) -> int:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in {"", "-1"}])
    try:
        return sum(1 for name in os.listdir("/dev") if re.fullmatch(r"nvidia[0-9]+", name))
    except OSError:
        return 0


def _processes(nproc: str, environment: Mapping[str, str]) -> int | None:
    """The number behind `auto`, `gpu` and `cpu`, as far as it can be told without torch."""
    if nproc.isdigit():
        return int(nproc)
    gpus = _gpus(environment)
    if nproc == "gpu" or (nproc == "auto" and gpus):
        return gpus or None
    return len(os.sched_getaffinity(0)) if nproc in {"cpu", "auto"} else None


def _keeper_env(read: TorchrunCommand, environment: Mapping[str, str]) -> dict[str, str]:
    """The workers' environment as far as it decides how torch is loaded: the keeper loads it for them."""
    env = dict(environment)
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
        raise CommandRefused(f"torchrun cannot be given our Python: {error}") from error
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
    options: RunOptions, read: TorchrunCommand, order: int | None, job_id: str, base: Path, cwd: Path
) -> tuple[Path, str]:
    """The job folder, made, and the job's name. `job_id`: the scheduler's, whose jobs have their folders in `base`."""
    base = base if job_id else cwd
    if (order or 0) > 0 and not (options.controller or options.job_dir or options.name or job_id):
        raise CommandRefused(f"node rank {order} needs --controller ADDRESS, or the first node's --job-dir or --name")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", options.name or job_id or f"{read.label}-{stamp}").strip("-.")[:80]
    folder = cwd / options.job_dir if options.job_dir else base / "unbroken-jobs" / (name or "job")
    if not options.name and options.job_dir:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip("-.")[:80]
    try:
        folder = _make_job_folder(folder, shared=bool(options.name or options.job_dir or job_id))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise CommandRefused(
            f"the job folder {folder} cannot be written ({error.strerror}): give another with --job-dir"
        ) from error
    return folder, (name if options.name or options.job_dir or job_id else folder.name) or "job"


def _make_job_folder(folder: Path, *, shared: bool) -> Path:
    """Make it; one that nobody named is ours alone, whatever else starts in the same second."""
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


def _local_folder(name: str, job_dir: Path, node: str) -> LocalPaths:
    """The node's local folder, empty; what an earlier run left in it is kept once, as `<node>.previous`."""
    digest = hashlib.sha256(str(job_dir).encode()).hexdigest()[:8]
    folder = local_dir(f"{name}-{digest}", node).absolute()
    if len(os.fsencode(folder)) + len(_LONGEST_SOCKET) + 1 > SOCKET_PATH_LIMIT:
        short = hashlib.sha256(f"{folder}".encode()).hexdigest()[:12]
        folder = Path(f"/tmp/unbroken-{os.getuid()}/{short}/n")
    try:
        _own(folder.parent.parent, or_roots=True)
        _own(folder.parent)
        _refuse_second_run(folder)
        if folder.exists():
            previous = folder.with_name(f"{folder.name}.previous")
            shutil.rmtree(previous, ignore_errors=True)
            folder.rename(previous)
        _own(folder)
    except OSError as error:
        raise CommandRefused(
            f"the local folder {folder} cannot be made ({error.strerror}): set UNBROKEN_LOCAL_DIR to one that can"
        ) from error
    return LocalPaths(folder)


def _own(folder: Path, *, or_roots: bool = False) -> None:
    """Make `folder`, for this user alone. Sockets in it start processes: nobody else may own it (but root, above)."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in ({os.getuid(), 0} if or_roots else {os.getuid()}):
        raise CommandRefused(f"the local folder {folder} belongs to somebody else: set UNBROKEN_LOCAL_DIR to your own")


def _refuse_second_run(folder: Path) -> None:
    pid = running_front(folder)
    if pid:
        raise CommandRefused(f"this job runs already on this node (process {pid}): give --name or --node-name")


def running_front(folder: Path) -> int:
    """Process id of the front that uses this local folder; 0 when there is none."""
    try:
        plan = json.loads((folder / "node.json").read_bytes())
        pid, started = int(plan["front_pid"]), int(plan["front_start_time"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return pid if start_time(pid) == started else 0


def remove_old_jobs(folder: Path, keep: int = 5) -> None:
    """Delete what earlier jobs left beside `folder`'s job: all but the newest `keep` that ended."""
    root = folder.parent.parent
    jobs = []
    for job in root.iterdir():
        nodes = [path.parent for path in job.glob("*/node.json")]
        if job != folder.parent and nodes and not any(running_front(node) for node in nodes):
            jobs.append((max(node.stat().st_mtime for node in nodes), job))
    for _, job in sorted(jobs)[: -keep or None]:
        shutil.rmtree(job, ignore_errors=True)


# ----- the controller -----


def _controller_is_ours(options: RunOptions, read: TorchrunCommand, order: int | None, job_dir: Path) -> bool:
    if options.controller or options.spare:
        return False
    if order and (read.nodes_max > 1 or options.spares):
        return False
    return not _controlled(job_dir)


def _controlled(job_dir: Path) -> bool:
    """Whether a controller answers at the address in the job folder."""
    try:
        host, _, port = json.loads((job_dir / "controller.json").read_bytes())["address"].rpartition(":")
        with socket.create_connection((host.partition("://")[2].strip("[]"), int(port)), timeout=1.0):
            return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
