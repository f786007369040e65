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


_COLOUR: Final = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
_MONTHS: Final = {name: n for n, name in enumerate("jan feb mar apr may jun jul aug sep oct nov dec".split(), 1)}
_KMSG: Final = re.compile(r"\d{1,4},\d{1,12},(?P<us>\d{1,18}),[^;\n]{0,200};")
_LEVEL: Final = re.compile(r"<\d{1,4}>|[a-z0-9]{3,8}\s{0,6}:\s?[a-z]{3,6}\s{0,3}: ")
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

_STRANGE: Final = re.compile(r"[^\n]{0,60}?\d\d:\d\d:\d\d[^\n]{0,90}?\skernel: ?")
"""A clock and a host in any form, as long as it says who speaks."""


def read_stamp(line: str) -> Stamp:
    """Take off what stands before the message; what is not known as such stays."""
    text = _COLOUR.sub("", line) if "\x1b" in line else line
    at: float | None = None
    uptime: float | None = None
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
            match = _LEVEL.match(text) or _SYSLOG.match(text) or _SENDER.match(text)
        if match is None and "kernel:" in text:
            match = _STRANGE.match(text)
        if match is None:
            break
        text = text[match.end() :]
    return Stamp(text, at, uptime)


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
