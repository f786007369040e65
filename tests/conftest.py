"""Which tests run here, in which order, and runs that nothing disturbed to compare with.

Markers say what a test needs; this says what the machine lacks and how to get it.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest


def _lacking(config: pytest.Config) -> dict[str, str]:
    """Marker -> how to get what its tests need; only what is lacking here."""
    as_root, with_ip = os.geteuid() == 0, shutil.which("ip")
    with_slurm = all(map(shutil.which, ("slurmctld", "slurmd", "munged", "ip")))
    needs = {
        "gpu": (Path("/proc/driver/nvidia/version").exists(), "run it on a machine with an NVIDIA GPU and driver"),
        "root": (as_root and with_ip, "install iproute2" if as_root else "run it as root"),
        "browser": (
            shutil.which("chromium") is not None and importlib.util.find_spec("playwright") is not None,
            "apt-get install chromium, and make",
        ),
        "croissant": ((Path(__file__).parents[1] / ".venv-croissant/bin/python").exists(), "make croissant"),
        "prometheus": (
            all(map(shutil.which, ("prometheus", "promtool", "prometheus-alertmanager", "amtool"))),
            "apt-get install prometheus prometheus-alertmanager",
        ),
        "slurm": (as_root and with_slurm, "apt-get install slurm-wlm munge iproute2, and run it as root"),
        "systemd": (shutil.which("systemd-analyze") is not None, "apt-get install systemd"),
        "e2e": (importlib.util.find_spec("torch"), "install torch (make does)"),
        "slow": (config.getoption("--slow"), "make test ARGS=--slow"),
    }
    return {marker: f"{marker}: {how}" for marker, (there, how) in needs.items() if not there}


EDGES = "agent bench check cli controller demo diagnose metrics node_health opinion run".split()
BESIDE_OTHERS = (
    "tests/bench/",
    "tests/training/",
    "tests/recovery/test_quarantine.py",
    "tests/recovery/test_worker.py",
    "tests/recovery/schedulers/",
    "tests/supervisor/test_blocking.py",
    "tests/supervisor/test_cli.py",
    "tests/diagnosis/flight/test_beside_torch.py",
    "tests/diagnosis/stacks/test_dumps.py",
    *(f"tests/supervisor/{package}/" for package in EDGES),
)
"""Where tests start real processes, or ask real sockets and clocks, several tests on few cores: each has one more try,
and the summary names it. A test of the core that fails has failed."""

SHARE_A_KEEPER = "tests/training/"
MAY_BE_SKIPPED = "gpu"
"""The one marker whose tests may be skipped under --skips-fail: no CI machine has one."""


TOLD_OF_RERUNS = ": timeline"
"""Of all that is known of a job: the rest goes with the second try."""

IMPORTED: pytest.StashKey[frozenset[str]] = pytest.StashKey()
"""The modules that were there when all tests were collected."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption("--rewrite", action="store_true", help="write golden files anew (tests/net, tests/transcripts)")
    parser.addoption("--skips-fail", action="store_true", help="a skipped test fails the run, unless it needs a GPU")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lasts(seconds): takes about so long, more than half a minute: it starts early")
    # The same examples each time: what fails fails because of the change, and not by the dice or the load.
    hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("same")
    # Who was started in the background by a shell ignores these, and so would all that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:  # noqa: ARG001 (its name is the hook's)
    """For `-n auto`: jobs wait most of the time, and torch wants half a gigabyte for each. One more has the cores work
    meanwhile (`_dealt`)."""
    return min(2 * len(os.sched_getaffinity(0)) + 1, 8)


def pytest_collection(session: pytest.Session) -> None:  # noqa: ARG001 (its name is the hook's)
    """Each worker collects all tests. Nothing of that is garbage, so nobody needs to look for it, then or later."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    gc.freeze()
    session.config.stash[IMPORTED] = frozenset(sys.modules)
    Later.collected = True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lacking = _lacking(config)
    for item in items:
        whole_job = item.get_closest_marker("e2e")
        if whole_job or item.get_closest_marker("slurm") or item.nodeid.startswith(BESIDE_OTHERS):
            item.add_marker(pytest.mark.flaky(reruns=1))
        if whole_job and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(400))
        for marker, how in lacking.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=how))
    if workers := getattr(config, "workerinput", {}).get("workercount", 0):
        items[:] = _dealt(items, workers)


def _dealt(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """In the order for `--dist worksteal`, which gives each worker one piece of the list, from its front to its end.

    Each piece begins with its share of the long tests, the longest first; the many short ones behind them are what is
    stolen. Else the last quarter of an hour would belong to one worker. Every fifth worker begins with short ones: they
    need the cores while the long ones wait. The last one begins with those that share a keeper, which has torch to
    import in each worker that has one of them.
    """
    long = sorted((item for item in items if _lasts_s(item)), key=_lasts_s, reverse=True)
    together = [item for item in items if not _lasts_s(item) and item.nodeid.startswith(SHARE_A_KEEPER)]
    short = [item for item in items if not _lasts_s(item) and not item.nodeid.startswith(SHARE_A_KEEPER)]
    dealt: list[pytest.Item] = []
    with_long = workers - workers // 5
    for number in range(workers):
        mine = long[number::with_long] if number < with_long else []
        mine += together if number == workers - 1 else []
        room = max(0, (len(items) - len(dealt)) // (workers - number) - len(mine))
        dealt += [*mine, *short[:room]]
        short = short[room:]
    return [*dealt, *short]


def _lasts_s(item: pytest.Item) -> float:
    if next(item.iter_markers("skip"), None):
        return 0.0
    marker = item.get_closest_marker("lasts")
    if marker:
        return float(marker.args[0])
    if item.nodeid.startswith(SHARE_A_KEEPER):
        return 0.0
    return 15.0 if item.get_closest_marker("e2e") or item.get_closest_marker("slurm") else 0.0


def need(library: str) -> None:
    """Skip the module that calls this where `library` is not installed. It is not imported: torch takes seconds."""
    if importlib.util.find_spec(library.partition(".")[0]) is None:
        pytest.skip(f"needs {library} (make installs it)", allow_module_level=True)


class Later:
    """A library that takes seconds to import, imported when a test first uses it: each worker collects every test.

    Meanwhile it has no attributes: pytest asks each object of a module for some.
    """

    collected = False

    def __init__(self, library: str) -> None:
        need(library)
        self._name = library

    def __getattr__(self, attribute: str) -> Any:
        if not Later.collected:
            raise AttributeError(f"{self._name} is imported once the tests are collected: use it in tests and fixtures")
        return getattr(importlib.import_module(self._name), attribute)


def until(condition: Callable[[], Any], within_s: float, what: str | Callable[[], str]) -> Any:
    """The first true value of `condition`; fails with `what` when there is none in time."""
    began = asked = time.monotonic()
    while not (value := condition()):
        now = time.monotonic()
        if now > began + within_s:
            pytest.fail(f"not within {within_s:g} s: {what if isinstance(what, str) else what()}", pytrace=True)
        time.sleep(max(0.05, now - asked))  # a look that is dear, a command of its own, is not to take a whole core
        asked = time.monotonic()
    return value


def runs(pid: int) -> bool:
    """Whether a process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


JOBS: pytest.StashKey[list[Any]] = pytest.StashKey()


@pytest.fixture
def jobs(request: pytest.FixtureRequest) -> list[Any]:
    """What a test starts; when it fails, its report ends with all that is known of them."""
    return request.node.stash.setdefault(JOBS, [])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.failed:
        for number, job in enumerate(item.stash.get(JOBS, ())):
            try:
                report.sections += [(f"job {number}: {what}", text) for what, text in job.report()]
            except Exception as error:
                report.sections.append((f"job {number}", f"could not be reported: {error!r}"))
    return report


@pytest.fixture
def after() -> Callable[[float], None]:
    """Let a time pass that is itself the subject of a test (a fault of five seconds)."""
    return time.sleep


class UndisturbedRuns:
    """A process that has torch, and runs training scripts without supervision, one after the other."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ends_well(self, ranks: int, training: Sequence[str], log: Path) -> bool:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("unsupervised.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(log), ranks, *training]), file=self._process.stdin, flush=True)
        if select.select([self._process.stdout], [], [], 180)[0] and (answer := self._process.stdout.readline()):
            return answer == "0\n"
        self.close()
        return False

    def close(self) -> None:
        if self._process is not None:
            for one in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
                one.kill()
            self._process.communicate(timeout=10)
            self._process = None


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Sequence[str], int], bytes]]:
    """`(script and arguments, ranks)` -> its final weights without supervision, when nothing disturbs it.

    `{out}` stands for its folder, in which it leaves `final.bin`. Each is run once, by the worker that wants it first.
    """
    session = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        session = session.parent
    runs_alone = UndisturbedRuns()

    def weights(training: Sequence[str], ranks: int) -> bytes:
        key = hashlib.sha256(repr((*training, ranks)).encode()).hexdigest()[:16]
        out = session / f"undisturbed-{key}"
        out.mkdir(exist_ok=True)
        with open(out / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            words = [word.format(out=out) for word in training]
            for _ in range(2):  # torch 2.13 aborts at its end now and then; it is not what is tested here
                if (out / "ended-well").exists() or runs_alone.ends_well(ranks, words, out / "log"):
                    (out / "ended-well").touch()
                    return (out / "final.bin").read_bytes()
        pytest.fail(f"the undisturbed run failed twice:\n{(out / 'log').read_text(errors='replace')[-6000:]}")

    yield weights
    runs_alone.close()


def _skips(config: pytest.Config) -> list[pytest.TestReport]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return list(reporter.stats.get("skipped", ())) if reporter else []


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """`longrepr` of a skip is (file, line, "Skipped: why")."""
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return why.removeprefix("Skipped: ")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.getoption("--skips-fail") or session.exitstatus != pytest.ExitCode.OK:
        return
    if any(not _reason(report).startswith(f"{MAY_BE_SKIPPED}:") for report in _skips(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    again = terminalreporter.stats.get("rerun", ())
    if again:
        terminalreporter.section("failed at first: a race, here or in the program")
        for report in again:
            why = getattr(getattr(report.longrepr, "reprcrash", None), "message", "").partition("\n")[0]
            terminalreporter.line(f"{report.nodeid}: {why}"[:300])
            for title, text in report.sections:
                if title.endswith(TOLD_OF_RERUNS):
                    terminalreporter.line("\n".join(f"    {line[:200]}" for line in text.splitlines()[-60:]))
    reasons = Counter(_reason(report) for report in _skips(config))
    if not reasons:
        return
    terminalreporter.section("not run here, and how to run it")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:4}  {reason}")
    if config.getoption("--skips-fail"):
        terminalreporter.line("      (a skip other than for want of a GPU fails this run)")
