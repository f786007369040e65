"""The demo itself: with faults, its training ends with the very bits of a run by plain torchrun that had none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.timeout(400)
@pytest.mark.lasts(125)
def test_the_demo_recovers_from_everything_and_proves_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "supervisor.cli.main", "demo", "--keep", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal, bit for bit" in done.stdout
    assert len(done.stdout.splitlines()) < 60, "quiet in a pipe"
    assert "\x1b" not in done.stdout
