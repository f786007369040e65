"""What stands before a kernel message: kmsg records, dmesg, journalctl and syslog all write a time in their own way."""

from __future__ import annotations

import datetime
import re
from typing import Final, NamedTuple


class Stamp(NamedTuple):
    """A line without what stands before its message, and the time that it told."""

    text: str
    at: float | None = None
    """Unix time, where a date and a year are given."""
    uptime: float | None = None
    """Seconds since the kernel started."""
    is_foreign: bool = False
    """A program wrote it into the kernel's log: its facility says so."""


_COLOUR: Final = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
_MONTHS: Final = {name: n for n, name in enumerate("jan feb mar apr may jun jul aug sep oct nov dec".split(), 1)}
_KMSG: Final = re.compile(r"(?P<level>\d{1,4}),\d{1,12},(?P<us>\d{1,18}),[^;\n]{0,200};")
_LEVEL: Final = re.compile(r"<(?P<level>\d{1,4})>|(?P<facility>[a-z0-9]{3,8})\s{0,6}:\s?[a-z]{3,6}\s{0,3}: ")
_UPTIME: Final = re.compile(r"\[\s{0,8}(?P<s>\d{1,9}\.\d{1,9})\](?:\[\s{0,8}[TC]\d{1,8}\])?\s?")
_CTIME: Final = re.compile(
    r"\[?[A-Z][a-z]{2} (?P<month>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2}) (?P<clock>\d\d:\d\d:\d\d) (?P<year>\d{4})\]?\s?"
)
_ISO: Final = re.compile(
    r"\[?(?P<date>\d{4}-\d\d-\d\d)[T ](?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?\s?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?\]?\s{0,3}"
)
_DELTA: Final = re.compile(r"\[(?:\s{0,8}[+<]\s{0,12}\d{1,9}\.\d{1,9}>?|[A-Z][a-z]{2} ?\d{1,2} \d\d:\d\d)\]\s?")
"""`dmesg -d`, `-e` and `-H` write the time since the message before, or the minute."""
_SYSLOG: Final = re.compile(r"[A-Z][a-z]{2} {1,2}\d{1,2} \d\d:\d\d:\d\d(?:\.\d{1,6})?\s+")
_UNIX: Final = re.compile(r"(?P<unix>\d{9,10}\.\d{3,9}) (?=\S+ \S+:)")
_SENDER: Final = re.compile(r"(?:(?!NVRM)[\w.-]{1,128} )?(?:kernel|vmunix)(?:\[\d{1,9}\])?: ?")
_HOST: Final = re.compile(r"[A-Za-z][\w.-]{0,63}:? (?=\[\s{0,8}\d{1,9}\.\d{6}\] )")
"""Who collects the kernel logs of many nodes writes the node before the kernel's own stamp."""

_STRANGE: Final = re.compile(r"[^\n]{0,60}?\d\d:\d\d:\d\d[^\n]{0,90}?\skernel: ?")
"""A clock and a host in any form, as long as it says who speaks."""


def read_stamp(line: str) -> Stamp:
    """Take off what stands before the message; what is not known as such stays."""
    text = _COLOUR.sub("", line) if "\x1b" in line else line
    at: float | None = None
    uptime: float | None = None
    is_foreign = False
    for _ in range(7):
        first = text[:1]
        match = _KMSG.match(text) if first.isdigit() else None
        if match is not None:
            uptime = int(match["us"]) / 1e6
        elif first == "[" and (match := _UPTIME.match(text)) is not None:
            uptime = float(match["s"])
        elif (match := _ISO.match(text) or _CTIME.match(text)) is not None:
            at = _moment(match.groupdict())
        elif first.isdigit() and (match := _UNIX.match(text)) is not None:
            at = float(match["unix"])
        elif first == "[":
            match = _DELTA.match(text)
        else:
            match = _LEVEL.match(text) or _SYSLOG.match(text) or _SENDER.match(text) or _HOST.match(text)
        if match is None and "kernel:" in text:
            match = _STRANGE.match(text)
        if match is None:
            break
        if match.re in (_KMSG, _LEVEL):
            is_foreign = _is_foreign(match.groupdict())
        elif match.re in (_SENDER, _STRANGE):
            is_foreign = False
        text = text[match.end() :]
    return Stamp(text, at, uptime, is_foreign)


def _is_foreign(parts: dict[str, str | None]) -> bool:
    """Whether a level (`<12>`) or a facility (`user  :warn  : `, as of `dmesg -x`) is not the kernel's."""
    if parts.get("level"):
        return int(parts["level"] or 0) >> 3 != 0
    return parts.get("facility") != "kern"


def _moment(parts: dict[str, str | None]) -> float | None:
    try:
        clock = datetime.time.fromisoformat(parts["clock"] or "")
        if parts.get("date"):
            day = datetime.date.fromisoformat(parts["date"] or "")
        else:
            day = datetime.date(
                int(parts["year"] or 0), _MONTHS[(parts["month"] or "").lower()], int(parts["day"] or 0)
            )
    except (ValueError, KeyError):
        return None
    zone = (parts.get("zone") or "Z").replace(":", "")
    offset = 0 if zone == "Z" else (1 if zone[0] == "+" else -1) * (int(zone[1:3]) * 3600 + int(zone[3:5]) * 60)
    moment = datetime.datetime.combine(day, clock, datetime.timezone.utc).timestamp()
    return moment + float(f"0.{parts.get('part') or 0}") - offset


_ANYWHERE: Final = re.compile(
    r"(?<!\d)(?P<date>\d{4}[-/]\d\d[-/]\d\d)[T ](?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?"
    r" ?(?P<zone>Z\b|[+-]\d\d:?\d\d\b)?"
    r"|(?<![\d/])(?P<us>\d\d/\d\d/(?:20)?\d\d),? (?P<us_clock>\d\d:\d\d:\d\d)"
    r"|\b(?P<name>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2}) (?P<named_clock>\d\d:\d\d:\d\d)(?:\.\d{1,6})?"
    r"(?: (?P<year>\d{4})\b)?"
    r"|(?:^|[^\w])[IWEFC](?P<glog>\d{4}) (?P<glog_clock>\d\d:\d\d:\d\d)(?:\.(?P<glog_part>\d{1,9}))?"
)
_CLOCK: Final = re.compile(r"\d\d:\d\d:\d\d")
STAMP_CHARACTERS: Final = 160
"""A stamp begins this near to the beginning of its line."""


def moment(line: str, year: int | None = None) -> float | None:
    """The first time with a date in the beginning of a line, Unix seconds (without a zone: as if it were UTC).

    `year`: of stamps that tell none (syslog, glog); without it they tell nothing.
    """
    match = _ANYWHERE.search(line, 0, STAMP_CHARACTERS) if _CLOCK.search(line, 0, STAMP_CHARACTERS) else None
    if match is None:
        return None
    found = match.groupdict()
    if found["date"] is not None:
        return _moment({**found, "date": found["date"].replace("/", "-")})
    if found["us"] is not None:
        month, day, told = found["us"].split("/")
        return _moment({"date": f"20{told[-2:]}-{month}-{day}", "clock": found["us_clock"]})
    told_year = found["year"] or (str(year) if year else "")
    if not told_year:
        return None
    if found["glog"] is not None:
        date = f"{told_year}-{found['glog'][:2]}-{found['glog'][2:]}"
        return _moment({"date": date, "clock": found["glog_clock"], "part": found["glog_part"]})
    return _moment({"month": found["name"], "day": found["day"], "clock": found["named_clock"], "year": told_year})
