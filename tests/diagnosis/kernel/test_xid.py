"""Every code has a meaning, every form of line is read, and nothing else is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.kernel.xid import read_sxid, read_xid
from diagnosis.taxonomy import FailureClass

HEAD = "NVRM: Xid (PCI:0000:c1:00): "


MANAGER = "[ERROR] [tid 8] detected NVSwitch {} on fid 0 on NVSwitch pci bus id 00000000:86:00.0 physical id 3 port {}"


@pytest.mark.parametrize(
    ("line", "code", "device"),
    [
        ("NVRM: Xid (PCI:0000:c1:00): 79, pid=12, name=python, GPU has fallen off the bus.", 79, "0000:c1:00"),
        ("NVRM: Xid (0000:c1:00): 79", 79, "0000:c1:00"),
        ("NVRM: Xid (PCI:0000:c1:00): 79.", 79, "0000:c1:00"),
        ("NVRM: Xid (0001:00): 6, PE0001", 6, "0000:01:00"),
        ("NVRM: Xid (PCI:0000:C1:00.0): 79, GPU has fallen off the bus.", 79, "0000:c1:00"),
        ("NVRM: Xid (PCI:00000000:C1:1F.0): 31, pid=1", 31, "0000:c1:1f"),
        ("NVRM: Xid (PCI:0018:01:00): 48, DBE", 48, "0018:01:00"),
        ("NVRM: Xid (PCI:0001:ab:cd): 69, pid=9, name=train.3, Class Error: ChId 0008", 69, "0001:ab:cd"),
        ("NVRM: Xid (PCI:...): 137, RLW_RXPIPE interrupt hit on link 11 on GPU0: PRIV Error", 137, ""),
        ("NVRM: Xid (PCI:00010000:01:00): 48, DBE", 48, "10000:01:00"),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7, Contained: CE (0x9). RST: No", 94, "0000:01:00"),
        ("[ 6781741.548779] NVRM: Xid (PCI:0000:91:00): 79, pid='<unknown>', name=<unknown>, x", 79, "0000:91:00"),
        ("<4>1 2026-01-01T00:00:00Z n1 kernel - - - NVRM: Xid (PCI:0000:91:00): 79", 79, "0000:91:00"),
        ("Nov 21 10:00:00 gpu-7 kernel: [12.5] NVRM: Xid (PCI:0000:91:00): 63, x", 63, "0000:91:00"),
        ("4,1234,99,-;NVRM: Xid (PCI:0000:91:00): 63, x", 63, "0000:91:00"),
        ("NVRM: \x1b[01;31m\x1b[KXid\x1b[m\x1b[K (PCI:0000:91:00): 63, x", 63, "0000:91:00"),
        ("#033[31mNVRM:#033[0m Xid (PCI:0000:91:00): 63, x", 63, "0000:91:00"),
        ("NVRM: XID (PCI:0000:AF:00): 63, x", 63, "0000:af:00"),
        ("nvrm:  xid ( pci:0000:00:1e.0 ) : 43, channel 0x1", 43, "0000:00:1e"),
        ("NVRM: Xid (GPU-5FC0BCEC-c2e1-38dc-8994-2a9f9f3b709e): 48, DBE", 48, ""),
        ("NVRM: Xid (PCI:0000:91:00): 999, pid=5, name=<unknown>, of a driver to come", 999, "0000:91:00"),
        ("x" * 5000 + " NVRM: Xid (PCI:0000:91:00): 79, " + "y" * 5000, 79, "0000:91:00"),
    ],
)
def test_forms(line, code, device):
    reading = read_xid(line)
    assert reading is not None
    assert (reading.code, reading.device) == (code, device)
    assert len(reading.message) <= 300
    assert read_sxid(line) is None


@pytest.mark.parametrize(
    "line",
    [
        "Xid 79 was seen on node 7",
        "watching for NVRM: Xid lines",
        "see https://docs.nvidia.com/deploy/xid-errors (Xid 13, 31)",
        "NVRM: Xid (PCI:0000:91:00): invalid",
        "NVRM: Xid (PCI:0000:91:00)",
        "NVRM: Xid: 31",
        "NVRM: Xid (PCI:0000:91:00): 3.5",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  595.91.07",
        "NVRM: GPU at PCI:0000:48:00: GPU-5fc0bcec-c2e1-38dc-8994-2a9f9f3b709e",
        "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        "step 79 (PCI:0000:91:00): 79",
        "oxid (PCI:0000:91:00): 79",
        "",
    ],
)
def test_other_lines_are_none(line):
    assert read_xid(line) is None


@pytest.mark.parametrize(
    ("rest", "pid", "process", "message"),
    [
        ("13, pid=42, name=python3, Graphics Exception: ESR 0x1", 42, "python3", "Graphics Exception: ESR 0x1"),
        (
            "31, pid=42, name=sh, Ch 00000008, intr 00000000. MMU Fault",
            42,
            "sh",
            "Ch 00000008, intr 00000000. MMU Fault",
        ),
        ("43, pid=42, name=ray::A, b 2, channel 0x00000010", 42, "ray::A, b 2", "channel 0x00000010"),
        ("43, pid=42, name=glm5-hyper-ppn-, Ch 00000010", 42, "glm5-hyper-ppn-", "Ch 00000010"),
        ("149, pid=4, name=a, b, NETIR_LINK_EVT Fatal XC0", 4, "a, b", "NETIR_LINK_EVT Fatal XC0"),
        ("79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", None, "", "GPU has fallen off the bus."),
        ("79, pid=<unknown>, name='<unknown>', what", None, "", "what"),
        ("79, pid=<n/a>, name=<n/a>, what", None, "", "what"),
        ("94, pid=7062, Contained: CE User Channel (0x9).", 7062, "", "Contained: CE User Channel (0x9)."),
        ("62, 32260b5e 000154b0 00000000", None, "", "32260b5e 000154b0 00000000"),
        ("13, pid=42, na", 42, "", "na"),
        ("13, pid=42", 42, "", ""),
    ],
)
def test_process(rest, pid, process, message):
    reading = read_xid(HEAD + rest)
    assert reading is not None
    assert (reading.pid, reading.process, reading.message) == (pid, process, message)


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
    assert reading is not None
    assert (reading.code, reading.device, reading.mig, reading.process) == (13, "0000:01:00", mig, "a")


def test_uuid():
    reading = read_xid("NVRM: Xid (GPU-5FC0BCEC-C2E1-38DC-8994-2A9F9F3B709E): 48, DBE")
    assert reading is not None
    assert reading.gpu_uuid == "GPU-5fc0bcec-c2e1-38dc-8994-2a9f9f3b709e"


def test_what_follows_is_never_the_first_cause():
    alone = read_xid(HEAD + "45, pid=9, name=python, channel 0x00000015")
    assert alone is not None
    assert (alone.consequence, alone.follows) == (True, None)
    assert alone.confidence <= 0.4
    named = read_xid(HEAD + "45, pid=9, name=python, channel 0x00000015 caused by previous Xid 149")
    assert named is not None
    assert (named.consequence, named.follows, named.failure_class) == (True, 149, FailureClass.NVLINK_ERROR)
    other = read_xid(HEAD + "31, pid=9, name=python, MMU Fault caused by previous Xid 48")
    assert other is not None
    assert (other.consequence, other.follows, other.failure_class) == (True, 48, FailureClass.CUDA_ILLEGAL_ACCESS)


@pytest.mark.parametrize(
    ("rest", "r575", "detail", "severity", "action"),
    [
        # before R575: unit in bits 9:0, here with reason 0b100001 (the peer)
        ("149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x0 0x0)", None, "v1 peer", "fatal", "cordon_gpu"),
        ("149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x0 0x0)", False, "v1 peer", "fatal", "cordon_gpu"),
        ("149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x0 0x0)", True, " ", "fatal", "cordon_gpu"),
        ("149, NETIR_LINK_DOWN Fatal XC0 i0 Link 01 (0x01400011 0x0 0x0)", True, "v2 ", "fatal", "cordon_gpu"),
        ("149, NETIR_LINK_DOWN Fatal XC0 i0 Link 01 (0x02800011 0x0 0x0)", None, "v2 host", "fatal", "restart"),
        ("149, NETIR Fatal XC0 i0 Link 00 (0x000fe406 0x0 0x0)", None, "v1 other_errors", "fatal", "cordon_gpu"),
        ("145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x8 0x1)", None, "v1 support", "warning", "none"),
        ("150, MSE Degraded Fatal XC0 i0 Link 00 (0x00000000 0xffffffff)", None, "v2 support", "fatal", "cordon_gpu"),
        ("149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 01 (0x00000013 0x2)", None, "v2 cable", "warning", "none"),
        ("145, RLW_REMAP Fatal XC1 i0 Link 10 (0x00000082 0x00000040 0x0)", False, "v1 support", "fatal", "cordon_gpu"),
        ("145, RLW_REMAP Fatal XC1 i0 Link 10 (0x00000082 0x00000040 0x0)", None, "v1 support", "fatal", "cordon_gpu"),
        ("145, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00000004 0x00000004)", None, "v2 link", "error", "restart"),
        ("145, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00000004 0x00000300)", None, "v2 ", "warning", "none"),
        # two bits: the worse one counts
        ("145, RLW_REMAP Fatal XC0 i0 Link 00 (0x00000004 0x00000140)", None, "v2 support", "fatal", "cordon_gpu"),
        ("145, RLW_RXPIPE Nonfatal XC0 i0 Link 00 (0x00000006 0x00000001)", None, "v2 support", "warning", "none"),
        ("145, RLW_RXPIPE Fatal XC0 i0 Link 00 (0x00000086 0x00000001)", None, "v2 support", "fatal", "cordon_gpu"),
        ("145, RLW_RXPIPE Fatal XC0 i0 Link 00 (0x000004c2 0x00000001)", None, "v1 support", "fatal", "cordon_gpu"),
        # the driver calls nonfatal what the table calls fatal
        (
            "146, TLW_RX_PIPE1 Nonfatal XC0 i0 Link 03 (0x0000000b 0x00000004)",
            None,
            "v2 support",
            "error",
            "cordon_gpu",
        ),
        (
            "144, pid=1, name=a b, SAW_MVB Fatal XC0 i0 Link 02 (0x00000001 0x2)",
            None,
            "v2 support",
            "fatal",
            "cordon_gpu",
        ),
        ("148, NVLPW_CTRL Fatal XC0 i0 Link 05", None, " ", "fatal", "cordon_gpu"),
        ("147, TREX_ERR Nonfatal XC 00 i 00 Link 02 [0x0000ffff]", None, " ", "warning", "none"),
        ("150, MSE_WATCHDOG Fatal XC0 i0 Link 00 (0x00000000 0x00000000)", None, "v2 support", "fatal", "cordon_gpu"),
    ],
)
def test_nvlink5(rest, r575, detail, severity, action):
    reading = read_xid(HEAD + rest, r575=r575)
    assert reading is not None
    assert f"{reading.detail.get('format', '')} {reading.detail.get('look', '')}" == detail
    assert (reading.severity, reading.action.removesuffix("_and_restart")) == (severity, action)
    assert reading.failure_class is FailureClass.NVLINK_ERROR
    assert reading.link is not None


def test_nvlink5_words():
    reading = read_xid(HEAD + "149, NETIR_LINK_EVT Fatal XC1 i2 Link 17 (0x021425c6 0x00000007)")
    assert reading is not None
    assert reading.link == 17
    assert reading.detail == {
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
    assert reading is not None
    assert (reading.link, reading.detail.get("error")) == (14, error)
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
    assert reading is not None
    assert (reading.detail["recovery"], reading.action, reading.severity) == (recovery, action, severity)
    assert reading.consequence


@pytest.mark.parametrize(
    ("rest", "detail"),
    [
        (
            "13, pid=1, name=a, Graphics SM Warp Exception on (GPC 10, TPC 4, SM 0): Out Of Range Address",
            {"gpc": "10", "tpc": "4", "sm": "0", "error": "Out Of Range Address"},
        ),
        (
            "31, pid=1, MMU Fault: ENGINE CE2 GPC2 GPCCLIENT_T1_7 faulted @ 0x2b_b3000000. FAULT_PDE ACCESS_TYPE_WRITE",
            {
                "engine": "CE2",
                "gpc": "2",
                "client": "GPCCLIENT_T1_7",
                "address": "0x2b_b3000000",
                "fault": "FAULT_PDE",
                "access": "ACCESS_TYPE_WRITE",
            },
        ),
        (
            "119, Timeout after 6s of waiting for RPC response from GPU4 GSP! Expected function 1 (FREE) (0x1 0x0).",
            {"waited_s": "6", "function": "1 (FREE)"},
        ),
        (
            "63, Row Remapper: New row (0x0000000018f31d80) marked for remapping, reset gpu to activate.",
            {"row": "0x0000000018f31d80", "pending": "reset gpu to activate"},
        ),
    ],
)
def test_details(rest, detail):
    reading = read_xid(HEAD + rest)
    assert reading is not None
    assert reading.detail == detail


def test_a_contained_error_costs_the_process_unless_the_gpu_must_be_reset():
    contained = read_xid(HEAD + "94, pid=7, name=a, Contained: SM (0x1). RST: No, D-RST: No")
    assert contained is not None
    assert (contained.action, contained.detail) == ("restart", {"unit": "SM", "reset": "No", "drain": "No"})
    reset = read_xid(HEAD + "94, pid=7, name=a, Contained: LTC TAG (0x2,0x1). RST: Yes, D-RST: No")
    assert reset is not None
    assert reset.action == "cordon_gpu_and_restart"


@pytest.mark.parametrize(
    ("line", "code", "switch", "device", "fatal", "link"),
    [
        ("[1.5] nvidia-nvswitch3: SXid (PCI:0000:C5:00.0): 20034, Fatal, Link 30 x", 20034, 3, "0000:c5:00", True, 30),
        ("nvidia-nvswitch0 SXid (PCI:0000:06:00.0): 20009, Non-fatal, Link 04 x", 20009, 0, "0000:06:00", False, 4),
        # the line's own word wins over the table
        ("nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 12028, Fatal, Link 32 x", 12028, 1, "0000:06:00", True, 32),
        ("nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 23001, overflow", 23001, 1, "0000:06:00", True, None),
        ("SXid (PCI:0000:06:00.0): 99999, Non-fatal, Link 1 what", 99999, None, "0000:06:00", False, 1),
        (MANAGER.format("fatal error 20034", 33), 20034, None, "0000:86:00", True, 33),
        (MANAGER.format("non-fatal error 20009", 61), 20009, None, "0000:86:00", False, 61),
    ],
)
def test_sxid(line, code, switch, device, fatal, link):
    reading = read_sxid(line)
    assert reading is not None
    assert (reading.code, reading.switch, reading.device) == (code, switch, device)
    assert (reading.severity == "fatal", reading.link) == (fatal, link)
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
    assert reading is not None
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
    assert whole is not None
    for end in range(len(line)):
        part = read_xid(line[:end]) or read_sxid(line[:end])
        assert part is None or part.device in ("", whole.device)


@settings(deadline=None)
@given(st.text(max_size=400))
def test_any_text(text):
    read_xid(text)
    read_sxid(text)


@settings(deadline=None)
@given(st.sampled_from(REAL), st.text(max_size=80), st.integers(0, 120), st.integers(0, 40), st.booleans())
def test_any_damage(line, noise, at, gone, r575):
    damaged = line[:at] + noise + line[at + gone :]
    reading = read_xid(damaged, r575=r575)
    if reading is not None:
        assert all(len(value) <= 100 for value in reading.detail.values())
    read_sxid(damaged)


def test_an_address_that_is_none_is_no_device():
    reading = read_xid("NVRM: Xid (PCI:zzzz:3b:00): 79, x")
    assert reading is not None
    assert reading.device == ""
