"""The tables of Xids and SXids: every code has a row, rows are valid, a site may change them."""

import json
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from diagnosis.kernel.causes import finding_of
from diagnosis.kernel.xid import default_tables, read_sxid, read_xid
from diagnosis.signals import KernelSeverity
from diagnosis.tables import load, parse
from diagnosis.taxonomy import TAXONOMY, FailureClass, RemedyAction

XIDS = range(1, 174)
"""Of NVIDIA's catalogue, and those that only checkers know."""
SXIDS = {
    *[10001, 10002, 10003, 10004, 10005, 11001, 11004, 11009, 11012, 11013, 11018, 11019, 11020, 11021, 11022, 11023],
    *[12001, 12002, 12020, 12021, 12022, 12023, 12024, 12025, 12026, 12027, 12028, 12030, 12031, 12032, 14017, 15001],
    *[15006, 15008, 15009, 15010, 15011, 15012, 15013, 19047, 19048, 19049, *range(19054, 19072), 19084],
    *[20001, 20009, 20012, 20034, 22003, 22011, 22012, 22013, *range(23001, 23018), *range(24001, 24008)],
}
TABLES = default_tables()
HEAD = "NVRM: Xid (PCI:0000:c1:00): "


@pytest.mark.parametrize(
    ("line", "outlook"),
    [
        (f"{HEAD}79, pid=1, name=python, GPU has fallen off the bus.", "fails"),
        (f"{HEAD}48, pid=1, An uncorrectable double bit error (DBE) has been detected", "fails"),
        (f"{HEAD}95, pid=1, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No", "fails"),
        (f"{HEAD}119, pid=1, name=python, Timeout after 6s of waiting for RPC response from GPU0 GSP!", "fails"),
        (f"{HEAD}62, pid=1, 2027(2d0c) 00000000 00000000", "fails"),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 02 egress error", "fails"),
        (f"{HEAD}63, pid=1, Row Remapper: New row (0x1) marked for remapping, reset gpu to activate.", "repair"),
        (f"{HEAD}161, pid=1, name=python, failed", "degrades"),
        (f"{HEAD}64, pid=1, Row Remapper: failed to record the row", "degrades"),
        (f"{HEAD}155, pid=1, NVLink: a link is down", "repair"),
        (f"{HEAD}13, pid=1, Graphics SM Warp Exception on (GPC 0, TPC 1)", ""),
        (f"{HEAD}31, pid=1, MMU Fault: ENGINE GRAPHICS faulted @ 0x7f_0000", ""),
        (f"{HEAD}43, pid=1, Ch 00000010", ""),
        (f"{HEAD}94, pid=1, Contained: SM (0x1). RST: No, D-RST: No", ""),
        (f"{HEAD}154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", ""),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 02 egress error", ""),
        (f"{HEAD}74, pid=1, NVLink: fatal error detected on link 4(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)", "fails"),
    ],
)
def test_what_becomes_of_the_gpu(line, outlook):
    event = read_xid(line) or read_sxid(line)
    assert finding_of(event, 0.0).outlook == outlook


def test_a_site_may_say_that_a_code_is_no_reason_to_leave():
    tables = TABLES.with_site({"xid": {"79": {"outlook": ""}}})
    assert read_xid(f"{HEAD}79, pid=1, GPU has fallen off the bus.", tables).outlook == ""


def test_every_code_has_a_row():
    assert set(TABLES.xid) >= set(XIDS)
    assert set(TABLES.sxid) >= SXIDS
    assert set(TABLES.recovery) == set(range(8))
    assert {unit.xid for unit in TABLES.nvlink.unit} == set(range(144, 151))


@pytest.mark.parametrize("row", [*TABLES.xid.items(), *TABLES.sxid.items()], ids=lambda row: str(row[0]))
def test_rows_are_valid(row):
    _, row = row
    assert row.mnemonic
    assert TAXONOMY[row.failure_class].kind in ("cause", "symptom")
    assert row.action in typing.get_args(RemedyAction)
    assert row.severity in typing.get_args(KernelSeverity)
    assert row.severity == "fatal" or not row.action.startswith("cordon_node") or row.consequence
    assert row.severity != "info" or row.action == "none"
    assert set(row.after) <= set(TABLES.xid)


@pytest.mark.parametrize(
    ("failure_class", "codes"),
    [
        ("gpu_ecc_uncorrectable", [48, 63, 64, 92, 94, 95, 140, 156, 157, 160, 161, 168, 171, 172]),
        ("gpu_fallen_off_bus", [79]),
        ("gpu_hang", [8, 46, 61, 62, 109, 119, 120, 158]),
        ("nvlink_error", [74, 121, 136, *range(144, 151), 155, 159, 173]),
        ("cuda_illegal_access", [13, 31, 43, 69, 137]),
        ("gpu_thermal_power", [54, 162, 163, 164, 165]),
        ("pcie_error", [32, 80, 167]),
        ("gpu_driver", [78, 110, 143, 151, 154]),
    ],
)
def test_classes(failure_class, codes):
    assert {code: TABLES.xid[code].failure_class.value for code in codes} == dict.fromkeys(codes, failure_class)


def test_each_override_has_a_reason_and_changes_something():
    overrides = load("diagnosis.kernel", "xid_overrides.toml")
    for override in overrides["override"]:
        assert override["why"].endswith(".")
    for code, facts in load("diagnosis.kernel", "xid.toml")["xid"].items():
        row = {"class": "gpu_driver", "action": "restart", "severity": "warning"}
        row |= overrides["advice"].get(facts["nvidia"], {})
        changes = [one for one in overrides["override"] if int(code) in one["codes"]]
        names = [name for one in changes for name in one if name not in ("codes", "why")]
        assert len(names) == len(set(names))
        assert (
            any(value != row.get(name) for one in changes for name, value in one.items() if name in names) or not names
        )


def test_the_catalogue_is_written_by_its_script(tmp_path):
    row = {"xid": 79, "mnemonic": "ROBUST_CHANNEL_A / ROBUST_CHANNEL_B", "nvidia_immediate": ""}
    (tmp_path / "captured.json").write_text(json.dumps({"source": "S", "captured": "2026-11-21", "xids": [row]}))
    script = Path(__file__).parents[3] / "tools" / "xid_table.py"
    written = subprocess.run([sys.executable, script, tmp_path / "captured.json"], capture_output=True, check=True)
    head, _, rows = written.stdout.decode().partition("\n\n")
    assert "2026-11-21" in head
    assert parse(rows) == {"xid": {"79": {"name": "A", "nvidia": "none"}}}


def test_a_site_changes_rows():
    site = {
        "xid": {"79": {"severity": "error", "action": "hold"}, "999": {"class": "gpu_hang"}, "149": {"action": "stop"}},
        "sxid": {"20034": {"class": "gpu_driver", "severity": "warning"}},
        "limits": {"anything": 1},
    }
    tables = TABLES.with_site(site).with_site({"xid": {79: {"name": "GONE"}}})
    off_bus = read_xid(HEAD + "79", tables)
    assert (off_bus.severity, off_bus.action, off_bus.fields["mnemonic"]) == ("error", "hold", "GONE")
    assert off_bus.failure_class is FailureClass.GPU_FALLEN_OFF_BUS
    new = read_xid(HEAD + "999, x", tables)
    assert new.failure_class is FailureClass.GPU_HANG
    link = read_xid(HEAD + "149, NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x021425c6 0x0)", tables)
    assert (link.action, link.severity) == ("stop", "fatal")
    switch = read_sxid("SXid (PCI:0000:06:00.0): 20034, Fatal, Link 1 x", tables)
    assert (switch.failure_class, switch.severity) == (FailureClass.GPU_DRIVER, "warning")
    assert TABLES.xid[79].severity == "fatal"


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ({"xid": {"79": {"severity": "deadly"}}}, r"xid\.79: .*severity"),
        ({"xid": {"79": {"klass": "gpu_hang"}}}, r"xid\.79: .*klass"),
        ({"xid": {"79": {"class": "gpu_tired"}}}, r"xid\.79: .*class"),
        ({"xid": {"ecc": {"class": "gpu_hang"}}}, r"xid\.ecc: "),
        ({"sxid": {"20034": 3}}, r"sxid\.20034: "),
        ({"sxid": 3}, "sxid: "),
    ],
)
def test_a_wrong_site_row_names_its_key(site, message):
    with pytest.raises(ValueError, match=message):
        TABLES.with_site(site)
