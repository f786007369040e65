"""The probe worker as a real process: probes come in as plug-ins, words go over its pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, TypeVar

import msgspec
import pytest

from supervisor.node_health import worker
from supervisor.node_health.contract import JobInfo, Site
from supervisor.node_health.protocol import (
    Alive,
    PollReport,
    ProbeEvent,
    Problem,
    Setup,
    TimedOut,
    WorkerReady,
    decode_worker_message,
)
from supervisor.node_health.worker import BEAT_S, Schedule
from tests.conftest import runs, until

PlugIn = Callable[[str], dict[str, str]]
W = TypeVar("W", bound=msgspec.Struct)
Word = WorkerReady | PollReport | ProbeEvent | TimedOut | Problem | Alive


class Child:
    """A running probe worker of the test's own probes."""

    def __init__(self, env: dict[str, str], setup: Setup) -> None:
        argv = [sys.executable, "-m", "supervisor.node_health.worker", "node"]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self.tell(setup)

    @property
    def _ears(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    def tell(self, word: msgspec.Struct) -> None:
        self._ears.write(msgspec.json.encode(word) + b"\n")
        self._ears.flush()

    def hang_up(self) -> None:
        self._ears.close()

    def words(self) -> Iterator[Word]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word = decode_worker_message(line)
            if not (isinstance(word, Problem) and "cannot be used" in word.text):
                yield word

    def next(self, kind: type[W], fits: Callable[[W], bool] = lambda _: True) -> W:
        """The next word of this kind that fits; the test's own time limit ends a wait for one that never comes."""
        return next(word for word in self.words() if isinstance(word, kind) and fits(word))


@pytest.fixture
def start() -> Iterator[Callable[[dict[str, str], Setup], Child]]:
    children: list[Child] = []

    def begin(env: dict[str, str], setup: Setup) -> Child:
        children.append(Child(env, setup))
        return children[-1]

    yield begin
    for child in children:
        child.process.kill()
        child.process.wait()
        for pipe in (child.process.stdin, child.process.stdout):
            pipe.close()


Start = Callable[[dict[str, str], Setup], Child]

STEADY = """
class SteadyProbe:
    name, every_s, deadline_s = "steady", 0.05, 5.0
    checks = (check("steady"), check("steady_before", when="preflight"))
    def look(self, place, now):
        return [healthy("steady", text=f"{sorted(place.job.ranks.values())}"), healthy("steady_before")]
"""

STUCK = """
class StuckProbe:
    name, every_s, deadline_s = "stuck", 0.05, 0.2
    doing = ""
    checks = (check("stuck"),)
    def look(self, place, now):
        self.doing = "statvfs /mnt"
        time.sleep(3600)
"""


def test_once_gives_a_report_of_each_probe_and_ends(plug_in: PlugIn, start: Start) -> None:
    child = start(plug_in(STEADY), Setup(once=True, only=("steady",)))
    hello, report = child.words()
    assert isinstance(hello, WorkerReady)
    assert [check.id for check in hello.probes["steady"]] == ["steady"]
    assert isinstance(report, PollReport)
    assert [result.check for result in report.results] == ["steady"]
    assert child.process.wait() == 0


def test_checks_are_chosen_by_pattern_time_and_site(plug_in: PlugIn, start: Start) -> None:
    env = plug_in(STEADY)
    both = start(env, Setup(once=True, only=("steady*",), preflight=True)).next(WorkerReady)
    assert [check.id for check in both.probes["steady"]] == ["steady", "steady_before"]
    setup = Setup(once=True, only=("steady*",), skip=("steady_b*",), site=Site(skip=("steady",)), preflight=True)
    assert start(env, setup).next(WorkerReady).probes == {}


def test_a_look_that_never_returns_is_told_and_delays_nobody(plug_in: PlugIn, start: Start) -> None:
    child = start(plug_in(STEADY + STUCK), Setup(only=("st*",)))
    timed_out = child.next(TimedOut)
    assert (timed_out.probe, timed_out.doing, timed_out.state) == ("stuck", "statvfs /mnt", "S")
    assert timed_out.since_s >= 0.2
    assert os.path.exists(f"/proc/{child.process.pid}/task/{timed_out.tid}")
    moments = []
    for word in child.words():
        if isinstance(word, PollReport):
            moments.append(word.mono)
        if len(moments) == 5:
            break
    assert moments[-1] - moments[0] < 60  # 0.05 s each, and the one that is stuck takes an hour


def test_a_probe_that_fails_says_why_and_goes_on(plug_in: PlugIn, start: Start) -> None:
    source = """
class FlakyProbe:
    name, every_s, deadline_s = "flaky", 0.01, 5.0
    checks = (check("flaky"),)
    looks = 0
    def look(self, place, now):
        self.looks += 1
        print("noise on standard output")
        if self.looks < 3:
            raise KeyError("\\x1b[31mno such line")
        return [healthy("flaky"), healthy("not_mine")]
"""
    child = start(plug_in(source), Setup(only=("flaky",)))
    (result,) = child.next(PollReport).results
    assert result.status == "unknown"
    assert "flaky: KeyError" in result.text
    assert "\x1b" not in result.text
    assert "not_mine" in child.next(Problem).text
    good = child.next(PollReport)
    assert [result.status for result in good.results] == ["healthy"]


def test_one_strange_name_or_number_costs_no_other(plug_in: PlugIn, start: Start) -> None:
    """A name that is no UTF-8, a number that is none; and a result made wrong costs its own probe only."""
    source = """
class OddProbe:
    name, every_s, deadline_s = "odd", 0.01, 5.0
    checks = (check("odd"),)
    looks = 0
    def look(self, place, now):
        self.looks += 1
        name = os.fsdecode(b"eth\\xff0")
        number = "1" if self.looks > 1 else 1.0
        return [healthy("odd", name, name, gpu=name), CheckResult(check="odd", status="healthy", values={
            "nan": float("nan"), "inf": float("inf"), "one": number})]
"""
    child = start(plug_in("from diagnosis.health import CheckResult\n" + source), Setup(only=("odd",)))
    named, counted = child.next(PollReport).results
    assert (named.device, named.text, named.gpu) == ("eth0", "eth0", "eth0")
    assert counted.values == {"one": 1.0}
    (result,) = child.next(PollReport).results
    assert "odd: " in result.text


def test_later_lines_tell_of_the_job(plug_in: PlugIn, start: Start) -> None:
    child = start(plug_in(STEADY), Setup(only=("steady",)))
    child.tell(JobInfo(ranks={11: 0, 12: 5}))
    assert child.next(PollReport, lambda report: report.results[0].text == "[0, 5]")


def test_a_storm_of_events_is_told_as_one_and_a_count(plug_in: PlugIn, start: Start) -> None:
    source = """
class StormProbe:
    name, every_s, deadline_s = "storm", 60.0, 5.0
    checks = (check("storm"),)
    def look(self, place, now):
        return [healthy("storm")]
    def listen(self, place, tell):
        for _ in range(100_000):
            tell(Signal(source="gpu", text="NVRM: Xid (PCI:0000:c1:00): 92", at=time.time()))
        for number in range(5000):
            tell(Signal(source="gpu", text=f"another {number}", at=time.time()))
"""
    child = start(plug_in(source), Setup(only=("storm",)))
    told = []
    for word in child.words():
        if isinstance(word, ProbeEvent):
            told.append(word)
        if isinstance(word, Problem):
            assert "not reported" in word.text
            break
    assert sum(word.count for word in told if "Xid" in word.signal.text) == 100_000
    assert len(told) < 1000
    assert all(word.signal.mono > 0 for word in told)


@pytest.mark.parametrize("source", [STEADY, STEADY + STUCK])
def test_it_ends_with_its_parent(plug_in: PlugIn, start: Start, source: str) -> None:
    child = start(plug_in(source), Setup(only=("st*",)))
    child.next(PollReport)
    child.hang_up()
    assert child.process.wait(60) == 0


def test_it_dies_with_its_parent_even_when_python_is_stuck(plug_in: PlugIn) -> None:
    """A call that keeps the interpreter lock for ever: only the kernel can end this process with its parent."""
    source = """
import ctypes
class GilProbe:
    name, every_s, deadline_s = "gil", 60.0, 5.0
    checks = (check("gil"),)
    def look(self, place, now):
        ctypes.PyDLL(None).pause()
"""
    argv = [sys.executable, "-m", "supervisor.node_health.worker", "node"]
    parent_of = (
        "import subprocess, sys, time; child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE);"
        """child.stdin.write(b'{"only":["gil"]}\\n'); child.stdin.flush(); print(child.pid, flush=True);"""
        "time.sleep(3600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_of, *argv], stdout=subprocess.PIPE, env=plug_in(source))
    assert parent.stdout is not None
    with parent.stdout as words:
        child = int(words.readline())
        assert b'"hello"' in words.readline()
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    until(lambda: not runs(child), 60, "the end of the child")


def test_wrong_calls_end_with_2() -> None:
    argv = [sys.executable, "-m", "supervisor.node_health.worker"]
    assert subprocess.run([*argv, "moon"], stderr=subprocess.DEVNULL).returncode == 2
    assert subprocess.run([*argv, "node"], input=b"no json\n", stderr=subprocess.DEVNULL).returncode == 2
    assert subprocess.run([*argv, "node"], input=b"").returncode == 0


@pytest.mark.parametrize("every_s", [10.0, 30.0, 60.0])
def test_looks_that_take_a_moment_keep_their_period_and_meet(every_s: float) -> None:
    of_station = Schedule()
    due = of_station.due(1000.0, every_s)
    assert abs(due - 1000.0 - every_s) <= BEAT_S / 2
    assert of_station.due(due + 0.3, every_s) == pytest.approx(due + every_s)
    other = of_station.due(1003.0, 10.0)
    assert (due - other) / BEAT_S == pytest.approx(round((due - other) / BEAT_S)), "they wake the process together"


def test_frequent_looks_are_only_spread() -> None:
    assert all(0.9 <= Schedule().due(5.0, 1.0) - 5.0 <= 1.1 for _ in range(50))


def test_one_that_never_returns_holds_the_others_up_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "TURN_S", 0.01)
    of_station, hung, over, looks = Schedule(), threading.Event(), threading.Event(), []

    def hang() -> None:
        with of_station.taken():
            hung.set()
            over.wait(60)

    thread = threading.Thread(target=hang)
    thread.start()
    assert hung.wait(60)
    for number in range(3):
        with of_station.taken():
            looks.append(number)
    over.set()
    thread.join(60)
    with of_station.taken():
        looks.append(3)
    assert looks == [0, 1, 2, 3]
