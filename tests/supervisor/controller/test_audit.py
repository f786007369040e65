"""Who an order is said to come from: what is proven, whatever the client says of itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.controller.client import ControllerClient
from supervisor.controller.server import given_by
from supervisor.messages import OperatorCommand
from supervisor.wire import authentication


def test_what_is_proven_is_named_and_what_is_said_is_said() -> None:
    assert given_by(0, "unix", "mallory@login") == "root (uid 0)"
    assert given_by(4_000_000, "unix", "") == "uid 4000000"
    said = given_by(None, "10.0.0.7", "ann@login\x1b[31m" + "x" * 1000)
    assert said.startswith("holder of the token at 10.0.0.7, says ann@login")
    assert len(said) <= 100
    assert said.isprintable()


def order(rig: Any, client: Callable[[str], ControllerClient]) -> OperatorCommand:
    """As the journal has it."""

    async def scenario() -> None:
        async with rig.controller() as running:
            assert (await rig.ask_by(client(running.address), "restart"))["ok"]

    rig.go(scenario())
    (event,) = rig.journalled(OperatorCommand)
    assert isinstance(event, OperatorCommand)
    return event


def test_by_the_network_only_the_token_is_proven(rig: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no munge
    event = order(rig, lambda address: ControllerClient(address, "secret"))
    assert (event.uid, event.by) == (None, "holder of the token at 127.0.0.1, says me")


def test_by_the_unix_socket_the_kernel_tells(rig: Any) -> None:
    process = rig.start()
    assert process.address
    told = ControllerClient.of_job(rig.job_dir).command(
        OperatorCommand(at=0.0, command="pause", reason="because", by="mallory@login")
    )
    assert told["ok"]
    pause = process.status()["pause"]
    (event,) = rig.journalled(OperatorCommand)
    assert (event.uid, event.by) == (os.getuid(), pause["by"])
    assert pause["by"].endswith(f"(uid {os.getuid()})")


@pytest.fixture
def munged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real one, and programs that ask it."""
    for program in ("munged", "munge", "unmunge"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            pytest.skip("munge is not installed")
    key = tmp_path / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {name: tmp_path / name for name in ("socket", "pid-file", "log-file", "seed-file")}
    options = [f"--{name}={path}" for name, path in files.items()]
    daemon = subprocess.Popen(
        [
            shutil.which("munged", path="/usr/sbin:/sbin") or "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            *options,
        ],
        stderr=subprocess.DEVNULL,
    )
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("munge", "unmunge"):
        (programs / name).write_text(f'#!/bin/sh\nexec {shutil.which(name)} --socket={files["socket"]} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    deadline = time.monotonic() + 60
    while not authentication.munge_credential("ready", 30.0):
        assert time.monotonic() < deadline
        assert daemon.poll() is None
        time.sleep(0.05)
    yield programs
    daemon.terminate()
    daemon.wait(30)


@pytest.mark.usefixtures("munged")
def test_a_credential_is_good_once_and_for_its_order_alone() -> None:
    credential = authentication.munge_credential("order 1", 30.0)
    assert authentication.munge_user(credential, "order 2", 30.0) is None
    fresh = authentication.munge_credential("order 1", 30.0)
    assert authentication.munge_user(fresh, "order 1", 30.0) == os.getuid()
    assert authentication.munge_user(fresh, "order 1", 30.0) is None, "replayed"
    for odd in ("", "MUNGE:nonsense:", "x" * 10_000):
        assert authentication.munge_user(odd, "order 1", 30.0) is None


@pytest.mark.usefixtures("munged")
def test_by_munge_a_user_of_the_cluster_is_proven(rig: Any) -> None:
    event = order(rig, lambda address: ControllerClient(address, "secret"))
    assert event.uid == os.getuid()
    assert event.by.endswith(f"(uid {os.getuid()})")
