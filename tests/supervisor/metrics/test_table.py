"""What Prometheus is told: of which metrics, in which form, and that no text ever becomes a label."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import parser as plain_text
from prometheus_client.openmetrics import parser as open_metrics

from diagnosis.health import Check, healthy, unhealthy, unknown
from diagnosis.incident import Culprit, Opinion, Verdict
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint
from supervisor import messages as m
from supervisor.agent.link import ControllerAddress, Link
from supervisor.agent.metrics import agent_samples
from supervisor.agent.ranks import RankMonitor
from supervisor.controller.metrics import job_samples
from supervisor.job.incident_log import RECORDS_KEPT
from supervisor.job.job import Job
from supervisor.metrics.port import page, process_samples
from supervisor.metrics.table import (
    AGENT,
    CONTROLLER,
    CORDONS_NAMED,
    Family,
    Sample,
    job_name,
)
from supervisor.node_health.monitor import HealthMonitor
from supervisor.node_health.protocol import PollReport
from supervisor.paths import LocalPaths

REPOSITORY = Path(__file__).parents[3]
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
LABELS = {
    *("job", "node", "gpu", "rank", "failure_class", "phase", "kind", "state", "by", "level", "check", "probe"),
    *("test", "verdict"),
}
"""All that a sample may have; of each there are few values, or one for each node, GPU or rank."""
STATESETS = {family.name for family in (*CONTROLLER, *AGENT) if family.kind == "stateset"}
GPU = "0000:c1:00"

Driver = Any


def verdict(failure_class: FailureClass, *nodes: str, action: Any = "restart") -> Verdict:
    culprits = tuple(Culprit(node=node) for node in nodes)
    return Verdict(failure_class=failure_class, culprits=culprits, confidence=0.9, why="why it broke", action=action)


CRASH = verdict(FailureClass.WORKER_CRASH, "a")


def values(samples: Iterable[Sample]) -> dict[tuple[str, ...], float]:
    """(name, *labels) -> value; each row is there once."""
    found: dict[tuple[str, ...], float] = {}
    for sample in samples:
        key = (sample.name + sample.suffix, *sample.labels)
        assert key not in found, f"{key} twice"
        found[key] = float(sample.value)
    return found


@pytest.fixture
def driver(make_driver: Callable[..., Driver]) -> Driver:
    driver = make_driver(CRASH, nodes_min=2, nodes_max=2, spares=1)
    driver.join("a", "b", "c")
    return driver


def numbers(driver: Driver) -> dict[tuple[str, ...], float]:
    return values(job_samples(driver.job, driver.now))


# ----- the table -----


def test_names_and_labels_keep_the_conventions() -> None:
    for family in (*CONTROLLER, *AGENT):
        assert re.fullmatch(r"unbroken_[a-z0-9_]+", family.name)
        assert family.name.endswith("_total") == (family.kind == "counter"), family
        assert family.name.endswith("_info") == (family.kind == "info"), family
        assert len(family.help) > 10
        assert family.help.endswith(".")
        assert set(family.labels) <= LABELS | STATESETS | {"version", "uuid"}, family
        assert not re.search(r"_(ms|milliseconds|minutes|hours|kb|mib|percent)(_|$)", family.name), "base units"
    for table in (CONTROLLER, AGENT):
        assert len({family.name for family in table}) == len(table)


def as_markdown(families: tuple[Family, ...]) -> str:
    """A table of docs/metrics.md (a test keeps the two equal)."""
    head = ["| metric | type | labels | meaning |", "| --- " * 4 + "|"]
    rows = []
    for family in families:
        names = f"{family.name}_sum`, `{family.name}_count" if family.kind == "summary" else family.name
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{names}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join([*head, *rows]) + "\n"


def test_the_page_lists_what_there_is() -> None:
    text = (REPOSITORY / "docs/metrics.md").read_text(encoding="utf-8")
    for table in (CONTROLLER, AGENT):
        assert as_markdown(table) in text, f"docs/metrics.md wants this table:\n{as_markdown(table)}"


def test_rules_use_metrics_that_exist() -> None:
    rules = "".join(p.read_text() for p in (REPOSITORY / "deploy/prometheus/rules").glob("*.yml"))
    known = {f.name + suffix for f in (*CONTROLLER, *AGENT) for suffix in ("", "_sum", "_count")}
    used = set(re.findall(r"(?<![:\w/.])unbroken_[a-z0-9_]+(?=[{\[) ])", rules))
    assert used
    assert not used - known, "a name in the rules that no daemon tells"


# ----- a job -----


def test_a_job_before_and_after_its_first_step(driver: Driver) -> None:
    waiting = numbers(driver)
    assert waiting["unbroken_job_state", "STARTING"] == 1
    assert sum(v for k, v in waiting.items() if k[0] == "unbroken_job_state") == 1
    assert ("unbroken_job_step",) not in waiting
    driver.now += 3
    driver.up(step=5)
    driver.tell(m.Progressed, after=10, attempt=1, step=25, last_step=100)
    now = numbers(driver)
    assert now["unbroken_job_state", "RUNNING"] == 1
    assert now["unbroken_job_step",] == 25
    assert now["unbroken_job_last_step",] == 100
    assert now["unbroken_job_step_seconds",] == pytest.approx(0.5)
    assert now["unbroken_job_progress_timestamp_seconds",] == driver.now
    assert now["unbroken_job_badput_seconds_total", "startup"] == 3
    assert now["unbroken_job_ettr_ratio",] == pytest.approx(10 / 13, abs=1e-3)
    assert (now["unbroken_job_nodes", "ACTIVE"], now["unbroken_job_nodes", "SPARE"]) == (2, 1)
    assert (now["unbroken_job_spares",], now["unbroken_job_spares_wanted",]) == (1, 1)
    assert now["unbroken_job_attempts_total",] == 1
    assert now["unbroken_job_attempt_start_timestamp_seconds",] == driver.now - 10


def test_an_incident_from_its_verdict_to_the_next_first_step(driver: Driver) -> None:
    driver.up()
    driver.tell(m.Progressed, after=10, attempt=1, step=21)
    driver.crash("a", 0)
    open_now = numbers(driver)
    assert open_now["unbroken_job_open_incidents", "worker_crash"] == 1
    assert open_now["unbroken_job_incidents_total", "worker_crash"] == 1
    assert open_now["unbroken_job_recovery_seconds_count", "first_step"] == 0
    driver.now += 4
    driver.up(step=15)
    after = numbers(driver)
    assert ("unbroken_job_open_incidents", "worker_crash") not in after
    assert after["unbroken_job_incidents_total", "worker_crash"] == 1
    assert after["unbroken_job_incidents_total", "gpu_hang"] == 0, "every class has a row"
    assert after["unbroken_job_recovery_seconds_count", "first_step"] == 1
    assert after["unbroken_job_lost_steps_total",] == 7, "steps 15 to 21"
    assert after["unbroken_job_badput_seconds_total", "redo"] == pytest.approx(3.0)
    lost = sum(v for k, v in after.items() if k[0] == "unbroken_job_badput_seconds_total" and k[1] != "startup")
    assert lost == pytest.approx(driver.job.incidents.log.lost_s(driver.now), abs=0.01)
    assert after["unbroken_job_restarts_total",] == 1


def test_counters_never_fall_whatever_happens(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver(CRASH, max_restarts=1000)
    driver.join("a")
    before: dict[tuple[str, ...], float] = {}
    counted = {f.name for f in CONTROLLER if f.kind in ("counter", "summary")}
    step = 1
    for _ in range(RECORDS_KEPT + 20):
        driver.up(step=step)
        step += 1
        driver.tell(m.Progressed, after=1, attempt=driver.number, step=step)
        driver.crash("a", 0)
        now = numbers(driver)
        for key, value in before.items():
            if re.sub("_(sum|count)$", "", key[0]) in counted:
                assert now[key] >= value - 1e-6, key
        before = now
        if "backoff" in driver.job.timers:
            driver.fire("backoff")
    assert before["unbroken_job_incidents_total", "worker_crash"] == RECORDS_KEPT + 20


def test_the_newest_good_checkpoint(driver: Driver) -> None:
    seen = [
        Checkpoint(path="/c/1", step=10, format="f", complete=True, modified_at=500.0),
        Checkpoint(path="/c/2", step=20, format="f", complete=True, modified_at=600.0),
        Checkpoint(path="/c/3", step=30, format="f", complete=False, modified_at=700.0),
    ]
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=tuple(seen))
    now = numbers(driver)
    assert now["unbroken_job_checkpoint_timestamp_seconds",] == 600
    assert now["unbroken_job_checkpoint_step",] == 20
    assert (now["unbroken_job_checkpoints", "complete"], now["unbroken_job_checkpoints", "incomplete"]) == (2, 1)


def test_cordons_are_counted_by_reason_and_named_up_to_a_limit(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver(CRASH)
    driver.join(*(f"n{i}" for i in range(CORDONS_NAMED + 20)))
    for i in range(CORDONS_NAMED + 10):
        driver.order("cordon", f"n{i}")
    driver.order("cordon", f"n{CORDONS_NAMED + 12}/0000:07:00")
    now = numbers(driver)
    assert now["unbroken_job_cordons", "node", "operator", ""] == CORDONS_NAMED + 10
    assert now["unbroken_job_cordons", "gpu", "operator", ""] == 1
    assert now["unbroken_job_nodes", "CORDONED"] == CORDONS_NAMED + 11
    named = [key for key in now if key[0] == "unbroken_job_cordon_start_timestamp_seconds"]
    assert len(named) == CORDONS_NAMED


def test_what_opinions_cost_is_summed(driver: Driver) -> None:
    driver.up()
    driver.crash("a", 1)
    paid = Opinion(failure_class=FailureClass.SCRIPT_ERROR, tokens_read=900, cost=0.25)
    for opinion in (paid, msgspec.structs.replace(paid, problem="not grounded")):
        driver.tell(m.OpinionArrived, incident="i-1", opinion=opinion)
    now = numbers(driver)
    assert (now["unbroken_job_opinion_cost_total",], now["unbroken_job_opinion_tokens_total", "read"]) == (0.5, 1800)


def test_a_plan_that_cordons_and_waits_for_approval(make_driver: Callable[..., Driver]) -> None:
    bad = verdict(FailureClass.GPU_FALLEN_OFF_BUS, "a", action="cordon_node_and_restart")
    driver = make_driver(bad, nodes_min=2, nodes_max=2, spares=1, mode="recommend")
    driver.join("a", "b", "c")
    driver.up()
    driver.crash("a", 0)
    now = numbers(driver)
    assert now["unbroken_job_waiting", "approval"] == 1
    assert now["unbroken_job_cordons_proposed",] == 1
    assert now["unbroken_job_nodes", "SUSPECT"] == 1
    driver.order("approve")
    now = numbers(driver)
    assert (now["unbroken_job_waiting", "approval"], now["unbroken_job_cordons_proposed",]) == (0, 0)
    assert now["unbroken_job_cordons", "node", "policy", "gpu_fallen_off_bus"] == 1
    assert now["unbroken_job_cordon_start_timestamp_seconds", "a", "", "gpu_fallen_off_bus"] == driver.now
    assert (now["unbroken_job_breaker_cordons",], now["unbroken_job_breaker_limit",]) == (1, 2)
    assert now["unbroken_job_breaker_tripped",] == 0


def test_the_breaker_trips_and_an_operator_is_waited_for(make_driver: Callable[..., Driver]) -> None:
    bad = verdict(FailureClass.GPU_FALLEN_OFF_BUS, "a", "b", "c", action="cordon_node_and_restart")
    driver = make_driver(bad, nodes_min=2, nodes_max=4, spares=2)
    driver.join("a", "b", "c", "d", "e", "f")
    driver.up()
    driver.crash("a", 0)
    now = numbers(driver)
    assert (now["unbroken_job_breaker_tripped",], now["unbroken_job_waiting", "operator"]) == (1, 1)
    driver.order("resume")
    assert numbers(driver)["unbroken_job_breaker_tripped",] == 0


# ----- a node -----


@pytest.fixture
def health(tmp_path: Path) -> HealthMonitor:
    health = HealthMonitor("n1", tmp_path / "health.json", tmp_path / "probes")
    (tmp_path / "probes").mkdir()
    checks = tuple(
        Check(id=name, what="w", source="s", threshold="t", failure_class=failure_class, scope="gpu")
        for name, failure_class in [
            ("ecc", FailureClass.GPU_ECC_UNCORRECTABLE),
            ("hot", FailureClass.GPU_THERMAL_POWER),
        ]
    )
    health.check_states.learn({"nvml": checks})
    return health


def node_samples(health: HealthMonitor, tmp_path: Path) -> list[Sample]:
    hello = m.Hello(protocol=m.PROTOCOL, node="n1", host="h", address="", spec=m.JobSpec(name="j"))
    link = Link(lambda: ControllerAddress(""), lambda: "", hello)
    return agent_samples(health, link, RankMonitor(LocalPaths(tmp_path), None, {}))  # type: ignore[arg-type]


def test_a_node_with_gpus_in_every_state(health: HealthMonitor, tmp_path: Path) -> None:
    gpus = [f"0000:{number:02x}:00" for number in range(4)]
    results = (
        healthy("ecc", gpus[0], gpu=gpus[0], gpu_uuid="GPU-0"),
        unhealthy("hot", "text that is were not reported", gpus[0], "warning", gpu=gpus[0]),
        unhealthy("ecc", "text", gpus[1], "critical", gpu=gpus[1]),
        unhealthy("hot", "text", gpus[1], "warning", gpu=gpus[1]),
        healthy("ecc", gpus[2], gpu=gpus[2]),
        unknown("hot", "not asked", gpus[2], gpu=gpus[2]),
        unknown("ecc", "not asked", gpus[3], gpu=gpus[3]),
    )
    health.check_states.note(PollReport(probe="nvml", wall=77.0, mono=1.0, took_s=0.1, results=results))
    now = values(node_samples(health, tmp_path))
    states = {
        gpu: [s for s in ("healthy", "warning", "critical", "unknown") if now["unbroken_gpu_health", gpu, s]]
        for gpu in gpus
    }
    assert states == {gpus[0]: ["warning"], gpus[1]: ["critical"], gpus[2]: ["healthy"], gpus[3]: ["unknown"]}
    assert now["unbroken_gpu_info", gpus[0], "GPU-0"] == 1
    assert now["unbroken_gpu_unhealthy", gpus[1], "critical", "gpu_ecc_uncorrectable"] == 1
    assert now["unbroken_check_unhealthy", "hot", "warning", "gpu_thermal_power"] == 2
    assert (now["unbroken_checks", "unhealthy"], now["unbroken_checks", "unknown"]) == (3, 2)
    assert now["unbroken_probe_look_timestamp_seconds", "nvml"] == 77
    assert now["unbroken_agent_connected",] == 0
    assert now["unbroken_process_resident_memory_bytes", "agent"] > 1 << 20
    assert now["unbroken_process_cpu_seconds_total", "agent"] > 0


def test_a_process_that_has_gone_tells_nothing() -> None:
    assert list(process_samples("station_gpu", 1 << 22)) == []


# ----- the text -----


def text_of(
    families: Sequence[Family], samples: Iterable[Sample], common: Sequence[str], accept: str = OPENMETRICS
) -> str:
    names = ("job",) if families is CONTROLLER else ("job", "node")
    return page(families, samples, list(zip(names, common, strict=True)), accept, "").body.decode()


@pytest.fixture
def busy(make_driver: Callable[..., Driver]) -> Driver:
    """A job with something to tell in every family, under names that are not nice."""
    bad = verdict(FailureClass.GPU_FALLEN_OFF_BUS, "a", action="cordon_node_and_restart")
    driver = make_driver(
        bad, name='evil"} 1\n# EOF\nname', nodes_min=2, nodes_max=2, spares=1, command=("--token", "SECRET")
    )
    driver.join("a", "b", "c")
    driver.up()
    driver.tell(m.Progressed, after=5, attempt=1, step=9, last_step=100)
    checkpoint = Checkpoint(path="/c/1", step=10, format="f", complete=True, modified_at=500.0)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(checkpoint,))
    driver.crash("a", 0)
    driver.order("cordon", 'b/x"} 1\nfree text')
    driver.order("cordon", "free text, not a node")
    driver.up(step=4)
    return driver


def test_both_formats_are_read_back_by_prometheus_own_parsers(busy: Driver) -> None:
    samples = list(job_samples(busy.job, busy.now))
    name = job_name(busy.job.spec.name)
    modern = list(open_metrics.text_string_to_metric_families(text_of(CONTROLLER, samples, [name])))
    plain = list(plain_text.text_string_to_metric_families(text_of(CONTROLLER, samples, [name], "text/plain")))
    for families in (modern, plain):
        told = {(s.name, *sorted(s.labels.items())) for family in families for s in family.samples}
        assert len(told) == len(samples) + 1, "every sample arrives, and the version"
        assert {s.labels["job"] for family in families for s in family.samples} == {name}
    kinds = {family.name: family.type for family in modern}
    assert kinds["unbroken_job_state"] == "stateset"
    assert kinds["unbroken_job_restarts"] == "counter"
    assert kinds["unbroken_job_recovery_seconds"] == "summary"
    assert kinds["unbroken_build"] == "info"


@pytest.mark.prometheus
def test_promtool_has_nothing_to_remark(busy: Driver, health: HealthMonitor, tmp_path: Path) -> None:
    result = unhealthy("ecc", "text", GPU, gpu=GPU, gpu_uuid="GPU-1")
    health.check_states.note(PollReport(probe="nvml", wall=77.0, mono=1.0, took_s=0.1, results=(result,)))
    for text in (
        text_of(CONTROLLER, job_samples(busy.job, busy.now), ["j"], "text/plain"),
        text_of(AGENT, node_samples(health, tmp_path), ["j", "n1"], "text/plain"),
    ):
        done = subprocess.run(["promtool", "check", "metrics"], input=text.encode(), capture_output=True, timeout=30)
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_no_text_and_no_secret_becomes_a_label(busy: Driver) -> None:
    text = text_of(CONTROLLER, job_samples(busy.job, busy.now), ["job"])
    assert "free text" not in text
    assert "why it broke" not in text
    assert "SECRET" not in text
    assert "\n" not in job_name("a\nb")
    for labels in re.findall(r"\{(.*?)\} ", text):
        for label, value in re.findall(r'(\w+)="([^"]*)"', labels):
            assert label in LABELS | STATESETS | {"version"}
            assert re.fullmatch(r"[\w.:/-]{0,64}", value), (label, value)


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [("gzip", True), ("deflate, gzip;q=1.0", True), ("gzip;q=0", False), ("", False), ("br", False)],
)
def test_it_is_compressed_for_those_who_ask(encoding: str, packed: bool) -> None:
    answer = page(CONTROLLER, [], [("job", "j")], "", encoding)
    assert (answer.headers.get("Content-Encoding") == "gzip") == packed
    body = gzip.decompress(answer.body) if packed else answer.body
    assert body.startswith(b"# HELP unbroken_build_info")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")


def test_what_is_not_scraped_is_not_imported() -> None:
    daemons = "supervisor.agent.agent, supervisor.controller.main"
    code = f"import {daemons}, sys; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=60).returncode == 0


def test_four_thousand_nodes_hold_the_loop_up_for_milliseconds(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver(CRASH, nodes_min=4000, nodes_max=4000)
    job: Job = driver.job
    for number in range(4000):
        job.nodes.join(m.NodeJoined(at=1.0, node=f"n{number}", host="h", address="1"))
    for _ in range(3):
        driver.order("cordon", "n7")
    took = []
    for _ in range(5):
        began = time.perf_counter()
        samples = list(job_samples(job, driver.now))
        took.append(time.perf_counter() - began)
    print(f"\n{len(samples)} samples of 4,000 nodes: {min(took) * 1e3:.1f} ms on the loop")
    assert len(samples) < 300
    assert min(took) < 0.02
