"""The agent's port for Prometheus, and the files that tell where it is: on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from supervisor.blocking import timeout
from supervisor.config import MetricsSettings, received
from supervisor.errors import ConfigError
from supervisor.metrics import port as metrics_port
from supervisor.metrics.port import CONNECTIONS, Exposed, MetricsPort
from supervisor.metrics.table import AGENT, Sample
from supervisor.metrics.targets import STALE_S, Role, TargetFile

LOOPBACK = "127.0.0.1"


def target_of(folder: Path, targets: str = "") -> TargetFile:
    return TargetFile(str(folder / "job"), targets, "agent", "n1")


@asynccontextmanager
async def opened(
    folder: Path, read: Callable[[], Any] = lambda: [Sample("unbroken_agent_connected", 1)], **more: Any
) -> AsyncIterator[MetricsPort]:
    exposed = Exposed(AGENT, read, [("job", "j"), ("node", "n1")])
    port = MetricsPort(exposed, target_of(folder), "j", more.get("where", (LOOPBACK, 0)))
    await port.start()
    try:
        yield port
    finally:
        await port.stop()


async def until(condition: Callable[[], Any]) -> None:
    async with timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def run(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with timeout(100):
            await work

    asyncio.run(bounded())


def url(port: MetricsPort, path: str = "/metrics") -> str:
    return f"http://{LOOPBACK}:{port.port}{path}"


def test_a_scrape_and_what_is_no_scrape(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as port, aiohttp.ClientSession(auto_decompress=False) as client:
            async with client.get(url(port), headers={"Accept-Encoding": "gzip"}) as answer:
                assert answer.status == 200
                text = gzip.decompress(await answer.read()).decode()
                assert 'unbroken_agent_connected{job="j",node="n1"} 1.0\n' in text
            modern = {"Accept": "application/openmetrics-text;version=1.0.0"}
            async with client.get(url(port, "/metrics?x=1"), headers=modern) as answer:
                assert answer.content_type == "application/openmetrics-text"
            async with client.head(url(port)) as answer:
                assert (answer.status, await answer.read()) == (200, b"")
            for path, method, status in [("/", "GET", 404), ("/v1/status", "GET", 404), ("/metrics", "POST", 405)]:
                async with client.request(method, url(port, path)) as answer:
                    assert answer.status == status

    run(work())


def test_who_says_nothing_is_not_waited_for_and_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_port, "PATIENCE_S", 2.0)

    async def work() -> None:
        async with opened(tmp_path) as port, aiohttp.ClientSession() as client:
            silent = [await asyncio.open_connection(LOOPBACK, port.port) for _ in range(4 * CONNECTIONS)]
            async with client.get(url(port)) as answer:
                assert answer.status == 200
            assert len(port._open) <= CONNECTIONS
            for reader, _ in silent:
                with contextlib.suppress(OSError):
                    assert await reader.read() == b""
            async with client.get(url(port)) as answer:
                assert answer.status == 200

    run(work())


def test_a_defect_of_ours_fails_one_scrape_only(tmp_path: Path) -> None:
    def read() -> list[Sample]:
        if not broken:
            return []
        raise RuntimeError(broken.pop())

    broken = ["a defect"]

    async def work() -> None:
        async with opened(tmp_path, read) as port, aiohttp.ClientSession() as client:
            async with client.get(url(port)) as answer:
                assert answer.status == 500
            async with client.get(url(port)) as answer:
                assert answer.status == 200

    run(work())


def test_the_target_file_follows_the_address_and_goes_at_the_end(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path, where=("0.0.0.0", 0)) as port:
            path = target_of(tmp_path).path
            port.update_target("")
            assert not path.exists()
            port.update_target("10.0.0.7")
            await until(path.exists)
            (group,) = json.loads(path.read_bytes())
            assert group["targets"] == [f"10.0.0.7:{port.port}"]
            assert group["labels"] == {"job": "j", "node": "n1", "unbroken_role": "agent"}
            await until(lambda: port._writing is not None and port._writing.done())
            port.update_target("10.0.0.8")
            await until(lambda: b"10.0.0.8" in path.read_bytes())
            assert target_of(tmp_path).port() == port.port
            path.unlink()
            await until(lambda: port._writing is not None and port._writing.done())
            port.update_target("10.0.0.8", 1)
            await until(path.exists)  # the job has begun anew, and removed what was left
        assert list(path.parent.iterdir()) == []

    run(work())


def test_the_next_agent_has_the_same_port_if_it_is_free(tmp_path: Path) -> None:
    async def work() -> None:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            free = probe.getsockname()[1]
        target_of(tmp_path).write("j", f"{LOOPBACK}:{free}")
        async with opened(tmp_path) as port:
            assert port.port == free
            target_of(tmp_path).write("j", f"{LOOPBACK}:{free}")
            async with opened(tmp_path) as second:
                assert second.port not in (0, free)

    run(work())


def test_a_port_that_is_taken_or_switched_off_costs_the_metrics_and_nothing_else(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as port, opened(tmp_path, where=(LOOPBACK, port.port)) as second:
            assert second.port == 0
            second.update_target("10.0.0.7")
        async with opened(tmp_path, where=None) as never:
            assert never.port == 0
            never.update_target("10.0.0.7")
        assert not target_of(tmp_path).path.exists()

    run(work())


def test_what_others_put_in_the_place_of_a_file_is_neither_waited_for_nor_written_through(tmp_path: Path) -> None:
    agent, elsewhere = target_of(tmp_path), tmp_path / "elsewhere"
    agent.path.parent.mkdir(parents=True)
    os.mkfifo(agent.path)
    assert agent.port() == 0
    assert agent.write("job", "h:1")
    agent.path.unlink()
    elsewhere.write_text("x")
    agent.path.symlink_to(elsewhere)
    assert agent.write("job", "h:1")
    assert (elsewhere.read_text(), agent.path.is_symlink()) == ("x", False)


def test_what_killed_daemons_left_goes_when_their_job_begins_anew_or_after_a_day(tmp_path: Path) -> None:
    shared, now = tmp_path / "targets", time.time()

    def left(job: str, role: Role, node: str = "", age_s: float = 0.0) -> Path:
        file = TargetFile(str(tmp_path / job), str(shared), role, node)
        file.write("job", "h:1")
        os.utime(file.path, (now - age_s, now - age_s))
        return file.path

    kept = [left("other", "controller"), left("other", "agent", "n1", STALE_S - 60)]
    left("killed", "controller", age_s=STALE_S + 60)
    left("killed", "agent", "n1", STALE_S + 60)
    torn = shared / f".{kept[0].name}.4711"
    torn.write_text("half a fi")
    os.utime(torn, (0, 0))
    (shared / "no-target.json").write_text("somebody else's")
    os.utime(shared / "no-target.json", (0, 0))
    mine = left("mine", "agent", "n7")
    target = TargetFile(str(tmp_path / "mine"), str(shared), "controller")
    target.tidy(anew=False, now=now)
    assert sorted(shared.iterdir()) == sorted([*kept, mine, shared / "no-target.json"]), "its agents live on"
    target.tidy(anew=True, now=now)
    assert sorted(shared.iterdir()) == sorted([*kept, shared / "no-target.json"])


def test_a_controller_with_tls_says_so_and_prometheus_may_read_its_file(tmp_path: Path) -> None:
    target = TargetFile(str(tmp_path), "", "controller")
    before = os.umask(0o077)
    try:
        target.write("j", "h:1", "https")
    finally:
        os.umask(before)
    (group,) = json.loads(target.path.read_bytes())
    assert group["labels"]["__scheme__"] == "https"
    assert target.path.stat().st_mode & 0o777 == 0o644


def test_what_could_not_be_written_is_tried_again_until_the_job_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_port, "RETRY_S", 0.05)
    (tmp_path / "job").write_text("a file where a folder should be")
    path = target_of(tmp_path).path

    async def work() -> None:
        async with opened(tmp_path) as port:
            port.update_target("10.0.0.7")
            await until(lambda: port._write_at > 0)
            (tmp_path / "job").unlink()

            def again() -> bool:
                port.update_target("10.0.0.7")
                return path.exists()

            await until(again)
        assert port._target.write("j", "h:1"), "it is over: nothing has to be tried again"
        assert not path.exists()

    run(work())


def test_an_address_that_is_none_is_refused_before_anything_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "supervisor.cli.main", "run", "--", "python", "train.py"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "UNBROKEN_METRICS_LISTEN": "here:http"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, list(tmp_path.iterdir())) == (78, [])
    assert "metrics.listen = 'here:http'" in done.stderr


def test_a_daemon_without_a_plan_reads_its_environment() -> None:
    assert received({}).metrics.enabled
    assert not received({"UNBROKEN_METRICS": "False"}).metrics.enabled
    with pytest.raises(ConfigError, match=r"metrics\.listen = 'h:x'"):
        MetricsSettings(listen="h:x").where(alone=True)
