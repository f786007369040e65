"""`unbroken bundle`."""

import gzip
import io
import json
import os
import tarfile
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from supervisor.cli.bundle import evidence_files, pieces, without_secrets, write
from supervisor.cli.job_commands import JobHandle, find_incident
from supervisor.cli.main import main
from tests.supervisor.cli.test_page import job_folder

SECRET = "hf_" + "aBcD3fGh1JkLmN0pQrStUvWxYz1234567890"[:34]


def incident(**given: Any) -> dict[str, Any]:
    return {"verdict": {"culprits": [{"node": "n1"}]}, "folders": ["n0:attempts/1/n0", "n1:attempts/1/n1"]} | given


def with_evidence(folder: Path) -> Path:
    for node in ("n0", "n1"):
        kept = folder / "attempts" / "1" / node
        kept.mkdir(parents=True)
        lines = [f"token={SECRET}", f"env HF_TOKEN={SECRET} of {node}"]
        (kept / "evidence-0.json").write_text(json.dumps({"node": node, "outputs": [{"tail": lines}]}))
    return folder


def unpacked(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def test_an_incident_is_packed_with_its_story_first_and_without_secrets(tmp_path: Path) -> None:
    folder = with_evidence(job_folder(tmp_path))
    target = tmp_path / "out.tar.gz"
    done = CliRunner().invoke(main, ["bundle", "last", "--job-dir", str(folder), "-o", str(target), "--json"])
    assert done.exit_code == 0, done.output
    found = unpacked(target)
    assert list(found)[:4] == ["story.txt", "incident.json", "timeline.json", "status.json"]
    assert json.loads(done.output.splitlines()[-1])["holds"] == list(found)
    assert b"i-1" in found["story.txt"]
    assert SECRET.encode() not in b"".join(found.values())
    assert target.stat().st_mode & 0o777 == 0o644 & ~_umask()


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_culprits_come_first_and_nothing_outside_the_job_is_packed(tmp_path: Path) -> None:
    folder = with_evidence(tmp_path / "job")
    outside = tmp_path / "secret"
    outside.mkdir()
    (outside / "evidence-0.json").write_text("{}")
    (folder / "attempts" / "2").mkdir()
    (folder / "attempts" / "2" / "n9").symlink_to(outside)
    folders = [*incident()["folders"], "n9:../secret", "n9:/etc", "n9:attempts/2/n9", "broken"]
    found = evidence_files(folder, incident(folders=folders))
    assert [path.parent.name for path in found] == ["n1", "n0"]
    assert [path.parent.name for path in evidence_files(folder, incident(verdict=None))] == ["n0", "n1"]


def test_what_is_over_the_limit_is_left_out_and_told(tmp_path: Path) -> None:
    target = tmp_path / "a.tar.gz"
    told = write(target, iter([("story.txt", b"s" * 50), ("big.json", b"b" * 100), ("small.json", b"c")]), 60)
    assert [(name, bool(why)) for name, why in told] == [
        ("story.txt", False),
        ("big.json", True),
        ("small.json", False),
    ]
    assert list(unpacked(target)) == ["story.txt", "small.json"]


def test_a_target_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    done = CliRunner().invoke(
        main, ["bundle", "last", "--job-dir", str(folder), "-o", str(tmp_path / "no" / "x.tar.gz")]
    )
    assert done.exit_code == 1
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "b.tar.gz", (("x", bytes(1 // 0)) for _ in "a"), 10)
    assert not list(tmp_path.glob("b.tar.gz*"))


def test_the_story_can_be_read_when_the_upload_broke_off(tmp_path: Path) -> None:
    story = ("what broke: rank 3\n" * 100).encode()
    noise = os.urandom(400_000)
    target = tmp_path / "a.tar.gz"
    write(target, iter([("story.txt", story), ("noise.json", noise)]), 1 << 20)
    begun = target.read_bytes()[: 64 << 10]
    text = zlib.decompressobj(wbits=31).decompress(begun)
    assert story in text
    with tarfile.open(fileobj=io.BytesIO(text), mode="r|") as archive:
        assert archive.next().name == "story.txt"  # type: ignore[union-attr]
    assert gzip.decompress(target.read_bytes())


def test_secrets_go_wherever_they_stand() -> None:
    value = {"a": [f"x token={SECRET}", 1], "b": {"c": f"one\npassword={SECRET}\ntwo"}, "d": None, "e": [["y"]]}
    clean = without_secrets(value)
    assert SECRET not in json.dumps(clean)
    assert (clean["d"], clean["e"], clean["a"][1]) == (None, [["y"]], 1)


def test_a_secret_is_known_by_its_name_too() -> None:
    told = {
        "env": {"DB_PASSWORD": "hunter2pass", "step": "12"},
        "command": ["run", "--password", "hunter2pass", "-n", "4"],
    }
    hidden = without_secrets(told)
    assert "hunter2pass" not in json.dumps(hidden)
    assert hidden["env"]["step"] == "12"
    assert hidden["command"][:2] + hidden["command"][3:] == ["run", "--password", "-n", "4"]


def test_a_pipe_in_place_of_evidence_is_not_waited_for(tmp_path: Path) -> None:
    folder = with_evidence(job_folder(tmp_path))
    (folder / "attempts" / "1" / "n1" / "evidence-0.json").unlink()
    os.mkfifo(folder / "attempts" / "1" / "n1" / "evidence-0.json")
    found = {"id": "i-1", "opened_at": "2026", "closed_at": None} | incident()
    (path,) = [one for one in evidence_files(folder, found) if "n1" in str(one)]
    done: list[list[str]] = []
    job = JobHandle(str(folder), "", "")
    whole = find_incident(job, "last") | {"folders": incident()["folders"]}
    reader = threading.Thread(target=lambda: done.append([name for name, _ in pieces(job, whole)]), daemon=True)
    reader.start()
    reader.join(20.0)
    assert done
    assert str(path.relative_to(folder)) + ".problem" in done[0]
