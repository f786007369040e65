"""Checks of a node's health: what is checked (`Check`), one look at it (`Reading`), what holds (`Standing`).

A probe judges one look at a time; `settle` turns looks into a standing that neither flaps nor forgets. A result that
could not be had is `unknown`, one that makes no sense here is `not_applicable`: neither is ever unhealthy.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from diagnosis.signals import Evidence, Finding, Frozen
from diagnosis.taxonomy import FailureClass

Status = Literal["healthy", "unhealthy", "unknown", "not_applicable"]
Level = Literal["warning", "critical"]
When = Literal["continuous", "periodic", "preflight"]
Scope = Literal["rank", "gpu", "node", "fabric", "storage", "job"]

OK, WARNING, CRITICAL, UNKNOWN = 0, 1, 2, 3
"""Exit codes of a health check as Nagios and its heirs read them."""


class Check(Frozen, frozen=True, kw_only=True):
    """One row of the table of checks."""

    id: str
    """For example `gpu_ecc_uncorrected`; unique."""
    what: str
    """What is wrong when it is unhealthy, as a phrase: `uncorrected memory errors since the driver was loaded`."""
    source: str
    """What is read: `nvmlDeviceGetTotalEccErrors`, `/sys/class/infiniband/*/ports/*/state`."""
    threshold: str
    """When it is unhealthy, in words; `{name}` stands for a number of `limits`."""
    failure_class: FailureClass
    scope: Scope
    limits: dict[str, float] = {}
    """The numbers of the threshold; a site may set others."""
    when: When = "continuous"
    """`continuous`: seconds. `periodic`: minutes. `preflight`: only before a job, or when it is asked for."""
    looks: int = 1
    """So many looks in a row must be unhealthy before it stands."""
    calm_looks: int = 2
    """So many looks in a row must be healthy before it is healthy again."""
    clears: bool = True
    """False: once unhealthy it stays so until the node is booted anew (counters that are read only as changes)."""

    def threshold_text(self, limits: dict[str, float] | None = None) -> str:
        return self.threshold.format(**{name: f"{value:g}" for name, value in (limits or self.limits).items()})


class Reading(Frozen, frozen=True, kw_only=True):
    """One look at one thing. Probes return these; `node`, times and ranks are added by who collects them."""

    check: str
    status: Status
    level: Level = "critical"
    """How bad it is when unhealthy."""
    device: str = ""
    """Which one, where a node has several: PCI address `dddd:bb:dd`, `mlx5_0/1`, `eth0`, a mount point, a pid."""
    gpu: str = ""
    """PCI address of the GPU it concerns, `dddd:bb:dd`."""
    gpu_uuid: str = ""
    text: str = ""
    """What was seen, with numbers; cleaned."""
    values: dict[str, float] = {}
    """Numbers behind it (units in the names), at most 40: for metrics and for people."""
    pids: tuple[int, ...] = ()
    """Processes it concerns: they lead to ranks."""


# The first conversion to a type may crash when two threads make it at once (msgspec), and probes have a thread each.
msgspec.convert({"check": "", "status": "unknown"}, Reading)


def healthy(check: str, device: str = "", text: str = "", **more: object) -> Reading:
    return msgspec.convert({"check": check, "status": "healthy", "device": device, "text": text, **more}, Reading)


def unhealthy(check: str, text: str, device: str = "", level: Level = "critical", **more: object) -> Reading:
    return msgspec.convert(
        {"check": check, "status": "unhealthy", "text": text, "device": device, "level": level, **more}, Reading
    )


def judged(check: str, level: Level | None, text: str = "", device: str = "", **more: object) -> Reading:
    """Unhealthy at this level, or healthy where there is none."""
    return unhealthy(check, text, device, level, **more) if level else healthy(check, device, text, **more)


def unknown(check: str, why: str, device: str = "", **more: object) -> Reading:
    return msgspec.convert({"check": check, "status": "unknown", "text": why, "device": device, **more}, Reading)


def not_applicable(check: str, why: str, device: str = "") -> Reading:
    return Reading(check=check, status="not_applicable", text=why, device=device)


class Standing(Frozen, frozen=True, kw_only=True):
    """What holds of one check and device after hysteresis."""

    reading: Reading
    """The newest look that agrees with `status`; for an unhealthy standing, the one to show."""
    status: Status
    level: Level = "critical"
    since: float = 0.0
    """Unix time at which `status` came to hold."""
    looked_at: float = 0.0
    """Unix time of the newest look, whatever it said."""
    against: int = 0
    """Looks in a row that said something else."""
    rank: int | None = None


def settle(check: Check, before: Standing | None, reading: Reading, at: float) -> Standing:
    """The standing after one more look.

    A look that learned nothing never clears an unhealthy standing: that a probe is silent is a matter of its own.
    """
    if before is None:
        before = Standing(reading=unknown(check.id, "not looked at yet", reading.device), status="unknown", since=at)
    same = reading.status == before.status and (reading.status != "unhealthy" or reading.level == before.level)
    if same:
        return msgspec.structs.replace(before, reading=reading, looked_at=at, against=0)
    if before.status == "unhealthy" and reading.status == "unknown":
        return msgspec.structs.replace(before, looked_at=at, against=0)  # looks in a row are looks that saw something
    against = before.against + 1
    if against < _looks_needed(check, before, reading):
        return msgspec.structs.replace(before, looked_at=at, against=against)
    return Standing(
        reading=reading, status=reading.status, level=reading.level, since=at, looked_at=at, rank=before.rank
    )


_NEVER: Final = float("inf")


def _looks_needed(check: Check, before: Standing, reading: Reading) -> float:
    if before.status == "unhealthy" and not check.clears and reading.status != "unhealthy":
        return _NEVER
    if reading.status == "not_applicable":
        return 1
    if before.status != "unhealthy":
        return check.looks if reading.status == "unhealthy" else 1
    if reading.status == "unhealthy":
        return check.looks if reading.level == "critical" else check.calm_looks
    return check.calm_looks if reading.status == "healthy" else _NEVER


_CONFIDENCE: Final = {"critical": 0.85, "warning": 0.4}


def to_finding(check: Check, standing: Standing, node: str, at: float) -> Finding:
    """What an unhealthy standing says to a diagnosis. A warning never ends one by itself."""
    reading = standing.reading
    where = f" ({reading.device})" if reading.device and reading.device not in reading.text else ""
    return Finding(
        rule=check.id,
        failure_class=check.failure_class,
        confidence=_CONFIDENCE[standing.level],
        scope=check.scope,
        severity="error" if standing.level == "critical" else "warning",
        evidence=Evidence(text=f"{reading.text}{where}", source=check.source, node=node, rank=standing.rank, at=at),
        node=node,
        rank=standing.rank,
        gpu=reading.gpu,
        fields={"device": reading.device} if reading.device else {},
        gpu_uuid=reading.gpu_uuid,
        at=at,
    )


def exit_code(standings: list[tuple[Status, Level]]) -> int:
    """OK, WARNING, CRITICAL or UNKNOWN over all: the worst that is known; UNKNOWN only when nothing at all is known."""
    bad = {level for status, level in standings if status == "unhealthy"}
    if bad:
        return CRITICAL if "critical" in bad else WARNING
    known = any(status == "healthy" for status, _ in standings)
    return OK if known or not any(status == "unknown" for status, _ in standings) else UNKNOWN
