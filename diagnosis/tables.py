"""The tables that come with the package: TOML files beside the code that reads them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]


_ROOT: Final = Path(__file__).resolve().parent.parent
"""Not `importlib.resources`: that costs 1.3 MiB, and every small process of ours reads a table when it starts."""


def folder(package: str) -> Path:
    return _ROOT.joinpath(*package.split("."))


def load(package: str, name: str) -> dict[str, Any]:
    """The content of a TOML file of a package."""
    return parse(folder(package).joinpath(name).read_text(encoding="utf-8"))


def parse(text: str) -> dict[str, Any]:
    """The content of a TOML text. Raises ValueError with the line."""
    rows: dict[str, Any] = tomllib.loads(text)
    return rows
