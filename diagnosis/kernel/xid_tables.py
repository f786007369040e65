"""What the error codes of NVIDIA's drivers mean: `xid.toml`, `sxid.toml`, `nvlink.toml`, and a site's own rows."""

from __future__ import annotations

import functools
import importlib.resources
import sys
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from diagnosis.incident import RemedyAction
from diagnosis.signals import Frozen
from diagnosis.taxonomy import FailureClass

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

Severity = Literal["fatal", "error", "warning", "info"]
"""`fatal`: ends the process or takes the GPU away. `error`: may have. `warning`: worth telling, no cause by itself.
`info`: nobody's fault."""


class Row(
    Frozen, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"mnemonic": "name", "failure_class": "class"}
):
    """What one code means."""

    mnemonic: str = ""
    failure_class: FailureClass = FailureClass.GPU_DRIVER
    action: RemedyAction = "restart"
    severity: Severity = "warning"
    consequence: bool = False
    """Written when something else has gone wrong: never the first cause."""
    after: tuple[int, ...] = ()
    """Codes that it comes with and tells less than."""
    fabric: bool = False
    """SXid: the whole switch is gone, not one port."""
    site: frozenset[str] = frozenset()
    """Fields that the site has set: what a line's details say does not change them."""


class LinkFault(Frozen, frozen=True, kw_only=True):
    """One fault of an NVLink 5 unit."""

    action: RemedyAction
    sub: int = 0
    status: int | None = None
    fatal: bool = False
    high_bit: bool = False
    look: str = ""


class LinkUnit(Frozen, frozen=True, kw_only=True):
    """One unit of NVLink 5 and its faults."""

    xid: int
    names: tuple[str, ...]
    v1: int
    v2: int
    faults: tuple[LinkFault, ...]
    bits: bool = False

    def __post_init__(self) -> None:
        if any(fault.status is None for fault in self.faults) and self.bits:
            raise ValueError(f"{self.names[0]}: a set of bits needs a status")


class NVLink(Frozen, frozen=True, kw_only=True):
    """`nvlink.toml`."""

    unit: tuple[LinkUnit, ...]
    registers: dict[str, tuple[tuple[int, ...], ...]]


UNKNOWN_XID: Final = Row()
"""A code that no table knows: worth telling, and no more."""
UNKNOWN_RECOVERY: Final = Row(action="cordon_node_and_restart", severity="error")
"""Newer values asked for more than older ones so far."""
UNKNOWN_SXID: Final = Row(failure_class=FailureClass.NVLINK_ERROR, action="none")


class Tables(Frozen, frozen=True, kw_only=True):
    """All tables together."""

    xid: dict[int, Row]
    sxid: dict[int, Row]
    recovery: dict[int, Row]
    """Values of Xid 154."""
    nvlink: NVLink

    def with_site(self, site: Mapping[str, object]) -> Tables:
        """These tables with a site's rows over them, as TOML has them: `[xid.79] severity = "warning"`.

        A row names what it changes (`class`, `action`, `severity`, `consequence`, `after`, `name`) and keeps the rest;
        a code that is not known yet is added. Other sections are left alone. Raises `ValueError` naming the key.
        """
        return msgspec.structs.replace(
            self,
            xid=_over("xid", self.xid, site.get("xid", {}), UNKNOWN_XID),
            sxid=_over("sxid", self.sxid, site.get("sxid", {}), UNKNOWN_SXID),
        )


def _over(section: str, rows: dict[int, Row], site: object, unknown: Row) -> dict[int, Row]:
    if not isinstance(site, Mapping):
        raise ValueError(f"{section}: expected a table of codes")
    merged = dict(rows)
    for code, change in site.items():
        key = f"{section}.{code}"
        if not isinstance(change, Mapping):
            raise ValueError(f"{key}: expected a table")
        try:
            number = int(str(code))
        except ValueError:
            raise ValueError(f"{key}: not the number of a code") from None
        before = msgspec.to_builtins(merged.get(number, unknown))
        try:
            row = msgspec.convert({**before, **change, "site": [*before.get("site", ()), *change]}, Row)
        except msgspec.ValidationError as error:
            raise ValueError(f"{key}: {error}") from None
        merged[number] = row
    return merged


@functools.cache
def default() -> Tables:
    """The tables that come with the package."""
    return msgspec.convert(
        {**_toml("xid.toml"), **_toml("sxid.toml"), "nvlink": _toml("nvlink.toml")}, Tables, strict=False
    )


def _toml(name: str) -> dict[str, object]:
    text = importlib.resources.files("diagnosis.kernel").joinpath(name).read_text(encoding="utf-8")
    rows: dict[str, object] = tomllib.loads(text)
    return rows
