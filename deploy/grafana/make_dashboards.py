"""Write the Grafana dashboards of this folder. All of them come from the tables below.

    python deploy/grafana/make_dashboards.py

Import the JSON files in Grafana (Dashboards, New, Import), or provision this folder. They need a Prometheus data
source with the rules of deploy/prometheus. tests/e2e/test_prometheus.py asks a real Prometheus each query.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

WIDTH: Final = 24
JOB: Final = 'job=~"$job"'
NODE: Final = f'{JOB},node=~"$node"'
BADPUT: Final = "startup, a phase of a closed incident, or steps made again"


class Panel(NamedTuple):
    title: str
    kind: str
    """`stat`, `timeseries`, `table` or `state-timeline`."""
    expression: str
    unit: str = "short"
    legend: str = "{{job}}"
    width: int = 6
    what: str = ""


class Dashboard(NamedTuple):
    uid: str
    title: str
    variables: dict[str, str]
    """Name -> the query of its values."""
    panels: tuple[Panel, ...]


_JOBS: Final = {"job": "label_values(unbroken_job_attempts_total, job)"}
_STEP: Final = f"max by (job) (unbroken_job_step{{{JOB}}})"
_AGE: Final = f"job:unbroken_checkpoint_age:seconds{{{JOB}}}"
_LEFT: Final = f"unbroken_job_restarts_allowed{{{JOB}}} - unbroken_job_restarts_without_progress{{{JOB}}}"
FLEET: Final = Dashboard(
    "unbroken-fleet",
    "unbroken: fleet",
    {},
    (
        Panel("Jobs that train", "stat", "sum(job:unbroken_running:bool) or vector(0)", legend="", width=4),
        Panel("Jobs that are down", "stat", "sum(job:unbroken_down:bool) or vector(0)", legend="", width=4),
        Panel("Paused", "stat", "sum(job:unbroken_paused:bool) or vector(0)", legend="", width=4),
        Panel("Open incidents", "stat", "sum(unbroken_job_open_incidents) or vector(0)", legend="", width=4),
        Panel("Cordons", "stat", "sum(unbroken_job_cordons) or vector(0)", legend="", width=4),
        Panel("Nodes lost", "stat", 'sum(unbroken_job_nodes{state="lost"}) or vector(0)', legend="", width=4),
        Panel("ETTR", "timeseries", "job:unbroken_ettr:ratio", "percentunit", width=12),
        Panel("Restarts in an hour", "timeseries", "job:unbroken_restarts:increase1h", width=12),
        Panel(
            "Incidents by class, last day",
            "table",
            "sort_desc(sum by (failure_class) (increase(unbroken_job_incidents_total[1d])))",
            legend="{{failure_class}}",
            width=12,
        ),
        Panel(
            "Time that counts for nothing",
            "timeseries",
            "sum by (kind) (job_kind:unbroken_badput:rate1h)",
            "percentunit",
            "{{kind}}",
            width=12,
            what=BADPUT,
        ),
        Panel(
            "GPUs that are not well",
            "table",
            "sum by (job, node, gpu, failure_class) (unbroken_gpu_unhealthy) or vector(0)",
            legend="{{node}} {{gpu}}",
            width=12,
        ),
        Panel("Step", "table", "unbroken_job_step", width=12),
    ),
)
OF_JOB: Final = Dashboard(
    "unbroken-job",
    "unbroken: job",
    _JOBS,
    (
        Panel("Step", "stat", _STEP),
        Panel("ETTR", "stat", f"job:unbroken_ettr:ratio{{{JOB}}}", "percentunit"),
        Panel("Attempts", "stat", f"unbroken_job_attempts_total{{{JOB}}}"),
        Panel("Age of the newest checkpoint", "stat", f"{_AGE} or vector(0)", "s"),
        Panel(
            "State",
            "state-timeline",
            f"unbroken_job_state{{{JOB}}} == 1",
            legend="{{unbroken_job_state}}",
            width=24,
        ),
        Panel("Step", "timeseries", _STEP, width=12),
        Panel("Time of a step", "timeseries", f"unbroken_job_step_seconds{{{JOB}}}", "s", width=12),
        Panel("Nodes by state", "timeseries", f"unbroken_job_nodes{{{JOB}}}", legend="{{state}}", width=12),
        Panel(
            "Waits for",
            "timeseries",
            f"unbroken_job_waiting{{{JOB}}}",
            legend="{{kind}}",
            width=12,
        ),
        Panel("Since the last progress", "timeseries", f"job:unbroken_progress_age:seconds{{{JOB}}}", "s", width=12),
        Panel(
            "Waits for data",
            "timeseries",
            f"unbroken_job_input_wait_ratio{{{JOB}}} or vector(0)",
            "percentunit",
            width=12,
        ),
    ),
)
OF_NODE: Final = Dashboard(
    "unbroken-node",
    "unbroken: node",
    {**_JOBS, "node": f"label_values(unbroken_agent_connected{{{JOB}}}, node)"},
    (
        Panel("Agent connected", "stat", f"unbroken_agent_connected{{{NODE}}}", legend="{{node}}"),
        Panel(
            "Checks",
            "stat",
            f"sum by (state) (unbroken_checks{{{NODE}}})",
            legend="{{state}}",
            width=18,
        ),
        Panel("Step of each rank", "timeseries", f"unbroken_rank_step{{{NODE}}}", legend="rank {{rank}}", width=12),
        Panel(
            "Time of a step, by rank",
            "timeseries",
            f"unbroken_rank_step_seconds{{{NODE}}} or vector(0)",
            "s",
            "rank {{rank}}",
            12,
        ),
        Panel("Ranks without a sign", "timeseries", f"unbroken_rank_quiet_seconds{{{NODE}}}", "s", "rank {{rank}}", 12),
        Panel(
            "Unhealthy checks",
            "table",
            f"unbroken_check_unhealthy{{{NODE}}} or vector(0)",
            legend="{{check}} ({{failure_class}})",
            width=12,
        ),
        Panel(
            "What we cost",
            "timeseries",
            f"sum by (kind) (rate(unbroken_process_cpu_seconds_total{{{NODE}}}[5m]))",
            "percentunit",
            "{{kind}}",
            12,
            "Of one core",
        ),
        Panel(
            "Our memory",
            "timeseries",
            f"unbroken_process_resident_memory_bytes{{{NODE}}}",
            "bytes",
            "{{kind}}",
            12,
        ),
    ),
)
INCIDENTS: Final = Dashboard(
    "unbroken-incidents",
    "unbroken: incidents",
    _JOBS,
    (
        Panel(
            "Open now",
            "table",
            f"job_failure_class:unbroken_open_incidents:max{{{JOB}}} or vector(0)",
            legend="{{job}} {{failure_class}}",
            width=12,
        ),
        Panel(
            "All, by class",
            "table",
            f"sort_desc(sum by (failure_class) (unbroken_job_incidents_total{{{JOB}}}))",
            legend="{{failure_class}}",
            width=12,
        ),
        Panel(
            "Recovery by phase, mean of a day",
            "timeseries",
            f"job_phase:unbroken_recovery_seconds:mean1d{{{JOB}}} or vector(0)",
            "s",
            "{{phase}}",
            12,
        ),
        Panel(
            "Steps made again",
            "timeseries",
            f"unbroken_job_lost_steps_total{{{JOB}}}",
            width=12,
        ),
        Panel(
            "Time that counts for nothing",
            "timeseries",
            f"sum by (kind) (unbroken_job_badput_seconds_total{{{JOB}}})",
            "s",
            "{{kind}}",
            12,
            BADPUT,
        ),
        Panel(
            "Cordons",
            "table",
            f"unbroken_job_cordons{{{JOB}}} or vector(0)",
            legend="{{kind}} {{failure_class}}",
            width=12,
        ),
        Panel("Restarts left", "stat", _LEFT),
        Panel("Breaker", "stat", f"unbroken_job_breaker_cordons{{{JOB}}}", what="Cordons of policy in an hour"),
    ),
)
DASHBOARDS: Final = (FLEET, OF_JOB, OF_NODE, INCIDENTS)


def grafana(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    variables: list[dict[str, Any]] = [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
    variables += [
        {
            "name": name,
            "type": "query",
            "datasource": source,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        }
        for name, query in dashboard.variables.items()
    ]
    panels, x, y = [], 0, 0
    for number, panel in enumerate(dashboard.panels, 1):
        height = 4 if panel.kind == "stat" else 8
        if x + panel.width > WIDTH:
            x, y = 0, y + 8
        instant = panel.kind == "table"
        panels.append(
            {
                "id": number,
                "title": panel.title,
                "description": panel.what,
                "type": panel.kind,
                "datasource": source,
                "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
                "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
                "targets": [
                    {
                        "refId": "A",
                        "expr": panel.expression,
                        "legendFormat": panel.legend or "__auto",
                        "instant": instant,
                        "range": not instant,
                        "format": "table" if instant else "time_series",
                    }
                ],
            }
        )
        x += panel.width
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["unbroken"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "links": [
            {
                "type": "dashboards",
                "tags": ["unbroken"],
                "asDropdown": False,
                "keepTime": True,
                "includeVars": True,
                "title": "",
            }
        ],
        "panels": panels,
    }


def files() -> dict[str, str]:
    """Name -> content."""
    return {f"{one.uid}.json": json.dumps(grafana(one), indent=1) + "\n" for one in DASHBOARDS}


if __name__ == "__main__":
    for name, text in files().items():
        (Path(__file__).parent / name).write_text(text, encoding="utf-8")
