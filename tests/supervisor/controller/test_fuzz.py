"""The controller's port is asked what its own description allows, and much that it does not: by schemathesis."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import psutil
import pytest

from supervisor.controller import access
from supervisor.controller.client import ControllerClient
from supervisor.wire.access import Role, derived_token
from supervisor.wire.authentication import CHALLENGE_HEADER, CHALLENGE_PATH, SharedSecret, exchange_of, new_nonce

GROWTH = 48 << 20
"""Bytes of memory that the controller may need more in the end."""
EXAMPLES = 12
"""For each route and each kind of sender, as described and not."""
CALM = {"command": "pause"}
"""In place of commands that would end the job."""


class Signed:
    """Signs each request of `requests` with a token, as our own client does."""

    def __init__(self, address: str, token: str, token_id: str = "") -> None:
        self.address, self.secret, self.id = address, SharedSecret(token), token_id

    def __call__(self, request: Any) -> Any:
        import requests

        nonce, extra = new_nonce(), {"Unbroken-Token": self.id} if self.id else {}
        told = requests.get(f"{self.address}{CHALLENGE_PATH}", headers={CHALLENGE_HEADER: nonce, **extra}, timeout=30)
        exchange = exchange_of(told.json(), nonce, self.secret)
        body = request.body or b""
        body = body.encode() if isinstance(body, str) else body
        signed = self.secret.authorization(exchange, request.method, request.path_url, body)
        request.headers.update({"Authorization": signed, **extra})
        return request


class Bearer:
    def __init__(self, token: str) -> None:
        self.token = token

    def __call__(self, request: Any) -> Any:
        request.headers["Authorization"] = f"Bearer {self.token}"
        return request


def nobody(request: Any) -> Any:
    return request


def grant(job_dir: Path, role: Role, number: int) -> tuple[str, str]:
    made = access.Grant(id=f"{number:08x}", role=role)
    access.add_grant(job_dir, made)
    return derived_token((job_dir / "token").read_text().strip(), role, made.id), made.id


def cases(operation: Any) -> list[Any]:
    """What schemathesis makes of the description of one route: as described, and not."""
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import GenerationMode

    made: list[Any] = []
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def keep(case: Any) -> None:
            if isinstance(case.body, dict) and case.body.get("command") == "stop":
                case.body |= CALM
            made.append(case)

        if mode is GenerationMode.POSITIVE or operation.body or operation.query:
            keep()
    return made


@pytest.mark.slow
def test_nothing_that_is_asked_breaks_the_controller(rig: Any) -> None:
    """No status of 500 and more, answers as described, bounded memory; and nobody gets in whom no token lets in."""
    schemathesis = pytest.importorskip("schemathesis")
    import requests

    process = rig.start()
    address = process.address
    owner = (rig.job_dir / "token").read_text().strip()
    tokens = {role: grant(rig.job_dir, role, number) for number, role in enumerate(("read", "operate", "alerts"), 1)}
    schema = schemathesis.openapi.from_dict(requests.get(f"{address}/v1/openapi.json", timeout=30).json())
    senders = {
        "nobody": nobody,
        "wrong": Bearer(secrets.token_hex(24)),
        "alerts": Bearer(tokens["alerts"][0]),
        "read": Signed(address, *tokens["read"]),
        "operate": Signed(address, *tokens["operate"]),
        "owner": Signed(address, owner),
    }
    before, seen = psutil.Process(process.popen.pid).memory_info().rss, set[tuple[str, int]]()
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path == "/v1/agent":
            continue
        needs, asked = operation.definition.raw["x-role"], cases(operation)
        for who, sender in senders.items():
            for case in asked:
                answer = case.call(base_url=address, auth=sender, timeout=30)
                seen.add((who, answer.status_code))
                assert answer.status_code < 500, (who, case.path, answer.text[:200])
                if needs and who in ("nobody", "wrong"):
                    assert answer.status_code == 401, (who, case.path)
                if answer.status_code == 200 and answer.headers.get("Content-Type", "").startswith("application/json"):
                    case.validate_response(answer, checks=[schemathesis.checks.response_schema_conformance])
                else:
                    assert len(answer.content) < 1 << 20
    assert {("nobody", 401), ("wrong", 401), ("alerts", 401), ("read", 403), ("owner", 200)} <= seen
    for _ in range(20):
        big = requests.post(f"{address}/v1/override", b"x" * (1 << 20), auth=senders["owner"], timeout=30)
        assert big.status_code == 413
    assert process.popen.poll() is None
    assert psutil.Process(process.popen.pid).memory_info().rss - before < GROWTH
    assert ControllerClient(address, owner).get("/v1/status")["schema"] == 1
    assert os.path.exists(rig.job_dir / "controller.json")
