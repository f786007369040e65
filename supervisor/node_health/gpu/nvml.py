"""The edge to NVML: every call by name, its answer a fact or a gap, never an exception, never a CUDA context.

What is asked is a table: fact, function, arguments, and what is kept of the answer. Functions that a GPU or driver does
not have are remembered and not asked again until handles are made anew. `Events` tells Xid and double-bit errors as the
lines of the kernel log that stand for them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from diagnosis.signals import Signal, clean_text
from supervisor.node_health.contract import ProbeContext
from supervisor.node_health.gpu.facts import (
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    NO_ANSWER,
    NOT_SUPPORTED,
    TIMEOUT,
    Fact,
    Gap,
)


class NvmlCall(NamedTuple):
    fact: str
    function: str
    arguments: tuple[Any, ...] = ()
    keep: Callable[[Any], Any] | None = None
    structure: str = ""
    """Class of the structure that the function fills in, where it takes one."""
    instead: str = ""
    """Fact of another row, asked only where this one is absent."""


def _numbers(*names: str) -> Callable[[Any], tuple[int, ...]]:
    return lambda answer: tuple(int(getattr(answer, name)) for name in names)


_MEMORY_V2: Final = 0x02000000 | 40  # nvmlMemory_v2: its `used` leaves out what the driver reserves for itself
_VOLATILE, _AGGREGATE, _CORRECTED, _UNCORRECTED, _DRAM, _SRAM = 0, 1, 0, 1, 2, 7
_SM, _MEMORY_CLOCK = 1, 2

FAST: Final = (
    NvmlCall("temperature_c", "nvmlDeviceGetTemperature", (0,), instead="nvmlDeviceGetTemperatureV"),
    NvmlCall("margin_c", "nvmlDeviceGetMarginTemperature"),
    NvmlCall("power_mw", "nvmlDeviceGetPowerUsage"),
    NvmlCall("utilization", "nvmlDeviceGetUtilizationRates", (), _numbers("gpu", "memory")),
    NvmlCall("memory", "nvmlDeviceGetMemoryInfo", (_MEMORY_V2,), _numbers("used", "total")),
    NvmlCall(
        "clock_reasons", "nvmlDeviceGetCurrentClocksEventReasons", instead="nvmlDeviceGetCurrentClocksThrottleReasons"
    ),
    NvmlCall("sm_mhz", "nvmlDeviceGetClockInfo", (_SM,)),
    NvmlCall("ecc_uncorrected", "nvmlDeviceGetTotalEccErrors", (_UNCORRECTED, _VOLATILE)),
    NvmlCall("ecc_corrected", "nvmlDeviceGetTotalEccErrors", (_CORRECTED, _VOLATILE)),
)
"""At every look."""
FAST_FIELDS: Final = {82: "memory_temperature_c", 94: "pcie_replays", 230: "recovery_action"}
"""Number of an NVML field -> fact; all of them in one call. (Numbers: nvml.h, NVML_FI_DEV_*.)"""

SLOW: Final = (
    NvmlCall("ecc_aggregate_dram", "nvmlDeviceGetMemoryErrorCounter", (_UNCORRECTED, _AGGREGATE, _DRAM)),
    NvmlCall("ecc_aggregate_sram", "nvmlDeviceGetMemoryErrorCounter", (_UNCORRECTED, _AGGREGATE, _SRAM)),
    NvmlCall("remapped_rows", "nvmlDeviceGetRemappedRows", (), tuple),
    NvmlCall(
        "sram_threshold",
        "nvmlDeviceGetSramEccErrorStatus",
        keep=lambda status: int(status.bThresholdExceeded),
        structure="c_nvmlEccSramErrorStatus_v1_t",
    ),
    NvmlCall("power_limit_mw", "nvmlDeviceGetEnforcedPowerLimit"),
    NvmlCall("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth"),
    NvmlCall("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth"),
    NvmlCall("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
    NvmlCall("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration"),
    NvmlCall("mig_mode", "nvmlDeviceGetMigMode", (), tuple),
    NvmlCall("compute_processes", "nvmlDeviceGetComputeRunningProcesses_v3", (), lambda found: _processes(found)),
)
"""One GPU a look, in turns. (Listing processes takes milliseconds under the driver's one lock: never at every look.)"""
GRAPHICS: Final = (
    NvmlCall("graphics_processes", "nvmlDeviceGetGraphicsRunningProcesses_v3", (), lambda found: _processes(found)),
)
"""Asked only where memory is held and no program that computes has it."""
FABRIC: Final = tuple(
    NvmlCall("fabric", "nvmlDeviceGetGpuFabricInfoV", (), _numbers("state", "status", "healthMask"), structure)
    for structure in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t")
)
"""The newest structure first: drivers before R565 know only the second."""

ONCE: Final = (
    NvmlCall("slowdown_c", "nvmlDeviceGetTemperatureThreshold", (1,)),
    NvmlCall("gpu_max_c", "nvmlDeviceGetTemperatureThreshold", (3,)),
    NvmlCall("name", "nvmlDeviceGetName", (), lambda name: clean_text(str(name), 80)),
    NvmlCall("vbios", "nvmlDeviceGetVbiosVersion", (), lambda text: clean_text(str(text), 40)),
    NvmlCall("inforom", "nvmlDeviceGetInforomImageVersion", (), lambda text: clean_text(str(text), 40)),
    NvmlCall("addressing", "nvmlDeviceGetAddressingMode"),
    NvmlCall("gsp", "nvmlDeviceGetGspFirmwareVersion", (), lambda text: clean_text(_decoded(text), 40)),
)
"""When a handle is made."""

PREFLIGHT: Final = (
    NvmlCall("compute_mode", "nvmlDeviceGetComputeMode"),
    NvmlCall("clock_sm", "nvmlDeviceGetApplicationsClock", (_SM,)),
    NvmlCall("clock_sm_default", "nvmlDeviceGetDefaultApplicationsClock", (_SM,)),
    NvmlCall("clock_memory", "nvmlDeviceGetApplicationsClock", (_MEMORY_CLOCK,)),
    NvmlCall("clock_memory_default", "nvmlDeviceGetDefaultApplicationsClock", (_MEMORY_CLOCK,)),
)

LINK_FIELDS: Final = {
    "nvlink_replays": (161,),
    "nvlink_recoveries": (162, 215),
    "nvlink_crc": (163,),
    "nvlink_failures": (206, 207, 208, 214),
}
"""Fact -> fields asked for each NVLink (NVLink 4: data link errors; NVLink 5: 206 malformed packets, 207 buffer
overruns, 208 receive errors, 214 failed and 215 all recoveries)."""
TOTAL_FIELDS: Final = {"nvlink_crc": (38, 45), "nvlink_replays": (52,), "nvlink_recoveries": (59,)}
"""The same over all links of a GPU, for those that do not count by link. (On Hopper these are always 0, by link not;
from Blackwell on 161 to 163 are gone and 206 to 215 there.)"""
MAX_LINKS: Final = 36


def _decoded(text: str | bytes) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else text


def _processes(found: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    return tuple((int(each.pid), int(each.usedGpuMemory or 0)) for each in list(found)[:256])


@dataclasses.dataclass
class Handle:
    """A GPU that NVML knows. Address and UUID are kept for when it no longer answers."""

    index: int
    device: str
    uuid: str
    handle: Any
    once: dict[str, Fact] = dataclasses.field(default_factory=dict)
    missing: dict[str, Gap] = dataclasses.field(default_factory=dict)
    """Functions and fields it does not have, by fact: not asked again."""
    gone: Gap | None = None
    """Why there is no handle to ask."""
    links: int = MAX_LINKS
    counted: dict[tuple[int, int], float] = dataclasses.field(default_factory=dict)
    """Newest value of each NVLink counter, by field and link; `link_errors` is what they grew by, by fact."""
    link_errors: dict[str, float] = dataclasses.field(default_factory=dict)
    erring: set[int] = dataclasses.field(default_factory=set)
    """NVLinks that had errors other than replays."""


class Nvml:
    """The library. `generation` grows whenever all handles were made anew; `waiting` is held by who waits for events.

    Looks and the listener call it from a thread each; NVML itself may be called from several.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._module: Any = None
        self.generation = 0
        self.changed = threading.Event()
        """Set when handles were made anew; cleared by the listener."""
        self.waiting = threading.Lock()
        self.handles: dict[str, Handle] = {}

    @property
    def module(self) -> Any:
        """pynvml, imported only where it is used: 3 MiB that no other process has to carry."""
        if self._module is None:
            import pynvml

            self._module = pynvml
        return self._module

    def ask(self, function: str, *arguments: Any, about: str = "", say: bool = True) -> Any:
        """The answer, or the gap in its place."""
        try:
            if say:
                self._say(f"{function} {about}".rstrip())
            return getattr(self.module, function)(*arguments)
        except Exception as error:
            # NVMLError has the code. Whatever else the binding raises (a text that is not UTF-8, a function that this
            # version of it lacks, a structure that ctypes refuses) is a gap of this one fact as well.
            code = getattr(error, "value", None)
            if isinstance(code, int):
                return Gap(code, function)
            if isinstance(error, AttributeError) or type(error).__name__ == "NVMLLibraryMismatchError":
                return Gap(FUNCTION_NOT_FOUND, function, f"{function}: not in the driver, or not in this nvidia-ml-py")
            return Gap(NO_ANSWER, function, f"{function}: {type(error).__name__}")

    def call(self, gpu: Handle, row: NvmlCall) -> Fact:
        if (known := gpu.missing.get(row.fact)) is not None:
            return known
        arguments = row.arguments
        if row.structure:
            structure = getattr(self.module, row.structure, None)
            if structure is None:
                return Gap(FUNCTION_NOT_FOUND, row.function)
            filled = structure()
            arguments = (*arguments, ctypes.byref(filled))
        answer = self.ask(row.function, gpu.handle, *arguments, about=gpu.device)
        if isinstance(answer, Gap):
            if answer.absent and row.instead:
                answer = self.ask(row.instead, gpu.handle, *arguments, about=gpu.device)
            if isinstance(answer, Gap):
                return answer
        if row.structure:
            answer = filled
        try:
            return row.keep(answer) if row.keep else answer  # type: ignore[no-any-return]
        except (ValueError, TypeError, AttributeError, UnicodeDecodeError) as error:
            return Gap(NO_ANSWER, row.function, f"{row.function}: {type(error).__name__}")

    def facts(self, gpu: Handle, rows: Iterable[NvmlCall]) -> dict[str, Fact]:
        found = {}
        for row in rows:
            found[row.fact] = fact = self.call(gpu, row)
            if isinstance(fact, Gap) and fact.absent:
                gpu.missing[row.fact] = fact
        return found

    def first_of(self, gpu: Handle, rows: Iterable[NvmlCall]) -> dict[str, Fact]:
        """The first row that is not absent (several structures of one function); all are of one fact."""
        found: dict[str, Fact] = {}
        for row in rows:
            found = {row.fact: self.call(gpu, row)}
            fact = found[row.fact]
            if not (isinstance(fact, Gap) and fact.absent):
                return found
        gpu.missing.update({name: fact for name, fact in found.items() if isinstance(fact, Gap)})
        return found

    def fields(self, gpu: Handle, wanted: list[tuple[int, int]]) -> list[Fact]:
        """Values of NVML fields (field, scope), in one call."""
        name = "nvmlDeviceGetFieldValues"
        if not wanted:
            return []
        answer = self.ask(name, gpu.handle, wanted, about=gpu.device)
        if isinstance(answer, Gap):
            return [answer] * len(wanted)
        return [_field(value) for value in answer]

    def named_fields(self, gpu: Handle, names: dict[int, str]) -> dict[str, Fact]:
        wanted = [field for field, fact in names.items() if fact not in gpu.missing]
        found: dict[str, Fact] = {names[field]: gpu.missing[names[field]] for field in names if field not in wanted}
        for field, fact in zip(wanted, self.fields(gpu, [(field, 0) for field in wanted]), strict=True):
            found[names[field]] = fact
            if isinstance(fact, Gap) and fact.absent:
                gpu.missing[names[field]] = fact
        return found

    def link_states(self, gpu: Handle) -> Fact:
        """1, 0 or -1 (no such link) for each NVLink; a gap where it has none at all."""
        if (known := gpu.missing.get("links")) is not None:
            return known
        states: list[int] = []
        gap: Gap | None = None
        for link in range(gpu.links):
            answer = self.ask("nvmlDeviceGetNvLinkState", gpu.handle, link, about=gpu.device)
            if isinstance(answer, Gap):
                gap = answer
                if answer.code == NOT_SUPPORTED:
                    states.append(-1)
                    continue
                if answer.absent:
                    break
                return answer
            states.append(1 if answer else 0)
        while states and states[-1] < 0:
            states.pop()
        gpu.links = len(states)
        if states:
            return tuple(states)
        gpu.missing["links"] = gap = gap or Gap(NOT_SUPPORTED, "nvmlDeviceGetNvLinkState")
        return gap

    def link_errors(self, gpu: Handle, states: Fact) -> dict[str, Fact]:
        """NVLink errors of a GPU since its handle was made: by link where it counts so, else its own totals.

        Each counter's growth is added up by itself: one that fails to be read now and then, or is not there for an
        inactive link, would make a sum of counters fall and jump.
        """
        links = [link for link, state in enumerate(states) if state >= 0] if isinstance(states, tuple) else []
        counted: set[str] = set()
        gap = Gap(NOT_SUPPORTED, "nvmlDeviceGetFieldValues")
        for fields, scopes in ((LINK_FIELDS, links), (TOTAL_FIELDS, [0] if links else [])):
            wanted = [
                (fact, field, scope)
                for fact, numbers in fields.items()
                if fact not in counted
                for field in numbers
                for scope in scopes
                if f"{fact} {field} {scope}" not in gpu.missing
            ]
            values = self.fields(gpu, [(field, scope) for _, field, scope in wanted])
            for (fact, field, scope), value in zip(wanted, values, strict=True):
                if isinstance(value, (int, float)):
                    counted.add(fact)
                    growth = value - gpu.counted.get((field, scope), value)
                    gpu.counted[field, scope] = value
                    gpu.link_errors[fact] = gpu.link_errors.get(fact, 0.0) + max(0.0, growth)
                    if growth > 0 and fields is LINK_FIELDS and fact != "nvlink_replays":
                        gpu.erring.add(scope)
                elif isinstance(value, Gap) and value.absent:
                    gpu.missing[f"{fact} {field} {scope}"] = value
                elif isinstance(value, Gap):
                    gap = value
        found: dict[str, Fact] = {fact: gpu.link_errors[fact] if fact in counted else gap for fact in LINK_FIELDS}
        return {**found, "nvlinks_erring": tuple(sorted(gpu.erring))}


_VALUES: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Member of the union by value type."""


def _field(value: Any) -> Fact:
    name = f"field {value.fieldId}"
    if value.nvmlReturn != 0:
        return Gap(int(value.nvmlReturn), name)
    if not 0 <= value.valueType < len(_VALUES):
        return Gap(INVALID_ARGUMENT, name, f"{name}: unknown value type {value.valueType}")
    number: float = getattr(value.value, _VALUES[value.valueType])
    return number


# ----- events

# Single-bit errors are not waited for: they come by the ten thousand a second, and their rate is what is judged
# (`gpu_ecc_corrected_rate`).
DOUBLE_BIT, XID = 0x2, 0x8
RECOVERY_CHANGED: Final = 154
"""Means nothing without the action, which an event does not have (it may be the all-clear): `gpu_recovery_action`."""
WAIT_MS: Final = 2000
REST_S: Final = 10.0
"""After waits that failed one upon the other: a GPU that is lost may make every wait return at once."""
BURST: Final = 50
PAUSE_S: Final = 0.05
"""After so many events without a break: a storm is counted at 1000 events a second, with some percent of a core."""
_NO_INSTANCE: Final = 0xFFFFFFFF

Key = tuple[str, str, int]


class Storm:
    """Which events are told one by one, and which are counted: at most five of a kind in each ten seconds."""

    def __init__(self, most: int = 5, every_s: float = 10.0) -> None:
        self.most, self.every_s = most, every_s
        self.counts: dict[Key, int] = {}
        self.since = 0.0

    def note(self, key: Key) -> bool:
        """True when this one is to be told."""
        self.counts[key] = self.counts.get(key, 0) + 1
        return self.counts[key] <= self.most

    def flush(self, mono: float) -> list[tuple[Key, int]]:
        """Once in ten seconds: what was counted and not told since."""
        if mono < self.since + self.every_s:
            return []
        rest = [(key, count - self.most) for key, count in self.counts.items() if count > self.most]
        self.counts, self.since = {}, mono
        return rest


def line(code: int, device: str, instance: str = "", times: int = 1) -> str:
    """The kernel's line for it, and who says so."""
    repeated = f" {times} times more" if times > 1 else ""
    return f"NVRM: Xid (PCI:{device}{instance}): {code}, reported by NVML{repeated}"


class Events:
    """Waits for events of all GPUs that can be registered, for ever."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._storm = Storm()
        self.problem = ""
        """Why no events are heard, where they are not."""

    def listen(self, place: ProbeContext, tell: Callable[[Signal], None]) -> None:
        boot_id = place.boot_id
        uuids: dict[str, str] = {}

        def report(device: str, text: str) -> None:
            tell(
                Signal(
                    source="gpu",
                    text=text,
                    at=time.time(),
                    mono=time.monotonic(),
                    node=place.node,
                    gpu=device,
                    gpu_uuid=uuids.get(device, ""),
                    boot_id=boot_id,
                )
            )

        while True:
            self._nvml.changed.wait()
            self._nvml.changed.clear()
            generation, failures = self._nvml.generation, 0
            while generation == self._nvml.generation:
                began = time.monotonic()
                handles = list(self._nvml.handles.values())
                uuids.update({gpu.device: gpu.uuid for gpu in handles})
                if not self._wait_for(handles, generation, report):
                    break
                # The GPUs that are left are waited for at once.
                failures = 1 if time.monotonic() >= began + REST_S else failures + 1
                if failures > 1:
                    self._nvml.changed.wait(REST_S)

    def _wait_for(self, handles: list[Handle], generation: int, report: Callable[[str, str], None]) -> bool:
        """False when no GPU takes part: then there is nothing to wait for until handles are made anew."""
        ask = self._nvml.ask
        devices: dict[int, str] = {}
        # Under the lock the library is not shut down; after a change of generation nothing of it may be used any more.
        with self._nvml.waiting:
            if generation != self._nvml.generation:
                return True
            events = ask("nvmlEventSetCreate", say=False)
            if isinstance(events, Gap):
                self.problem = f"no Xid events: {events.words}"
                return not events.absent
            for gpu in handles:
                refused = gpu.gone or self._register(gpu, events)
                if isinstance(refused, Gap):
                    self.problem = f"no Xid events: {refused.words}"
                else:
                    devices[_address(gpu.handle)] = gpu.device
            self.problem = "" if devices else self.problem
        burst = 0
        while devices:
            with self._nvml.waiting:
                if generation != self._nvml.generation:
                    break
                event = ask("nvmlEventSetWait_v2", events, WAIT_MS, say=False)
            for (device, instance, code), count in self._storm.flush(time.monotonic()):
                report(device, line(code, device, instance, count))
            if not isinstance(event, Gap):
                self._hear(event, devices, report)
                burst += 1
                if burst >= BURST:
                    time.sleep(PAUSE_S)
                    burst = 0
                continue
            burst = 0
            if event.code != TIMEOUT:
                break
        with self._nvml.waiting:
            if generation == self._nvml.generation:
                ask("nvmlEventSetFree", events, say=False)
        return bool(devices)

    def _register(self, gpu: Handle, events: Any) -> Any:
        supported = self._nvml.ask("nvmlDeviceGetSupportedEventTypes", gpu.handle, say=False)
        if isinstance(supported, Gap):
            return supported
        wanted = supported & (DOUBLE_BIT | XID)
        if not wanted:
            return Gap(NOT_SUPPORTED, "nvmlDeviceRegisterEvents")
        return self._nvml.ask("nvmlDeviceRegisterEvents", gpu.handle, wanted, events, say=False)

    def _hear(self, event: Any, devices: dict[int, str], report: Callable[[str, str], None]) -> None:
        device = devices.get(_address(event.device), "")
        # Xid 48 is what a double-bit error is called in the kernel log.
        code = 48 if event.eventType == DOUBLE_BIT else int(event.eventData)
        if not device or event.eventType not in (DOUBLE_BIT, XID) or code == RECOVERY_CHANGED:
            return
        instance = "" if event.gpuInstanceId == _NO_INSTANCE else f" GPU-I:{event.gpuInstanceId:02d}"
        if self._storm.note((device, instance, code)):
            report(device, line(code, device, instance))


def _address(handle: Any) -> int:
    """A handle is a pointer; two of the same GPU are equal as numbers."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
