"""Alerts from outside: what a post means, who may send one, and that none of them moves the job."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from supervisor.cli.main import main as command_line
from supervisor.config import load_site, read_toml
from supervisor.controller import access, alerts
from supervisor.controller.alerts import KnownNode, PostedAlert, Webhook, changed, read_rules, translate
from supervisor.controller.client import ControllerClient
from supervisor.controller.main import alert_receiver
from supervisor.errors import AccessRefused, ConfigError
from supervisor.messages import AlertsSeen, OutsideAlert
from supervisor.wire.access import derived_token

OURS = read_rules(read_toml(alerts.RULES)["alert"], "ours")
NODES = (KnownNode("n1", ("host1.cluster", "10.0.0.1")), KnownNode("n2", ("host2.cluster", "10.0.0.2")))


def posted(status: str = "firing", **labels: str) -> PostedAlert:
    return PostedAlert(status=status, labels=labels, annotations={"summary": "a\nsentence"})  # type: ignore[arg-type]


def found(*posts: PostedAlert, rules: Any = OURS) -> alerts.Translated:
    return translate(Webhook(alerts=list(posts)), rules, NODES, 1000.0)


# ----- what a post means -----


@pytest.mark.parametrize(
    ("labels", "failure_class"),
    [
        ({"alertname": "GpuXidError", "err_code": "79"}, "gpu_fallen_off_bus"),
        ({"alertname": "GPUXIDErrors"}, "gpu_driver"),
        ({"alertname": "GPUDoubleBitECC"}, "gpu_ecc_uncorrectable"),
        ({"alertname": "GPUTemperatureCritical"}, "gpu_thermal_power"),
        ({"alertname": "NVLinkErrors"}, "nvlink_error"),
        ({"alertname": "NodeFilesystemAlmostOutOfSpace"}, "disk_full"),
        ({"alertname": "NodeRAIDDegraded"}, "storage_error"),
        ({"alertname": "NodeNetworkReceiveErrs"}, "nccl_network"),
        ({"alertname": "NodeMemoryHighUtilization"}, "host_oom"),
        ({"alertname": "InstanceDown"}, "node_failure"),
        ({"alertname": "NVSentinelNodeUnhealthy"}, "unknown"),
    ],
)
def test_the_rules_that_come_with_it(labels: dict[str, str], failure_class: str) -> None:
    (one,) = found(posted(Hostname="n1", **labels)).firing
    assert (one.node, one.failure_class.value, one.suspect) == ("n1", failure_class, False)
    assert one.text == "a sentence"


@pytest.mark.parametrize(
    ("named", "node"),
    [
        ("n1", "n1"),
        ("N1", "n1"),
        ("n1.cluster:9400", "n1"),
        ("host2.cluster", "n2"),
        ("host2:9100", "n2"),
        ("10.0.0.2:9100", "n2"),
        ("10.0.0.21", ""),
        ("10", ""),
        ("n11", ""),
        ("", ""),
        ("\x1b[31m" + "x" * 10_000, ""),
    ],
)
def test_which_node_is_meant(named: str, node: str) -> None:
    told = found(posted(alertname="GpuXid", instance=named))
    assert [one.node for one in told.firing] == ([node] if node else [])
    assert bool(told.answer.unknown_nodes) is not bool(node)
    assert all(len(one) <= 60 and one.isprintable() for one in told.answer.unknown_nodes)


def test_a_name_that_means_two_nodes_means_none() -> None:
    nodes = (KnownNode("a", ("host.rack1",)), KnownNode("b", ("host.rack2",)))
    told = translate(Webhook(alerts=[posted(alertname="GpuXid", node="host")]), OURS, nodes, 0.0)
    assert (told.firing, told.answer.unknown_nodes) == ((), ("host",))
    (one,) = translate(Webhook(alerts=[posted(alertname="GpuXid", node="host.rack2")]), OURS, nodes, 0.0).firing
    assert one.node == "b"


def test_what_no_rule_is_about_is_dropped_and_our_own_alerts_are() -> None:
    told = found(posted(alertname="Watchdog", node="n1"), posted(alertname="UnbrokenJobHeld", node="n1"))
    assert (told.firing, told.answer.unmatched) == ((), 2)


def test_a_site_decides_what_is_a_suspect() -> None:
    row = {"id": "ours", "match": {"alertname": "Fabric", "severity": "critical"}, "severity": "suspect"}
    rules = (*read_rules([{**row, "class": "nccl_network", "node": ["rack_node"]}], "site"), *OURS)
    (one,) = found(posted(alertname="Fabric", severity="critical", rack_node="n2"), rules=rules).firing
    assert (one.node, one.suspect) == ("n2", True)
    (other,) = found(posted(alertname="Fabric", severity="warning", node="n2"), rules=rules).firing
    assert not other.suspect
    (leaves,) = found(
        posted(alertname="Fabric", severity="critical", rack_node="n2"),
        rules=read_rules([{**row, "severity": "swap", "node": ["rack_node"]}], "site"),
    ).firing
    assert (leaves.suspect, leaves.swap) == (False, True)


@pytest.mark.parametrize(
    "row",
    [
        {"id": "x"},
        {"id": "x", "match": {}},
        {"id": "x", "match": {"a": "("}},
        {"id": "x", "match": {"a": "(a*)*b"}},
        {"id": "x", "match": {"a": ["b", "Port.*"]}},
        {"id": "x", "match": {"a": "b"}, "severity": "cordon"},
        {"id": "x", "match": {"a": "b"}, "class": "no_such_class"},
        {"id": "x", "match": {"a": "b"}, "matches": 1},
    ],
)
def test_a_rule_that_cannot_be_used_is_named(row: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"site\.toml"):
        read_rules([row], "site.toml")


def test_one_bad_rule_leaves_the_others_but_no_swap_behind_it(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text(
        '# [[alert]] in a comment\n[[alert]]\nid = "a"\nmatch = {x = "1"}\nseverity = "swap"\n'
        '[[ alert ]]\nid = "b"\nmatch = {x = "1.*"}\n[[alert]]\nid = "c"\nmatch = {x = "2"}\nseverity = "swap"\n'
    )
    found = alerts.site_rules(load_site(str(site)).alert, str(site))
    assert [(rule.id, rule.severity) for rule in found.rules] == [("a", "swap"), ("c", "tell")]
    (problem,) = found.problems
    assert f"{site}, line 6" in problem
    assert "'b'" in problem
    control = SimpleNamespace(job=None, submit=None)
    assert [rule.id for rule in alert_receiver(control, str(site))._rules[:2]] == ["a", "c"]  # type: ignore[arg-type]


@pytest.mark.parametrize("command", [["config"], ["check", "--only", "uptime"], ["run", "true"]])
def test_a_bad_rule_is_named_to_who_can_mend_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("site.toml").write_text('[[alert]]\nid = "b"\nmatch = {}\n')
    Path("unbroken.toml").write_text("[run]\nsite_file = 'site.toml'\n")
    monkeypatch.setattr("supervisor.run.front.main", lambda *_: 0)
    assert "site.toml, line 1" in CliRunner().invoke(command_line, command).output


@pytest.mark.parametrize(
    ("value", "pattern", "is_so"),
    [
        ("PortFlap", "portflap", True),
        ("PortFlap", "Port", False),
        ("PortFlap", "*", True),
        ("", "*", True),
        ("GPUTempHigh", "*gpu*temp*", True),
        ("TempGPU", "*gpu*temp*", False),
        ("aba", "ab*ba", False),
        ("abxba", "ab*ba", True),
        ("a" * 200, "*a" * 99 + "b", False),
    ],
)
def test_a_star_stands_for_any_text(value: str, pattern: str, is_so: bool) -> None:
    assert alerts.is_like(value, pattern) is is_so


def test_one_of_several_values_is_enough() -> None:
    rules = read_rules([{"id": "x", "match": {"alertname": ["PortFlap*", "PortDown*"]}}], "site")
    named = ("PortFlapping", "PortDown", "PortUp")
    assert [bool(found(posted(alertname=one, node="n1"), rules=rules).firing) for one in named] == [True, True, False]


def test_only_what_is_new_is_told_to_the_job() -> None:
    first = found(posted(alertname="GpuXid", node="n1"), posted(alertname="GpuXid", node="n1", gpu="1"))
    event = changed(first, {}, 1000.0)
    assert event is not None
    assert len(event.firing) == 2
    firing = {one.key: one for one in event.firing}
    assert changed(first, firing, 1100.0) is None
    assert changed(first, firing, 1000.0 + alerts.HEARD_S) is not None, "it is told again that it still fires"
    over = changed(found(posted("resolved", alertname="GpuXid", node="n1")), firing, 1200.0)
    assert over is not None
    assert (over.firing, len(over.ended)) == ((), 1)
    assert changed(found(posted("resolved", alertname="GpuXid", node="n2")), firing, 1200.0) is None


def test_a_post_is_read_in_part_if_it_is_long() -> None:
    told = found(*[posted(alertname="GpuXid", node="n1", n=str(n)) for n in range(alerts.MOST_READ + 7)])
    assert (len(told.firing), told.answer.left_out) == (alerts.MOST_READ, 7)


# ----- at the port -----


class Heard:
    """A job that keeps what it is told."""

    def __init__(self) -> None:
        self.firing: dict[str, OutsideAlert] = {}
        self.events: list[AlertsSeen] = []
        self.stall = ""

    def submit(self, event: AlertsSeen) -> asyncio.Future[Any]:
        self.events.append(event)
        self.firing |= {one.key: one for one in event.firing}
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def receiver(self) -> alerts.AlertReceiver:
        job = alerts.JobOfAlerts(lambda: NODES, lambda: self.firing, self.submit, lambda: self.stall, lambda: False)
        return alerts.AlertReceiver(OURS, job)


def body(*posts: PostedAlert) -> bytes:
    told = [{"status": one.status, "labels": one.labels, "annotations": one.annotations} for one in posts]
    return json.dumps({"version": "4", "status": "firing", "alerts": told, "orgId": 1}).encode()


def test_posts_are_bounded() -> None:
    heard = Heard()
    receiver = heard.receiver()

    async def scenario() -> None:
        for _ in range(alerts.POSTS):
            assert (await receiver.take(body(posted(alertname="GpuXid", node="n1")), 1000.0)).firing == 1
        with pytest.raises(AccessRefused) as refused:
            await receiver.take(body(), 1000.0)
        assert refused.value.status == 429
        await receiver.take(body(), 1002.0)
        heard.stall = "no space"
        await receiver.take(body(posted(alertname="GpuXid", node="n1")), 1030.0)
        with pytest.raises(AccessRefused) as refused:
            await receiver.take(body(posted(alertname="GpuXid", node="n2")), 1030.0)
        assert refused.value.status == 503, "Alertmanager posts it again"

    asyncio.run(scenario())
    assert len(heard.events) == 1, "what is known is not told again"


def test_one_who_alternates_does_not_fill_the_journal() -> None:
    heard = Heard()
    receiver = heard.receiver()
    many = [posted(alertname="GpuXid", node="n1", n=str(number)) for number in range(alerts.MOST_READ)]
    over = [posted("resolved", **one.labels) for one in many]
    left_out = []

    async def scenario() -> None:
        for turn in range(60):
            left_out.append((await receiver.take(body(*many), 1000.0 + 2 * turn)).left_out)
            await receiver.take(body(*over), 1001.0 + 2 * turn)
            heard.firing.clear()

    asyncio.run(scenario())
    assert sum(len(event.firing) for event in heard.events) <= alerts.NEW_ALERTS + 2 * alerts.POSTS
    assert (left_out[0], left_out[-1]) == (0, alerts.MOST_READ - 2), "the sender is told"


def post(address: str, data: bytes, authorization: str) -> int:
    request = urllib.request.Request(f"{address}/v1/alerts", data, {"Authorization": authorization}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_only_a_token_for_alerts_may_send_them(rig: Any) -> None:
    tokens = {}
    for number, role in enumerate(("alerts", "operate"), 1):
        access.add_grant(rig.job_dir, access.Grant(id=f"{number:08x}", role=role))  # type: ignore[arg-type]
        tokens[role] = derived_token("secret", role, f"{number:08x}")  # type: ignore[arg-type]
    heard = Heard()

    async def scenario() -> None:
        async with rig.controller(alerts=heard.receiver()) as running:

            async def sent(data: bytes, authorization: str) -> int:
                return await asyncio.to_thread(post, running.address, data, authorization)

            good, data = f"Bearer {tokens['alerts']}", body(posted(alertname="GpuXid", node="n1"))
            assert await sent(data, good) == 200
            assert await sent(data, f"Bearer {tokens['operate']}") == 401
            assert await sent(data, "Bearer secret") == 401
            assert await sent(data, f"Bearer {tokens['alerts'][:-1]}0") in (200, 401)
            assert await sent(data, "") == 401
            owner = ControllerClient(running.address, "secret")
            told = await asyncio.to_thread(owner._ask, "POST", "/v1/alerts", body(posted(alertname="x", node="n1")))
            assert told["unmatched"] == 1, "the owner may, too"
            for wrong in (b"", b"[]", b"{}", b'{"alerts":{}}', b'{"alerts":[{"status":"x"}]}', b"[" * 60_000):
                assert await sent(wrong, good) == 400
            assert await sent(b" " * (alerts.BODY_BYTES + 1), good) == 413
            assert await sent(b" " * 200_000 + data, good) == 200
            access.withdraw_grant(rig.job_dir, "00000001")
            while await sent(data, good) == 200:
                await asyncio.sleep(0.05)
            assert await sent(data, good) == 403

    rig.go(scenario())
    assert [one.node for event in heard.events for one in event.firing] == ["n1"]


# ----- the real Alertmanager -----


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.slow
@pytest.mark.prometheus
def test_a_real_alertmanager_tells_of_a_node_and_that_it_is_well(rig: Any, tmp_path: Path) -> None:
    url, folder = f"http://127.0.0.1:{free_port()}", tmp_path / "am"
    folder.mkdir()
    access.add_grant(rig.job_dir, access.Grant(id="00000001", role="alerts"))
    heard = Heard()
    program = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager") or ""
    amtool = ["amtool", f"--alertmanager.url={url}"]

    async def scenario() -> None:
        async with rig.controller(alerts=heard.receiver()) as running:
            (folder / "token").write_text(derived_token("secret", "alerts", "00000001"))
            (folder / "am.yml").write_text(
                "route: {receiver: unbroken, group_wait: 0s, group_interval: 1s, repeat_interval: 1h}\n"
                "receivers:\n- name: unbroken\n  webhook_configs:\n"
                f"  - url: {running.address}/v1/alerts\n    send_resolved: true\n    http_config:\n"
                f"      authorization: {{credentials_file: {folder}/token}}\n"
            )
            daemon = subprocess.Popen(
                [
                    program,
                    f"--config.file={folder}/am.yml",
                    f"--storage.path={folder}/data",
                    f"--web.listen-address={url.partition('//')[2]}",
                    "--cluster.listen-address=",
                ],
                stderr=open(folder / "log", "wb"),  # noqa: SIM115
            )
            try:
                add = [*amtool, "alert", "add", "GpuXidError", "Hostname=host1.cluster", "err_code=79", "gpu=3"]
                await run_until_done([*add, "--annotation=summary=Xid 79 on GPU 3"], daemon)
                await rig.until(lambda: heard.events)
                (one,) = heard.events[0].firing
                assert (one.node, one.failure_class.value, one.gpu) == ("n1", "gpu_fallen_off_bus", "3")
                now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                await run_until_done([*add, f"--end={now}"], daemon)
                await rig.until(lambda: len(heard.events) > 1)
                assert heard.events[1].ended == (one.key,)
            finally:
                daemon.terminate()
                daemon.wait(30)

    rig.go(scenario())


async def run_until_done(command: list[str], daemon: subprocess.Popen[bytes]) -> None:
    """It may take a moment until the daemon listens."""
    deadline = time.monotonic() + 60
    while True:
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, env=dict(os.environ), timeout=60)
        if done.returncode == 0:
            return
        assert daemon.poll() is None
        assert time.monotonic() < deadline, done.stderr
        await asyncio.sleep(0.1)
