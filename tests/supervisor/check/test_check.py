"""`unbroken check` as a command: forms for Slurm, what there is to check, and what is refused."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diagnosis.tables import load
from supervisor.node_health.check import table
from supervisor.node_health.state import RESPONDS

PlugIn = Callable[[str], dict[str, str]]
Check = Callable[..., Any]


REPOSITORY = Path(__file__).parents[3]


def test_forms_for_slurm(check: Check, plug_in: PlugIn, broken: str) -> None:
    env = {**plug_in(broken), "FAN": "critical"}
    prolog = check("--slurm", "prolog", "--only", "broken", env=env)
    assert (prolog.code, prolog.out) == (1, "unbroken: storage_error sda 2 % left (broken_disk)\n")
    health = check("--slurm", "health", "--only", "broken", env=env)
    assert (health.code, health.out) == (0, "unbroken: storage_error sda 2 % left (broken_disk)\n")
    assert check("--slurm", "prolog", "--only", "broken_none", env=env).code == 0, "unknown is no reason"
    as_json = check("--slurm", "health", "--only", "broken", "--json", env=env)
    assert (as_json.code, as_json.answer["exit_code"]) == (0, 2)
    epilog = check("--slurm", "epilog")
    assert (epilog.code, epilog.out, epilog.err) == (0, "", "")


def test_nothing_that_is_wrong_with_us_drains_a_node(check: Check) -> None:
    bad_site = check("--slurm", "prolog", "--only", "memory_available", site="limits = 3\n")
    assert (bad_site.code, bad_site.out) == (0, "")
    assert "the site file is not used" in bad_site.err
    bad_name = check("--slurm", "prolog", "--only", "memroy_size")
    assert bad_name.code == 0
    assert "memory_available" in bad_name.err
    argv = [sys.executable, "-m", "supervisor.cli.main", "check", "--slurm", "prolog", "--only", "memroy_size"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(argv, stdout=full, stderr=full, check=False).returncode == 0
        argv[-1] = "memory_available"
        assert subprocess.run([*argv, "--json"], stdout=full, stderr=full, check=False).returncode == 0


def test_an_answer_that_cannot_be_written_is_unknown_and_no_warning() -> None:
    argv = [sys.executable, "-m", "supervisor.cli.main", "check", "--only", "memory_available"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)


def test_the_list_has_the_sites_own_limits_and_says_what_applies(check: Check) -> None:
    site = "[limits.memory_available]\nmib = 4096\n[limits.memory_availabel]\nmib = 1\n"
    done = check("--list", "--json", "--only", "memory", "--only", "gpu_*", "--only", "pci", site=site)
    listed = {one["check"]: one for one in done.answer["checks"]}
    assert done.code == 0
    assert "4096 MiB" in listed["memory_available"]["threshold"]
    assert listed["memory_available"]["limits"]["mib"] == 4096
    assert listed["memory_available"]["applies"] is True
    assert (listed["pcie_link_speed"]["applies"], listed["pcie_link_speed"]["when"]) == (None, "preflight")
    people = check("--list", "--only", "memory_*", site=site).out.splitlines()
    assert people[0].split("\t")[:2] == ["check", "applies"]
    assert any(line.startswith("memory_available\tyes\t") for line in people)
    (wrong,) = check("--only", "memory_available", "--json", site=site).answer["problems"]
    assert wrong.startswith("the site file sets limits of memory_availabel, which is no check: did you mean memory_ava")
    (wrong,) = check("--only", "memory_available", "--json", site='skip = ["memroy_*", "eth_*"]').answer["problems"]
    assert wrong == "the site file skips memroy_*, and no check or probe is called so"


@pytest.mark.parametrize(
    ("arguments", "site", "code", "says"),
    [
        (("--only", "gpu_ecc_uncorected"), "", 2, "did you mean gpu_ecc_uncorrected"),
        (("--skip", "zzz"), "", 2, "no check or probe is called zzz"),
        (("--root", "/nowhere/at/all"), "", 3, "cannot be read: No such file"),
        (("--root", "{tmp}"), "", 3, "is no captured tree"),
        ((), "[expect]\ngpu = 8\n", 78, "site.toml"),
    ],
)
def test_what_makes_no_sense_is_refused(
    check: Check, tmp_path: Path, arguments: tuple[str, ...], site: str, code: int, says: str
) -> None:
    done = check(*(argument.format(tmp=tmp_path) for argument in arguments), site=site)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("unbroken: ")
    assert says in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--root", "/nowhere/at/all"), 3, "cannot be read: No such file"),
        (("--root", "{tmp}"), 3, "is no captured tree"),
        (("--only", "gpu_ecc_uncorected"), 2, "did you mean gpu_ecc_uncorrected"),
        (("--site", "{tmp}/no.toml"), 3, "no.toml"),
        (("--list", "--site", "{tmp}/wrong.toml"), 3, "expect"),
        (("--root", "{tmp}", "--site", "{tmp}/wrong.toml"), 3, "expect"),
    ],
)
def test_json_is_printed_where_nothing_can_be_said(
    check: Check, tmp_path: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    (tmp_path / "wrong.toml").write_text("[expect]\ngpu = 8\n")
    done = check(*(argument.format(tmp=tmp_path) for argument in arguments), "--json")
    answer = done.answer
    assert (done.code, done.err, answer["status"], answer["exit_code"]) == (code, "", "unknown", code)
    assert says in answer["problems"][0]
    assert answer["checks"] == []
    assert set(answer) == set(check("--only", "memory_available", "--json").answer)


def test_the_page_has_the_table() -> None:
    made = runpy.run_path(str(REPOSITORY / "docs/make_checks.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "run: python docs/make_checks.py"


def test_each_row_of_the_table_of_checks_is_made_by_its_probe() -> None:
    made = {name: row.probe for name, row in table().items()}
    rows = load("supervisor.node_health", "checks.toml")
    assert set(rows.pop("responds")) == {check.id for check in RESPONDS.values()}
    assert {name: probe for probe, checks in rows.items() for name in checks}.items() <= made.items()
