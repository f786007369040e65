"""The progress beacon: a small mapped file that a thread of the rank rewrites twice a second.

It must never disturb the script: it imports nothing, swallows everything, takes well under a millisecond each time,
holds still while the process forks, and is gone before the interpreter ends.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import json
import mmap
import os
import signal
import struct
import sys
import time
from typing import Any, Callable, Iterable  # noqa: UP035 (Python 3.9)

SIZE = 4096
HEADER = struct.Struct("<8sIIddI")
MAGIC = b"UBEACON1"
PAYLOAD = 4000
FIGURES, FIGURES_COUNT = 4040, 6
"""Where the step clock has its numbers (`clock.py`): eight bytes each, written at each step and batch."""
PERIOD_S = 0.5
LOSSES = 24
"""Of a script that is quicker some are left out: a loss that has gone wrong is wrong for longer."""


class Beacon:
    """Writes `path` until `stop`. `server_path`: where torch's `_WorkerServer` listens once it is of use."""

    def __init__(self, path: str, server_path: str, heartbeat_fd: int = -1, imports: Any = None) -> None:
        """`imports`: an `ImportRecord`, or None."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SIZE)  # a page that a full disk lacks would be SIGBUS for the script
            self.map = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        self.figures = memoryview(self.map)[FIGURES : FIGURES + 8 * FIGURES_COUNT].cast("d")
        self.server_path = server_path
        self.imports = imports
        self.clock: Any = None
        """A `StepClock` that writes to `figures`."""
        self.server: Any = None
        self.server_tried = False
        self.pid = os.getpid()
        self.heartbeat_fd = heartbeat_fd
        self.pipe = os.fstat(heartbeat_fd).st_ino if heartbeat_fd >= 0 else 0
        self.pending = b""
        self.step: int | None = None
        self.losses: list[list[float | None]] = []
        """The newest steps with their losses; None for one that is no number."""
        self.losses_seen = 0
        """How many there were in all."""
        self.phase = ""
        self.world = number(os.environ.get("WORLD_SIZE"))
        self.thread = 0
        self.timeout_s: float | None = None
        self.member_marks: dict[str, tuple[int, int]] = {}
        self.told_members: dict[str, str] = {}
        self.sequence = 0
        self.chance = self.pid
        self.stopped = False
        self.busy = _thread.allocate_lock()
        self.wake = _thread.allocate_lock()
        self.wake.acquire()
        self.ended = _thread.allocate_lock()

    def start(self) -> None:
        """Start the thread: a bare one, so that `threading.enumerate()` does not show it."""
        # Nothing of torch may be locked by this thread at the moment of a fork: the child would inherit the lock.
        os.register_at_fork(
            before=lambda: self.busy.acquire(timeout=0.2) and None,
            after_in_parent=self._release,
            after_in_child=self._release,
        )
        # Registered before the script's own handlers, so it runs after them.
        atexit.register(self.stop)
        self.ended.acquire()
        _thread.start_new_thread(self._run, ())

    def stop(self) -> None:
        """End the thread before the interpreter goes down under it."""
        if self.stopped or os.getpid() != self.pid:  # a forked child has neither thread nor server
            return
        self.stopped = True
        self.wake.release()
        self.ended.acquire(timeout=1.0)
        server, self.server = self.server, None
        if server is not None:
            try:
                quietly(server.shutdown)
            except Exception:
                pass

    def _release(self) -> None:
        try:
            self.busy.release()
        except RuntimeError:
            pass

    def _run(self) -> None:
        try:
            # A signal that lands here would not wake the script's main thread out of what it waits for.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            self.thread = _thread.get_native_id()
            while not self.stopped:
                if self.busy.acquire(timeout=1.0):
                    try:
                        self.beat()
                    finally:
                        self._release()
                self.wake.acquire(timeout=self._pause_s())
        except BaseException:  # the interpreter is going down, or memory is out: be silent
            pass
        finally:
            self.ended.release()

    def _pause_s(self) -> float:
        """About `PERIOD_S`, never twice the same: steps of a fixed length would always be seen at the same point.

        Only a little off: the hang watch learns a job's pace from how often progress is seen in its first seconds.
        """
        self.chance = (self.chance * 1103515245 + 12345) & 0x7FFFFFFF
        return PERIOD_S * (0.9 + 0.2 * self.chance / 0x7FFFFFFF)

    def beat(self) -> None:
        """Write the present state once."""
        if self.clock is not None:
            self.clock.beat()
        try:
            self._read_heartbeat()
        except (OSError, ValueError):
            pass
        state: dict[str, object] = {"step": self.step, "world": max(self.world, 0), "thread": self.thread}
        if self.phase:
            state["phase"] = self.phase
        if self.losses:
            state["losses"], state["losses_seen"] = self.losses, self.losses_seen
        try:
            groups = collective_groups()
        except Exception:
            groups = None
        if groups is not None:
            state["groups"] = groups
            members = self.members()
            if members:
                state["members"] = members
            self._serve()
            if self.timeout_s is None:
                self.timeout_s = collective_timeout_s()
            if self.timeout_s:
                state["timeout_s"] = self.timeout_s
        payload = json.dumps(state, separators=(",", ":")).encode()
        while len(payload) > PAYLOAD and groups:
            if state.pop("members", None) is None and state.pop("losses", None) is None:
                groups.popitem()
            payload = json.dumps(state, separators=(",", ":")).encode()
        self.write(payload)
        if self.imports is not None:
            try:
                self.imports.look()
            except Exception:
                self.imports = None

    def members(self) -> dict[str, str]:
        """Name of a process group -> its ranks, as gloo's recorder does not tell; looked up when groups change."""
        try:
            world = sys.modules["torch.distributed.distributed_c10d"]._world
            known = {str(name)[:40]: world.pg_group_ranks[group] for group, name in list(world.pg_names.items())[:32]}
            marks = {name: (id(ranks), len(ranks)) for name, ranks in known.items()}
            if marks != self.member_marks:
                told = {name: listed(ranks) for name, ranks in known.items()}
                self.told_members = {name: ranks for name, ranks in told.items() if ranks}
                self.member_marks = marks
            return self.told_members
        except Exception:  # another torch, or a group is being made at this moment
            return {}

    def write(self, payload: bytes) -> None:
        pid = os.getpid()
        now = time.time(), time.monotonic()
        odd, even = (self.sequence + 1) & 0xFFFFFFFF, (self.sequence + 2) & 0xFFFFFFFF
        HEADER.pack_into(self.map, 0, MAGIC, odd, pid, *now, len(payload))
        self.map[HEADER.size : HEADER.size + len(payload)] = payload
        HEADER.pack_into(self.map, 0, MAGIC, even, pid, *now, len(payload))
        self.sequence = even

    def _read_heartbeat(self) -> None:
        """Lines `step N`, `step N loss X` and `phase X` that the script wrote since the last time."""
        if self.heartbeat_fd < 0 or os.fstat(self.heartbeat_fd).st_ino != self.pipe:
            return  # the script closed what it did not know, and the number is something else now
        for _ in range(64):  # at most 256 KiB at once
            try:
                data = os.read(self.heartbeat_fd, 4096)
            except BlockingIOError:
                return
            if not data:
                return
            *lines, self.pending = (self.pending + data).split(b"\n")
            self.pending = self.pending[-200:]
            for line in lines:
                word, _, value = line.strip().partition(b" ")
                step, _, loss = value.partition(b" loss ")
                if word == b"step" and step.isdigit() and len(step) < 16:
                    self.step = int(step)
                    if loss:
                        self._note_loss(self.step, loss)
                elif word == b"phase":
                    self.phase = value.decode("ascii", "replace")[:20]

    def _note_loss(self, step: int, text: bytes) -> None:
        try:
            loss = float(text[:32])
        except ValueError:
            return
        finite = loss - loss == 0
        self.losses = [*self.losses[1 - LOSSES :], [step, float(f"{loss:.5g}") if finite else None]]
        self.losses_seen += 1

    def _serve(self) -> None:
        """Start torch's worker server the first time that torch.distributed is in use."""
        if self.server_tried:
            return
        self.server_tried = True
        try:
            c10d: Any = sys.modules["torch._C._distributed_c10d"]
            self.server = quietly(lambda: c10d._WorkerServer(self.server_path))
            # Never destroyed: in a forked child the destructor would wait for a thread that is not there.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.server))
        except Exception:
            pass


def quietly(call: Callable[[], Any]) -> Any:
    """`call()` without torch's warnings that a server was started or stopped: the script's stderr is not ours."""
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return call()
    before, level.value = level.value, 2
    try:
        return call()
    finally:
        level.value = before


def collective_groups() -> dict[str, list[int]] | None:
    """Process group id -> [last enqueued, last completed collective]; None while torch.distributed is not in use."""
    distributed: Any = sys.modules.get("torch.distributed")
    initialized = getattr(distributed, "is_initialized", None)
    if initialized is None or not initialized():
        return None
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    # NCCL keeps a recorder of its own; the other one, newer in torch, has gloo's groups only.
    dumps = (getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"))
    return statuses(dump(False, True) for dump in dumps if dump is not None)


def listed(ranks: Iterable[int]) -> str:
    """`[0, 5, 6]`, or `[0-4088:8]` for many that are evenly spaced; "" for many that are not."""
    members = sorted(ranks)
    if len(members) <= 16:
        return str(members)
    step = members[1] - members[0]
    even = members == list(range(members[0], members[-1] + 1, step))
    return f"[{members[0]}-{members[-1]}:{step}]" if even else ""


def collective_timeout_s() -> float:
    """The time-out of collectives in the group of all ranks; 0 where torch does not tell."""
    try:
        distributed: Any = sys.modules["torch.distributed.distributed_c10d"]
        group = distributed._get_default_group()
        backends = {id(one): one for one in map(group._get_backend, group._device_types)}.values()
        return float(min(one.options._timeout.total_seconds() for one in backends))
    except Exception:
        return 0.0


def statuses(dumps: Iterable[bytes]) -> dict[str, list[int]]:
    """Process group id -> [last enqueued, last completed collective], at most 32.

    Each recorder counts its groups from 0: the first that has any keeps its ids, so that "0" is the world.
    """
    found: dict[str, list[int]] = {}
    for dump in dumps:
        prefix = "other " if found else ""
        for group, seen in list((json.loads(dump).get("pg_status") or {}).items())[: 32 - len(found)]:
            counts = seen.get("last_enqueued_collective"), seen.get("last_completed_collective")
            found[f"{prefix}{group}"[:40]] = [number(count) for count in counts]
    return found


def number(value: object) -> int:
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        return -1
