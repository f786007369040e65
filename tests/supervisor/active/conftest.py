"""Nodes that are network namespaces of one machine, on a bridge, with faults that are planted from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.supervisor.node_health.gpu.conftest import fake_nvml, fake_nvml_library

__all__ = ["fake_nvml", "fake_nvml_library"]

UP = "ip link set lo up; echo up; read -r _ || true"


class Namespace:
    """One of them. Its first process ends with the pipe that the test holds."""

    def __init__(self, name: str, address: str = "") -> None:
        self.name, self.address = name, address
        kinds = ("--net", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child=KILL")
        self.outer = subprocess.Popen(
            ["unshare", *kinds, "bash", "-c", f"hostname {name}; {UP}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.outer.stdout is not None
        assert self.outer.stdout.readline() == b"up\n", f"{name} does not come up"
        (child,) = Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children").read_text().split()
        self.pid = int(child)

    def command(self, *words: str) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--pid", "--mount", "--", *words]

    def do(self, words: str) -> None:
        enter = ["nsenter", f"--target={self.pid}", "--net", "--"]
        subprocess.run([*enter, *words.split()], check=True, capture_output=True)

    def children_of_tests(self) -> list[int]:
        """The children that make tests here, by their ids outside."""
        found = []
        own = os.readlink(f"/proc/{self.pid}/ns/net")
        for entry in Path("/proc").iterdir():
            try:
                here = entry.name.isdigit() and os.readlink(entry / "ns/net") == own
                if here and b"active_tests.py" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def end(self) -> None:
        self.outer.kill()
        self.outer.wait()


class Bridge:
    """Namespaces n1, n2, ... on one bridge."""

    def __init__(self, count: int) -> None:
        self.middle = Namespace("bridge")
        self.nodes = [Namespace(f"n{number}", f"10.79.0.{number}") for number in range(1, count + 1)]
        self.middle.do("ip link add br0 type bridge")
        self.middle.do("ip link set br0 up")
        for node in self.nodes:
            self.middle.do(f"ip link add {node.name} type veth peer name eth0 netns {node.pid}")
            self.middle.do(f"ip link set {node.name} master br0 up")
            node.do(f"ip addr add {node.address}/24 dev eth0")
            node.do("ip link set eth0 up")
            node.do("ip route add default dev eth0")

    def node(self, name: str) -> Namespace:
        return next(node for node in self.nodes if node.name == name)

    def cut(self, one: str, other: str) -> None:
        """Between these two nothing arrives."""
        for here, there in ((one, other), (other, one)):
            self.node(here).do(f"ip route add blackhole {self.node(there).address}/32")

    def lose_packets(self, name: str) -> None:
        """What leaves the node faster than 8 Mbit/s is lost, once a few packets wait."""
        self.node(name).do("tc qdisc add dev eth0 root tbf rate 8mbit burst 4k limit 12k")

    def end(self) -> None:
        for node in (*self.nodes, self.middle):
            node.end()


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    made = Bridge(4)
    yield made
    made.end()


@pytest.fixture
def check_all(bridge: Bridge, tmp_path: Path) -> Callable[..., list[Popen]]:
    """`unbroken check` with these options on every node; what it says goes to `NODE.err`."""
    return lambda *options: start_checks(bridge, tmp_path, *options)


def start_checks(bridge: Bridge, folder: Path, *options: str) -> list[Popen]:
    program = [str(Path(sys.executable).parent / "unbroken"), "check", "--json", *options]
    place = ["--meet", str(folder / "meet"), "--nodes", str(len(bridge.nodes))]
    found = []
    for number, node in enumerate(bridge.nodes):
        words = (*program, *place, "--node-rank", str(number), "--node-name", node.name)
        with open(folder / f"{node.name}.err", "wb") as err:
            found.append(subprocess.Popen(node.command(*words), stdout=subprocess.PIPE, stderr=err, cwd=folder))
    return found


Popen = subprocess.Popen[bytes]
