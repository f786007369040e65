"""The description of the controller's port: whether it is whole, and whether the port does what it says."""

from __future__ import annotations

import re
from typing import Any, get_args

import msgspec

from supervisor.controller.openapi import ANSWERS, description
from supervisor.controller.routes import ROUTES
from supervisor.messages import CommandName


def test_every_route_is_described_with_its_role() -> None:
    told = description()
    for route in ROUTES:
        operation = told["paths"][route.path][route.method.lower()]
        assert operation["x-role"] == route.needs
        assert bool(operation["security"]) is (route.needs is not None)
        refused = {"401", "403"} if route.needs else set()
        assert refused <= operation["responses"].keys()
    assert sum(map(len, told["paths"].values())) == len(ROUTES)
    assert ANSWERS.keys() <= {route.path for route in ROUTES}
    roles = told["paths"]["/v1/override"]["post"]["x-role-of-command"]
    assert set(get_args(CommandName)) <= roles.keys()


def test_every_reference_leads_somewhere() -> None:
    told = description()
    text = msgspec.json.encode(told).decode()
    names = set(re.findall(r"#/components/schemas/([^\"]+)", text))
    assert names <= told["components"]["schemas"].keys()
    assert len(text) < 200_000


def test_times_are_described_as_they_are_shown() -> None:
    schemas: dict[str, Any] = description()["components"]["schemas"]
    assert schemas["TimelineRow"]["properties"]["at"]["type"] == "string"
    assert "number" not in str(schemas["CheckpointView"]["properties"]["modified_at"])
