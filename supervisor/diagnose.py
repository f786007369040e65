"""`unbroken diagnose`: what logs tell, without a job: kernel events and one verdict.

Files of any size are read in blocks; what is not text is read all the same, and says nothing.
"""

from __future__ import annotations

import codecs
import gzip
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final

import click

from diagnosis import kernel_rules, xid_tables
from diagnosis.incident import Verdict
from diagnosis.logs import LogReader
from diagnosis.signals import clean_text
from diagnosis.story import Case
from diagnosis.triage import conclude_case
from supervisor import site
from supervisor.job_commands import fail, load_config, print_answer

BLOCK: Final = 64 * 1024
MAX_LINE: Final = 64 * 1024
"""Bytes of a line that are looked at; a longer one is cut."""
MAX_FILES: Final = 2000
STDIN: Final = "-"
_GZIP: Final = b"\x1f\x8b"
_NO_TEXT: Final = (".pt", ".pth", ".bin", ".safetensors", ".so", ".pyc", ".zip", ".distcp", ".npy", ".png")
NO_INPUT: Final = 66


_UTF_16: Final = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def blocks(stream: IO[bytes]) -> Iterator[bytes]:
    """Whole lines in blocks of about 64 KiB, each without its last newline."""
    rest = b""
    for data in _readable(stream):
        rest += data
        whole, newline, rest = rest.rpartition(b"\n")
        if newline:
            yield whole
        elif len(rest) > MAX_LINE:
            rest = rest[:MAX_LINE]
    if rest:
        yield rest


def _readable(stream: IO[bytes]) -> Iterator[bytes]:
    """What is in the stream, as UTF-8 if it begins as UTF-16 does; CR ends a line where no LF does.

    A progress bar writes CRs, and an LF now and then: it stays one line.
    """
    data = stream.read(BLOCK)
    coding = _UTF_16.get(data[:2])
    decoder = codecs.getincrementaldecoder(coding)("replace") if coding is not None else None
    data = data[2:] if decoder is not None else data
    only_cr: bool | None = None
    while data:
        if decoder is not None:
            data = decoder.decode(data).encode()
        if only_cr is None:
            only_cr = b"\r" in data and b"\n" not in data
        yield data.replace(b"\r", b"\n") if only_cr else data
        data = stream.read(BLOCK)


def read(stream: IO[bytes], name: str, site_file: site.SiteFile | None = None) -> LogReader:
    """Read one log to its end. A damaged gzip file is read as far as it goes."""
    tables = site_file.tables if site_file is not None else {}
    log = LogReader(
        name, xid_tables.default().with_site(tables), kernel_rules.default().with_site(tables.get("kernel") or {})
    )
    try:
        for block in blocks(stream):
            log.feed(block)
    except (OSError, EOFError, zlib.error):
        pass
    log.end()
    return log


def files_in(paths: Iterable[str]) -> Iterator[Path]:
    """The files of these paths; folders are walked, what is no log by its name is left out there."""
    count = 0
    for path in map(Path, paths):
        if not os.path.isdir(path):
            yield path
            continue
        for folder, folders, names in os.walk(path):
            folders.sort()
            for name in sorted(names):
                file = Path(folder, name)
                if not name.endswith(_NO_TEXT) and os.path.isfile(file):
                    count += 1
                    if count > MAX_FILES:
                        return
                    yield file


def open_log(path: Path) -> IO[bytes]:
    """Open a file, unpacked if it is gzip. Raises OSError."""
    stream = open(path, "rb")  # noqa: SIM115  # the caller closes it; it may be a pipe, so it is opened once
    packed = stream.peek(2)[:2] == _GZIP
    return gzip.open(stream) if packed else stream  # type: ignore[return-value]


def answer(logs: list[LogReader]) -> dict[str, Any]:
    """The object that is printed (docs/protocol.md)."""
    verdict = conclude_case(Case(stories=tuple(log.story() for log in logs)))
    several = len(logs) > 1
    events = []
    for log in logs:
        for event in log.events:
            entry: dict[str, Any] = {"kind": event.kind, "code": event.code, "device": event.device or None}
            entry |= {"line": event.line, "failure_class": event.failure_class.value, "severity": event.severity}
            events.append(entry | ({"file": log.name} if several else {}))
    return {
        "schema": 1,
        "verdict": _verdict(verdict),
        "alternatives": [
            {"failure_class": one.failure_class.value, "confidence": one.confidence} for one in verdict.alternatives
        ],
        "symptoms": [symptom.value for symptom in verdict.symptoms],
        "evidence": [
            {"source": one.source, "line": one.line, "rank": one.rank, "text": one.text} for one in verdict.evidence
        ],
        "kernel_events": events,
        "kernel_events_left_out": sum(log.events_left_out for log in logs),
        "flight_recorder": None,
        "lines": sum(log.lines for log in logs),
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "failure_class": verdict.failure_class.value,
        "kind": verdict.kind,
        "domain": verdict.domain,
        "culprits": [
            {key: value for key, value in (("node", one.node), ("gpu", one.gpu), ("rank", one.rank)) if value != ""}
            for one in verdict.culprits
        ],
        "confidence": verdict.confidence,
        "why": verdict.why,
        "action": verdict.action,
    }


def show(value: dict[str, Any]) -> None:
    """For people."""
    verdict = value["verdict"]
    click.echo(f"{verdict['failure_class']} ({verdict['confidence']:.0%}): {verdict['why']}")
    for one in value["alternatives"]:
        click.echo(f"  or {one['failure_class']} ({one['confidence']:.0%})")
    for one in value["evidence"]:
        click.echo(f"  {one['source']}:{one['line'] or ''}: {one['text']}")
    events = value["kernel_events"]
    if events:
        click.echo(f"{len(events)} kernel events:")
    for one in events[:100]:
        where = f"{one['file']}:{one['line']}" if "file" in one else f"line {one['line']}"
        code = f" {one['code']}" if one["code"] is not None else ""
        click.echo(f"  {where}: {one['kind']}{code} {one['device'] or ''}".rstrip())
    if len(events) > 100:
        click.echo(f"  and {len(events) - 100} more (--json has them all)")


def main(paths: tuple[str, ...], as_json: bool) -> None:
    """The command. Ends the program with 66 when a path that was named cannot be read."""
    site_file, problem = site.load_or_default(load_config({}).settings.run.site_file)
    if problem:
        click.echo(f"unbroken: {problem}", err=True)
    logs = []
    for path in (Path(STDIN),) if STDIN in paths else files_in(paths):
        try:
            stream = sys.stdin.buffer if str(path) == STDIN else open_log(path)
        except OSError as error:
            if str(path) in paths:
                fail(NO_INPUT, f"{clean_text(str(path), 1000)}: {error.strerror}")
            continue
        with stream:
            logs.append(read(stream, "stdin" if str(path) == STDIN else clean_text(str(path), 1000), site_file))
    print_answer(answer(logs), as_json, show)
