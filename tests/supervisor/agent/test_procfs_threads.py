"""Which threads can go on by themselves: real processes, asked from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from supervisor.agent.procfs import blocked, can_be_woken, interpreter_data, thread_waits_for_ever, waiting
from tests.conftest import until
from tests.tables import read

PREAMBLE = """
import ctypes, fcntl, multiprocessing, os, queue, signal, socket, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
def thread(target):
    one = threading.Thread(target=target, daemon=True)
    one.start()
    return one
"""


@pytest.fixture
def process() -> Iterator[Callable[[str], int]]:
    """Lines of Python -> the pid of a process that has come to its last one."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> int:
        *lines, last = code.strip().splitlines()
        text = "\n".join((PREAMBLE, *lines, "print(flush=True)", last))
        one = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, start_new_session=True)
        started.append(one)
        one.stdout.readline()
        return one.pid

    yield start
    for one in started:
        os.killpg(one.pid, signal.SIGKILL)  # with the processes that it started
        one.wait()
        one.stdout.close()


PROGRAMS = read(__file__)
DEADLOCKS, HONEST = PROGRAMS["deadlocks"], PROGRAMS["honest"]


@pytest.mark.parametrize("name", DEADLOCKS)
def test_a_deadlock_is_seen_and_stays(process: Callable[[str], int], name: str) -> None:
    pid = process(DEADLOCKS[name])
    deadline = time.monotonic() + 60
    while (first := blocked(pid)) is None or blocked(pid) != first:
        assert time.monotonic() < deadline, "it may go on, or does"
        time.sleep(0.05)
    looks = [blocked(pid) for _ in range(20)]
    while first not in looks:  # one that waits for Python's lock may run in each look of a busy machine
        assert time.monotonic() < deadline
        looks.append(blocked(pid))
    assert set(looks) <= ({first, None} if "Python's own" in name else {first}), (
        "who wants Python's lock runs for moments"
    )
    assert thread_waits_for_ever(pid, pid)


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_wait_is_none(process: Callable[[str], int], name: str) -> None:
    pid = process(HONEST[name])
    until(lambda: blocked(pid) is None, 60, "its threads: they are being started")
    for _ in range(40):
        assert blocked(pid) is None
        time.sleep(0.01)


def test_the_beacons_own_thread_does_not_count(process: Callable[[str], int]) -> None:
    pid = process("a = threading.Lock(); a.acquire(); t = thread(lambda: time.sleep(1000))\na.acquire()")
    ours = max(int(one) for one in os.listdir(f"/proc/{pid}/task"))
    until(lambda: blocked(pid, spared=ours), 60, "the deadlock")
    assert blocked(pid) is None


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("202 0x5500 0x189 0x0 0x0 0x0 0xffffffff 0x7ffe 0x7f5f", (0x5500, False)),
        ("202 0x5500 0x189 0x0 0x7f01 0x0 0xffffffff 0x7ffe 0x7f5f", (0x5500, True)),
        ("202 0x5500 0x109 0x0 0x0 0x0 0xffffffff 0x7ffe 0x7f5f", None),
        ("202 0x5500 0x81 0x1 0x0 0x0 0x0 0x7ffe 0x7f5f", None),
        ("230 0x1 0x1 0x7ffd 0x0 0x0 0x0 0x7ffe 0x7f5f", None),
        ("running", None),
        ("-1 0x7ffe 0x7f5f", None),
        ("", None),
    ],
)
def test_what_a_system_call_waits_for(call: str, told: tuple[int, bool] | None) -> None:
    assert waiting(call, futex=202) == told
    assert waiting(call, futex=None) is None


@pytest.mark.parametrize(("caught", "may"), [("0", 0), ("180000002", 0), ("4002", 1), ("800000", 1), ("10000", 1)])
def test_a_handler_may_end_a_wait(caught: str, may: int) -> None:
    """Python's own of SIGINT and the C library's are everywhere; SIGTERM's, SIGXCPU's and SIGCHLD's the script's."""
    assert can_be_woken(f"Name:\tpython\nSigCgt:\t{caught:0>16}\n") == bool(may)


def test_where_pythons_own_data_is() -> None:
    maps = """55d0-55e0 r--p 00000000 fe:00 1 /usr/bin/python3.11
55e0-55f0 rw-p 00001000 fe:00 1 /usr/bin/python3.11
55f0-5600 rw-p 00000000 00:00 0
5700-5800 rw-p 00000000 00:00 0 [heap]
7f00-7f10 rw-p 00000000 00:00 0
7f10-7f20 rw-p 00000000 fe:00 2 /lib/libc.so.6"""
    assert interpreter_data(maps) == [(0x55E0, 0x55F0), (0x55F0, 0x5600)]
