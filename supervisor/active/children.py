"""The children that make the tests: started with the training Python, watched, killed when their time is up.

A parent that has imported torch forks them; where that is not safe, each is a process of its own. Each has a CUDA
context of its own, which ends with it. What it says is hostile input: bounded here, checked where it is
read. A child that even SIGKILL does not end is left, and reported: its driver hangs.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from diagnosis.signals import Frozen, clean_line, signal_name
from supervisor.active.cpu_quota import QuotaWatch, Throttled, throttled_most_s
from supervisor.training import HERE

PROGRAM: Final = HERE / "active_tests.py"
ANSWER_BYTES: Final = 1 << 20
WORDS_BYTES: Final = 4096
"""Of stderr: the end is kept."""
LINES: Final = 2000
LOOK_EVERY_S: Final = 0.25
WAITED_S: Final = 1.0
"""Every process waits a little."""
STALLED_S: Final = 3.0
"""A collective of the quick suite fails after 5 s."""
GONE_S: Final = 5.0
"""So long after SIGKILL a process may take to end."""
OTHERS_S: Final = 2.0
"""Once a child of a group has failed, the others only wait for it."""
FORK_S: Final = 5.0
"""A parent that has not forked by then is stopped, or has no CPU: it is not asked again."""
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
    took_s: float = 0.0
    waited_s: float = 0.0
    """Of that its threads waited for a CPU, by the kernel's word."""
    throttled_s: float = 0.0
    """Of that because the CPU quota of its control group was used up."""
    stalled_s: float = 0.0
    """How long it was looked at after its last progress."""
    stalled_waited_s: float = 0.0
    """Of that its threads waited for a CPU."""
    stalled_throttled_s: float = 0.0
    """Of that because of the quota."""

    @property
    def waited(self) -> float:
        """The share of its time that it waited for a CPU that others had; 0 where that was not long."""
        waited_s = self.waited_s - self.throttled_s
        return waited_s / self.took_s if waited_s >= WAITED_S else 0.0

    @property
    def throttled(self) -> float:
        """The share of its time that its CPU quota kept it waiting."""
        return min(1.0, self.throttled_s / self.took_s) if self.took_s > 0.0 else 0.0

    @property
    def stalled_waited(self) -> float:
        """The share of its last test's time that it waited for a CPU that others had; 1 where that was too short to
        tell.
        """
        waited_s = self.stalled_waited_s - self.stalled_throttled_s
        return max(0.0, waited_s) / self.stalled_s if self.stalled_s >= STALLED_S else 1.0

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


class _Started(NamedTuple):
    """A child, and what is held of it: descriptors of its process and of its two outputs."""

    pid: int
    pidfd: int
    out: int
    err: int
    code: Callable[[], int | None]
    """Its exit code once it has ended, as `subprocess` says it; None: it is not known."""

    def drop(self) -> None:
        """Nobody will hear it."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        for descriptor in (self.pidfd, self.out, self.err):
            os.close(descriptor)


def _fresh(
    python: str, order: Mapping[str, Any], environment: Mapping[str, str], cwd: Path, inherited: tuple[int, ...]
) -> _Started:
    process = subprocess.Popen(
        [python, "-u", str(PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        cwd=cwd,
        pass_fds=inherited,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with contextlib.ExitStack() as undo, process.stdout, process.stderr, process.stdin:
        undo.callback(process.kill)
        pidfd = os.pidfd_open(process.pid)
        undo.callback(os.close, pidfd)
        out = os.dup(process.stdout.fileno())
        undo.callback(os.close, out)
        err = os.dup(process.stderr.fileno())
        undo.callback(os.close, err)
        with contextlib.suppress(OSError):  # it may be gone already: its end says why
            process.stdin.write(msgspec.json.encode({**order, "parent": os.getpid()}) + b"\n")
            process.stdin.close()
        undo.pop_all()
    return _Started(process.pid, pidfd, out, err, process.poll)


class WarmParent:
    """A process of the training Python that has imported torch and forks children: they need not import it again.

    It ends with `close`, and with this process. Not for several threads at once.
    """

    def __init__(self, python: str, environment: Mapping[str, str], cwd: Path) -> None:
        """Raises OSError."""
        self._environment = {key: value for key, value in environment.items() if key not in NOT_FOR_CHILDREN}
        # OpenBLAS, which numpy brings, starts threads when it is imported. No test computes with it.
        own = {**self._environment, "OPENBLAS_NUM_THREADS": "1"}
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                    [python, "-u", str(PROGRAM)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=own,
                    cwd=cwd,
                    start_new_session=True,
                )
            except BaseException:
                self._channel.close()
                raise
        with contextlib.suppress(OSError):
            self._channel.send(msgspec.json.encode({"do": "serve", "parent": os.getpid()}) + b"\n")

    @property
    def pid(self) -> int:
        """0: it is gone."""
        return self._process.pid if self._process is not None else 0

    def ready(self, within_s: float) -> str:
        """Wait until it can fork: empty, or why it cannot. Raises TimeoutError."""
        why = "it ended before it had imported torch"
        try:
            message, _ = self._receive(within_s)
            why = "" if message.get("ready") is True else str(message.get("why", why))
        except TimeoutError:
            self.close()
            raise
        except OSError:
            pass
        if why:
            self.close()
        return clean_line(why, 200)

    def _receive(self, within_s: float) -> tuple[dict[str, Any], list[int]]:
        """Raises OSError."""
        self._channel.settimeout(within_s)
        data, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 16, 1)
        try:
            return msgspec.json.decode(data, type=dict[str, Any]), descriptors
        except msgspec.DecodeError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError("it does not answer as it should") from None

    def fork(
        self, order: Mapping[str, Any], environment: Mapping[str, str], inherited: tuple[int, ...]
    ) -> _Started | None:
        """None: it cannot; from then on it is gone."""
        if self._process is None:
            return None
        changed = {key: value for key, value in environment.items() if self._environment.get(key) != value}
        message = msgspec.json.encode({"order": order, "environment": changed})
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                out, err = (_pipe(ours, theirs) for _ in range(2))
                self._channel.settimeout(FORK_S)
                socket.send_fds(self._channel, [message], [out[1], err[1], *inherited])
                answer, given = self._receive(FORK_S)
                for descriptor in given:
                    ours.callback(os.close, descriptor)
                (pidfd,), pid = given, int(answer["pid"])
            except (OSError, ValueError, KeyError, TypeError):
                self.close()
                return None
            ours.pop_all()
            return _Started(pid, pidfd, out[0], err[0], lambda: self._code(pid))

    def _code(self, pid: int) -> int | None:
        if self._process is None:
            return None
        try:
            self._channel.settimeout(FORK_S)
            self._channel.send(msgspec.json.encode({"ended": pid}))
            code = self._receive(FORK_S)[0].get("code")
        except OSError:
            self.close()
            return None
        return code if isinstance(code, int) else None

    def close(self) -> None:
        """Its children are killed with it."""
        process, self._process = self._process, None
        self._channel.close()
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GONE_S)


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    """Its ends for reading and for writing are closed with these."""
    reading, writing = os.pipe()
    ours.callback(os.close, reading)
    theirs.callback(os.close, writing)
    return reading, writing


class _Child:
    def __init__(self, device: str, started: _Started, siblings: int) -> None:
        self.device = device
        self.started = started
        self.pidfd = started.pidfd
        self.out, self.words = bytearray(), bytearray()
        self.open_pipes = {started.out, started.err}
        self.killed = ""
        self.gone = False
        self.code: int | None = None
        self._began = time.monotonic()
        self._took_s = self._waited_s = 0.0
        self._said_at, self._waited_before_s = self._began, 0.0
        self._looked_at = self._began
        self._waited_of: dict[str, float] = {}
        self._siblings = siblings
        self._quota = QuotaWatch(started.pid)
        self._throttled_first = self._throttled_said = self._throttled_now = self._quota.look()

    def read(self, descriptor: int) -> None:
        data = os.read(descriptor, 65536)
        if not data:
            self.open_pipes.discard(descriptor)
            os.close(descriptor)
        elif descriptor == self.started.out:
            self.out += data[: max(0, ANSWER_BYTES - len(self.out))]
            if b'"test"' in data or b'"joined"' in data:  # an error is no progress
                self.look()
                self._said_at, self._waited_before_s = self._looked_at, self._waited_s
                self._throttled_said = self._throttled_now
        else:
            self.words = (self.words + data)[-WORDS_BYTES:]

    def look(self) -> None:
        """How long it has lived, and how long of that its threads waited for a CPU."""
        self._looked_at = time.monotonic()
        self._throttled_now = self._quota.look()
        self._took_s = self._looked_at - self._began
        for path in Path(f"/proc/{self.started.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                waited = int(path.read_text().split()[1]) / 1e9
                self._waited_s += max(0.0, waited - self._waited_of.get(path.parent.name, 0.0))
                self._waited_of[path.parent.name] = waited  # of a thread that has ended, what it waited is kept

    def ended(self) -> None:
        """It has: what it had written is read."""
        self._took_s = time.monotonic() - self._began
        self.code = self.started.code()
        _read_rest(self)
        self.gone = True

    def kill(self, why: str) -> None:
        if not self.killed:
            self.killed = why
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def memory_bytes(self) -> int:
        try:
            pages = int(Path(f"/proc/{self.started.pid}/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def report(self) -> ChildReport:
        lines = _lines(bytes(self.out))
        done = any(line.get("end") for line in lines)
        last = next((str(line.get("test")) for line in reversed(lines) if line.get("test")), "its start")
        error = next((clean_line(str(line["error"]), 300) for line in lines if line.get("error")), "")
        died = "" if done or self.killed else error or self._how()
        stalled_s = max(0.0, self._looked_at - self._said_at)
        stalled_waited_s = self._waited_s - self._waited_before_s
        return ChildReport(
            device=self.device,
            lines=lines,
            hung=f"{self.killed}, after {clean_line(last, 80)}" if self.killed and not done else "",
            died=died,
            unkillable=not self.gone,
            took_s=self._took_s,
            waited_s=self._waited_s,
            throttled_s=self._throttled_s(self._throttled_first, self._took_s, self._waited_s),
            stalled_s=stalled_s,
            stalled_waited_s=stalled_waited_s,
            stalled_throttled_s=self._throttled_s(self._throttled_said, stalled_s, stalled_waited_s),
        )

    def _throttled_s(self, before: tuple[Throttled, ...], took_s: float, waited_s: float) -> float:
        return throttled_most_s(before, self._throttled_now, took_s, waited_s, self._siblings)

    def _how(self) -> str:
        code = self.code
        how = "ended" if code is None else f"ended with code {code}"
        how = f"was killed by {signal_name(-code)}" if code is not None and code < 0 else how
        words = self.words.decode(errors="replace").strip().rpartition("\n")[2]
        return clean_line(f"{how}: {words}" if words else how, 300)

    def close(self) -> None:
        for descriptor in self.open_pipes:
            os.close(descriptor)
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
    warm: WarmParent | None = None,
    until: int = -1,
) -> tuple[ChildReport, ...]:
    """Run a child for each order at the same time; their reports in the same order. Blocks for `deadline_s` and
    `GONE_S` at most. `together`: they are ranks of one group, and none can go on without the others. `warm` forks
    them, if it can. `until`: a connection; should its other end hang up, they are killed.

    Raises OSError when they cannot be started.
    """
    given = {key: value for key, value in environment.items() if key not in NOT_FOR_CHILDREN}
    children: list[_Child] = []
    try:
        for order in orders:
            started = warm.fork(order, given, inherited) if warm is not None else None
            started = started or _fresh(python, order, given, cwd, inherited)
            try:
                children.append(_Child(str(order.get("device", "")), started, len(orders)))
            except BaseException:
                started.drop()
                raise
        _watch(children, time.monotonic() + deadline_s, deadline_s, memory_bytes, together, until)
        return tuple(child.report() for child in children)
    finally:
        for child in children:
            child.kill("it was not needed any more")
            child.close()


def _watch(
    children: Sequence[_Child], deadline: float, deadline_s: float, memory_bytes: int, together: bool, until: int
) -> None:
    left_at: float | None = None
    """When those that only wait for a failed one are killed."""
    while any(not child.gone for child in children):
        now = time.monotonic()
        if now >= deadline + GONE_S:
            return
        poll, owner = select.poll(), {}
        if until >= 0:
            poll.register(until, select.POLLRDHUP)
        for child in children:
            for descriptor in (*child.open_pipes, *(() if child.gone else (child.pidfd,))):
                poll.register(descriptor, select.POLLIN)
                owner[descriptor] = child
        for descriptor, _ in poll.poll(LOOK_EVERY_S * 1000):
            if descriptor == until:
                until = -1
                for child in children:
                    child.kill("nobody waits for it any more")
                continue
            child = owner[descriptor]
            if descriptor != child.pidfd:
                child.read(descriptor)
            else:
                child.ended()
        now = time.monotonic()
        if together and left_at is None and any(child.gone and child.report().died for child in children):
            left_at = now + OTHERS_S
        for child in children:
            if child.gone:
                continue
            child.look()
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
