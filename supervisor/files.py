"""Files of this node as small processes need them: replaced whole, and who a pid is."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks after boot; None when it is gone or a zombie.

    Raises OSError when that cannot be told (no descriptor or memory left).
    """
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    try:
        stat = os.read(descriptor, 2048).decode(errors="replace")
    except ProcessLookupError:
        return None
    finally:
        os.close(descriptor)
    fields = stat[stat.rfind(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` so that a reader sees the old or the new content, never a mixture."""
    temporary = f"{path.parent}/.{path.name}.{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):  # on a full disk each process would leave one
            os.unlink(temporary)
        raise


def version_of(name: str, path: list[str]) -> str:
    """Version of an installed distribution, by the name of its folder along `path`; empty when it is not there."""
    for folder in path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for one in names:
            stem, _, kind = one.rpartition(".")
            stem, _, version = stem.partition("-")
            if kind in ("dist-info", "egg-info") and stem.lower() == name and version:
                return version.partition("-py")[0]
    return ""


def entry_points(group: str, path: list[str]) -> list[str]:
    """The targets (`module:name`) of an entry-point group, by the files of what is installed along `path`.

    As `importlib.metadata` has them, which takes 3 MiB and 13 ms. The first of two distributions with one name counts.
    """
    found: dict[str, list[str]] = {}
    for folder in path:
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for name in names:
            stem, _, kind = name.rpartition(".")
            if kind in ("dist-info", "egg-info") and stem.partition("-")[0].lower() not in found:
                found[stem.partition("-")[0].lower()] = _targets(f"{folder or '.'}/{name}/entry_points.txt", group)
    return [target for targets in found.values() for target in targets]


def _targets(path: str, group: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    section, targets = "", []
    for line in map(str.strip, lines):
        if line.startswith("["):
            section = line.strip("[] ")
        elif section == group and "=" in line and not line.startswith(("#", ";")):
            targets.append(line.partition("=")[2].partition("[")[0].strip())
    return targets
