"""Proposed rules wait in a file, and do nothing until an operator approves them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diagnosis import rules, tables
from diagnosis.incident import ProposedRule
from diagnosis.taxonomy import FailureClass
from supervisor import config
from supervisor.cli import job_commands
from supervisor.controller.client import ControllerClient
from supervisor.errors import ConfigError, ControllerUnreachable, UnbrokenError
from supervisor.messages import CommandRequest
from supervisor.opinion import pending

LINE = 'FluxError: "governor" 17 \\ lost its balance é'


def proposed(name: str = "rule-i-1", line: str = LINE) -> ProposedRule:
    return ProposedRule(id=name, failure_class=FailureClass.SCRIPT_ERROR, text=line, line=line)


def add(job_dir: Path, rule: ProposedRule) -> bool:
    return pending.add(job_dir, rule, "proposed by m for i-1 of j, 2026-11-23 12:00 UTC")


def waiting(job_dir: Path) -> list[str]:
    return [name.partition("@")[0] for name in pending.names(job_dir)]


def shown(job_dir: Path, name: str = "rule-i-1") -> str:
    """As `status` shows it; the bare name if it does not wait."""
    return next((one for one in pending.names(job_dir) if one.startswith(f"{name}@")), name)


@pytest.fixture
def _rules_as_before() -> object:
    yield
    rules.use(())


def read_with(job_dir: Path) -> set[str]:
    """Ids of the rules that a process of this job finds in the line."""
    assert config.use_rules(config.SiteFile(), job_dir) == ""
    return {match.rule for match in rules.default().scan(LINE.replace("17", "4").encode())}


@pytest.mark.usefixtures("_rules_as_before")
def test_from_proposed_to_approved(tmp_path: Path) -> None:
    assert add(tmp_path, proposed())
    assert add(tmp_path, proposed("rule-i-2", "the other thing has happened"))
    assert waiting(tmp_path) == ["rule-i-1", "rule-i-2"]
    assert read_with(tmp_path) == set(), "it does nothing"

    told = pending.approve(tmp_path, shown(tmp_path), "me@here", "today", tmp_path / pending.APPROVED)
    assert "rules.toml" in told
    assert read_with(tmp_path) == {"rule-i-1"}
    assert waiting(tmp_path) == ["rule-i-2"]
    row = tables.parse((tmp_path / "rules.toml").read_text())["rule"][0]
    assert row["origin"] == "proposed by m for i-1 of j, 2026-11-23 12:00 UTC; approved by me@here, today"

    assert "forgotten" in pending.reject(tmp_path, "rule-i-2", tmp_path / "none.toml")
    assert not (tmp_path / pending.NAME).exists()


MINE = '# What we know\n[[rule]]\nid = "mine"\nclass = "script_error"\nregex = "my words"\nliterals = ["my words"]\n'


@pytest.mark.usefixtures("_rules_as_before")
def test_a_rule_is_withdrawn_and_all_around_it_stays(tmp_path: Path) -> None:
    path = tmp_path / pending.APPROVED
    path.write_text(MINE)
    for name in ("rule-i-1", "rule-i-2"):
        add(tmp_path, proposed(name))
        assert decide(tmp_path, name=name)["ok"] is True
    add(tmp_path, proposed())
    with pytest.raises(UnbrokenError, match="is there already"):
        decide(tmp_path)
    decide(tmp_path, "reject")  # the one that waits
    before = path.read_text()
    assert before.startswith(MINE)
    assert str(path) in str(decide(tmp_path, "reject", dry_run=True)["would"])
    assert path.read_text() == before

    assert decide(tmp_path, "reject")["ok"] is True
    left = path.read_text()
    assert left.startswith(MINE)
    assert read_with(tmp_path) == {"rule-i-2"}
    assert decide(tmp_path, "reject", "rule-i-2")["ok"] is True
    assert path.read_text().rstrip() == MINE.rstrip()
    with pytest.raises(UnbrokenError, match="no rule rule-i-2 waits"):
        decide(tmp_path, "reject", "rule-i-2")


@pytest.mark.usefixtures("_rules_as_before")
def test_a_rule_for_all_jobs_of_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, job_dir = tmp_path / "etc" / "site.toml", tmp_path / "the job"
    site.parent.mkdir()
    job_dir.mkdir()
    site.write_text(MINE)
    monkeypatch.setenv("UNBROKEN_SITE", str(site))
    add(job_dir, proposed())
    told = job_commands.decide_rule(given("approve", shown(job_dir)), job_dir, no_controller, for_site=True)
    assert "rule-the-job-i-1" in str(told["notes"])
    assert site.read_text() == MINE
    found = config.load_site(str(site))
    assert found.problem == ""
    assert [one["id"] for one in found.tables["rule"]] == ["mine", "rule-the-job-i-1"]
    assert config.use_rules(found) == ""
    assert {match.rule for match in rules.default().scan(LINE.encode())} == {"rule-the-job-i-1"}

    learned = config.learned_rules(str(site))
    good = learned.read_text()
    learned.write_text(good.replace("script_error", "no_such_class"))
    spoilt, problem = config.load_site_or_default(str(site))
    assert "learned" in problem
    assert [one["id"] for one in spoilt.tables["rule"]] == ["mine"], "the site's own rules are used all the same"
    learned.write_text(good)
    assert decide(tmp_path / "other", "reject", "rule-the-job-i-1")["ok"] is True
    assert config.load_site(str(site)).tables["rule"] == found.tables["rule"][:1]


def test_what_an_operator_spoilt_is_not_approved(tmp_path: Path) -> None:
    add(tmp_path, proposed())
    path = tmp_path / pending.NAME
    path.write_text(path.read_text().replace('"script_error"', '"no_such_class"'))
    with pytest.raises(ConfigError, match=r"rule\.rule-i-1"):
        pending.approve(tmp_path, shown(tmp_path), "me", "today", tmp_path / pending.APPROVED)
    assert not (tmp_path / "rules.toml").exists()
    assert waiting(tmp_path) == ["rule-i-1"]
    assert decide(tmp_path, "reject")["ok"] is True, "what cannot be used can be got rid of"
    assert pending.names(tmp_path) == []


def test_what_has_changed_since_it_was_shown_is_not_approved(tmp_path: Path) -> None:
    add(tmp_path, proposed())
    seen = shown(tmp_path)
    for name in ("rule-i-1", "rule-i-1@", "rule-i-1@0123456789ab"):
        with pytest.raises(UnbrokenError, match=f"changed since .* `unbroken approve {seen}`. Nothing was done"):
            job_commands.decide_rule(given("approve", name), tmp_path, no_controller)
    looked = decide(tmp_path, dry_run=True)
    assert seen in str(looked["would"])
    assert "governor" in str(looked["would"])
    add(tmp_path, proposed(line="another thing has happened to it"))  # the model is asked again
    with pytest.raises(UnbrokenError, match="has changed since it was shown"):
        job_commands.decide_rule(given("approve", seen), tmp_path, no_controller)
    assert not (tmp_path / pending.APPROVED).exists()
    assert pending.add(tmp_path, proposed(), "proposed by another model")
    assert shown(tmp_path) == seen, "who proposed it is no part of what it says"
    assert job_commands.decide_rule(given("approve", seen), tmp_path, no_controller)["ok"] is True


def test_the_same_incident_asked_again_replaces_its_rule_and_there_are_only_so_many(tmp_path: Path) -> None:
    for _ in range(3):
        assert add(tmp_path, proposed())
    assert waiting(tmp_path) == ["rule-i-1"]
    for number in range(2, pending.MAX_PENDING + 1):
        assert add(tmp_path, proposed(f"rule-i-{number}"))
    assert not add(tmp_path, proposed("rule-i-99"))
    assert add(tmp_path, proposed("rule-i-7"))


def edited(job_dir: Path, *lines: str) -> None:
    text = ["[[rule]]", 'id = "rule-i-1"', 'class = "script_error"', 'literals = ["flux"]', *lines]
    (job_dir / pending.NAME).write_text("\n".join(text))


@pytest.mark.parametrize(
    ("regex", "sample"),
    [("flux(a+)+b", "flux" + "a" * 40), ("flux(a+)+b", "fluxaaab"), ("flux(x|x)*(y|y)*(z+)+$", "fluxxyz")],
)
def test_a_regex_that_takes_for_ever_is_not_approved(
    tmp_path: Path, regex: str, sample: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "TRIED_S", 1.0)
    edited(tmp_path, f'regex = "{regex}"', f'samples = ["{sample}"]')
    with pytest.raises(UnbrokenError, match="takes too long on some lines"):
        decide(tmp_path)
    assert not (tmp_path / pending.APPROVED).exists()


# ----- the command -----


def no_controller() -> ControllerClient:
    raise ControllerUnreachable("nobody")


def given(command: str, name: str = "rule-i-1", **more: bool) -> CommandRequest:
    return CommandRequest(command=command, argument=name, reason="because", by="me@here", **more)  # type: ignore[arg-type]


def decide(job_dir: Path | None, command: str = "approve", name: str = "rule-i-1", **more: bool) -> dict[str, object]:
    if command == "approve" and job_dir is not None and not more:
        name = shown(job_dir, name)
    return job_commands.decide_rule(given(command, name, **more), job_dir, no_controller)


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnbrokenError, match="--job-dir"):
        decide(None)
    with pytest.raises(UnbrokenError, match="no rule rule-i-1 waits; rules that wait: none"):
        decide(tmp_path)
    add(tmp_path, proposed())
    with pytest.raises(UnbrokenError, match="wait: rule-i-1"):
        decide(tmp_path, name="rule-i-5")
    os.mkdir(tmp_path / "rules.toml")
    with pytest.raises(UnbrokenError):
        decide(tmp_path)
