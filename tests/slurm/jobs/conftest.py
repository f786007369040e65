"""Training jobs on the cluster of ../conftest.py, as a user submits them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

BIN = Path(sys.executable).parent
DEPLOY = Path(__file__).parents[3] / "deploy" / "slurm"
TRAINER = Path(__file__).parents[2] / "e2e" / "trainers" / "plain.py"
LOCAL = "/mnt"
STEPS = 60
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Job:
    """A batch job as a user submits it: a script of deploy/slurm, whose last words are another training script."""

    ended = ENDED

    def __init__(self, cluster: Any, folder: Path, weights: Callable[[], bytes], user: Sequence[str] = ()) -> None:
        """`user`: what makes a command somebody else's."""
        self.cluster = cluster
        self.user = user
        self.folder = folder
        self.out = folder / "out"
        self.id = ""
        self._weights = weights

    def submit(self, script: str, training: Sequence[str], options: Sequence[str], run: Sequence[str]) -> None:
        """`options`: of sbatch. `run`: of `unbroken run`."""
        text = (DEPLOY / script).read_text()
        ours, theirs = "--nproc-per-node 8 train.py", shlex.join(["--nproc-per-node", "1", *training])
        command = "  unbroken run "
        assert text.count(ours) == text.count(command) == 1
        text = text.replace(ours, theirs).replace(command, f"{command}{shlex.join(run)} ")
        (self.folder / script).write_text(text)
        env = {"UNBROKEN_LOCAL_DIR": f"{LOCAL}/unbroken", "RIG_DIR": f"{LOCAL}/rig", "OMP_NUM_THREADS": "1"}
        env["UNBROKEN_WARM"] = "torch"  # the trainer has no optimizer of torch's
        nvml = {"LD_LIBRARY_PATH": "", "FAKE_NVML_STATE": "/state", "FAKE_NVML_EVENTS": "/events"}
        env |= {name: f"{LOCAL}/nvml{end}" for name, end in nvml.items()}
        said = self.cluster.run("ctl", *self.user, "sbatch", *options, script, env=env, cwd=self.folder)
        self.id = said.split()[-1]

    @property
    def job_dir(self) -> Path:
        return self.folder / "unbroken-jobs" / self.id

    # ----- what the user sees -----

    def shown(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.folder.glob(f"*-{self.id}.log"))

    def step(self) -> int:
        """The newest step in its log; 0 before the first."""
        found = re.findall(r"^step (\d+)/", self.shown(), re.MULTILINE)
        return int(found[-1]) if found else 0

    def wait_step(self, step: int, within_s: float = 60) -> None:
        self.cluster.until(lambda: self.step() >= step, within_s, lambda: f"step {step} (it shows {self.step()})")

    def wait_shown(self, pattern: str, within_s: float = 60) -> None:
        self.cluster.until(
            lambda: re.search(pattern, self.shown(), re.MULTILINE), within_s, f"{pattern!r} in the job's log"
        )

    def slurm(self, what: str = "%T") -> str:
        """A word of squeue's about the job; empty once it is forgotten."""
        return self.cluster.run("ctl", "squeue", "-h", "-t", "all", "-j", self.id, "-o", what, check=False).strip()

    def wait_slurm(self, *states: str, within_s: float = 60) -> str:
        self.cluster.until(
            lambda: self.slurm() in states, within_s, lambda: f"{states} (it is {self.slurm('%T %N %r')})"
        )
        return self.slurm()

    def succeeds(self, within_s: float = 90) -> None:
        """It ends well, with the weights of a run that nothing disturbed."""
        assert self.wait_slurm(*ENDED, within_s=within_s) == "COMPLETED"
        assert (self.out / "final.bin").read_bytes() == self._weights(), "other weights than an undisturbed run's"

    # ----- its processes -----

    def ranks(self) -> dict[int, tuple[str, int]]:
        """Rank -> its node and process id there, of the training processes that live, by their own word."""
        found: dict[int, tuple[str, int]] = {}
        for rank, where in self._signed():
            assert rank not in found, f"rank {rank} runs twice: {found[rank]} and {where}"
            found[rank] = where
        return found

    def _nodes(self) -> list[str]:
        """Those that have not been killed."""
        return [node for node in self.cluster.nodes if self.cluster.hosts[node].up]

    def _signed(self) -> Iterator[tuple[int, tuple[str, int]]]:
        for node in self._nodes():
            root = self.cluster.hosts[node].root
            for entry in (root / LOCAL[1:] / "rig").glob("pid-*"):
                pid = int(entry.name.removeprefix("pid-").removesuffix(".new"))
                if entry.suffix != ".new" and _alive(root, pid):
                    yield int(entry.read_text()), (node, pid)

    def living(self) -> list[str]:
        """Every process of the job that lives on a node, Slurm's own left out."""
        found = []
        for node in self._nodes():
            for process in (self.cluster.hosts[node].root / "proc").glob("[0-9]*"):
                try:
                    environ = (process / "environ").read_bytes().split(b"\0")
                    words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if f"SLURM_JOB_ID={self.id}".encode() in environ and words and "slurmstepd" not in words:
                    found.append(f"{node} {process.name} {words[:100]}")
        return found

    def places(self) -> dict[int, str]:
        return {rank: node for rank, (node, _) in sorted(self.ranks().items())}

    def wait_places(self, places: Mapping[int, str], within_s: float = 60) -> None:
        def look() -> bool:
            with contextlib.suppress(AssertionError):  # for a moment, while old ones are being killed, two may be seen
                return self.places() == places
            return False

        self.cluster.until(look, within_s, lambda: f"ranks at {places}")

    def wait_places_but(self, places: Mapping[int, str], old: tuple[str, int], within_s: float = 60) -> None:
        """The same while `old`, a rank's node and process that nobody can reach, lives on."""

        def look() -> bool:
            found = {}
            for rank, where in self._signed():
                if where != old:
                    found[rank] = where[0]
            return found == places

        self.cluster.until(look, within_s, lambda: f"ranks at {places}: {list(self._signed())}")

    def kill(self, rank: int) -> None:
        def look() -> tuple[str, int] | None:
            with contextlib.suppress(AssertionError):  # for a moment two may be seen
                return self.ranks().get(rank)
            return None

        node, pid = self.cluster.until(look, 60, f"rank {rank}")
        self.cluster.run(node, "kill", "-9", str(pid))

    # ----- what unbroken says -----

    def ask(self, *arguments: str, check: bool = True) -> str:
        """The output of `unbroken ARGUMENTS --job-dir ...`."""
        return self.cluster.run("ctl", *self.user, "unbroken", *arguments, "--job-dir", str(self.job_dir), check=check)

    def told(self, *arguments: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.ask(*arguments, "--json"))
        return answer

    def incidents(self) -> list[dict[str, Any]]:
        incidents: list[dict[str, Any]] = self.told("incidents")["incidents"]
        return incidents

    def report(self) -> Iterator[tuple[str, str]]:
        yield (
            "slurm",
            self.slurm("%T %N %r %S") + "\n" + self.cluster.run("ctl", "sinfo", "-N", "-o", "%N %T %E", check=False),
        )
        yield "log", self.shown()[-6000:]
        yield "timeline", self.ask("timeline", check=False)[-6000:]
        for journal in sorted(self.job_dir.glob("journal.*.jsonl")):
            yield journal.name, "\n".join(line[:300] for line in journal.read_text().splitlines()[-40:])
        for node in self._nodes():
            for log in sorted((self.cluster.hosts[node].root / LOCAL[1:] / "unbroken").rglob("*.log")):
                yield f"{node} {log.name}", log.read_text(errors="replace")[-3000:]
        yield "slurmctld", (self.cluster.folder / "slurmctld.log").read_text()[-4000:]


def _alive(root: Path, pid: int) -> bool:
    try:
        return (root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The NVML that does what a text file says (tests/fake_nvml)."""
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).parents[2] / "fake_nvml" / "fake_nvml.c"
    flags = ("-shared", "-fPIC", "-O1", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(library), str(source), "-lpthread")
    subprocess.run(["gcc", *flags], check=True, timeout=60)
    return library


@pytest.fixture
def gpus(cluster: Any, nvml_library: Path) -> Callable[[str], Callable[..., None]]:
    """Give a node eight GPUs; what comes back tells of an event of one: `event(gpu, kind, data)`."""

    def give(node: str) -> Callable[..., None]:
        folder = cluster.hosts[node].root / LOCAL[1:] / "nvml"
        folder.mkdir()
        shutil.copy(nvml_library, folder)
        (folder / "state").write_text("count 8\n*.memory_used 0\n")
        (folder / "events").touch()

        def event(gpu: int, kind: int, data: int) -> None:
            with open(folder / "events", "a") as events:
                events.write(f"{gpu} {kind} {data}\n")

        return event

    return give


@pytest.fixture
def submit(
    jobs: list[Job], cluster: Any, tmp_path: Path, undisturbed: Callable[[Sequence[str], int], bytes]
) -> Callable[..., Job]:
    """Submit a job of `nodes` nodes, `spares` of them spares, one rank on each of the others.

    `script`: more arguments of the training script, `run` of `unbroken run`, `options` of sbatch.
    """

    def submit(
        nodes: int = 2,
        spares: int = 0,
        *,
        pace: float = 0.1,
        script: Sequence[str] = (),
        options: Sequence[str] = (),
        run: Sequence[str] = (),
        as_nobody: bool = False,
    ) -> Job:
        folder = cluster.folder / "home" if as_nobody else tmp_path

        def weights() -> bytes:
            return undisturbed(
                [str(TRAINER), "--out", "{out}", "--steps", str(STEPS), "--step-s", "0.001"], nodes - spares
            )

        job = Job(cluster, folder, weights, NOBODY if as_nobody else ())
        jobs.append(job)
        job.out.mkdir(parents=True, exist_ok=True)
        if as_nobody:
            for path in (folder, job.out):
                os.chown(path, 65534, 65534)
        training = [str(TRAINER), "--out", str(job.out), "--steps", str(STEPS), "--step-s", str(pace), *script]
        batch = "train-spares.sbatch" if spares else "train.sbatch"
        job.submit(batch, training, [f"--nodes={nodes}", *options], run)
        return job

    return submit
