"""The OpenAPI description of the controller's port, from the table of routes and the types of bodies and answers.

It is read from the types that the program itself makes its answers of, so it cannot say something else.
"""

from __future__ import annotations

from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, Literal

import msgspec

from supervisor.controller.alerts import AlertsPosted
from supervisor.controller.report import TIMES
from supervisor.controller.routes import ALERTS_PATH, ROUTES, Route
from supervisor.job.advice import JobAdvice
from supervisor.messages import PROTOCOL, CommandRequest
from supervisor.view import CurveView, IncidentView, JobView
from supervisor.wire.access import COMMANDS, DRY_RUN, RULES, TOKEN_HEADER
from supervisor.wire.authentication import AGENT_PATH, CHALLENGE_HEADER, CHALLENGE_PATH, PROOF_HEADER


class ErrorAnswer(msgspec.Struct, kw_only=True):
    schema: Literal[1]
    error: str
    """What happened, and what to do, for a person."""


class HealthAnswer(msgspec.Struct, kw_only=True):
    schema: Literal[1]
    ok: bool
    epoch: int
    journal: str


class ChallengeAnswer(msgspec.Struct, kw_only=True):
    schema: Literal[1]
    protocol: int
    epoch: int
    nonce: str
    proof: str


class BriefIncident(msgspec.Struct, kw_only=True):
    id: str
    opened_at: str
    open: bool
    failure_class: str | None
    why: str


class StatusAnswer(JobView, kw_only=True, frozen=True):
    incidents: tuple[BriefIncident, ...]  # type: ignore[assignment]
    controller: dict[str, Any] | None
    advice: dict[str, Any] | None


class IncidentsAnswer(msgspec.Struct, kw_only=True):
    schema: Literal[1]
    job: str
    total: int
    incidents: tuple[IncidentView, ...]


class CurveAnswer(CurveView, kw_only=True, frozen=True):
    schema: Literal[1]
    job: str


class AdviceAnswer(JobAdvice, kw_only=True, frozen=True):
    schema: Literal[1]
    job: str


class TimelineRow(msgspec.Struct, kw_only=True):
    seq: int
    at: str
    epoch: int
    kind: str
    text: str
    incident: str
    loud: bool
    detail: bool


class TimelineAnswer(msgspec.Struct, kw_only=True):
    schema: Literal[1]
    rows: tuple[TimelineRow, ...]


class CommandAnswer(msgspec.Struct, kw_only=True):
    """`notes` of what was done; or `would` of what was not, which a dry run asks, and a command that interrupts."""

    schema: Literal[1]
    ok: bool = True
    notes: tuple[str, ...] = ()
    unknown_node: bool = False
    would: str = ""
    confirm: bool = False


class AskAnswer(msgspec.Struct, kw_only=True):
    schema: Literal[1]
    ok: bool
    incident: str


ANSWERS: Final[dict[str, type]] = {
    "/healthz": HealthAnswer,
    CHALLENGE_PATH: ChallengeAnswer,
    "/v1/status": StatusAnswer,
    "/v1/incidents": IncidentsAnswer,
    "/v1/curve": CurveAnswer,
    "/v1/advice": AdviceAnswer,
    "/v1/timeline": TimelineAnswer,
    "/v1/override": CommandAnswer,
    "/v1/ask": AskAnswer,
    ALERTS_PATH: AlertsPosted,
}
"""Path -> its answer; the others' is not JSON of ours."""


def description() -> dict[str, Any]:
    """As JSON types."""
    kinds = [*ANSWERS.values(), *(route.body for route in ROUTES if route.body is not None)]
    _, components = msgspec.json.schema_components([*kinds, ErrorAnswer], ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "unbroken: the controller of one job",
            "version": _version(),
            "description": "Requests and answers are signed; the token is never sent (docs/protocol.md, Proof). "
            "The one exception is a token of role `alerts`, which Alertmanager sends as a bearer token.",
        },
        "paths": paths,
        "components": {
            "schemas": {name: _as_shown(schema) for name, schema in components.items()},
            "securitySchemes": {
                "proof": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "Authorization",
                    "description": f"`Unbroken C.S.R` of protocol {PROTOCOL}, after GET {CHALLENGE_PATH}; with "
                    f"`{TOKEN_HEADER}: ID` where the token is not the job's own. The answer has `{PROOF_HEADER}`.",
                },
                "alerts": {"type": "http", "scheme": "bearer", "description": "A token of role `alerts`."},
            },
        },
    }


def _version() -> str:
    try:
        return version("unbroken")
    except PackageNotFoundError:
        return "unknown"


def _operation(route: Route) -> dict[str, Any]:
    statuses = [*route.refusals, *((401, 403) if route.needs else ())]
    answer: dict[str, Any] = {"description": "OK"}
    if route.path in ANSWERS:
        answer["content"] = _json_of(ANSWERS[route.path])
    answers = {"101" if route.path == AGENT_PATH else "200": answer}
    answers |= {str(status): _refusal(status) for status in sorted(statuses)}
    if route.path == "/healthz":
        answers["503"] = {**answer, "description": "The journal cannot be written"}
    shown: dict[str, Any] = {
        "operationId": route.path.strip("/").replace("/", "_").replace(".", "_"),
        "summary": route.what,
        "x-role": route.needs,
        "security": [],
        "responses": answers,
    }
    if route.needs:
        shown["security"] = [{"proof": []}, *([{"alerts": []}] if route.needs == "alerts" else [])]
    if route.body is not None:
        shown["requestBody"] = {"required": True, "content": _json_of(route.body)}
    if route.body is CommandRequest:
        shown["x-role-of-command"] = {**COMMANDS, "approve RULE, reject RULE": RULES, "dry_run": DRY_RUN}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()
    ]
    if route.path == CHALLENGE_PATH:
        nonce = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
        parameters.append({"name": CHALLENGE_HEADER, "in": "header", "required": True, "schema": nonce})
    return {**shown, "parameters": parameters} if parameters else shown


def _json_of(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


def _refusal(status: int) -> dict[str, Any]:
    return {"description": HTTPStatus(status).phrase, "content": _json_of(ErrorAnswer)}


def _as_shown(schema: dict[str, Any]) -> dict[str, Any]:
    """Of times that the core has as numbers: they are told as `2026-01-31T12:00:00.123Z`."""
    for name, one in schema.get("properties", {}).items():
        kinds = one.get("anyOf", [one])
        if name in TIMES and {"type": "number"} in [{"type": each.get("type")} for each in kinds]:
            schema["properties"][name] = {"type": ["string", "null"], "format": "date-time"}
    return schema
