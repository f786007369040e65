"""The agent's eyes on GPUs of the scripted driver: real probe workers, the real probe, the real way to a finding."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diagnosis.signals import Finding
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.contract import JobInfo
from supervisor.node_health.monitor import HealthMonitor
from supervisor.node_health.runner import WorkerTimes

GPU = "0000:13:00"
UUID = "GPU-00000000-0000-0000-0000-000000000003"
LIMIT_S = 100.0


class Eyes:
    """What an agent would know and tell."""

    def __init__(self, env: dict[str, str], folder: Path, *only: str) -> None:
        self.health = HealthMonitor(
            "n1", folder / "health.json", folder / "probes", env=env, only=only, pace=WorkerTimes(tick=5.0)
        )
        self.findings: list[Finding] = []
        self.kernel_findings = 0
        self.job = JobInfo(ranks={1: 5}, gpus_of_ranks={5: ":3"})

    async def until(self, fits: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not fits():
            assert time.monotonic() < deadline, self.findings
            self.health.update(self.job)
            found = self.health.kernel_log.findings(())
            self.kernel_findings += len(found)
            self.findings += found
            self.findings += self.health.take()
            await asyncio.sleep(0.02)

    def errors(self) -> list[Finding]:
        """Without warnings: the machine's memory is not ours alone."""
        return [found for found in self.findings if found.severity != "warning"]

    def looked_at(self, check: str) -> float:
        return max((s.looked_at for s in self.health.check_states.all() if s.result.check == check), default=0.0)

    def run(self, story: Callable[[], Any]) -> None:
        async def both() -> None:
            task = asyncio.create_task(self.health.run())
            try:
                await story()
            finally:
                task.cancel()
                await asyncio.wait({task})

        asyncio.run(both())


def test_a_storm_of_xids_is_one_finding_with_gpu_and_rank(fake_nvml: Any, tmp_path: Path) -> None:
    eyes = Eyes(fake_nvml.env, tmp_path, "nvml")

    async def story() -> None:
        await eyes.until(lambda: eyes.looked_at("gpu_temperature"))
        fake_nvml.state(**{"storm.per_s": 100_000, "storm.gpu": 3, "storm.xid": 79})
        await eyes.until(lambda: eyes.findings)
        before, found = eyes.looked_at("gpu_temperature"), eyes.kernel_findings
        await eyes.until(lambda: eyes.looked_at("gpu_temperature") > before)  # looks go on
        assert eyes.kernel_findings - found < 200

    eyes.run(story)
    xids = [found for found in eyes.findings if found.failure_class is FailureClass.GPU_FALLEN_OFF_BUS]
    assert len({(found.rule, found.gpu) for found in xids}) == 1
    assert (xids[0].gpu, xids[0].gpu_uuid, xids[0].rank, xids[0].node) == (GPU, UUID, 5, "n1")
