"""A real Slurm cluster of four nodes on one machine.

Each host (`ctl`, `node1` to `node4`) is a set of namespaces of its own: network, host name, processes, mounts. Nothing
of it has a name or an address outside, so any number of clusters can run side by side, and a host that ends takes
every process on it along: also when the test is killed, for each host waits on a pipe that the test holds. The hosts
share the machine's files, as a cluster shares its file system; `/mnt` is the node's own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import until

BIN = Path(sys.executable).parent
NODES = ("node1", "node2", "node3", "node4")
ADDRESSES = {"ctl": "10.77.0.250", **{node: f"10.77.0.{number}" for number, node in enumerate(NODES, 1)}}

SLURM_CONF = """
ClusterName=unbroken
SlurmctldHost=ctl({ctl})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldDebug=verbose
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=100000,sched_interval=1
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=1
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=5
KillWait=5
OverTimeLimit=0
InactiveLimit=0
CompleteWait=0
{more}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

HOST = """
set -e
hostname "$1"
mount --bind "$2/etc" /etc/slurm
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/kernel.$1" /dev/kmsg
mount -t tmpfs -o mode=1777 tmpfs /mnt
mkdir -m 1777 /mnt/rig
if [ -n "$4" ]; then
  mkdir /mnt/keep
  mount --bind "$3" /mnt/keep
  mount -t tmpfs -o mode=755 tmpfs "$4"
  mkdir -p "$3"
  mount --bind /mnt/keep "$3"
fi
ip link set lo up
echo up
read -r _ || true
"""
"""Runs as the first process of a host: bash, for it reaps what is orphaned there, until the pipe closes. Arguments: the
host's name, the cluster's folder, our Python's, and the one above it that only root may enter, if there is one: it is
replaced by one with nothing else in it."""


def _closed_to_others() -> str:
    """The folder above our Python that only root may enter; empty when there is none, or we work below it ourselves."""
    for folder in reversed(Path(sys.base_prefix).parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return "" if Path(__file__).is_relative_to(folder) else str(folder)
    return ""


class Host:
    """One machine. `pid` is its first process, seen from outside."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.services: list[subprocess.Popen[bytes]] = []
        (folder / f"kernel.{name}").touch()
        self._words = open(folder / f"{name}.log", "wb")  # noqa: SIM115 (as long as the host)
        kinds = ("--net", "--uts", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child=KILL")
        self._outer = subprocess.Popen(
            ["unshare", *kinds, "bash", "-c", HOST, "host", name, str(folder), sys.base_prefix, _closed_to_others()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            start_new_session=True,
        )
        assert self._outer.stdout.readline() == b"up\n", f"{name} does not come up"
        (child,) = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        self.pid = int(child)

    @property
    def up(self) -> bool:
        return self._outer.poll() is None

    @property
    def root(self) -> Path:
        """Its files, seen from outside, while it is up."""
        return Path(f"/proc/{self.pid}/root")

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--pid", "--mount", "--", *command]

    def serve(self, *command: str) -> subprocess.Popen[bytes]:
        service = subprocess.Popen(
            self.inside(*command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.services.append(service)
        return service

    def end(self) -> None:
        """Everything on it is killed at once, as by a loss of power."""
        if self.up:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9)
        self._outer.stdin.close()
        self._outer.wait(10)
        for service in self.services:
            service.wait(10)


class Cluster:
    """The hosts, their network, and Slurm's and munge's daemons on them."""

    nodes = NODES
    until = staticmethod(until)

    def __init__(self, folder: Path, more_conf: str = "") -> None:
        self.folder = folder
        self.hosts: dict[str, Host] = {}
        for name in ("etc", "state", "spool"):
            (folder / name).mkdir()
        folder.chmod(0o755)
        self._write_conf(more_conf)
        self._switch = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo up; read _"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._switch.stdout.readline() == b"up\n"
        self._ip("link", "add", "switch", "type", "bridge")
        self._ip("link", "set", "switch", "up")

    def start(self) -> None:
        for name in ADDRESSES:
            self._attach(name)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        socket = self.folder / "munge.sock"
        files = {
            "key-file": key,
            "socket": socket,
            "pid-file": self.folder / "munge.pid",
            "log-file": self.folder / "munge.log",
        }
        seed = f"--seed-file={self.folder / 'munge.seed'}"
        self.hosts["ctl"].serve(
            "munged", "--foreground", "--force", seed, *(f"--{name}={path}" for name, path in files.items())
        )
        until(socket.exists, 30, "munge's socket")
        self.start_slurmctld()
        for node in NODES:
            self.start_slurmd(node)
        until(lambda: self.states() == dict.fromkeys(NODES, "idle"), 90, lambda: f"all nodes idle: {self.states()}")

    def _write_conf(self, more: str) -> None:
        etc = self.folder / "etc"
        shape = "CPUs=96 Boards=1 SocketsPerBoard=1 CoresPerSocket=96 ThreadsPerCore=1 RealMemory=2000 Gres=gpu:h100:8"
        nodes = "\n".join(f"NodeName={node} NodeAddr={ADDRESSES[node]} {shape}" for node in NODES)
        values = {"ctl": ADDRESSES["ctl"], "folder": self.folder, "more": more, "nodes": nodes}
        (etc / "slurm.conf").write_text(SLURM_CONF.format(**values))
        devices = self.folder / "dev"
        devices.mkdir()
        for number in range(8):  # what slurmd asks of a GPU's device file: that it is one
            os.mknod(devices / f"nvidia{number}", 0o20666, os.makedev(1, 3))
        (etc / "gres.conf").write_text(f"Name=gpu Type=h100 File={devices}/nvidia[0-7]\n")
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        hosts = [f"{address} {name}" for name, address in ADDRESSES.items()]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))

    # ----- hosts and links -----

    def _ip(self, *arguments: str) -> None:
        command = ["nsenter", f"--target={self._switch.pid}", "--net", "--", "ip", *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=10)

    def _attach(self, name: str) -> None:
        host = self.hosts[name] = Host(name, self.folder)
        self._ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        self._ip("link", "set", name, "master", "switch", "up")
        self.run(name, "ip", "addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
        self.run(name, "ip", "link", "set", "eth0", "up")

    def cut(self, node: str) -> None:
        """Its link goes down."""
        self._ip("link", "set", node, "down")

    def heal(self, node: str) -> None:
        self._ip("link", "set", node, "up")

    def kill_node(self, node: str) -> None:
        self.hosts[node].end()

    def boot(self, node: str) -> None:
        """A killed node comes back."""
        self._attach(node)
        self.start_slurmd(node)

    def kernel_says(self, node: str, line: str) -> None:
        with open(self.folder / f"kernel.{node}", "a") as log:
            log.write(line + "\n")

    # ----- Slurm -----

    def start_slurmctld(self) -> None:
        self.hosts["ctl"].serve("slurmctld", "-D")
        until(lambda: "UP" in self.run("ctl", "scontrol", "ping", check=False), 60, "an answer of slurmctld")

    def stop_slurmctld(self) -> None:
        """It is killed, by the number it wrote itself."""
        number = (self.folder / "slurmctld.pid").read_text().strip()
        self.run("ctl", "kill", "-9", number)
        (self.folder / "slurmctld.pid").unlink()

    def start_slurmd(self, node: str) -> None:
        (self.folder / "spool" / node).mkdir(exist_ok=True)
        self.hosts[node].serve("slurmd", "-D")

    def run(
        self,
        host: str,
        *command: str,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> str:
        """What `command` prints on `host`. With `check` it has to end well."""
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("UNBROKEN_", "SLURM", "RIG", "TORCHELASTIC"))
        }
        done = subprocess.run(
            self.hosts[host].inside(*(("env", "-C", str(cwd), *command) if cwd else command)),
            capture_output=True,
            text=True,
            timeout=60,
            env={**inherited, "PATH": f"{BIN}:{os.environ['PATH']}", **(env or {})},
        )
        if check:
            assert done.returncode == 0, (
                f"{command} on {host} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout if check else done.stdout + done.stderr

    def states(self) -> dict[str, str]:
        """Node -> its state, as sinfo says it."""
        lines = self.run("ctl", "sinfo", "-h", "-N", "-o", "%N %T", check=False).splitlines()
        return {words[0]: words[1] for line in lines if len(words := line.split()) == 2}

    def reason(self, node: str) -> str:
        """Why it is drained or down, as `sinfo -R` has it; empty: it is not."""
        shown = self.run("ctl", "sinfo", "-h", "-N", "-n", node, "-o", "%E").strip()
        return "" if shown == "none" else shown

    def end(self) -> None:
        for host in reversed(self.hosts.values()):
            host.end()
        self._switch.stdin.close()
        self._switch.wait(10)


@pytest.fixture
def slurm_conf() -> str:
    """More lines of slurm.conf; a test overrides it."""
    return ""


@pytest.fixture
def cluster(slurm_conf: str) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ubs"))
    cluster = Cluster(folder, slurm_conf)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)
