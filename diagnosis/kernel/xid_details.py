"""What the message of an Xid says beyond its number: the place, the link, the unit of NVLink 5, what the GPU needs now.

Each function takes a message and gives the fields of a reading that it changes (`detail` and, where the message knows
better than the table, `severity`, `action`, `failure_class`, `consequence`); nothing for a message that it cannot read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from diagnosis.incident import RemedyAction
from diagnosis.kernel.xid_tables import UNKNOWN_RECOVERY, LinkFault, LinkUnit, Severity, Tables
from diagnosis.signals import clean_text

Changes = dict[str, object]

_FLAGS: Final = re.IGNORECASE | re.ASCII

# Groups of these become `detail` under their names.
_PATTERNS: Final[dict[int, tuple[re.Pattern[str], ...]]] = {
    code: tuple(re.compile(pattern, _FLAGS) for pattern in patterns)
    for codes, patterns in {
        (13,): (
            r"\(GPC (?P<gpc>\d{1,3})(?:, TPC (?P<tpc>\d{1,3}))?(?:, SM (?P<sm>\d{1,3}))?\)",
            r"\d\): (?P<error>[\w ,/-]{1,80})",
        ),
        (31,): (
            r"ENGINE (?P<engine>\w{1,24}) (?:GPC(?P<gpc>\d{1,3}) )?(?P<client>\w{1,32})",
            r"faulted @ (?P<address>0x[0-9a-f_]{1,24})",
            r"(?P<fault>FAULT_\w{1,32}) (?P<access>ACCESS_\w{1,40})",
        ),
        (48, 171, 172): (
            r"phys(?:Addr|ical address) (?P<address>0x[0-9a-f_]{1,24})",
            r"\b(?:partition|FBPA) (?P<partition>\d{1,3})",
        ),
        (63, 64, 156, 160): (
            r"row(?: address)? \(?(?P<row>0x[0-9a-f_]{1,24})",
            r"(?P<pending>reset gpu to activate|node reboot required|reboot to activate)",
        ),
        (94, 95): (
            r"contained: (?P<unit>[\w /]{1,40})",
            r"(?<!-)\bRST: (?P<reset>Yes|No)",
            r"D-RST: (?P<drain>Yes|No)",
        ),
        (119, 120): (r"Timeout after (?P<waited_s>\d{1,5})s", r"function (?P<function>\d{1,5}(?: \(\w{1,60}\))?)"),
    }.items()
    for code in codes
}


def details(code: int, message: str, tables: Tables, r575: bool | None) -> Changes:
    """What the message of Xid `code` changes in its reading."""
    reader = _READERS.get(code)
    if reader is not None:
        return reader(code, message, tables, r575)
    found = _plain(code, message)
    changes: Changes = {"detail": found} if found else {}
    if code == 94 and found.get("reset", "").lower() == "yes":
        changes["action"] = "cordon_gpu_and_restart"
    return changes


def _plain(code: int, message: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pattern in _PATTERNS.get(code, ()):
        match = pattern.search(message)
        if match is not None:
            found |= {name: clean_text(value, 80) for name, value in match.groupdict().items() if value is not None}
    return found


_RECOVERY: Final = re.compile(
    r"(?:\bfrom (?P<before>0x[0-9a-f]{1,8}|\d{1,9})\b.{0,60}?)?\bto (?P<now>0x[0-9a-f]{1,8}|\d{1,9})\b", _FLAGS
)


def _recovery(_code: int, message: str, tables: Tables, _r575: bool | None) -> Changes:
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


def _registers(_code: int, message: str, tables: Tables, _r575: bool | None) -> Changes:
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


_READERS: Final[dict[int, Callable[[int, str, Tables, bool | None], Changes]]] = {
    74: _registers,
    154: _recovery,
    **dict.fromkeys(range(144, 151), _nvlink5),
}
