"""`unbroken export incidents`, and what `tests.bench` and Croissant's readers make of it."""

from __future__ import annotations

import hashlib
import json
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from recovery.incident_memory import ClosedIncident, Correction
from recovery.incident_store import IncidentStore
from supervisor.cli.export import CONTEXT, FIELDS
from supervisor.cli.main import main
from tests.bench.diagnosis import load, report

XID = "NVRM: Xid (PCI:0000:c1:00): 79, pid=4711, name=python, GPU has fallen off the bus. (gpunode-042)"
SAID = Correction(
    failure_class="nvlink_error", note="carol@login1 replaced the cable of falcon", by="carol@login1", at=9.0
)
PLANTED = ("gpunode", "falcon", "carol", "login1", "moonshot", "4712", "f00df00d", "/home", "10.1.2.3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    one = ClosedIncident(
        job="moonshot",
        job_id="moonshot-4712.000",
        incident="i-1",
        opened_at=5.0,
        closed_at=7.0,
        failure_class="gpu_fallen_off_bus",
        confidence=0.9,
        why="falcon is gone",
        nodes=("falcon",),
        gpus=("falcon/0000:c1:00", "GPU-f00df00d-0000-4000-8000-f00df00df00d"),
        evidence=(XID, "open /home/carol/x.tar on 10.1.2.3 failed"),
        fingerprint="a" * 16,
        corrections=(SAID,),
    )
    other = ClosedIncident(
        job="moonshot",
        job_id="moonshot-4712.000",
        incident="i-2",
        opened_at=6.0,
        evidence=("carol: Killed",),
        trigger="carol",
    )
    IncidentStore(tmp_path).write([one, other], 10.0)
    return tmp_path


def export(folder: Path, *options: str, code: int = 0) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """What it said, its rows, and what is said of them."""
    done = CliRunner().invoke(
        main, ["export", "incidents", "--folder", str(folder), "-o", str(folder / "out"), *options]
    )
    assert done.exit_code == code, (done.output, done.exception)
    if code:
        return done.output, [], {}
    rows = [json.loads(line) for line in (folder / "out" / "incidents.jsonl").read_text().splitlines()]
    return done.output, rows, json.loads((folder / "out" / "croissant.json").read_text())


def test_nothing_planted_is_left(folder: Path) -> None:
    said, rows, _ = export(folder, "--anonymize")
    text = (folder / "out" / "incidents.jsonl").read_text()
    assert [one for one in PLANTED if one in text] == []
    assert "--anonymize" not in said
    assert rows[0]["label"] == "nvlink_error"
    assert rows[0]["verdict"] == "gpu_fallen_off_bus"
    assert "GPU has fallen off the bus" in rows[0]["log"]
    assert rows[0]["gpus"].startswith(rows[0]["nodes"] + "/0000:c1:00, id-")
    assert rows[0]["nodes"] in rows[0]["notes"], "the same host has the same pseudonym"
    assert rows[0]["id"].partition("/")[0] == rows[1]["id"].partition("/")[0]


def test_without_anonymize_it_is_as_it_is_and_a_warning_says_so(folder: Path) -> None:
    said, rows, _ = export(folder)
    assert "--anonymize" in said
    assert rows[0]["nodes"] == "falcon"


def test_pseudonyms_come_again_only_with_the_salt(folder: Path) -> None:
    salt = folder / "salt"
    made = []
    for options in (("--salt-file", str(salt)), ("--salt-file", str(salt)), ()):
        made.append(export(folder, "--anonymize", *options)[1][0]["nodes"])
        for file in (folder / "out").iterdir():
            file.unlink()
    assert made[0] == made[1] != made[2]
    assert stat.S_IMODE(salt.stat().st_mode) == 0o600


def test_nothing_is_overwritten_and_what_is_wrong_is_said(folder: Path) -> None:
    export(folder)
    assert "there already" in export(folder, code=1)[0]
    assert export(folder, "--salt-file", "x", code=2)[0]
    assert "no incident" in export(folder / "out", code=1)[0]


def test_corrected_incidents_are_a_corpus_for_the_bench(folder: Path) -> None:
    _, rows, _ = export(folder, "--anonymize", "--corrected")
    assert len(rows) == 1
    (case,) = load(folder / "out")
    assert case.label.value == "nvlink_error"
    assert report(folder / "out")["cases"] == 1


def test_the_metadata_follow_croissant(folder: Path) -> None:
    """Its published rules, as far as one file of JSON Lines needs them: the next test has its own validator."""
    _, rows, about = export(folder, "--anonymize")
    assert about["@type"] == "sc:Dataset"
    assert about["conformsTo"] == "http://mlcommons.org/croissant/1.0"
    assert about["@context"] == CONTEXT
    (file,) = about["distribution"]
    data = (folder / "out" / file["contentUrl"]).read_bytes()
    assert (file["@type"], file["@id"]) == ("cr:FileObject", "incidents.jsonl")
    assert file["sha256"] == hashlib.sha256(data).hexdigest()
    (records,) = about["recordSet"]
    names = {field["source"]["extract"]["column"]: field for field in records["field"]}
    assert all(set(row) == set(names) == set(FIELDS) for row in rows)
    kinds = {"sc:Text": str, "sc:Float": float, "sc:Integer": int, "sc:Boolean": bool}
    assert all(isinstance(row[name], kinds[field["dataType"]]) for row in rows for name, field in names.items())
    ids = [one["@id"] for one in (file, records, *records["field"])]
    assert len(set(ids)) == len(ids)
    assert {field["source"]["fileObject"]["@id"] for field in records["field"]} == {file["@id"]}
    prefixes = {name for name, what in CONTEXT.items() if isinstance(what, str) and what.endswith("/")}
    assert {one["@type"].partition(":")[0] for one in (about, file, records, *records["field"])} <= prefixes


READER = """
import sys, mlcroissant
found = mlcroissant.Dataset(jsonld=sys.argv[1])
assert not found.metadata.issues.errors, found.metadata.issues.errors
print(len(list(found.records(record_set="incidents"))))
"""


@pytest.mark.croissant
def test_mlcroissant_reads_it(folder: Path) -> None:
    """In an environment of its own: it brings pandas and scipy."""
    _, rows, _ = export(folder, "--anonymize")
    python = Path(__file__).parents[3] / ".venv-croissant/bin/python"
    argv = [str(python), "-c", READER, str(folder / "out" / "croissant.json")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == [str(len(rows))], done.stderr
