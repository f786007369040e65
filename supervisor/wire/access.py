"""Who may do what at the controller's port: roles, the tokens that carry them, and the role that each command needs.

The job's own token is its owner's and agents', and gives every right. Other tokens are derived from it, one for each
grant, so nothing secret is kept for them (docs/access.md, docs/adr/0053). Does no I/O.
"""

from __future__ import annotations

import hmac
import re
from typing import Final, Literal, NamedTuple, get_args

from diagnosis.incident import RULE_PREFIX
from supervisor.messages import CommandName, CommandRequest

Role = Literal["read", "operate", "admin", "alerts"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
GIVES: Final[dict[Role, frozenset[Role]]] = {
    "read": frozenset({"read"}),
    "operate": frozenset({"read", "operate"}),
    "admin": frozenset({"read", "operate", "admin", "alerts"}),
    "alerts": frozenset({"alerts"}),
}
"""A role -> what its holder may do. `alerts` is Alertmanager's, which can only send its token as it is: whoever sees
that can tell of alerts, and do nothing else."""
COMMANDS: Final[dict[CommandName, Role]] = {
    "pause": "operate",
    "resume": "operate",
    "restart": "operate",
    "stop": "operate",
    "cordon": "operate",
    "uncordon": "operate",
    "mode": "operate",
    "approve": "operate",
    "reject": "operate",
    "rollback": "operate",
    "swap": "operate",
    "trace": "operate",
    "qualify": "operate",
    "correct": "operate",
}
"""What each command needs. One about a rule that a model proposed (`approve RULE`, `reject RULE`) needs `RULES`."""
RULES: Final[Role] = "admin"
DRY_RUN: Final[Role] = "read"
"""What a command would do."""

TOKEN_HEADER: Final = "Unbroken-Token"
"""Of a challenge and of a request: which token signs, where it is not the job's own."""
MUNGE_HEADER: Final = "Unbroken-Munge"
"""Of a challenge: a credential of munge's, which holds the key of this exchange."""
_ID: Final = re.compile(r"[0-9a-f]{8}")
_TOKEN: Final = re.compile(r"(read|operate|admin|alerts)\.([0-9a-f]{8})\.[0-9a-f]{64}")
_MUNGED: Final = re.compile(r"unbroken access ([0-9a-f]{32}) ([0-9a-f]{32}) ([0-9a-f]{64})")


class AccessToken(NamedTuple):
    """What stands in the text of a token that is not the job's own."""

    role: Role
    id: str


def allows(holder: Role, needed: Role) -> bool:
    return needed in GIVES[holder]


def needed_for(command: CommandRequest) -> Role:
    if command.dry_run:
        return DRY_RUN
    if command.command in ("approve", "reject") and command.argument.startswith(RULE_PREFIX):
        return RULES
    return COMMANDS[command.command]


def is_token_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def derived_token(job_token: str, role: Role, token_id: str) -> str:
    """The text of the token of a grant: `ROLE.ID.SECRET`."""
    told = f"unbroken access token {role} {token_id}"
    return f"{role}.{token_id}.{hmac.digest(job_token.encode(), told.encode(), 'sha256').hex()}"


def read_access_token(text: str) -> AccessToken | None:
    """None: it is a job's own token."""
    found = _TOKEN.fullmatch(text)
    return AccessToken(found[1], found[2]) if found is not None else None  # type: ignore[arg-type]


def job_mark(job_token: str) -> str:
    """Tells the job of this token from its owner's others, and nothing about the token."""
    return hmac.digest(job_token.encode(), b"unbroken job", "sha256").hex()[:32]


def munge_payload(job: str, nonce: str, key: str) -> str:
    """What a user has munge sign, for the job's owner alone to read: `job` (its mark) and `nonce` say what for."""
    return f"unbroken access {job} {nonce} {key}"


def munged_key(payload: str, job: str, nonce: str) -> str:
    """The key in a payload that is for this job and challenge; empty where it is for none, or for others."""
    found = _MUNGED.fullmatch(payload.strip())
    meant = found is not None and (found[1], found[2]) == (job, nonce)
    return found[3] if found is not None and meant else ""
