"""How every command gives its answer, as JSON on one line or as `supervisor.cli.render` shows it; and who asks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from supervisor.errors import UnbrokenError


def print_answer(value: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """Write the answer on stdout. Raises UnbrokenError when it cannot be written (a full disk)."""
    with writing():
        write_answer(value, as_json, show)


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Raises UnbrokenError if stdout cannot be written."""
    try:
        yield
    except BrokenPipeError:
        raise  # `| head`: the end of the output, and no fault
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries to write the rest at exit
        raise UnbrokenError(f"the answer cannot be written: {error.strerror}") from None


def write_answer(value: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """As `print_answer`. Raises OSError."""
    if sys.stdout is None:  # `>&-`: nobody wants it
        return
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(value).decode())
    else:
        show(value)
    sys.stdout.flush()


def warn(text: str) -> None:
    """A line on stderr, beside the answer."""
    click.echo(f"unbroken: {text}", err=True)


def operator_name() -> str:
    """Who gives this command, as he says."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
