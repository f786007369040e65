"""Every code has a meaning, every form of line is read, and nothing else is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.kernel.xid import details, read_sxid, read_xid
from diagnosis.taxonomy import FailureClass
from tests.tables import table

CASES = table(__file__)

HEAD = "NVRM: Xid (PCI:0000:c1:00): "


MANAGER = "[ERROR] [tid 8] detected NVSwitch {} on fid 0 on NVSwitch pci bus id 00000000:86:00.0 physical id 3 port {}"


@pytest.mark.parametrize(
    ("line", "code", "device"),
    [*CASES["forms"], ("x" * 5000 + " NVRM: Xid (PCI:0000:91:00): 79, " + "y" * 5000, 79, "0000:91:00")],
)
def test_forms(line, code, device):
    reading = read_xid(line)
    assert (reading.code, reading.device) == (code, device)
    assert len(reading.text) <= 500
    assert read_sxid(line) is None


@pytest.mark.parametrize("line", CASES["other_lines_are_none"])
def test_other_lines_are_none(line):
    assert read_xid(line) is None


@pytest.mark.parametrize(("rest", "pid", "process"), CASES["process"])
def test_process(rest, pid, process):
    reading = read_xid(HEAD + rest)
    assert (reading.pid, reading.fields.get("process", "")) == (pid, process)


@pytest.mark.parametrize(
    ("where", "mig"),
    [
        ("(PCI:0000:01:00 GPU-I:05)", "5"),
        ("(PCI:0000:01:00 GPU-I:05 GPU-CI:00)", "5/0"),
        ("(PCI:0000:01:00) GPU-I:05 GPU-CI:12", "5/12"),
        ("(PCI:0000:01:00)", ""),
    ],
)
def test_mig(where, mig):
    reading = read_xid(f"NVRM: Xid {where}: 13, pid=9, name=a, Graphics Exception")
    assert (reading.code, reading.device) == (13, "0000:01:00")
    assert (reading.fields.get("mig", ""), reading.fields["process"]) == (mig, "a")


def test_uuid():
    reading = read_xid("NVRM: Xid (GPU-5FC0BCEC-C2E1-38DC-8994-2A9F9F3B709E): 48, DBE")
    assert reading.gpu_uuid == "GPU-5fc0bcec-c2e1-38dc-8994-2a9f9f3b709e"


def test_what_follows_is_never_the_first_cause():
    alone = read_xid(HEAD + "45, pid=9, name=python, channel 0x00000015")
    assert (alone.consequence, alone.fields.get("follows")) == (True, None)
    assert alone.confidence <= 0.4
    named = read_xid(HEAD + "45, pid=9, name=python, channel 0x00000015 caused by previous Xid 149")
    assert (named.consequence, named.fields["follows"]) == (True, "149")
    assert named.failure_class is FailureClass.NVLINK_ERROR
    other = read_xid(HEAD + "31, pid=9, name=python, MMU Fault caused by previous Xid 48")
    assert (other.consequence, other.fields["follows"]) == (True, "48")
    assert other.failure_class is FailureClass.CUDA_ILLEGAL_ACCESS


@pytest.mark.parametrize(("rest", "detail", "severity", "action"), CASES["nvlink5"])
def test_nvlink5(rest, detail, severity, action):
    reading = read_xid(HEAD + rest)
    assert f"{reading.fields.get('format', '')} {reading.fields.get('look', '')}" == detail
    assert (reading.severity, reading.action.removesuffix("_and_restart")) == (severity, action)
    assert reading.failure_class is FailureClass.NVLINK_ERROR
    assert reading.fields["link"]


def test_nvlink5_words():
    reading = read_xid(HEAD + "149, NETIR_LINK_EVT Fatal XC1 i2 Link 17 (0x021425c6 0x00000007)")
    assert reading.fields["link"] == "17"
    assert details(reading) == {
        "unit": "NETIR_LINK_EVT",
        "xc": "1",
        "injected": "2",
        "intrinfo": "0x021425c6",
        "status": "0x00000007",
        "format": "v1",
        "look": "peer",
    }


@pytest.mark.parametrize(
    ("registers", "error", "severity", "consequence"),
    [
        ("0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0", "bad_when_repeated", "fatal", False),
        ("0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "hardware_or_connection", "fatal", False),
        ("0x30, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "ecc_or_parity", "fatal", False),
        ("0x0, 0x0, 0x0, 0x0, 0x100000, 0x0, 0x0", "ecc_threshold", "warning", False),
        ("0x1, 0x0, 0x0, 0x10000, 0x0, 0x0, 0x0", "ignorable, secondary", "fatal", True),
        ("0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x1", None, "fatal", False),
    ],
)
def test_xid_74(registers, error, severity, consequence):
    reading = read_xid(
        HEAD + f"74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 14({registers})"
    )
    assert (reading.fields["link"], reading.fields.get("error")) == ("14", error)
    assert (reading.severity, reading.consequence) == (severity, consequence)
    assert reading.failure_class is FailureClass.NVLINK_ERROR


@pytest.mark.parametrize(
    ("text", "recovery", "action", "severity"),
    [
        ("0x0 (None) to 0x2 (Node Reboot Required)", "node_reboot", "cordon_node_and_restart", "error"),
        ("0x0 (None) to 0x2 (OS Reboot)", "node_reboot", "cordon_node_and_restart", "error"),
        ("0x0 (None) to 0x1 (PF FLR)", "gpu_reset", "cordon_gpu_and_restart", "error"),
        ("0x0 (None) to 0x1 (Drain and Reset)", "gpu_reset", "cordon_gpu_and_restart", "error"),
        ("0x1 (GPU Reset Required) to 0x0 (None)", "none", "none", "info"),
        ("0x0 (None) to 0x3 (Drain P2P)", "drain_p2p", "cordon_gpu_and_restart", "error"),
        ("0x0 (None) to 0xb (Sing)", "unknown recovery action 11", "cordon_node_and_restart", "error"),
    ],
)
def test_xid_154_by_its_number(text, recovery, action, severity):
    reading = read_xid(HEAD + "154, GPU recovery action changed from " + text)
    assert (reading.fields["recovery"], reading.action, reading.severity) == (recovery, action, severity)
    assert reading.consequence


@pytest.mark.parametrize(("rest", "detail"), CASES["details"])
def test_details(rest, detail):
    assert details(read_xid(HEAD + rest)) == detail


def test_a_contained_error_costs_the_process_unless_the_gpu_must_be_reset():
    contained = read_xid(HEAD + "94, pid=7, name=a, Contained: SM (0x1). RST: No, D-RST: No")
    assert (contained.action, details(contained)) == ("restart", {"unit": "SM", "reset": "No", "drain": "No"})
    reset = read_xid(HEAD + "94, pid=7, name=a, Contained: LTC TAG (0x2,0x1). RST: Yes, D-RST: No")
    assert reset.action == "cordon_gpu_and_restart"


@pytest.mark.parametrize(("line", "code", "device", "fatal", "link"), CASES["sxid"])
def test_sxid(line, code, device, fatal, link):
    reading = read_sxid(line)
    assert (reading.code, reading.device, reading.fields.get("link")) == (code, device, link)
    assert reading.severity == ("fatal" if fatal else "warning")
    assert reading.action == ("cordon_node_and_restart" if fatal else "none")
    assert reading.failure_class is FailureClass.NVLINK_ERROR
    assert read_xid(line) is None


@pytest.mark.parametrize(
    "line",
    [
        "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Severity 1 Engine instance 30 Sub-engine instance 00",
        "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Data {0x50610002, 0x10100030, 0x00000000}",
        "nvidia-nvswitch: Probing device 0000:a9:00.0, Vendor Id = 0x10de",
        "SXid 20034 means LTSSM Fault Up",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): garbled, Fatal",
        "detected number of NVSwitches don't match with any supported system topology",
        HEAD + "79",
    ],
)
def test_other_lines_are_no_sxid(line):
    assert read_sxid(line) is None


def test_a_switch_error_that_is_not_fatal_may_abort_jobs():
    reading = read_sxid(
        "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error"
    )
    assert (reading.severity, reading.action) == ("error", "restart")


REAL = (
    HEAD + "145, pid='<unknown>', name=<unknown>, RLW_REMAP Fatal XC1 i0 Link 10 (0x00000082 0x00000040 0x0)",
    HEAD + "74, pid=1, name=a, NVLink: fatal error detected on link 14(0x1, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)",
    HEAD + "154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
    "NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:02): 13, pid=9, name=a, b, Graphics SM Warp Exception on (GPC 1, TPC 2)",
    HEAD + "45, pid=9, name=python, channel 0x00000015 caused by previous Xid 149",
    "nvidia-nvswitch3: SXid (PCI:0000:c5:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    MANAGER.format("fatal error 20034", 33),
)


@pytest.mark.parametrize("line", REAL)
def test_a_truncated_line_never_raises_nor_tells_another_device(line):
    whole = read_xid(line) or read_sxid(line)
    for end in range(len(line)):
        part = read_xid(line[:end]) or read_sxid(line[:end])
        assert part is None or part.device in ("", whole.device)


@settings(deadline=None)
@given(st.text(max_size=400))
def test_any_text(text):
    read_xid(text)
    read_sxid(text)


@settings(deadline=None)
@given(st.sampled_from(REAL), st.text(max_size=80), st.integers(0, 120), st.integers(0, 40))
def test_any_damage(line, noise, at, gone):
    damaged = line[:at] + noise + line[at + gone :]
    reading = read_xid(damaged)
    if reading is not None:
        assert all(len(value) <= 100 for value in details(reading).values())
    read_sxid(damaged)


def test_an_address_that_is_none_is_no_device():
    assert read_xid("NVRM: Xid (PCI:zzzz:3b:00): 79, x").device == ""
