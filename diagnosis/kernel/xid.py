"""Reads the error lines of NVIDIA's drivers: Xid (a GPU) and SXid (an NVSwitch).

One line in, one `KernelEvent` out, whatever the driver's version, the log's prefix or the text.
Nothing here remembers: the caller sees what repeats and what follows what, from `follows`, `after` and `consequence`.
What the codes mean is data: `xid.toml` (NVIDIA's catalogue, generated), `xid_overrides.toml` (what a code means to a
training job), `sxid.toml`, `nvlink.toml`, and a site's own rows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from diagnosis.signals import Frozen, KernelEvent, KernelSeverity, Outlook, clean_text
from diagnosis.tables import load
from diagnosis.taxonomy import FailureClass, RemedyAction

MAX_LINE: Final = 2048
"""Characters of a line that are looked at."""


class XidRow(
    Frozen, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"mnemonic": "name", "failure_class": "class"}
):
    """What one code means."""

    mnemonic: str = ""
    failure_class: FailureClass = FailureClass.GPU_DRIVER
    action: RemedyAction = "restart"
    severity: KernelSeverity = "warning"
    consequence: bool = False
    """Written when something else has gone wrong: never the first cause."""
    after: tuple[int, ...] = ()
    """Codes that it comes with and tells less than."""
    outlook: Outlook = ""
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


_CONFIDENCE: Final[dict[KernelSeverity, float]] = {"fatal": 0.92, "error": 0.7, "warning": 0.4, "info": 0.2}


_OF_EVERY_LINE: Final = frozenset({"code", "follows", "process", "mig", "link", "after", "mnemonic", "pid"})


def details(event: KernelEvent) -> dict[str, str]:
    """The fields that only this Xid's own message has."""
    return {name: value for name, value in event.fields.items() if name not in _OF_EVERY_LINE}


def _event(
    kind: Literal["xid", "sxid"],
    code: int,
    row: XidRow,
    where: str,
    line: str,
    said: Mapping[str, object],
    pid: int | None = None,
) -> KernelEvent:
    """The event of a line. `row`: of its code, as the line changed it. `said`: what else the line tells."""
    confidence = _CONFIDENCE[row.severity]
    uuid = _UUID.search(where) if kind == "xid" else None
    fields = {"code": code, **said, "after": " ".join(map(str, row.after)), "mnemonic": row.mnemonic, "pid": pid}
    return KernelEvent(
        kind=kind,
        rule=f"{kind}_{code}",
        failure_class=row.failure_class,
        severity=row.severity,
        scope="gpu" if kind == "xid" else "node",
        text=clean_text(line.strip()),
        line=0,
        code=code,
        device=pci_address(where),
        action=row.action,
        confidence=min(confidence, 0.4) if row.consequence else confidence,
        pid=pid,
        gpu_uuid=f"{uuid[0][:3].upper()}{uuid[0][3:].lower()}" if uuid else "",
        consequence=row.consequence,
        outlook=row.outlook,
        fields={name: str(value) for name, value in fields.items() if value not in (None, "")},
    )


_FLAGS: Final = re.IGNORECASE | re.ASCII
_XID: Final = re.compile(
    r"NVRM:\s{0,9}(?:GPU\d{1,3}:?\s)?Xid\s?\((?P<where>[^()\n]{1,120})\)(?P<mig>(?:\s?GPU-C?I:\s?\w{1,8}){0,2})\s?:?\s{0,9}"
    r"(?P<code>\d{1,5})(?!\w|\.\d)[\s,:]*(?P<rest>[^\n]*)",
    _FLAGS,
)
_SXID: Final = re.compile(
    r"(?:nvswitch\d{1,3}\s?:?\s)?\bSXid\s?\((?P<where>[^()\n]{1,120})\)\s?:?\s{0,9}"
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


def read_xid(line: str, tables: Tables | None = None) -> KernelEvent | None:
    """The Xid that a line of the kernel log tells, or None. Never raises.

    The number and the time of the line are the caller's.
    """
    at = _find(line, "Xid", "xid", "XID")
    match = _XID.search(_clean(line, at)) if at >= 0 else None
    if match is None:
        return None
    tables = tables or default_tables()
    code, where = int(match["code"]), match["where"]
    row = tables.xid.get(code, UNKNOWN_XID)
    pid, process, message = _process(match["rest"])
    follows = _FOLLOWS.search(message)
    link = _LINK.search(message)
    detail, changes = _details(code, message, tables)
    if follows is not None:
        changes |= _following(row, tables.xid.get(int(follows[1])))
    said = {
        **detail,
        "follows": int(follows[1]) if follows else None,
        "process": process,
        "mig": "/".join(number for _, number in sorted(_MIG.findall(where + match["mig"]))),
        "link": int(link[1]) if link else None,
    }
    return _event("xid", code, _changed(row, changes), where, line, said, pid)


def _following(row: XidRow, first: XidRow | None) -> Changes:
    """What a line changes that names the Xid before it: a mere consequence is of that one's class."""
    changes: Changes = {"consequence": True}
    if first is not None and row.consequence:
        changes["failure_class"] = first.failure_class
    return changes


def _changed(row: XidRow, changes: Changes) -> XidRow:
    """The row with what a line tells; what the site has set stays."""
    names = {"failure_class": "class"}
    kept = {field: value for field, value in changes.items() if names.get(field, field) not in row.site}
    return msgspec.structs.replace(row, **kept) if kept else row


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


def read_sxid(line: str, tables: Tables | None = None) -> KernelEvent | None:
    """The SXid that a line of the kernel log or of the fabric manager's log tells, or None. Never raises.

    The lines that continue one (`Severity ...`, `Data {...}`) are None.
    """
    at = _find(line, "SXid", "sxid", "SXID", "detected NVSwitch")
    if at < 0:
        return None
    text = _clean(line, at)
    match = _SXID.search(text) or _FABRIC_MANAGER.search(text)
    return _sxid(match, line, tables or default_tables()) if match is not None else None


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


def _sxid(match: re.Match[str], line: str, tables: Tables) -> KernelEvent | None:
    groups = match.groupdict()
    rest = match["rest"]
    if re.match(r"(?:Severity\b|Data\b|\{)", rest, _FLAGS):
        return None
    code = int(match["code"])
    row = tables.sxid.get(code, UNKNOWN_SXID)
    word = re.match(r"(non-?)?fatal\b", groups.get("word") or rest, _FLAGS)
    fatal = not word[1] if word else row.severity == "fatal"
    if "severity" not in row.site and fatal != (row.severity == "fatal"):
        changes: Changes = {"action": "cordon_node_and_restart" if fatal else "none"}
        row = _changed(row, changes | {"severity": "fatal" if fatal else "warning"})
    if fatal:
        row = _changed(row, {"outlook": "fails"})
    link = re.search(r"\b(?:link|port)\s+(\d{1,3})\b", rest, _FLAGS)
    said = {"scope": "fabric" if row.fabric else "", "link": int(link[1]) if link else None}
    return _event("sxid", code, row, groups.get("where") or rest, line, said)


Changes = dict[str, object]
"""Fields of a row that a line knows better than the table."""


def _details(code: int, message: str, tables: Tables) -> tuple[dict[str, str], Changes]:
    """What the message of Xid `code` tells, and what that changes in its row; nothing for one that cannot be read."""
    if code == 74:
        return _registers(message, tables)
    if code == 154:
        return _recovery(message, tables)
    if 144 <= code <= 150:
        return _nvlink5(code, message, tables)
    found: dict[str, str] = {}
    for row in tables.detail:
        for pattern in row.patterns if code in row.codes else ():
            match = re.search(pattern, message, _FLAGS)
            if match is not None:
                found |= {name: clean_text(value, 80) for name, value in match.groupdict().items() if value is not None}
    is_reset = code == 94 and found.get("reset", "").lower() == "yes"
    return found, {"action": "cordon_gpu_and_restart"} if is_reset else {}


_RECOVERY: Final = re.compile(
    r"(?:\bfrom (?P<before>0x[0-9a-f]{1,8}|\d{1,9})\b.{0,60}?)?\bto (?P<now>0x[0-9a-f]{1,8}|\d{1,9})\b", _FLAGS
)


def _recovery(message: str, tables: Tables) -> tuple[dict[str, str], Changes]:
    """Xid 154: by the number, since drivers name the same number differently (0x2: Node Reboot Required, OS Reboot)."""
    match = _RECOVERY.search(message)
    if match is None:
        return {}, {}
    value = int(match["now"], 0) if match["now"].lower().startswith("0x") else int(match["now"])
    row = tables.recovery.get(value, UNKNOWN_RECOVERY)
    detail = {"recovery": row.mnemonic or f"unknown recovery action {value}", "value": str(value)}
    return detail, {"failure_class": row.failure_class, "action": row.action, "severity": row.severity}


_REGISTERS: Final = re.compile(
    r"\blink\s+\d{1,3}\s*\(\s*(?P<words>0x[0-9a-f]{1,8}(?:\s*,\s*0x[0-9a-f]{1,8}){0,6})", _FLAGS
)
_HARMLESS: Final = {"ignorable", "ecc_threshold"}


def _registers(message: str, tables: Tables) -> tuple[dict[str, str], Changes]:
    """Xid 74: the classes of error in `error`. Bits that mean nothing bad make it a warning."""
    match = _REGISTERS.search(message)
    if match is None:
        return {}, {}
    words = [int(word, 16) for word in match["words"].replace(" ", "").split(",")]
    kinds = [
        kind
        for kind, registers in tables.nvlink.registers.items()
        if any(word >> bit & 1 for word, bits in zip(words, registers, strict=False) for bit in bits)
    ]
    detail = {"registers": " ".join(f"0x{word:x}" for word in words)}
    if not kinds:
        return detail, {}
    detail["error"] = ", ".join(kinds)
    if _HARMLESS.issuperset(kinds):
        return detail, {"severity": "warning", "action": "none", "outlook": ""}
    return detail, {"consequence": True} if {"secondary", *_HARMLESS}.issuperset(kinds) else {}


_WORDS: Final = re.compile(r"(?P<unit>[A-Z][A-Z0-9_]{1,31}(?: Degraded)?)\s+(?P<word>Non-?fatal|Fatal)\b", _FLAGS)
_XC: Final = re.compile(r"\bXC\s*(?P<xc>\d{1,2})\s+i\s*(?P<injected>\d{1,2})\b", _FLAGS)
_NUMBERS: Final = re.compile(r"[(\[]\s*(?P<intrinfo>0x[0-9a-f]{1,8})(?:[\s,]+(?P<status>0x[0-9a-f]{1,8}))?", _FLAGS)


def _nvlink5(code: int, message: str, tables: Tables) -> tuple[dict[str, str], Changes]:
    """Xid 144 to 150. `detail`: unit, xc, injected (1: a test put it there), intrinfo, status, format, look."""
    words = _WORDS.search(message)
    if words is None:
        return {}, {}
    said_fatal = words["word"].lower() == "fatal"
    unit = words["unit"].upper().replace(" ", "_")
    fault, detail = None, {"unit": unit}
    for pattern in (_XC, _NUMBERS):
        match = pattern.search(message, words.end())
        if match is not None:
            detail |= {name: value for name, value in match.groupdict().items() if value is not None}
    if "intrinfo" in detail:
        status = int(detail["status"], 16) if "status" in detail else None
        fault, version = _decode(code, unit, int(detail["intrinfo"], 16), status, tables)
        detail |= {"format": version} if version else {}
    if fault is None:
        return detail, {"severity": "fatal"} if said_fatal else {"severity": "warning", "action": "none", "outlook": ""}
    detail |= {"look": fault.look} if fault.look else {}
    severity: KernelSeverity = "fatal"
    if (
        not said_fatal
    ):  # the driver's word against the table's: worth more than a warning, not enough to end a diagnosis
        severity = "warning" if not fault.fatal and fault.action == "none" else "error"
    action = "restart" if said_fatal and fault.action == "none" else fault.action
    outlook = "fails" if severity == "fatal" and action.startswith("cordon") else ""
    return detail, {"severity": severity, "action": action, "outlook": outlook}


def _decode(code: int, name: str, intrinfo: int, status: int | None, tables: Tables) -> tuple[LinkFault | None, str]:
    """The worst fault that the words tell, and the format (`v1`, `v2` from R575 on) in which they make sense; None, "":
    in none. The unit's name decides; without it the words must fit one format only."""
    units = [unit for unit in tables.nvlink.unit if unit.xid == code]
    fits = {
        "v2": [unit for unit in units if unit.v2 == intrinfo & 0x7F],
        "v1": [unit for unit in units if unit.v1 == intrinfo & 0x3FF],
    }
    for version, fitting in fits.items():
        named = [unit for unit in fitting if name in unit.names]
        if named:
            return _worst(named[0], intrinfo, status, version), version
    one = [version for version, fitting in fits.items() if fitting]
    if len(one) == 1 and not any(name in unit.names for unit in units):
        return _worst(fits[one[0]][0], intrinfo, status, one[0]), one[0]
    return None, ""


def _worst(unit: LinkUnit, intrinfo: int, status: int | None, version: str) -> LinkFault | None:
    high_bit = bool(intrinfo >> (7 if version == "v2" else 10) & 1)
    found = []
    for fault in unit.faults:
        if fault.sub != intrinfo >> 20 & 0x3F or not _has(unit, fault, status):
            continue
        if fault.high_bit and high_bit:
            fault = msgspec.structs.replace(fault, fatal=True, action="cordon_gpu_and_restart")
        found.append(fault)
    return max(found, key=lambda one: (one.fatal, one.action != "none"), default=None)


def _has(unit: LinkUnit, fault: LinkFault, status: int | None) -> bool:
    if fault.status is None:
        return True
    if status is None:
        return False
    return bool(status & fault.status) if unit.bits else status == fault.status
