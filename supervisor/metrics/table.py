"""The table of all metrics that Prometheus can scrape.

Nothing is kept for it: every number is read from the state that is there anyway, so a daemon that nobody scrapes pays
nothing. Labels hold names from closed lists (states, classes, phases, checks), nodes, GPUs and ranks; never text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from diagnosis.signals import clean_line

CORDONS_NAMED: Final = 64
"""Cordons with series of their own; all of them are counted."""
NAME_LIMIT: Final = 100

Kind = Literal["gauge", "counter", "info", "stateset", "summary"]


class Family(NamedTuple):
    """One metric: a row of docs/metrics.md."""

    name: str
    """As in a query; a summary's without `_sum` and `_count`."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """Beyond those that all metrics of its daemon have (`CONTROLLER_LABELS`, `AGENT_LABELS`). Of a stateset the last
    one has the metric's own name, as OpenMetrics wants it."""


class Sample(NamedTuple):
    name: str
    value: float
    labels: tuple[str, ...] = ()
    """Values, in the order of the family's labels."""
    suffix: str = ""
    """`_sum` or `_count` of a summary."""


CONTROLLER_LABELS: Final = ("job",)
AGENT_LABELS: Final = ("job", "node")

BUILD: Final = Family("unbroken_build_info", "info", "The version of unbroken that answers.", ("version",))
PROCESSES: Final = (
    Family("unbroken_process_cpu_seconds_total", "counter", "CPU time of our own processes.", ("kind",)),
    Family("unbroken_process_resident_memory_bytes", "gauge", "Resident memory of our own processes.", ("kind",)),
)

OUTCOMES: Final = ("succeeded", "failed", "stopped", "requeued")
WAITING: Final = ("nodes", "backoff", "approval", "operator", "evidence", "space")
CONTROLLER: Final = (
    BUILD,
    *PROCESSES,
    Family("unbroken_job_state", "stateset", "The state of the job.", ("unbroken_job_state",)),
    Family("unbroken_job_outcome", "stateset", "How the job ended; all 0 before.", ("unbroken_job_outcome",)),
    Family("unbroken_job_mode", "stateset", "What we may do.", ("unbroken_job_mode",)),
    Family("unbroken_job_paused", "gauge", "1 while an operator has paused us: we watch and do nothing."),
    Family(
        "unbroken_job_waiting",
        "gauge",
        "1 for what the job waits for: nodes, backoff, approval of a plan, an operator (it is held), evidence, space"
        " (a full disk: it goes on by itself when there is room).",
        ("kind",),
    ),
    Family("unbroken_job_attempts_total", "counter", "Attempts begun, the current one included."),
    Family("unbroken_job_restarts_total", "counter", "Restarts ordered, by policy or by operators."),
    Family("unbroken_job_restarts_without_progress", "gauge", "Restarts since the run last got further than ever."),
    Family("unbroken_job_restarts_allowed", "gauge", "Restarts without progress after which the job is given up."),
    Family("unbroken_job_step", "gauge", "Newest training step of the current attempt."),
    Family("unbroken_job_last_step", "gauge", "Step at which the run will be complete, where its output tells."),
    Family("unbroken_job_step_seconds", "gauge", "Mean time of a step in the current attempt."),
    Family(
        "unbroken_job_counted_steps",
        "gauge",
        "Steps of the optimizers since the ranks of the current attempt started, by the step clock.",
    ),
    Family(
        "unbroken_job_input_wait_ratio",
        "gauge",
        "Share of the time that the rank that waits longest waits for data; 0 while it is under a fifth.",
    ),
    Family("unbroken_job_progress_timestamp_seconds", "gauge", "Unix time of the newest step."),
    Family(
        "unbroken_job_silence_start_timestamp_seconds",
        "gauge",
        "Unix time of the last progress, while there is none and nothing proves a hang.",
    ),
    Family(
        "unbroken_job_hung_start_timestamp_seconds",
        "gauge",
        "Unix time at which a diagnosed hang began that nobody acts on (mode observe, or somebody has to decide).",
    ),
    Family("unbroken_job_start_timestamp_seconds", "gauge", "Unix time at which the first attempt was formed."),
    Family(
        "unbroken_job_attempt_start_timestamp_seconds", "gauge", "Unix time at which all ranks of this attempt stood."
    ),
    Family("unbroken_job_end_timestamp_seconds", "gauge", "Unix time at which the job ended."),
    Family(
        "unbroken_job_incidents_total",
        "counter",
        "Incidents by the failure class of their verdict; every class has a row, so that its first one is an increase.",
        ("failure_class",),
    ),
    Family(
        "unbroken_job_open_incidents",
        "gauge",
        "Incidents that are not closed, by failure class (empty until there is a verdict).",
        ("failure_class",),
    ),
    Family(
        "unbroken_job_recovery_seconds",
        "summary",
        "Incidents that ended in a new attempt's first step: the time they took, by phase of the recovery.",
        ("phase",),
    ),
    Family("unbroken_job_lost_steps_total", "counter", "Steps that were done again after restarts."),
    Family(
        "unbroken_job_opinions_total",
        "counter",
        "Opinions of a language model: answered, or failed (no answer that can be used).",
        ("kind",),
    ),
    Family("unbroken_job_opinion_seconds_total", "counter", "Time that a language model was asked."),
    Family(
        "unbroken_job_opinion_tokens_total",
        "counter",
        "Tokens that a language model read or wrote, as it says.",
        ("kind",),
    ),
    Family("unbroken_job_opinion_cost_total", "counter", "What these tokens cost, by UNBROKEN_OPINION_PRICE."),
    Family(
        "unbroken_job_badput_seconds_total",
        "counter",
        "Time in which nothing was trained that counts: startup (until the first step), a phase of a closed incident, "
        "redo (steps done again), other (until the incident was closed).",
        ("kind",),
    ),
    Family(
        "unbroken_job_ettr_ratio",
        "gauge",
        "Effective training time ratio since the first attempt: 1 is no time lost.",
    ),
    Family(
        "unbroken_job_checkpoint_timestamp_seconds",
        "gauge",
        "Unix time at which the newest complete checkpoint that is not suspect was written.",
    ),
    Family("unbroken_job_checkpoint_step", "gauge", "Step of that checkpoint, where it tells."),
    Family(
        "unbroken_job_advised_interval_seconds",
        "gauge",
        "Training time between two saves that wastes the least, by what the job has measured (`unbroken advise`); "
        "absent until three failures and three saves were seen.",
    ),
    Family(
        "unbroken_job_checkpoint_tier_timestamp_seconds",
        "gauge",
        "Unix time of the newest whole checkpoint of a tier: with --publish-to local, mirrored, published; of the "
        "newest snapshot in memory snapshot_local, snapshot_mirrored.",
        ("kind",),
    ),
    Family("unbroken_job_checkpoint_tier_step", "gauge", "Step of that checkpoint, where it tells.", ("kind",)),
    Family(
        "unbroken_job_checkpoints",
        "gauge",
        "Checkpoints that are seen: complete, incomplete, or suspect (written after the numbers went wrong).",
        ("kind",),
    ),
    Family("unbroken_job_nodes", "gauge", "Nodes by state.", ("state",)),
    Family("unbroken_job_nodes_wanted", "gauge", "Most nodes that an attempt uses."),
    Family("unbroken_job_spares", "gauge", "Healthy idle nodes that could take a place now."),
    Family("unbroken_job_spares_wanted", "gauge", "Spares that the job was started with (--spares)."),
    Family(
        "unbroken_job_cordons",
        "gauge",
        "Cordons in force: kind node or gpu, by whom (policy, operator), and why.",
        ("kind", "by", "failure_class"),
    ),
    Family(
        "unbroken_job_cordon_start_timestamp_seconds",
        "gauge",
        f"Unix time at which a cordon began; at most {CORDONS_NAMED} nodes of the job.",
        ("node", "gpu", "failure_class"),
    ),
    Family(
        "unbroken_job_drains",
        "gauge",
        "Cordoned nodes that the scheduler was asked to drain: asked (done or under way), or refused.",
        ("kind",),
    ),
    Family(
        "unbroken_job_swaps",
        "gauge",
        "Nodes that should leave at a checkpoint: planned, recommended (people decide), blocked (no spare).",
        ("state",),
    ),
    Family(
        "unbroken_job_swaps_made_total",
        "counter",
        "Planned swaps, by what they were for: device, straggler, drained, maintenance, cordoned, operator.",
        ("kind",),
    ),
    Family(
        "unbroken_job_active_test_verdict",
        "gauge",
        f"1 for what active tests within this job said last of a node: of at most {CORDONS_NAMED} nodes, those that "
        "failed first. `test`: pairs (with others), or node (all that it did by itself).",
        ("node", "test", "verdict"),
    ),
    Family("unbroken_job_cordons_proposed", "gauge", "Cordons in a plan that waits for approval."),
    Family(
        "unbroken_ledger_readable",
        "gauge",
        "Only with a ledger of all jobs (docs/ledger.md): 1 where its folder answers.",
    ),
    Family(
        "unbroken_ledger_nodes",
        "gauge",
        "Nodes in the ledger of all jobs: known, cordoned (for all jobs), proposed (a cordon is), probation, retest (a "
        "test is due), lemon (fails again and again, and is in use).",
        ("kind",),
    ),
    Family(
        "unbroken_ledger_lemon_points",
        "gauge",
        f"Points of a node that fails again and again, and is in use; at most {CORDONS_NAMED} nodes.",
        ("node",),
    ),
    Family("unbroken_job_breaker_cordons", "gauge", "Nodes that policy has cordoned within the last hour."),
    Family("unbroken_job_breaker_limit", "gauge", "Nodes that policy may cordon within an hour."),
    Family("unbroken_job_breaker_tripped", "gauge", "1 while the job is held because policy wanted to cordon more."),
    Family("unbroken_controller_epoch", "gauge", "Grows by one with each start of a controller of this job."),
    Family("unbroken_controller_agents", "gauge", "Agents that are connected."),
    Family("unbroken_controller_events_waiting", "gauge", "Events that wait for the journal."),
    Family(
        "unbroken_controller_journal_ok",
        "gauge",
        "0 while the journal cannot be written: nothing is decided then but `stop` and `pause`.",
    ),
)


def job_name(name: str) -> str:
    """The label `job`."""
    return clean_line(name, NAME_LIMIT) or "unnamed"


def states(name: str, known: tuple[str, ...], current: str, labels: tuple[str, ...] = ()) -> Iterator[Sample]:
    """A stateset: a row for each state."""
    for state in known:
        yield Sample(name, state == current, (*labels, state))


def as_markdown(families: tuple[Family, ...]) -> str:
    """A table of docs/metrics.md (a test keeps the two equal)."""
    head = ["| metric | type | labels | meaning |", "| --- " * 4 + "|"]
    rows = []
    for family in families:
        names = f"{family.name}_sum`, `{family.name}_count" if family.kind == "summary" else family.name
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{names}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join([*head, *rows]) + "\n"
