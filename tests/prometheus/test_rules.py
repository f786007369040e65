"""What is shipped for Prometheus and Alertmanager, by their own tools; every alert has a test and a page."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, get_args

import click
import pytest
import yaml

from diagnosis.health import Level
from diagnosis.taxonomy import FailureClass
from recovery.tiers import TIERS
from supervisor.agent.metrics import GPU_STATES
from supervisor.cli.main import main
from supervisor.metrics.table import AGENT, CONTROLLER, OUTCOMES, WAITING
from supervisor.node_health.state import RESPONDS
from supervisor.view import JobStateName

REPOSITORY = Path(__file__).parents[2]
SHIPPED = REPOSITORY / "deploy/prometheus"
RULES = sorted((SHIPPED / "rules").glob("*.yml"))
STORIES = Path(__file__).with_name("alerts.yml")


def alerts() -> list[dict[str, Any]]:
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def run(*command: str | Path, cwd: Path = SHIPPED) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.prometheus
def test_promtool_takes_configuration_and_rules() -> None:
    assert "is valid prometheus config file syntax" in run("promtool", "check", "config", "prometheus.yml")
    assert "SUCCESS" in run("promtool", "check", "rules", *RULES)
    assert "SUCCESS" in run("amtool", "check-config", "alertmanager.yml")


@pytest.mark.prometheus
def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    assert "SUCCESS" in run("promtool", "test", "rules", STORIES.name, cwd=STORIES.parent)


@pytest.mark.prometheus
@pytest.mark.parametrize(("severity", "receiver"), [("page", "pager"), ("ticket", "tickets")])
def test_who_is_told(severity: str, receiver: str) -> None:
    routes = ("amtool", "config", "routes", "test", "--config.file=alertmanager.yml")
    assert run(*routes, f"severity={severity}", "alertname=UnbrokenRunStalled").startswith(f"{receiver}\n")


def test_what_silences_what_exists() -> None:
    names = {alert["alert"] for alert in alerts()}
    for rule in yaml.safe_load((SHIPPED / "alertmanager.yml").read_text())["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            assert set(re.findall(r"Unbroken\w+", matcher)) <= names
        assert rule["equal"] == ["job"]


@pytest.mark.parametrize("alert", [pytest.param(alert, id=alert["alert"]) for alert in alerts()])
def test_each_alert_says_what_where_and_what_to_do(alert: dict[str, Any]) -> None:
    name, annotations = alert["alert"], alert["annotations"]
    assert set(annotations) == {"summary", "description", "runbook_url"}
    docs = "{{ with $externalLabels.unbroken_docs }}{{ . }}{{ else }}docs{{ end }}"
    assert annotations["runbook_url"] == f"{docs}/runbook/{name}.md"
    text = (REPOSITORY / f"docs/runbook/{name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {name}\n")
    assert re.search(r"^\*\*(Page|Ticket)", text, re.M)
    assert "unbroken " in text, "commands"
    assert f"]({name}.md)" in (REPOSITORY / "docs/runbook/README.md").read_text(encoding="utf-8")
    assert re.search(r"page|ticket", alert["labels"]["severity"])


def fired(story: dict[str, Any]) -> list[set[str]]:
    """The alerts that are expected at each look of a story."""
    looks = [[sample["labels"] for sample in look["exp_samples"]] for look in story.get("promql_expr_test", ())]
    return [{match[1] for text in texts if (match := re.search(r'alertname="(\w+)"', text))} for texts in looks]


def test_each_alert_is_seen_to_fire_and_to_be_silent() -> None:
    """Silent in a story of its own, which tells the series that it looks at."""
    stories = yaml.safe_load(STORIES.read_text())["tests"]
    for name in {alert["alert"] for alert in alerts()}:
        looks = [look for story in stories if name in story["name"] for look in fired(story)]
        assert any(name in look for look in looks), f"{name} never fires"
        assert any(name not in look for look in looks), f"{name} always fires"


SERIES = re.compile(r"([\w:]+)\{([^}]*)\}")
LABEL = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
SCRAPED = {"instance", "job", "unbroken_role", "unbroken_only_on", "node"}
"""What Prometheus and target files add."""


def families() -> dict[str, tuple[str, ...]]:
    """Each metric with its labels."""
    found: dict[str, tuple[str, ...]] = {"up": ("unbroken_role", "unbroken_only_on", "node")}
    for table, common in ((CONTROLLER, ("job",)), (AGENT, ("job", "node"))):
        for family in table:
            for suffix in ("", "_sum", "_count"):
                found[family.name + suffix] = (*family.labels, *common)
    return found


@pytest.mark.parametrize("path", [*RULES, STORIES], ids=lambda path: path.name)
def test_selectors_match_what_is_told(path: Path) -> None:
    """A label that no daemon gives, or a value that it never has, would make an alert that can never fire."""
    known = families()
    values = {
        "kind": {*WAITING, *RESPONDS, *TIERS},
        "unbroken_job_state": {*get_args(JobStateName), "HUNG"},
        "unbroken_job_outcome": {*OUTCOMES},
        "unbroken_gpu_health": {*GPU_STATES},
        "failure_class": {one.value for one in FailureClass},
        "unbroken_role": {"controller", "agent"},
        "check": {check.id for check in RESPONDS.values()} | {"eth_speed"},
        "level": {*get_args(Level)},
    }
    seen = 0
    text = "\n".join(re.findall(r"expr: >-\n(?: {10,}.*\n)+|(?:expr|series): .*", path.read_text()))
    for name, matchers in SERIES.findall(text):
        if name not in known:
            assert name == "ALERTS" or name.startswith("job_"), name
            continue
        seen += 1
        for label, _, value in LABEL.findall(matchers):
            assert label in {*known[name], *SCRAPED}, f"{name} has no {label}"
            assert label not in values or set(value.split("|")) <= values[label], f"{name}{{{label}={value}}}"
    assert seen or "recording" not in path.name


def test_each_page_belongs_to_an_alert() -> None:
    pages = {path.stem for path in (REPOSITORY / "docs/runbook").glob("*.md")} - {"README"}
    assert pages == {alert["alert"] for alert in alerts()}


def test_commands_of_the_pages_exist() -> None:
    context = click.Context(main)
    for path in (REPOSITORY / "docs/runbook").glob("*.md"):
        for name, options in re.findall(r"^    unbroken (\w+)([^#\n|]*)", path.read_text(), re.M):
            command = main.get_command(context, name)
            assert command is not None, f"{path.name}: unbroken {name}"
            known = {option for parameter in command.params for option in parameter.opts}
            used = set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", options))
            assert used <= known or name == "controller", f"{path.name}: unbroken {name} {used - known}"


def test_links_of_the_pages_lead_somewhere() -> None:
    for path in [*(REPOSITORY / "docs/runbook").glob("*.md"), SHIPPED / "README.md", REPOSITORY / "docs/metrics.md"]:
        for link in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
