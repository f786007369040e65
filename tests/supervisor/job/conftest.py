"""A job that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def running(make_driver: Any) -> Callable[..., Any]:
    """Names of nodes, and what is to be special about the job -> one that runs on them and needs them all."""

    def start(*names: str, step: int | None = 1, **more: Any) -> Any:
        driver = make_driver(**{"nodes_min": len(names), "nodes_max": len(names), **more})
        driver.join(*names)
        driver.up(step)
        return driver

    return start
