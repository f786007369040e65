"""The table of kernel messages on its own samples, messages of several lines, and lines of any origin."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.kernel import log as kernel_rules
from diagnosis.kernel.log import KernelReader
from diagnosis.taxonomy import FailureClass

RULES = [pytest.param(rule, id=rule.id) for rule in kernel_rules.default().rules]


def read(text, **options):
    reader = KernelReader(**options)
    events = [event for line in text.strip("\n").split("\n") for event in reader.feed(line)]
    return sorted([*events, *reader.end()], key=lambda event: event.line)


def short(text):
    """(kind, code, device, line) of each event."""
    return [(event.kind, event.code, event.device or None, event.line) for event in read(text)]


@pytest.mark.parametrize(("line", "pattern"), kernel_rules.oom_lines(), ids=lambda one: getattr(one, "id", ""))
def test_lines_about_oom_kills(line, pattern):
    assert [sample for sample in line.samples if not pattern.search(sample) or line.literal not in sample.lower()] == []
    assert [other for other in line.others if pattern.search(other)] == []


@pytest.mark.parametrize("rule", RULES)
def test_samples(rule):
    assert rule.samples
    for sample in rule.samples:
        found = [event.rule for event in read(sample)]
        assert found == ([] if rule.confirm else [rule.id]), sample
        assert any(literal in sample.lower() for literal in rule.literals), sample
    for other in rule.others:
        assert read(other) == [], other


def test_what_rules_say_of_each_other_exists():
    rules = kernel_rules.default().rules
    ids = {rule.id for rule in rules}
    assert len(ids) == len(rules)
    assert {name for rule in rules for name in (*rule.takes, *rule.swallows)} <= ids
    assert all(literal == literal.lower() for rule in rules for literal in rule.literals)


@pytest.mark.parametrize(
    "before",
    [
        "",
        "[    4.392631] ",
        "[Sun Feb 23 16:24:18 2025] ",
        "<4>[2315424.099010] ",
        "6,3964,206764307,-;",
        "kern  :warn  : 2025-01-21T04:41:44,283302+00:00 ",
        "2025-01-17T17:10:43+0000 n1.cluster kernel: ",
        "Jan 13 23:30:29 ip-172-31-15-234 kernel: [  945.914667] ",
        "1737133843.123456 n1 kernel: ",
        "3: [rank3] dmesg says: ",
        "\x1b[32m[   12.3] \x1b[0m",
        "[ 12.5][   T77] ",
    ],
)
def test_lines_of_any_origin(before):
    lines = [
        "NVRM: Xid (PCI:0000:C1:00): 79, pid=1234, GPU has fallen off the bus.",
        "mlx5_core 0000:5e:00.0 ens1f0: Link down",
        "Out of memory: Killed process 4242 (python3) total-vm:98304000kB, anon-rss:1kB",
        "XFS (nvme0n1): log I/O error -5",
        "nfs: server nas1 not responding, still trying",
    ]
    assert short("\n".join(before + line for line in lines)) == [
        ("xid", 79, "0000:c1:00", 1),
        ("mlx5", None, "0000:5e:00", 2),
        ("oom_kill", 4242, None, 3),
        ("filesystem", None, "nvme0n1", 4),
        ("nfs", None, None, 5),
    ]


def test_stamps_become_times():
    (event,) = read("[   12.5] EDAC MC0: 1 UE memory read error on DIMM_A1")
    assert (event.uptime, event.at) == (12.5, None)
    (event,) = read("2025-01-17T17:10:43+0100 n1 kernel: EDAC MC0: 1 UE memory read error on DIMM_A1")
    assert event.at == 1737130243.0


# ----- messages of several lines -----


CASES = [case.partition("\n") for case in Path(__file__).with_name("cases.txt").read_text().split("### ")[1:]]
"""Name, messages of several lines, and the events that they are."""


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, _, text in CASES])
def test_messages_of_several_lines(text):
    lines, *expected = text.rstrip("\n").split("\n=> ")
    assert expected == [
        f"line {event.line}: {event.severity} {event.kind} {event.code or '-'} {event.device or '-'}"
        for event in read(lines)
    ]


NEW_OOM = """
python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
CPU: 3 PID: 11111 Comm: python Not tainted 5.15.0
Call Trace:
 dump_header+0x4a/0x1f1
[  pid  ]   uid  tgid total_vm      rss pgtables_bytes swapents oom_score_adj name
[  11111]  1000 11111   410346   131071   257        0             0 python
oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/s,task_memcg=/s,task=python,pid=11111,uid=27
Memory cgroup out of memory: Killed process 11111 (python) total-vm:4204kB, anon-rss:1kB, UID:27 pgtables:44kB
oom_reaper: reaped process 11111 (python), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB
"""


def test_an_oom_kill_is_one_event_at_the_line_that_names_the_killed():
    (event,) = read(NEW_OOM)
    assert (event.kind, event.code, event.pid, event.line) == ("oom_kill", 11111, 11111, 8)
    assert event.fields["constraint"] == "CONSTRAINT_MEMCG"
    assert (event.fields["process"], event.fields["cgroup"], event.fields["limit"]) == ("python", "/s", "cgroup")


def test_a_firmware_report_keeps_its_section():
    lines = (
        "Hardware error from APEI Generic Hardware Error Source: 1",
        "event severity: fatal",
        " section_type: PCIe error",
    )
    (event,) = read("\n".join(f"{{1}}[Hardware Error]: {line}" for line in lines))
    assert (event.severity, event.fields["section"]) == ("fatal", "PCIe error")


GSP_TIMEOUT = """
NVRM: GPU at PCI:0000:9b:00: GPU-509665ad-b600-ac93-3616-d754b23d636d
NVRM: GPU Board Serial Number: 1650124014249
NVRM: Xid (PCI:0000:9b:00): 119, pid=2024380, name=nvidia-smi, Timeout after 6s of waiting for RPC response from GPU4
NVRM: GPU4 GSP RPC buffer contains function 103 (GSP_RM_ALLOC) and data 0x0000000000002081 0x0000000000000004.
NVRM: GPU4 RPC history (CPU -> GSP):
NVRM:     entry function                   data0              data1              ts_start           ts_end
NVRM:      0    103  GSP_RM_ALLOC          0x0000000000002081 0x0000000000000004 0x00062ed1a6bd61fa 0x0000000000000000 y
CPU: 17 PID: 2024380 Comm: nvidia-smi Tainted: P           OE     5.15.0-112-generic #122-Ubuntu
Call Trace:
 os_dump_stack+0xe/0x14 [nvidia]
"""


def test_what_the_driver_dumps_after_an_xid_is_no_event():
    (event,) = read(GSP_TIMEOUT)
    assert (event.code, event.device, event.line, event.pid) == (119, "0000:9b:00", 3, 2024380)
    assert event.failure_class is FailureClass.GPU_HANG


def test_a_site_changes_rules_and_adds_its_own():
    rules = kernel_rules.default().with_site(
        {
            "edac_corrected": {"severity": "error"},
            "weka": {"kind": "other", "class": "storage_error", "literals": ["wekafs"], "regex": "wekafs: .*lost"},
        }
    )
    (corrected, weka) = read("EDAC MC0: 1 CE memory read error on A\nwekafs: backend lost", rules=rules)
    assert (corrected.severity, weka.rule) == ("error", "weka")
    with pytest.raises(ValueError, match=r"kernel\.mce_logged"):
        kernel_rules.default().with_site({"mce_logged": {"severity": "awful"}})
    with pytest.raises(ValueError, match=r"kernel\.new"):
        kernel_rules.default().with_site(
            {"new": {"kind": "other", "class": "unknown", "literals": ["x"], "regex": "("}}
        )


_LINES = [sample for rule in kernel_rules.default().rules for sample in rule.samples] + NEW_OOM.split("\n")


@given(st.lists(st.sampled_from(_LINES) | st.text(max_size=60), max_size=40), st.integers(0, 40))
def test_any_lines_are_survived_and_no_message_is_told_twice(lines, cut):
    reader = KernelReader()
    told = 0
    for number, line in enumerate(lines):
        told += len(reader.feed(line[: cut or None] if number % 3 == 0 else line))
    told += len(reader.end())
    assert told <= sum(line.count("\\x0a") + line.count("\n") + 2 for line in lines)
    assert reader.end() == []


def test_skipped_lines_are_counted():
    reader = KernelReader()
    reader.skip(1000)
    (event,) = reader.feed("EDAC MC0: 1 UE memory read error")
    assert event.line == 1001
    assert not reader.is_open
    reader.feed("pcieport 0000:00:1c.0: AER: Corrected error received: 0000:00:1c.0")
    assert reader.is_open


def test_no_line_takes_long():
    took = []
    for _ in range(5):
        began = time.thread_time()
        KernelReader().feed("NVRM" + " " * 2000)
        took.append(time.thread_time() - began)
    assert min(took) < 0.015


def test_a_task_that_waits_for_a_file_system_needs_no_notice():
    head = "task:pt_main_thread  state:D stack:    0 pid:81023 ppid: 80990 flags:0x00004002"
    dump = f"[ 242.16] {head}\n[ +0.000003] Call Trace:\n[ +0.000004]  schedule+0x55/0xc0\n"
    (event,) = read(f"{dump}[ +0.000006]  rpc_wait_bit_killable+0x1e/0xa0 [sunrpc]")
    assert (event.rule, event.pid, event.fields["process"]) == ("uninterruptible", 81023, "pt_main_thread")
    assert read(f"{dump}[ +0.000006]  kthread+0x1e/0xa0") == []


def test_a_host_may_stand_before_the_kernels_stamp():
    (event,) = read("n17 [ 1234.567123] EDAC MC0: 1 CE memory read error on DIMM_A1")
    assert (event.rule, event.uptime) == ("edac_corrected", 1234.567123)


@pytest.mark.parametrize(
    "prefix", ["14,99,1000,-;", "<12>", "user  :err   : ", "user  :err   : [  12.000001] ", "<12>[  12.0001] "]
)
def test_what_a_program_wrote_into_the_kernels_log_is_not_the_kernels_word(prefix):
    line = "NVRM: Xid (PCI:0000:c1:00): 79, pid=4711, name=python, GPU has fallen off the bus."
    assert KernelReader().feed(prefix + line) == []
    own = {"14": "4", "<1": "<", "us": "kern  :err   : "}[prefix[:2]]
    (event,) = KernelReader().feed((own + prefix[2:] if own[0] != "k" else own) + line)
    assert event.code == 79


def test_a_collector_of_logs_may_have_given_the_kernels_lines_another_level():
    line = "<14>Jan  1 00:00:00 n1 kernel: NVRM: Xid (PCI:0000:c1:00): 79, pid=4711, GPU has fallen off the bus."
    assert [event.code for event in KernelReader().feed(line)] == [79]
