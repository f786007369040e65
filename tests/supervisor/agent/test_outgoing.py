"""What an agent tells of its node."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from diagnosis.signals import Evidence, Finding
from diagnosis.taxonomy import FailureClass
from supervisor.agent.heartbeat import FINDINGS_KEPT, Outgoing
from supervisor.agent.state import Notebook


def test_a_number_always_means_the_same_finding(tmp_path: Path) -> None:
    """However many there were while no controller heard them."""
    book = Notebook()
    plan: Any = SimpleNamespace(local_dir=str(tmp_path))
    nothing: Any = None
    out = Outgoing(plan, book, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    for number in range(FINDINGS_KEPT + 30):
        text = Evidence(text=str(number), source="s", node="n", at=0.0)
        out.note(
            [
                Finding(
                    rule=str(number),
                    failure_class=FailureClass.GPU_HANG,
                    confidence=1,
                    scope="node",
                    severity="error",
                    evidence=text,
                )
            ]
        )
    assert book.findings_from == 30
    out.acknowledge(31)
    assert (book.findings_from, out._findings[0].rule) == (31, "31")
