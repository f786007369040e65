"""A probe worker: the small process that runs a group of probes, `python -m supervisor.node_health.worker GROUP`.

Each probe looks on a thread of its own, so one that never returns delays no other. While a look is past its deadline,
the main thread reports it, with what it waits in. Looks that are due at about the same time run one after the other: a
process that wakes up seldom costs far less. Messages go both ways over standard input and output (`protocol.py`). The
worker ends when its parent ends: standard input closes, and the kernel ends a worker whose interpreter cannot run.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from diagnosis.health import Check, CheckResult, unknown
from diagnosis.signals import Signal, clean_text
from supervisor.files import head_of
from supervisor.node_health import contract
from supervisor.node_health.contract import (
    Brisk,
    EventListener,
    JobInfo,
    Moment,
    Probe,
    ProbeContext,
    Talkative,
    is_asked_for,
    raised,
)
from supervisor.node_health.protocol import (
    FLAW,
    Alive,
    NodeInventory,
    PollReport,
    ProbeEvent,
    Problem,
    Setup,
    TimedOut,
    WorkerMessage,
    WorkerReady,
)


def waiting_in(task: str) -> tuple[str, str]:
    """State letter and wait channel of a thread, from its folder in /proc (these two never block); `?` and empty."""
    stat, wchan = (head_of(f"{task}/{name}").decode(errors="replace") for name in ("stat", "wchan"))
    fields = stat[stat.rfind(")") + 1 :].split()
    return (fields[0] if fields else "?"), ("" if wchan.strip() == "0" else clean_text(wchan.strip(), 64))


BEAT_S: Final = 5.0
"""Looks that are rare enough are due at multiples of this, from a moment of the worker's own: not all nodes look
at one time."""
TURN_S: Final = 0.2
"""A look waits at most so long for the one before it, which may never return."""


def random_fraction() -> float:
    return os.urandom(1)[0] / 256


class Schedule:
    def __init__(self) -> None:
        self._phase = random_fraction() * BEAT_S
        self._lock = threading.Lock()

    def due(self, after: float, every_s: float) -> float:
        """Monotonic time of the look that follows one which ended at `after`."""
        if every_s < 2 * BEAT_S:
            return after + every_s * (0.9 + 0.2 * random_fraction())
        return self._phase + round((after + every_s - self._phase) / BEAT_S) * BEAT_S

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Holds the turn to look. Threads that look at the same time would wait for each other at every call."""
        mine = self._lock.acquire(timeout=TURN_S)
        try:
            yield
        finally:
            if mine:
                self._lock.release()


NICE: Final = 10
"""Training comes first; not SCHED_IDLE: on a node whose every CPU is busy that would look like a hang."""
ALIVE_EVERY_S: Final = 20.0
TIMED_OUT_EVERY_S: Final = 15.0
SPREAD_S: Final = 1.0
"""First looks are spread over so many seconds."""
LISTEN_AGAIN_S: Final = 60.0
STOCK_EVERY_S: Final = 600.0
LONGEST_BACK_OFF: Final = 16
RESULTS_KEPT: Final = 2000
"""Results of one look that are sent; more than any node has devices."""
TEXT_LIMIT: Final = 400
VALUES_KEPT: Final = 40
EVENT_WINDOW_S: Final = 10.0
EVENT_TEXTS: Final = 256
"""Different texts sent in one window; more are only counted."""
CLOSELY: Final = 0.5
"""Of the pause between two looks, on a node that was repaired lately."""
_PR_SET_PDEATHSIG: Final = 1


class LineWriter:
    """Writes messages as whole lines, from any thread. Ends the process when nobody reads them any more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._encode = msgspec.json.Encoder().encode
        self.written_at = time.monotonic()

    def send(self, word: WorkerMessage) -> None:
        line = self._encode(word) + b"\n"
        with self._lock:
            self.written_at = time.monotonic()
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:
                os._exit(0)


class EventThrottle:
    """Sends the events of a listening probe: each text at once, its repeats within a window as one count."""

    def __init__(self, probe: str, writer: LineWriter) -> None:
        self._probe = probe
        self._writer = writer
        self._until = 0.0
        self._held: dict[str, ProbeEvent] = {}
        self._left_out = 0

    def tell(self, event: Signal) -> None:
        now = time.monotonic()
        if now >= self._until:
            self.flush()
            self._until = now + EVENT_WINDOW_S
        event = msgspec.structs.replace(event, text=clean_text(event.text), mono=event.mono or now)
        repeats = self._held.get(event.text)
        if repeats is not None:
            count = repeats.count + 1
            self._held[event.text] = ProbeEvent(probe=self._probe, signal=event, count=count)
        elif len(self._held) < EVENT_TEXTS:
            self._held[event.text] = ProbeEvent(probe=self._probe, signal=event, count=0)
            self._writer.send(ProbeEvent(probe=self._probe, signal=event))
        else:
            self._left_out += 1

    def flush(self) -> None:
        for word in self._held.values():
            if word.count:
                self._writer.send(word)
        self._held.clear()
        if self._left_out:
            self._writer.send(
                Problem(text=f"{self._probe}: {self._left_out} events in {EVENT_WINDOW_S:g} s were not reported")
            )
            self._left_out = 0


class ProbeThread:
    """One probe: its looks, one after the other, on a thread of its own."""

    def __init__(
        self,
        probe: Probe,
        checks: Sequence[Check],
        place: ProbeContext,
        writer: LineWriter,
        until: float = 0.0,
        schedule: Schedule | None = None,
    ) -> None:
        self.probe = probe
        self._schedule = schedule or Schedule()
        self._until = until or float("inf")
        self.checks = tuple(checks)
        self.began: float | None = None
        """Monotonic time at which the current look began; None between looks."""
        self.due = 0.0
        self.tid = 0
        self.reported_at = 0.0
        """When the current look was last reported as timed out."""
        self.looks = 0
        self._ids = {check.id for check in checks}
        self._place = place
        self._writer = writer
        self._failures = 0
        self._strange = False
        self._inventory: dict[str, str] = {}

    def start(self, *, once: bool) -> None:
        self.due = time.monotonic() + (0.0 if once else random_fraction() * SPREAD_S)
        _thread(f"look {self.probe.name}", self._run, once)
        if isinstance(self.probe, EventListener) and not once and self._place.live:
            _thread(f"listen {self.probe.name}", self._listen, self.probe)

    def _run(self, once: bool) -> None:
        self.tid = threading.get_native_id()
        while True:
            time.sleep(max(0.0, self.due - time.monotonic()))
            if once:
                self.look()
                return
            with self._schedule.taken():
                self.look()

    def look(self) -> None:
        """Look once, send the report, and set when the next look is due."""
        now = Moment(wall=time.time(), mono=time.monotonic())
        cpu_s = time.thread_time()
        self.reported_at, self.began = 0.0, now.mono
        try:
            results = self._fitting(self.probe.look(self._place, now))
            self._failures = 0
        except (Exception, SystemExit) as error:  # a probe's bug costs its own checks, nothing else
            self._failures += 1
            why = clean_text(f"{FLAW}{self.probe.name}: {raised(error)}", TEXT_LIMIT)
            if self._failures == 1:
                self._writer.send(Problem(text=why))
            results = tuple(unknown(check.id, why) for check in self.checks)
        cpu_s = time.thread_time() - cpu_s
        took_s = time.monotonic() - now.mono
        back_off = min(2**self._failures, LONGEST_BACK_OFF)
        pause_s = self.probe.every_s * (CLOSELY if self._place.job.on_probation else 1.0)
        self.due = self._schedule.due(now.mono + took_s, pause_s * back_off)
        self._writer.send(
            PollReport(
                probe=self.probe.name,
                wall=now.wall,
                mono=now.mono,
                took_s=round(took_s, 6),
                cpu_s=round(cpu_s, 6),
                results=results,
            )
        )
        self._send_inventory()
        self.began = None
        self.looks += 1

    def _send_inventory(self) -> None:
        stock = getattr(self.probe, "inventory", None)
        if isinstance(stock, dict) and stock != self._inventory:
            self._inventory = dict(stock)
            self._writer.send(_inventory(self._inventory))

    def _fitting(self, results: Sequence[CheckResult]) -> tuple[CheckResult, ...]:
        """Results of the checks that are wanted, cleaned and bounded."""
        strange = {result.check for result in results} - {check.id for check in self.probe.checks}
        if strange and not self._strange:
            self._strange = True
            named = clean_text(", ".join(sorted(map(str, strange))), TEXT_LIMIT)
            self._writer.send(
                Problem(text=f"the probe {self.probe.name} reports checks that it does not have: {named}")
            )
        told = tuple(_bounded(result) for result in results[:RESULTS_KEPT] if result.check in self._ids)
        if not type(self.probe).__module__.startswith("supervisor."):
            msgspec.json.decode(
                msgspec.json.encode(told), type=tuple[CheckResult, ...]
            )  # raises for a plug-in's own faults
        return told

    def _listen(self, probe: EventListener) -> None:
        throttle = EventThrottle(probe.name, self._writer)
        told = False
        while True:
            try:
                probe.listen(self._place, throttle.tell)
            except (Exception, SystemExit) as error:
                if not told:
                    told = True
                    why = f"{probe.name} hears nothing: {raised(error)}"
                    self._writer.send(Problem(text=clean_text(why, TEXT_LIMIT)))
            throttle.flush()
            time.sleep(LISTEN_AGAIN_S)

    def times_out_at(self) -> float:
        """Monotonic time at which the current look, or the next one, is past its deadline."""
        first = min((self.began or self.due) + self._patience_s(), self._until)
        return max(first, self.reported_at + TIMED_OUT_EVERY_S) if self.began is not None else first

    def _patience_s(self) -> float:
        """How long a look may take before it is reported."""
        if self._place.once and isinstance(self.probe, Brisk):
            return min(self.probe.deadline_s, self.probe.once_s)
        return self.probe.deadline_s

    def timed_out(self, now: float) -> TimedOut | None:
        """The report of a look that is past its deadline; None if there is nothing to report now."""
        began = self.began
        if began is None or now < self.times_out_at():
            return None
        self.reported_at = now
        doing = self.probe.doing if isinstance(self.probe, Talkative) else ""
        state, wchan = waiting_in(f"/proc/self/task/{self.tid}")
        return TimedOut(
            probe=self.probe.name,
            doing=clean_text(doing, 100),
            since_s=round(now - began, 3),
            tid=self.tid,
            state=state,
            wchan=wchan,
        )


def _bounded(result: CheckResult) -> CheckResult:
    """The result as it can be sent: one strange name or number must not lose the others of its look."""
    text, device, gpu, uuid = result.text, result.device, result.gpu, result.gpu_uuid
    if not (
        text.isprintable() and (device + gpu + uuid).isprintable() and len(text) < TEXT_LIMIT and len(device) < 200
    ):
        text, device, gpu, uuid = clean_text(text, TEXT_LIMIT), *(clean_text(name, 200) for name in (device, gpu, uuid))
        result = msgspec.structs.replace(result, text=text, device=device, gpu=gpu, gpu_uuid=uuid)
    if len(result.values) > VALUES_KEPT or not all(map(math.isfinite, result.values.values())):
        finite = [(name, value) for name, value in result.values.items() if math.isfinite(value)]
        result = msgspec.structs.replace(result, values=dict(finite[:VALUES_KEPT]))
    return result


def _inventory(found: dict[str, str]) -> NodeInventory:
    return NodeInventory(
        inventory={clean_text(str(name), 100): clean_text(str(value), 200) for name, value in found.items()}
    )


def _thread(name: str, target: object, *arguments: object) -> None:
    threading.Thread(target=target, args=arguments, name=name, daemon=True).start()  # type: ignore[arg-type]


class ProbeWorker:
    """Runs the probes of one group until its parent closes standard input."""

    def __init__(self, group: str, setup: Setup, writer: LineWriter) -> None:
        self._group = group
        self._setup = setup
        self._writer = writer
        self._place = ProbeContext(
            root=Path(setup.root),
            node=setup.node,
            site=setup.site,
            state_dir=Path(setup.state_dir) if setup.state_dir else None,
            job=setup.job,
            preflight=setup.preflight,
            once=setup.once,
        )
        probes, problems = contract.load(group, for_agent=not setup.once)
        skip = (*setup.skip, *setup.site.skip)
        chosen = {
            probe.name: tuple(
                check
                for check in probe.checks
                if is_asked_for(check, probe.name, setup.only, skip, preflight=setup.preflight)
            )
            for probe in probes
        }
        schedule = Schedule()
        self._threads = [
            ProbeThread(p, chosen[p.name], self._place, writer, setup.until, schedule) for p in probes if chosen[p.name]
        ]
        checks = {thread.probe.name: thread.checks for thread in self._threads}
        writer.send(WorkerReady(worker=group, pid=os.getpid(), probes=checks))
        for problem in problems:
            writer.send(Problem(text=problem))

    def run(self, stdin_fd: int, rest: bytes) -> None:
        """Until there is nobody to tell. `stdin_fd`: where the parent's lines come in; `rest`: read of them already."""
        gc.collect()
        gc.freeze()
        for thread in self._threads:
            thread.start(once=self._setup.once)
        if self._group == "node" and not self._setup.once:
            _thread("stock", self._watch_inventory)
        while True:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                self._take(line)
            ready, _, _ = select.select([stdin_fd], [], [], self._next_watch_s())
            if ready:
                data = os.read(stdin_fd, 65536)
                if not data:
                    return
                rest += data
            if self._watch():
                return

    def _watch_inventory(self) -> None:
        """Runs on a thread of its own: the training environment may be on a file system that hangs."""
        from supervisor.node_health.machine import inventory

        before: dict[str, str] = {}
        while True:
            found = inventory(self._place)
            if found != before:
                before = found
                self._writer.send(_inventory(found))
            time.sleep(STOCK_EVERY_S)

    def _take(self, line: bytes) -> None:
        try:
            self._place.job = msgspec.json.decode(line, type=JobInfo)
        except msgspec.DecodeError:
            pass

    def _next_watch_s(self) -> float:
        """Seconds until a look may time out, or the parent must be told that we are alive."""
        if self._setup.once:
            return 0.02
        now = time.monotonic()
        times = (thread.times_out_at() - now for thread in self._threads)
        return min(ALIVE_EVERY_S / 2, max(0.05, min(times, default=ALIVE_EVERY_S)))

    def _watch(self) -> bool:
        """Report looks that do not return. True when there is nothing left to wait for."""
        now = time.monotonic()
        for thread in self._threads:
            word = thread.timed_out(now)
            if word is not None:
                self._writer.send(word)
        if now - self._writer.written_at > ALIVE_EVERY_S:
            self._writer.send(Alive())
        return self._setup.once and all(thread.looks or thread.reported_at for thread in self._threads)


def first_line(stdin_fd: int) -> tuple[bytes, bytes]:
    """The parent's first line, and what came after it; empty when it closed before."""
    data = b""
    while b"\n" not in data:
        chunk = os.read(stdin_fd, 65536)
        if not chunk:
            return b"", b""
        data += chunk
    line, _, rest = data.partition(b"\n")
    return line, rest


def _settle_in() -> int:
    """Low priority, and killed with the parent. Returns where to write messages: prints go to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.nice(NICE)
    except (OSError, AttributeError):  # no Linux, or not allowed: standard input still tells of the parent's end
        pass
    voice = os.dup(1)
    os.dup2(2, 1)
    return voice


def main(argv: Sequence[str]) -> int:
    """`python -m supervisor.node_health.worker gpu|node`."""
    if len(argv) != 2 or argv[1] not in contract.WORKERS:
        print(f"usage: python -m supervisor.node_health.worker {'|'.join(contract.WORKERS)}", file=sys.stderr)
        return 2
    writer = LineWriter(_settle_in())
    line, rest = first_line(0)
    if not line:
        return 0
    try:
        setup = msgspec.json.decode(line, type=Setup)
    except msgspec.DecodeError as error:
        print(f"the first line is no Setup: {error}", file=sys.stderr)
        return 2
    ProbeWorker(argv[1], setup, writer).run(0, rest)
    sys.stderr.flush()
    os._exit(0)  # threads that hang in a driver or a dead file system are left to the kernel


if __name__ == "__main__":
    sys.exit(main(sys.argv))
