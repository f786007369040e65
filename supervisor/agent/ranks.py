"""One rank as seen from outside: process state, beacon and output joined into a `RankSample`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import msgspec

from diagnosis import rules
from diagnosis.logs.steps import StepReader
from diagnosis.signals import Finding, Phase, ProcessState, RankSample, Signal
from supervisor.agent.beacon import Beacon, BeaconFile
from supervisor.agent.output import CHUNK_BYTES, OutputTail, Stream
from supervisor.agent.procfs import ProcessReader
from supervisor.agent.threads import blocked
from supervisor.keeper_client import WorkerProcess
from supervisor.paths import LocalPaths

CHECKPOINT_BYTES = 4 << 20
"""Bytes written between two looks that count as progress (a checkpoint being saved)."""
STILL_S = 1.0
"""A rank without progress for so long is looked at thread by thread."""
FINDINGS_PER_RANK = 50
REST_BYTES = 64 * 1024
LAST_READS = 16
"""Of a rank that has ended all output is read at once, up to so many pieces; what is older than the last is left out
then: the newest step and the last words are at the end."""


class RankProbe:
    """Look at one rank every so often with `look()`; `sample()` says what was seen."""

    def __init__(
        self,
        worker: WorkerProcess,
        paths: LocalPaths,
        streams: Iterable[Stream],
        line_rules: rules.Rules,
        offsets: dict[str, int],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = worker
        self._now = monotonic
        self._rules = line_rules
        self._process = ProcessReader(worker.pid)
        self._beacon = BeaconFile(paths.rank_file(worker.attempt, worker.rank, "beacon"))
        self._tails = [OutputTail(s.path, offsets.get(s.path, 0)) for s in streams if s.rank == worker.rank]
        self._steps = [StepReader() for _ in self._tails]
        self._moved_at = self._read_at = self._now()
        """`_read_at`: when its output was read last."""
        self._waiting_since: float | None = None
        self._stopped_since: float | None = None
        self._blocked: tuple[tuple[int, int], ...] | None = None
        self._locked_since: float | None = None
        self._missed = False
        """The newest look at its threads found one that may go on, the one before did not."""
        self._told_by_beacon: Beacon | None = None
        self._beat_at: float | None = None
        self._groups: dict[str, tuple[int, int]] = {}
        self._beacon_step: int | None = None
        self._phase: Phase = ""
        self._step: int | None = None
        self._state: ProcessState = "?"
        self._cpu_s = 0.0
        self._switches = 0
        self._switches_old = True
        """They were not read since a step was made."""
        self._io_bytes = 0
        self.written_bytes = 0
        self._findings = 0
        self._rests: dict[str, bytes] = {}
        self._read_to_the_end = False

    def look(self) -> tuple[list[Finding], bool]:
        """Look once; new findings in the output, and whether more output waits to be read."""
        before = self._step
        findings, new_bytes, more = self._read_output()
        self._read_process(new_bytes, stepped=self._step != before)
        self._read_beacon()
        self._look_at_threads()
        self._read_at = self._now()
        return findings, more

    def _read_output(self) -> tuple[list[Finding], int, bool]:
        findings: list[Finding] = []
        new_bytes, more = 0, False
        for tail, steps in zip(self._tails, self._steps, strict=True):
            for data in self._pieces(tail):
                new_bytes += len(data)
                more = more or len(data) == CHUNK_BYTES
                steps.feed(data)
                if self._findings < FINDINGS_PER_RANK:
                    findings.extend(self._scan(tail, data))
        if self._has_ended:
            more, self._read_to_the_end = False, True
        self._note_step()
        return findings, new_bytes, more

    @property
    def _has_ended(self) -> bool:
        """Its end is known, or it went with its keeper."""
        return self.worker.status is not None or self._state == "X"

    def _pieces(self, tail: OutputTail) -> Iterator[bytes]:
        """What is new: of a living rank one piece, of one that has ended all, with an end of the last line."""
        if not self._has_ended:
            yield from filter(None, [tail.read()])
            return
        for _ in range(LAST_READS):
            data = tail.read()
            if not data:
                break
            yield data
        else:
            tail.skip_to_the_end()
            yield tail.read()
        if not self._read_to_the_end:
            yield b"\n"

    def _scan(self, tail: OutputTail, data: bytes) -> list[Finding]:
        """Findings in the whole lines up to now; the rest is kept for the next look."""
        data = self._rests.pop(tail.path, b"") + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1  # a progress bar ends with the next one
        if end == 0 and len(data) > REST_BYTES:
            end = len(data)
        self._rests[tail.path] = data[end:]
        at, rank = time.time(), self.worker.rank
        found = [
            rules.finding(match, Signal(source="output", text=match.text, at=at, rank=rank))
            for match in self._rules.scan(data[:end])
        ][: FINDINGS_PER_RANK - self._findings]
        self._findings += len(found)
        return [msgspec.structs.replace(finding, attempt=self.worker.attempt) for finding in found]

    def _note_step(self) -> None:
        step = self._beacon_step
        for reader in self._steps:
            seen = reader.step
            if seen is not None and (step is None or seen > step):
                step = seen
        if step is not None and step != self._step:
            self._step = step
            self._moved_at = self._now() if step == self._beacon_step else max(self._moved_at, self._written_at())

    def _written_at(self) -> float:
        """When the newest output was written, by the files' own times: between the last time it was read and now."""
        now = self._now()
        newest = max((tail.written_at for tail in self._tails), default=0.0)
        return min(now, max(self._read_at, now - (time.time() - newest)))

    def _read_process(self, new_bytes: int, *, stepped: bool) -> None:
        """The main thread's switches matter only where output is the one sign of life: not beside a new step."""
        wants_switches = not stepped and (new_bytes > 0 or self._switches_old)
        reading = self._process.read(switches=wants_switches)
        now = self._now()
        self._note_state(reading.state if reading is not None else None, now)
        if reading is None:
            return
        wrote_checkpoint = reading.written_bytes - self.written_bytes > CHECKPOINT_BYTES
        switches = self._switches if reading.switches is None else reading.switches
        spoke = new_bytes > 0 and switches > self._switches
        if wrote_checkpoint or spoke:
            self._moved_at = now
        self._cpu_s, self._switches = reading.cpu_s, switches
        self._switches_old = not wants_switches and (stepped or self._switches_old)
        self.written_bytes = reading.written_bytes
        self._io_bytes = reading.read_bytes + reading.written_bytes

    def _note_state(self, state: ProcessState | None, now: float) -> None:
        """None: the process is gone."""
        self._state = state or "X"
        if state is None:
            return
        if state not in "Tt":
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now

    def _look_at_threads(self) -> None:
        """Since when no thread of it has run, and none can be woken but by another of them."""
        now = self._now()
        beacon = self._told_by_beacon
        if now - self._moved_at < STILL_S or self._state != "S":
            self._blocked, self._locked_since, self._missed = None, None, False
            return
        found = blocked(self.worker.pid, beacon.thread if beacon is not None else None)
        if found is None and not self._missed:
            self._missed = (
                True  # who waits for Python's lock runs for moments: the others have not run if all is as before
            )
            return
        if found is None or found != self._blocked:
            self._locked_since = None if found is None else now
        self._blocked, self._missed = found, False

    def _read_beacon(self) -> None:
        beacon = self._beacon.read()
        if beacon is None:
            return
        self._told_by_beacon = beacon
        self._beat_at = beacon.monotonic
        self._beacon_step = beacon.step
        self._phase = beacon.phase
        if beacon.groups != self._groups:
            now = self._now()
            self._groups = beacon.groups
            # The beacon knows better than we do when this was.
            self._moved_at = max(self._moved_at, min(now, beacon.monotonic))
            waiting = any(enqueued > completed for enqueued, completed in beacon.groups.values())
            self._waiting_since = now if waiting else None

    @property
    def shows_progress(self) -> bool:
        return self._step is not None or any(completed > 0 for _, completed in self._groups.values())

    @property
    def is_stopped(self) -> bool:
        return self._stopped_since is not None

    def sample(self) -> RankSample:
        """What is known of the rank now."""
        now = self._now()
        worker = self.worker
        targets = [reader.last_step for reader in self._steps if reader.last_step is not None]
        beacon = self._told_by_beacon
        phases = [self._phase, *(reader.phase for reader in self._steps)]
        worst = max(self._steps, key=lambda reader: reader.bad_reports, default=None)
        return RankSample(
            rank=worker.rank,
            local_rank=worker.local_rank,
            pid=worker.pid,
            state=self._state,
            step=self._step,
            last_step=max(targets, default=None),
            groups=self._groups,
            moved_age_s=round(now - self._moved_at, 3),
            waiting_s=None if self._waiting_since is None else round(now - self._waiting_since, 3),
            stopped_s=None if self._stopped_since is None else round(now - self._stopped_since, 3),
            beat_age_s=None if self._beat_at is None else round(max(0.0, now - self._beat_at), 3),
            cpu_s=self._cpu_s,
            switches=self._switches,
            io_bytes=self._io_bytes,
            phase=next((phase for phase in phases if phase), ""),
            bad_reports=worst.bad_reports if worst is not None else 0,
            bad_since=worst.bad_since if worst is not None and worst.bad_reports else None,
            world=beacon.world if beacon is not None else 0,
            timeout_s=beacon.timeout_s if beacon is not None else None,
            locked_s=None if self._locked_since is None else round(now - self._locked_since, 3),
            exit=worker.exit_record(),
        )

    def offsets(self) -> dict[str, int]:
        return {tail.path: tail.offset for tail in self._tails}

    def close(self) -> None:
        self._process.close()
        self._beacon.close()
        for tail in self._tails:
            tail.close()
