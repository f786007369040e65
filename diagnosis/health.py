"""Checks of a node's health: what is checked (`Check`), one look at it (`CheckResult`), what holds (`CheckState`).

A probe judges one look at a time; `settle` turns looks into a check state that neither flaps nor forgets. A result that
could not be had is `unknown`, one that makes no sense here is `not_applicable`: neither is ever unhealthy.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from diagnosis.signals import Evidence, Finding, Frozen, Outlook, Scope
from diagnosis.taxonomy import FailureClass

Status = Literal["healthy", "unhealthy", "unknown", "not_applicable"]
Level = Literal["warning", "critical"]
When = Literal["continuous", "periodic", "preflight"]

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

    outlook: Outlook = ""
    """Of its device when it is critical; `slows` and `repair` when it is a warning, too."""

    def threshold_text(self, limits: dict[str, float] | None = None) -> str:
        return self.threshold.format(**{name: f"{value:g}" for name, value in (limits or self.limits).items()})


class CheckResult(Frozen, frozen=True, kw_only=True):
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
msgspec.convert({"check": "", "status": "unknown"}, CheckResult)


def healthy(check: str, device: str = "", text: str = "", **more: object) -> CheckResult:
    return msgspec.convert({"check": check, "status": "healthy", "device": device, "text": text, **more}, CheckResult)


def unhealthy(check: str, text: str, device: str = "", level: Level = "critical", **more: object) -> CheckResult:
    return msgspec.convert(
        {"check": check, "status": "unhealthy", "text": text, "device": device, "level": level, **more}, CheckResult
    )


def judged(check: str, level: Level | None, text: str = "", device: str = "", **more: object) -> CheckResult:
    """Unhealthy at this level, or healthy where there is none."""
    return unhealthy(check, text, device, level, **more) if level else healthy(check, device, text, **more)


def unknown(check: str, why: str, device: str = "", **more: object) -> CheckResult:
    return msgspec.convert({"check": check, "status": "unknown", "text": why, "device": device, **more}, CheckResult)


def not_applicable(check: str, why: str, device: str = "") -> CheckResult:
    return CheckResult(check=check, status="not_applicable", text=why, device=device)


class CheckState(Frozen, frozen=True, kw_only=True):
    """What holds of one check and device after hysteresis."""

    result: CheckResult = msgspec.field(name="reading")
    """The newest look that agrees with `status`; for an unhealthy check state, the one to show."""
    status: Status
    level: Level = "critical"
    since: float = 0.0
    """Unix time at which `status` came to hold."""
    looked_at: float = 0.0
    """Unix time of the newest look, whatever it said."""
    against: int = 0
    """Looks in a row that said something else."""
    rank: int | None = None


def settle(check: Check, before: CheckState | None, result: CheckResult, at: float) -> CheckState:
    """The check state after one more look.

    A look that learned nothing never clears an unhealthy check state: that a probe is silent is a matter of its own.
    """
    if before is None:
        before = CheckState(result=unknown(check.id, "not looked at yet", result.device), status="unknown", since=at)
    same = result.status == before.status and (result.status != "unhealthy" or result.level == before.level)
    if same:
        return msgspec.structs.replace(before, result=result, looked_at=at, against=0)
    if before.status == "unhealthy" and result.status == "unknown":
        return msgspec.structs.replace(before, looked_at=at, against=0)  # looks in a row are looks that saw something
    against = before.against + 1
    if against < _looks_needed(check, before, result):
        return msgspec.structs.replace(before, looked_at=at, against=against)
    return CheckState(result=result, status=result.status, level=result.level, since=at, looked_at=at, rank=before.rank)


_NEVER: Final = float("inf")


def _looks_needed(check: Check, before: CheckState, result: CheckResult) -> float:
    if before.status == "unhealthy" and not check.clears and result.status != "unhealthy":
        return _NEVER
    if result.status == "not_applicable":
        return 1
    if before.status != "unhealthy":
        return check.looks if result.status == "unhealthy" else 1
    if result.status == "unhealthy":
        return check.looks if result.level == "critical" else check.calm_looks
    return check.calm_looks if result.status == "healthy" else _NEVER


_CONFIDENCE: Final = {"critical": 0.85, "warning": 0.4}


def to_finding(check: Check, check_state: CheckState, node: str, at: float) -> Finding:
    """What an unhealthy check state says to a diagnosis. A warning never ends one by itself."""
    result = check_state.result
    where = f" ({result.device})" if result.device and result.device not in result.text else ""
    return Finding(
        rule=check.id,
        failure_class=check.failure_class,
        confidence=_CONFIDENCE[check_state.level],
        scope=check.scope,
        severity="error" if check_state.level == "critical" else "warning",
        evidence=Evidence(text=f"{result.text}{where}", source=check.source, node=node, rank=check_state.rank, at=at),
        node=node,
        rank=check_state.rank,
        gpu=result.gpu,
        fields={"device": result.device} if result.device else {},
        gpu_uuid=result.gpu_uuid,
        at=at,
        outlook=check.outlook if check_state.level == "critical" or check.outlook in ("slows", "repair") else "",
    )


def exit_code(check_states: list[tuple[Status, Level]]) -> int:
    """OK, WARNING, CRITICAL or UNKNOWN over all: the worst that is known; UNKNOWN only when nothing at all is known."""
    bad = {level for status, level in check_states if status == "unhealthy"}
    if bad:
        return CRITICAL if "critical" in bad else WARNING
    known = any(status == "healthy" for status, _ in check_states)
    return OK if known or not any(status == "unknown" for status, _ in check_states) else UNKNOWN
