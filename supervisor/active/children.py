"""The children that make the tests: started with the training Python, watched, killed when their time is up.

Each has a CUDA context of its own, which ends with it. What it says is hostile input: bounded here, checked where it is
read. A child that even SIGKILL does not end is left, and reported: its driver hangs.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from diagnosis.signals import Frozen, clean_line, signal_name
from supervisor.training import HERE

PROGRAM: Final = HERE / "active_tests.py"
ANSWER_BYTES: Final = 1 << 20
WORDS_BYTES: Final = 4096
"""Of stderr: the end is kept."""
LINES: Final = 2000
LOOK_EVERY_S: Final = 0.25
GONE_S: Final = 5.0
"""So long after SIGKILL a process may take to end."""
OTHERS_S: Final = 2.0
"""Once a child of a group has failed, the others only wait for it."""
NOT_FOR_CHILDREN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


class ChildReport(Frozen, frozen=True, kw_only=True):
    """What one child said, and how it ended."""

    device: str = ""
    lines: tuple[dict[str, Any], ...] = ()
    hung: str = ""
    """It was killed because its time was up: after what, in words."""
    died: str = ""
    """It ended by itself and not in order: how, in words."""
    unkillable: bool = False

    @property
    def kind(self) -> str:
        return next((str(line["kind"])[:200] for line in self.lines if line.get("kind")), "")

    @property
    def uuid(self) -> str:
        return next((str(line["uuid"])[:80] for line in self.lines if line.get("uuid")), "")

    @property
    def began(self) -> bool:
        """torch was imported, and the device answered."""
        return bool(self.kind)


class _Child:
    def __init__(
        self,
        python: str,
        order: Mapping[str, Any],
        environment: Mapping[str, str],
        cwd: Path,
        inherited: tuple[int, ...],
    ) -> None:
        self.device = str(order.get("device", ""))
        self.process = subprocess.Popen(
            [python, "-u", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            cwd=cwd,
            pass_fds=inherited,
            start_new_session=True,
        )
        self.pidfd = os.pidfd_open(self.process.pid)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode({**order, "parent": os.getpid()}) + b"\n")
            self.process.stdin.close()
        except OSError:  # it is gone already: its end says why
            pass
        self.out, self.words = bytearray(), bytearray()
        self.open_pipes = {pipe.fileno(): pipe for pipe in (self.process.stdout, self.process.stderr) if pipe}
        self._answers = self.process.stdout.fileno() if self.process.stdout is not None else -1
        self.killed = ""
        self.gone = False

    def read(self, descriptor: int) -> None:
        data = os.read(descriptor, 65536)
        if not data:
            self.open_pipes.pop(descriptor).close()
        elif descriptor == self._answers:
            self.out += data[: max(0, ANSWER_BYTES - len(self.out))]
        else:
            self.words = (self.words + data)[-WORDS_BYTES:]

    def kill(self, why: str) -> None:
        if not self.killed:
            self.killed = why
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def memory_bytes(self) -> int:
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def report(self) -> ChildReport:
        lines = _lines(bytes(self.out))
        done = any(line.get("end") for line in lines)
        last = next((str(line.get("test")) for line in reversed(lines) if line.get("test")), "its start")
        error = next((clean_line(str(line["error"]), 300) for line in lines if line.get("error")), "")
        died = "" if done or self.killed else error or self._how()
        return ChildReport(
            device=self.device,
            lines=lines,
            hung=f"{self.killed}, after {clean_line(last, 80)}" if self.killed and not done else "",
            died=died,
            unkillable=not self.gone,
        )

    def _how(self) -> str:
        code = self.process.returncode
        how = f"was killed by {signal_name(-code)}" if code is not None and code < 0 else f"ended with code {code}"
        words = self.words.decode(errors="replace").strip().rpartition("\n")[2]
        return clean_line(f"{how}: {words}" if words else how, 300)

    def close(self) -> None:
        for pipe in self.open_pipes.values():
            pipe.close()
        os.close(self.pidfd)


def _lines(data: bytes) -> tuple[dict[str, Any], ...]:
    found = []
    for raw in data.split(b"\n")[:LINES]:
        try:
            line = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return tuple(found)


def run_children(
    python: str,
    orders: Sequence[Mapping[str, Any]],
    deadline_s: float,
    *,
    environment: Mapping[str, str],
    memory_bytes: int,
    cwd: Path = Path("/"),
    inherited: tuple[int, ...] = (),
    together: bool = False,
) -> tuple[ChildReport, ...]:
    """Run a child for each order at the same time; their reports in the same order. Blocks for `deadline_s` and
    `GONE_S` at most. `together`: they are ranks of one group, and none can go on without the others.

    Raises OSError when they cannot be started.
    """
    given = {key: value for key, value in environment.items() if key not in NOT_FOR_CHILDREN}
    children: list[_Child] = []
    try:
        children.extend(_Child(python, order, given, cwd, inherited) for order in orders)
        _watch(children, time.monotonic() + deadline_s, deadline_s, memory_bytes, together)
        return tuple(child.report() for child in children)
    finally:
        for child in children:
            child.kill("it was not needed any more")
            child.process.poll()
            child.close()


def _watch(children: Sequence[_Child], deadline: float, deadline_s: float, memory_bytes: int, together: bool) -> None:
    left_at: float | None = None
    """When those that only wait for a failed one are killed."""
    while any(not child.gone for child in children):
        now = time.monotonic()
        if now >= deadline + GONE_S:
            return
        poll, owner = select.poll(), {}
        for child in children:
            for descriptor in (*child.open_pipes, *(() if child.gone else (child.pidfd,))):
                poll.register(descriptor, select.POLLIN)
                owner[descriptor] = child
        for descriptor, _ in poll.poll(LOOK_EVERY_S * 1000):
            child = owner[descriptor]
            if descriptor != child.pidfd:
                child.read(descriptor)
            elif child.process.poll() is not None:
                _read_rest(child)
                child.gone = True
        now = time.monotonic()
        if together and left_at is None and any(child.gone and child.report().died for child in children):
            left_at = now + OTHERS_S
        for child in children:
            if child.gone:
                continue
            if now >= deadline:
                child.kill(f"did not end within {deadline_s:.0f} s")
            elif left_at is not None and now >= left_at:
                child.kill("another rank of this node had failed")
            elif child.memory_bytes() > memory_bytes:
                child.kill(f"it took more than {memory_bytes >> 20} MiB of memory")


def _read_rest(child: _Child) -> None:
    """What an ended child had written; a process that it left behind may hold its pipes open for ever."""
    for descriptor in list(child.open_pipes):
        os.set_blocking(descriptor, False)
        try:
            while descriptor in child.open_pipes:
                child.read(descriptor)
        except BlockingIOError:
            pass
