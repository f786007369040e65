"""What a running agent has written is believed where it can be true."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diagnosis.health import CheckResult, CheckState
from supervisor.node_health import health_file as health_files
from supervisor.node_health.contract import ProbeContext
from supervisor.node_health.health_file import HealthFile
from supervisor.node_health.monitor import HealthMonitor
from supervisor.paths import write_atomically

Check = Callable[..., Any]


@pytest.fixture
def health_file(tmp_path: Path) -> Path:
    """What a real agent's eyes write of this machine, with one flaw that it does not have."""
    folder = tmp_path / "local" / "job-1" / "n7"
    folder.mkdir(parents=True)
    health = HealthMonitor("n7", folder / "health.json", tmp_path / "probes", only=("memory",))

    async def see() -> None:
        running = asyncio.create_task(health.run())
        while not (folder / "health.json").exists() or not health.check_states.stands("host_oom_kill", ""):
            health.update(health.check_states.job)
            await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(see(), 90))
    file = msgspec.json.decode((folder / "health.json").read_bytes(), type=HealthFile)
    flaw = CheckState(
        result=CheckResult(check="memory_available", status="unhealthy", text="9 MiB left"),
        status="unhealthy",
        since=1.0,
    )
    others = tuple(one for one in file.check_states if one.result.check != "memory_available")
    file = msgspec.structs.replace(file, check_states=(flaw, *others), mono=time.monotonic(), waiting=())
    write_atomically(folder / "health.json", msgspec.json.encode(file))
    return folder / "health.json"


def test_a_running_agent_answers_at_once(check: Check, health_file: Path) -> None:
    ask = ("--only", "memory", "--local-dir", str(health_file.parents[2]), "--json")
    done = check(*ask, site=None)
    assert (done.answer["from"], done.answer["node"], done.code) == ("agent", "n7", 2)
    assert done.entry("memory_available")["text"] == "9 MiB left"
    assert done.entry("memory_available")["since"] == "1970-01-01T00:00:01.000Z"
    assert done.entry("host_oom_kill")["status"] == "healthy"
    problem = "probe supervisor.node_health.pci:PciProbe cannot be used: ImportError()"
    file = msgspec.json.decode(health_file.read_bytes(), type=HealthFile)
    well = tuple(one for one in file.check_states if one.status == "healthy")
    for problems, code in (((), 0), (("3 events were not reported",), 0), ((problem,), 3)):
        write_atomically(
            health_file, msgspec.json.encode(msgspec.structs.replace(file, check_states=well, problems=problems))
        )
        assert check(*ask, site=None).code == code
    assert check(*ask, "--fresh", site=None).answer["from"] == "standalone"
    assert check(*ask, "--only", "pci", "--preflight", site=None).answer["from"] == "standalone"
    assert check(*ask, "--node-name", "n8", site=None).answer["from"] == "standalone"


def test_only_what_can_be_true_is_believed(health_file: Path) -> None:
    where, boot_id = str(health_file.parent), ProbeContext().boot_id
    good = msgspec.json.decode(health_file.read_bytes(), type=HealthFile)

    def believed(**changes: Any) -> bool:
        health_file.write_bytes(msgspec.json.encode(msgspec.structs.replace(good, **changes)))
        return health_files.of_agent(boot_id, where) is not None

    assert believed()
    assert not believed(mono=good.mono - 200)
    assert not believed(mono=time.monotonic() + 50)
    assert not believed(boot_id="another")
    assert not believed(pid=2**22 - 1)
    assert not believed(schema=2)
    assert believed()
    health_file.chmod(0o666)
    assert not believed(), "anybody could have written it"
    health_file.chmod(0o600)
    target = health_file.rename(health_file.with_name("elsewhere.json"))
    health_file.symlink_to(target)
    assert health_files.of_agent(boot_id, where) is None, "a link leads to what its writer chose"
    health_file.unlink()
    os.mkfifo(health_file)
    assert health_files.of_agent(boot_id, where) is None


@pytest.mark.root
def test_what_another_user_wrote_is_not_believed(health_file: Path) -> None:
    assert health_files.of_agent(ProbeContext().boot_id, str(health_file.parent)) is not None
    os.chown(health_file.parent, 65534, 65534)
    assert health_files.of_agent(ProbeContext().boot_id, str(health_file.parent)) is None, "the folder is another's"
    os.chown(health_file.parent, 0, 0)
    os.chown(health_file, 65534, 65534)
    assert health_files.of_agent(ProbeContext().boot_id, str(health_file.parent)) is None
