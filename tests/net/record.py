"""Make new recordings: `python -m tests.net.record simulations`, `transcripts`, or `job NAME FOLDER [OLD=NEW ...]`.

Recordings are kept, not made again: to write what the job decides on them now, `pytest tests/net --rewrite`.
"""

from __future__ import annotations

import lzma
import re
import shutil
import socket
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import msgspec

from . import adapter
from .golden import FOLDER, write_lines
from .replay import record

JOURNALS = FOLDER / "journals"
RECORDED = {"verdicts": "recorded"}


# ----- simulations -----

SEEDS = {"recovers": range(1000, 1070), "ends": range(1000, 1060), "meddled": range(2000, 2070)}


def simulations() -> None:
    """Two hundred seeds of tests/sim, each to its end."""
    from tests.sim import test_sim
    from tests.sim.conftest import World

    for kind, seeds in SEEDS.items():
        for seed in seeds:
            made: list[Any] = []

            def world(*given: Any, made: list[Any] = made, **how: Any) -> Any:
                made.append(World(*given, **how))
                return made[-1]

            nodes, spares = 2 + seed % 5, seed % 3
            if kind == "recovers":
                test_sim._recovers(world, seed, nodes=nodes, spares=spares, nodes_min=max(2, nodes - seed % 2))
            elif kind == "ends":
                mode = ("enforce", "recommend")[seed % 2]
                test_sim._ends(world, seed, nodes=nodes, spares=spares, max_restarts=5, mode=mode)
            else:
                test_sim._meddled(world, seed, nodes=2 + seed % 4, spares=seed % 3)
            (simulated,) = made
            events = [_rounded(as_json(event)) for event in simulated.journal]
            lines = record(RECORDED, events, lambda _, incident, w=simulated: as_json(w.conclude(incident)))
            write_lines(JOURNALS / "simulated" / f"{kind}-{seed}.jsonl.xz", lines)


def _rounded(value: Any) -> Any:
    """Times to the millisecond, which takes a third less space."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return {key: _rounded(one) for key, one in value.items()} if isinstance(value, dict) else value


def as_json(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


# ----- transcripts -----


def transcripts() -> None:
    from tests.transcripts.test_transcripts import FOLDER as SCRIPTS
    from tests.transcripts.test_transcripts import Script

    for path in sorted(SCRIPTS.glob("*.txt")):
        script, verdicts, told = Script(), [], Script.tell

        def tell(event: Any, script: Any = script, verdicts: list[Any] = verdicts, told: Any = told) -> None:
            verdicts.append(as_json(script.verdict))
            told(script, event)

        script.tell = tell  # type: ignore[method-assign]
        for line in path.read_text().splitlines():
            if line.startswith("> "):
                script.line(line[2:])
        events = [as_json(event) for event in script.journal]
        lines = record(RECORDED, events, lambda number, _, verdicts=verdicts: verdicts[number])
        write_lines(JOURNALS / "transcripts" / f"{path.stem}.jsonl.xz", lines)


# ----- real runs -----

_CRC = b',"crc32":'


def job(name: str, folder: str, *replaced: str) -> None:
    """The journals of a job folder as they are, and what the job decides on their events now."""
    pairs = [pair.split("=", 1) for pair in replaced] + [[rf"\b{re.escape(socket.gethostname())}\b", "host-1"]]
    target = JOURNALS / "runs" / name
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as copy:
        for path in sorted(Path(folder).glob("journal.*.jsonl*")):
            content = b"".join(_cleaned(line, pairs) for line in path.read_bytes().splitlines(keepends=True))
            target.mkdir(parents=True, exist_ok=True)
            (target / f"{path.name}.xz").write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
            (Path(copy) / path.name).write_bytes(content)
        steps = list(adapter.journal_steps(Path(copy)))
    lines = record({"verdicts": "by the diagnosis"}, [event for event, _, _ in steps])
    write_lines(target / "decisions.jsonl.xz", lines)
    print(f"{name}: {len(steps)} events")


def _cleaned(line: bytes, pairs: list[list[str]]) -> bytes:
    """A record without names of this machine, with the checksum that belongs to it; a torn one as it is."""
    head, found, rest = line.rpartition(_CRC)
    if not found:
        head, rest = line, b""
    was = zlib.crc32(head)
    text = head.decode(errors="surrogateescape")
    for old, new in pairs:
        text = re.sub(old, new, text)
    head = text.encode(errors="surrogateescape")
    if found and rest.rstrip(b"}\n") == b"%d" % was:
        rest = b"%d}\n" % zlib.crc32(head)
    return head + found + rest


if __name__ == "__main__":
    {"simulations": simulations, "transcripts": transcripts, "job": job}[sys.argv[1]](*sys.argv[2:])
