"""`unbroken check` of a node whose NVML is the scripted one: the whole way, as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FakeNvml = Any
SITE = "[expect]\ngpus = 8\n[limits.gpu_driver_responds]\nseconds = 2\n"
"""The bus of this machine has no GPU: that eight are expected makes NVML be asked."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "site.toml").write_text(SITE)
    return tmp_path / "site.toml"


def check(fake: FakeNvml, site: Path, *arguments: str) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    argv = [sys.executable, "-m", "supervisor.cli.main", "check", "--json", "--site", str(site)]
    argv += ["--state-dir", str(site.parent / "kept"), "--only", "nvml", "--only", "gpu_driver_responds", *arguments]
    done = subprocess.run(argv, env=fake.env, stdout=subprocess.PIPE, check=False)
    return done.returncode, {(one["check"], one["device"]): one for one in json.loads(done.stdout)["checks"]}


def test_eight_healthy_gpus(fake_nvml: FakeNvml, site: Path) -> None:
    code, seen = check(fake_nvml, site)
    assert code == 0
    temperature = seen["gpu_temperature", "0000:13:00"]
    assert (temperature["status"], temperature["gpu"]) == ("healthy", "0000:13:00")
    assert temperature["gpu_uuid"] == "GPU-00000000-0000-0000-0000-000000000003"
    assert seen["gpu_driver_responds", ""]["status"] == "healthy"
    silent = [key for key, one in seen.items() if one["text"].startswith("no answer")]
    assert silent == [], "every check has an answer"


def test_a_driver_that_hangs_is_the_finding(fake_nvml: FakeNvml, site: Path) -> None:
    fake_nvml.state(**{"5.hang.nvmlDeviceGetPowerUsage": -1})
    code, seen = check(fake_nvml, site, "--timeout", "12")
    hang = seen["gpu_driver_responds", ""]
    assert (code, hang["level"], hang["failure_class"]) == (2, "critical", "gpu_hang")
    assert hang["text"].startswith("nvmlDeviceGetPowerUsage 0000:15:00 has not returned for ")
    assert "waiting in " in hang["text"]
    assert seen["gpu_temperature", ""]["status"] == "unknown"
    assert "nvmlDeviceGetPowerUsage" in seen["gpu_temperature", ""]["text"]
