"""From the state of a real job to the alerts that fire: all of them, and no other, by Prometheus' own rule engine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from diagnosis.incident import Culprit, Verdict
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint
from supervisor import messages as m
from supervisor.controller.metrics import job_samples
from supervisor.metrics.table import CONTROLLER

RULES = Path(__file__).parents[3] / "deploy/prometheus/rules"
MINUTES = 45
"""The state stands for so long."""
LABELS = {family.name: family.labels for family in CONTROLLER}
STAMPS = {family.name for family in CONTROLLER if family.name.endswith("_timestamp_seconds")}

pytestmark = pytest.mark.prometheus
Driver = Any
Make = Callable[..., Driver]


def verdict(*nodes: str, action: Any = "restart") -> Verdict:
    failure_class = FailureClass.GPU_FALLEN_OFF_BUS if action != "restart" else FailureClass.WORKER_CRASH
    culprits = tuple(Culprit(node=node) for node in nodes)
    return Verdict(failure_class=failure_class, culprits=culprits, confidence=0.9, why="why", action=action)


def series(driver: Driver, name: str) -> list[dict[str, str]]:
    """What a controller tells now, for as long as that stands; Unix time begins an hour before."""
    found = []
    for sample in job_samples(driver.job, driver.now):
        labels = {"job": name, **dict(zip(LABELS[sample.name], sample.labels, strict=True))}
        selector = ",".join(f'{label}="{value}"' for label, value in labels.items())
        value = sample.value - driver.now + 3600 if sample.name in STAMPS else float(sample.value)
        growth = "+60" if sample.name == "unbroken_job_progress_timestamp_seconds" and driver.state == "RUNNING" else ""
        found.append(
            {"series": f"{sample.name}{sample.suffix}{{{selector}}}", "values": f"_x60 {value}{growth}x{MINUTES}"}
        )
    return found


def trains(make: Make) -> Driver:
    driver = make(verdict("a"), nodes_min=2, nodes_max=2, spares=1)
    driver.join("a", "b", "c")
    driver.up()
    checkpoint = Checkpoint(path="/c/2", step=2, format="f", complete=True, modified_at=driver.now)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(checkpoint,))
    return driver


def trains_again(make: Make) -> Driver:
    driver = trains(make)
    driver.crash("a", 0)
    driver.up(step=3)
    return driver


def first_step_takes_long(make: Make) -> Driver:
    driver = make(verdict("a"), nodes_min=1, nodes_max=1)
    driver.join("a")
    driver.tell(m.LauncherReady, node="a", attempt=1, offer=m.StoreOffer(host="a", port=1, local_world_size=1))
    driver.tell(m.WorkersStarted, node="a", attempt=1, ranks=(0,))
    driver.fire("stood")
    return driver


def waits_for_nodes(make: Make) -> Driver:
    driver = make(verdict("a"), nodes_min=2, nodes_max=2)
    driver.join("a")
    return driver


def cordon_waits_for_approval(make: Make) -> Driver:
    driver = make(verdict("a", action="cordon_node_and_restart"), nodes_min=2, nodes_max=2, spares=1, mode="recommend")
    driver.join("a", "b", "c")
    driver.up()
    driver.crash("a", 0)
    return driver


def plan_is_rejected(make: Make) -> Driver:
    driver = cordon_waits_for_approval(make)
    driver.order("reject")
    return driver


def breaker_trips(make: Make) -> Driver:
    bad = verdict("a", "b", "c", action="cordon_node_and_restart")
    driver = make(bad, nodes_min=2, nodes_max=4, spares=2)
    driver.join("a", "b", "c", "d", "e", "f")
    driver.up()
    driver.crash("a", 0)
    return driver


def crashes_again_and_again(make: Make) -> Driver:
    driver = make(verdict("a"), nodes_min=1, nodes_max=1)
    driver.join("a")
    driver.up(step=5)
    for _ in range(3):
        driver.crash("a", 0)
        if "backoff" in driver.job.timers:
            driver.fire("backoff")
        driver.up(step=2)
    return driver


def spare_is_used_up(make: Make) -> Driver:
    driver = make(verdict("a", action="cordon_node_and_restart"), nodes_min=2, nodes_max=2, spares=1)
    driver.join("a", "b", "c")
    driver.up()
    driver.crash("a", 0)
    driver.up(step=2)
    return driver


def saves_nothing(make: Make) -> Driver:
    driver = make(verdict("a"), nodes_min=1, nodes_max=1)
    driver.join("a")
    driver.up()
    driver.tell(m.Progressed, after=7200, attempt=1, step=1000)
    return driver


def trains_again_after_hours(make: Make) -> Driver:
    """What is lost with the next failure is what this attempt has done, not the hours before it."""
    driver = trains(make)
    driver.tell(m.Progressed, after=3600, attempt=1, step=500)
    driver.crash("a", 0)
    driver.now += 4 * 3600
    driver.up(step=3)
    return driver


def is_paused_while_down(make: Make) -> Driver:
    driver = trains(make)
    driver.order("pause")
    driver.crash("a", 0)
    return driver


def fails(make: Make) -> Driver:
    driver = make(verdict("a"), nodes_min=1, nodes_max=1, max_restarts=0)
    driver.join("a")
    driver.up()
    driver.crash("a", 0)
    return driver


def is_stopped(make: Make) -> Driver:
    driver = trains(make)
    driver.order("stop")
    return driver


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        (trains, set()),
        (trains_again, set()),
        (first_step_takes_long, set()),
        (waits_for_nodes, {"UnbrokenRunStalled"}),
        (cordon_waits_for_approval, {"UnbrokenRunStalled", "UnbrokenCordonNeedsApproval"}),
        (plan_is_rejected, {"UnbrokenRunStalled", "UnbrokenJobHeld"}),
        (breaker_trips, {"UnbrokenRunStalled", "UnbrokenBreakerTripped"}),
        (crashes_again_and_again, {"UnbrokenCrashLoop"}),
        (spare_is_used_up, {"UnbrokenSparesExhausted"}),
        (saves_nothing, {"UnbrokenNoCheckpoint"}),
        (trains_again_after_hours, {"UnbrokenEttrLow"}),
        (is_paused_while_down, {"UnbrokenJobPaused"}),
        (fails, {"UnbrokenJobFailed"}),
        (is_stopped, set()),
    ],
)
def test_what_a_state_that_stands_fires(
    story: Callable[[Make], Driver], expected: set[str], make_driver: Make, tmp_path: Path
) -> None:
    """The state is not there before, and then stands for 45 minutes."""
    name = story.__name__
    look = {
        "expr": f'count by (alertname) (ALERTS{{alertstate="firing",job="{name}"}})',
        "eval_time": f"{60 + MINUTES - 1}m",
        "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(expected)],
    }
    rules = {
        "rule_files": sorted(str(path) for path in RULES.glob("*.yml")),
        "evaluation_interval": "1m",
        "group_eval_order": ["unbroken-recording", "unbroken-alerts"],
        "tests": [{"interval": "1m", "input_series": series(story(make_driver), name), "promql_expr_test": [look]}],
    }
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(rules))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
