"""Roles, and the tokens that carry them."""

from __future__ import annotations

from typing import get_args

import pytest

from diagnosis.incident import RULE_PREFIX
from supervisor.cli.job_commands import OPERATOR_COMMANDS
from supervisor.controller.routes import ROUTES, is_open, needed
from supervisor.messages import CommandName, CommandRequest
from supervisor.wire import access


def test_every_command_stands_in_the_table() -> None:
    assert set(access.COMMANDS) == set(get_args(CommandName))
    assert {one.name for one in OPERATOR_COMMANDS} <= set(access.COMMANDS)
    assert set(access.COMMANDS.values()) <= set(access.ROLES)


@pytest.mark.parametrize(
    ("holder", "may"),
    [
        ("read", {"read"}),
        ("operate", {"read", "operate"}),
        ("admin", {"read", "operate", "admin", "alerts"}),
        ("alerts", {"alerts"}),
    ],
)
def test_what_each_role_gives(holder: access.Role, may: set[str]) -> None:
    assert {role for role in access.ROLES if access.allows(holder, role)} == may


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (CommandRequest(command="stop"), "operate"),
        (CommandRequest(command="stop", confirm="always"), "operate"),
        (CommandRequest(command="stop", dry_run=True), "read"),
        (CommandRequest(command="approve", argument="i-1"), "operate"),
        (CommandRequest(command="approve", argument=f"{RULE_PREFIX}x"), "admin"),
        (CommandRequest(command="reject", argument=f"{RULE_PREFIX}x"), "admin"),
    ],
)
def test_what_a_command_needs(command: CommandRequest, role: str) -> None:
    assert access.needed_for(command) == role


def test_what_is_open_to_everybody() -> None:
    """Numbers and names, the description, and the first half of a proof: nothing else, and no other method."""
    open_paths = {route.path for route in ROUTES if is_open(route.method, route.path)}
    assert open_paths == {"/healthz", "/metrics", "/v1/challenge", "/v1/openapi.json"}
    assert needed("HEAD", "/healthz") is None
    assert needed("POST", "/healthz") == "admin"
    assert needed("GET", "/v1/../healthz") == "admin"


def test_tokens_are_told_apart() -> None:
    made = access.derived_token("job", "read", "0011aabb")
    assert access.read_access_token(made) == access.AccessToken("read", "0011aabb")
    others = [
        access.derived_token("job", "operate", "0011aabb"),
        access.derived_token("job", "read", "0011aabc"),
        access.derived_token("other", "read", "0011aabb"),
    ]
    assert len({made.rpartition(".")[2], *(one.rpartition(".")[2] for one in others)}) == 4
    for text in ("", "a" * 48, made.upper(), made + "0", made.replace("read", "root"), f" {made}"):
        assert access.read_access_token(text) is None


def test_what_munge_signs_is_for_one_challenge_of_one_job() -> None:
    job, other = access.job_mark("job"), access.job_mark("other")
    payload = access.munge_payload(job, "a" * 32, "b" * 64)
    assert access.munged_key(payload, job, "a" * 32) == "b" * 64
    assert access.munged_key(payload, job, "c" * 32) == ""
    assert access.munged_key(payload, other, "a" * 32) == ""
    assert access.munged_key("order 1", job, "a" * 32) == ""
