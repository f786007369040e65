"""A seeded world around the real `Job` and `HeartbeatEvents`: fake nodes, a bad network, faults. Time is simulated.

Nodes behave as agents, keepers and launchers do (docs/architecture.md); after every event the invariants are checked.
A failure names its seed: `World(seed).run()` repeats it exactly.
"""

from __future__ import annotations

import heapq

import pytest

from supervisor import messages as m

from .faults import Faults
from .ground import BEGAN

RECOVERED_S = 900.0
"""After the last fault it runs again within this (back-offs, time limits and the operator's rounds included)."""


class World(Faults):
    """Everything: nodes, storage, network, one controller at a time, faults, and what must always hold."""

    def run(self, until_s: float = 4000.0) -> World:
        """Until the job has ended, or `until_s`. Whatever goes wrong names the seed."""
        try:
            self.tell(m.ControllerStarted(at=self.now, epoch=1))
            self.tell(m.JobDefined(at=self.now, spec=self.spec))
            for node in self.nodes.values():
                self.later(self.random.random(), self.live, node)
            self.later(0.25, self.tick)
            self.later(5.0, self.fault)
            self.later(30.0, self.operate)
            if "meddle" in self.rates:
                self.later(1.0, self.meddle)
            if "wear" in self.rates:
                self.later(20.0, self.wear)
            if "go_back" in self.rates:
                self.later(20.0, self.go_back)
            self.later(self.faults_until - self.now + RECOVERED_S, self.must_run)
            while self._queue and self.ended is None and self.now < BEGAN + until_s:
                self.now, _, call, values = heapq.heappop(self._queue)
                call(*values)
        except Exception as error:
            raise AssertionError(
                f"seed {self.seed} at {self.now - BEGAN:.2f} s: {type(error).__name__}: {error}"
            ) from error
        return self

    def must_run(self) -> None:
        job = self.job
        assert job.is_over or job.state == "RUNNING", f"{job.state}, waits for {job.waiting!r} long after the faults"
        if self.curable and not job.is_over and job.attempt is not None and job.attempt.step is not None:
            group = self.groups[job.attempt.number]
            assert group.steps, "it hangs long after the faults and nobody minds"


@pytest.fixture
def world() -> type[World]:
    return World
