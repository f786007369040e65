"""The table of kernel messages on its own samples, messages of several lines, and lines of any origin."""

from __future__ import annotations

import time

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


def test_a_gpu_that_is_gone_at_probe_is_told_over_three_lines():
    text = """
[14387.209961] NVRM: The NVIDIA GPU 0000:5d:00.0
               NVRM: (PCI ID: 10de:2330) installed in this system has
               NVRM: fallen off the bus and is not responding to commands.
[14387.210134] nvidia: probe of 0000:5d:00.0 failed with error -1
[14387.274303] NVRM: The NVIDIA probe routine failed for 1 device(s).
"""
    assert short(text) == [
        ("fallen_off_bus", None, "0000:5d:00", 1),
        ("gpu_driver", None, "0000:5d:00", 4),
        ("gpu_driver", None, None, 5),
    ]


def test_one_record_of_kmsg_may_have_several_lines():
    record = (
        r"3,4010,57631398464,-;NVRM: The NVIDIA GPU 0000:5d:00.0\x0aNVRM: (PCI ID: 10de:2330) installed in this "
        r"system has\x0aNVRM: fallen off the bus and is not responding to commands.\x0a"
    )
    assert short(record) == [("fallen_off_bus", None, "0000:5d:00", 1)]


def test_a_gpu_that_the_driver_only_names_is_nothing():
    assert read("NVRM: The NVIDIA GPU 0000:5d:00.0\nNVRM: loading NVIDIA UNIX x86_64 Kernel Module  535") == []


def test_a_fallen_gpu_is_told_by_three_messages():
    text = """
kernel: NVRM: GPU at PCI:0000:01:00: GPU-4f667a85-72a7-4605-2197-8f6a16b663a1
kernel: NVRM: Xid (PCI:0000:01:00): 79, pid=22434, name=gnome-character, GPU has fallen off the bus.
kernel: NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.
kernel: NVRM: kgspRcAndNotifyAllChannels_IMPL: RC all channels for critical error 79.
"""
    assert short(text) == [
        ("xid", 79, "0000:01:00", 2),
        ("fallen_off_bus", None, "0000:01:00", 3),
        ("gpu_driver", None, None, 4),
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


def test_old_kernels_announce_a_kill_and_may_kill_a_child_instead():
    text = """
badsysprogram invoked oom-killer: gfp_mask=0x280da, order=0, oom_score_adj=0
Memory cgroup out of memory: Kill process 11499 (badsysprogram) score 1000 or sacrifice child
Killed process 11500 (Plex Media (x)) total-vm:1641384kB, anon-rss:524092kB, file-rss:192kB
"""
    assert short(text) == [("oom_kill", 11500, None, 3)]


def test_kills_whose_own_line_is_lost_are_not():
    text = """
oom_reaper: reaped process 345646 (vector), now anon-rss:0kB, file-rss:0kB, shmem-rss:0
Out of memory: Kill process 456 (python) score 50 or sacrifice child
Out of memory: Killed process 123, UID 48, (httpd).
oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/,task=node,pid=7,uid=0
"""
    assert [(code, line) for _, code, _, line in short(text)] == [(345646, 1), (456, 2), (123, 3), (7, 4)]


def test_machine_checks_are_one_event_each():
    text = """
mce: [Hardware Error]: Machine check events logged
mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 0: a000000000004321
mce: [Hardware Error]: TSC 0
mce: [Hardware Error]: PROCESSOR 0:406f1 TIME 1629743651 SOCKET 0 APIC 0 microcode b000019
mce: [Hardware Error]: CPU 1: Machine Check Exception: 5 Bank 6: bb80000000000e0b
mce: [Hardware Error]: RIP !INEXACT! 10:<ffffffff816ab596> {native_safe_halt+0x6/0x10}
Kernel panic - not syncing: Fatal machine check
---[ end Kernel panic - not syncing: Fatal machine check ]---
"""
    assert [(event.kind, event.line, event.severity) for event in read(text)] == [
        ("mce", 1, "error"),  # bit 61 of the status: uncorrected
        ("mce", 5, "fatal"),
        ("oops", 7, "fatal"),
    ]


def test_amd_writes_its_machine_checks_over_many_lines():
    text = """
[74536.938995] [Hardware Error]: Deferred error, no action required.
[74536.939002] [Hardware Error]: CPU:0 (17:1:1) MC15_STATUS[Over|-|MiscV|AddrV|-|-|SyndV|UECC|Deferred|-|-]: 0xdc20
[74536.939023] [Hardware Error]: Error Addr: 0x00000003aeb64240
[74536.939042] [Hardware Error]: Unified Memory Controller Ext. Error Code: 0, DRAM ECC error.
[74536.939063] EDAC MC0: 1 UE on mc#0csrow#0channel#0 (csrow:0 channel:0 page:0x79d6c8 offset:0x440 grain:64)
[74536.939074] [Hardware Error]: cache level: L3/GEN, tx: GEN, mem-tx: RD
[74536.940848] mce: [Hardware Error]: Machine check events logged
[74536.940859] [Hardware Error]: Uncorrected, software restartable error.
[74536.940867] [Hardware Error]: CPU:7 (17:1:1) MC0_STATUS[-|UE|MiscV|AddrV|-|-|-|UECC|-|Poison|-]: 0xbc002800000c0135
"""
    assert short(text) == [("mce", None, None, 1), ("edac", None, "MC0", 5), ("mce", None, None, 7)]
    assert [event.severity for event in read(text)] == ["warning", "fatal", "fatal"]


def test_firmware_reports_say_how_bad_it_was_and_where():
    text = """
{1}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 1
{1}[Hardware Error]: event severity: recoverable
{1}[Hardware Error]:  Error 0, type: recoverable
{1}[Hardware Error]:   section_type: PCIe error
{1}[Hardware Error]:   device_id: 0000:c9:02.0
{1}[Hardware Error]:   vendor_id: 0x8086, device_id: 0x347a
pcieport 0000:c9:02.0: AER: aer_status: 0x00200000, aer_mask: 0x00100020
pcieport 0000:c9:02.0: AER: device recovery successful
{2}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 4
{2}[Hardware Error]: event severity: corrected
{2}[Hardware Error]:   section_type: memory error
{3}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 4
{3}[Hardware Error]: event severity: fatal
"""
    assert short(text) == [
        ("mce", None, "0000:c9:02", 1),
        ("aer", None, "0000:c9:02", 7),
        ("mce", None, None, 9),
        ("mce", None, None, 12),
    ]
    assert [event.severity for event in read(text)] == ["error", "error", "warning", "fatal"]
    assert read(text)[0].fields["section"] == "PCIe error"


def test_a_pcie_error_is_the_devices_that_has_it():
    text = """
pcieport 0000:40:01.0: AER: Multiple Uncorrected (Non-Fatal) error received: 0000:40:01.0
igb 0000:41:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (Requester ID)
igb 0000:41:00.0:   device [8086:1516] error status/mask=00100000/00000000
igb 0000:41:00.0:    [20] UnsupReq               (First)
igb 0000:41:00.0: AER:   TLP Header: 40000001 0000040f cdbfc00c c0000000
igb 0000:41:00.1: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (Requester ID)
pci 0000:41:00.1: AER: can't recover (no error_detected callback)
pcieport 0000:40:01.0: AER: device recovery failed
pcieport 0000:00:1c.0: AER: Corrected error received: id=00e0
pcieport 0000:00:1c.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, id=00e0(Transmitter ID)
pcieport 0000:00:1c.0:    [12] Replay Timer Timeout
pcieport 0000:c0:01.1: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)
"""
    assert short(text) == [
        ("aer", None, "0000:41:00", 1),
        ("aer", None, "0000:41:00", 6),
        ("aer", None, "0000:41:00", 7),
        ("aer", None, "0000:40:01", 8),
        ("aer", None, "0000:00:1c", 9),
        ("aer", None, "0000:c0:01", 12),
    ]
    assert [event.severity for event in read(text)] == ["error", "error", "fatal", "fatal", "warning", "fatal"]


def test_an_oops_is_one_event_however_it_is_written():
    text = """
BUG: unable to handle kernel NULL pointer dereference at 0000000000000008
PGD 0 P4D 0
Oops: 0000 [#1] SMP NOPTI
CPU: 3 PID: 142 Comm: irq/26-aerdrv Kdump: loaded Tainted: G           O      5.4.251
---[ end trace 3790ed6593d21f30 ]---
kernel BUG at include/linux/netdevice.h:529!
invalid opcode: 0000 [#1] SMP PTI
---[ end trace 3790ed6593d21f31 ]---
Oops: general protection fault, probably for non-canonical address 0xdead000000000122: 0000 [#3] PREEMPT SMP
"""
    assert [(kind, line) for kind, _, _, line in short(text)] == [("oops", 1), ("oops", 6), ("oops", 9)]


def test_a_network_card_that_dies_says_so_once_with_its_details():
    text = """
mlx5_core 0000:0d:00.0: poll_health:801:(pid 0): device's health compromised - reached miss count
mlx5_core 0000:0d:00.0: print_health_info:435:(pid 0): assert_var[0] 0x0521945b
mlx5_core 0000:0d:00.0: print_health_info:435:(pid 0): assert_var[1] 0x00000000
mlx5_core 0000:0d:00.0: print_health_info:444:(pid 0): synd 0x1: firmware internal error
"""
    assert short(text) == [("mlx5", None, "0000:0d:00", 1)]


def test_the_device_may_stand_on_the_second_line():
    text = (
        "kworker/u203:1: attempt to access beyond end of device\nnvme0n1: rw=2049, sector=225, nr_sectors = 1 limit=0"
    )
    assert short(text) == [("block", None, "nvme0n1", 1)]


def test_traces_and_dumps_of_a_hang_are_one_event():
    text = """
[228678.600423] INFO: task containerd-shim:931150 blocked for more than 122 seconds.
[228678.606308]       Not tainted 5.15.102 #1
[228678.609450] "echo 0 > /proc/sys/kernel/hung_task_timeout_secs" disables this message.
[228678.615481] task:containerd-shim state:D stack:    0 pid:931150 ppid:     1 flags:0x00004002
 nfs_lock_and_join_requests+0x61/0x2b0 [nfs]
 mlx5e_napi_poll+0xe2/0x710 [mlx5_core]
Modules linked in: nvme nvme_core mlx5_core nfs xfs btrfs edac_core nvidia_uvm(POE)
"""
    assert short(text) == [("hung_task", None, None, 1)]


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


def test_healthy_messages_are_silent():
    text = """
Linux version 6.8.0-31-generic (buildd@lcy02) (gcc 13.2.0) #31-Ubuntu SMP PREEMPT_DYNAMIC
[Firmware Bug]: TSC doesn't count with P0 frequency!
MCE: In-kernel MCE decoding enabled.
mce: CPU supports 20 MCE banks
GHES: APEI firmware first mode is enabled by APEI bit and WHEA _OSC.
HEST: Table parsing has been initialized.
ERST: Error Record Serialization Table (ERST) support is initialized.
EDAC MC: Ver: 3.0.0
EDAC i10nm: v0.0.6
pcieport 0000:00:1c.0: AER: enabled with IRQ 122
pcieport 0000:00:01.1: pciehp: Slot #0 AttnBtn- PwrCtrl- MRL- AttnInd- PwrInd- HotPlug+ Surprise+
nvme nvme0: pci function 0000:01:00.0
nvme nvme0: Shutdown timeout set to 10 seconds
nvme nvme0: 63/0/0 default/read/poll queues
EXT4-fs (nvme0n1p2): mounted filesystem 04118d2e r/w with ordered data mode. Quota mode: none.
XFS (dm-0): Mounting V5 Filesystem
XFS (dm-0): Ending clean mount
BTRFS info (device sda1): disk space caching is enabled
NFS: Registering the id_resolver key type
RPC: Registered tcp NFSv4.1 backchannel transport module.
LNet: Added LNI 10.0.0.1@o2ib [8/256/0/180]
Lustre: Mounted scratch-client
mlx5_core 0000:5e:00.0: firmware version: 28.39.1002
mlx5_core 0000:5e:00.0: 252.048 Gb/s available PCIe bandwidth (32.0 GT/s PCIe x16 link)
mlx5_core 0000:5e:00.0: mlx5_pcie_event:301:(pid 812): PCIe slot advertised sufficient power (75W).
mlx5_core 0000:5e:00.0: Port module event: module 0, Cable plugged
mlx5_core 0000:5e:00.0 ib0: Link up
IPv6: ADDRCONF(NETDEV_CHANGE): eth0: link becomes ready
e1000e: enp0s31f6 NIC Link is Up 100 Mbps Full Duplex, Flow Control: Rx/Tx
ata1: SATA link down (SStatus 0 SControl 300)
nvidia-nvlink: Nvlink Core is being initialized, major device number 510
nvidia-nvswitch2: open (major=510)
NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023
nvidia-modeset: Loading NVIDIA Kernel Mode Setting Driver for UNIX platforms  535.129.03
nvidia_uvm: module uses symbols from proprietary module nvidia, inheriting taint.
nvidia-uvm: Loaded the UVM driver, major device number 502.
[drm] [nvidia-drm] [GPU ID 0x00000100] Loading driver
rcu: Hierarchical SRCU implementation.
NMI watchdog: Enabled. Permanently consumes one hw-PMU counter.
perf: interrupt took too long (2509 > 2500), lowering kernel.perf_event_max_sample_rate to 79500
clocksource: Switched to clocksource tsc
audit: type=1400 audit(0.0:0): apparmor="DENIED" operation="open"
systemd[1]: Started Session 123 of user root.
NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
step 100 loss 2.31 grad_norm 0.9 lr 3e-4
"""
    assert read(text) == []


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


def test_an_old_kernel_names_only_the_port():
    text = "pcieport 0000:00:1c.0: AER: Corrected error received: id=00e0"
    assert short(text) == [("aer", None, "0000:00:1c", 1)]


def test_no_line_takes_long():
    took = []
    for _ in range(5):
        began = time.thread_time()
        KernelReader().feed("NVRM" + " " * 2000)
        took.append(time.thread_time() - began)
    assert min(took) < 0.015


def test_two_xids_of_one_line_are_two():
    line = (
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus. NVRM: Xid (PCI:0000:5e:00): 45, pid=1, Ch 8"
    )
    assert short(line) == [("xid", 79, "0000:3b:00", 1), ("xid", 45, "0000:5e:00", 1)]


def test_a_gpu_that_is_not_supported_has_not_fallen_off():
    text = """
[ 5.1] NVRM: The NVIDIA GPU 0000:9d:00.0 (PCI ID: 10de:1234)
[ 5.1] NVRM: installed in this system is not supported by the
[ 5.1] NVRM: NVIDIA 535.129.03 driver release.
[ 6.1] NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.
[ 7.1] NVRM: The NVIDIA GPU 0000:9e:00.0 (PCI ID: 10de:2330)#012NVRM: installed in this system has#012NVRM: fallen off the bus and is not answering.
"""  # noqa: E501
    assert short(text) == [
        ("gpu_driver", None, None, 2),
        ("fallen_off_bus", None, "0000:3b:00", 4),
        ("fallen_off_bus", None, "0000:9e:00", 5),
    ]


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
