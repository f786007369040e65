"""Tables of cases: `test_x.toml` beside `test_x.py`, for tests with many lines of logs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NONE = "~"
"""Stands for None, which TOML lacks."""


def read(test_file: str) -> dict[str, Any]:
    """What is beside a test file."""
    return tomllib.loads(Path(test_file).with_suffix(".toml").read_text(encoding="utf-8"))


def table(test_file: str) -> dict[str, list[Any]]:
    """The tables beside a test file; each row is a tuple for `parametrize`."""
    return {name: [_plain(row) for row in rows] for name, rows in read(test_file).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_plain(one) for one in value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return None if value == NONE else value
