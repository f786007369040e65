"""`unbroken docs`, `slurm-template` and `completion`: pages, batch scripts and shell scripts of this version."""

from __future__ import annotations

import re
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import click

from supervisor.cli.output import warn
from supervisor.errors import UnbrokenError
from supervisor.paths import START

_IN_THE_WHEEL: Final = START.parent / "supervisor" / "pages"
_TITLE = re.compile(r"^# (.+)$", re.M)
_ALERT = re.compile(r"runbook/Unbroken\w+")
_LINK = re.compile(r"\]\(([^)#\s]+\.md)")


def root() -> Path:
    """The folder with `README.md`, `docs/` and `deploy/`: in the wheel, or the checkout."""
    return _IN_THE_WHEEL if _IN_THE_WHEEL.is_dir() else START.parent


def pages() -> dict[str, Path]:
    """Every page that `unbroken docs` knows, in the order in which a newcomer reads them."""
    docs, top = root() / "docs", root().resolve()
    try:
        linked = [(docs / link).resolve() for link in _LINK.findall((docs / "README.md").read_text(encoding="utf-8"))]
    except OSError:
        return {}
    rest = sorted(one.resolve() for folder in ("docs", "deploy") for one in (root() / folder).rglob("*.md"))
    known = [one for one in dict.fromkeys([*linked, *rest]) if one.is_file() and one.is_relative_to(top)]
    inside = {one.relative_to(top).with_suffix("").as_posix(): one for one in known}
    return {name.removeprefix("docs/"): path for name, path in inside.items() if name != "docs/README"}


def find_page(name: str) -> tuple[Path, str]:
    """The file of `checkpoints`, `docs/checkpoints.md` or `slurm#rights`, and the heading. Raises UnbrokenError."""
    wanted, _, heading = name.partition("#")
    wanted = re.sub(r"^(\./|\.\./)*(docs/)?", "", wanted).removesuffix(".md").rstrip("/")
    known = pages()
    for one in (wanted, f"{wanted}/README"):
        if one in known:
            return known[one], heading
    near = [one for one in known if wanted.lower() in one.lower()] or get_close_matches(wanted, known)
    if len(near) == 1 and wanted in near[0]:
        return known[near[0]], heading
    like = f"; did you mean {', '.join(near[:8])}?" if near and wanted else ""
    raise UnbrokenError(f"there is no page {name}{like} (`unbroken docs` lists them)")


def section(text: str, heading: str) -> str:
    """What stands under a heading, given as links give it; all of `text` where there is no such one."""
    lines, found = text.splitlines(keepends=True), []
    depth = 0
    for line in lines:
        level = len(line) - len(line.lstrip("#"))
        if depth and 0 < level <= depth:
            break
        if not depth and level and re.sub(r"[^\w\- ]", "", line.strip("# \n").lower()).replace(" ", "-") == heading:
            depth = level
        if depth:
            found.append(line)
    return "".join(found) or text


@click.command()
@click.argument("page", default="")
@click.option("--path", "only_path", is_flag=True, help="Print where the page's file is.")
def docs(page: str, only_path: bool) -> None:
    """Show a page of the documentation of this version.

    PAGE: `checkpoints`, `docs/checkpoints.md` or `slurm#rights`, as messages name it. Without it: all pages.
    """
    if not page:
        listed = [
            (name, _TITLE.search(path.read_text(encoding="utf-8")))
            for name, path in pages().items()
            if not name.startswith("adr/") and not _ALERT.fullmatch(name)
        ]
        if not listed:
            raise UnbrokenError(f"there are no pages in {root()}: install unbroken from a wheel, or from a clone")
        width = max(len(name) for name, _ in listed)
        click.echo("\n".join(f"{name:{width}}  {title[1] if title else ''}".rstrip() for name, title in listed))
        click.echo(
            "\nAlso: a page for each alert (unbroken docs UnbrokenJobHeld), and the decisions (unbroken docs adr/0016)"
        )
        return
    path, heading = find_page(page)
    if only_path:
        click.echo(path)
        return
    text = path.read_text(encoding="utf-8")
    part = section(text, heading)
    if heading and part == text:
        warn(f"{path.name} has no heading {heading}: this is the whole page")
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        console = Console()
        with console.capture() as shown:
            console.print(Markdown(part, hyperlinks=False))
        click.echo_via_pager(shown.get())
    else:
        click.echo(part, nl=False)


@click.command("slurm-template")
@click.argument("name", default="train.sbatch")
def slurm_template(name: str) -> None:
    """Print a batch script, or a prolog, for Slurm.

    NAME: train.sbatch (the default), train-spares.sbatch, prolog.sh, epilog.sh, healthcheck.sh.
    """
    files = {path.name: path for path in sorted((root() / "deploy" / "slurm").glob("*"))}
    found = next((files[one] for one in (name, f"{name}.sbatch", f"{name}.sh") if one in files), None)
    if found is None:
        raise UnbrokenError(f"there is no template {name}: {', '.join(files) or f'{root()} has none'}")
    click.echo(found.read_text(encoding="utf-8"), nl=False)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes commands, incidents, nodes and jobs.

    \b
    ~/.bashrc:                 eval "$(unbroken completion bash)"
    ~/.zshrc, after compinit:  eval "$(unbroken completion zsh)"
    ~/.config/fish/config.fish: unbroken completion fish | source
    """
    from click.shell_completion import get_completion_class

    from supervisor.cli.completion import VARIABLE

    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(click.Command("unbroken"), {}, "unbroken", VARIABLE).source())
