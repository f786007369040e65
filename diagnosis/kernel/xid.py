"""Reads the error lines of NVIDIA's drivers: Xid (a GPU) and SXid (an NVSwitch).

One line in, one frozen reading out, whatever the driver's version, the log's prefix or the hostility of the text.
Nothing here remembers: what repeats and what follows what is for the caller, who gets `follows`, `after` and
`consequence`.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from diagnosis.incident import RemedyAction
from diagnosis.kernel.xid_details import Changes, details
from diagnosis.kernel.xid_tables import UNKNOWN_SXID, UNKNOWN_XID, Row, Severity, Tables, default
from diagnosis.signals import Frozen, clean_text
from diagnosis.taxonomy import FailureClass

MAX_LINE: Final = 2048
"""Characters of a line that are looked at."""

_CONFIDENCE: Final[dict[Severity, float]] = {"fatal": 0.92, "error": 0.7, "warning": 0.4, "info": 0.2}


class _Reading(Frozen, frozen=True, kw_only=True):
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
    """What else the line says, decoded: `xid_details` names the keys."""

    @property
    def confidence(self) -> float:
        """How sure it is that this is the cause of what happened at the time."""
        return min(_CONFIDENCE[self.severity], 0.4) if self.consequence else _CONFIDENCE[self.severity]


class XidReading(_Reading, frozen=True, kw_only=True):
    """One Xid line."""

    gpu_uuid: str = ""
    mig: str = ""
    """GPU instance of MIG, or `instance/compute instance`."""
    pid: int | None = None
    process: str = ""
    follows: int | None = None
    """The Xid that the driver itself says was before."""
    message: str = ""
    """What the driver says after the process."""


class SxidReading(_Reading, frozen=True, kw_only=True):
    """One SXid line."""

    switch: int | None = None
    """The N of `nvidia-nvswitchN`."""
    fatal: bool = False
    message: str = ""


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


def read_xid(line: str, tables: Tables | None = None, r575: bool | None = None) -> XidReading | None:
    """The Xid that a line of the kernel log tells, or None. Never raises.

    `r575`: whether the driver is R575 or newer (NVLink 5 words changed then); None: not known.
    """
    at = _find(line, "Xid", "xid", "XID")
    match = _XID.search(_clean(line, at)) if at >= 0 else None
    if match is None:
        return None
    tables = tables or default()
    code = int(match["code"])
    row = tables.xid.get(code, UNKNOWN_XID)
    where = match["where"]
    pid, process, message = _process(match["rest"])
    uuid = _UUID.search(where)
    follows = _FOLLOWS.search(message)
    link = _LINK.search(message)
    reading = XidReading(
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
    changes = details(code, message, tables, r575)
    if follows is not None:
        changes |= _following(row, tables.xid.get(int(follows[1])))
    return _changed(reading, row, changes)


def _following(row: Row, first: Row | None) -> Changes:
    """What a line changes that names the Xid before it: a mere consequence is of that one's class."""
    changes: Changes = {"consequence": True}
    if first is not None and row.consequence:
        changes["failure_class"] = first.failure_class
    return changes


def _changed(reading: XidReading, row: Row, changes: Changes) -> XidReading:
    """The reading with what its line tells; what the site has set stays."""
    names = {"failure_class": "class", "mnemonic": "name"}
    kept = {field: value for field, value in changes.items() if names.get(field, field) not in row.site}
    return msgspec.structs.replace(reading, **kept)


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


def read_sxid(line: str, tables: Tables | None = None) -> SxidReading | None:
    """The SXid that a line of the kernel log or of the fabric manager's log tells, or None. Never raises.

    The lines that continue one (`Severity ...`, `Data {...}`) are None.
    """
    at = _find(line, "SXid", "sxid", "SXID", "detected NVSwitch")
    if at < 0:
        return None
    text = _clean(line, at)
    match = _SXID.search(text)
    if match is not None:
        return _sxid(match, match["where"], match["switch"], tables or default())
    match = _FABRIC_MANAGER.search(text)
    return _sxid(match, match["rest"], None, tables or default()) if match is not None else None


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


def _sxid(match: re.Match[str], where: str, switch: str | None, tables: Tables) -> SxidReading | None:
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
    return SxidReading(
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
        fatal=fatal,
        link=int(link[1]) if link else None,
        message=clean_text(rest, 300),
        detail={"scope": "fabric"} if row.fabric else {},
    )
