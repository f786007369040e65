"""The site file: what it may say, and that a wrong one names its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnosis import rules
from supervisor import config
from supervisor.errors import ConfigError
from supervisor.node_health.contract import Site


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "site.toml"
    path.write_text(text)
    return str(path)


def test_all_of_it(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        skip = ["ethernet_*"]
        interfaces_left_out = ["eno*"]
        [expect]
        gpus = 8
        ib_rate_gbps = 400
        mounts = ["/data"]
        versions = { driver = "550.54.15" }   # of an older version of ours: left out
        [limits.gpu_temperature]
        margin_c = 5
        [xid.79]
        severity = "fatal"
        """,
    )
    read = config.load_site(path)
    assert read.path == path
    assert read.site.skip == ("ethernet_*",)
    assert read.site.interfaces_left_out == ("eno*",)
    assert (read.site.expect.gpus, read.site.expect.ib_rate_gbps, read.site.expect.mounts) == (8, 400.0, ("/data",))
    assert read.site.limits == {"gpu_temperature": {"margin_c": 5.0}}
    assert read.tables == {"xid": {"79": {"severity": "fatal"}}}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("gpus = 8", "`gpus` (known are expect, limits, skip"),
        ("[expect]\ngpu = 8", "`gpu` - at `expect`"),
        ("[expect]\ngpus = 'eight'", "expect.gpus"),
        ("[limits.x]\nmargin_c = 'warm'", "limits[...]"),
        ("skip = 'all'", "skip"),
        ("[xid.79]\nseverity = 'loud'", "xid.79"),
        ("[sxid.many]\nseverity = 'fatal'", "sxid.many"),
        ("kernel = 3", "kernel"),
        ("[limits.x]\nmargin_c = inf", "limits.x"),
        ("[", "is not TOML"),
        ("a = " + "[" * 5000, "is not TOML"),
    ],
)
def test_a_wrong_file_names_its_key(tmp_path: Path, text: str, named: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        config.load_site(path)
    assert path in str(raised.value)
    assert named in str(raised.value)
    read, problem = config.load_site_or_default(path)
    assert read.site == Site()
    assert named in problem


RULE = """
[[rule]]
id = "our_tracker"
class = "dns_or_connect"
regex = "tracker \\\\d+ unreachable"
literals = ["tracker"]
"""


def test_rules_of_the_site_and_of_the_job(tmp_path: Path) -> None:
    read = config.load_site(write(tmp_path, RULE))
    job = tmp_path / "job"
    job.mkdir()
    try:
        assert config.use_rules(read, job) == ""
        assert [match.rule for match in rules.default().scan(b"tracker 7 unreachable")] == ["our_tracker"]
        (job / "rules.toml").write_text("[[rule]]\nid = 'our_tracker'\nconfidence = 0.6\n")
        assert config.use_rules(read, job) == ""
        assert [match.confidence for match in rules.default().scan(b"tracker 7 unreachable")] == [0.6]
        (job / "rules.toml").write_text("[[rule]]\nid = 'our_tracker'\nclass = 'no_such'\n")
        assert "rule.our_tracker" in config.use_rules(read, job)
        assert list(rules.default().scan(b"tracker 7 unreachable"))
    finally:
        rules.use([])


def test_a_job_keeps_the_rules_that_it_began_with(tmp_path: Path) -> None:
    """What was approved since would judge its past anew."""
    job = tmp_path / "job"
    job.mkdir()
    line = b"tracker 7 unreachable"
    try:
        assert config.use_rules_of_job(config.SiteFile(), job, begun=False) == ""
        (job / "rules.toml").write_text(RULE)
        assert config.use_rules_of_job(config.SiteFile(), job, begun=True) == ""
        assert not list(rules.default().scan(line))
        assert config.use_rules_of_job(config.SiteFile(), job, begun=False) == "", "another job in the same folder"
        assert [match.rule for match in rules.default().scan(line)] == ["our_tracker"]
        (job / "rules.toml").unlink()
        assert config.use_begun_rules(job)
        assert [match.rule for match in rules.default().scan(line)] == ["our_tracker"]
        (job / config.RULES_BEGUN).write_bytes(b"\xff")
        assert config.use_rules_of_job(config.SiteFile(), job, begun=True) == ""
        assert not list(rules.default().scan(line))
    finally:
        rules.use([])
