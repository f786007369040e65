"""Who gave an order, as far as that is proven: what the journal, the timeline and the scheduler are told."""

from __future__ import annotations

import pwd

from diagnosis.signals import clean_line

BY_LIMIT = 100


def given_by(uid: int | None, address: str, said: str) -> str:
    """`uid`: as the kernel (unix socket) or munge proves it; None: only that somebody holds the job's token."""
    if uid is None:
        return clean_line(f"holder of the token at {address}, says {said or 'nothing'}", BY_LIMIT)
    try:
        return clean_line(f"{pwd.getpwuid(uid).pw_name} (uid {uid})", BY_LIMIT)
    except (KeyError, OSError):
        return f"uid {uid}"
