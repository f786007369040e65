"""What the controller costs, and how quickly it answers, with 16 to 4,096 nodes (`unbroken bench control-plane`).

One real controller, and beside it one process of fake agents (`fake_agents`) over real sockets on 127.0.0.1. For each
number of nodes the same story happens: all join and train, a rank dies, an operator restarts the job, the controller
is killed, every agent finds something in its kernel log, an eighth of the nodes falls silent. This process watches
from outside: the controller's log, its journal, /proc, and `/healthz` every 50 ms.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import re
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from supervisor.controller.client import ControllerClient
from supervisor.controller.main import read_controller_file
from supervisor.errors import RunFailed
from supervisor.messages import CommandRequest
from supervisor.paths import daemon_argv
from supervisor.wire.limits import raise_descriptor_limit

PHASES: Final = ("steady", "reads", "death", "restart", "kill", "storm", "mass")
HEALTH_S: Final = 0.05
LIMIT_S: Final = 120.0
SETTLE_S: Final = 3.0
STEADY_S: Final = 10.0
FINDINGS: Final = 20
LOST_SHARE: Final = 0.12
GOALS: Final[dict[str, float]] = {
    "restart_all_s": 1.0,
    "verdict_s": 0.2,
    "reconnect_all_s": 3.0,
    "storm_journal_mb": 20.0,
    "rss_mb": 250.0,
    "mass_incidents": 1,
    "mass_restarts": 1,
    "dropped": 0,
}
"""At 4,096 nodes; none may be exceeded."""
GROWTH: Final = (
    "steady_cpu_percent",
    "rss_peak_mb",
    "join_cpu_s",
    "death_cpu_s",
    "restart_cpu_s",
    "restart_all_s",
    "kill_cpu_s",
    "kill_journal_mb",
    "reconnect_all_s",
    "storm_cpu_s",
    "storm_journal_mb",
    "mass_cpu_s",
    "mass_journal_mb",
)
"""Figures whose growth with the number of nodes is told, as an exponent (1: in proportion)."""
EXPONENT_GOAL: Final = 1.1
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) (\w+) +\S+ (.*)")

Say = Callable[[str], None]
Figures = dict[str, float]


def report(folder: Path, sizes: Sequence[int], phases: Sequence[str], say: Say) -> dict[str, Any]:
    """All sizes, one after the other. Raises RunFailed."""
    raise_descriptor_limit()
    rows: list[Figures] = []
    for nodes in sizes:
        say(f"{nodes} nodes ...")
        with BenchJob(folder / f"nodes{nodes}", nodes) as job:
            rows.append(_story(job, phases, say))
    return {"schema": 1, "load": os.getloadavg()[0], "rows": rows, "growth": growth(rows), "goals": goals(rows)}


def growth(rows: Sequence[Figures]) -> dict[str, float]:
    """Figure -> exponent between the two largest jobs."""
    if len(rows) < 2:
        return {}
    small, large = rows[-2:]
    span = math.log(large["nodes"] / small["nodes"])
    both = [name for name in GROWTH if small.get(name, 0) > 0 and large.get(name, 0) > 0]
    return {name: round(math.log(large[name] / small[name]) / span, 2) for name in both}


def goals(rows: Sequence[Figures]) -> list[dict[str, Any]]:
    """Of the largest job, and how its figures have grown from the one before."""
    last = rows[-1]
    known = [(name, last[name], goal) for name, goal in GOALS.items() if name in last]
    known += [(f"exponent of {name}", value, EXPONENT_GOAL) for name, value in growth(rows).items()]
    return [{"what": name, "value": value, "goal": goal, "met": value <= goal} for name, value, goal in known]


# ----- one job -----


class BenchJob:
    """A controller and its fake agents."""

    def __init__(self, folder: Path, nodes: int) -> None:
        folder.mkdir(parents=True)
        self.nodes = nodes
        self.spares = max(1, nodes // 8)
        self.members = nodes - self.spares
        self.job_dir = folder / "job"
        self.log = folder / "controller.log"
        self.lags: list[float] = []
        self._env = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "UNBROKEN_"))}
        self._env |= {"UNBROKEN_LOCAL_DIR": str(folder / "local"), "HOME": str(folder)}
        self._ended = threading.Event()
        self._errors = open(folder / "agents.log", "wb")  # noqa: SIM115

    def __enter__(self) -> BenchJob:
        self.controller = self._start(restarted=False)
        self.await_("the controller", lambda: read_controller_file(self.job_dir) is not None)
        self.agents = subprocess.Popen(
            daemon_argv("supervisor.bench.fake_agents", str(self.job_dir), str(self.nodes), str(self.spares)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=self._env,
        )
        self._prober = threading.Thread(target=self._probe, daemon=True)
        self._prober.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for process in (self.agents, self.controller):
            process.kill()
            process.wait()
        self._errors.close()

    def _start(self, *, restarted: bool) -> subprocess.Popen[bytes]:
        options = ["--job-dir", str(self.job_dir), "--nodes", str(self.nodes), "--listen", "127.0.0.1:0"]
        options += ["--restarted"] if restarted else []
        with open(self.log, "ab") as log:
            argv = daemon_argv("supervisor.controller.main", *options)
            return subprocess.Popen(argv, stdout=log, stderr=log, env=self._env)

    def kill_controller(self) -> None:
        before = read_controller_file(self.job_dir)
        self.controller.send_signal(signal.SIGKILL)
        self.controller.wait()
        self.controller = self._start(restarted=True)
        self.await_("the next controller", lambda: read_controller_file(self.job_dir) != before)

    def ask(self, do: str, first: int = 0, count: int = 0) -> dict[str, Any]:
        """One command to the fake agents, and their answer."""
        assert self.agents.stdin is not None
        assert self.agents.stdout is not None
        self.agents.stdin.write(msgspec.json.encode({"do": do, "first": first, "count": count}) + b"\n")
        self.agents.stdin.flush()
        line = self.agents.stdout.readline()
        if not line:
            raise RunFailed(f"the fake agents have ended; {self._errors.name} says why")
        answer: dict[str, Any] = msgspec.json.decode(line)
        return answer

    def client(self) -> ControllerClient:
        return ControllerClient.of_job(self.job_dir)

    def journal_mb(self) -> float:
        return sum(path.stat().st_size for path in self.job_dir.glob("journal.*.jsonl")) / 1e6

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.controller.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def waited_s(self) -> float:
        """How long its threads were ready and had no core."""
        tasks = Path(f"/proc/{self.controller.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[1]) for task in tasks) / 1e9

    def rss_mb(self, what: str = "VmRSS") -> float:
        status = Path(f"/proc/{self.controller.pid}/status").read_text()
        return int(status.partition(f"{what}:")[2].split()[0]) * 1024 / 1e6

    def await_(self, what: str, done: Callable[[], bool], limit_s: float = LIMIT_S, every_s: float = 0.02) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            if self.controller.poll() is not None:
                raise RunFailed(f"the controller ended with code {self.controller.returncode}: see {self.log}")
            if time.monotonic() > deadline:
                raise RunFailed(f"not within {limit_s:.0f} s: {what}")
            time.sleep(every_s)

    def all_informed(self, order: str, since: float, count: int) -> float:
        """Wait until `count` nodes have `order` (`2 run`); seconds from `since` to the last of them."""
        found: list[float] = []

        def done() -> bool:
            found[:] = self.ask("stats")["arrived"].get(order, [])
            return len(found) >= count

        self.await_(f"all {count} nodes are told {order!r}", done, every_s=0.1)
        return sorted(found)[count - 1] - since

    def logged(self, pattern: str, since: float) -> list[float]:
        """Seconds from `since` to each line of the controller's log that matches."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            parts = _LINE.match(line)
            if parts is not None and re.search(pattern, parts[4]):
                at = time.mktime(time.strptime(parts[1], "%Y-%m-%d %H:%M:%S")) + int(parts[2]) / 1e3
                found += [at - since] if at >= since - 0.001 else []
        return found

    def first_logged(self, pattern: str, since: float, limit_s: float = LIMIT_S) -> float:
        self.await_(f"`{pattern}` in the log", lambda: bool(self.logged(pattern, since)), limit_s, 0.2)
        return self.logged(pattern, since)[0]

    def _probe(self) -> None:
        """`/healthz` every 50 ms: how long the loop keeps others waiting."""
        while not self._ended.wait(HEALTH_S):
            with contextlib.suppress(OSError, ValueError, AttributeError, http.client.HTTPException):
                found = read_controller_file(self.job_dir)
                assert found is not None
                connection = http.client.HTTPConnection(urlsplit(found.address).netloc, timeout=30.0)
                began = time.monotonic()
                connection.request("GET", "/healthz")
                connection.getresponse().read()
                self.lags.append(time.monotonic() - began)
                connection.close()


@contextlib.contextmanager
def _watched(job: BenchJob, figures: Figures, name: str) -> Iterator[None]:
    """The costs of one phase: CPU, journal, slowest answer, agents that gave their connection up."""
    before, process = job.journal_mb(), job.controller.pid
    cpu_s, waited_s = job.cpu_s(), job.waited_s()
    job.ask("reset")
    job.lags.clear()
    yield
    told = job.ask("stats")
    same = job.controller.pid == process  # killed and started again: all of its time is the phase's
    figures[f"{name}_cpu_s"] = round(job.cpu_s() - same * cpu_s, 2)
    figures[f"{name}_waited_s"] = round(job.waited_s() - same * waited_s, 2)
    figures[f"{name}_journal_mb"] = round(job.journal_mb() - before, 2)
    figures[f"{name}_lag_max_ms"] = round(1e3 * max(job.lags, default=0.0), 1)
    figures[f"{name}_dropped"] = told["unanswered"]
    figures["dropped"] = figures.get("dropped", 0) + told["unanswered"]


def _story(job: BenchJob, phases: Sequence[str], say: Say) -> Figures:
    figures: Figures = {"nodes": job.nodes, "spares": job.spares}
    with _watched(job, figures, "join"):
        began = time.time()
        job.ask("join")
        job.await_("all agents have joined", lambda: job.ask("stats")["connected"] >= job.nodes, every_s=0.1)
        joined_s = time.time() - began
        job.all_informed("1 run", began, job.members)
        figures["join_to_running_s"] = round(job.first_logged(r"^attempt 1 runs", began) - joined_s, 2)
    time.sleep(SETTLE_S)
    for name in PHASES:
        if name in phases:
            known = set(figures)
            with _watched(job, figures, name):
                _PHASES[name](job, figures)
            told = ", ".join(f"{key} {value:g}" for key, value in figures.items() if key not in known)
            say(f"  {name}: {told}")
    figures["rss_peak_mb"] = round(job.rss_mb("VmHWM"), 1)
    return figures


# ----- phases -----


def _steady(job: BenchJob, figures: Figures) -> None:
    before, began, theirs = job.cpu_s(), time.monotonic(), job.ask("stats")["cpu_s"]
    time.sleep(STEADY_S)
    told, took_s = job.ask("stats"), time.monotonic() - began
    figures["steady_cpu_percent"] = round(100 * (job.cpu_s() - before) / took_s, 1)
    figures["agents_cpu_percent"] = round(100 * (told["cpu_s"] - theirs) / took_s, 1)
    figures["beat_us"] = round(1e6 * (job.cpu_s() - before) / max(1, told["beats"]), 1)
    figures["rss_mb"] = round(job.rss_mb(), 1)
    _quantiles(figures, "beat_to_assignment", told["answered_s"])
    _quantiles(figures, "lag", job.lags)


def _quantiles(figures: Figures, name: str, seconds: Sequence[float]) -> None:
    ordered = sorted(seconds) or [0.0]
    figures[f"{name}_p50_ms"] = round(1e3 * statistics.median(ordered), 2)
    figures[f"{name}_p99_ms"] = round(1e3 * ordered[int(0.99 * (len(ordered) - 1))], 2)
    figures[f"{name}_max_ms"] = round(1e3 * ordered[-1], 2)


def _reads(job: BenchJob, figures: Figures) -> None:
    for name in ("status", "timeline"):
        began = time.monotonic()
        job.client().get(f"/v1/{name}")
        figures[f"{name}_ms"] = round(1e3 * (time.monotonic() - began), 1)
        time.sleep(0.3)


def _attempt(job: BenchJob) -> int:
    return int(job.ask("stats")["attempt"])


def _death(job: BenchJob, figures: Figures) -> None:
    attempt, began = _attempt(job), time.time()
    job.ask("die", job.members // 3, 1)
    figures["verdict_s"] = round(job.first_logged(r"^i-\d+: \w+ \(\d+% sure\)", began), 2)
    figures["death_all_s"] = round(job.all_informed(f"{attempt + 1} run", began, job.members), 2)
    time.sleep(SETTLE_S)


def _restart(job: BenchJob, figures: Figures) -> None:
    attempt, began = _attempt(job), time.time()
    job.client().command(CommandRequest(command="restart", reason="bench", by="bench"))
    figures["restart_form_s"] = round(job.all_informed(f"{attempt + 1} form", began, job.members), 2)
    figures["restart_all_s"] = round(job.all_informed(f"{attempt + 1} run", began, job.members), 2)
    time.sleep(SETTLE_S)


def _kill(job: BenchJob, figures: Figures) -> None:
    found = read_controller_file(job.job_dir)
    assert found is not None
    attempt, began = _attempt(job), time.time()
    job.kill_controller()
    figures["listens_s"] = round(time.time() - began, 2)
    epoch, told = str(found.epoch + 1), list[float]()

    def all_back() -> bool:
        told[:] = job.ask("stats")["epochs"].get(epoch, [])
        return len(told) >= job.nodes

    job.await_("all agents have an assignment of the new epoch", all_back, every_s=0.1)
    figures["reconnect_all_s"] = round(max(told) - began, 2)
    time.sleep(SETTLE_S)
    figures["reconnect_new_attempts"] = _attempt(job) - attempt


def _storm(job: BenchJob, figures: Figures) -> None:
    began = time.monotonic()
    job.ask("find", 0, FINDINGS)
    time.sleep(1.1)
    job.await_("all findings are acknowledged", lambda: job.ask("stats")["findings_left"] == 0, every_s=0.1)
    figures["storm_acknowledged_s"] = round(time.monotonic() - began, 2)
    time.sleep(SETTLE_S)


def _mass(job: BenchJob, figures: Figures) -> None:
    lost = max(1, int(LOST_SHARE * job.nodes))
    status = job.client().get("/v1/status")
    incidents, attempt, began = status["incidents_total"], _attempt(job), time.time()
    job.ask("silence", job.members // 3, lost)
    figures["mass_verdict_s"] = round(job.first_logged(r"^i-\d+: \w+ \(\d+% sure\)", began), 2)
    figures["mass_all_s"] = round(_newest_shown(job, attempt, began), 2)
    time.sleep(2 * SETTLE_S)
    status = job.client().get("/v1/status")
    gone = range(job.members // 3, job.members // 3 + lost)
    names = {f"node{index:05d}" for index in gone}
    figures["mass_incidents"] = status["incidents_total"] - incidents
    figures["mass_restarts"] = _attempt(job) - attempt
    figures["mass_lost_wrongly"] = sum(
        node["state"] == "LOST" and node["node"] not in names for node in status["nodes"]
    )


def _newest_shown(job: BenchJob, attempt: int, began: float) -> float:
    """Wait until all members are told to run in the newest attempt after `attempt`: it may take more than one."""
    found: list[float] = []

    def done() -> bool:
        told = job.ask("stats")
        newest = int(told["attempt"])
        found[:] = told["arrived"].get(f"{newest} run", []) if newest > attempt else []
        return len(found) >= job.members

    job.await_("all members are told to run", done, every_s=0.1)
    return max(found) - began


_PHASES: Final[dict[str, Callable[[BenchJob, Figures], None]]] = {
    "steady": _steady,
    "reads": _reads,
    "death": _death,
    "restart": _restart,
    "kill": _kill,
    "storm": _storm,
    "mass": _mass,
}
