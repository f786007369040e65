"""Reads the error lines of NVIDIA's drivers: Xid (a GPU) and SXid (an NVSwitch).

One line in, one frozen `DriverError` out, whatever the driver's version, the log's prefix or the text.
Nothing here remembers: the caller sees what repeats and what follows what, from `follows`, `after` and `consequence`.
What the codes mean is data: `xid.toml` (NVIDIA's catalogue, generated), `xid_overrides.toml` (what a code means to a
training job), `sxid.toml`, `nvlink.toml`, and a site's own rows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

import msgspec

from diagnosis.signals import Frozen, clean_text
from diagnosis.tables import load
from diagnosis.taxonomy import FailureClass, RemedyAction

MAX_LINE: Final = 2048
"""Characters of a line that are looked at."""

Severity = Literal["fatal", "error", "warning", "info"]
"""`fatal`: ends the process or takes the GPU away. `error`: may have. `warning`: worth telling, no cause by itself.
`info`: nobody's fault."""


class XidRow(
    Frozen, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"mnemonic": "name", "failure_class": "class"}
):
    """What one code means."""

    mnemonic: str = ""
    failure_class: FailureClass = FailureClass.GPU_DRIVER
    action: RemedyAction = "restart"
    severity: Severity = "warning"
    consequence: bool = False
    """Written when something else has gone wrong: never the first cause."""
    after: tuple[int, ...] = ()
    """Codes that it comes with and tells less than."""
    fabric: bool = False
    """SXid: the whole switch is gone, not one port."""
    site: frozenset[str] = frozenset()
    """Fields that the site has set: what a line's details say does not change them."""


class LinkFault(Frozen, frozen=True, kw_only=True):
    """One fault of an NVLink 5 unit."""

    action: RemedyAction
    sub: int = 0
    status: int | None = None
    fatal: bool = False
    high_bit: bool = False
    look: str = ""


class LinkUnit(Frozen, frozen=True, kw_only=True):
    """One unit of NVLink 5 and its faults."""

    xid: int
    names: tuple[str, ...]
    v1: int
    v2: int
    faults: tuple[LinkFault, ...]
    bits: bool = False

    def __post_init__(self) -> None:
        if any(fault.status is None for fault in self.faults) and self.bits:
            raise ValueError(f"{self.names[0]}: a set of bits needs a status")


class NVLink(Frozen, frozen=True, kw_only=True):
    """`nvlink.toml`."""

    unit: tuple[LinkUnit, ...]
    registers: dict[str, tuple[tuple[int, ...], ...]]


UNKNOWN_XID: Final = XidRow()
"""A code that no table knows: worth telling, and no more."""
UNKNOWN_RECOVERY: Final = XidRow(action="cordon_node_and_restart", severity="error")
"""Newer values asked for more than older ones so far."""
UNKNOWN_SXID: Final = XidRow(failure_class=FailureClass.NVLINK_ERROR, action="none")


class DetailPatterns(Frozen, frozen=True, kw_only=True):
    """What the message of some Xids tells beyond the number."""

    codes: frozenset[int]
    patterns: tuple[str, ...]
    """Their named groups become details."""


class Tables(Frozen, frozen=True, kw_only=True):
    """All tables together."""

    xid: dict[int, XidRow]
    sxid: dict[int, XidRow]
    recovery: dict[int, XidRow]
    """Values of Xid 154."""
    nvlink: NVLink
    detail: tuple[DetailPatterns, ...]

    def with_site(self, site: Mapping[str, object]) -> Tables:
        """These tables with a site's rows over them, as TOML has them: `[xid.79] severity = "warning"`.

        A row names what it changes (`class`, `action`, `severity`, `consequence`, `after`, `name`) and keeps the rest;
        a code that is not known yet is added. Other sections are left alone. Raises `ValueError` naming the key.
        """
        return msgspec.structs.replace(
            self,
            xid=_over("xid", self.xid, site.get("xid", {}), UNKNOWN_XID),
            sxid=_over("sxid", self.sxid, site.get("sxid", {}), UNKNOWN_SXID),
        )


def _over(section: str, rows: dict[int, XidRow], site: object, unknown: XidRow) -> dict[int, XidRow]:
    if not isinstance(site, Mapping):
        raise ValueError(f"{section}: expected a table of codes")
    merged = dict(rows)
    for code, change in site.items():
        key = f"{section}.{code}"
        if not isinstance(change, Mapping):
            raise ValueError(f"{key}: expected a table")
        try:
            number = int(str(code))
        except ValueError:
            raise ValueError(f"{key}: not the number of a code") from None
        before = msgspec.to_builtins(merged.get(number, unknown))
        try:
            row = msgspec.convert({**before, **change, "site": [*before.get("site", ()), *change]}, XidRow)
        except msgspec.ValidationError as error:
            raise ValueError(f"{key}: {error}") from None
        merged[number] = row
    return merged


@functools.cache
def default_tables() -> Tables:
    """The tables that come with the package."""
    overrides = _load("xid_overrides.toml")
    xid = {
        code: {"name": facts["name"], **overrides["advice"].get(facts["nvidia"], {})}
        for code, facts in _load("xid.toml")["xid"].items()
    }
    for override in overrides["override"]:
        changes = {name: value for name, value in override.items() if name not in ("codes", "why")}
        for code in override["codes"]:
            xid[str(code)] |= changes
    rows = {"xid": xid, **_load("sxid.toml"), "nvlink": _load("nvlink.toml")}
    return msgspec.convert({**rows, **{name: overrides[name] for name in ("recovery", "detail")}}, Tables, strict=False)


_load: Final = functools.partial(load, "diagnosis.kernel")


_CONFIDENCE: Final[dict[Severity, float]] = {"fatal": 0.92, "error": 0.7, "warning": 0.4, "info": 0.2}


class DriverError(Frozen, frozen=True, kw_only=True):
    """One Xid or SXid line."""

    kind: Literal["xid", "sxid"]
    code: int
    known: bool = True
    """False: no table has the code."""
    mnemonic: str = ""
    failure_class: FailureClass
    action: RemedyAction
    severity: Severity
    consequence: bool = False
    """Follows from something else: never the first cause."""
    after: tuple[int, ...] = ()
    """Codes of the same kind that it comes with and tells less than."""
    device: str = ""
    """PCI address `dddd:bb:dd`; empty when the line does not tell."""
    link: int | None = None
    detail: dict[str, str] = {}
    """What else the line says, decoded."""
    message: str = ""
    """What the driver says after the code (and the process)."""
    gpu_uuid: str = ""
    mig: str = ""
    """GPU instance of MIG, or `instance/compute instance`."""
    pid: int | None = None
    process: str = ""
    follows: int | None = None
    """The Xid that the driver itself says was before."""
    switch: int | None = None
    """The N of `nvidia-nvswitchN`."""

    @property
    def confidence(self) -> float:
        """How sure it is that this is the cause of what happened at the time."""
        return min(_CONFIDENCE[self.severity], 0.4) if self.consequence else _CONFIDENCE[self.severity]


_FLAGS: Final = re.IGNORECASE | re.ASCII
_XID: Final = re.compile(
    r"NVRM:\s{0,9}(?:GPU\d{1,3}:?\s)?Xid\s?\((?P<where>[^()\n]{1,120})\)(?P<mig>(?:\s?GPU-C?I:\s?\w{1,8}){0,2})\s?:?\s{0,9}"
    r"(?P<code>\d{1,5})(?!\w|\.\d)[\s,:]*(?P<rest>[^\n]*)",
    _FLAGS,
)
_SXID: Final = re.compile(
    r"(?:nvswitch(?P<switch>\d{1,3})\s?:?\s)?\bSXid\s?\((?P<where>[^()\n]{1,120})\)\s?:?\s{0,9}"
    r"(?P<code>\d{3,6})(?!\w|\.\d)[\s,:]*(?P<rest>[^\n]*)",
    _FLAGS,
)
_FABRIC_MANAGER: Final = re.compile(
    r"detected NVSwitch (?P<word>fatal|non-fatal) error (?P<code>\d{3,6})\b(?P<rest>[^\n]*)", _FLAGS
)
_PCI: Final = re.compile(
    r"(?:(?<=PCI:)|(?<![\w:]))(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,4}):([0-9a-f]{1,2})(?:\.[0-7])?(?![0-9a-f:])", _FLAGS
)
_UUID: Final = re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4,12}){0,4}\b", _FLAGS)
_MIG: Final = re.compile(r"\bGPU-(C?)I:\s*0*(\w{1,8})", _FLAGS)
_PID: Final = re.compile(r"\s*pid\s*=\s*(?:'?(\d{1,10})'?|'?<[^<>]{0,20}>'?|'[^']{0,20}')\s*(?:,\s*|$)", _FLAGS)
_NAME: Final = re.compile(r"\s*name\s*=\s*", _FLAGS)
_MESSAGE_BEGINS: Final = re.compile(
    r",\s+(?=(?:Ch |[Cc]hannel |Graphics |GPU |GPC |Timeout|NVLink|MMU |Contained|Uncontained|Row |Page |Dynamic |DBE"
    r"|Double|An? |intr |errorString|Engine|Reset|SM |Shader|Class|[A-Z][A-Z0-9_]{2,23}\s+(?:Nonf|Non-f|F)atal\b|0x"
    r"|[0-9a-f]{8}\b))",
    re.ASCII,
)
_WRITTEN_ESCAPE: Final = re.compile(r"(?:#033|\\x1b|\\033|\^\[)\[[0-9;]{0,12}[A-Za-z]")
_FOLLOWS: Final = re.compile(r"caused by (?:a )?previous Xid\s+(\d{1,5})", _FLAGS)
_LINK: Final = re.compile(r"\blink\s+(\d{1,3})\b", _FLAGS)


def read_xid(line: str, tables: Tables | None = None, r575: bool | None = None) -> DriverError | None:
    """The Xid that a line of the kernel log tells, or None. Never raises.

    `r575`: whether the driver is R575 or newer (NVLink 5 words changed then); None: not known.
    """
    at = _find(line, "Xid", "xid", "XID")
    match = _XID.search(_clean(line, at)) if at >= 0 else None
    if match is None:
        return None
    tables = tables or default_tables()
    code = int(match["code"])
    row = tables.xid.get(code, UNKNOWN_XID)
    where = match["where"]
    pid, process, message = _process(match["rest"])
    uuid = _UUID.search(where)
    follows = _FOLLOWS.search(message)
    link = _LINK.search(message)
    reading = DriverError(
        kind="xid",
        code=code,
        known=code in tables.xid,
        mnemonic=row.mnemonic,
        failure_class=row.failure_class,
        action=row.action,
        severity=row.severity,
        consequence=row.consequence,
        after=row.after,
        device=pci_address(where),
        gpu_uuid=f"{uuid[0][:3].upper()}{uuid[0][3:].lower()}" if uuid else "",
        mig="/".join(number for _, number in sorted(_MIG.findall(where + match["mig"]))),
        pid=pid,
        process=process,
        follows=int(follows[1]) if follows else None,
        message=clean_text(message, 300),
        link=int(link[1]) if link else None,
    )
    changes = _details(code, message, tables, r575)
    if follows is not None:
        changes |= _following(row, tables.xid.get(int(follows[1])))
    return _changed(reading, row, changes)


def _following(row: XidRow, first: XidRow | None) -> Changes:
    """What a line changes that names the Xid before it: a mere consequence is of that one's class."""
    changes: Changes = {"consequence": True}
    if first is not None and row.consequence:
        changes["failure_class"] = first.failure_class
    return changes


def _changed(reading: DriverError, row: XidRow, changes: Changes) -> DriverError:
    """The reading with what its line tells; what the site has set stays."""
    names = {"failure_class": "class", "mnemonic": "name"}
    kept = {field: value for field, value in changes.items() if names.get(field, field) not in row.site}
    return msgspec.structs.replace(reading, **kept) if kept else reading


def pci_address(text: str) -> str:
    """The first PCI address in a text as `dddd:bb:dd`; empty without one. The domain may be absent or have 8 digits."""
    match = _PCI.search(text)
    if match is None:
        return ""
    domain, bus, device = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def _process(rest: str) -> tuple[int | None, str, str]:
    """Process id, process name and message of what stands after the code. A name may have commas and spaces in it."""
    pid = None
    match = _PID.match(rest)
    if match is not None:
        pid = int(match[1]) if match[1] else None
        rest = rest[match.end() :]
    match = _NAME.match(rest)
    if match is None:
        return pid, "", rest.strip()
    rest = rest[match.end() :]
    begins = _MESSAGE_BEGINS.search(rest)
    name, _, message = rest.partition(",") if begins is None else (rest[: begins.start()], "", rest[begins.end() :])
    name = name.strip().strip("'")
    return pid, "" if name.startswith("<") else clean_text(name, 100), message.strip()


def read_sxid(line: str, tables: Tables | None = None) -> DriverError | None:
    """The SXid that a line of the kernel log or of the fabric manager's log tells, or None. Never raises.

    The lines that continue one (`Severity ...`, `Data {...}`) are None.
    """
    at = _find(line, "SXid", "sxid", "SXID", "detected NVSwitch")
    if at < 0:
        return None
    text = _clean(line, at)
    match = _SXID.search(text)
    if match is not None:
        return _sxid(match, match["where"], match["switch"], tables or default_tables())
    match = _FABRIC_MANAGER.search(text)
    return _sxid(match, match["rest"], None, tables or default_tables()) if match is not None else None


def _find(line: str, *words: str) -> int:
    """Where the first of these words that is in the line stands, or -1: a handful of searches in C for each line."""
    for word in words:
        at = line.find(word)
        if at >= 0:
            return at
    return -1


def _clean(line: str, at: int) -> str:
    """The neighbourhood of `at`, without colours, those that syslog daemons wrote out (`#033[0m`) too."""
    text = line[max(0, at - 300) : at + MAX_LINE]
    return clean_text(_WRITTEN_ESCAPE.sub("", text) if "[" in text else text, MAX_LINE + 300)


def _sxid(match: re.Match[str], where: str, switch: str | None, tables: Tables) -> DriverError | None:
    rest = match["rest"]
    if re.match(r"(?:Severity\b|Data\b|\{)", rest, _FLAGS):
        return None
    code = int(match["code"])
    row = tables.sxid.get(code, UNKNOWN_SXID)
    word = match.groupdict().get("word") or rest
    said = re.match(r"(non-?)?fatal\b", word, _FLAGS)
    fatal = not said[1] if said else row.severity == "fatal"
    severity, action = row.severity, row.action
    if "severity" not in row.site and fatal != (severity == "fatal"):
        severity = "fatal" if fatal else "warning"
        if "action" not in row.site:
            action = "cordon_node_and_restart" if fatal else "none"
    link = re.search(r"\b(?:link|port)\s+(\d{1,3})\b", rest, _FLAGS)
    return DriverError(
        kind="sxid",
        code=code,
        known=code in tables.sxid,
        mnemonic=row.mnemonic,
        failure_class=row.failure_class,
        action=action,
        severity=severity,
        consequence=row.consequence,
        after=row.after,
        device=pci_address(where),
        switch=int(switch) if switch else None,
        link=int(link[1]) if link else None,
        message=clean_text(rest, 300),
        detail={"scope": "fabric"} if row.fabric else {},
    )


Changes = dict[str, object]


def _details(code: int, message: str, tables: Tables, r575: bool | None) -> Changes:
    """What the message of Xid `code` changes in its reading: `detail` and, where the message knows better than the
    table, `severity`, `action`, `failure_class`, `consequence`; nothing for a message that it cannot read."""
    if code == 74:
        return _registers(message, tables)
    if code == 154:
        return _recovery(message, tables)
    if 144 <= code <= 150:
        return _nvlink5(code, message, tables, r575)
    found: dict[str, str] = {}
    for row in tables.detail:
        for pattern in row.patterns if code in row.codes else ():
            match = re.search(pattern, message, _FLAGS)
            if match is not None:
                found |= {name: clean_text(value, 80) for name, value in match.groupdict().items() if value is not None}
    changes: Changes = {"detail": found} if found else {}
    if code == 94 and found.get("reset", "").lower() == "yes":
        changes["action"] = "cordon_gpu_and_restart"
    return changes


_RECOVERY: Final = re.compile(
    r"(?:\bfrom (?P<before>0x[0-9a-f]{1,8}|\d{1,9})\b.{0,60}?)?\bto (?P<now>0x[0-9a-f]{1,8}|\d{1,9})\b", _FLAGS
)


def _recovery(message: str, tables: Tables) -> Changes:
    """Xid 154: by the number, since drivers name the same number differently (0x2: Node Reboot Required, OS Reboot)."""
    match = _RECOVERY.search(message)
    if match is None:
        return {}
    value = int(match["now"], 0) if match["now"].lower().startswith("0x") else int(match["now"])
    row = tables.recovery.get(value, UNKNOWN_RECOVERY)
    return {
        "detail": {"recovery": row.mnemonic or f"unknown recovery action {value}", "value": str(value)},
        "failure_class": row.failure_class,
        "action": row.action,
        "severity": row.severity,
    }


_REGISTERS: Final = re.compile(
    r"\blink\s+\d{1,3}\s*\(\s*(?P<words>0x[0-9a-f]{1,8}(?:\s*,\s*0x[0-9a-f]{1,8}){0,6})", _FLAGS
)
_HARMLESS: Final = {"ignorable", "ecc_threshold"}


def _registers(message: str, tables: Tables) -> Changes:
    """Xid 74: the classes of error in `error`. Bits that mean nothing bad make it a warning."""
    match = _REGISTERS.search(message)
    if match is None:
        return {}
    words = [int(word, 16) for word in match["words"].replace(" ", "").split(",")]
    kinds = [
        kind
        for kind, registers in tables.nvlink.registers.items()
        if any(word >> bit & 1 for word, bits in zip(words, registers, strict=False) for bit in bits)
    ]
    detail = {"registers": " ".join(f"0x{word:x}" for word in words)}
    if not kinds:
        return {"detail": detail}
    changes: Changes = {"detail": detail | {"error": ", ".join(kinds)}}
    if _HARMLESS.issuperset(kinds):
        changes |= {"severity": "warning", "action": "none"}
    elif {"secondary", *_HARMLESS}.issuperset(kinds):
        changes["consequence"] = True
    return changes


class _Fault(NamedTuple):
    fatal: bool
    action: RemedyAction
    look: str


_WORDS: Final = re.compile(r"(?P<unit>[A-Z][A-Z0-9_]{1,31}(?: Degraded)?)\s+(?P<word>Non-?fatal|Fatal)\b", _FLAGS)
_XC: Final = re.compile(r"\bXC\s*(?P<xc>\d{1,2})\s+i\s*(?P<injected>\d{1,2})\b", _FLAGS)
_NUMBERS: Final = re.compile(r"[(\[]\s*(?P<intrinfo>0x[0-9a-f]{1,8})(?:[\s,]+(?P<status>0x[0-9a-f]{1,8}))?", _FLAGS)


def _nvlink5(code: int, message: str, tables: Tables, r575: bool | None) -> Changes:
    """Xid 144 to 150. `detail`: unit, xc, injected (1: a test put it there), intrinfo, status, format, look."""
    words = _WORDS.search(message)
    if words is None:
        return {}
    said_fatal = words["word"].lower() == "fatal"
    unit = words["unit"].upper().replace(" ", "_")
    fault, detail = None, {"unit": unit}
    for pattern in (_XC, _NUMBERS):
        match = pattern.search(message, words.end())
        if match is not None:
            detail |= {name: value for name, value in match.groupdict().items() if value is not None}
    if "intrinfo" in detail:
        status = int(detail["status"], 16) if "status" in detail else None
        fault, version = _decode(code, unit, int(detail["intrinfo"], 16), status, tables, r575)
        detail |= {"format": version} if version else {}
    if fault is None:
        changes: Changes = {"severity": "fatal"} if said_fatal else {"severity": "warning", "action": "none"}
        return changes | {"detail": detail}
    detail |= {"look": fault.look} if fault.look else {}
    severity: Severity = "fatal"
    if (
        not said_fatal
    ):  # the driver's word against the table's: worth more than a warning, not enough to end a diagnosis
        severity = "warning" if not fault.fatal and fault.action == "none" else "error"
    action = "restart" if said_fatal and fault.action == "none" else fault.action
    return {"detail": detail, "severity": severity, "action": action}


def _decode(
    code: int, name: str, intrinfo: int, status: int | None, tables: Tables, r575: bool | None
) -> tuple[_Fault | None, str]:
    """The worst fault that the words tell, and the format (`v1`, `v2`) in which they make sense; None, "": in none."""
    units = [unit for unit in tables.nvlink.unit if unit.xid == code]
    fits = {
        version: [unit for unit in units if (unit.v2 if version == "v2" else unit.v1) == intrinfo & mask]
        for version, mask in (("v2", 0x7F), ("v1", 0x3FF))
        if r575 is None or r575 == (version == "v2")
    }
    for version, fitting in fits.items():
        fitting = [unit for unit in fitting if name in unit.names] or (fitting if r575 is not None else [])
        if fitting:
            return _worst(fitting[0], intrinfo, status, version), version
    one = [version for version, fitting in fits.items() if fitting]
    if len(one) == 1 and not any(name in unit.names for unit in units):
        return _worst(fits[one[0]][0], intrinfo, status, one[0]), one[0]
    return None, ""


def _worst(unit: LinkUnit, intrinfo: int, status: int | None, version: str) -> _Fault | None:
    high_bit = bool(intrinfo >> (7 if version == "v2" else 10) & 1)
    found = []
    for fault in unit.faults:
        if fault.sub != intrinfo >> 20 & 0x3F or not _has(unit, fault, status):
            continue
        promoted = fault.high_bit and high_bit
        action: RemedyAction = "cordon_gpu_and_restart" if promoted else fault.action
        found.append(_Fault(fault.fatal or promoted, action, fault.look))
    return max(found, key=lambda one: (one.fatal, one.action != "none"), default=None)


def _has(unit: LinkUnit, fault: LinkFault, status: int | None) -> bool:
    if fault.status is None:
        return True
    if status is None:
        return False
    return bool(status & fault.status) if unit.bits else status == fault.status
