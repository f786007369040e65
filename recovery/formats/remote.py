"""Checkpoints in object stores and elsewhere, by fsspec: they are copied to a local folder, and read there.

fsspec and the package for the store (s3fs, gcsfs, ...) are the user's: without them a sentence says what is missing.
Each call has a deadline. Names in a store are hostile: none leads out of the folder.
"""

from __future__ import annotations

import datetime
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from recovery.formats.folders import TRACKERS, UNFINISHED
from recovery.formats.verify import NotVerifiable

T = TypeVar("T")
CALL_S: Final = 60.0
"""To list, or to ask for one file."""
SLOWEST_BYTES_PER_S: Final = 1 << 20
"""A copy that is slower is given up."""
ENTRIES: Final = 20_000
DEPTH: Final = 5
SPARE_BYTES: Final = 256 << 20
"""Stay free on the local disk."""


def is_remote(path: str) -> bool:
    """`s3://bucket/run`, `memory://x`, `file:///x`."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme.replace("+", "").replace("-", "").isalnum()


def within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """What `call` returns. Raises NotVerifiable when it fails, or when the time is up: then it is left behind."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # whatever a store's package raises
            failure.append(error)

    thread = threading.Thread(target=run, name="remote", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        if isinstance(failure[0], FileNotFoundError):
            raise NotVerifiable(f"{what} does not exist")
        raise NotVerifiable(f"{what} cannot be read: {type(failure[0]).__name__}: {str(failure[0])[:200]}")
    if not outcome:
        raise NotVerifiable(f"{what} gave no answer within {seconds:.0f} s")
    return outcome[0]


def fetch(url: str, into: Path) -> Path:
    """Copy a remote file or folder below `into`, with the tracker files beside it; where it is then.

    Raises NotVerifiable.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise NotVerifiable(f"{url} needs the package fsspec: pip install fsspec") from None
    store, root = within(CALL_S, url, lambda: url_to_fs(url))
    root = str(root).rstrip("/")
    about = within(CALL_S, url, lambda: store.info(root))
    name = os.path.basename(root) or "root"
    if about.get("type") != "directory":
        files = {name: about}
    else:
        found = within(CALL_S, url, lambda: store.find(root, maxdepth=DEPTH, detail=True))
        if len(found) > ENTRIES:
            raise NotVerifiable(f"{url} holds more than {ENTRIES} files: name one checkpoint in it")
        files = {f"{name}/{_below(path, root, url)}": one for path, one in found.items()}
        (into / name).mkdir(parents=True)
    needed = sum(int(one.get("size") or 0) for one in files.values())
    if needed + SPARE_BYTES > shutil.disk_usage(into).free:
        raise NotVerifiable(
            f"{url} has {needed} bytes, and {into} has no room for them: set TMPDIR to a folder on a larger disk"
        )
    above = root.rpartition("/")[0]
    for local, one in files.items():
        _copy(store, str(one["name"]), into / local, one, url)
    for beside in (*TRACKERS, name + UNFINISHED) if above else ():
        _copy_if_there(store, f"{above}/{beside}", into / beside)
    return into / name


def _below(path: str, root: str, url: str) -> str:
    """The part of a name below the folder. Raises NotVerifiable where it would lead elsewhere."""
    stripped, base = path.strip("/"), root.strip("/")
    below = stripped[len(base) :].lstrip("/") if stripped.startswith(base) else ""
    parts = below.split("/")
    if not below or "\0" in below or any(part in ("", ".", "..") for part in parts):
        raise NotVerifiable(f"{url} holds a name that cannot be copied: {path[:200]!r}")
    return below


def _copy(store: Any, source: str, target: Path, about: dict[str, Any], url: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    seconds = CALL_S + int(about.get("size") or 0) / SLOWEST_BYTES_PER_S
    within(seconds, f"{url} ({os.path.basename(source)})", lambda: store.get_file(source, str(target)))
    at = _time_of(about)
    if at is not None and target.exists():
        os.utime(target, (at, at))


def _copy_if_there(store: Any, source: str, target: Path) -> None:
    try:
        about = within(CALL_S, source, lambda: store.info(source))
        if about.get("type") == "file" and int(about.get("size") or 0) < 1 << 20:
            _copy(store, source, target, about, source)
    except NotVerifiable:
        return  # there is none


def _time_of(about: dict[str, Any]) -> float | None:
    """When it was written: stores name it differently."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = about.get(key)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, (int, float)) and value > 0:
            return float(value)
    return None
