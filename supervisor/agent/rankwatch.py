"""All ranks of a node's newest attempt: one probe each, their samples and the findings in their output."""

from __future__ import annotations

from collections.abc import Sequence

from diagnosis.rules import Rules
from diagnosis.signals import Finding, RankSample
from supervisor.agent.output import read_streams
from supervisor.agent.ranks import RankProbe
from supervisor.keeper_client import WorkerProcess
from supervisor.paths import LocalPaths


class RankMonitor:
    """`follow()` says which workers there are, `look()` looks at them once."""

    def __init__(self, paths: LocalPaths, rules: Rules, offsets: dict[str, int]) -> None:
        self._paths = paths
        self._rules = rules
        self._offsets = offsets
        self._probes: dict[int, RankProbe] = {}
        self.attempt = 0

    def follow(self, attempt: int, workers: Sequence[WorkerProcess]) -> None:
        """Workers of the newest attempt, ended ones included; probes of older attempts are closed."""
        if attempt != self.attempt:
            self.close()
            self.attempt = attempt
        missing = [worker for worker in workers if worker.rank not in self._probes]
        streams = read_streams(self._paths.streams(attempt)) if missing else ()
        for worker in missing:
            self._probes[worker.rank] = RankProbe(worker, self._paths, streams, self._rules, self._offsets)
        for worker in workers:
            self._probes[worker.rank].worker = worker

    def look(self) -> tuple[list[Finding], bool]:
        """New findings, and whether much output still waits to be read."""
        findings: list[Finding] = []
        more = False
        for probe in self._probes.values():
            found, unread = probe.look()
            findings.extend(found)
            more = more or unread
        return findings, more

    @property
    def shows_progress(self) -> bool:
        """Whether a rank of this attempt has made a step or completed a collective."""
        return any(probe.shows_progress for probe in self._probes.values())

    @property
    def stopped(self) -> tuple[int, ...]:
        """Ranks in state T or t."""
        return tuple(rank for rank, probe in self._probes.items() if probe.is_stopped)

    def samples(self) -> tuple[RankSample, ...]:
        return tuple(probe.sample() for _, probe in sorted(self._probes.items()))

    def steps(self) -> dict[int, int]:
        """Rank -> its newest step, of those that have made one."""
        steps = {rank: probe.sample().step for rank, probe in self._probes.items()}
        return {rank: step for rank, step in steps.items() if step is not None}

    def written(self) -> dict[int, int]:
        """Pid -> bytes that it has written since it started."""
        return {probe.worker.pid: probe.written_bytes for probe in self._probes.values()}

    def offsets(self) -> dict[str, int]:
        """How far each stream was read, for the next agent."""
        return {path: offset for probe in self._probes.values() for path, offset in probe.offsets().items()}

    def close(self) -> None:
        for probe in self._probes.values():
            probe.close()
        self._probes.clear()
