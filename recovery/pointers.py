"""Tracker files, small files and links that name the newest checkpoint: mended when it was moved aside."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from recovery.actions import Checkpoint
from recovery.bounds import Bounds, GivenFolders
from recovery.formats.folders import DEEPSPEED_TRACKER, MEGATRON_TRACKER, read_pointer
from recovery.formats.walk import stale_pointer
from recovery.moves import Record, keep_record, point, read_records, replace, set_aside

TRACKERS: Final = (MEGATRON_TRACKER, DEEPSPEED_TRACKER)


def mend_pointers(folder: Path, chosen: Checkpoint | None, bounds: Bounds | None = None) -> list[Record]:
    """Make the tracker files of a folder name `chosen`, else move aside those that name nothing. Raises OSError.

    Tracker files that are missing are written where the format needs one (`chosen.format`). So are symbolic links
    (`latest -> step-100`) mended whose target was moved aside. What is not the job's is left as it is.
    """
    bounds = bounds or GivenFolders()
    inside = chosen is not None and Path(chosen.path).parent == folder
    records = [*_mend_links(folder, chosen, bounds), *_mend_markers(folder, chosen if inside else None, bounds)]
    for name, format_name in ((MEGATRON_TRACKER, "megatron"), (DEEPSPEED_TRACKER, "deepspeed")):
        pointer = folder / name
        if bounds.why_not(pointer):
            continue
        before = read_pointer(pointer)
        text = ""
        if chosen is not None and inside and chosen.format == format_name:
            text = str(chosen.step) if format_name == "megatron" else Path(chosen.path).name
        elif chosen is not None and inside and before and chosen.step is not None and stale_pointer(pointer):
            text = str(chosen.step) if before.isdigit() else Path(chosen.path).name  # others use these names, too
        if (text or None) == before or (before is None and not text):
            continue
        if text:
            replace(pointer, text.encode())
            bounds.changed(pointer)
            record = Record(done="pointer", path=str(pointer), before=before, after=text, at=time.time())
            keep_record(folder, name, record)
            records.append(record)
        elif stale_pointer(pointer) is not None:
            target = set_aside(pointer, "it names a checkpoint that is not there, and there is no complete one", bounds)
            records.append(Record(done="set_aside", path=str(pointer), moved_to=str(target), at=time.time()))
    return records


def _mend_links(folder: Path, chosen: Checkpoint | None, bounds: Bounds) -> list[Record]:
    aside = {record.path for record in _moved(folder, bounds.job)}
    records: list[Record] = []
    for link in sorted(folder.iterdir()) if aside else ():
        if not link.is_symlink() or link.exists() or str(folder / os.readlink(link)) not in aside:
            continue
        if bounds.why_not(link):
            continue
        before = os.readlink(link)
        if chosen is None or Path(chosen.path).parent != folder:
            target = set_aside(link, f"it points to {before}, which was moved aside", bounds)
            records.append(Record(done="set_aside", path=str(link), moved_to=str(target), at=time.time()))
            continue
        record = Record(done="link", path=str(link), before=before, after=Path(chosen.path).name, at=time.time())
        point(link, Path(chosen.path).name)
        bounds.changed(link)
        keep_record(folder, link.name, record)
        records.append(record)
    return records


def _moved(folder: Path, job: str) -> list[Record]:
    """What this job moved aside from a folder; others may use it as well."""
    return [record for record in read_records(folder) if record.done == "set_aside" and record.job == job]


def _mend_markers(folder: Path, chosen: Checkpoint | None, bounds: Bounds) -> list[Record]:
    """Small files (`latest.txt`) that name a checkpoint which was moved aside."""
    aside = {os.path.basename(record.path) for record in _moved(folder, bounds.job)}
    records: list[Record] = []
    for path in sorted(folder.iterdir()) if aside else ():
        if path.suffix not in ("", ".txt") or path.name in TRACKERS or path.is_symlink() or not path.is_file():
            continue
        if bounds.why_not(path):
            continue
        before = read_pointer(path) or ""
        named = os.path.basename(before)
        if named not in aside or os.path.lexists(folder / named):
            continue
        if chosen is None:
            target = set_aside(path, f"it names {named}, which was moved aside, and there is no complete one", bounds)
            records.append(Record(done="set_aside", path=str(path), moved_to=str(target), at=time.time()))
            continue
        after = before.removesuffix(named) + os.path.basename(chosen.path)
        replace(path, after.encode())
        bounds.changed(path)
        record = Record(done="pointer", path=str(path), before=before, after=after, at=time.time())
        keep_record(folder, path.name, record)
        records.append(record)
    return records
