"""A rank hangs, a person is told: a real job, the shipped rules, real Prometheus and Alertmanager, a webhook."""

from __future__ import annotations

import json
import runpy
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

SHIPPED = Path(__file__).parents[2] / "deploy/prometheus"
LOOPBACK = "127.0.0.1"
FOR = "4s"
GONE = {"UnbrokenControllerGone", "UnbrokenAgentGone"}
FOR_GONE = "15s"
"""Prometheus takes note of a removed target file at its next two ticks of 5 s: until then who has ended well is "down".
So is who, on a loaded machine, takes longer to answer a scrape than the second until the next."""

pytestmark = [pytest.mark.e2e, pytest.mark.prometheus]


class Pager:
    """A webhook: keeps every alert it is told, with the path it came by."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        pager = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                pager.alerts += [{**alert, "path": self.path} for alert in told["alerts"]]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def told(self, name: str, status: str, **labels: str) -> list[dict[str, Any]]:
        return [
            alert
            for alert in self.alerts
            if alert["labels"]["alertname"] == name
            and alert["status"] == status
            and labels.items() <= alert["labels"].items()
        ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


class Monitoring:
    """Prometheus and Alertmanager with the shipped files, made fast: a second where they say a quarter of an hour."""

    def __init__(self, folder: Path, targets: Path) -> None:
        self.pager = Pager()
        self.port, self.alertmanager_port = free_port(), free_port()
        folder.mkdir()
        self._configure(folder, targets)
        self.processes = [
            self._start(
                folder / "prometheus.log",
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={LOOPBACK}:{self.port}",
            ),
            self._start(
                folder / "alertmanager.log",
                "prometheus-alertmanager",
                f"--config.file={folder}/alertmanager.yml",
                f"--storage.path={folder}/alerts",
                f"--web.listen-address={LOOPBACK}:{self.alertmanager_port}",
                "--cluster.listen-address=",
            ),
        ]

    def _configure(self, folder: Path, targets: Path) -> None:
        config = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
        told = {"unbroken_docs": "https://wiki.example/unbroken"}
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s", "external_labels": told}
        config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [
            f"{LOOPBACK}:{self.alertmanager_port}"
        ]
        for scrape in config["scrape_configs"]:
            scrape.pop("scrape_interval", None)
            (found,) = scrape["file_sd_configs"]
            found["files"] = [str(targets / Path(pattern).name) for pattern in found["files"]]
            found["refresh_interval"] = "1s"
        config["rule_files"] = [f"{folder}/unbroken-*.yml"]
        for path in (SHIPPED / "rules").glob("*.yml"):
            rules = yaml.safe_load(path.read_text())
            for rule in (rule for group in rules["groups"] for rule in group["rules"]):
                if "for" in rule:
                    rule["for"] = FOR_GONE if rule.get("alert") in GONE else FOR
            (folder / path.name).write_text(yaml.safe_dump(rules))
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        text = (SHIPPED / "alertmanager.yml").read_text().replace(f"{LOOPBACK}:9099", f"{LOOPBACK}:{self.pager.port}")
        for slow in ("30s", "10s", "5m"):
            text = text.replace(f"_wait: {slow}", "_wait: 1s").replace(f"_interval: {slow}", "_interval: 1s")
        (folder / "alertmanager.yml").write_text(text)

    @staticmethod
    def _start(log: Path, *command: str) -> subprocess.Popen[bytes]:
        with open(log, "wb") as output:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=log.parent)

    def query(self, expression: str) -> list[dict[str, Any]]:
        url = f"http://{LOOPBACK}:{self.port}/api/v1/query?query={quote(expression)}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        except OSError:
            return []  # it is not up yet

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)
        self.pager.server.shutdown()


def dashboards() -> tuple[Any, ...]:
    """Of deploy/grafana, which is no package."""
    found: tuple[Any, ...] = runpy.run_path(str(SHIPPED.parent / "grafana/make_dashboards.py"))["DASHBOARDS"]
    return found


def filled(panel: Any, job: str) -> str:
    """Its query, as Grafana asks it for one job and all nodes."""
    return str(panel.expression.replace("$job", job).replace("$node", ".*"))


@pytest.fixture
def monitoring(tmp_path: Path) -> Iterator[Monitoring]:
    (tmp_path / "targets").mkdir()
    monitoring = Monitoring(tmp_path / "monitoring", tmp_path / "targets")
    yield monitoring
    monitoring.end()


@pytest.mark.slow
def test_a_hung_rank_reaches_the_pager_with_its_class(
    supervise: Callable[..., Any], monitoring: Monitoring, tmp_path: Path
) -> None:
    """In mode `recommend`, so that the hang lasts until somebody says a word."""
    pager, targets = monitoring.pager, tmp_path / "targets"
    env = {"UNBROKEN_METRICS_TARGETS": str(targets)}
    job = supervise("plain", rig="relock@20:1", options=("--mode", "recommend"), env=env)
    name = job.job_dir.name
    job.until(lambda: len(monitoring.query(f'up{{job="{name}"}} == 1')) == 2, 60, "controller and agent are scraped")

    job.until(
        lambda: pager.told("UnbrokenRunStalled", "firing", job=name, failure_class="silent_hang"),
        60,
        "the page, with its class",
    )
    (alert, *_) = pager.told("UnbrokenRunStalled", "firing", failure_class="silent_hang")
    assert alert["path"] == "/page"
    assert alert["labels"]["severity"] == "page"
    assert alert["annotations"]["summary"] == f"{name} does not train (silent_hang)"
    assert alert["annotations"]["runbook_url"] == "https://wiki.example/unbroken/runbook/UnbrokenRunStalled.md"
    assert "unbroken_docs" not in alert["labels"], "it has done its work"
    (incident,) = job.incidents()
    assert incident["verdict"]["failure_class"] == "silent_hang"
    (step,) = monitoring.query(f'unbroken_rank_step{{job="{name}",rank="0"}}')
    assert int(step["value"][1]) >= 12

    silent = {panel.title for one in dashboards() for panel in one.panels if not monitoring.query(filled(panel, name))}
    assert not silent, "dashboards show nothing there"

    job.ask("approve", "--yes")
    job.until(
        lambda: pager.told("UnbrokenRunStalled", "resolved", failure_class="silent_hang"), 60, "it is over, and is told"
    )
    job.succeeds()
    job.until(lambda: not list(targets.iterdir()), 30, "the job has ended: nobody is missed")
    job.until(lambda: not monitoring.query(f'up{{job="{name}"}}'), 30, "Prometheus forgets them")
    assert not [alert for alert in pager.alerts if alert["labels"]["alertname"] in GONE]


@pytest.mark.slow
def test_a_gpu_that_degrades_reaches_the_pager(
    supervise: Callable[..., Any], monitoring: Monitoring, tmp_path: Path, flaw: dict[str, str]
) -> None:
    env = {**flaw, "UNBROKEN_METRICS_TARGETS": str(tmp_path / "targets")}
    job = supervise("plain", steps=2000, env=env)
    well = 'unbroken_gpu_health{gpu="0000:c1:00",unbroken_gpu_health="healthy"} == 1'
    job.until(lambda: monitoring.query(well), 40, "a healthy GPU")
    Path(flaw["FLAW"]).touch()
    found = job.until(
        lambda: monitoring.pager.told("UnbrokenGpuDegrading", "firing", gpu="0000:c1:00"), 40, "the page of the GPU"
    )
    assert found[0]["path"] == "/page"
    assert found[0]["labels"]["failure_class"] == "gpu_ecc_uncorrectable"
    assert found[0]["labels"]["node"]
    assert "two uncorrected errors" not in json.dumps(monitoring.query('{__name__=~"unbroken_.*"}'))

    before = {path: path.read_bytes() for path in (tmp_path / "targets").iterdir()}
    for role in ("agent", "controller"):
        killed = job.process(role)
        killed.kill()
        killed.wait(10)
    for newer in ("unbroken_controller_epoch == 2", 'resets(unbroken_process_cpu_seconds_total{kind="agent"}[1m]) > 0'):
        job.until(lambda query=newer: monitoring.query(query), 60, newer)
    assert {path: path.read_bytes() for path in before} == before, "at the ports they had"

    job.end()  # as scancel would: nobody is left to say that it is over
    job.until(lambda: monitoring.pager.told("UnbrokenControllerGone", "firing"), 60, "the page of the controller")


@pytest.mark.slow
def test_a_job_that_fails_waits_until_prometheus_knows(
    supervise: Callable[..., Any], monitoring: Monitoring, tmp_path: Path
) -> None:
    env = {"UNBROKEN_METRICS_TARGETS": str(tmp_path / "targets")}
    job = supervise("plain", rig="segfault@200:1", steps=400, pace=0.1, options=("--max-restarts", "0"), env=env)
    name = job.job_dir.name
    job.until(lambda: len(monitoring.query(f'up{{job="{name}"}} == 1')) == 2, 60, "controller and agent are scraped")
    assert job.code(90) == 91
    (alert,) = job.until(lambda: monitoring.pager.told("UnbrokenJobFailed", "firing", job=name), 60, "the page")
    assert alert["path"] == "/page"
    assert list((tmp_path / "targets").iterdir()) == []
