"""Grants of rights below the job owner's: files in the job folder, and what the controller makes of them.

A grant is a file `access/ID.json` that only the job's owner can write or read (mode 0600, folder 0700). It gives a role
to a token, whose text is derived from the job's (so the file holds no secret), or to users whom munge proves. It holds
until its file is renamed: `unbroken token --withdraw ID`. Where the grants cannot be read, none of them counts; the
job's own token needs no file and is never held up (docs/access.md, docs/adr/0053).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from supervisor.blocking import timeout
from supervisor.errors import AccessRefused
from supervisor.files import read_own
from supervisor.wire.access import (
    MUNGE_HEADER,
    TOKEN_HEADER,
    Role,
    derived_token,
    is_token_id,
    job_mark,
    munged_key,
    read_access_token,
)
from supervisor.wire.authentication import (
    NONCE_S,
    Authenticator,
    Exchange,
    SharedSecret,
    equal,
    munge_decoded,
    server_nonce_of,
)
from supervisor.wire.peers import not_private, own_users

FOLDER: Final = "access"
MOST_GRANTS: Final = 256
GRANT_BYTES: Final = 4096
FRESH_S: Final = 1.0
"""So long after a withdrawal its token may still be taken."""
READ_S: Final = 2.0
MUNGE_S: Final = 2.0
"""Munge has this long to say who made a credential; after that, nobody has."""
DECODED_AT_ONCE: Final = 2
EXCHANGES_KEPT: Final = 256
"""Of users proven by munge, between their challenge and their request,"""
OF_ONE_USER: Final = 16
"""and of one of them."""


class Grant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file of the folder."""

    id: str
    role: Role
    name: str = ""
    """What or whom it is for, in words."""
    uid: int | None = None
    """It is no token, but for this user, proven by munge."""
    anybody: bool = False
    """It is no token, but for every user whom munge proves."""
    made_at: float = 0.0

    @property
    def is_token(self) -> bool:
        return self.uid is None and not self.anybody


class HeldRights(NamedTuple):
    """Who is let in."""

    role: Role
    words: str = ""
    """What he has shown, beside the job's own token."""
    uid: int | None = None
    """Proven by munge."""


OWNER: Final = HeldRights("admin")
"""Whoever knows the job's own token: its owner, and its agents."""


class Admitted(NamedTuple):
    exchange: Exchange
    secret: SharedSecret
    """Signs the answer."""
    rights: HeldRights


# ----- the files -----


def read_grants(job_dir: Path) -> dict[str, Grant]:
    """By id; what is no grant of ours is left out. Raises OSError where others could have put something there."""
    folder = job_dir / FOLDER
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return {}
    if problem := not_private(folder, own_users() | {os.stat(job_dir).st_uid}):
        raise PermissionError(1, problem)
    found: dict[str, Grant] = {}
    for name in names:
        stem, _, kind = name.partition(".")
        if kind != "json" or not is_token_id(stem) or len(found) == MOST_GRANTS:
            continue
        with contextlib.suppress(OSError, msgspec.DecodeError):
            grant = msgspec.json.decode(read_own(folder / name, GRANT_BYTES), type=Grant)
            if grant.id == stem:
                found[stem] = grant
    return found


def add_grant(job_dir: Path, grant: Grant) -> None:
    """Raises OSError."""
    folder = job_dir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    if problem := not_private(folder, own_users() | {os.stat(job_dir).st_uid}):
        raise PermissionError(1, problem)
    if len(read_grants(job_dir)) >= MOST_GRANTS:
        raise OSError(f"there are {MOST_GRANTS} grants already: withdraw those that nobody needs")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    path = folder / f"{grant.id}.json"
    temporary = folder / f".{grant.id}"
    with open(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(msgspec.json.encode(grant) + b"\n")
    os.rename(temporary, path)


def withdraw_grant(job_dir: Path, grant_id: str) -> bool:
    """It does not count from now on; its file stays, under another name. False: there is none. Raises OSError."""
    path = job_dir / FOLDER / f"{grant_id}.json"
    try:
        os.rename(path, path.with_suffix(".withdrawn"))
    except FileNotFoundError:
        return False
    return True


class GrantReader:
    """The grants as they are now, or a moment ago. One thread reads at a time: the file system may hang."""

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = job_dir
        self._known: tuple[float, dict[str, Grant]] = (float("-inf"), {})
        self._reading: asyncio.Task[None] | None = None

    async def now(self) -> dict[str, Grant]:
        """Raises AccessRefused."""
        asked = time.monotonic()
        try:
            async with timeout(READ_S):
                while asked - self._known[0] > FRESH_S:  # one that others wait for may have begun too long ago
                    if self._reading is None or self._reading.done():
                        self._reading = asyncio.create_task(self._read())
                    await asyncio.shield(self._reading)
        except asyncio.TimeoutError:
            raise AccessRefused(403, "the job folder does not answer: only the job's own token counts") from None
        except OSError as error:
            why = f"the grants of this job cannot be used: {error.strerror or error}: only the job's own token counts"
            raise AccessRefused(403, why) from None
        return self._known[1]

    async def _read(self) -> None:
        begun = time.monotonic()
        self._known = begun, await asyncio.to_thread(read_grants, self._job_dir)


# ----- who is let in -----


class Access:
    """Answers challenges and admits requests, for all tokens of a job and for users whom munge proves."""

    def __init__(self, token: str, epoch: int, job_dir: Path) -> None:
        self.authenticator = Authenticator(token, epoch)
        self._token, self._job = token, job_mark(token)
        self._grants = GrantReader(job_dir)
        self._munged: dict[str, tuple[SharedSecret, HeldRights, float]] = {}
        """The controller's nonce -> what was proven with its challenge, and until when that is kept."""
        self._decoding = 0

    async def challenge(self, client: str, headers: Mapping[str, str], now: float) -> dict[str, object]:
        """The answer to a challenge with this nonce. Raises AccessRefused."""
        if credential := headers.get(MUNGE_HEADER):
            secret, rights = await self._by_munge(credential, client, now)
            answer = self.authenticator.answer(client, now, secret)
            self._munged[str(answer["nonce"])] = secret, rights, now + NONCE_S
            return answer
        if token_id := headers.get(TOKEN_HEADER):
            return self.authenticator.answer(client, now, (await self._by_token(token_id))[0])
        return self.authenticator.answer(client, now)

    async def admit(
        self, headers: Mapping[str, str], method: str, target: str, body: bytes, now: float
    ) -> Admitted | None:
        """None: it is not signed by anybody who may come in. Raises AccessRefused."""
        given, secret, rights = headers.get("Authorization", ""), self.authenticator.secret, OWNER
        if token_id := headers.get(TOKEN_HEADER):
            secret, rights = await self._by_token(token_id)
        elif (proven := self._munged.get(server_nonce_of(given))) is not None:
            secret, rights, _ = proven
        exchange = self.authenticator.admit(given, method, target, body, now, secret)
        if exchange is None:
            return None
        self._munged.pop(exchange.server, None)
        return Admitted(exchange, secret, rights)

    async def bearer(self, text: str) -> HeldRights | None:
        """Of a token that is sent as it is: only one for alerts may be. None: it is none. Raises AccessRefused."""
        told = read_access_token(text)
        if told is None or told.role != "alerts":
            return None
        if not equal(text, derived_token(self._token, told.role, told.id)):
            return None
        return (await self._by_token(told.id))[1]

    async def _by_token(self, token_id: str) -> tuple[SharedSecret, HeldRights]:
        grant = (await self._grants.now()).get(token_id)
        if grant is None or not grant.is_token:
            raise AccessRefused(403, "this token is not one of this job's, or was withdrawn")
        words = f"{grant.role} token {grant.id}{f' ({grant.name})' if grant.name else ''}"
        return SharedSecret(derived_token(self._token, grant.role, grant.id)), HeldRights(grant.role, words)

    async def _by_munge(self, credential: str, client: str, now: float) -> tuple[SharedSecret, HeldRights]:
        for nonce in [nonce for nonce, (_, _, until) in self._munged.items() if until <= now]:
            del self._munged[nonce]
        if self._decoding >= DECODED_AT_ONCE or len(self._munged) >= EXCHANGES_KEPT:
            raise AccessRefused(429, "too many users prove themselves by munge at once: try again")
        self._decoding += 1
        try:
            found = await asyncio.to_thread(munge_decoded, credential, MUNGE_S)
        finally:
            self._decoding -= 1
        key = munged_key(found[1], self._job, client) if found is not None else ""
        if found is None or not key:
            raise AccessRefused(
                403, "munge does not vouch for this credential: it is old, used, or for another user or job"
            )
        role = await self._role_of(found[0])
        if sum(rights.uid == found[0] for _, rights, _ in self._munged.values()) >= OF_ONE_USER:
            raise AccessRefused(429, f"user {found[0]} has {OF_ONE_USER} challenges open: try again later")
        return SharedSecret(key), HeldRights(role, f"{role} by munge", found[0])

    async def _role_of(self, uid: int) -> Role:
        """The highest that this user has. Raises AccessRefused."""
        if uid in own_users():
            return OWNER.role
        roles = {one.role for one in (await self._grants.now()).values() if one.uid == uid or one.anybody}
        for role in ("admin", "operate", "read"):
            if role in roles:
                return role
        raise AccessRefused(403, f"user {uid} has no right to this job: its owner gives one with `unbroken token`")
