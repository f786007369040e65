"""`unbroken approve | reject RULE`: what an operator decides about a rule that a model proposed."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

from supervisor.config import ConfigError
from supervisor.controller.client import Client, Denied, Unreachable, Unusable
from supervisor.opinion import pending


class NotDone(Exception):
    """The text says why; `code` is the exit code. Nothing was done."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


NOT_DONE, NO_RULE, NO_CONTROLLER, NOT_ALLOWED = 1, 66, 69, 77


def decide(
    command: str,
    name: str,
    job_dir: Path | None,
    client: Callable[[], Client],
    reason: str,
    by: str,
    *,
    dry_run: bool = False,
) -> dict[str, Any]:
    """`approve` or `reject` a rule, and have it journalled if a controller answers; as JSON types. Raises NotDone."""
    if job_dir is None:
        raise NotDone(NO_RULE, f"{name} is in a file of the job folder: name that with --job-dir")
    try:
        rule = pending.find(job_dir, name)
        if dry_run:
            where = job_dir / pending.APPROVED
            would = f"would put {name} into {where}" if command == "approve" else f"would forget {name}"
            return {"schema": 1, "would": would, "command": command, "argument": name, "rule": rule}
        if command == "approve":
            pending.check(job_dir, rule)
        _journal(command, name, client, reason, by)
        at = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        told = pending.approve(job_dir, name, by, at) if command == "approve" else pending.reject(job_dir, name)
    except pending.NotPending as error:
        raise NotDone(NO_RULE, str(error)) from None
    except ConfigError as error:
        raise NotDone(NOT_DONE, str(error)) from None
    except OSError as error:
        raise NotDone(NOT_DONE, f"{error.filename or job_dir}: {error.strerror}") from None
    return {"schema": 1, "ok": True, "notes": [told]}


def _journal(command: str, name: str, client: Callable[[], Client], reason: str, by: str) -> None:
    """A job that has ended has no controller, and needs none for this."""
    try:
        client().override(command, name, reason, by)
    except Unusable as error:
        raise NotDone(NO_CONTROLLER, str(error)) from None
    except Unreachable:
        pass
    except Denied as error:
        raise NotDone(NOT_ALLOWED if error.status == 401 else NOT_DONE, str(error)) from None
