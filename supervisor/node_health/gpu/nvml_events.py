"""Xid and double-bit errors as NVML tells them, as the lines of the kernel log that stand for them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, Final

from diagnosis.signals import Signal
from supervisor.node_health.contract import ProbeContext
from supervisor.node_health.gpu.facts import NOT_SUPPORTED, TIMEOUT, Gap
from supervisor.node_health.gpu.nvml import Handle, Nvml

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
