"""What can be asked at the controller's port: one table, from which the server is built and OpenAPI described. Pure."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import msgspec

from supervisor.controller.alerts import Webhook
from supervisor.messages import CommandRequest
from supervisor.wire.access import Role
from supervisor.wire.authentication import AGENT_PATH, CHALLENGE_PATH


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/ask."""

    incident: str


class Route(NamedTuple):
    method: Literal["GET", "POST"]
    path: str
    needs: Role | None
    """The role; None: it is answered to everybody."""
    what: str
    body: type | None = None
    refusals: tuple[int, ...] = ()
    """Statuses of an answer with an `error`, besides 401 and 403 where a role is needed."""
    query: dict[str, dict[str, Any]] = {}


OPENAPI_PATH: Final = "/v1/openapi.json"
ALERTS_PATH: Final = "/v1/alerts"
METRICS_PATH: Final = "/metrics"
COMMAND_PATH: Final = "/v1/override"
ROUTES: Final = (
    Route("GET", "/healthz", None, "Whether the controller can write its journal; 503 while not"),
    Route("GET", METRICS_PATH, None, "Prometheus' text format or OpenMetrics", refusals=(503,)),
    Route("GET", CHALLENGE_PATH, None, "The first half of a proof", refusals=(400, 403, 429)),
    Route("GET", OPENAPI_PATH, None, "This description"),
    Route("GET", AGENT_PATH, "admin", "The WebSocket of agents, for the job's own token", refusals=(426,)),
    Route("GET", "/v1/status", "read", "What `unbroken status --json` prints"),
    Route("GET", "/v1/incidents", "read", "What `unbroken incidents --json` prints"),
    Route("GET", "/v1/curve", "read", "Steps and loss of the whole job"),
    Route("GET", "/v1/advice", "read", "What `unbroken advise --json` prints"),
    Route(
        "GET",
        "/v1/timeline",
        "read",
        "What `unbroken timeline --json` prints",
        refusals=(400,),
        query={"since": {"type": "integer", "minimum": 0, "description": "Only rows after this record"}},
    ),
    Route("POST", COMMAND_PATH, "read", "An operator's command", CommandRequest, (400, 413, 504)),
    Route("POST", "/v1/ask", "operate", "Have the language model asked about an incident", Ask, (400, 413)),
    Route("POST", ALERTS_PATH, "alerts", "Alertmanager's webhook, version 4", Webhook, (400, 404, 413, 429, 503)),
)
"""Of a command the role is looked up by its name as well: `supervisor.wire.access`."""


def needed(method: str, path: str) -> Role | None:
    """The role for a request; `admin` for what there is no route for, which is answered by 404."""
    asked = "GET" if method == "HEAD" else method
    found = next((one for one in ROUTES if (one.method, one.path) == (asked, path)), None)
    return found.needs if found is not None else "admin"


def is_open(method: str, path: str) -> bool:
    return needed(method, path) is None
