"""Who gave an order, as far as that is proven: what the journal, the timeline and the scheduler are told."""

from __future__ import annotations

from diagnosis.signals import clean_line
from supervisor.wire.peers import user_name

BY_LIMIT = 100


def given_by(uid: int | None, address: str, said: str) -> str:
    """`uid`: as the kernel (unix socket) or munge proves it; None: only that somebody holds the job's token."""
    if uid is None:
        return clean_line(f"holder of the token at {address}, says {said or 'nothing'}", BY_LIMIT)
    return clean_line(user_name(uid), BY_LIMIT)
