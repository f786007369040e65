"""The Grafana dashboards: written from the table, and of metrics that exist. tests/e2e asks a real Prometheus."""

import json
import re
import runpy
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[2] / "deploy/grafana"
MADE = runpy.run_path(str(FOLDER / "make_dashboards.py"))


def test_the_files_are_written_anew() -> None:
    assert MADE["files"]() == {path.name: path.read_text() for path in FOLDER.glob("*.json")}


def test_every_query_is_of_metrics_and_rules_that_exist() -> None:
    rules = yaml.safe_load((FOLDER.parent / "prometheus/rules/unbroken-recording.yml").read_text())
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"]}
    asked = {
        name
        for one in MADE["DASHBOARDS"]
        for panel in one.panels
        for name in re.findall(r"[a-z_]+:unbroken_[a-z0-9_:]+|\bunbroken_[a-z_]+(?=[\[{\s)]|$)", panel.expression)
    }
    told = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    documented = set(re.findall(r"^\| `(unbroken_[a-z_]+)`", told, re.M)) | {"unbroken_job_waiting"}
    assert asked - recorded - documented == set()
    assert len(asked) > 20


def test_panels_do_not_overlap() -> None:
    for text in MADE["files"]().values():
        taken: set[tuple[int, int]] = set()
        for panel in json.loads(text)["panels"]:
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert at["x"] + at["w"] <= 24
            assert not cells & taken
            taken |= cells
