"""The tables that come with the package: TOML files beside the code that reads them."""

from __future__ import annotations

import importlib.resources
import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]


def load(package: str, name: str) -> dict[str, Any]:
    """The content of a TOML file of a package."""
    return parse(importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8"))


def parse(text: str) -> dict[str, Any]:
    """The content of a TOML text. Raises ValueError with the line."""
    rows: dict[str, Any] = tomllib.loads(text)
    return rows
