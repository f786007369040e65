"""`unbroken docs` and `unbroken slurm-template`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from supervisor.cli.docs import find_page, pages, section
from supervisor.cli.main import main
from supervisor.errors import UnbrokenError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("asked", "file", "heading"),
    [
        ("checkpoints", "docs/checkpoints.md", ""),
        ("docs/checkpoints.md", "docs/checkpoints.md", ""),
        ("slurm#rights", "docs/slurm.md", "rights"),
        ("docs/slurm.md#rights", "docs/slurm.md", "rights"),
        ("UnbrokenJobHeld", "docs/runbook/UnbrokenJobHeld.md", ""),
        ("docs/adr/0016", "docs/adr/0016-both-ends-prove-the-token.md", ""),
        ("README", "README.md", ""),
        ("deploy/grafana", "deploy/grafana/README.md", ""),
    ],
)
def test_a_page_is_found_as_messages_name_it(asked: str, file: str, heading: str) -> None:
    assert find_page(asked) == (ROOT / file, heading)


@pytest.mark.parametrize("asked", ["nothing-like-it", "../../etc/passwd", "/etc/passwd", "a", "#rights"])
def test_another_name_is_refused(asked: str) -> None:
    with pytest.raises(UnbrokenError):
        find_page(asked)


def test_every_page_is_known() -> None:
    written = {*ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md"), *(ROOT / f"{n}.md" for n in ("README",))}
    assert written - set(pages().values()) == {ROOT / "docs" / "README.md"}


def test_pages_that_our_texts_name_are_found() -> None:
    sources = [
        path.read_text() for name in ("supervisor", "recovery", "diagnosis") for path in ROOT.glob(f"{name}/**/*.py")
    ]
    named = {
        name for text in sources for name in re.findall(r"(?:unbroken docs |docs/)([a-z-]+(?:\.md)?#?[a-z-]*)", text)
    }
    assert {"slurm#rights", "opinion", "protocol.md"} <= named
    for name in named - {"adr", "make_configuration", "make"}:
        page, heading = find_page(name)
        text = page.read_text(encoding="utf-8")
        assert not heading or section(text, heading) != text


def test_one_section_ends_where_the_next_begins() -> None:
    text = "# A\nintro\n## Own `words`, and more\nx\n### Deeper\ny\n## B\nz\n"
    assert section(text, "own-words-and-more") == "## Own `words`, and more\nx\n### Deeper\ny\n"
    assert section(text, "none") == text


def test_the_commands_print_pages_and_templates() -> None:
    run = CliRunner().invoke
    assert "getting-started" in run(main, ["docs"]).output
    assert run(main, ["docs", "loss"]).output == (ROOT / "docs/loss.md").read_text(encoding="utf-8")
    assert run(main, ["docs", "loss", "--path"]).output.strip() == str(ROOT / "docs/loss.md")
    assert run(main, ["docs", "no-such-page"]).exit_code == 1
    assert run(main, ["slurm-template"]).output == (ROOT / "deploy/slurm/train.sbatch").read_text()
    assert run(main, ["slurm-template", "../prometheus/prometheus.yml"]).exit_code == 1


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/slurm").glob("*")), ids=lambda path: path.name)
def test_a_template_is_a_shell_script(path: Path) -> None:
    done = CliRunner().invoke(main, ["slurm-template", path.stem])
    assert subprocess.run(["bash", "-n"], input=done.output, text=True, timeout=60, check=False).returncode == 0
