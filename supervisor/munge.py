"""Who sent an order, by munge: Slurm's own proof of a user among the hosts of a cluster.

The client has munge sign the order, with the user id that the kernel tells it of us; the controller has it checked.
Where there is no munge, or it does not answer in time, there is no proof, and that is said.
"""

from __future__ import annotations

import re
import subprocess
from typing import Final

SIGN_S: Final = 2.0
CREDENTIAL_LIMIT: Final = 4096
_UID: Final = re.compile(r"^UID:\s.*\((\d+)\)$", re.M)
_STATUS: Final = re.compile(r"^STATUS:\s+Success ", re.M)


def sign(payload: str, timeout_s: float = SIGN_S) -> str:
    """A credential of this process's user; empty where there is none."""
    out = _run(("munge", "--string", payload), "", timeout_s).strip()
    return out if len(out) <= CREDENTIAL_LIMIT else ""


def signed_by(credential: str, payload: str, timeout_s: float = SIGN_S) -> int | None:
    """Who made `credential` for just this payload (a user id); None: nobody. munged lets none pass twice."""
    if not credential or len(credential) > CREDENTIAL_LIMIT:
        return None
    told, _, content = _run(("unmunge",), credential, timeout_s).partition("\n\n")
    uid = _UID.search(told)
    if uid is None or _STATUS.search(told) is None or content.strip() != payload:
        return None
    return int(uid[1])


def _run(command: tuple[str, ...], given: str, timeout_s: float) -> str:
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return ""
    return done.stdout if done.returncode == 0 else ""
