"""The page on a real controller, with fake agents: faults while two operators look, and a controller that is killed
between the look at an approval and the approval."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.bench.control_plane import BenchJob
from supervisor.cli.job_commands import JobHandle
from supervisor.cli.page_server import JobReader, PageServer
from supervisor.messages import CommandRequest
from tests.supervisor.cli.test_page import browser, serve

__all__ = ["browser"]
PATIENCE_MS = 60_000.0
SAID = re.compile("^(?!Sent).")
"""What the dialog says when the answer has come."""


def started(folder: Path, nodes: int) -> Iterator[BenchJob]:
    """A job that trains, and asks before it acts."""
    with BenchJob(folder, nodes) as job:
        job.ask("join")
        job.await_("all have joined", lambda: job.ask("stats")["connected"] >= nodes, every_s=0.1)
        job.await_("training", lambda: job.client().get("/v1/status")["state"] == "RUNNING", every_s=0.3)
        job.client().command(CommandRequest(command="mode", argument="recommend", by="test"))
        yield job


def opened(browser: Any, url: str, nodes: int, wrong: list[str]) -> Any:
    tab = browser.new_context().new_page()
    tab.set_default_timeout(PATIENCE_MS)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.goto(url)
    tab.locator("#nodes button").nth(nodes - 1).wait_for()
    return tab


def pressed_yes(tab: Any) -> str:
    tab.locator("#yes").click()
    tab.locator("#outcome", has_text=SAID).wait_for()
    return str(tab.locator("#outcome").inner_text())


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 64])
def test_two_operators_and_a_controller_that_is_killed_in_an_approval(browser: Any, tmp_path: Path, nodes: int) -> None:
    wrong: list[str] = []
    for job in started(tmp_path / "bench", nodes + max(1, nodes // 8)):
        for page in serve(PageServer(0, JobReader(JobHandle(str(job.job_dir), "", "")))):
            first, second = (opened(browser, page.url, job.nodes, wrong) for _ in range(2))
            job.ask("die", 0, 1)
            for tab in (first, second):
                tab.locator("#attention button", has_text="Approve").click()
                tab.locator("#yes:enabled").wait_for()
                assert "i-1" in tab.locator("#sentence").inner_text()
                assert "attempt 2" in tab.locator("#would").inner_text()
            job.kill_controller()
            assert "attempt 2" in pressed_yes(first)
            assert "Nothing was done" in pressed_yes(second)
            second.locator("#outcome", has_text=re.compile("newest command: .* approve i-1")).wait_for()
            for tab in (first, second):
                tab.keyboard.press("Escape")
                tab.locator("#state", has_text="RUNNING").wait_for()
                tab.locator("#newest", has_text="i-1").wait_for()
                tab.locator("#audit", has_text="approve i-1").wait_for()
                tab.close()
    assert not wrong


@pytest.mark.browser
@pytest.mark.slow
def test_at_4000_nodes_something_is_seen_within_a_second(browser: Any, tmp_path: Path) -> None:
    from tests.supervisor.cli.test_page import ManyNodes, job_folder

    for page in serve(PageServer(0, ManyNodes(JobHandle(str(job_folder(tmp_path)), "", ""), 4000))):
        wrong: list[str] = []
        took = []
        for _ in range(3):
            began = time.monotonic()
            tab = opened(browser, page.url, 4000, wrong)
            drawn_s = time.monotonic() - began
            paint = tab.evaluate("performance.getEntriesByName('first-contentful-paint').map((one) => one.startTime)")
            took.append((paint[0] / 1e3, drawn_s))
            tab.close()
        print("first paint, all nodes drawn:", took)
        assert min(took)[0] < 1.0
        assert not wrong
