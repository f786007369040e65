"""The probe of the GPUs through NVML: who is there, what is asked when, and what is told.

Each look asks for the fast facts of all GPUs and for the slow facts of one GPU, so that one look stays cheap. The probe
runs alone in the probe worker `gpu`: any of its calls may never return. It never creates a CUDA context. In a captured
tree it asks nothing.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from diagnosis.health import CheckResult, Status, not_applicable
from diagnosis.signals import Signal, clean_text
from supervisor.node_health.contract import Moment, ProbeContext
from supervisor.node_health.gpu import nvml as calls
from supervisor.node_health.gpu.checks import CHECKS, NVML, NVML_COUNT, ROWS, judged
from supervisor.node_health.gpu.facts import (
    BEST,
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    UNINITIALIZED,
    UNTOLD,
    Fact,
    Gap,
    Gpu,
    GpuHistory,
    Owner,
    Process,
    usual,
)
from supervisor.node_health.gpu.nvml import Events, Handle, Nvml
from supervisor.node_health.state import GPU_CALL_S

# ----- whose processes hold memory of a GPU: the job's ranks', the node's own services', somebody else's, or nobody's

_INITIAL_PID_NAMESPACE: Final = "pid:[4026531836]"
_SYSTEM: Final = re.compile(r"nvidia-|nv-hostengine|dcgm|Xorg|Xwayland|gnome-shell")
"""Programs that may hold memory of a GPU on a healthy node: the driver's daemons, monitoring, a display."""
_UNTOLD_MEMORY: Final = 1 << 63
"""NVML gives all ones for memory that it cannot tell."""


def processes(compute: Fact, graphics: Fact, place: ProbeContext) -> tuple[Process, ...] | Gap:
    """Who they are, from pairs of pid and bytes as NVML lists them."""
    if isinstance(compute, Gap):
        return compute
    if place.link("proc/self/ns/pid") != _INITIAL_PID_NAMESPACE:
        return Gap(NO_PERMISSION, "", "in a pid namespace of its own NVML does not show the processes of others")
    found: dict[int, int] = dict(graphics) if isinstance(graphics, tuple) else {}
    found.update(compute if isinstance(compute, tuple) else ())
    return tuple(_process(pid, memory, place) for pid, memory in found.items())


def _process(pid: int, memory: int, place: ProbeContext) -> Process:
    name = clean_text((place.text(f"proc/{pid}/comm", 64) or "").strip(), 16)
    return Process(pid, 0 if memory >= _UNTOLD_MEMORY else memory, name, _owner(pid, name, place))


def _owner(pid: int, name: str, place: ProbeContext) -> Owner:
    at = pid
    for _ in range(16):
        if at in place.job.ranks:
            return "rank"
        stat = (place.text(f"proc/{at}/stat", 512) or "").rpartition(")")[2].split()
        at = int(stat[1]) if len(stat) > 1 and stat[1].isdecimal() else 0
        if at <= 1:
            break
    if _SYSTEM.match(name):
        return "system"
    return "other" if name or _alive(pid) else "gone"


def _alive(pid: int) -> bool:
    """Also of a process that /proc hides from us."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def of_this_job(minor: str) -> bool:
    """Whether a GPU, by the number of its device file, is one of the Slurm job for which we look (in its prolog, say).

    Without Slurm, or where the number is not known, it is.
    """
    listed = os.environ.get("SLURM_JOB_GPUS", "")
    if not minor or not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", listed):
        return True
    ranges = [part.partition("-") for part in listed.split(",")]
    return any(int(low) <= int(minor) <= int(high or low) for low, _, high in ranges)


# ----- the probe

SLOW_S: Final = 60.0
"""Slow facts of a GPU are at least so old before they are asked again."""
RETRY_S: Final = 60.0
"""Between two tries to initialize the library."""
RETRY_LOST_S: Final = 600.0
"""Between two tries to get back a GPU that was lost: each makes the driver look at it, which it may log."""
FORGET_S: Final = 1800.0
"""What a GPU did not have is asked again after so long (a driver may be given new rights)."""
KEEP_S: Final = 300.0
GRAPHICS_BYTES: Final = 100 << 20
CPU_SHARE: Final = 0.002
"""Of one core, over time: where the driver's calls cost more than they should, looks are taken less often."""
SHORTEST_S, LONGEST_S = 10.0, 60.0
"""Seconds between two looks."""


class NvmlProbe:
    """GPUs by NVML. Follows `Probe`, `EventListener` and `Talkative`."""

    name = "nvml"
    checks = CHECKS
    deadline_s = 45.0

    def __init__(self) -> None:
        self.every_s = SHORTEST_S
        self._cost_s = 0.0
        """CPU seconds of one look, smoothed."""
        self.doing = ""
        self.inventory: dict[str, str] = {}
        """What the GPUs are, for the comparison of a job's nodes: name, VBIOS, InfoROM, GSP firmware."""
        self._nvml = Nvml(self._say)
        self._events = Events(self._nvml)
        self._histories: dict[str, GpuHistory] = {}
        self._slow_at: dict[str, float] = {}
        self._pids: dict[str, tuple[int, ...]] = {}
        self._init: Gap | None = Gap(UNTOLD, "nvmlInitWithFlags", "not tried yet")
        self._refused: list[Gap] = []
        self._on_bus: list[str] = []
        self._ours: list[str] = []
        self._minors: dict[str, str] = {}
        self._scanned_at = float("-inf")
        self._tried_at = float("-inf")
        self._kept_at = float("-inf")
        self._forgot_at = 0.0
        self._kept: object = None

    @property
    def once_s(self) -> float:
        """A call takes milliseconds; only the first one, which loads the driver, may take tens of seconds."""
        return self.deadline_s if self.doing.startswith("nvmlInit") else GPU_CALL_S

    def _say(self, what: str) -> None:
        self.doing = what

    def listen(self, place: ProbeContext, tell: Callable[[Signal], None]) -> None:
        """Tells Xid and double-bit error events as lines of the kernel log, for as long as the process lives."""
        if place.live:
            self._events.listen(place, tell)

    def look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:
        if not place.live:
            return [not_applicable(check.id, "the driver is asked of the running node only") for check in CHECKS]
        started, before = self._nvml.generation, time.thread_time()
        try:
            return self._look(place, now)
        finally:
            self.doing = ""
            if started == self._nvml.generation and not place.preflight:
                self._cost_s += 0.3 * (time.thread_time() - before - self._cost_s)
                self.every_s = min(LONGEST_S, max(SHORTEST_S, self._cost_s / CPU_SHARE))

    def _look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:
        if now.mono >= self._scanned_at + RETRY_S:
            self._scanned_at, self._on_bus = now.mono, _pci_gpus(place)
            self._ours = [device for device in self._on_bus if self._may_open(place, device)]
        self._start(place, now)
        library = self._library(place)
        if self._init is not None:
            status: Status = "not_applicable" if library.status == "not_applicable" else "unknown"
            rest = [CheckResult(check=check.id, status=status, text=library.text) for check in CHECKS[1:]]
            return [library, *rest]
        turn = self._turn(place, now)
        gpus = [self._facts(gpu, place, now, gpu.device in turn) for gpu in list(self._nvml.handles.values())]
        again = {GPU_IS_LOST, RESET_REQUIRED, UNINITIALIZED}
        if now.mono >= self._tried_at + RETRY_LOST_S and any(gap.code in again for gpu in gpus for gap in gpu.gaps()):
            self._start_again(place, now)
        gpus = [self._compared(gpu) for gpu in gpus]
        results = [library, self._count(place)]
        for row in ROWS:
            if row.check.when == "preflight" and not place.preflight:
                continue
            limits = place.limits(row.check)
            results.extend(result for gpu in gpus if (result := judged(row, gpu, limits)))
            if not gpus:
                results.append(not_applicable(row.check.id, "NVML has no GPU"))
        self._keep(place, now)
        return results

    # The library and its handles.

    def _start(self, place: ProbeContext, now: Moment) -> None:
        if self._init is not None and now.mono >= self._tried_at + RETRY_S:
            self._tried_at = now.mono
            answer = self._nvml.ask("nvmlInitWithFlags", 0)
            self._init = answer if isinstance(answer, Gap) else self._open(place, now)
        if now.mono >= self._forgot_at + FORGET_S:
            self._forgot_at = now.mono
            for gpu in self._nvml.handles.values():
                gpu.missing.clear()

    def _start_again(self, place: ProbeContext, now: Moment) -> None:
        """After a loss: only a library that was shut down sees a GPU that was reset. The listener must not be in it."""
        self._tried_at = now.mono
        self._nvml.generation += 1
        if not self._nvml.waiting.acquire(timeout=5):
            self._nvml.changed.set()
            return
        try:
            self._nvml.ask("nvmlShutdown")
            answer = self._nvml.ask("nvmlInitWithFlags", 0)
            self._init = answer if isinstance(answer, Gap) else self._open(place, now)
        finally:
            self._nvml.waiting.release()

    def _open(self, place: ProbeContext, now: Moment) -> Gap | None:
        """Handles of all GPUs that answer, and of those known to be there why they do not; a gap: not even counted."""
        nvml = self._nvml
        count = nvml.ask("nvmlDeviceGetCount")
        if isinstance(count, Gap):
            return count
        before, found = nvml.handles, {}
        self._refused = []
        for index in range(min(count, 1024)):
            handle = nvml.ask("nvmlDeviceGetHandleByIndex", index, about=f"index {index}")
            gpu = handle if isinstance(handle, Gap) else self._handle(index, handle)
            if isinstance(gpu, Gap):
                self._refused.append(gpu)
            else:
                found[gpu.device] = gpu
        for device in {*self._ours, *before} - set(found):
            handle = nvml.ask("nvmlDeviceGetHandleByPciBusId", f"{device}.0", about=device)
            gpu = handle if isinstance(handle, Gap) else self._handle(len(found), handle)
            if isinstance(gpu, Handle):
                found[device] = gpu
            elif gpu.code in (GPU_IS_LOST, RESET_REQUIRED) or device in before:
                uuid = before[device].uuid if device in before else ""
                found[device] = Handle(len(found), device, uuid, None, gone=gpu)
        kept = place.load(self.name)
        for gpu in found.values():
            if gpu.device not in self._histories:
                history = self._histories[gpu.device] = GpuHistory()
                history.restore(kept.get(gpu.uuid) if isinstance(kept, dict) and gpu.uuid else None, now.mono)
        nvml.handles = dict(sorted(found.items()))
        self.inventory = _inventory(nvml.handles.values())
        nvml.generation += 1
        nvml.changed.set()
        return None

    def _handle(self, index: int, handle: object) -> Handle | Gap:
        pci = self._nvml.ask("nvmlDeviceGetPciInfo", handle, about=f"index {index}")
        if isinstance(pci, Gap):
            return pci
        device = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}"
        uuid = self._nvml.ask("nvmlDeviceGetUUID", handle, about=device)
        gpu = Handle(index, device, "" if isinstance(uuid, Gap) else clean_text(str(uuid), 64), handle)
        gpu.once = self._nvml.facts(gpu, calls.ONCE)
        return gpu

    def _library(self, place: ProbeContext) -> CheckResult:
        gap, check = self._init, NVML.id
        if gap is None:
            return CheckResult(check=check, status="healthy", text=self._events.problem)
        expected = place.site.expect.gpus
        loaded = place.text("proc/driver/nvidia/version", 256) is not None
        if not (self._on_bus or loaded or expected):
            return not_applicable(check, "no NVIDIA GPU with its driver")
        if gap.code == DRIVER_NOT_LOADED and expected:
            return CheckResult(check=check, status="unhealthy", text=f"{gap.words}, the site expects {expected} GPUs")
        if not loaded or gap.code in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, NO_PERMISSION, FUNCTION_NOT_FOUND):
            return CheckResult(check=check, status="unknown", text=gap.words)
        return CheckResult(check=check, status="unhealthy", text=gap.words)

    def _count(self, place: ProbeContext) -> CheckResult:
        check, known = NVML_COUNT.id, self._nvml.handles
        answering = [gpu.device for gpu in known.values() if gpu.gone is None]
        missing = sorted(set(self._ours) - set(known))
        # A GPU without a PCI address (Jetson) is none that we look at.
        refused = [gap for gap in self._refused if gap.code not in (NO_PERMISSION, NOT_SUPPORTED)]
        # A GPU that is known and gone is told by `gpu_present`; here are those that cannot be named.
        unnamed = len(refused) - (len(known) - len(answering))
        expected = place.site.expect.gpus
        status: Status = "healthy"
        text = ""
        if missing:
            status, text = "unhealthy", f"the driver gives no access to {', '.join(missing[:8])}"
        elif unnamed > 0:
            status, text = "unhealthy", f"{unnamed} GPUs give no handle ({refused[0].words})"
        elif expected is not None and len(known) < expected:
            # A container or a job's control group may show us some of the GPUs only: no reason to blame the node.
            partly = len(self._ours) < len(self._on_bus) or len(self._refused) > len(refused)
            status = "unknown" if partly else "unhealthy"
            text = "not all GPUs may be opened here, but" if partly else "NVML has"
            text += f" {len(known)} GPUs of {expected} that the site expects"
        gpu = missing[0] if len(missing) == 1 else ""
        return CheckResult(check=check, status=status, text=text, gpu=gpu, values={"gpus": float(len(answering))})

    def _may_open(self, place: ProbeContext, device: str) -> bool:
        """Whether this GPU is ours to use: its device file is there and our control group lets us open it.

        access(2) asks the device rules of the control group too, and never the device.
        """
        if device not in self._minors:
            text = place.text(f"proc/driver/nvidia/gpus/{device}.0/information", 4096) or ""
            minor = re.search(r"Device Minor:\s*(\d+)", text)
            if minor is None or re.search(r"GPU Excluded:\s*Yes", text):
                return False
            self._minors[device] = minor[1]
        return os.access(place.path(f"dev/nvidia{self._minors[device]}"), os.R_OK | os.W_OK)

    # The facts of one GPU.

    def _facts(self, gpu: Handle, place: ProbeContext, now: Moment, slow: bool) -> Gpu:
        if gpu.gone is not None:
            return Gpu(gpu.device, gpu.uuid, {"handle": gpu.gone})
        nvml, minor = self._nvml, self._minors.get(gpu.device, "")
        facts: dict[str, Fact] = {**gpu.once, "preflight": float(place.preflight and of_this_job(minor))}
        facts.update(nvml.facts(gpu, calls.FAST))
        facts.update(nvml.named_fields(gpu, calls.FAST_FIELDS))
        if slow:
            facts.update(nvml.facts(gpu, calls.SLOW))
            facts.update(nvml.first_of(gpu, calls.FABRIC))
            facts["links"] = nvml.link_states(gpu)
            facts.update(nvml.link_errors(gpu, facts["links"]))
            memory = facts["memory"]
            if facts["compute_processes"] == () and isinstance(memory, tuple) and memory[0] >= GRAPHICS_BYTES:
                facts.update(nvml.facts(gpu, calls.GRAPHICS))
            facts["processes"] = held = processes(
                facts["compute_processes"], facts.get("graphics_processes", ()), place
            )
            self._pids[gpu.device] = () if isinstance(held, Gap) else tuple(each.pid for each in held)[:64]
            # What the slow turn learned and fast checks need in the looks between.
            gpu.once.update({name: facts[name] for name in ("pcie_width_max", "pcie_generation_max", "power_limit_mw")})
        if place.preflight:
            facts.update(nvml.facts(gpu, calls.PREFLIGHT))
        history = self._histories[gpu.device]
        facts.update(history.derive(facts, now.mono))
        return Gpu(gpu.device, gpu.uuid, facts, self._pids.get(gpu.device, ()))

    def _turn(self, place: ProbeContext, now: Moment) -> set[str]:
        """Whose slow facts are asked: all GPUs' at the first look and before a job, then one GPU's a look."""
        known = [gpu.device for gpu in self._nvml.handles.values() if gpu.gone is None]
        new = {device for device in known if device not in self._slow_at or place.preflight}
        due = [device for device in known if now.mono >= self._slow_at.get(device, 0.0) + SLOW_S]
        turn = new or set(sorted(due, key=lambda device: self._slow_at[device])[:1])
        self._slow_at.update(dict.fromkeys(turn, now.mono))
        return turn

    def _compared(self, gpu: Gpu) -> Gpu:
        """With what only GPUs side by side can tell: the links that most have."""
        if "handle" in gpu.facts or "links" not in gpu.facts:
            return gpu
        facts, handles = dict(gpu.facts), self._nvml.handles
        model = facts.get("name")
        same = [peer for peer in handles.values() if peer.gone is None and peer.once.get("name") == model]
        most = usual(self._histories[peer.device].active_links for peer in same)
        facts["links_of_peers"] = float(most or 0)
        for name in BEST:
            bests = [self._histories[peer.device].best.get(name) for peer in same]
            own = self._histories[gpu.device].best.get(name)
            facts[f"{name}_best"] = float(max(own or 0, usual(bests) or 0))
        return dataclasses.replace(gpu, facts=facts)

    def _keep(self, place: ProbeContext, now: Moment) -> None:
        """What a later process of this boot must know; seldom, and at once when more than counters changed."""
        kept = {gpu.uuid: self._histories[gpu.device].kept() for gpu in self._nvml.handles.values() if gpu.uuid}
        facts = [{**each, "counters": None} for each in kept.values()]
        if facts == self._kept and now.mono < self._kept_at + KEEP_S:
            return
        self._kept, self._kept_at = facts, now.mono
        place.keep(self.name, kept)


def _pci_gpus(place: ProbeContext) -> list[str]:
    """NVIDIA GPUs bound to the NVIDIA driver, by PCI address without function: from sysfs, which never asks them."""
    found = []
    for name in place.names("sys/bus/pci/devices"):
        folder = f"sys/bus/pci/devices/{name}"
        if place.number(f"{folder}/vendor") != 0x10DE or (place.number(f"{folder}/class") or 0) >> 8 not in (
            0x300,
            0x302,
        ):
            continue
        if (place.link(f"{folder}/driver") or "").rpartition("/")[2] == "nvidia":
            found.append(name.lower().rpartition(".")[0])
    return found


def _inventory(gpus: Iterable[Handle]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in ("name", "vbios", "inforom", "gsp"):
        values = Counter(value for gpu in gpus if isinstance(value := gpu.once.get(key), str) and value)
        if values:
            found["gpu" if key == "name" else key] = ", ".join(f"{n} x {value}" for value, n in sorted(values.items()))
    return found
