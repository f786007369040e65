"""Which pages the site has, and in which order: `make docs` (mkdocs) calls this.

The site has the folders of the repository, so that links between pages are right in both. Pages come in the order of
docs/README.md; a page that is not there, and a link that leads nowhere, fail the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
DECISIONS = "docs/adr/README.md"
PART = re.compile(r"^\*\*(.+)\*\*$")
FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
LIST = re.compile(r"^(?!\s|[-*|#>])(.+)\n(- )", re.M)
ROW = re.compile(r"^\| \[[^]]*\]\(([^)]+)\) \|")


def title(path: Path) -> str:
    found = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.M)
    return found[1].replace("`", "") if found else path.stem


def pages_of(folder: str) -> list[dict[str, str]]:
    """The pages of a folder but its README, by their names."""
    paths = sorted(path for path in (ROOT / folder).glob("*.md") if path.name != "README.md")
    return [{title(path): path.relative_to(ROOT).as_posix()} for path in paths]


def order() -> list[Any]:
    """The navigation: what docs/README.md lists, part by part."""
    parts: list[Any] = [{"unbroken": "README.md"}, {"All pages": "docs/README.md"}]
    section: list[Any] = []
    for line in (ROOT / "docs/README.md").read_text(encoding="utf-8").splitlines():
        if part := PART.match(line):
            section = []
            parts.append({part[1]: section})
        elif row := ROW.match(line):
            path = (ROOT / "docs" / row[1]).resolve().relative_to(ROOT).as_posix()
            if path == "docs/adr":
                section.append({"Decisions": [{"All decisions": DECISIONS}, *pages_of("docs/adr")]})
            elif path == "docs/runbook/README.md":
                section.append({"Alerts": [{"All alerts": path}, *pages_of("docs/runbook")]})
            elif path != "README.md":
                section.append({title(ROOT / path): path})
    parts.append({"Changelog": "CHANGELOG.md"})
    return parts


def slug(heading: str, separator: str) -> str:
    """The anchor of a heading, as code hosts make it and as our links have it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    config.nav = order()
    config.mdx_configs["toc"] = {"slugify": slug, "permalink": True}
    return config


def on_files(files: Files, config: Any) -> Files:
    """The files of the theme, and ours under their paths in the repository."""
    ours = [*(ROOT / name for name in TOP), *(ROOT / "docs").rglob("*"), *(ROOT / "deploy").rglob("*")]
    kept = [file for file in files if not Path(file.abs_src_path or "/").is_relative_to(ROOT / "docs")]
    for path in ours:
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            name = path.relative_to(ROOT).as_posix()
            kept.append(File.generated(config, name, abs_src_path=str(path)))
    listed = "\n".join(f"- [{text}]({Path(name).name})" for one in pages_of("docs/adr") for text, name in one.items())
    kept.append(File.generated(config, DECISIONS, content=f"# Decisions\n\n{listed}\n"))
    return Files(kept)


def on_post_build(config: Any) -> None:
    """Links of alerts end in `.md`, as on code hosts: a folder of that name leads to the page."""
    for page in (ROOT / "docs/runbook").glob("Unbroken*.md"):
        folder = Path(config.site_dir) / "docs/runbook" / page.name
        folder.mkdir(exist_ok=True)
        text = f'<!doctype html><meta http-equiv="refresh" content="0; url=../{page.stem}.html">'
        (folder / "index.html").write_text(text, encoding="utf-8")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lists begin without an empty line before them, as code hosts read them."""
    if page.file.src_uri != DECISIONS:
        markdown = re.sub(r"\]\((docs/)?adr/\)", r"](\1adr/README.md)", markdown)
    parts = FENCED.split(markdown)
    parts[::2] = [LIST.sub(r"\1\n\n\2", part) for part in parts[::2]]
    return "".join(parts)
