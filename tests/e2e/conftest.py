"""The harness of the end-to-end tests: jobs as a user starts them, real torchrun, faults from outside.

`supervise(trainer, ...)` starts `unbroken run ... -- torchrun ...` and gives a `Job`: what its terminal shows, where
its ranks are (told by the ranks themselves, see trainers/rigging.py), what `unbroken` answers about it. When a test
fails, its report ends with the terminal, the journal's story and our own logs. Everything a job started is gone
afterwards.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from click.testing import CliRunner

from supervisor.cli.main import main as unbroken
from tests.conftest import until

TRAINERS = Path(__file__).parent / "trainers"
BIN = Path(sys.executable).parent
STEP_SHOWN = re.compile(r"(?:\bstep:? +(\d+)(?:/| +\x1b)|\biter (\d+):|\biteration +(\d+)/|\| +(\d+)/\d+ \[)")


class Trainer(NamedTuple):
    """How a training script is called. `{out}` is its folder, `{steps}` and `{pace}` are what they say."""

    script: str
    arguments: tuple[str, ...]
    options: tuple[str, ...] = ()
    """Options of `unbroken run` that a user of such a script gives."""

    def command(self, out: Path, steps: int, pace: float) -> list[str]:
        return [str(TRAINERS / self.script), *(a.format(out=out, steps=steps, pace=pace) for a in self.arguments)]


KNOWN = {
    "plain": Trainer("plain.py", ("--out", "{out}", "--steps", "{steps}", "--step-s", "{pace}")),
    "files": Trainer("files.py", ("--out", "{out}", "--steps", "{steps}", "--step-s", "{pace}")),
    "ddp": Trainer("plain.py", ("--out", "{out}", "--steps", "{steps}", "--step-s", "{pace}", "--ddp")),
    "silent": Trainer("silent.py", ("{out}", "{steps}", "{pace}")),
    "nanogpt": Trainer(
        "nanogpt_like.py",
        ("--out_dir={out}", "--max_iters={steps}", "--pace={pace}"),
        ("--restart-args", "--init_from=resume"),
    ),
    "hf": Trainer("hf_trainer.py", ("{out}", "{steps}", "{pace}")),
    "megatron": Trainer("megatron_like.py", ("--save", "{out}", "--train-iters", "{steps}", "--pace", "{pace}")),
    "titan": Trainer(
        "titan_like.py", ("--checkpoint.folder", "{out}", "--training.steps", "{steps}", "--pace", "{pace}")
    ),
    "waits": Trainer("waits.py", ("{out}", "{steps}", "{pace}")),
    "uneven": Trainer("uneven.py", ("{steps}", "{pace}")),
    "in_memory": Trainer("in_memory.py", ("{out}", "{steps}", "{pace}")),
    "sharded": Trainer("sharded.py", ("{out}", "{steps}", "{pace}")),
    "spiky": Trainer("spiky.py", ("--out", "{out}", "--steps", "{steps}", "--step-s", "{pace}")),
    "pauses": Trainer("pauses.py", ("--out", "{out}", "--steps", "{steps}", "--step-s", "{pace}")),
}

WITHOUT_OPTIMIZERS = ("plain", "files", "silent", "waits", "uneven", "spiky", "pauses")
"""Nobody needs torch._dynamo there, for which each keeper would spend more than a second of a core."""


def alive(pid: int, since: float) -> bool:
    """Whether a process lives that was there at `since` (Unix seconds), and is not a later one with its number."""
    try:
        process = psutil.Process(pid)
        return process.create_time() < since + 5 and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def tail(path: Path, lines: int) -> str:
    try:
        text = path.read_bytes()[-200_000:].decode(errors="replace")
    except OSError as error:
        return str(error)
    return "\n".join(text.splitlines()[-lines:])


class Job:
    """One `unbroken run` command: a whole job, or one node of it."""

    def __init__(self, folder: Path, local: Path, out: Path, job_dir: Path, final: Callable[[], bytes]) -> None:
        self.folder, self.local, self.out, self.job_dir = folder, local, out, job_dir
        self.rig = folder / "rig"
        self.terminal = folder / "terminal.txt"
        self.front: subprocess.Popen[bytes]
        self._undisturbed = final

    # ----- starting and ending -----

    def start(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        with open(self.terminal, "ab") as terminal:
            self.front = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, env=dict(env), cwd=cwd
            )

    def kin(self) -> list[psutil.Process]:
        """Every live process that this command started, whoever its parent is by now."""
        mine, found = f"RIG_DIR={self.rig}", []
        for process in psutil.process_iter():
            try:
                environ = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
                if mine in environ.split("\0") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def end(self) -> None:
        """Leave nothing behind, whatever state the job is in."""
        for _ in range(20):
            remaining = self.kin()
            for process in remaining:
                try:
                    process.kill()
                except psutil.Error:
                    continue
            if not remaining:
                break
            time.sleep(0.05)
        self.front.wait(10)

    # ----- what the user sees -----

    def shown(self) -> str:
        return self.terminal.read_text(errors="replace")

    def step(self) -> int:
        """The newest step on the terminal; 0 before the first."""
        found = STEP_SHOWN.findall(self.shown()[-20_000:])
        return int(next(filter(None, found[-1]))) if found else 0

    def expect_alive(self) -> None:
        if self.front.poll() is not None:
            pytest.fail(f"unbroken run ended with {self.front.returncode}", pytrace=True)

    def wait_shown(self, pattern: str, within_s: float = 60) -> re.Match[str]:
        def look() -> re.Match[str] | None:
            match = re.search(pattern, self.shown(), re.MULTILINE)
            if match is None:
                self.expect_alive()
            return match

        match: re.Match[str] = until(look, within_s, f"{pattern!r} on the terminal")
        return match

    def wait_step(self, step: int, within_s: float = 60) -> None:
        def look() -> bool:
            if self.step() >= step:
                return True
            self.expect_alive()
            return self.step() >= step

        until(look, within_s, f"step {step} on the terminal (it shows {self.step()})")

    def wait_checkpoint(self, pattern: str, within_s: float = 60) -> Path:
        found: list[Path] = until(lambda: sorted(self.out.glob(pattern)), within_s, f"a checkpoint {pattern}")
        return found[-1]

    def code(self, within_s: float = 100) -> int:
        """The exit code of the command."""
        try:
            return self.front.wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"unbroken run did not end within {within_s:g} s (step {self.step()})", pytrace=True)

    def last_line(self) -> str:
        return self.shown().rstrip().splitlines()[-1]

    def succeeds(self, within_s: float = 100) -> None:
        """It ends well, with the weights of a run that nothing disturbed."""
        code = self.code(within_s)
        assert code == 0, f"exit code {code}"
        assert (self.out / "final.bin").read_bytes() == self._undisturbed(), "other weights than an undisturbed run's"

    until = staticmethod(until)

    # ----- its processes -----

    def ranks(self) -> dict[int, int]:
        """Rank -> pid of the training processes that live, by their own word."""
        found: dict[int, int] = {}
        for entry in self.rig.glob("pid-*"):
            if entry.suffix == ".new":
                continue
            pid = int(entry.name.removeprefix("pid-"))
            if alive(pid, entry.stat().st_mtime):
                rank = int(entry.read_text())
                assert rank not in found, f"two processes train as rank {rank}: {found[rank]} and {pid}"
                found[rank] = pid
        return found

    def wait_ranks(self, count: int, not_in: Sequence[int] = (), within_s: float = 60) -> dict[int, int]:
        def look() -> dict[int, int] | None:
            try:
                ranks = self.ranks()
            except AssertionError:
                return None  # for a moment, while the old ones are being killed, two may be seen
            return ranks if len(ranks) == count and not set(ranks.values()) & set(not_in) else None

        ranks: dict[int, int] = until(look, within_s, f"{count} ranks (there are {list(self.rig.glob('pid-*'))})")
        return ranks

    def kill(self, rank: int, number: int = signal.SIGKILL) -> int:
        def look() -> int | None:
            try:
                return self.ranks().get(rank)
            except AssertionError:
                return None  # for a moment two may be seen

        pid: int = until(look, 60, f"rank {rank}")
        os.kill(pid, number)
        return pid

    def process(self, role: str, within_s: float = 30) -> psutil.Process:
        """`keeper`, `launcher`, `agent` or `controller` of this command."""

        def look() -> psutil.Process | None:
            try:
                if role == "launcher":
                    launcher = self.kept()["launcher"]
                    return psutil.Process(launcher["pid"]) if launcher and launcher["status"] is None else None
                for process in psutil.Process(self.front.pid).children():
                    if any(re.search(rf"\b{role}\.({role}|main)$|/{role}\.py$", word) for word in process.cmdline()):
                        return process
            except (OSError, psutil.Error):
                pass  # it is dying or not there yet
            return None

        process: psutil.Process = until(look, within_s, f"a process that is the {role}")
        return process

    def kept(self) -> dict[str, Any]:
        """What the keeper says of launcher and workers."""
        (path,) = self.local.glob("*/*/keeper.sock")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(path))
            connection.sendall(b'{"op":"watch"}\n')
            state: dict[str, Any] = json.loads(connection.makefile().readline())
        return state

    # ----- what unbroken says -----

    def ask(self, *arguments: str, check: bool = True) -> str:
        """The output of `unbroken ARGUMENTS --job-dir ...`."""
        command = [str(BIN / "unbroken"), *arguments, "--job-dir", str(self.job_dir)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if check:
            assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout if check else done.stdout + done.stderr

    def told(self, *arguments: str) -> dict[str, Any]:
        """The same as JSON, in this process: tests ask again and again, and a process costs a third of a second."""
        done = CliRunner().invoke(unbroken, [*arguments, "--json", "--job-dir", str(self.job_dir)])
        assert done.exit_code == 0, f"{arguments} ended with {done.exit_code}:\n{done.output}"
        answer: dict[str, Any] = json.loads(done.stdout)
        assert answer["schema"] == 1
        return answer

    def incidents(self) -> list[dict[str, Any]]:
        incidents: list[dict[str, Any]] = self.told("incidents")["incidents"]
        return incidents

    def state(self) -> str:
        try:
            state: str = self.told("status")["state"]
        except (AssertionError, KeyError, ValueError):
            return ""
        return state.upper()

    # ----- when a test fails -----

    def report(self) -> Iterator[tuple[str, str]]:
        yield "terminal", tail(self.terminal, 60)
        if self.job_dir.exists():
            yield "timeline", self.ask("timeline", check=False)
            for journal in sorted(self.job_dir.glob("journal.*.jsonl")):
                yield journal.name, "\n".join(line[:400] for line in tail(journal, 40).splitlines())
        for log in sorted(self.local.rglob("*.log")):
            yield str(log.relative_to(self.local)), tail(log, 40)
        yield "processes", "\n".join(f"{p.pid} {p.status()} {' '.join(p.cmdline())[:150]}" for p in self.kin())


@pytest.fixture
def supervise(
    jobs: list[Job], tmp_path: Path, undisturbed: Callable[[Sequence[str], int], bytes]
) -> Iterator[Callable[..., Job]]:
    """Start a job as a user would; everything it started is ended with the test."""
    locals_: list[Path] = []

    def start(
        name: str = "plain",
        *extra: str,
        steps: int = 60,
        pace: float = 0.05,
        nproc: int = 2,
        world: int | None = None,
        options: Sequence[str] = (),
        torchrun: Sequence[str] = (),
        rig: str = "",
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        node: str = "",
        out: Path | None = None,
        folder: Path | None = None,
        ends: int | None = None,
        healthy: tuple[str, ...] | None = None,
        restart_args: bool = True,
        owner: int | None = None,
    ) -> Job:
        """`extra`: more arguments of the script. `options`: of `unbroken run`. `ends`: the reference's last step.
        `healthy`: the reference's extra arguments. `prefix`: what stands before the command. `node`: one of several."""
        trainer = KNOWN[name]
        folder = folder or tmp_path
        out = out or folder / "out"
        out.mkdir(parents=True, exist_ok=True)
        local = Path(tempfile.mkdtemp(prefix="ub-"))
        locals_.append(local)

        def final() -> bytes:
            quick = trainer.command(Path("{out}"), ends or steps, 0.001)
            return undisturbed([*quick, *(extra if healthy is None else healthy)], world or nproc)

        job = Job(folder / node if node else folder, local, out, folder / "job", final)
        jobs.append(job)
        job.rig.mkdir(parents=True, exist_ok=True)
        if owner is not None:
            for path in (out, local, job.rig):
                os.chown(path, owner, owner)
        command = [*prefix, str(BIN / "unbroken"), "run", "--job-dir", str(job.job_dir), *options]
        command += trainer.options if restart_args else ()
        command += ["--", str(BIN / "torchrun"), "--nproc-per-node", str(nproc), *torchrun]
        command += [*trainer.command(out, steps, pace), *extra]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("UNBROKEN_", "TORCHELASTIC", "RIG"))}
        kernel_log = job.rig / "kernel"  # the machine's has what other tests, and their jobs, did to it
        kernel_log.touch()
        more = {"UNBROKEN_LOCAL_DIR": str(local), "RIG_DIR": str(job.rig), "RIG": rig}
        more["UNBROKEN_KERNEL_LOG"] = str(kernel_log)
        if name in WITHOUT_OPTIMIZERS and "--ddp" not in extra:
            more["UNBROKEN_WARM"] = "torch"
        more |= env or {}
        job.start(command, inherited | more, folder)
        return job

    yield start
    for job in jobs:
        job.end()
    for local in locals_:
        shutil.rmtree(local, ignore_errors=True)


FLAW = """
import os
from diagnosis.health import Check, healthy, unhealthy

class FlawProbe:
    name, every_s, deadline_s = "flaw", 0.2, 5.0
    checks = (
        Check(id="flaw", what="w", source="s", threshold="t", failure_class="gpu_ecc_uncorrectable", scope="gpu"),
    )
    def look(self, place, now):
        gpu = "0000:c1:00"
        if not os.path.exists(os.environ["FLAW"]):
            return [healthy("flaw", gpu, gpu=gpu)]
        pids = [pid for pid, rank in place.job.ranks.items() if rank == 1]
        return [unhealthy("flaw", "two uncorrected errors", gpu, gpu=gpu, pids=pids)]
"""


@pytest.fixture
def flaw(tmp_path: Path) -> dict[str, str]:
    """A plug-in that sees a flaw of a GPU once the file FLAW is there; the environment in which it is found."""
    info = tmp_path / "plug-in/flaw-0.dist-info"
    info.mkdir(parents=True)
    (info.parent / "flaw_probe.py").write_text(FLAW)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flaw\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[unbroken.probes]\nflaw = flaw_probe:FlawProbe\n")
    path = os.pathsep.join(filter(None, [str(info.parent), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "FLAW": str(tmp_path / "flaw")}
