"""Which tests run here: markers say what a test needs, this says what the machine lacks and how to get it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest


def _lacking(config: pytest.Config) -> dict[str, str]:
    """Marker -> how to get what its tests need; only what is lacking here."""
    as_root, with_ip = os.geteuid() == 0, shutil.which("ip")
    with_slurm = all(map(shutil.which, ("slurmctld", "slurmd", "munged", "ip")))
    needs = {
        "gpu": (Path("/proc/driver/nvidia/version").exists(), "run it on a machine with an NVIDIA GPU and driver"),
        "root": (as_root and with_ip, "install iproute2" if as_root else "run it as root"),
        "prometheus": (
            all(map(shutil.which, ("prometheus", "promtool", "prometheus-alertmanager", "amtool"))),
            "apt-get install prometheus prometheus-alertmanager",
        ),
        "slurm": (as_root and with_slurm, "apt-get install slurm-wlm munge iproute2, and run it as root"),
        "e2e": (importlib.util.find_spec("torch"), "install torch (make does)"),
        "slow": (config.getoption("--slow"), "make test ARGS=--slow"),
    }
    return {marker: f"{marker}: {how}" for marker, (there, how) in needs.items() if not there}


MAY_BE_SKIPPED = "gpu"
"""The one marker whose tests may be skipped under --skips-fail: no CI machine has one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption("--skips-fail", action="store_true", help="a skipped test fails the run, unless it needs a GPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lacking = _lacking(config)
    for item in items:
        if item.get_closest_marker("e2e"):
            # Real processes against real clocks, two tests on two cores: once more, and the summary counts it.
            item.add_marker(pytest.mark.flaky(reruns=1))
        for marker, how in lacking.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=how))


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
    reasons = Counter(_reason(report) for report in _skips(config))
    if not reasons:
        return
    terminalreporter.section("not run here, and how to run it")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:4}  {reason}")
    if config.getoption("--skips-fail"):
        terminalreporter.line("      (a skip other than for want of a GPU fails this run)")
