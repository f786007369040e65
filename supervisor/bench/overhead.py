"""What watching a node costs: CPU and memory of the agent and its probe workers, and of each probe's looks.

CPU is what the kernel's clock of each process gained between two looks at it; memory is the most it ever had resident.
A node that runs already is only read from.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import psutil

from supervisor.bench.recovery import LIMIT_S
from supervisor.config import read_plan
from supervisor.demo.watched_run import WatchedRun, torchrun, unbroken
from supervisor.errors import RunFailed
from supervisor.node_health.health_file import Cost, HealthFile
from supervisor.paths import LocalPaths

TALKER: Final = Path(__file__).with_name("chatty.py")
SETTLE_S: Final = 45.0
"""Until all probes have looked once, at most."""
CALM_S: Final = 60.0
"""After that, before the measurement (or as long as that takes, if it is shorter): a young run is watched closely."""
COUNTED: Final = ("agent", "worker node", "worker gpu")
MODULES: Final = {
    "supervisor.agent.agent": "agent",
    "supervisor.node_health.worker node": "worker node",
    "supervisor.node_health.worker gpu": "worker gpu",
    "supervisor.controller.main": "controller",
    "keeper.py": "keeper",
}
GOALS: Final[dict[str, tuple[str, float]]] = {
    "cpu_percent": ("agent and both probe workers, % of one core", 0.5),
    "agent_mib": ("agent and worker node, MiB resident", 60.0),
    "gpu_station_mib": ("worker gpu, MiB resident", 30.0),
}
PUBLISHED: Final = (
    {"what": "gpud", "mib": "130", "cpu": "2 % of a core", "source": "comment in its Helm chart's values.yaml"},
    {
        "what": "dcgm-exporter",
        "mib": "135 to 155",
        "cpu": "0.3 to 0.9 % of a core (A100, every 30 s)",
        "source": "users' figures in its GitHub issues, 2022",
    },
)
"""Of others, as published; none of it was measured here."""


class Load(NamedTuple):
    """What is started to be watched."""

    ranks: int = 8
    lines_per_s: float = 10.0
    gpu_library: str = ""
    """A stand-in for libnvidia-ml.so.1; empty: the machine's own, if any."""
    gpus: int = 0
    """PCI functions of GPUs that are stood in for."""
    ports: int = 0
    """InfiniBand ports likewise."""

    def describe(self) -> str:
        """What was watched, and what was stood in for."""
        words = [f"{self.ranks} ranks log {self.lines_per_s:g} lines a second each"]
        if self.gpu_library:
            words.append(f"NVML is {self.gpu_library}, whose calls cost what they cost, not what a driver's do")
        if self.gpus or self.ports:
            words.append(f"{self.gpus} GPUs on the PCI bus and {self.ports} InfiniBand ports are files, not hardware")
        return "; ".join(words)


class Usage(NamedTuple):
    """One process at one moment."""

    role: str
    pid: int
    cpu_s: float
    children_s: float
    """CPU time of its children that have ended, to 10 ms each."""
    rss_mib: float
    peak_mib: float
    pss_mib: float


def processes(front: int) -> list[tuple[str, int]]:
    """(role, pid) of the front and what it started; of the keeper's own (launcher, ranks) nothing."""
    try:
        root = psutil.Process(front)
        found = [("front", front)]
        for child in root.children():
            role = _role(child)
            found.append((role, child.pid))
            if role == "agent":
                found += [(_role(one), one.pid) for one in child.children()]
    except psutil.Error as error:
        raise RunFailed(f"the processes of {front} cannot be read: {error}") from None
    return found


def _role(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return next((role for module, role in MODULES.items() if module in line), "other")


def usage(role: str, pid: int) -> Usage:
    """Raises OSError when it is gone."""
    cpu_ns = time.clock_gettime_ns((~pid << 3) | 2)  # the clock of another process: CPUCLOCK_SCHED of its pid
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    fields = stat[stat.rfind(")") + 2 :].split()
    children_s = (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    status = _kib(Path(f"/proc/{pid}/status"))
    pss = _kib(Path(f"/proc/{pid}/smaps_rollup")).get("Pss", 0)
    rss, peak = status.get("VmRSS", 0), status.get("VmHWM", 0)
    return Usage(role, pid, cpu_ns / 1e9, children_s, rss / 1024, peak / 1024, pss / 1024)


def _kib(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except PermissionError:  # smaps of another user's process
        return {}
    rows = (line.split() for line in lines if line.endswith(" kB"))
    return {words[0].rstrip(":"): int(words[1]) for words in rows if len(words) >= 3}


def all_usage(front: int) -> dict[int, Usage]:
    found = {}
    for role, pid in processes(front):
        try:
            found[pid] = usage(role, pid)
        except OSError:  # a child that has just ended
            continue
    return found


def read_health(local_dir: Path) -> HealthFile | None:
    try:
        return msgspec.json.decode(LocalPaths(local_dir).health.read_bytes(), type=HealthFile)
    except (OSError, msgspec.DecodeError):
        return None


def measure(local_dir: Path, seconds: float) -> dict[str, Any]:
    """Watch the node whose local folder this is for so long. Raises RunFailed."""
    plan = read_plan(LocalPaths(local_dir).plan)
    began, health = time.monotonic(), read_health(local_dir)
    before = all_usage(plan.front_pid)
    time.sleep(seconds)
    took_s, after = time.monotonic() - began, all_usage(plan.front_pid)
    rows = [_row(before[pid], now, took_s) for pid, now in after.items() if pid in before]
    missing = set(COUNTED) - {row["role"] for row in rows}
    if missing:
        raise RunFailed(f"not there from beginning to end: {', '.join(sorted(missing))}")
    rows.sort(key=lambda row: (row["role"] not in COUNTED, row["role"]))
    peak = {row["role"]: row["peak_mib"] for row in rows}
    values = {
        "cpu_percent": sum(row["cpu_percent"] + row["children_percent"] for row in rows if row["role"] in COUNTED),
        "agent_mib": peak["agent"] + peak["worker node"],
        "gpu_station_mib": peak["worker gpu"],
    }
    goals = [
        {"what": what, "value": round(values[name], 3), "goal": goal, "met": values[name] <= goal}
        for name, (what, goal) in GOALS.items()
    ]
    probes = probe_rows(health, read_health(local_dir))
    return {
        "schema": 1,
        "about": f"the running node {plan.node}",
        "seconds": round(took_s, 1),
        "load_average": os.getloadavg()[0],
        "processes": rows,
        "probes": probes,
        "goals": goals,
        "published": PUBLISHED,
    }


def _row(before: Usage, after: Usage, took_s: float) -> dict[str, Any]:
    percents = {
        "cpu_percent": (after.cpu_s - before.cpu_s) / took_s * 100,
        "children_percent": (after.children_s - before.children_s) / took_s * 100,
    }
    memory = {name: getattr(after, name) for name in ("rss_mib", "peak_mib", "pss_mib")}
    numbers = {name: round(value, 3) for name, value in {**percents, **memory}.items()}
    return {"role": after.role, "pid": after.pid, **numbers}


def probe_rows(before: HealthFile | None, after: HealthFile | None) -> list[dict[str, Any]]:
    """Looks between two files of the agent; since its start where there is only one."""
    if after is None:
        return []
    old = before.costs if before is not None and before.pid == after.pid and before.mono < after.mono else {}
    since = before.mono if before is not None and old else None
    rows = []
    for name, cost in after.costs.items():
        start = old.get(name, Cost())
        looks, cpu_s, took_s = cost.looks - start.looks, cost.cpu_s - start.cpu_s, cost.took_s - start.took_s
        share = None if since is None else round(cpu_s / (after.mono - since) * 100, 4)
        each = {"cpu_ms": round(cpu_s / looks * 1000, 3), "took_ms": round(took_s / looks * 1000, 3)} if looks else {}
        rows.append({"probe": name, "looks": looks, **each, "cpu_percent": share})
    return sorted(rows, key=lambda row: -(row["cpu_percent"] or 0.0))


def running(job_dir: str, local_dir: str) -> Path:
    """The local folder of a node that runs here. Raises RunFailed."""
    for folder in [Path(local_dir)] if local_dir else _local_dirs():
        try:
            plan = read_plan(LocalPaths(folder).plan)
        except (OSError, msgspec.DecodeError):
            continue
        if local_dir or (Path(plan.job_dir) == Path(job_dir).resolve() and psutil.pid_exists(plan.front_pid)):
            return folder
    raise RunFailed(f"no node of {job_dir or local_dir} runs here")


def _local_dirs() -> Iterator[Path]:
    own = f"unbroken-{os.getuid()}"
    roots = dict.fromkeys([os.environ.get("UNBROKEN_LOCAL_DIR", ""), f"{tempfile.gettempdir()}/{own}", f"/tmp/{own}"])
    for root in filter(None, roots):
        yield from (plan.parent for plan in sorted(Path(root).glob("*/*/node.json")))


def report(folder: Path, load: Load, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Start a job that only talks, watch it, end it. Raises RunFailed."""
    run = _start(folder, load)
    try:
        run.wait_for_step(20, timeout_s=LIMIT_S)
        local_dir = next((folder / "l").glob("*/*/node.json")).parent
        say("the ranks run; the probes look for the first time")
        deadline = time.monotonic() + SETTLE_S
        while (health := read_health(local_dir)) is None or health.waiting:
            if time.monotonic() > deadline:
                say("not every probe has looked")
                break
            time.sleep(0.5)
        time.sleep(min(CALM_S, seconds))
        say(f"measuring for {seconds:g} s")
        found = measure(local_dir, seconds)
    finally:
        run.close(grace_s=20.0)
    return {**found, "about": load.describe(), "started": load._asdict()}


def _start(folder: Path, load: Load) -> WatchedRun:
    arguments = ["--nproc-per-node", str(load.ranks), str(TALKER), str(load.lines_per_s), f"--save-dir={folder}/out"]
    command = unbroken("run", "--job-dir", str(folder / "job"), "--", *torchrun(), *arguments)
    env = {"UNBROKEN_LOCAL_DIR": str(folder / "l")}
    if load.gpu_library:
        (folder / "lib").mkdir()
        (folder / "lib" / "libnvidia-ml.so.1").symlink_to(Path(load.gpu_library).resolve())
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [f"{folder}/lib", os.environ.get("LD_LIBRARY_PATH")]))
    if load.gpus or load.ports:
        if os.geteuid() != 0:
            raise RunFailed("only root can stand in for hardware: it takes a mount namespace")
        command = [*with_stand_ins(folder / "hardware", load.gpus, load.ports), *command]
    return WatchedRun(command, folder=folder, env=env)


# ----- GPUs and InfiniBand ports for a machine that has none, as files -----
#
# They lie over /sys/class and /sys/bus/pci/devices in a mount namespace of the measured command's own, beside what the
# machine really has; nobody else sees them. Root only. What a
# real adapter's driver does when it is read is not in them.

CLASSES: Final = Path("/sys/class")
DEVICES: Final = Path("/sys/bus/pci/devices")
GPU_BUS, NIC_BUS = 0x10, 0x40
"""First bus numbers: the GPUs are where tests/fake_nvml says that its own are."""
_COUNTERS: Final = (
    "excessive_buffer_overrun_errors link_downed link_error_recovery local_link_integrity_errors port_rcv_errors "
    "port_rcv_data port_rcv_packets port_rcv_remote_physical_errors port_xmit_data port_xmit_discards port_xmit_wait "
    "symbol_error"
).split()
_HW_COUNTERS: Final = (
    "duplicate_request implied_nak_seq_err local_ack_timeout_err out_of_buffer out_of_sequence packet_seq_err "
    "req_transport_retries_exceeded rnr_nak_retry_err roce_adp_retrans roce_slow_restart rx_icrc_encapsulated"
).split()
_AER: Final = {
    "COR": "RxErr BadTLP BadDLLP Rollover Timeout NonFatalErr CorrIntErr HeaderOF",
    "NONFATAL": "DLP SDES TLP FCP CmpltTO CmpltAbrt UnxCmplt RxOF MalfTLP ECRC UnsupReq ACSViol",
    "FATAL": "DLP SDES TLP FCP CmpltTO CmpltAbrt UnxCmplt RxOF MalfTLP ECRC UnsupReq ACSViol",
}


def with_stand_ins(folder: Path, gpus: int, ports: int) -> list[str]:
    """What to put before a command so that it, and only it, sees so many of them. Makes the files below `folder`."""
    classes, devices = folder / "class", folder / "pci"
    _copy_links(CLASSES, classes)
    devices.mkdir(parents=True)
    for entry in DEVICES.iterdir() if DEVICES.is_dir() else ():
        (devices / entry.name).symlink_to(os.readlink(entry))
    for number in range(gpus):
        _function(folder, GPU_BUS + number, "0x030200", "0x10de", "0x2330")
    for number in range(ports):
        _adapter(classes / "infiniband" / f"mlx5_{number}", _function(folder, NIC_BUS + number, "0x020700"))
    script = 'mount --bind "$1" "$2" && mount --bind "$3" "$4" && shift 4 && exec "$@"'
    places = [str(classes), str(CLASSES), str(devices), str(DEVICES)]
    return ["unshare", "--mount", "sh", "-c", script, "sh", *places]


def _copy_links(source: Path, target: Path) -> None:
    """The links of /sys/class as they are: relative ones lead to the same devices from the same place."""
    for group in source.iterdir():
        (target / group.name).mkdir(parents=True)
        for entry in group.iterdir():
            if entry.is_symlink():
                (target / group.name / entry.name).symlink_to(os.readlink(entry))
            elif entry.is_file():
                (target / group.name / entry.name).touch()


def _function(folder: Path, bus: int, pci_class: str, vendor: str = "0x15b3", device: str = "0x1021") -> Path:
    """A PCI function in a slot of a root port of its own: both ends have links and AER counters."""
    port, address = f"0000:{bus + 0x80:02x}:01.0", f"0000:{bus:02x}:00.0"
    at = folder / "devices" / f"pci0000:{bus + 0x80:02x}" / port / address
    for path, name, kind, maker in ((at.parent, port, "0x060400", "0x8086"), (at, address, pci_class, vendor)):
        _write(path, {"class": kind, "vendor": maker, "device": device, "power/runtime_status": "active"})
        _write(path, dict.fromkeys(("current_link_width", "max_link_width"), "16"))
        _write(path, dict.fromkeys(("current_link_speed", "max_link_speed"), "32.0 GT/s PCIe"))
        for suffix, names in _AER.items():
            lines = [*(f"{error} 0" for error in names.split()), f"TOTAL_ERR_{suffix} 0"]
            _write(path, {f"aer_dev_{'correctable' if suffix == 'COR' else suffix.lower()}": "\n".join(lines)})
        (path / "config").write_bytes(bytes.fromhex(maker[4:] + maker[2:4]) + bytes(4094))
        (folder / "pci" / name).symlink_to(path)
    return at


def _adapter(at: Path, function: Path) -> None:
    """One ConnectX-7 with one NDR port."""
    _write(at, {"fw_ver": "28.39.1002", "board_id": "MT_0000000838", "hca_type": "MT4129", "node_type": "1: CA"})
    _write(at, {"sys_image_guid": f"a088:c203:00e5:{at.name.rpartition('_')[2]:0>4}"})
    port = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    _write(at / "ports/1", port)
    _write(at / "ports/1/counters", dict.fromkeys(_COUNTERS, "0"))
    _write(at / "ports/1/hw_counters", dict.fromkeys(_HW_COUNTERS, "0"))
    (at / "device").symlink_to(function)


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
