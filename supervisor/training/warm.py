"""The keeper's fork servers: when one is started, and which rank may be forked from it.

A fork server (`fork_server.py`) has imported what the ranks of an attempt had imported, so that the next ones need not.
It is started while an attempt runs, never while ranks start, and it serves ranks of the same script whose variables, as
far as the imports read them, are those that it had. Every other rank is forked from the keeper itself, as is every rank
when a fork server does not answer at once.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from typing import Any, Callable, Mapping  # noqa: UP035 (Python 3.9)

LOOK_EVERY_S = 2.0
SETTLED_S = 1.0
"""No fork server is started so soon after a rank."""
IMPORT_S = 300.0
"""One that has not finished by then is ended. It sleeps half the time, and a network file system may be slow."""
ANSWER_S = 2.0
"""Then the rank is forked from the keeper, and has seconds of imports before it. Its stub waits for three."""
MOST_SERVERS = 16
MOST_FAILURES = 8
RECORD_LIMIT = 8 << 20
FREE_BYTES = 2 << 30
"""So much memory must be available, of the machine and within the limit of the cgroup."""
LEAST_FREE_BYTES = 1 << 30
"""With less, fork servers are ended: less than what starts them, so that none is started and ended in turns."""
PR_SET_CHILD_SUBREAPER = 36


class ServerProcess:
    """A fork server as the keeper knows it."""

    def __init__(self, pid: int, channel: socket.socket, become: Any, number: int) -> None:
        self.pid, self.channel, self.number = pid, channel, number
        self.environ: Mapping[str, str] = become.environ
        self.argv: list[str] = become.argv
        self.cwd = become.cwd
        self.started = time.monotonic()
        self.ready = False
        self.reads: list[str] = []
        self.prefixes: tuple[str, ...] = ()
        self.covers: frozenset[str] = frozenset()

    def fileno(self) -> int:
        return self.channel.fileno()

    def why_not(self, environ: Mapping[str, str], argv: list[str], cwd: str | None) -> str:
        """Why a rank may not be forked from it; empty when it may."""
        if script(argv) != script(self.argv) or cwd != self.cwd:
            return "another script or folder"
        names = {*self.reads}
        names |= {name for name in {*environ, *self.environ} if self.prefixes and name.startswith(self.prefixes)}
        different = sorted(name for name in names if environ.get(name) != self.environ.get(name))
        return f"the imports read {', '.join(different)}" if different else ""


class ForkOrder:
    """A rank that a fork server is to fork, until it has told its process id."""

    def __init__(
        self, link: socket.socket, server: ServerProcess, client: Any, message: dict[str, Any], argv: list[str]
    ) -> None:
        self.link, self.server = link, server
        self.client, self.message, self.argv = client, message, argv
        self.until = time.monotonic() + ANSWER_S

    def fileno(self) -> int:
        return self.link.fileno()


class Warm:
    """All fork servers of a keeper. Methods return at once; `keeper.become` is set in a new fork server."""

    def __init__(self, keeper: Any, become: Callable[..., Any], available: Callable[[], float] | None = None) -> None:
        self.keeper = keeper
        self.available = available or available_bytes
        self.make = become
        self.servers: list[ServerProcess] = []
        self.orders: list[ForkOrder] = []
        self.for_keeper: list[ForkOrder] = []
        """To be forked from the keeper after all: one at a time, by `tick`, because a child must do nothing else."""
        self.seen: dict[int, tuple[dict[str, Any], list[str]]] = {}
        """Local rank -> request and words of the newest attempt's ranks that were forked."""
        self.record: dict[str, Any] | None = None
        """What a rank of the newest attempt has imported, as far as it is known."""
        self.record_version: tuple[str, int] = ("", 0)
        self.records = 0
        self.covered: frozenset[str] = frozenset()
        self.unsafe: frozenset[str] = frozenset()
        """What was tried and left something behind: not tried again, until ranks have imported more."""
        self.left: tuple[str, ...] = ()
        """What was logged of scripts that change something before they import."""
        self.failures = 0
        self.next_look = float("inf")
        self.off = os.environ.get("UNBROKEN_WARM", "") in ("0", "torch")

    def safely(self, act: Callable[..., None], *arguments: Any) -> None:
        """An error here must not end the keeper, which would take the run along."""
        try:
            act(*arguments)
        except Exception as error:
            self.keeper.log(f"no fork servers any more: {type(error).__name__}: {error}")
            self.off, self.next_look = True, float("inf")
            for server in list(self.servers):
                self.end(server, "an error")

    # ----- time -----

    def wait_s(self) -> float | None:
        if self.for_keeper:
            return 0.0
        times = [order.until for order in self.orders]
        times += [server.started + IMPORT_S for server in self.servers if not server.ready]
        times += [] if self.next_look == float("inf") else [self.next_look]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def tick(self) -> None:
        if self.for_keeper:
            order = self.for_keeper.pop(0)
            self.keeper.fork_worker(order.client, order.message, order.argv)
            return
        now = time.monotonic()
        for order in [one for one in self.orders if now >= one.until]:
            self.end(order.server, "it did not answer")
        for server in [one for one in self.servers if not one.ready and now >= one.started + IMPORT_S]:
            self._unfit(server, f"importing took over {IMPORT_S:.0f} s")
        if now >= self.next_look:
            self.next_look = now + LOOK_EVERY_S
            self._look()

    # ----- starting -----

    def started(self, message: dict[str, Any], argv: list[str], local_rank: int) -> None:
        """A rank was forked, from here or from a fork server."""
        self.seen[local_rank] = message, argv
        if not self.off and (self.failures < MOST_FAILURES or self.servers):
            self.next_look = time.monotonic() + max(SETTLED_S, LOOK_EVERY_S)

    def new_attempt(self) -> None:
        """Ranks are about to start: nothing is imported now, and what was imported is compared with the disk."""
        self.seen.clear()
        self.record = None
        self.next_look = float("inf")
        for server in list(self.servers):
            if not server.ready:
                self.end(server, "an attempt begins")
            else:
                self._send(server, {"op": "check"}, [])

    def _look(self) -> None:
        """Start what is missing, one fork server at a time. End all when memory is short."""
        if self.servers and self.available() < LEAST_FREE_BYTES:
            for server in list(self.servers):
                self.end(server, f"less than {LEAST_FREE_BYTES >> 20} MiB of memory are available")
            return
        if self.orders or any(not server.ready for server in self.servers) or not self.seen:
            return
        self._read_record()
        if self.record is None or self.failures >= MOST_FAILURES:
            self.next_look = float("inf") if self.failures >= MOST_FAILURES and not self.servers else self.next_look
            return
        for message, argv in self.seen.values():
            environ, cwd = message["env"], message.get("cwd")
            current = [server for server in self.servers if server.number == self.records]
            if any(not server.why_not(environ, argv, cwd) for server in current):
                continue
            if len(current) < MOST_SERVERS and self.available() >= FREE_BYTES:
                self._start(message, argv)
            return

    def _read_record(self) -> None:
        """What the rank with the lowest number on this node says it has imported; a new one replaces what is known."""
        attempt = max((worker.attempt for worker in self.keeper.members.workers), default=0)
        workers = [one for one in self.keeper.members.live() if one.attempt == attempt and one.local_rank in self.seen]
        if not workers:
            return
        worker = min(workers, key=lambda one: one.local_rank)
        path = os.path.join(self.keeper.members.local_dir, "attempts", str(attempt), f"rank{worker.rank}.imports")
        try:
            about = os.stat(path)
            version = path, about.st_mtime_ns
            if version == self.record_version or about.st_size > RECORD_LIMIT:
                return
            with open(path, "rb") as file:
                record = json.loads(file.read())
            modules = frozenset(map(str, record["modules"]))
        except (OSError, ValueError, TypeError, KeyError):  # not there yet, or being written
            return
        self.record_version = version
        if record.get("left") and record["left"] not in self.left:
            self.left = (*self.left[-7:], record["left"])
            self.keeper.log(f"what was imported from then on is left to the script: {str(record['left'])[:400]}")
        if modules <= self.unsafe:
            return
        self.record = record
        if not modules <= self.covered:
            self.records, self.covered = self.records + 1, modules

    def _start(self, message: dict[str, Any], argv: list[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        become = self.make(argv, message, [], worker=False)
        become.channel, become.record = theirs, self.record
        pid = self.keeper.fork(become)
        if pid == 0:
            ours.close()
            return
        theirs.close()
        ours.setblocking(False)
        server = ServerProcess(pid, ours, become, self.records)
        self.servers.append(server)
        self.keeper.selector.register(server, selectors.EVENT_READ)

    def heard(self, server: ServerProcess) -> None:
        if server not in self.servers:
            return
        try:
            data = server.channel.recv(1 << 20)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        message: dict[str, Any] = json.loads(data) if data else {"unfit": "" if server.ready else "it ended"}
        if "unfit" in message:
            self._unfit(server, message["unfit"])
        elif "stale" in message:
            if message["stale"]:
                self.covered = frozenset()  # so that the next record, the same or not, counts
                self.end(server, message["stale"])
        else:
            server.ready = True
            server.reads, server.prefixes = message["reads"], tuple(message["prefixes"])
            for older in [one for one in self.servers if one.number < server.number]:
                self.end(older, "there is a newer one")
            self.keeper.log(
                f"fork server {server.pid}: {len(message['modules'])} modules in {message['took_s']} s, "
                f"{message['private_kib'] >> 10} MiB of its own"
            )

    def _unfit(self, server: ServerProcess, why: str) -> None:
        if not server.ready:
            self.failures += 1
            self.record, self.unsafe = None, self.covered
            self.end(server, f"its imports are left to the script: {why}")
        else:
            self.end(server, why or "it ended")

    def end(self, server: ServerProcess, why: str) -> None:
        if server not in self.servers:
            return
        self.servers.remove(server)
        self.keeper.selector.unregister(server)
        server.channel.close()
        try:
            os.kill(server.pid, signal.SIGKILL)  # our child, which nobody else reaps
        except OSError:
            pass
        self.keeper.log(f"fork server {server.pid} ends: {why}")
        for order in [one for one in self.orders if one.server is server]:
            self._give_up(order, why)

    # ----- forking a rank -----

    def ask(self, client: Any, message: dict[str, Any], argv: list[str]) -> bool:
        """Have a fork server fork this rank. False: no fork server may, or it cannot be asked."""
        environ, cwd = message["env"], message.get("cwd")
        ready = [server for server in self.servers if server.ready]
        server = next((one for one in ready if not one.why_not(environ, argv, cwd)), None)
        if server is None:
            if ready:
                self.keeper.log(f"not from fork server {ready[0].pid}: {ready[0].why_not(environ, argv, cwd)}")
            return False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        request = {"op": "fork", "argv": argv, **{name: message.get(name) for name in ("env", "cwd", "umask")}}
        self._adopt(True)
        sent = self._send(server, request, [theirs.fileno(), *client.descriptors])
        theirs.close()
        if not sent:
            ours.close()
            self._adopt(bool(self.orders))
            return False
        order = ForkOrder(ours, server, client, message, argv)
        self.orders.append(order)
        self.keeper.selector.register(order, selectors.EVENT_READ)
        return True

    def _send(self, server: ServerProcess, message: dict[str, Any], descriptors: list[int]) -> bool:
        try:
            socket.send_fds(server.channel, [json.dumps(message).encode()], descriptors)
        except OSError as error:  # busy, gone, or an environment that is too long for it
            self.keeper.log(f"fork server {server.pid} cannot be asked: {error}")
            return False
        return True

    def forked(self, order: ForkOrder) -> None:
        """The rank has told its process id: it may go on when it is in the book."""
        if order not in self.orders:
            return
        try:
            data = order.link.recv(4096)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        pid = int(json.loads(data)["pid"]) if data else 0
        if pid <= 1 or not self.keeper.is_parent_of(pid):
            self._give_up(order, f"fork server {order.server.pid} did not fork it")
            return
        self.keeper.has_forked(order.client, order.message, order.argv, pid)
        try:
            order.link.send(b"go")
        except OSError:  # it has ended already
            pass
        self._forget(order)

    def _give_up(self, order: ForkOrder, why: str) -> None:
        """Have the keeper fork the rank after all. One that comes late finds nobody, and ends."""
        self._forget(order)
        self.for_keeper.append(order)
        self.keeper.log(f"a rank is forked from the keeper: {why}")

    def client_gone(self, client: Any) -> None:
        self.for_keeper = [one for one in self.for_keeper if one.client is not client]
        for order in [one for one in self.orders if one.client is client]:
            self._forget(order)

    def _forget(self, order: ForkOrder) -> None:
        self.orders.remove(order)
        self.keeper.selector.unregister(order)
        order.link.close()
        self._adopt(bool(self.orders))

    def _adopt(self, orphans: bool) -> None:
        """Whether orphans among our offspring become our children: only while a fork server forks."""
        self.keeper.prctl(PR_SET_CHILD_SUBREAPER, int(orphans))

    def close_in_fork(self) -> None:
        for server in self.servers:
            server.channel.close()
        for order in self.orders:
            order.link.close()


def script(argv: list[str]) -> list[str]:
    return argv[:2] if argv[:1] == ["-m"] else argv[:1]


def available_bytes() -> float:
    """Of the machine, and within the limits of our cgroups, which count page cache as used."""
    try:
        with open("/proc/meminfo") as file:
            available = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
        return min(available, cgroup_left())
    except (OSError, ValueError, StopIteration):
        return 0.0


LIMITS = {
    "0": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Of cgroups of version 2 and 1: where they are, limit, use, and the part of it that would be given back."""


def cgroup_left(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> float:
    """What is left within the limits of our cgroups; infinity where there are none."""
    left = float("inf")
    try:
        with open(own) as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return left
    for number, controllers, path in lines:
        kind = "0" if number == "0" else "memory" if "memory" in controllers.split(",") else ""
        if kind:
            where, *names = LIMITS[kind]
            left = min(left, left_below(root + where, path, names))
    return left


def left_below(top: str, path: str, names: list[str]) -> float:
    """Of a cgroup and all those it is in."""
    left = float("inf")
    folder = os.path.normpath(f"{top}/{path}")
    while folder.startswith(top):
        try:
            limit, used = (read_text(os.path.join(folder, name)).strip() for name in names[:2])
            if limit != "max":
                stat = dict(line.split(None, 1) for line in read_text(f"{folder}/memory.stat").splitlines())
                left = min(left, int(limit) - int(used) + int(stat.get(names[2], 0)))
        except (OSError, ValueError):
            pass
        folder = os.path.dirname(folder)
    return left


def read_text(path: str) -> str:
    with open(path) as file:
        return file.read()
