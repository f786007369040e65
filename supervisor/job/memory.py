"""What an incident has in common with earlier ones, and what operators say that it was.

Both are kept and told. No verdict, plan or action depends on them: a job that remembers decides like one that does not.
"""

from __future__ import annotations

import msgspec

from recovery.incident_memory import CORRECTIONS_KEPT, ClosedIncident, Correction, fingerprint, unknown_class
from supervisor import messages as m
from supervisor.job.core import Core, Wants
from supervisor.job.incident_log import IncidentLog, IncidentRecord
from supervisor.job.nodes import Nodes
from supervisor.notes import note


class Memory:
    def __init__(self, core: Core, nodes: Nodes, log: IncidentLog) -> None:
        self._core, self._nodes, self._log = core, nodes, log

    @property
    def job_id(self) -> str:
        """The same over all lives of the job; another one if it begins anew in the same folder."""
        spec = self._core.spec
        return f"{(spec.scheduler_job or spec.name)[:80]}-{self._core.defined_at or 0.0:.3f}"

    # ----- events -----

    def seen(self, event: m.IncidentMemorySeen) -> Wants:
        yield note("memory_unusable", loud=True, why=event.problem) if event.problem else note("memory_usable")

    def recurred(self, event: m.IncidentRecurred) -> Wants:
        record = self._log.get(event.incident)
        if record is None or record.recurrences == event.recurrences:
            return
        record.recurrences = event.recurrences
        if event.recurrences:
            yield record.note("incident_recurred", loud=True, what="; ".join(one.text for one in event.recurrences))

    def correct(self, command: m.OperatorCommand) -> Wants:
        """`INCIDENT CLASS`, and a note as the reason."""
        name, _, wanted = command.argument.partition(" ")
        record = self._log.get(name)
        if record is None:
            yield note("incident_unknown", refused=True, named=name)
        elif problem := unknown_class(wanted):
            yield note("class_unknown", refused=True, why=problem)
        else:
            one = Correction(
                failure_class=wanted, note=command.reason, by=command.by, uid=command.uid, at=self._core.now
            )
            add_correction(record, one)
            said = record.verdict.failure_class.value if record.verdict is not None else ""
            yield record.note("verdict_corrected", failure_class=wanted, said=said, by=command.by, why=command.reason)

    # ----- what is remembered -----

    def closed(self, record: IncidentRecord) -> ClosedIncident:
        """An incident as the store has it; also one that is still open."""
        core, verdict, plan = self._core, record.verdict, record.plan
        found = ClosedIncident(
            job=core.spec.name,
            job_id=self.job_id,
            incident=record.id,
            opened_at=record.opened_at,
            closed_at=record.closed_at,
            attempt=record.attempt,
            step=record.step,
            trigger=record.trigger,
            what=record.what,
            plan=f"{plan.kind}: {plan.why}" if plan is not None else "",
            cordoned=tuple(self._name(one.node) for one in plan.cordons) if plan is not None else (),
            outcome=record.closed_why,
            next_attempt=record.next_attempt,
            lost_s=record.lost_s(core.now),
            corrections=tuple(record.corrections),
        )
        if verdict is None:
            return found
        gpus = (one for one in verdict.culprits if one.gpu)
        return msgspec.structs.replace(
            found,
            failure_class=verdict.failure_class.value,
            confidence=verdict.confidence,
            why=verdict.why,
            action=verdict.action,
            nodes=tuple(dict.fromkeys(self._name(one.node) for one in verdict.culprits if one.node)),
            gpus=tuple(dict.fromkeys(self._gpu(one.node, one.gpu) for one in gpus)),
            ranks=tuple(dict.fromkeys(one.rank for one in verdict.culprits if one.rank is not None)),
            evidence=tuple(one.text for one in verdict.evidence),
            fingerprint=fingerprint(verdict, (name for node in self._nodes for name in (node.name, node.host))),
        )

    def _name(self, name: str) -> str:
        """As all jobs of the cluster call the node."""
        node = self._nodes.get(name)
        return node.scheduler_name or name if node is not None else name

    def _gpu(self, node: str, address: str) -> str:
        """An address is that of one node's; a UUID is the GPU's, wherever it is put."""
        return f"{self._name(node)}/{address}" if node and not address.startswith("GPU-") else address


def add_correction(record: IncidentRecord, one: Correction) -> None:
    """What is told twice counts once; the newest comes last."""
    if one not in record.corrections:
        record.corrections = sorted((*record.corrections, one), key=lambda each: each.at)[-CORRECTIONS_KEPT:]
