"""What is said of a check and its result, for people, programs and Slurm alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from diagnosis.health import CRITICAL, OK, UNKNOWN, WARNING

if TYPE_CHECKING:
    from supervisor.node_health.check import AnsweredCheck, CheckAnswer, CheckRow

WORDS: Final = {OK: "OK", WARNING: "WARNING", CRITICAL: "CRITICAL", UNKNOWN: "UNKNOWN"}


def failure_class_of(row: CheckRow) -> str:
    return str(getattr(row.check.failure_class, "value", row.check.failure_class))


def check_name(one: AnsweredCheck) -> str:
    return f"{one.row.check.id} {one.check_state.result.device}".rstrip()


def check_text(one: AnsweredCheck) -> str:
    """Without the device in front, which is named before."""
    result = one.check_state.result
    return result.text.removeprefix(f"{result.device}: ") if result.device else result.text


def not_healthy(answer: CheckAnswer) -> list[AnsweredCheck]:
    """What is not as it should be: critical, warnings, unknown."""
    order = ["critical", "warning", ""]
    bad = [one for one in answer.seen if one.check_state.status in ("unhealthy", "unknown")]
    return sorted(
        bad, key=lambda one: order.index(one.check_state.level if one.check_state.status == "unhealthy" else "")
    )
