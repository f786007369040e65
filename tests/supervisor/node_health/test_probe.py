"""Where probes look, and what holds for each of ours."""

import os
import tempfile
import time
from pathlib import Path

import pytest

from supervisor.node_health import contract
from supervisor.node_health.contract import Moment, Probe, ProbeContext

OURS = [pytest.param(probe, id=probe.name) for probe in contract.load("node", for_agent=True)[0]]


def test_links_of_a_captured_tree_never_lead_out_of_it(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sys/devices/gpu0").mkdir(parents=True)
    (tree / "sys/devices/gpu0/vendor").write_text("0x10de\n")
    (tree / "sys/class").mkdir()
    (tree / "sys/class/relative").symlink_to("../devices/gpu0")
    (tree / "sys/class/absolute").symlink_to("/sys/devices/gpu0")
    (tree / "sys/class/loop").symlink_to("loop")
    (tree / "sys/class/above").symlink_to("../../../secret")
    (tmp_path / "secret").write_text("of this machine")
    (tree / "passwd").symlink_to("/etc/passwd")
    place = ProbeContext(root=tree)
    assert place.text("sys/class/relative/vendor") == place.text("sys/class/absolute/vendor") == "0x10de\n"
    assert place.link("sys/class/absolute") == "/sys/devices/gpu0"
    assert place.names("sys/class/absolute") == ["vendor"]
    for outside in ("passwd", "sys/class/above", "../secret", "sys/class/loop"):
        assert place.text(outside) is None, outside


def test_what_is_no_file_in_a_captured_tree_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    place = ProbeContext(root=tmp_path)
    reader = os.open(tmp_path / "fifo", os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(reader, b"said to somebody else")
        assert place.text("fifo") is None
        assert os.read(reader, 100) == b"said to somebody else"
    finally:
        os.close(reader)


@pytest.mark.root
def test_what_lies_in_a_closed_folder_is_denied() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "closed").mkdir(mode=0o700)
        place = ProbeContext(root=folder)
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                os._exit(place.denied("closed/file") and not place.denied("missing"))
            finally:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_keeping_a_name_that_is_no_utf8_is_no_failure(tmp_path: Path) -> None:
    ProbeContext(state_dir=tmp_path).keep("names", [os.fsdecode(b"\xff")])
    assert ProbeContext(state_dir=tmp_path).load("names") is None


@pytest.mark.parametrize("probe", OURS)
def test_of_an_empty_tree_every_check_says_that_it_does_not_apply(probe: Probe, tmp_path: Path) -> None:
    """A check without an answer would make the whole node unknown."""
    results = type(probe)().look(ProbeContext(root=tmp_path, preflight=True), Moment(wall=1.7e9, mono=1.0))
    assert {one.check for one in results} == {check.id for check in probe.checks}
    assert {one.status for one in results} <= {"not_applicable", "unknown"}
    assert all("{" not in check.threshold_text() for check in probe.checks)


@pytest.mark.parametrize("probe", OURS)
def test_of_this_machine_every_check_says_something_and_accuses_nobody(probe: Probe, tmp_path: Path) -> None:
    place = ProbeContext(state_dir=tmp_path, preflight=True, once=True)
    results = type(probe)().look(place, Moment(wall=time.time(), mono=time.monotonic()))
    assert {one.check for one in results} == {check.id for check in probe.checks}
    bad = [one for one in results if one.status == "unhealthy" and one.level == "critical"]
    assert bad == []
