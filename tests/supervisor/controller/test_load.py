"""How much one controller bears. `pytest tests/supervisor/controller/test_load.py --slow -s` prints the figures."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from diagnosis.signals import RankSample
from supervisor.agent.link import Link, address_reader, token_reader
from supervisor.messages import PROTOCOL, ControllerMessage, Heartbeat, Hello, JobSpec

AGENTS = 1000
ROUNDS = 5


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def rss_mb(pid: int) -> float:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def heartbeat(node: int, seq: int) -> Heartbeat:
    ranks = tuple(
        RankSample(
            rank=node * 8 + i, local_rank=i, pid=100 + i, state="S", step=seq, groups={"0": (seq, seq)}, cpu_s=1.0
        )
        for i in range(8)
    )
    return Heartbeat(node=f"n{node}", incarnation=1, seq=seq, attempt=1, launcher="running", prepared=1, ranks=ranks)


async def load(job_dir: Path, pid: int) -> float:
    """CPU seconds of the controller for each heartbeat of a node with 8 ranks."""
    spec = JobSpec(name="load", nodes_min=AGENTS, nodes_max=AGENTS)
    answers = 0

    def count(_: ControllerMessage) -> None:
        nonlocal answers
        answers += 1

    links = []
    for i in range(AGENTS):
        hello = Hello(protocol=PROTOCOL, node=f"n{i}", host=f"h{i}", address="", spec=spec, index=i)
        links.append(Link(address_reader(job_dir), token_reader(job_dir), hello))
    tasks = [asyncio.create_task(link.run(count)) for link in links]
    while sum(link.connected for link in links) < AGENTS:
        await asyncio.sleep(0.05)
    while answers < AGENTS:
        await asyncio.sleep(0.05)
    answers, before = 0, cpu_s(pid)
    for seq in range(1, ROUNDS + 1):
        for node, link in enumerate(links):
            link.post(heartbeat(node, seq))
        while answers < seq * AGENTS:
            await asyncio.sleep(0.01)
    took = cpu_s(pid) - before
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return took / (AGENTS * ROUNDS)


@pytest.mark.slow
def test_a_thousand_agents(tmp_path: Path, rig: Any) -> None:
    began = time.monotonic()
    process = rig.start()
    assert process.address
    start_s, idle_mb = time.monotonic() - began, rss_mb(process.popen.pid)
    each_s = asyncio.run(asyncio.wait_for(load(tmp_path, process.popen.pid), 100.0))
    print(
        f"\nstart {start_s:.2f} s, {idle_mb:.0f} MB idle, {rss_mb(process.popen.pid):.0f} MB with {AGENTS} agents, "
        f"{each_s * 1e6:.0f} us a heartbeat of 8 ranks: {1 / each_s:.0f} a second and core"
    )
    assert each_s < 1 / 2000
    assert idle_mb < 60
