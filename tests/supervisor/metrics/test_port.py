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

from supervisor.agent.metrics import AGENT
from supervisor.blocking import timeout
from supervisor.config import MetricsSettings, received
from supervisor.errors import ConfigError
from supervisor.metrics import port as metrics_port
from supervisor.metrics.port import CONNECTIONS, Exposed, MetricsPort
from supervisor.metrics.table import Sample
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


@pytest.mark.parametrize("sent", [b"\x00\xff garbage\r\n\r\n", b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 9000, b""])
def test_nonsense_closes_its_connection_and_no_other(tmp_path: Path, sent: bytes) -> None:
    async def work() -> None:
        async with opened(tmp_path) as port:
            reader, writer = await asyncio.open_connection(LOOPBACK, port.port)
            writer.write(sent)
            if not sent:
                writer.close()
            try:
                await reader.read()
            except ConnectionError:
                pass
            async with aiohttp.ClientSession() as client, client.get(url(port)) as answer:
                assert answer.status == 200

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


def test_one_folder_for_all_jobs_and_the_end_of_one(tmp_path: Path) -> None:
    shared = tmp_path / "targets"
    mine, other = tmp_path / "a" / "job", tmp_path / "b" / "job"
    files = [TargetFile(str(job), str(shared), "agent", node) for job in (mine, other) for node in ("n1", "n2")]
    controller = TargetFile(str(mine), str(shared), "controller")
    for file in (*files, controller):
        file.write("job", "h:1")
    assert len(list(shared.iterdir())) == 5
    assert all(name.endswith(".json") for name in os.listdir(shared))
    controller.remove(all_of_job=True)
    assert sorted(shared.iterdir()) == sorted(file.path for file in files[2:]), "the other job's stay"


def test_of_jobs_in_their_usual_place_one_folder_beside_them_is_found(tmp_path: Path) -> None:
    jobs = tmp_path / "unbroken-jobs"
    controllers = [TargetFile(str(jobs / name), "", "controller") for name in ("a", "b")]
    for number, controller in enumerate(controllers):
        assert controller.write("job", f"h:{number + 1}")
    assert sorted((jobs / "targets").glob("*.controller.json")) == [controller.path for controller in controllers]
    assert not (jobs / "a").exists()
    assert TargetFile(str(jobs / "b"), "", "controller").port() == 2
    for controller in controllers:
        controller.remove(all_of_job=True)
    assert list((jobs / "targets").iterdir()) == []


def test_where_that_folder_cannot_be_written_it_is_the_jobs_own(tmp_path: Path) -> None:
    jobs = tmp_path / "unbroken-jobs"
    jobs.mkdir()
    (jobs / "targets").write_text("no folder")
    agent = TargetFile(str(jobs / "a"), "", "agent", "n1")
    assert agent.write("job", "h:1")
    assert agent.path.parent == jobs / "a" / "targets"
    assert agent.port() == 1
    agent.remove()
    assert list(agent.path.parent.iterdir()) == []


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


@pytest.mark.parametrize(
    ("address", "only"), [("127.0.0.1:1", True), ("[::1]:1", True), ("10.0.0.1:1", False), ("node127.0:1", False)]
)
def test_a_target_that_no_other_host_reaches_says_so(tmp_path: Path, address: str, only: bool) -> None:
    agent = target_of(tmp_path)
    agent.write("job", address)
    (group,) = json.loads(agent.path.read_text())
    assert group["labels"].get("unbroken_only_on") == (socket.gethostname() if only else None)


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


def test_who_lives_stays_young(tmp_path: Path) -> None:
    target = target_of(tmp_path)
    target.write("j", "h:1")
    about = target.path.stat()
    os.utime(target.path, (0, 0))
    target.write("j", "h:1")
    again = target.path.stat()
    assert again.st_mtime >= about.st_mtime
    assert again.st_ino == about.st_ino, "not written anew for that"


def test_a_node_may_have_any_name(tmp_path: Path) -> None:
    target = TargetFile(str(tmp_path / "job"), "", "agent", "../../n 1")
    target.write("j", "h:1")
    assert target.path.parent == tmp_path / "job" / "targets"
    assert json.loads(target.path.read_bytes())[0]["labels"]["node"] == "../../n 1"


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


def test_nothing_is_raised_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    target = TargetFile(str(tmp_path / "job"), str(tmp_path / "file" / "below"), "controller")
    assert not target.write("j", "h:1")
    target.remove(all_of_job=True)
    assert target.port() == 0


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


@pytest.mark.parametrize(
    ("listen", "alone", "where"),
    [
        ("", True, (LOOPBACK, 0)),
        ("", False, ("0.0.0.0", 0)),
        ("0.0.0.0:7462", True, ("0.0.0.0", 7462)),
        ("10.0.0.1", False, ("10.0.0.1", 0)),
        (":7462", True, ("0.0.0.0", 7462)),
        ("[::1]:7462", True, ("::1", 7462)),
    ],
)
def test_where_agents_listen(listen: str, alone: bool, where: tuple[str, int]) -> None:
    assert MetricsSettings(listen=listen).where(alone=alone) == where


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
