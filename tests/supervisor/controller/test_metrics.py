"""`/metrics` of a controller: open, lazy, and never in the way; its target file."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from supervisor.agent.link import Link, address_reader, token_reader
from supervisor.config import Settings
from supervisor.controller.main import _scrape_of, build
from supervisor.controller.server import Server
from supervisor.errors import CommandDenied
from supervisor.job.job import Job
from supervisor.messages import PROTOCOL, ControllerStarted, Hello, JobDefined, JobSpec, NodeJoined
from supervisor.metrics.targets import TargetFile

NODES = 4000


def targets(job_dir: Path) -> list[dict[str, Any]]:
    return [group for path in sorted(job_dir.glob("targets/*.json")) for group in json.loads(path.read_bytes())]


async def status(url: str, **headers: str) -> int:
    async with aiohttp.ClientSession() as client, client.get(url, headers=headers) as answer:
        return answer.status


def test_it_is_open_says_where_it_is_and_stays_on_record_when_it_is_only_stopped(tmp_path: Path, rig: Any) -> None:
    async def work(process: Any) -> None:
        address = address_reader(tmp_path)().url
        assert await status(f"{address}/metrics") == 200, "before any agent came"
        assert await status(f"{address}/v1/status") == 401
        hello = Hello(protocol=PROTOCOL, node="n0", host="h", address="", spec=JobSpec(name="llm"))
        link = asyncio.create_task(Link(address_reader(tmp_path), token_reader(tmp_path), hello).run(lambda _: None))
        await rig.until(lambda: targets(tmp_path))
        (group,) = targets(tmp_path)
        assert {"job": "llm", "unbroken_role": "controller"}.items() <= group["labels"].items()
        async with aiohttp.ClientSession() as client, client.get(f"http://{group['targets'][0]}/metrics") as answer:
            text = await answer.text()
        assert 'unbroken_controller_agents{job="llm"} 1.0' in text
        assert 'unbroken_process_cpu_seconds_total{job="llm",kind="controller"}' in text
        link.cancel()
        process.popen.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.exit_code) == 0
        assert len(targets(tmp_path)) == 1, "the job goes on: whoever stopped it is to be asked"

    process = rig.start()
    assert process.address
    rig.go(work(process))


@pytest.mark.parametrize("restarted", [False, True])
def test_files_of_nodes_that_the_killed_job_had_go_when_it_begins_anew(
    tmp_path: Path, rig: Any, restarted: bool
) -> None:
    """`restarted`: it is only our own controller that was killed, and agents live on."""
    left = TargetFile(str(tmp_path), "", "agent", "n5")
    left.write("llm", "h:1")
    more = ["--restarted"] if restarted else []
    assert rig.start(*more).address
    assert left.path.exists() == restarted


def test_it_can_be_closed(tmp_path: Path, rig: Any) -> None:
    async def work() -> None:
        address = address_reader(tmp_path)().url
        hello = Hello(protocol=PROTOCOL, node="n0", host="h", address="", spec=JobSpec(name="llm"))
        link = Link(address_reader(tmp_path), token_reader(tmp_path), hello)
        task = asyncio.create_task(link.run(lambda _: None))
        await rig.until(lambda: link.connected)
        assert await status(f"{address}/metrics") == 404
        with pytest.raises(CommandDenied) as denied:
            await asyncio.to_thread(client.get, "/metrics")
        assert denied.value.status == 404
        assert targets(tmp_path) == []
        task.cancel()

    client = rig.start(UNBROKEN_METRICS="0").client()
    rig.go(work())


def test_scrapes_of_4000_nodes_do_not_hold_the_loop_up(tmp_path: Path, rig: Any) -> None:
    """Heartbeats share the loop with scrapes; the text is made in a thread."""

    async def work() -> None:
        control = build(tmp_path, Settings())
        job = control.job
        assert isinstance(job, Job)
        job.handle(ControllerStarted(at=1.0, epoch=1))
        job.handle(JobDefined(at=1.0, spec=JobSpec(name="large", nodes_min=NODES, nodes_max=NODES)))
        for number in range(NODES):
            job.nodes.join(NodeJoined(at=1.0, node=f"n{number}", host="h", address="1"))
        server = Server(control, "token", scrape=_scrape_of(control))
        port = await server.start("127.0.0.1", 0)
        waits: list[float] = []

        async def beat() -> None:
            while True:
                began = time.perf_counter()
                await asyncio.sleep(0.001)
                waits.append(time.perf_counter() - began - 0.001)

        async with aiohttp.ClientSession() as client:
            beating = asyncio.create_task(beat())
            longest: list[float] = []
            for _ in range(20):
                waits.clear()
                async with client.get(f"http://127.0.0.1:{port}/metrics") as answer:
                    assert answer.status == 200
                    await answer.read()
                    longest.append(max(waits, default=0.0))
            beating.cancel()
        await server.stop()
        first, *others = (wait * 1e3 for wait in longest)
        print(f"\nthe loop waited {first:.1f} ms at the first scrape, then {min(others):.1f} to {max(others):.1f}")
        assert min(others) < 50, "one that is made on the loop holds it up every time"

    rig.go(work())
