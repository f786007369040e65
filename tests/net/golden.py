"""Golden files of the net: how they are written, and how a difference from one is shown."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SENTENCE = "(text)"
"""Stands for a sentence, which is compared apart."""
SHOWN = 12


def read_lines(path: Path) -> list[Any]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_lines(path: Path, lines: list[Any]) -> None:
    """The same bytes for the same lines."""
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def split(value: Any, sentences: list[str]) -> Any:
    """`value` with each string of several words taken out of it, and added to `sentences`."""
    if isinstance(value, str) and " " in value:
        sentences.append(value)
        return SENTENCE
    if isinstance(value, list):
        return [split(one, sentences) for one in value]
    if isinstance(value, dict):
        return {key: split(one, sentences) for key, one in value.items()}
    return value


def differences(expected: Any, got: Any, path: str = "") -> Iterator[str]:
    """Where two JSON values differ, one line each."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in [*expected, *(key for key in got if key not in expected)]:
            where = f"{path}.{key}" if path else key
            if key not in got:
                yield f"{where}: expected {_short(expected[key])}, got nothing"
            elif key not in expected:
                yield f"{where}: expected nothing, got {_short(got[key])}"
            else:
                yield from differences(expected[key], got[key], where)
    elif isinstance(expected, list) and isinstance(got, list):
        for number in range(max(len(expected), len(got))):
            where = f"{path}[{number}]"
            if number >= len(got):
                yield f"{where}: expected {_short(expected[number])}, got nothing"
            elif number >= len(expected):
                yield f"{where}: expected nothing, got {_short(got[number])}"
            else:
                yield from differences(expected[number], got[number], where)
    elif expected != got:
        yield f"{path}: expected {_short(expected)}, got {_short(got)}"


def shown(title: str, expected: Any, got: Any) -> str:
    """The report of a difference; empty if there is none."""
    found = list(differences(expected, got))
    if not found:
        return ""
    more = [f"... and {len(found) - SHOWN} more differences"] if len(found) > SHOWN else []
    return "\n  ".join([title, *found[:SHOWN], *more])


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 400 else f"{text[:400]}... ({len(text)} characters)"
