"""From kernel events to findings: one for each root cause, repeats counted, followers left out. Bounded memory."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final, NamedTuple

import msgspec

from diagnosis.signals import Evidence, Finding, KernelEvent
from diagnosis.taxonomy import FailureClass

REPEAT_GAP_S: Final = 180.0
"""The same again after less than this is the same burst (NVSentinel's burst gap)."""
PROCESS_GAP_S: Final = 5.0
"""Of another process so much later it is news: a rank that was started again on a device that is still bad."""
REPORT_AGAIN_S: Final = 60.0
"""A fatal one that comes again is reported at most so often, however many there are."""
HISTORY_S: Final = 86400.0
STORM: Final = 4
STORM_S: Final = 60.0
"""Corrected memory errors of one module so many times within this: by their rate no longer a warning."""
STORM_CONFIDENCE: Final = 0.55
MAX_CAUSES: Final = 256
MAX_KILLS: Final = 16
"""So many OOM kills of one burst are reported one by one, since each may be a rank. Further ones are only counted."""
_NVLINK_5: Final = "xid_144 xid_145 xid_146 xid_147 xid_148 xid_149 xid_150"
SUPPORT_BURSTS: Final = 5
"""So many bursts of fatal Xids of one GPU in a day: no restart will cure it (health check A9)."""

_ORDER: Final = ("fatal", "error", "warning", "info")


class _Follows(NamedTuple):
    """Events of `these` (kinds, rules or Xids) within `seconds` of one of `those` tell of the same cause."""

    these: frozenset[str]
    those: frozenset[str]
    seconds: float
    same_device: bool = True
    even_worse: bool = False
    """Also when it is worse than what came first."""


def _follows(these: str, those: str, seconds: float, *, same_device: bool = True, even_worse: bool = False) -> _Follows:
    return _Follows(frozenset(these.split()), frozenset(those.split()), seconds, same_device, even_worse)


_FOLLOWS: Final = (
    # A broken GPU takes the processes on it down: whose channels are removed, whose accesses then fault.
    _follows("xid_13 xid_31 xid_43 xid_45 xid_68 xid_69", "xid_48 xid_79 xid_94 xid_95 xid_171 xid_172", 60.0),
    # A device whose bus failed faults in many ways.
    _follows(
        "xid_13 xid_31 xid_43 xid_45 xid_68 xid_69",
        "dpc aer_fatal aer_nonfatal aer_recovery pcie_bus_error_fatal pcie_bus_error_nonfatal",
        60.0,
        even_worse=True,
    ),
    # What the driver of a disk does when the port above it has failed.
    _follows("nvme block", "dpc aer_fatal pcie_bus_error_fatal", 60.0, same_device=False),
    _follows("nvme block", "aer pcie_slot", 60.0, same_device=False),
    _follows("panic_oom", "oom_kill", 120.0, same_device=False, even_worse=True),
    _follows("xid_45 xid_43 xid_154", "xid", 60.0, even_worse=True),
    _follows("fallen_off_bus", "xid_79 fallen_off_bus", 30.0),
    _follows("xid_79", "fallen_off_bus", 30.0),
    _follows("gpu_driver", "xid fallen_off_bus sxid", 30.0),
    # A switch and the GPUs at its ports tell of one link.
    _follows("xid_74 xid_144 xid_145 xid_146 xid_147 xid_148 xid_149 xid_150", "sxid", 30.0, same_device=False),
    _follows("sxid", "xid_74 xid_144 xid_145 xid_146 xid_147 xid_148 xid_149 xid_150 sxid", 30.0, same_device=False),
    _follows("edac mce", "edac mce", 10.0, same_device=False),
    _follows("mlx5", "mlx5", 60.0),
    _follows("block filesystem", "nvme block", 60.0, same_device=False),
    _follows("filesystem", "filesystem", 60.0),
    _follows("nvme block", "nvme block", 60.0),
    _follows("lustre", "lustre", 60.0, same_device=False),
    _follows("hung_task", "nfs lustre nvme block", 900.0, same_device=False),
    _follows("panic", "oops lockup hung_task mce edac", 120.0, same_device=False, even_worse=True),
    _follows("lockup hung_task", "lockup oops", 300.0, same_device=False),
    _follows("aer", "aer", 10.0),
)


class _Cause:
    __slots__ = ("alike", "count", "event", "finding", "first_at", "last_at", "names", "reported_at")

    def __init__(self, event: KernelEvent, finding: Finding, at: float) -> None:
        self.event, self.finding = event, finding
        self.first_at = self.last_at = self.reported_at = at
        self.count = self.alike = 1
        self.names = {event.kind, event.rule}


class Causes:
    """What was reported recently. `note` gives a finding for what is new, and once more when its count is tenfold."""

    def __init__(self) -> None:
        self._causes: OrderedDict[tuple[str, ...], _Cause] = OrderedDict()
        self._bursts: OrderedDict[tuple[str, str], deque[tuple[float, str]]] = OrderedDict()
        self._kills: deque[float] = deque(maxlen=MAX_KILLS)

    def note(self, event: KernelEvent, at: float, source: str = "kernel") -> Finding | None:
        """A finding when `event`, seen at Unix time `at`, is news."""
        if event.severity == "info":
            return None
        if event.rule == "xid_137" and self._has_bad_link(event.device, at):
            # An access over a link that reports errors of its own: the link's fault, not the program's.
            event = msgspec.structs.replace(
                event, failure_class=FailureClass.NVLINK_ERROR, severity="error", action="cordon_gpu_and_restart"
            )
        key = _key(event)
        cause = self._causes.get(key)
        if cause is not None and _is_same_burst(event, cause, at):
            cause.alike += 1  # not what only comes with it
            return self._again(cause, at) or self._still(cause, event, at, source)
        leader = self._leader(event, at)
        if leader is not None:
            leader.alike += event.rule == "edac_corrected"  # which module it was, of an error already told
            return self._again(leader, at) or self._name_gpu(leader, event)
        if event.kind == "oom_kill" and self._too_many_kills(at):
            return None
        return self._new(key, event, at, source)

    def _again(self, cause: _Cause, at: float) -> Finding | None:
        cause.last_at = max(at, cause.last_at)
        cause.count += 1
        if _is_storm(cause):
            cause.finding = msgspec.structs.replace(cause.finding, severity="error", confidence=STORM_CONFIDENCE)
        elif cause.count < cause.finding.count * 10:
            return None
        cause.reported_at = at
        cause.finding = msgspec.structs.replace(cause.finding, count=cause.count)
        return cause.finding

    def _still(self, cause: _Cause, event: KernelEvent, at: float, source: str) -> Finding | None:
        """A fatal one a while after it was told: its rank may have trained on until now."""
        if cause.finding.severity != "fatal" or abs(at - cause.reported_at) < REPORT_AGAIN_S:
            return None
        cause.reported_at = at
        evidence = finding_of(event, at, source).evidence
        cause.finding = msgspec.structs.replace(cause.finding, evidence=evidence, at=at, count=cause.count)
        return cause.finding

    def _has_bad_link(self, device: str, at: float) -> bool:
        return any(
            at - cause.last_at <= 60.0 and cause.event.device == device and cause.event.rule in _NVLINK_5.split()
            for cause in self._causes.values()
        )

    def _name_gpu(self, cause: _Cause, event: KernelEvent) -> Finding | None:
        """A switch reported a link first: the first GPU that reports it too is at its end. Then the finding again."""
        if cause.event.kind != "sxid" or event.kind != "xid" or not event.device or cause.finding.gpu:
            return None
        sure = min(cause.finding.confidence + 0.02, 0.97)
        cause.finding = msgspec.structs.replace(
            cause.finding, gpu=event.device, gpu_uuid=event.gpu_uuid, confidence=sure, count=cause.count
        )
        return cause.finding

    def _new(self, key: tuple[str, ...], event: KernelEvent, at: float, source: str) -> Finding:
        finding = self._with_history(event, finding_of(event, at, source), at)
        self._causes.pop(key, None)
        self._causes[key] = _Cause(event, finding, at)
        while len(self._causes) > MAX_CAUSES:
            self._causes.popitem(last=False)
        return finding

    def _leader(self, event: KernelEvent, at: float) -> _Cause | None:
        names = {event.kind, event.rule}
        follows = [one for one in _FOLLOWS if names & one.these]
        if not follows and event.kind != "xid":
            return None
        for cause in reversed(self._causes.values()):
            age = abs(at - cause.last_at)  # a clock that was set back, or a second boot, is another time
            if _comes_with(event, cause) and age <= 60.0:
                return cause
            for one in follows:
                if age > one.seconds or not cause.names & one.those:
                    continue
                if one.same_device and not _same_device(event.device, cause.event.device):
                    continue
                if one.even_worse or not _worse(event, cause.event):
                    return cause
        return None

    def _too_many_kills(self, at: float) -> bool:
        if len(self._kills) == MAX_KILLS and abs(at - self._kills[0]) <= REPEAT_GAP_S:
            return True
        self._kills.append(at)
        return False

    def _with_history(self, event: KernelEvent, finding: Finding, at: float) -> Finding:
        """What a Xid of a GPU means when it is not its first of the day."""
        if event.kind != "xid" or not event.device:
            return finding
        place = "/".join(event.fields.get(name, "") for name in ("gpc", "tpc")) if event.code == 13 else ""
        bursts = self._bursts.setdefault((event.rule, event.device), deque(maxlen=32))
        self._bursts.move_to_end((event.rule, event.device))
        while len(self._bursts) > MAX_CAUSES:
            self._bursts.popitem(last=False)
        before = [one for one in bursts if at - one[0] <= HISTORY_S]
        bursts.append((at, place))
        fields = dict(finding.fields)
        if event.code in (13, 31) and self._only_this_gpu(event, at) and any(one[1] == place for one in before):
            # Twice in one place of one GPU, and nowhere else (health checks A7, A8): code would fault everywhere.
            fields |= {"again": str(len(before) + 1), "action": "cordon_gpu_and_restart"}
        fatal = [
            burst
            for (_, device), bursts in self._bursts.items()
            if device == event.device
            for burst in bursts
            if at - burst[0] <= HISTORY_S
        ]
        if event.severity == "fatal" and len(fatal) >= SUPPORT_BURSTS:
            fields |= {"bursts": str(len(fatal)), "action": "cordon_node_and_restart"}
        return msgspec.structs.replace(finding, fields=fields)

    def _only_this_gpu(self, event: KernelEvent, at: float) -> bool:
        return not any(
            rule == event.rule and device != event.device and any(at - burst[0] <= HISTORY_S for burst in bursts)
            for (rule, device), bursts in self._bursts.items()
        )


def _is_same_burst(event: KernelEvent, cause: _Cause, at: float) -> bool:
    apart_s = abs(at - cause.last_at)
    if apart_s > REPEAT_GAP_S or _worse(event, cause.event):
        return False
    serious = event.severity in ("fatal", "error") and not event.consequence
    others = event.pid is not None and cause.event.pid is not None and event.pid != cause.event.pid
    return not (serious and others and apart_s >= PROCESS_GAP_S)


def _is_storm(cause: _Cause) -> bool:
    """Corrected memory errors have just become so many, in so short a time, that they tell of a failing module.

    (Lines without a time all have the same: they tell no rate.)
    """
    is_memory = cause.event.kind in ("edac", "mce") and cause.finding.severity == "warning"
    return is_memory and cause.alike >= STORM and 0.0 < cause.last_at - cause.first_at <= STORM_S


def _key(event: KernelEvent) -> tuple[str, ...]:
    if event.kind in ("oom_kill", "segfault"):
        return event.kind, str(event.pid)
    if event.kind in ("hung_task", "lockup"):
        return event.kind, event.fields.get("process", "").split(":")[0]
    return event.rule, event.device, event.fields.get("server", "")


def _worse(event: KernelEvent, than: KernelEvent) -> bool:
    return _ORDER.index(event.severity) < _ORDER.index(than.severity)


def _comes_with(event: KernelEvent, cause: _Cause) -> bool:
    """The Xid names the one before it, or comes with it by the tables."""
    first = cause.event
    if event.kind != "xid" or first.kind != "xid" or not _same_device(event.device, first.device):
        return False
    if event.fields.get("follows") == str(first.code):
        return True
    return str(first.code) in event.fields.get("after", "").split() and not _worse(event, first)


def _same_device(one: str, other: str) -> bool:
    """A line that names no device is about the one just named; partitions are their disk, which is its controller."""
    return not one or not other or one.startswith(other) or other.startswith(one)


def finding_of(event: KernelEvent, at: float, source: str = "kernel") -> Finding:
    """The finding of one event by itself. Only a fatal one or an error, and no mere consequence, ends a diagnosis."""
    is_gpu = event.kind in ("xid", "fallen_off_bus", "gpu_driver") and event.device.count(":") == 2
    more = {"device": event.device, "action": event.action, "kind": event.kind}
    fields = {**event.fields, **{name: value for name, value in more.items() if value}}
    fields.pop("after", None)
    sure = event.severity in ("fatal", "error") and not event.consequence
    confidence = event.confidence if sure else min(event.confidence, 0.4)
    if event.rule == "segfault":  # by its name it may be anybody's program
        confidence = min(confidence, 0.45)
    failure_class = FailureClass(event.failure_class)
    if event.kind == "hung_task" and "filesystem" in event.fields:
        failure_class = FailureClass.STORAGE_ERROR  # the kernel is well: it waits for an answer
    return Finding(
        rule=event.rule,
        failure_class=failure_class,
        confidence=confidence,
        scope=event.scope,
        severity="fatal" if sure and event.severity == "fatal" else "error" if sure else "warning",
        evidence=Evidence(text=event.text, source=source, at=at),
        gpu=event.device if is_gpu else "",
        gpu_uuid=event.gpu_uuid,
        fields=fields,
        at=at,
        outlook=event.outlook if sure or event.outlook in ("slows", "repair") else "",
    )


def as_cause(finding: Finding) -> Finding | None:
    """A consequence as a cause, where it says what came first and nothing else tells of that; else None."""
    names_another = finding.rule == "xid_43" or (finding.rule.startswith("xid_") and "follows" in finding.fields)
    if not names_another or finding.failure_class is FailureClass.WORKER_CRASH:
        return None
    return msgspec.structs.replace(finding, severity="error", confidence=0.45)


_OURS: Final = ("python", "pt_", "torch", "train", "ray", "cuda-", "nccl")
"""How the processes of a training job begin their names."""


def is_of_training(process: str) -> bool:
    """Whether a process of this name may be one of a training job."""
    return process.lower().startswith(_OURS)


def is_elsewhere(event: KernelEvent) -> bool:
    """A crash that, by the name of its process, is clearly not one of a training job."""
    if event.kind != "segfault" or event.rule == "segfault_library":
        return False
    name = event.fields.get("process", "")
    return bool(name) and not is_of_training(name)
