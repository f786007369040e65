"""The ranks of a node as seen from outside: process state, progress beacon and output, joined into `RankSample`s.

`RankMonitor` has a `RankTracker` for each rank of the newest attempt. A tracker reads the rank's process, its beacon
(docs/node-files.md, "Beacon") and what it writes. Files are read in pieces, never held in memory.
"""

from __future__ import annotations

import functools
import itertools
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from diagnosis import rules
from diagnosis.logs.steps import LASTING, LossCurves, StepMatch, StepReader, match_steps
from diagnosis.rules import Rules
from diagnosis.signals import Finding, Frozen, LossAlarm, Phase, ProcessState, RankClock, RankSample
from supervisor.agent.procfs import RankProcessReader, blocked
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


class RankMonitor:
    """`follow()` sets which workers there are, `look()` looks at all of them once."""

    def __init__(self, paths: LocalPaths, rules: Rules, offsets: dict[str, int]) -> None:
        self._paths = paths
        self._rules = rules
        self._offsets = offsets
        self._trackers: dict[int, RankTracker] = {}
        self._curves: dict[int, list[LossCurves]] = {}
        """Rank -> the losses of its streams in the attempt before: it goes on from an earlier step of them."""
        self.attempt = 0

    def follow(self, attempt: int, workers: Sequence[WorkerProcess]) -> None:
        """Workers of the newest attempt, ended ones included; the trackers of older attempts are closed."""
        if attempt != self.attempt:
            self.close()
            self.attempt = attempt
        missing = [worker for worker in workers if worker.rank not in self._trackers]
        streams = read_streams(self._paths.streams(attempt)) if missing else ()
        for worker in missing:
            tracker = RankTracker(worker, self._paths, streams, self._rules, self._offsets)
            tracker.go_on_from(self._curves.pop(worker.rank, []))
            self._trackers[worker.rank] = tracker
        for worker in workers:
            self._trackers[worker.rank].worker = worker

    def look(self) -> tuple[list[Finding], bool]:
        """New findings, and whether much output still waits to be read."""
        findings: list[Finding] = []
        more = False
        for tracker in self._trackers.values():
            found, unread = tracker.look()
            findings.extend(found)
            more = more or unread
        return findings, more

    @property
    def shows_progress(self) -> bool:
        """Whether a rank of this attempt has made a step or completed a collective."""
        return any(tracker.shows_progress for tracker in self._trackers.values())

    @property
    def stopped(self) -> tuple[int, ...]:
        """Ranks in state T or t."""
        return tuple(rank for rank, tracker in self._trackers.items() if tracker.is_stopped)

    def samples(self) -> tuple[RankSample, ...]:
        return tuple(tracker.sample() for _, tracker in sorted(self._trackers.items()))

    def steps(self) -> dict[int, int]:
        """Rank -> its newest step, of those that have made one."""
        steps = {rank: tracker.sample().step for rank, tracker in self._trackers.items()}
        return {rank: step for rank, step in steps.items() if step is not None}

    def written(self) -> dict[int, int]:
        """Pid -> bytes that it has written since it started."""
        return {tracker.worker.pid: tracker.written_bytes for tracker in self._trackers.values()}

    def offsets(self) -> dict[str, int]:
        """How far each stream was read, for the next agent."""
        return {path: offset for tracker in self._trackers.values() for path, offset in tracker.offsets().items()}

    def close(self) -> None:
        self._curves |= {rank: tracker.curves for rank, tracker in self._trackers.items()}
        for tracker in self._trackers.values():
            tracker.close()
        self._trackers.clear()


class RankTracker:
    """One rank. `look()` is called every so often; `sample()` is what is known after it."""

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
        self._process = RankProcessReader(worker.pid)
        self._beacon = BeaconFile(paths.rank_file(worker.attempt, worker.rank, "beacon"))
        self._tails = [OutputTail(s.path, offsets.get(s.path, 0)) for s in streams if s.rank == worker.rank]
        self._steps = [StepReader() for _ in self._tails]
        self._told_losses = LossCurves()
        """Of `recovery.worker.heartbeat`."""
        self._told_bad: list[int] = []
        """The newest steps in a row whose loss, as told there, was no number: the first ones, and the last."""
        self._told_good: int | None = None
        """The newest step whose loss was one. Of a quick script some in between are not seen."""
        self._moved_at = self._read_at = self._now()
        """`_read_at`: when its output was read last."""
        self._waiting_since: float | None = None
        self._stopped_since: float | None = None
        self._blocked: tuple[tuple[int, int], ...] | None = None
        self._locked_since: float | None = None
        self._ran_for_a_moment = False
        """The newest look at its threads found one that may go on, the look before did not."""
        self._newest = BeaconReading()
        self._clock = ClockWindow()
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

    @property
    def curves(self) -> list[LossCurves]:
        """For the tracker of the next attempt (`go_on_from`)."""
        return [self._told_losses, *(steps.curves for steps in self._steps)]

    def go_on_from(self, curves: Sequence[LossCurves]) -> None:
        """What the losses of this rank's last attempt were like."""
        if len(curves) != 1 + len(self._steps):
            return
        for one in curves:
            one.begin_again()
        self._told_losses = curves[0]
        for steps, one in zip(self._steps, curves[1:], strict=True):
            steps.curves = one

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
            rules.finding(match, "output", at=at, rank=rank, attempt=self.worker.attempt)
            for match in self._rules.scan(data[:end])
        ][: FINDINGS_PER_RANK - self._findings]
        self._findings += len(found)
        return found

    def _note_step(self) -> None:
        step = self._newest.step
        for reader in self._steps:
            seen = reader.step
            if seen is not None and (step is None or seen > step):
                step = seen
        if step is not None and step != self._step:
            self._step = step
            self._moved_at = self._now() if step == self._newest.step else max(self._moved_at, self._written_at())

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
        wrote_output = new_bytes > 0 and switches > self._switches
        if wrote_checkpoint or wrote_output:
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
        """Find out since when no thread of it has run, and each waits for another of them."""
        now = self._now()
        if now - self._moved_at < STILL_S or self._state != "S":
            self._blocked, self._locked_since, self._ran_for_a_moment = None, None, False
            return
        found = blocked(self.worker.pid, self._newest.thread)
        if found is None and not self._ran_for_a_moment:
            # A thread that waits for Python's lock runs for moments. The others have not run if all is as before.
            self._ran_for_a_moment = True
            return
        if found is None or found != self._blocked:
            self._locked_since = None if found is None else now
        self._blocked, self._ran_for_a_moment = found, False

    def _read_beacon(self) -> None:
        beacon, before = self._beacon.read(), self._newest
        if beacon is None:
            return
        self._newest = beacon
        self._read_losses(beacon, before)
        self._clock.add(self._now(), beacon.clock, self._step)
        if beacon.clock.at > before.clock.at:
            self._moved_at = max(self._moved_at, min(self._now(), beacon.clock.at))
        if beacon.groups != before.groups:
            now = self._now()
            # The beacon knows better than we do when this was.
            self._moved_at = max(self._moved_at, min(now, beacon.monotonic))
            waiting = any(enqueued > completed for enqueued, completed in beacon.groups.values())
            self._waiting_since = now if waiting else None

    def _read_losses(self, beacon: BeaconReading, before: BeaconReading) -> None:
        """What the script has told since the last look."""
        new = beacon.losses_seen - before.losses_seen
        for step, loss in beacon.losses[-new:] if new > 0 else ():
            if loss is None:
                self._told_bad = [*self._told_bad[: LASTING - 1], step]
            else:
                self._told_bad, self._told_good = [], step
                self._told_losses.feed(b"", step, loss)

    def _loss_alarm(self) -> LossAlarm | None:
        if len(self._told_bad) >= LASTING:
            first, good = self._told_bad[0], self._told_good
            return LossAlarm(kind="nan", step=first, interval=1 if good is None else max(1, first - good))
        alarms = [self._told_losses.alarm, *(steps.loss_alarm for steps in self._steps)]
        return next((alarm for alarm in alarms if alarm is not None), None)

    @property
    def shows_progress(self) -> bool:
        stepped = self._step is not None or self._newest.clock.at > 0
        return stepped or any(completed > 0 for _, completed in self._newest.groups.values())

    @property
    def is_stopped(self) -> bool:
        return self._stopped_since is not None

    def sample(self) -> RankSample:
        """What is known of the rank now."""
        now = self._now()
        worker = self.worker
        targets = [reader.last_step for reader in self._steps if reader.last_step is not None]
        beacon = self._newest
        phases = [beacon.phase, *(reader.phase for reader in self._steps)]
        worst = max(self._steps, key=lambda reader: reader.bad_reports, default=None)
        loss_step, loss = next((one.newest for one in self.curves if one.newest is not None), (None, None))
        return RankSample(
            rank=worker.rank,
            local_rank=worker.local_rank,
            pid=worker.pid,
            state=self._state,
            step=self._step,
            last_step=max(targets, default=None),
            groups=self._newest.groups,
            moved_age_s=round(now - self._moved_at, 3),
            waiting_s=None if self._waiting_since is None else round(now - self._waiting_since, 3),
            stopped_s=None if self._stopped_since is None else round(now - self._stopped_since, 3),
            beat_age_s=round(max(0.0, now - beacon.monotonic), 3) if beacon.monotonic else None,
            cpu_s=self._cpu_s,
            switches=self._switches,
            io_bytes=self._io_bytes,
            phase=next((phase for phase in phases if phase), ""),
            bad_reports=max(worst.bad_reports if worst is not None else 0, len(self._told_bad)),
            bad_since=worst.bad_since if worst is not None and worst.bad_reports else next(iter(self._told_bad), None),
            loss=loss,
            loss_step=loss_step,
            watches_loss=any(curves.watched for curves in self.curves),
            loss_alarm=self._loss_alarm(),
            world=beacon.world,
            timeout_s=beacon.timeout_s,
            clock=self._clock.sample(now),
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


# ----- output -----


CHUNK_BYTES = 256 * 1024
BACKLOG_BYTES = 64 * 1024 * 1024


class Stream(Frozen, frozen=True, kw_only=True):
    """One line of `streams.json`: where a rank's stdout or stderr goes."""

    rank: int
    local_rank: int
    stream: str
    path: str
    terminal: bool = False
    error_file: str = ""


def read_streams(path: Path) -> tuple[Stream, ...]:
    """The streams of an attempt; none when the file is not there yet or cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[Stream, ...])
    except (OSError, msgspec.DecodeError):
        return ()


class OutputTail:
    """Reads a growing file in bounded pieces from `offset` on. A file that shrinks is read from its start."""

    def __init__(self, path: str, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.skipped_bytes = 0
        self.written_at = 0.0
        """Unix time of the newest write, as the file system has it."""
        self._descriptor: int | None = None

    def read(self) -> bytes:
        """The next piece, at most 256 KiB; empty when nothing new is there."""
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            found = os.fstat(self._descriptor)
            size, self.written_at = found.st_size, found.st_mtime
            if size < self.offset:
                self.offset = 0
            if size - self.offset > BACKLOG_BYTES:
                self.skipped_bytes += size - CHUNK_BYTES - self.offset
                self.offset = size - CHUNK_BYTES
            if size == self.offset:
                return b""
            data = os.pread(self._descriptor, min(CHUNK_BYTES, size - self.offset), self.offset)
        except OSError:  # not there yet, or its file system is in trouble: later
            return b""
        self.offset += len(data)
        return data

    def skip_to_the_end(self) -> None:
        """So that the next read gives the last piece of what is there now."""
        if self._descriptor is not None:
            end = os.fstat(self._descriptor).st_size
            self.skipped_bytes += max(0, end - CHUNK_BYTES - self.offset)
            self.offset = max(self.offset, end - CHUNK_BYTES)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def last_bytes(path: str, limit: int = 32 * 1024) -> bytes:
    """The end of a file, at most `limit` bytes; empty when it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, limit, max(0, size - limit))
    except OSError:
        return b""
    finally:
        os.close(descriptor)


# ----- the beacon -----


_HEADER = struct.Struct("<8sIIddI")
_MAGIC = b"UBEACON1"
_FIGURES, _FIGURES_AT = struct.Struct("=6d"), 4040
MAX_GROUPS = 32
WINDOW_S = 30.0
KEPT_EACH_S = 3.0
PAIRS = 32


class ClockReading(NamedTuple):
    """The step clock's figures, as they are at this moment (`supervisor/training/clock.py`)."""

    steps: int = 0
    """Steps of the script's optimizers since it started; 0 also where they are compiled, and cannot be counted."""
    at: float = 0.0
    """CLOCK_MONOTONIC of the newest one; 0: there was none."""
    slowest_s: float = 0.0
    """The longest of the last 50 to 100."""
    calls: int = 0
    """Of `step` of all optimizers."""
    input_s: float = 0.0
    """Seconds in which its main thread has waited for batches."""
    batches: int = 0
    """It has got so many from data loaders; 0: it has none, or not torch's."""


class BeaconReading(Frozen, frozen=True, kw_only=True):
    """What a beacon says: JSON of the rank, and the time from the header. Its tables are not to be changed: others
    have the same ones."""

    monotonic: float = 0.0
    """CLOCK_MONOTONIC of the node when the beacon thread last ran; 0: never."""
    groups: dict[str, tuple[int, int]] = {}
    step: int | None = None
    losses: tuple[tuple[int, float | None], ...] = ()
    """The newest steps with the losses that the script told; None for one that is no number."""
    losses_seen: int = 0
    """How many it has told in all."""
    phase: Phase = ""
    world: int = 0
    """WORLD_SIZE; 0: not known."""
    thread: int = 0
    """The beacon's own thread."""
    timeout_s: float | None = None
    """The time-out of collectives in the group of all ranks, where torch has it."""
    members: dict[str, str] = {}
    """Name of a process group -> its ranks, as `CollectiveEntry.group` has them."""
    clock: ClockReading = ClockReading()


class ClockWindow:
    """The step clock over the last half minute or so."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, ClockReading]] = deque()
        """One for every `KEPT_EACH_S`, of `WINDOW_S`; the first is the oldest, ..."""
        self._newest = ClockReading()
        self._pairs: deque[tuple[int, int]] = deque(maxlen=PAIRS)
        """(count, told step), each from when a new step was told."""
        self._told: int | None = None
        self._match: StepMatch | None = None

    def add(self, now: float, reading: ClockReading, told: int | None) -> None:
        """What the beacon shows at `now`; `told`: the newest step of the output, read before."""
        self._newest = reading
        if told != self._told:
            if told is not None and self._told is not None and told < self._told:
                self._pairs.clear()  # another counter is believed
            self._told = told
            if told is not None and reading.steps:
                self._pairs.append((reading.steps, told))
                self._match = match_steps(self._pairs)
        if not self._kept or now - self._kept[-1][0] >= KEPT_EACH_S:
            self._kept.append((now, reading))
            while now - self._kept[0][0] > WINDOW_S:
                self._kept.popleft()

    def sample(self, now: float) -> RankClock | None:
        """None before the first step."""
        newest = self._newest
        if not newest.at:
            return None
        since, oldest = self._kept[0]
        before = next((one for _, one in self._kept if one.steps), newest)
        steps, seconds = newest.steps - before.steps, now - since
        share = (newest.input_s - oldest.input_s) / seconds if seconds >= KEPT_EACH_S and newest.batches else None
        return RankClock(
            steps=newest.steps,
            age_s=round(max(0.0, now - newest.at), 3),
            step_s=float(f"{(newest.at - before.at) / steps:.4g}") if steps > 0 else None,
            slowest_s=float(f"{newest.slowest_s:.4g}"),
            input_share=None if share is None else round(min(1.0, share), 3),
            step=self._step(newest.steps),
        )

    def _step(self, count: int) -> int | None:
        """Never further than the output's next line: what drifts apart slowly goes together, too, for a while."""
        if self._match is None or self._told is None:
            return None
        told = [step for _, step in self._pairs]
        widest = max((after - before for before, after in itertools.pairwise(told)), default=0)
        return max(self._told, min(self._match.step(count), self._told + widest))


_decode = msgspec.json.Decoder(BeaconReading).decode


class BeaconFile:
    """Keeps the file open; `read()` gives None while there is nothing whole to read."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._descriptor: int | None = None

    def read(self) -> BeaconReading | None:
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._descriptor, 4096, 0)
        except OSError:
            return None
        return parse(data)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def parse(data: bytes) -> BeaconReading | None:
    """A beacon, or None when it is torn, half-written or none at all."""
    if len(data) < _HEADER.size:
        return None
    magic, sequence, _pid, _wall_time, monotonic, length = _HEADER.unpack_from(data)
    if magic != _MAGIC or sequence % 2 or length > len(data) - _HEADER.size:
        return None
    payload = _payload(data[_HEADER.size : _HEADER.size + length])
    if payload is None:
        return None
    return msgspec.structs.replace(payload, monotonic=monotonic, clock=_clock(data))


def _clock(data: bytes) -> ClockReading:
    """It is the rank's own page: any number may stand there."""
    if len(data) < _FIGURES_AT + _FIGURES.size:
        return ClockReading()
    steps, at, slowest_s, calls, input_s, batches = figures = _FIGURES.unpack_from(data, _FIGURES_AT)
    if not all(0 <= figure < 2**53 for figure in figures):
        return ClockReading()
    return ClockReading(int(steps), at, slowest_s, int(calls), input_s, int(batches))


@functools.lru_cache(32)
def _payload(text: bytes) -> BeaconReading | None:
    """Cached: most ranks write the same at the same time, and a rank that waits writes the same again."""
    try:
        found = _decode(text)
    except msgspec.DecodeError:
        return None
    groups, members = (dict(list(table.items())[:MAX_GROUPS]) for table in (found.groups, found.members))
    return msgspec.structs.replace(found, groups=groups, members=members)
