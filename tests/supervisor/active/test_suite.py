"""Who else uses the GPUs, as a scripted NVML says it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

WHO = """
import json
from supervisor.active.suite import busy_gpus
from supervisor.errors import ActiveTestsImpossible
try: print(json.dumps(busy_gpus()))
except ActiveTestsImpossible as error: print(json.dumps(str(error)))
"""
GPU = "GPU-00000000-0000-0000-0000-00000000000"


def who(fake_nvml: Any, **state: object) -> Any:
    fake_nvml.state(**{"count": 2, **state})
    done = subprocess.run([sys.executable, "-c", WHO], env=fake_nvml.env, stdout=subprocess.PIPE, timeout=60)
    return json.loads(done.stdout)


def test_foreign_processes_and_memory_that_nobody_has(fake_nvml: Any) -> None:
    assert who(fake_nvml) == {}
    assert set(who(fake_nvml, **{"1.processes": "1 4000"})) == {GPU + "1"}
    assert set(who(fake_nvml, **{"0.memory_used": 9 << 30})) == {GPU + "0"}


@pytest.mark.parametrize("function", ["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMemoryInfo_v2"])
def test_a_driver_that_does_not_say_is_no_word_that_nobody_does(fake_nvml: Any, function: str) -> None:
    """Then tests could take memory from a job."""
    assert function.removesuffix("_v2") in who(fake_nvml, **{f"hang.{function}": -1})
