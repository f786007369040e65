"""What the kernel said of late, through real descriptors that give one record a read, and a journal program."""

from __future__ import annotations

import os
import socket
import time

import pytest

from supervisor.node_health import kernel_log
from supervisor.node_health.contract import Moment, ProbeContext, Site
from supervisor.node_health.kernel_log import CHECKS, KernelMessagesProbe

MINUTE = 60.0
UPTIME = 100_000.0
NOW = Moment(wall=1.8e9, mono=UPTIME)
XID_79 = "NVRM: Xid (PCI:0000:c1:00): 79, pid=77, name=python, GPU has fallen off the bus."
XID_31 = "NVRM: Xid (PCI:0000:c1:00): 31, pid=77, name=python, MMU Fault"
AER = "pcieport 0000:16:01.1: AER: Corrected error message received from 0000:17:00.0"


def record(text, ago_s, number=1):
    return f"3,{number},{int((UPTIME - ago_s) * 1e6)},-;{text}\n SUBSYSTEM=pci\n".encode()


@pytest.fixture
def look(monkeypatch, tmp_path):
    """Looks at these records, as `unbroken check` does: every call is a process of its own."""

    def look(*records, at=NOW, **site):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            ours.setblocking(False)
            for one in records:
                theirs.send(one)
            monkeypatch.setattr(kernel_log, "open_device", lambda: os.dup(ours.fileno()))
            place = ProbeContext(state_dir=tmp_path / "state", once=True, site=Site(**site))
            results = KernelMessagesProbe().look(place, at)
        return {(one.check.removeprefix("kernel_log_"), one.device): one for one in results}

    return look


def bad(results):
    return {key: one.level for key, one in results.items() if one.status == "unhealthy"}


def test_each_failure_has_its_class_and_device(look):
    found = look(record(XID_79, 120), record(AER, 60, 2), record(XID_31, 50, 3), record("usb 1-1: new device", 1, 4))
    assert bad(found) == {("gpu_fallen_off_bus", "0000:c1:00"): "critical", ("pcie_error", "0000:17:00"): "warning"}
    fallen = found["gpu_fallen_off_bus", "0000:c1:00"]
    assert fallen.gpu == "0000:c1:00"
    assert fallen.text.startswith("07:58:00 UTC: NVRM: Xid")
    assert {one.status for key, one in found.items() if key not in bad(found)} == {"healthy"}
    assert {key[0] for key in found} == {check.id.removeprefix("kernel_log_") for check in CHECKS.values()}


def test_what_was_said_longer_ago_is_over_but_nothing_between_two_looks_is_missed(look):
    old = record(XID_79, 15 * MINUTE)
    assert bad(look(old)) == {}
    later = Moment(wall=NOW.wall + 30 * MINUTE, mono=NOW.mono + 30 * MINUTE)
    new = record(XID_79, -5 * MINUTE)  # five minutes after the first look
    assert bad(look(old, new, at=later)) == {("gpu_fallen_off_bus", "0000:c1:00"): "critical"}
    assert bad(look(old, new, at=Moment(wall=later.wall + 1, mono=later.mono + 1))) == {}


def test_a_site_says_how_long_and_what_a_message_means(look):
    limits = {check.id: {"minutes": 20.0} for check in CHECKS.values()}
    assert bad(look(record(XID_79, 15 * MINUTE), limits=limits))
    assert bad(look(record(XID_79, 60), tables={"xid": {"79": {"severity": "warning"}}})) == {
        ("gpu_fallen_off_bus", "0000:c1:00"): "warning"
    }


def test_a_storm_is_bounded(look, monkeypatch):
    monkeypatch.setattr(kernel_log, "RECORDS", 50)
    storm = [record(XID_79.replace("c1", f"{n:02x}"), 60, n) for n in range(100)]
    assert 0 < len(bad(look(*storm))) <= 50


def test_where_nothing_can_be_read_it_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_log, "DEVICE", str(tmp_path / "kmsg"))
    monkeypatch.setenv("PATH", str(tmp_path))
    results = KernelMessagesProbe().look(ProbeContext(once=True), NOW)
    assert {one.status for one in results} == {"unknown"}
    assert "No such file" in results[0].text


JOURNAL = """#!/bin/sh
echo "$@" > "$0.asked"
echo "{at} node kernel: {text}"
"""


def journal(monkeypatch, tmp_path, script):
    (tmp_path / "journalctl").write_text(script)
    (tmp_path / "journalctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(kernel_log, "DEVICE", str(tmp_path / "kmsg"))
    monkeypatch.setattr(kernel_log, "may_read_journal", lambda: True)


def test_else_the_journal_is_read(monkeypatch, tmp_path):
    journal(monkeypatch, tmp_path, JOURNAL.format(at=f"{NOW.wall - 60:.6f}", text=XID_79))
    results = KernelMessagesProbe().look(ProbeContext(once=True), NOW)
    assert [(one.device, one.level) for one in results if one.status == "unhealthy"] == [("0000:c1:00", "critical")]
    assert f"--since=@{int(NOW.wall - 600)}" in (tmp_path / "journalctl.asked").read_text()


def test_a_journal_that_does_not_answer_is_not_waited_for(monkeypatch, tmp_path):
    journal(monkeypatch, tmp_path, "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(kernel_log, "JOURNAL_S", 0.2)
    began = time.monotonic()
    results = KernelMessagesProbe().look(ProbeContext(once=True), NOW)
    assert time.monotonic() - began < 30
    assert "no answer in 0.2 s" in results[0].text


def test_a_captured_tree_has_none(tmp_path):
    results = KernelMessagesProbe().look(ProbeContext(root=tmp_path, once=True), NOW)
    assert {one.status for one in results} == {"not_applicable"}
