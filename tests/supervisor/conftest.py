"""Probes that exist only for a test, as a plug-in of the entry-point group `unbroken.probes`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PREAMBLE = """
import os, time
from diagnosis.health import Check, healthy, unhealthy, unknown
from diagnosis.signals import Signal

def check(id, **more):
    more = {"failure_class": "storage_error", "scope": "node", **more}
    return Check(id=id, what="w", source="s", threshold="t", **more)
"""


@pytest.fixture
def plug_in(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Source of probe classes (names ending in `Probe`) -> the environment of a process that finds them."""

    def install(source: str) -> dict[str, str]:
        folder = tmp_path / "plug-in"
        info = folder / "test_probes-0.dist-info"
        info.mkdir(parents=True)
        (folder / "plugged_in.py").write_text(PREAMBLE + source)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: test-probes\nVersion: 0\n")
        names = [line.split()[1].rstrip(":") for line in source.splitlines() if line.startswith("class ")]
        points = "".join(f"{name} = plugged_in:{name}\n" for name in names)
        (info / "entry_points.txt").write_text(f"[unbroken.probes]\n{points}")
        path = os.pathsep.join([str(folder), *(entry for entry in sys.path if entry)])
        return {**os.environ, "PYTHONPATH": path}

    return install
