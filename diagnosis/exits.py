"""How a rank ended, in words, and what that alone suggests."""

from __future__ import annotations

import os
import signal
from typing import Final

from diagnosis.signals import ExitRecord
from diagnosis.taxonomy import FailureClass

_OF_A_CHILD: Final = (2, 4, 6, 7, 8, 9, 10, 11, 12, 15, 24, 25)
"""Signals that a shell reports as 128 + n."""
_LIMITS: Final[dict[int, tuple[FailureClass, float, str]]] = {
    signal.SIGXCPU: (FailureClass.PREEMPTED_OR_CANCELLED, 0.6, "its limit of CPU time is reached"),
    signal.SIGXFSZ: (FailureClass.STORAGE_ERROR, 0.65, "a file reached its limit of size"),
    signal.SIGHUP: (FailureClass.PREEMPTED_OR_CANCELLED, 0.6, "its terminal or session was closed"),
    signal.SIGUSR1: (FailureClass.PREEMPTED_OR_CANCELLED, 0.6, "as schedulers warn of an end, and nobody handled it"),
    signal.SIGUSR2: (FailureClass.PREEMPTED_OR_CANCELLED, 0.6, "as schedulers warn of an end, and nobody handled it"),
}
"""What some signals are sent for."""


def from_wait_status(status: int) -> tuple[int | None, int | None, bool]:
    """(exit code, signal, core dumped) of a status as `waitpid` gives it."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status), bool(status & 0x80)
    return os.WEXITSTATUS(status), None, False


def signal_name(number: int) -> str:
    """`SIGKILL`; a number that this system has no name for is said as such."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ended_by(record: ExitRecord, *names: str) -> bool:
    """Whether one of these signals (`"SIGTERM"`) ended it."""
    number = ending_signal(record)
    return number is not None and signal_name(number) in names


def describe(record: ExitRecord) -> str:
    """`was killed by SIGKILL`, `ended with code 1`."""
    if record.signal is not None:
        core = " (core dumped)" if record.core_dumped else ""
        return f"was killed by {signal_name(record.signal)}{core}"
    if record.code is not None and record.code - 128 in _OF_A_CHILD:
        # A shell or a wrapper between us and the process reports its child's signal like this.
        return f"ended with code {record.code} ({signal_name(record.code - 128)} of its child)"
    return f"ended with code {record.code}"


def ending_signal(record: ExitRecord) -> int | None:
    """The signal that ended it, also when a shell in between turned it into 128 + n."""
    if record.signal is None and record.code is not None and record.code - 128 in _OF_A_CHILD:
        return record.code - 128
    return record.signal


def is_failure(record: ExitRecord) -> bool:
    """It ended badly and we did not do it."""
    return not record.stopped_by_us and record.code != 0


def hint(record: ExitRecord) -> tuple[FailureClass, float, str]:
    """(class, confidence, why) from the wait status alone: the least that a verdict can say."""
    what = describe(record)
    ended_by = ending_signal(record)
    if ended_by == signal.SIGBUS:
        return FailureClass.SHM_EXHAUSTED, 0.6, f"{what}: most often /dev/shm is full"
    if ended_by == signal.SIGKILL:
        return FailureClass.WORKER_CRASH, 0.7, f"{what}, from outside: no out-of-memory kill is on record"
    if ended_by in (signal.SIGTERM, signal.SIGINT):
        return FailureClass.WORKER_CRASH, 0.6, f"{what}, which somebody sent to it"
    if ended_by in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE):
        return FailureClass.WORKER_CRASH, 0.65, what
    if ended_by in _LIMITS:
        failure_class, confidence, why = _LIMITS[ended_by]
        return failure_class, confidence, f"{what}: {why}"
    if ended_by is not None:
        return FailureClass.WORKER_CRASH, 0.5, what
    if record.code == 0:
        return FailureClass.WORKER_CRASH, 0.5, "ended with code 0 while the others still trained"
    if record.code in (126, 127):
        return FailureClass.CONFIG_OR_ARGUMENT_ERROR, 0.6, f"{what}: the command could not be executed"
    return FailureClass.WORKER_CRASH, 0.5, f"{what} and left no traceback"
