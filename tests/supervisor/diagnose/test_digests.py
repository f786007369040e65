"""`unbroken diagnose --digest`."""

from __future__ import annotations

import msgspec
from click.testing import CliRunner

from diagnosis.signals import NodeEvidence, RankOutput
from supervisor.cli.main import main

HEALTHY = "".join(f"step {step} loss {3 - step / 1000:.3f} grad_norm 0.9 lr 3e-4\n" for step in range(2000))


def test_a_digest_of_a_job_folder_tells_what_is_new_since_the_attempt_before(run, tmp_path):
    for number, word in ((1, "port 1 is down"), (2, "shard 7 is missing")):
        folder = tmp_path / "attempts" / str(number) / "n1"
        folder.mkdir(parents=True)
        tail = (*HEALTHY.splitlines()[:30], f"{word} again", word)
        evidence = NodeEvidence(node="n1", attempt=number, outputs=(RankOutput(rank=0, tail=tail),))
        (folder / "evidence-0.json").write_bytes(msgspec.json.encode(evidence))

    text = run(tmp_path, "--digest")

    new = text.partition("== new since attempt 1\n")[2].partition("\n==")[0]
    assert [line.rpartition(" ")[2] for line in new.splitlines()] == ["again", "missing"]


def test_a_digest_beside_a_healthy_attempt(run, tmp_path, traceback):
    for name, more in (("well", ""), ("ill", "link 7 retrained\n" + traceback())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank3.log").write_text(HEALTHY + more)
    text = run(tmp_path / "ill", "--digest", "--healthy", str(tmp_path / "well"))
    new = text.partition("== new since the healthy attempt\n")[2].partition("\n==")[0]
    assert "link 7 retrained" in new
    assert "grad_norm" not in new
    result = CliRunner().invoke(main, ["diagnose", str(tmp_path), "--healthy", str(tmp_path)])
    assert (result.exit_code, "--healthy goes with --digest" in result.stderr) == (2, True)
