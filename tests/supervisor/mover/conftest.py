from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder where fsync takes no time: a kill hits every step alike."""
    place = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path, prefix="ub-mover-"))
    yield place
    shutil.rmtree(place, ignore_errors=True)
