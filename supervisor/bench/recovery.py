"""How long a first start, a killed rank, a stopped one and one in a deadlock take, beside plain torchrun in one run."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import os
import re
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from supervisor.controller.journal import read_history
from supervisor.controller.report import fold, timeline_rows
from supervisor.demo.watched_run import WatchedRun, torchrun, unbroken
from supervisor.errors import RunFailed

SCRIPT = Path(__file__).with_name("toy.py")
UP = re.compile(r"rank (\d+) up, pid (\d+)")
RESTARTS = 1000
LIMIT_S = 120.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Script(NamedTuple):
    """How the toy is run."""

    ranks: int = 2
    steps: int = 100_000
    step_ms: float = 20.0
    save_every: int = 20
    path: Path | None = None
    """A script of the user's own: `--out`, `--steps` and `--step-ms`, and lines like those of the toy."""

    def command(self, out: Path) -> list[str]:
        options = {"--steps": self.steps, "--step-ms": self.step_ms}
        if self.path is None:
            options["--save-every"] = self.save_every
        arguments = [f"{name}={value}" for name, value in options.items()]
        return ["--nproc-per-node", str(self.ranks), str(self.path or SCRIPT), f"--out={out}", *arguments]


def plain(script: Script, folder: Path) -> WatchedRun:
    """Plain torchrun at its best: with its shared store on, half of its restarts fail (docs/benchmarks.md)."""
    command = [*torchrun(), f"--max-restarts={RESTARTS}", *script.command(folder / "out")]
    return WatchedRun(command, folder=folder, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def supervised(script: Script, folder: Path, env: Mapping[str, str] | None = None) -> WatchedRun:
    """The same under unbroken, with nothing configured but where its files are."""
    command = unbroken("run", "--job-dir", str(folder / "job"), "--", *torchrun(), *script.command(folder / "out"))
    places = {"UNBROKEN_LOCAL_DIR": str(folder / "l"), "BENCH_FAULTS": str(folder)}
    return WatchedRun(command, folder=folder, env={**places, **(env or {})})


class Ranks(NamedTuple):
    """One generation of workers."""

    pids: dict[int, int]
    begun_at: float
    """When the last of them was created, monotonic."""
    reported_at: float
    """When the last of them had printed its first line."""


def wait_for_ranks(run: WatchedRun, script: Script, after: float) -> Ranks:
    """The generation of workers that reported for duty since `after`. Raises RunFailed."""
    deadline = time.monotonic() + LIMIT_S
    pids: dict[int, int] = {}
    created: list[float] = []
    reported = after
    while len(pids) < script.ranks:
        line, match = run.wait_for(UP, after=after, timeout_s=deadline - time.monotonic(), test=_any_but(pids))
        reported = max(reported, line.at)
        pids[int(match[1])] = int(match[2])
        created.append(process_created(int(match[2])))
    return Ranks(pids, max(created), reported)


def process_created(pid: int) -> float:
    """When a process was created on the monotonic clock, to 10 ms. Raises RunFailed when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        raise RunFailed(f"process {pid} is gone") from None
    since_boot = int(stat[stat.rfind(")") + 2 :].split()[19]) / TICKS_PER_S
    return since_boot - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()


def weights_sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "out" / "weights.bin").read_bytes()).hexdigest()


def _any_but(pids: Mapping[int, int]) -> Callable[[re.Match[str]], bool]:
    known = frozenset(pids)
    return lambda match: int(match[1]) not in known


STEPS_BEFORE = 45
"""Before each fault: two checkpoints of new work."""
KILLS = 2
"""Killed ranks in each run."""
HANG_LIMIT_S = 30.0

Starter = Callable[[Script, Path], WatchedRun]


class Samples(NamedTuple):
    """Seconds, one value a repetition."""

    first_start: list[float]
    """Command to first step."""
    new_workers: list[float]
    """Killed rank to the creation of the last new worker."""
    new_step: list[float]
    """Killed rank to the first step of the new workers."""


class HangTimes(NamedTuple):
    """Seconds from the fault."""

    slowest_step: float
    """The slowest of the steps just before."""
    suspected: float
    confirmed: float


def measure(start: Starter, folder: Path, samples: Samples) -> None:
    """One run: its first start, then two killed ranks."""
    script = Script()
    folder.mkdir(parents=True)
    run = start(script, folder)
    try:
        samples.first_start.append(run.wait_for_step(1, timeout_s=LIMIT_S).at - run.started)
        for _ in range(KILLS):
            _kill_one(run, script, samples)
    finally:
        run.close(grace_s=20.0)


def _kill_one(run: WatchedRun, script: Script, samples: Samples) -> None:
    run.wait_for_step(run.last_step() + STEPS_BEFORE, after=time.monotonic(), timeout_s=LIMIT_S)
    victim = next(int(line.text.split()[-1]) for line in reversed(run.lines) if line.text.startswith("rank 1 up"))
    at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    workers = wait_for_ranks(run, script, at)
    samples.new_workers.append(workers.begun_at - at)
    samples.new_step.append(run.wait_for_step(1, after=workers.reported_at, timeout_s=LIMIT_S).at - at)


def measure_hang(fault: str, folder: Path) -> HangTimes:
    """A rank that is stopped (`stop`) or in a deadlock (`deadlock`) under unbroken. Raises RunFailed."""
    script = Script()
    folder.mkdir(parents=True)
    run = supervised(script, folder)
    try:
        ranks = wait_for_ranks(run, script, run.started)
        run.wait_for_step(STEPS_BEFORE, timeout_s=LIMIT_S)
        recent = [line.at for line in run.lines if "step " in line.text][-STEPS_BEFORE:]
        at = time.time()
        if fault == "stop":
            os.kill(ranks.pids[1], signal.SIGSTOP)
        else:
            (folder / "rank1.hang").touch()
        suspected = _time_of(folder / "job", ("hang_suspected",), at)
        confirmed = _time_of(folder / "job", ("hang_confirmed", "rank_wake_wanted"), at)
    finally:
        run.close(grace_s=20.0)
    slowest = max(later - earlier for earlier, later in itertools.pairwise(recent))
    return HangTimes(slowest, suspected - at, confirmed - at)


def _time_of(job_dir: Path, kinds: tuple[str, ...], after: float) -> float:
    """Unix time of the first row of one of these kinds in the job's timeline."""
    deadline = time.monotonic() + HANG_LIMIT_S
    while time.monotonic() < deadline:
        for row in timeline_rows(read_history(job_dir)):
            if row["kind"] in kinds and unix_time(row) >= after:
                return unix_time(row)
        time.sleep(0.1)
    raise RunFailed(f"no {' or '.join(kinds)} within {HANG_LIMIT_S:.0f} s")


def unix_time(row: dict[str, Any]) -> float:
    return datetime.datetime.fromisoformat(row["at"].replace("Z", "+00:00")).timestamp()


def report(folder: Path, repetitions: int, say: Callable[[str], None]) -> dict[str, Any]:
    """All measurements as one JSON object; medians decide."""
    torchrun, ours = Samples([], [], []), Samples([], [], [])
    for number in range(1, repetitions + 1):  # in turns: the machine's other load changes
        say(f"{number} of {repetitions}: plain torchrun (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), then unbroken")
        measure(plain, folder / f"torchrun-{number}", torchrun)
        measure(supervised, folder / f"unbroken-{number}", ours)
    rows = [
        {"what": what, "torchrun_s": theirs, "unbroken_s": mine, "ratio": _ratio(mine, theirs)}
        for what, theirs, mine in zip(Samples._fields, torchrun, ours, strict=True)
    ]
    hangs: dict[str, Any] = {}
    for fault in ("stop", "deadlock"):
        say(f"a proven hang of one rank: {fault}")
        hangs[fault] = measure_hang(fault, folder / fault)._asdict()
    return {"schema": 1, "repetitions": repetitions, "load": os.getloadavg()[0], "recovery": rows, "hang": hangs}


XID = "NVRM: Xid (PCI:0000:c1:00): 79, pid={pid}, name=python, GPU has fallen off the bus."
GRACE_S = 1.5
"""After an Xid 79 whose rank hangs: from one slow step later to the first new step."""
LOOK_S = 0.002
SLOWEST = re.compile(r"rank 1 hangs, its slowest step took ([\d.]+) s")


class XidTimes(NamedTuple):
    """Seconds from the kernel's line about the device of a rank that hangs from then on."""

    slow_step: float
    """The slowest of its last 50, as it says itself: lines of the terminal are up to 0.2 s late."""
    finding: float
    """Until the controller has it: an incident is open."""
    verdict: float
    """Until it is proven that the rank hangs, and the node is cordoned."""
    new_step: float
    """Until the first new step, on the spare."""
    phases: dict[str, float]
    """What the time from the verdict on went to."""

    @property
    def after_slow_step(self) -> float:
        return self.new_step - self.slow_step


def measure_xid(folder: Path, step_ms: float) -> XidTimes:
    """Two nodes with a rank each, and a spare; the device of rank 1 fails. Raises RunFailed."""
    script = Script(ranks=1, step_ms=step_ms)
    folder.mkdir(parents=True)
    run = WatchedRun(_one_of_three("a", script, folder, "--spares=1"), folder=folder, env=_places(folder))
    try:
        run.join(_one_of_three("b", script, folder, "--spares=1"), folder=folder, env=_places(folder))
        run.join(_one_of_three("c", script, folder, "--spares=1", "--spare"), folder=folder, env=_places(folder))
        pid = int(run.wait_for(r"rank 1 up, pid (\d+)", timeout_s=LIMIT_S)[1][1])
        run.wait_for_step(STEPS_BEFORE, timeout_s=LIMIT_S)
        attempt = fold(folder / "job").job.attempt
        assert attempt is not None
        kernel_log = folder / f"{attempt.rank_nodes[1]}.kernel"
        order = folder / "rank1.hang"
        order.touch()
        while order.exists():  # until the rank hangs
            time.sleep(LOOK_S)
        at, unix = time.monotonic(), time.time()
        kernel_log.write_text(XID.format(pid=pid) + "\n")
        up, _ = run.wait_for(r"rank 1 up", after=at, timeout_s=LIMIT_S)
        new_step = run.wait_for_step(1, after=up.at, timeout_s=LIMIT_S).at - at
        slow_step = float(run.wait_for(SLOWEST, timeout_s=LIMIT_S)[1][1])
        finding = _time_of(folder / "job", ("finding_arrived",), unix) - unix
        verdict = _time_of(folder / "job", ("hang_confirmed",), unix) - unix
        phases = _phases(folder / "job")
    finally:
        run.close(grace_s=20.0)
    return XidTimes(slow_step, finding, verdict, new_step, phases)


def _phases(job_dir: Path) -> dict[str, float]:
    """Of the newest incident, once it is closed: what its recovery took. Raises RunFailed."""
    deadline = time.monotonic() + HANG_LIMIT_S
    while time.monotonic() < deadline:
        incident = fold(job_dir).job.view().incidents[-1]
        if incident.closed_at is not None:
            return {name: took for name, took in incident.seconds.items() if name not in ("detect", "diagnose")}
        time.sleep(0.1)
    raise RunFailed(f"the job did not recover within {HANG_LIMIT_S:.0f} s")


def _one_of_three(name: str, script: Script, folder: Path, *options: str) -> list[str]:
    kernel_log = folder / f"{name}.kernel"
    kernel_log.touch()
    places = ("--job-dir", str(folder / "job"), "--kernel-log", str(kernel_log))
    command = (*torchrun(), "--nnodes=2", *script.command(folder / "out"))
    return unbroken("run", "--node-name", name, *options, *places, "--", *command)


def _places(folder: Path) -> dict[str, str]:
    return {"UNBROKEN_LOCAL_DIR": str(folder / "l"), "BENCH_FAULTS": str(folder)}


def report_xid(folder: Path, repetitions: int, say: Callable[[str], None]) -> dict[str, Any]:
    """An Xid 79 whose rank hangs, with quick and with slow steps."""
    rows = []
    for number in range(1, repetitions + 1):
        for step_ms in (20.0, 200.0):
            say(f"{number} of {repetitions}: a GPU falls off the bus, its rank hangs; steps of {step_ms:.0f} ms")
            times = measure_xid(folder / f"xid-{number}-{step_ms:.0f}", step_ms)
            rows.append({"step_ms": step_ms, **times._asdict(), "after_slow_step": times.after_slow_step})
    return {"schema": 1, "repetitions": repetitions, "load": os.getloadavg()[0], "xid": rows, "goal_s": GRACE_S}


TRAINED_S = 30.0
"""So long a script trains before its rank is killed: longer than the imports of the next ranks take beside it."""
SCRIPT_STEPS, SCRIPT_STEP_MS = 500, 100.0


class ScriptTimes(NamedTuple):
    """One run of a user's script with one killed rank."""

    new_workers: float
    new_step: float
    weights: str
    """SHA-256 of the weights at the end."""


def measure_script(start: Starter, folder: Path, path: Path) -> ScriptTimes:
    """Let it train for a while, kill rank 1, and let it finish. Raises RunFailed."""
    script = Script(steps=SCRIPT_STEPS, step_ms=SCRIPT_STEP_MS, path=path)
    folder.mkdir(parents=True)
    run = start(script, folder)
    try:
        first = run.wait_for_step(1, timeout_s=LIMIT_S)
        time.sleep(max(0.0, first.at + TRAINED_S - time.monotonic()))
        victim = next(int(line.text.split()[-1]) for line in reversed(run.lines) if line.text.startswith("rank 1 up"))
        at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        workers = wait_for_ranks(run, script, at)
        step = run.wait_for_step(1, after=workers.reported_at, timeout_s=LIMIT_S)
        code = run.wait_for_end(LIMIT_S + 2 * SCRIPT_STEPS * SCRIPT_STEP_MS / 1000)
        if code:
            raise RunFailed(f"it ended with {code}")
    finally:
        run.close(grace_s=20.0)
    return ScriptTimes(workers.begun_at - at, step.at - at, weights_sha256(folder))


def report_script(folder: Path, path: Path, repetitions: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Killed rank to first new step of a script, beside plain torchrun; whether all runs end with the same weights."""
    torchrun, ours = [], []
    for number in range(1, repetitions + 1):
        say(f"{number} of {repetitions}: {path.name} under plain torchrun, then under unbroken")
        torchrun.append(measure_script(plain, folder / f"torchrun-{number}", path))
        ours.append(measure_script(supervised, folder / f"unbroken-{number}", path))
    rows = []
    for what in ("new_workers", "new_step"):
        theirs, mine = [getattr(one, what) for one in torchrun], [getattr(one, what) for one in ours]
        rows.append({"what": what, "torchrun_s": theirs, "unbroken_s": mine, "ratio": _ratio(mine, theirs)})
    equal = len({one.weights for one in (*torchrun, *ours)}) == 1
    return {
        "schema": 1,
        "script": str(path),
        "repetitions": repetitions,
        "load": os.getloadavg()[0],
        "recovery": rows,
        "hang": {},
        "equal_weights": equal,
    }


def _ratio(mine: list[float], theirs: list[float]) -> float:
    return statistics.median(mine) / statistics.median(theirs)
