"""Where probes look."""

from pathlib import Path

from supervisor.probes.probe import Place


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
    place = Place(root=tree)
    assert place.text("sys/class/relative/vendor") == place.text("sys/class/absolute/vendor") == "0x10de\n"
    assert place.link("sys/class/absolute") == "/sys/devices/gpu0"
    assert place.names("sys/class/absolute") == ["vendor"]
    for outside in ("passwd", "sys/class/above", "../secret", "sys/class/loop"):
        assert place.text(outside) is None, outside
