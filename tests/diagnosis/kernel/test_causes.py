"""One finding for each root cause: repeats, followers, histories."""

from __future__ import annotations

import pytest

from diagnosis.kernel.causes import MAX_CAUSES, Causes
from diagnosis.kernel.log import KernelReader
from diagnosis.taxonomy import FailureClass


def xid(code, text="Ch 00000008", gpu="0000:c1:00", pid=77):
    return f"NVRM: Xid (PCI:{gpu}): {code}, pid={pid}, name=python, {text}"


def told(*lines, causes=None, start=1000.0, step=1.0):
    """The findings of lines a second apart."""
    causes, reader, found = causes or Causes(), KernelReader(), []
    for index, line in enumerate(lines):
        for event in [*reader.feed(line), *(reader.end() if index == len(lines) - 1 else [])]:
            found += [causes.note(event, start + index * step)]
    return [finding for finding in found if finding is not None]


def rules(*lines, **options):
    return [finding.rule for finding in told(*lines, **options)]


def test_a_finding_names_gpu_process_and_action():
    (finding,) = told(xid(79, "GPU has fallen off the bus."))
    assert finding.failure_class is FailureClass.GPU_FALLEN_OFF_BUS
    assert (finding.gpu, finding.severity, finding.scope) == ("0000:c1:00", "fatal", "gpu")
    assert (finding.fields["code"], finding.fields["pid"], finding.fields["kind"]) == ("79", "77", "xid")
    assert finding.fields["action"] == "cordon_node_and_restart"


def test_a_gpu_that_falls_off_the_bus_is_one_finding():
    lines = [
        xid(79, "GPU has fallen off the bus."),
        "NVRM: GPU 0000:c1:00.0: GPU has fallen off the bus.",
        "NVRM: kgspRcAndNotifyAllChannels_IMPL: RC all channels for critical error 79.",
        "NVRM: _threadNodeCheckTimeout: API_GPU_ATTACHED_SANITY_CHECK failed!",
        xid(45),
        xid(154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"),
        xid(79, "GPU has fallen off the bus."),
    ]
    assert rules(*lines) == ["xid_79"]
    assert rules(*lines[1:4], lines[0]) == ["gpu_fallen"]


def test_other_gpus_are_other_causes():
    assert rules(xid(79), xid(79, gpu="0000:c2:00")) == ["xid_79", "xid_79"]


@pytest.mark.parametrize("follower", [13, 31, 43, 45])
def test_what_follows_an_ecc_error_is_no_cause(follower):
    assert rules(xid(94), xid(follower)) == ["xid_94"]
    assert rules(xid(94), xid(follower, gpu="0000:c2:00")) == ["xid_94", f"xid_{follower}"]


def test_an_xid_that_names_its_parent_follows_it():
    follower = xid(45, "Ch 00000008, caused by previous Xid 31")
    assert rules(xid(31), follower) == ["xid_31"]
    (finding,) = told(follower)
    assert finding.severity == "warning"


def test_a_switch_and_its_gpus_tell_of_one_link():
    sxid = "nvidia-nvswitch3: SXid (PCI:0000:c5:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
    first, again = told(sxid, xid(74, "NVLink: fatal error"), xid(74, "NVLink", gpu="0000:c2:00"))
    assert (first.rule, first.gpu, first.count) == ("sxid_20034", "", 1)
    # The first GPU that tells of it as well is at the other end.
    assert (again.rule, again.gpu, again.count) == ("sxid_20034", "0000:c1:00", 2)


def test_repeats_are_counted_and_told_when_they_have_grown_tenfold():
    line = "EDAC MC0: 1 CE memory read error on DIMM_A1"
    found = told(*[line] * 1200, step=100.0)
    assert [finding.count for finding in found] == [1, 10, 100, 1000]
    assert {finding.evidence.text for finding in found} == {line}
    assert {finding.severity for finding in found} == {"warning"}


def test_after_a_quiet_time_it_is_news_again():
    line = "nfs: server nas1 not responding, still trying"
    assert len(told(line, line, line, step=100.0)) == 1
    assert len(told(line, line, line, step=200.0)) == 3


def test_a_fatal_one_that_comes_again_is_told_once_a_minute():
    """Its rank has trained on; now it may hang. A storm is no more than one a minute."""
    first, again = told(xid(79), xid(79), step=80.0)
    assert (first.count, again.count, again.at, again.evidence.at) == (1, 2, 1080.0, 1080.0)
    assert (again.outlook, again.gpu) == ("fails", "0000:c1:00")
    assert len(told(xid(79), xid(79), step=30.0)) == 1
    counts = [finding.count for finding in told(*[xid(79)] * 300, step=1.0)]
    assert counts == [1, 10, 70, 130, 190, 250]
    assert len(told(xid(79), xid(45), xid(45), xid(45), step=50.0)) == 1, "what only comes with it"


@pytest.mark.parametrize("code", [48, 31])
def test_the_same_of_another_process_is_news(code):
    """A rank was started again on a GPU that is still bad. Processes that end together are one burst."""
    lines = xid(code, pid=77), xid(code, pid=99)
    first, second = told(*lines, step=20.0)
    assert (first.fields["pid"], second.fields["pid"], second.count) == ("77", "99", 1)
    assert len(told(*lines, step=1.0)) == 1
    assert len(told(lines[0], lines[0], step=20.0)) == 1


def test_worse_is_always_news():
    assert rules("EDAC MC0: 1 CE memory read error", "EDAC MC0: 1 UE memory read error") == [
        "edac_corrected",
        "edac_uncorrected",
    ]
    lines = ["nvme nvme0: failed to set APST feature (-19)", "EXT4-fs (nvme0n1p1): Remounting filesystem read-only"]
    assert rules(*lines) == ["nvme", "fs_read_only"]


def test_a_disk_that_goes_away_is_one_cause():
    lines = [
        "nvme nvme1: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0xffff",
        "nvme nvme1: Removing after probe failure status: -19",
        "blk_update_request: I/O error, dev nvme1n1, sector 1234",
        "Buffer I/O error on dev dm-0, logical block 0, lost sync page write",
        "EXT4-fs error (device dm-0): ext4_find_entry:1436: inode #2: comm cp: reading directory lblock 0",
        "Aborting journal on device dm-0-8.",
        "EXT4-fs (dm-0): Remounting filesystem read-only",
        "INFO: task python:4242 blocked for more than 120 seconds.",
    ]
    assert rules(*lines) == ["nvme_gone"]


def test_tasks_that_hang_on_a_file_server_are_the_servers():
    lines = ["nfs: server nas1 not responding, still trying", "INFO: task python:42 blocked for more than 120 seconds."]
    assert rules(*lines, step=130.0) == ["nfs_not_responding"]
    assert rules(lines[1]) == ["hung_task"]


def test_each_killed_process_is_told_up_to_a_flood():
    lines = [f"Out of memory: Killed process {pid} (python3) total-vm:9kB" for pid in range(100, 200)]
    found = told(*lines)
    assert [finding.fields["pid"] for finding in found[:3]] == ["100", "101", "102"]
    assert len(found) == 16


@pytest.mark.parametrize(
    "line", ["EDAC MC0: 1 CE memory read error", xid(43), "CMCI storm detected: switching to poll mode"]
)
def test_warnings_and_consequences_end_no_diagnosis(line):
    (finding,) = told(line)
    assert (finding.severity, finding.confidence <= 0.4) == ("warning", True)


def test_information_is_no_finding():
    line = "mlx5_core 0000:41:00.0: mlx5_cmd_out_err:808:(pid 1): ACCESS_REG(0x805) op_mod(0x1) failed"
    assert told(line) == []


SM_1 = "Graphics SM Warp Exception on (GPC 9, TPC 1, SM 1): Out Of Range Address"
SM_2 = "Graphics SM Warp Exception on (GPC 3, TPC 5, SM 0): Out Of Range Address"


def test_an_exception_at_one_place_of_one_gpu_again_is_the_gpus():
    causes = Causes()
    assert "again" not in told(xid(13, SM_1), causes=causes)[0].fields
    (again,) = told(xid(13, SM_1), causes=causes, start=5000.0)
    assert (again.fields["again"], again.fields["action"]) == ("2", "cordon_gpu_and_restart")
    assert "again" not in told(xid(13, SM_2), causes=causes, start=9000.0)[0].fields
    assert "again" not in told(xid(13, SM_1), causes=causes, start=200_000.0)[0].fields


def test_an_exception_on_several_gpus_is_the_programs():
    causes = Causes()
    told(xid(31), xid(31, gpu="0000:c2:00"), causes=causes)
    assert "again" not in told(xid(31), causes=causes, start=5000.0)[0].fields


def test_a_gpu_with_five_fatal_bursts_in_a_day_is_for_the_vendor():
    causes = Causes()
    found = [told(xid(94), causes=causes, start=start)[0] for start in (0.0, 5e3, 1e4, 2e4, 3e4)]
    assert ["bursts" in finding.fields for finding in found] == [False] * 4 + [True]


@pytest.mark.parametrize("line", [xid(79), xid(13, SM_1), "Out of memory: Killed process 5 (python) total-vm:1kB"])
def test_a_clock_that_is_set_back_hides_nothing(line):
    causes = Causes()
    assert len(told(line, causes=causes, start=100_000.0)) == 1
    assert len(told(line, causes=causes, start=4000.0)) == 1


def test_memory_is_bounded():
    causes = Causes()
    for number in range(MAX_CAUSES * 3):
        told(f"nfs: server nas{number} not responding, still trying", xid(31, gpu=f"{number:04x}:c1:00"), causes=causes)
    assert len(causes._causes) <= MAX_CAUSES
    assert len(causes._bursts) <= MAX_CAUSES


def test_corrected_memory_errors_at_a_high_rate_are_an_error():
    causes = Causes()
    (event,) = KernelReader().feed("EDAC MC0: 1 CE memory read error on DIMM_A1")
    found = [causes.note(event, 100.0 + 2.0 * number) for number in range(5)]
    assert [finding.severity if finding else "" for finding in found] == ["warning", "", "", "error", ""]
    slow = Causes()
    seldom = [slow.note(event, 100.0 + 90.0 * number) for number in range(5)]
    assert [finding.severity for finding in seldom if finding] == ["warning"]
