"""Both ends of a connection prove that they know the job's token. The token itself is never sent.

One challenge opens every exchange (docs/protocol.md, "Proof"; docs/adr/0016): the client sends a nonce, the controller
answers with its own nonce and a MAC over both. Only when that MAC is right does the client go on: with a request that
is signed, or with a WebSocket whose every frame carries a MAC under a key of that session. All MACs are HMAC-SHA256.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import subprocess
from typing import Final, NamedTuple

from supervisor.errors import InternalError
from supervisor.messages import PROTOCOL

CHALLENGE_PATH: Final = "/v1/challenge"
AGENT_PATH: Final = "/v1/agent"
CHALLENGE_HEADER: Final = "Unbroken-Challenge"
PROOF_HEADER: Final = "Unbroken-Proof"
"""Of an answer."""
NONCE_S: Final = 30.0
"""So long after the challenge a request may use its answer."""
USED_LIMIT: Final = 10_000
"""Signed requests within `NONCE_S`; more are refused."""
FRAME_MAC_BYTES: Final = 16

_NONCE_BYTES = 16
_NONCE = re.compile(r"[0-9a-f]{32}")
_SERVER_NONCE = re.compile(r"[0-9a-f]{64}")
_AUTHORIZATION = re.compile(r"Unbroken ([0-9a-f]{32})\.([0-9a-f]{64})\.([0-9a-f]{64})")


class Forged(InternalError, ValueError):
    """A frame that the other end of this session did not make, or not as the next one."""


class Exchange(NamedTuple):
    """What one challenge and its answer have settled."""

    client: str
    """The client's nonce."""
    server: str
    """The controller's."""
    epoch: int
    """The controller's."""


def new_nonce() -> str:
    return os.urandom(_NONCE_BYTES).hex()


def is_nonce(text: str) -> bool:
    return _NONCE.fullmatch(text) is not None


class SharedSecret:
    """The job's token, as a key."""

    def __init__(self, token: str) -> None:
        self._key = hmac.digest(token.encode(), b"unbroken protocol %d" % PROTOCOL, "sha256")

    def controller_proof(self, exchange: Exchange) -> str:
        """What only a controller of this job can answer to a challenge."""
        return self._mac(b"controller", exchange).hex()

    def request_proof(self, exchange: Exchange, method: str, target: str, body: bytes) -> str:
        """Signs a request. `target`: as it stands in the request line."""
        return self._mac(b"request", exchange, method.encode(), target.encode(), hashlib.sha256(body).digest()).hex()

    def answer_proof(self, exchange: Exchange, status: int, body: bytes) -> str:
        """Signs the answer to the request of this exchange."""
        return self._mac(b"answer", exchange, b"%d" % status, hashlib.sha256(body).digest()).hex()

    def command_digest(self, command: str, argument: str, reason: str) -> str:
        """What munge signs of an operator's command: good for just this one, and for this job."""
        words = (word.encode(errors="replace") for word in (command, argument, reason))
        return self._mac(b"order", Exchange("", "", 0), *words).hex()

    def authorization(self, exchange: Exchange, method: str, target: str, body: bytes = b"") -> str:
        """The `Authorization` header of a request."""
        return f"Unbroken {exchange.client}.{exchange.server}.{self.request_proof(exchange, method, target, body)}"

    def session(self, exchange: Exchange, *, controller: bool) -> Session:
        """The two directions of a WebSocket, for its agent or its controller."""
        ours, theirs = (b"from controller", b"from agent") if controller else (b"from agent", b"from controller")
        return Session(FrameMac(self._mac(ours, exchange)), FrameMac(self._mac(theirs, exchange)))

    def mover_proof(self, exchange: Exchange) -> str:
        """What only a mover of this job can answer to a peer's challenge."""
        return self._mac(b"mover", exchange).hex()

    def mover_session(self, exchange: Exchange, *, answers: bool) -> Session:
        """The two directions between two movers; `answers`: for the one that was called."""
        ours, theirs = (b"from callee", b"from caller") if answers else (b"from caller", b"from callee")
        return Session(FrameMac(self._mac(ours, exchange)), FrameMac(self._mac(theirs, exchange)))

    def _mac(self, purpose: bytes, exchange: Exchange, *parts: bytes) -> bytes:
        told = (purpose, exchange.client.encode(), exchange.server.encode(), b"%d" % exchange.epoch, *parts)
        return hmac.digest(self._key, b"".join(len(part).to_bytes(8, "big") + part for part in told), "sha256")


class FrameMac:
    """One direction of a session. Frames are numbered; the number is part of the MAC and never sent."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, message: bytes) -> bytes:
        return self._next(message) + message

    def open(self, frame: bytes) -> bytes:
        """The message. Raises Forged."""
        message = frame[FRAME_MAC_BYTES:]
        if not hmac.compare_digest(frame[:FRAME_MAC_BYTES], self._next(message)):
            raise Forged("a frame is not the next one of this session, or was changed on its way")
        return message

    def _next(self, message: bytes) -> bytes:
        number = self._number.to_bytes(8, "big")
        self._number += 1
        return hmac.digest(self._key, number + message, "sha256")[:FRAME_MAC_BYTES]


class Session(NamedTuple):
    out: FrameMac
    """What this end sends."""
    into: FrameMac
    """What it receives."""


def equal(one: str, other: str) -> bool:
    """In constant time."""
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))


class ServerNonces:
    """The controller's nonces. They are checked without being kept, so that a flood of challenges fills nothing; only
    those that were used by somebody who knows the token are, until they expire. Time: any clock, in seconds."""

    def __init__(self) -> None:
        self._key = os.urandom(32)
        self._used: dict[str, float] = {}

    def issue(self, client: str, now: float) -> str:
        body = int((now + NONCE_S) * 1000).to_bytes(8, "big") + os.urandom(8)
        return (body + self._tag(body, client)).hex()

    def is_valid(self, client: str, server: str, now: float) -> bool:
        """Whether `issue` made it for this client's nonce, lately, and it was not used."""
        raw = bytes.fromhex(server)
        body, tag = raw[:16], raw[16:]
        if not hmac.compare_digest(tag, self._tag(body, client)) or server in self._used:
            return False
        return now * 1000 <= int.from_bytes(body[:8], "big")

    def use(self, server: str, now: float) -> bool:
        """Take note of its use; False where too many were used just now."""
        while self._used and self._used[old := next(iter(self._used))] <= now:  # in the order of their expiry
            del self._used[old]
        if len(self._used) >= USED_LIMIT:
            return False
        self._used[server] = now + NONCE_S
        return True

    def _tag(self, body: bytes, client: str) -> bytes:
        return hmac.digest(self._key, body + client.encode(), "sha256")[:16]


class Authenticator:
    """The controller's side of the proof."""

    def __init__(self, token: str, epoch: int) -> None:
        self.secret = SharedSecret(token)
        self._epoch = epoch
        self._nonces = ServerNonces()

    def answer(self, client: str, now: float, secret: SharedSecret | None = None) -> dict[str, object]:
        """The answer to a challenge with this nonce. `secret`: of another token than the job's own."""
        exchange = Exchange(client, self._nonces.issue(client, now), self._epoch)
        proof = (secret or self.secret).controller_proof(exchange)
        return {"schema": 1, "protocol": PROTOCOL, "epoch": self._epoch, "nonce": exchange.server, "proof": proof}

    def admit(
        self,
        authorization: str,
        method: str,
        target: str,
        body: bytes,
        now: float,
        secret: SharedSecret | None = None,
    ) -> Exchange | None:
        """The exchange that a request belongs to; None where it is not signed with the token, too old, or repeated."""
        found = _AUTHORIZATION.fullmatch(authorization)
        if found is None:
            return None
        exchange = Exchange(found[1], found[2], self._epoch)
        if not self._nonces.is_valid(exchange.client, exchange.server, now):
            return None
        if not equal(found[3], (secret or self.secret).request_proof(exchange, method, target, body)):
            return None
        return exchange if self._nonces.use(exchange.server, now) else None


def server_nonce_of(authorization: str) -> str:
    """The controller's nonce in an `Authorization` header; empty where there is none."""
    found = _AUTHORIZATION.fullmatch(authorization)
    return found[2] if found is not None else ""


class Unproven(InternalError):
    """What answered to the challenge has not proven that it is this job's controller. The text says what it is."""


def exchange_of(answer: object, client: str, secret: SharedSecret) -> Exchange:
    """What a challenge has settled, from its answer. Raises Unproven, and ValueError for what is no such answer."""
    if not isinstance(answer, dict) or not {"protocol", "epoch", "nonce", "proof"} <= answer.keys():
        raise ValueError("it does not answer as a controller does")
    protocol, epoch, nonce, proof = (answer[key] for key in ("protocol", "epoch", "nonce", "proof"))
    if not isinstance(protocol, int) or not isinstance(epoch, int) or not _SERVER_NONCE.fullmatch(str(nonce)):
        raise ValueError("it does not answer as a controller does")
    if protocol != PROTOCOL:
        raise Unproven(
            f"it speaks protocol {protocol} and this end speaks {PROTOCOL}: "
            "install the same version of unbroken on every node of the job"
        )
    exchange = Exchange(client, str(nonce), epoch)
    if not equal(str(proof), secret.controller_proof(exchange)):
        raise Unproven("it cannot prove that it knows this job's token")
    return exchange


# ----- who gives a command: munge, Slurm's own proof of a user among the hosts of a cluster -----
#
# The client has munge sign the command, with the user id that the kernel tells it of us; the controller has it checked.
# Where there is no munge, or it does not answer in time, there is no proof, and that is said.

SIGN_S: Final = 2.0
CREDENTIAL_LIMIT: Final = 4096
_UID: Final = re.compile(r"^UID:\s.*\((\d+)\)$", re.M)
_STATUS: Final = re.compile(r"^STATUS:\s+Success ", re.M)


def munge_credential(payload: str, timeout_s: float = SIGN_S, reader: int | None = None) -> str:
    """A credential of this process's user; empty where there is none. `reader`: the one user who may decode it."""
    restricted = () if reader is None else (f"--restrict-uid={reader}",)
    out = _run(("munge", *restricted), payload, timeout_s).strip()  # a command line is for everybody to read
    return out if len(out) <= CREDENTIAL_LIMIT else ""


def munge_user(credential: str, payload: str, timeout_s: float = SIGN_S) -> int | None:
    """Who made `credential` for just this payload (a user id); None: nobody."""
    found = munge_decoded(credential, timeout_s)
    return found[0] if found is not None and found[1] == payload else None


def munge_decoded(credential: str, timeout_s: float = SIGN_S) -> tuple[int, str] | None:
    """Who made `credential` (a user id), and its payload; None: nobody. munged lets none pass twice."""
    if not credential or len(credential) > CREDENTIAL_LIMIT:
        return None
    told, _, content = _run(("unmunge",), credential, timeout_s).partition("\n\n")
    uid = _UID.search(told)
    return (int(uid[1]), content.strip()) if uid is not None and _STATUS.search(told) is not None else None


def _run(command: tuple[str, ...], given: str, timeout_s: float) -> str:
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return ""
    return done.stdout if done.returncode == 0 else ""
