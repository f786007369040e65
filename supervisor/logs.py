"""What our daemons write to their logs: bounded lines, few repetitions, and no text that an unproven client has sent.

The front keeps the files themselves small (`supervisor.run.front`), for what writes past this as well.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Final

WINDOW_S: Final = 60.0
BURST: Final = 1000
"""Lines of one kind within the window; more are counted only. Thousands of agents may come at once."""
BURST_OF_STRANGERS: Final = 20
"""The same for lines that anybody can cause who reaches a port."""
STRANGERS: Final = ("unbroken.server", "unbroken.metrics", "aiohttp", "asyncio")
KINDS_KEPT: Final = 1000
LINE_LIMIT: Final = 2000
TRACE_LIMIT: Final = 8000
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


class RepeatLimit(logging.Filter):
    """Lets so many records of one kind pass in a window: of one logger and one text before arguments, or, where a
    record has it, one `repeat_kind`."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}
        """Kind -> when its window began, how many came since."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = (record.name, getattr(record, "repeat_kind", "") or str(record.msg)[:200])
        began, count = self._seen.get(kind, (record.created, 0))
        burst = BURST_OF_STRANGERS if record.name.startswith(STRANGERS) else BURST
        if not 0 <= record.created - began < WINDOW_S:
            if count > burst:
                record.msg = f"{record.msg} ({count - burst} more of these were left out before)"
            began, count = record.created, 0
        if kind not in self._seen and len(self._seen) >= KINDS_KEPT:
            del self._seen[next(iter(self._seen))]
        self._seen[kind] = (began, count + 1)
        return count < burst


class NoForeignText(logging.Filter):
    """aiohttp logs a request that it cannot read with its text. Here only the kind of the error is logged."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if error is not None and type(error).__module__.startswith("aiohttp"):
            record.msg = "a request could not be read: %s"
            record.args, record.exc_info, record.exc_text = (type(error).__name__,), None, None
        return True


class BoundedFormatter(logging.Formatter):
    """Lines and tracebacks of limited length, without control characters."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _CONTROL.sub("?", super().formatMessage(record))[:LINE_LIMIT]

    def formatException(self, ei: object) -> str:
        text = _CONTROL.sub("?", super().formatException(ei))  # type: ignore[arg-type]
        return text if len(text) <= TRACE_LIMIT else f"{text[: TRACE_LIMIT // 2]}\n...\n{text[-TRACE_LIMIT // 2 :]}"


def configure(level: str = "INFO") -> None:
    """Log to stderr, as all our daemons do."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(NoForeignText())
    handler.addFilter(RepeatLimit())
    handler.setFormatter(BoundedFormatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=level)
    logging.raiseExceptions = False  # a full disk would add a traceback to each line
