"""The demo itself, and that its script resumes to the bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.demo.rehearsal import Rehearsal, torchrun
from supervisor.demo.stage import SCRIPT, weights_sha256

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.timeout(400)
@pytest.mark.lasts(125)
def test_the_demo_recovers_from_everything_and_proves_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "supervisor.cli", "demo", "--keep", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal, bit for bit" in done.stdout
    assert len(done.stdout.splitlines()) < 60, "quiet in a pipe"
    assert "\x1b" not in done.stdout


@pytest.mark.timeout(200)
@pytest.mark.lasts(60)
def test_the_script_resumes_to_the_bit_under_plain_torchrun(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def train(out: Path) -> Rehearsal:
        command = [*torchrun(), "--nproc-per-node", "2", str(SCRIPT), "--out", str(out), "--steps", "25"]
        return Rehearsal([*command, "--save-every", "5"], folder=tmp_path)

    interrupted = train(parts)
    interrupted.wait_for_step(12, timeout_s=90)
    interrupted.close()
    assert not (parts / "model.safetensors").exists()
    for out in (parts, whole):
        assert train(out).wait_for_end(90) == 0
    assert weights_sha256(parts) == weights_sha256(whole)
