"""`unbroken check --release-gpus 10m`: an operator wants the GPUs for a while (a reset, MIG, a driver).

Each agent of the node is asked on its socket, and answers when nothing of it has a GPU open.
"""

from __future__ import annotations

import getpass
import glob
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from typing import Any, Final

import click
import msgspec

from diagnosis.signals import clean_text
from supervisor.node_health.release import LONGEST_RELEASE_S, GpuRelease

ANSWER_S: Final = 40.0
SOCKETS_ASKED: Final = 200
ANSWER_BYTES: Final = 4096
_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600}


def seconds_of(text: str) -> float:
    """`90`, `90s`, `10m`, `2h`. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,6})([smh]?)", text.strip())
    if match is None:
        raise ValueError("a time is wanted, as 90s, 10m or 2h; 0 takes the GPUs back")
    return min(float(int(match[1]) * _UNITS[match[2]]), LONGEST_RELEASE_S)


def sockets(local_dir: str) -> list[str]:
    """The sockets of the agents that we may ask: our own, for root everybody's."""
    return list(dict.fromkeys(one for folder in _folders(local_dir) for one in _below(folder)))[:SOCKETS_ASKED]


def _folders(local_dir: str) -> Iterator[str]:
    if local_dir:
        yield local_dir
        return
    uid = os.getuid()
    named = os.environ.get("UNBROKEN_LOCAL_DIR", "")
    yield from ([named] if named else [])
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        yield from sorted(glob.glob(f"{glob.escape(base)}/unbroken-{'*' if uid == 0 else uid}"))


def _below(folder: str) -> list[str]:
    base = glob.escape(folder)
    found = [f"{folder}/agent.sock", *sorted(glob.glob(f"{base}/*/*/agent.sock"))]
    return [one for one in found if os.path.exists(one)]


def ask(path: str, seconds: float) -> dict[str, Any]:
    """The agent's answer; empty where none is there (an agent that has ended leaves its socket). Raises OSError and
    ValueError.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(ANSWER_S)
        try:
            client.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return {}
        request = {"op": "release_gpus", "seconds": seconds, "by": getpass.getuser()}
        client.sendall(msgspec.json.encode(request) + b"\n")
        answer = b""
        while not answer.endswith(b"\n") and len(answer) < ANSWER_BYTES:
            piece = client.recv(ANSWER_BYTES)
            if not piece:
                raise ValueError("it gave no answer; is it an older one?")
            answer += piece
    return msgspec.json.decode(answer, type=dict[str, Any])


def main(duration: str, local_dir: str) -> int:
    """The command: 0 when nothing of ours has a GPU open on this node, 1 when something has, or may have."""
    try:
        seconds = seconds_of(duration)
    except ValueError as error:
        click.echo(f"unbroken: {error}", err=True)
        return 2
    asked, failed = 0, 0
    for path in sockets(local_dir):
        where = clean_text(os.path.dirname(path), 300)
        try:
            answer = ask(path, seconds)
        except TimeoutError:
            answer = {"error": f"the agent gave no answer in {ANSWER_S:g} s; it may still do it"}
        except (OSError, ValueError) as error:
            answer = {"error": str(error) or "no answer"}
        if not answer:
            continue
        asked += 1
        failed += "error" in answer
        click.echo(_line(where, answer), err="error" in answer)
    if not asked:
        click.echo(
            "no agent that we may ask runs here" + ("" if os.getuid() == 0 else ": those of others only root may")
        )
    return 1 if failed else 0


def _line(where: str, answer: dict[str, Any]) -> str:
    if "error" in answer:
        return f"unbroken: {where}: {clean_text(str(answer['error']), 300)}"
    until = answer.get("until")
    if not isinstance(until, (int, float)) or not 0 < until < 1e11:
        return f"{where}: the GPUs are watched again"
    return f"{where}: the GPUs are released until {GpuRelease(until=float(until)).clock}"
