"""The scripted NVML library (tests/fake_nvml), and the real probe in a child that has loaded it."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FAKE = Path(__file__).parents[3] / "fake_nvml"
REPOSITORY = Path(__file__).parents[4]


class FakeNvml:
    """A node's NVML as a text file says it is; see the head of fake_nvml.c."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.folder = folder
        self._state = folder / "state"
        self.events = folder / "events"
        self.counts = folder / "counts"
        self.env = {
            **os.environ,
            "LD_LIBRARY_PATH": str(library.parent),
            "FAKE_NVML_STATE": str(self._state),
            "FAKE_NVML_EVENTS": str(self.events),
            "FAKE_NVML_COUNTS": str(self.counts),
            "PYTHONPATH": str(REPOSITORY),
        }
        self.events.write_text("")
        self.state()

    def state(self, **lines: object) -> None:
        """The whole state anew: `state(**{"3.lost": 1})`. Eight idle GPUs without memory in use unless it says else."""
        new = self._state.with_suffix(".new")
        both = {"count": 8, "*.memory_used": 0, **lines}
        new.write_text("".join(f"{key} {value}\n" for key, value in both.items()))
        new.replace(self._state)

    def event(self, gpu: int, kind: int, data: int, instance: int | None = None) -> None:
        with self.events.open("a") as file:
            file.write(f"{gpu} {kind} {data}{'' if instance is None else f' {instance}'}\n")

    def calls(self) -> dict[str, int]:
        records = self.counts.read_bytes() if self.counts.exists() else b""
        rows = (struct.unpack_from("56sQ", records, at) for at in range(0, len(records), 64))
        return {name.rstrip(b"\0").decode(): count for name, count in rows if name[0]}


class Readings(dict[tuple[str, str], dict[str, Any]]):
    """(check, device) -> result."""

    def at(self, check: str, device: str = "0000:10:00") -> dict[str, Any]:
        return self[check, device]

    @property
    def flaws(self) -> dict[str, list[str]]:
        """Check -> devices of which it is unhealthy."""
        found: dict[str, list[str]] = {}
        for (check, device), result in self.items():
            if result["status"] == "unhealthy":
                found.setdefault(check, []).append(device)
        return found


class Looker:
    """The real probe in a child: it looks when it is told to."""

    def __init__(self, env: dict[str, str], *arguments: str) -> None:
        argv = [sys.executable, str(FAKE / "look.py"), *arguments]
        self.process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.cpu_s = self.every_s = 0.0

    def ask(self, mono: float, **more: Any) -> None:
        self.process.stdin.write(json.dumps({"mono": mono, "site": {"expect": {"gpus": 8}}, **more}) + "\n")
        self.process.stdin.flush()

    def next(self, kind: str, fits: Callable[[Any], bool] = lambda _: True) -> Any:
        """The next word of this kind that fits; the test's time limit ends a wait for one that never comes."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word = json.loads(line)
            if kind in word and fits(word[kind]):
                self.cpu_s = word.get("cpu_s", self.cpu_s)
                self.every_s = word.get("every_s", self.every_s)
                return word[kind]
        raise AssertionError(f"the child ended with {self.process.wait()}")

    def look(self, mono: float, **more: Any) -> Readings:
        self.ask(mono, **more)
        return Readings({(each["check"], each.get("device", "")): each for each in self.next("readings")})

    def wait_until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            assert self.process.poll() is None
            time.sleep(0.01)


@pytest.fixture(scope="session")
def fake_nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("C compiler: install gcc and libc6-dev")
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([compiler, *flags, "-o", library, FAKE / "fake_nvml.c", "-lpthread"], check=True)
    return library


@pytest.fixture
def fake_nvml(fake_nvml_library: Path, tmp_path: Path) -> FakeNvml:
    return FakeNvml(fake_nvml_library, tmp_path)


@pytest.fixture
def looker(fake_nvml: FakeNvml) -> Iterator[Callable[..., Looker]]:
    started: list[Looker] = []

    def start(*arguments: str, **env: str) -> Looker:
        started.append(Looker({**fake_nvml.env, **env}, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
