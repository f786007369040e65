"""Alerts from outside that fire for nodes of the job. They inform; no verdict depends on them.

A node whose alert is a `suspect` by the site's rules is tested with the others before a restart, where tests are made.
One that is to be replaced by them is proposed for a planned swap (`swaps`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from supervisor import messages as m
from supervisor.job.core import Core, Wants
from supervisor.notes import note

MOST: Final = 256
"""That fire at once; more are counted."""
EXPIRES_S: Final = 86400.0
"""So long after it was heard of last an alert is taken to have ended."""


class Alerts:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._firing: dict[str, m.OutsideAlert] = {}
        self.left_out = 0

    @property
    def firing(self) -> dict[str, m.OutsideAlert]:
        """By key."""
        now = self._core.now
        return {key: one for key, one in self._firing.items() if now - one.at < EXPIRES_S}

    def seen(self, event: m.AlertsSeen) -> Wants:
        self._firing = self.firing
        for key in event.ended:
            if (one := self._firing.pop(key, None)) is not None:
                yield note("alert_ended", node=one.node, name=one.name)
        for one in event.firing:
            known = one.key in self._firing
            if not known and len(self._firing) >= MOST:
                self.left_out += 1
                if self.left_out == 1:
                    yield note("alerts_left_out", most=MOST)
                continue
            self._firing[one.key] = one
            if not known:
                kind = "alert_suspects" if one.suspect else "alert_fires"
                yield note(
                    kind,
                    loud=one.suspect,
                    node=one.node,
                    gpu=one.gpu,
                    name=one.name,
                    failure_class=one.failure_class.value,
                    said=one.text,
                )

    def on(self, nodes: Collection[str]) -> tuple[m.OutsideAlert, ...]:
        """Those that fire now for one of these nodes."""
        return tuple(one for one in self.firing.values() if one.node in nodes)

    def suspects(self, nodes: Collection[str]) -> tuple[str, ...]:
        """The nodes among these that the site's rules suspect for what fires now."""
        return tuple(dict.fromkeys(one.node for one in self.on(nodes) if one.suspect))
