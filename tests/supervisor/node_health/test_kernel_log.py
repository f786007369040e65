"""The kernel log's sources (files, the real /dev/kmsg, a journal program) and what becomes of their lines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diagnosis.signals import Signal
from supervisor.keeper_client import WorkerProcess
from supervisor.node_health import kernel_log
from supervisor.node_health.contract import Moment, ProbeContext, Site
from supervisor.node_health.kernel_log import CHECKS, DEVICE, KernelLog, KernelMessagesProbe, KmsgRecords
from supervisor.node_health.state import CheckStates
from tests.conftest import runs, until

XID = "NVRM: Xid (PCI:0000:c1:00): 79, pid=77, name=python, GPU has fallen off the bus."


def line(text, at=1000.0, source="kernel"):
    return Signal(source=source, text=text, at=at, mono=5.0)


def worker(pid, rank):
    return WorkerProcess(attempt=1, rank=rank, local_rank=rank, pid=pid)


WORKERS = [worker(77, 3), worker(78, 4)]


def read_until(log, wanted, seconds=60.0):
    """Texts that were polled until all of `wanted` were among them."""
    texts, until = [], time.monotonic() + seconds
    while not all(any(one in text for text in texts) for one in wanted):
        assert time.monotonic() < until, f"not seen: {wanted} in {len(texts)} lines"
        texts += log.read()
        time.sleep(0.01)
    return texts


# ----- sources -----


def test_a_rotated_file_is_followed(tmp_path):
    path = tmp_path / "kern.log"
    path.write_text("old\n")
    log = KernelLog(str(path))
    path.rename(tmp_path / "kern.log.1")
    path.write_text("new file\n")
    assert read_until(log, ["new file"]) == ["new file"]
    path.write_text("cut\n")
    assert read_until(log, ["cut"]) == ["cut"]
    log.close()


def test_no_path_is_no_kernel_log_and_no_problem():
    log = KernelLog("")
    assert (log.read(), log.problem, log.lost) == ([], "", 0)
    log.close()


def test_a_flood_is_bounded(tmp_path):
    path = tmp_path / "kern.log"
    path.touch()
    log = KernelLog(str(path))
    path.write_text("x\n" * 100_000 + "y" * 100_000 + "\n")
    assert len(log.read()) <= 2000
    for _ in range(10):
        for told in log.read():
            assert len(told) <= 2000
    log.close()


def test_the_first_lines_of_a_flood_are_not_lost(tmp_path):
    path = tmp_path / "kern.log"
    path.touch()
    log = KernelLog(str(path))
    path.write_text("".join(f"{number}\n" for number in range(5000)))
    assert [text for _ in range(4) for text in log.read()] == [*map(str, range(5000))]
    log.close()


@pytest.mark.root
def test_what_programs_write_into_the_real_kernel_log_is_not_the_kernels_word():
    """With words that accuse nothing: jobs of other tests on this machine read the same log."""
    token = f"unbroken-test-{os.getpid()}-{time.monotonic_ns()}"
    log = KernelLog(DEVICE)
    raw = os.open(DEVICE, os.O_RDONLY | os.O_NONBLOCK)
    os.lseek(raw, 0, os.SEEK_END)
    assert (log.source, log.problem) == (DEVICE, "")
    for level in (6, 14):  # whatever facility it claims, the kernel makes it that of user programs
        with open(DEVICE, "w") as kmsg:
            kmsg.write(f"<{level}>{token} Xid (PCI:0000:c1:00), pid=77\n")
    assert token in os.read(raw, 8192).decode()
    os.close(raw)
    assert not any(token in told for _ in range(3) for told in log.read())
    assert log.lost == 0
    log.close()


def test_records_that_the_ring_dropped_are_counted_and_fragments_joined():
    """A packet socket keeps records apart as the device does."""
    kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    records = KmsgRecords(ours.detach())
    for record in (
        b"6,10,1000,-;one\n SUBSYSTEM=pci\n DEVICE=+pci:0000:00:00.0\n",
        b"6,11,1000,c;two,",
        b"6,12,1000,+; go on\n",
        b"14,112,1000,-;a program's words\n",
        b"6,113,1000,-,caller=T7;three\n",
        b"no record at all",
    ):
        kernel.send(record)
    assert records.read() == ["one", "two, go on", "three", "no record at all"]
    assert records.lost == 99
    kernel.close()
    assert records.read() == []
    records.close()


def test_a_kernel_log_that_may_not_be_read_is_looked_for_elsewhere(tmp_path, monkeypatch):
    """No right to the device: the journal where it may be read, then log files, then words."""
    monkeypatch.setenv("PATH", str(tmp_path))
    log = KernelLog(DEVICE, root=tmp_path)
    assert "cannot be read" in log.problem
    assert log.read() == []

    file = tmp_path / "var/log/messages"
    file.parent.mkdir(parents=True)
    file.touch()
    log = KernelLog(DEVICE, root=tmp_path)
    assert (log.source, log.problem) == ("/var/log/messages", "")
    with file.open("a") as stream:
        stream.write(f"Jan  1 00:00:00 n1 logger: {XID.replace('79', '74')}\n")
        stream.write(f"Jan  1 00:00:00 n1 kernel: {XID}\n")
    assert not any("logger" in text for text in read_until(log, [XID]))
    log.close()

    journal = tmp_path / "var/log/journal/0123/system.journal"
    journal.parent.mkdir(parents=True)
    journal.touch()
    program = tmp_path / "journalctl"
    program.write_text(
        f"#!/bin/sh\necho \"$*\" > {tmp_path}/asked\necho '1737133843.250000 n1 kernel: {XID}'\nexec /bin/sleep 60\n"
    )
    program.chmod(0o755)
    log = KernelLog(DEVICE, root=tmp_path)
    assert log.source == "journal"
    read_until(log, [XID])
    assert "SYSLOG_FACILITY=0" in (tmp_path / "asked").read_text().split()
    log.close()


def test_the_journals_reader_ends_with_us(tmp_path):
    journal = tmp_path / "var/log/journal/0123/system.journal"
    journal.parent.mkdir(parents=True)
    journal.touch()
    program = tmp_path / "journalctl"
    program.write_text("#!/bin/sh\necho 1737133843.250000 n1 kernel: pid $$\nexec /bin/sleep 300\n")
    program.chmod(0o755)
    code = (
        "import sys, time; from pathlib import Path; from supervisor.node_health.kernel_log import KernelLog\n"
        "log = KernelLog('/dev/kmsg', root=Path(sys.argv[1]))\n"
        "while not (lines := log.read()): time.sleep(0.01)\n"
        "print(lines[0], flush=True); time.sleep(300)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        reader = int(parent.stdout.readline().rsplit(" ", 1)[1])
        parent.kill()
    until(lambda: not runs(reader), 60, "the end of the reader")


# ----- findings -----


def test_findings_are_joined_to_ranks_and_carry_where_and_when():
    log = KernelLog(checks=CheckStates("n1", "b", steps=lambda: {3: 7, 4: 9}))
    (finding,) = log.findings_in([line(XID)], WORKERS)
    assert (finding.rank, finding.node, finding.gpu, finding.rule) == (3, "n1", "0000:c1:00", "xid_79")
    assert (finding.step, finding.mono, finding.boot_id, finding.at) == (7, 5.0, "b", 1000.0)
    assert (finding.evidence.node, finding.evidence.rank, finding.evidence.source) == ("n1", 3, "kernel")


def test_the_drivers_event_and_the_kernels_line_are_one():
    log = KernelLog()
    event = line("NVRM: Xid (PCI:0000:c1:00): 79", source="gpu")
    (finding,) = log.findings_in([event], WORKERS)
    assert finding.evidence.source == "gpu"
    assert log.findings_in([line(XID, 1001.0)], WORKERS) == []
    assert KernelLog().findings_in([line(XID), event], WORKERS)[0].evidence.source == "kernel"


def test_an_oom_kill_over_several_polls_is_one_finding():
    log = KernelLog()
    summary = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/s,task_memcg=/s,task=python,pid=78,uid=0"
    assert log.findings_in([line("python invoked oom-killer: gfp_mask=0xcc0"), line(summary)], WORKERS) == []
    killed = line("Memory cgroup out of memory: Killed process 78 (python) total-vm:4204kB")
    (finding,) = log.findings_in([killed], WORKERS)
    assert (finding.rank, finding.fields["pid"], finding.fields["cgroup"]) == (4, "78", "/s")
    assert log.findings_in([line("oom_reaper: reaped process 78 (python), now anon-rss:0kB")], WORKERS) == []


def own_group() -> str:
    """The control group of this process, as the kernel's log names the one that is out of memory."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    return next((path for _, names, path in lines if "memory" in names.split(",")), lines[-1][2])


OTHERS = "/system.slice/another-job.scope"
GONE = 1 << 23
"""No process has this number."""
INITIAL = os.readlink("/proc/self/ns/cgroup") == "cgroup:[4026531835]"


@pytest.mark.parametrize(
    ("cgroup", "pid", "rank_pids", "told"),
    [
        (OTHERS, 5151, (os.getpid(),), not INITIAL),
        (OTHERS, 5151, (os.getpid(), GONE), True),  # it may have been in that group
        (OTHERS, GONE, (os.getpid(), GONE), True),
        (own_group(), 5151, (os.getpid(),), True),
        ("/", 5151, (os.getpid(),), True),
    ],
)
def test_a_kill_for_the_limit_of_another_control_group_is_not_the_job_s(
    cgroup: str, pid: int, rank_pids: tuple[int, ...], told: bool
) -> None:
    log = KernelLog()
    workers = [worker(one, rank) for rank, one in enumerate(rank_pids)]
    where = f"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg={cgroup},task=python,pid={pid},uid=0"
    found = log.findings_in(
        [line(where), line(f"Memory cgroup out of memory: Killed process {pid} (python) total-vm:4204kB")], workers
    )
    assert [finding.fields["pid"] for finding in found] == [str(pid)] * told


def test_what_waits_for_more_lines_is_told_when_none_come():
    log = KernelLog()
    assert (
        log.findings_in([line("pcieport 0000:00:1c.0: AER: Uncorrected (Fatal) error received: 0000:c1:00.0")], ())
        == []
    )
    (finding,) = log.findings_in([], ())
    assert (finding.rule, finding.fields["device"]) == ("aer_fatal", "0000:c1:00")
    assert log.findings_in([], ()) == []


GONE = 1 << 22
"""No process has this id."""
CRASH = "%s[%d]: segfault at 0 ip 00007f24 sp 00007ffc error 4 in libc.so.6[16+15]"
IN_NCCL = "%s[%d]: segfault at 7f79 ip 00007f7c sp 00007f7c error 4 in libnccl.so.2[7f7c+d3]"


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        (CRASH % ("python3", 77), 3),
        (CRASH % ("anything", 77), 3),
        (CRASH % ("pt_data_worker", GONE), None),
        (IN_NCCL % ("pt_main_thread", GONE), None),
    ],
)
def test_crashes_of_ranks_count(text, rank):
    (finding,) = KernelLog().findings_in([line(text)], WORKERS)
    assert (finding.rank, finding.severity, finding.confidence >= 0.6) == (rank, "error", True)


@pytest.mark.parametrize("text", [CRASH % ("mysqld", GONE), CRASH % ("python3", GONE), CRASH % ("pt_main_thread", 1)])
def test_crashes_of_other_programs_do_not(text):
    assert KernelLog().findings_in([line(text)], WORKERS) == []


def test_a_process_that_is_there_is_a_ranks_by_its_parents_alone():
    source = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input(1)'])"
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout.read(1) == b"1"
        (child,) = map(int, Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split())
        for text in (CRASH % ("python3", child), IN_NCCL % ("nvidia-smi", child), CRASH % ("x", rank.pid)):
            (finding,) = KernelLog().findings_in([line(text)], [worker(rank.pid, 5)])
            assert finding.rank == 5
            assert KernelLog().findings_in([line(text)], WORKERS) == []
        rank.communicate(b"\n")


def test_the_thread_of_a_rank_that_has_just_crashed_is_gone_with_it():
    crashed = WorkerProcess(attempt=1, rank=3, local_rank=3, pid=77, status=signal.SIGSEGV, ended_at=1001.0)
    text = CRASH % ("python3", GONE)
    assert KernelLog().findings_in([line(text)], [crashed])
    assert KernelLog().findings_in([line(text, at=1100.0)], [crashed]) == []


def test_without_ranks_only_the_name_can_tell():
    (finding,) = KernelLog().findings_in([line(CRASH % ("python3", GONE))], ())
    assert finding.confidence == 0.45
    assert KernelLog().findings_in([line(CRASH % ("mysqld", GONE))], ()) == []


def test_a_sites_own_tables_hold():
    log = KernelLog(
        site=Site(tables={"xid": {"79": {"severity": "warning"}}, "kernel": {"edac_corrected": {"severity": "error"}}})
    )
    found = log.findings_in([line(XID), line("EDAC MC0: 1 CE memory read error")], ())
    assert [finding.severity for finding in found] == ["warning", "error"]
    with pytest.raises(ValueError, match=r"xid\.79"):
        KernelLog(site=Site(tables={"xid": {"79": {"severity": "awful"}}}))


def test_a_flood_of_findings_is_bounded_and_hides_no_worse_one():
    log = KernelLog()
    flood = [line(f"nfs: server nas{number} not responding, still trying") for number in range(1000)]
    found = log.findings_in([*flood, line(XID)], WORKERS)
    assert len(found) < 100
    assert found[-1].rule == "xid_79"
    assert log.findings_in([line("nfs: server other not responding, still trying", at=1100.0)], WORKERS)


def test_the_kernel_log_file_is_followed_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("old line\n")
    log = KernelLog(str(path))
    with open(path, "a") as file:
        file.write("NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus.\nhalf")
    assert log.read() == ["NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus."]
    with open(path, "a") as file:
        file.write(" and half\n")
    assert log.read() == ["half and half"]
    log.close()


def test_an_unreadable_kernel_log_is_said_and_survived(tmp_path: Path) -> None:
    log = KernelLog(str(tmp_path / "absent"))
    assert "cannot be read" in log.problem
    assert log.read() == []
    (tmp_path / "absent").write_text("now it is there\n")
    assert log.read() == ["now it is there"]
    log.close()


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
