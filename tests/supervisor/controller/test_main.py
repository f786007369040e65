"""The real controller as a process, and what it needs to start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from diagnosis.incident import Culprit, Verdict
from diagnosis.taxonomy import FailureClass
from supervisor.agent.link import ControllerAddress, Link, LinkTimeouts, address_reader, token_reader
from supervisor.controller.journal import Decided, Entry, open_journal
from supervisor.controller.main import ensure_token, own_address, parse_listen
from supervisor.controller.report import differences, timeline_rows
from supervisor.errors import ControllerUnreachable
from supervisor.messages import (
    PROTOCOL,
    Assign,
    Assignment,
    CommandRequest,
    ControllerMessage,
    ControllerStarted,
    Hello,
    JobSpec,
    NodeLost,
    SchedulerAnswered,
    encode,
)


def test_the_token_is_the_owners_alone(tmp_path: Path) -> None:
    token = ensure_token(tmp_path)
    assert len(token) == 48
    assert ensure_token(tmp_path) == token
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_listen_addresses() -> None:
    assert parse_listen("0.0.0.0:7461") == ("0.0.0.0", 7461)
    assert parse_listen("node7") == ("node7", 0)
    assert parse_listen(":80") == ("0.0.0.0", 80)
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_listen("host:http")
    assert own_address()


def test_sigkill_and_start_again(tmp_path: Path, rig: Any) -> None:
    async def scenario() -> None:
        hello = Hello(protocol=PROTOCOL, node="n0", host="h", address="", spec=JobSpec(name="j"))
        told: list[ControllerMessage] = []
        link = Link(address_reader(tmp_path), token_reader(tmp_path), hello)
        task = asyncio.create_task(link.run(told.append))
        for epoch in (1, 2, 3):
            process = rig.start(*(["--restarted"] if epoch > 1 else []))
            await rig.until(lambda epoch=epoch: told and isinstance(told[-1], Assignment) and told[-1].epoch == epoch)  # type: ignore[misc]
            process.kill()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    rig.go(scenario())
    assert len(os.listdir(tmp_path / "epochs")) == 3
    history = rig.history()
    assert history.problems == []
    assert len(rig.journalled(ControllerStarted)) == 3


def test_a_job_that_has_ended_begins_again_unless_it_was_only_its_controller(rig: Any) -> None:
    process = rig.start()
    process.client().command(CommandRequest(command="stop", reason="enough", by="me"))
    assert process.exit_code() == 0
    assert rig.start("--restarted").exit_code() == 0
    assert "enough" in json.dumps([row["text"] for row in timeline_rows(rig.history())])
    assert rig.start().status()["state"] == "IDLE"
    assert "enough" not in json.dumps([row["text"] for row in timeline_rows(rig.history())])


def test_a_job_whose_nodes_were_killed_at_its_end_begins_again(rig: Any, make_driver: Any) -> None:
    driver = make_driver()
    driver.now = time.time()
    driver.join("a")
    driver.order("stop")
    assert driver.job.is_over
    rig.journal(driver.journal)
    for options, state in ((["--restarted", "--of-front"], "STOPPED"), ([], "STOPPED"), (["--of-front"], "IDLE")):
        process = rig.start(*options)
        assert process.status()["state"] == state, options
        process.kill()


def test_a_job_that_its_scheduler_has_started_again_goes_on(rig: Any, make_driver: Any) -> None:
    verdict = Verdict(
        failure_class=FailureClass.NODE_FAILURE,
        culprits=(Culprit(node="b"),),
        confidence=0.9,
        why="it is gone",
        action="restart_excluding",
    )
    driver = make_driver(verdict, nodes_min=2, nodes_max=2, scheduler="slurm", scheduler_job="7")
    driver.join("a", "b")
    driver.up()
    driver.order("cordon", "n7")
    driver.tell(NodeLost, node="b", silent_s=5.0)
    driver.fire("evidence")
    driver.fire("requeue")
    driver.tell(SchedulerAnswered, number=driver.orders[-1].number, outcome="done")
    assert driver.job.outcome.state == "requeued"
    rig.journal(driver.journal)
    life = ["--scheduler-job", "7", "--requeues", "1"]
    for options in (life, [*life, "--restarted"]):
        process = rig.start(*options)
        rig.go(rig.until(lambda process=process: process.status()["requeues"] == 1))  # type: ignore[misc]
        status = process.status()
        assert (status["state"], status["outcome"], status["budget"]["used"]) == ("IDLE", None, 1)
        assert [cordon["node"] for cordon in status["cordons"]] == ["n7"]
        process.kill()
    count, found = differences(rig.history())
    assert count > len(driver.journal)
    assert found == []


def test_tls(tmp_path: Path, rig: Any) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(cert), "-keyout", str(key)]
    subprocess.run(make, check=True, capture_output=True)
    process = rig.start("--tls-cert", str(cert), "--tls-key", str(key))
    address, token = process.address, token_reader(tmp_path)
    assert address.startswith("https://")
    assert process.client(str(cert)).get("/v1/status")["state"] == "IDLE"
    with pytest.raises(ControllerUnreachable, match="certificate"):
        process.status()

    async def scenario() -> None:
        hello = Hello(protocol=PROTOCOL, node="n0", host="h", address="", spec=JobSpec(name="j"))
        told: list[ControllerMessage] = []
        trusting = Link(lambda: ControllerAddress(address), token, hello, tls_ca=str(cert))
        wary = Link(lambda: ControllerAddress(address), token, hello, timeouts=LinkTimeouts(distrusted_s=0.0))
        tasks = [asyncio.create_task(link.run(told.append)) for link in (trusting, wary)]
        await rig.until(lambda: told and trusting.connected and wary.distrust)
        assert address in wary.distrust
        assert "UNBROKEN_TLS_CA" in wary.distrust
        assert (trusting.through, trusting.distrust) == ("tls", "")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    rig.go(scenario())


def test_sigterm_ends_it_politely_and_the_port_is_kept(tmp_path: Path, rig: Any) -> None:
    process = rig.start()
    client = process.client()
    assert client.get("/v1/status")["state"] == "IDLE"
    process.popen.send_signal(signal.SIGTERM)
    assert process.exit_code() == 0
    with pytest.raises(ControllerUnreachable):
        client.get("/healthz")
    assert rig.start().client().address == client.address
    assert json.loads((tmp_path / "controller.json").read_text())["epoch"] == 2


@pytest.mark.parametrize("lived", [7, 1])
def test_a_journal_of_a_version_that_decided_otherwise_is_not_acted_upon(
    rig: Any, make_driver: Any, lived: int
) -> None:
    """After an upgrade below a living job: the new one would come to another history, and end what runs."""
    driver = make_driver()
    driver.now = time.time()
    driver.join("a")
    driver.up()
    driver.crash("a")
    driver.up()
    made = driver.number
    assert made == 2
    journal, _ = open_journal(rig.job_dir)
    for event in driver.journal:
        journal.write([Entry("event", event.at, encode(event))])
    told = Assign(assignment=Assignment(epoch=1, version=99, node="a", role="member", attempt=lived, stage="run"))
    decided = Decided(of=journal.next_seq - 1, actions=(told,))
    journal.write([Entry("decided", driver.now, encode(decided))])
    journal.close()
    process = rig.start("--restarted")
    assert process.exit_code() == 78
    assert f"attempt {lived}, and this version makes attempt {made}" in (rig.job_dir / "controller.log").read_text()
    other = rig.start()
    assert other.status()["attempt"] == made, "who starts a job in an old folder goes on with what there is"
