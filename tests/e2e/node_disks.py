"""Nodes with disks of their own: each has mount and network namespaces, so that one path is another disk on each, and
a link can be cut. For tests of `--publish-to`.

All nodes are on one bridge, in a network namespace that only the test's own thread is in as well. Nothing of it is seen
from the rest of the machine, and it goes with the processes that hold it.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recovery.formats import inspect

Supervise = Callable[..., Any]

CLONE_NEWNET = 0x40000000
HOLD = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount --bind "$3" "$4"
ip link set lo up
echo up
read -r _ || true
"""
"""The first process of a node, which holds its namespaces. Arguments: name, a hosts file, its disk, where that is."""
FUSE_OPTIONS = "rootmode=40000,user_id=0,group_id=0"


def run(*command: str, fds: Sequence[int] = ()) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20, pass_fds=tuple(fds))


class Network:
    """A bridge, and this thread's place at it until `end`."""

    def __init__(self) -> None:
        self._before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self._libc = ctypes.CDLL(None, use_errno=True)
        if self._libc.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "bridge", "type", "bridge")
        run("ip", "addr", "add", "10.77.0.254/24", "dev", "bridge")
        run("ip", "link", "set", "bridge", "up")

    def end(self) -> None:
        self._libc.setns(self._before, CLONE_NEWNET)
        os.close(self._before)


class Host:
    """The namespaces of one node."""

    def __init__(self, name: str, number: int, hosts: Path, disk: Path, seen_at: Path) -> None:
        self.name, self.disk = name, disk
        disk.mkdir(parents=True)
        kinds = ("--net", "--uts", "--mount", "--propagation", "private")
        self._held = subprocess.Popen(
            ["unshare", *kinds, "sh", "-c", HOLD, "host", name, str(hosts), str(disk), str(seen_at)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._held.stdout is not None
        assert self._held.stdout.readline() == b"up\n", f"{name} does not come up"
        self.link = f"to-{name}"
        run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", str(self._held.pid))
        run("ip", "link", "set", self.link, "master", "bridge", "up")
        self.run("ip", "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("nsenter", f"--target={self._held.pid}", "--net", "--uts", "--mount", "--")

    def run(self, *command: str, fds: Sequence[int] = ()) -> None:
        run(*self.prefix, *command, fds=fds)

    def cut(self) -> None:
        run("ip", "link", "set", self.link, "down")

    def mend(self) -> None:
        run("ip", "link", "set", self.link, "up")

    def slow_down(self, rate: str) -> None:
        """What it sends, for example to `8mbit`."""
        self.run("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "32kb", "latency", "2s")

    def freeze(self, folder: Path) -> int:
        """From now on whoever touches `folder` waits, as on a dead NFS server; until the descriptor is closed."""
        held = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={held},{FUSE_OPTIONS}"
        self.run("mount", "-i", "-t", "fuse", "none", str(folder), "-o", options, fds=(held,))
        return held

    def thaw(self, folder: Path, held: int) -> None:
        os.close(held)
        self.run("umount", "-l", str(folder))

    def end(self) -> None:
        assert self._held.stdin is not None
        self._held.stdin.close()
        self._held.wait(10)


class Cluster:
    """`members` nodes with a rank each, and spares: a, b, ...; a has the controller. `disk(node)` is what each has at
    `ckpt`."""

    def __init__(
        self,
        supervise: Supervise,
        root: Path,
        trainer: str = "titan",
        *extra: str,
        pace: float = 0.3,
        members: int = 2,
        spares: int = 1,
        publish: bool = True,
        hold: int = 1 << 40,
        before: Callable[[Cluster], None] = lambda _: None,
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        """`hold`: before this step ranks wait for `go_on`. `before`: what is done when the nodes are there, and nothing
        runs on them yet."""
        self.root = root
        self.ckpt, self.shared = root / "node/ckpt", root / "shared"
        for folder in (self.ckpt, self.shared):
            folder.mkdir(parents=True)
        self._start, self._trainer, self._extra, self._spares = supervise, trainer, extra, spares
        self._shared = {"nproc": 1, "world": members, "torchrun": ("--nnodes", str(members)), "pace": pace}
        self._shared |= {"out": self.ckpt, **more}
        self._tiers = ("--publish-to", str(self.shared)) if publish else ()
        self._more: tuple[str, ...] = ()
        self._gate, self._held = root / "gate", root / "go-on"
        rigged = {"RIG_GATE": str(self._gate), "RIG_HOLD": f"{hold}:{self._held}"}
        self._shared["env"] = {"GLOO_SOCKET_IFNAME": "eth0", **rigged, **(env or {})}
        self.names = [chr(ord("a") + number) for number in range(members + spares)]
        self.network = Network()
        self.hosts: dict[str, Host] = {}
        self.jobs: dict[str, Any] = {}
        try:
            hosts = root / "hosts"
            lines = [f"10.77.0.{number} {name}" for number, name in enumerate(self.names, 1)]
            hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
            for number, name in enumerate(self.names, 1):
                self.hosts[name] = Host(name, number, hosts, self.disk(name), self.ckpt)
            before(self)
            for number, name in enumerate(self.names):
                self.start(name, *(("--spare",) if number >= members else ()))
            self._gate.touch()  # all nodes are there: ranks may begin
        except BaseException:
            self.end()
            raise

    def start(self, name: str, *options: str) -> Any:
        tiers = ("--checkpoint-dir", str(self.ckpt), *self._tiers, "--spares", str(self._spares))
        job = self.jobs[name] = self._start(
            self._trainer,
            *self._extra,
            node=name,
            prefix=self.hosts[name].prefix,
            options=("--node-name", name, *tiers, *self._more, *options),
            **self._shared,
        )
        if not self._more:
            job.until((job.job_dir / "controller.json").exists, 30, "a controller")
            self._more = ("--controller", str(json.loads((job.job_dir / "controller.json").read_text())["address"]))
        job.until(lambda: name in {node["node"] for node in self.told()["nodes"]}, 60, f"{name} to join")
        return job

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        for job in self.jobs.values():
            job.end()
        for host in self.hosts.values():
            host.end()
        self.network.end()

    @property
    def a(self) -> Any:
        return self.jobs["a"]

    def disk(self, name: str) -> Path:
        return self.root / "disks" / name

    # ----- what is told -----

    def told(self) -> dict[str, Any]:
        return dict(self.a.told("status"))

    def newest(self, tier: str) -> int:
        return next((one["step"] or 0 for one in self.told()["tiers"] if one["tier"] == tier), 0)

    def wait_tier(self, tier: str, step: int, within_s: float = 60) -> None:
        self.a.until(lambda: self.newest(tier) >= step, within_s, f"step {step} to be {tier}")

    def step(self) -> int:
        return int(self.told()["step"] or 0)

    def resumed_step(self) -> int:
        """Of the checkpoint that the newest attempt started from."""
        return int(self.told()["resume"]["step"])

    # ----- what happens -----

    def go_on(self) -> None:
        self._held.touch()

    def lose(self, *names: str) -> None:
        """The nodes die, and their disks with them."""
        for name in names:
            self.hosts[name].cut()
        for name in names:
            job = self.jobs[name]
            for process in job.kin():
                process.kill()
            job.until(lambda job=job: not job.kin(), 20, "the node's processes to end")
            shutil.rmtree(self.disk(name))

    # ----- how it ends -----

    def published(self) -> list[str]:
        found = [path for path in self.shared.iterdir() if not path.name.startswith(".")]
        for path in found:
            read = inspect(path)
            assert read is None or read.complete, (path, read)
        return sorted(path.name for path in found)

    def succeeds(self, *others: str) -> None:
        """The run ends well on all nodes that are left, with the weights of a run that nothing disturbed."""
        self.a.code(300)
        first = next(self.disk(name) for name in self.names if (self.disk(name) / "final.bin").exists())
        shutil.copy(first / "final.bin", self.ckpt / "final.bin")
        self.a.succeeds()
        for other in others:
            assert self.jobs[other].code() == 0
