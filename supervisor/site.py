"""What a site says about its own nodes: `site.toml`, read once. Every key is optional.

    skip = ["ethernet_*"]                  # checks that are not looked at
    interfaces_left_out = ["eno*"]         # not the job's: management, storage
    [expect]                               # what a node must have; what is not said is found out
    gpus = 8
    [limits.gpu_temperature]               # a check's own numbers (`unbroken check --list`)
    margin_c = 5
    [xid.79]                               # rows over the tables of Xid, SXid and kernel messages
    severity = "fatal"
    [[rule]]                               # over the rules of output (docs/rules.md)
    id = "our_tracker"

The file is `/etc/unbroken/site.toml` where there is one, or the one that `run.site_file` (UNBROKEN_SITE) names.
A job folder may have rules of its own in `rules.toml`, which is read after it.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Final

import msgspec

from diagnosis import rules
from diagnosis.signals import Frozen
from recovery.cordon import DRAIN_FOLDER
from supervisor import config
from supervisor.errors import ConfigError
from supervisor.files import write_atomically
from supervisor.node_health.contract import Expect, Site

DEFAULT_PATH: Final = Path("/etc/unbroken/site.toml")
BEGUN: Final = "rules-begun.json"
"""In the job folder: the rules with which its job began."""
DROPPED: Final = ("memory_gib", "modules", "units", "versions")
"""Keys of `[expect]` that older versions had checks for: a file that still has them is read without them."""
TABLES: Final = ("xid", "sxid", "kernel", "rule")
"""Sections for the readers of lines (`diagnosis.{xid,kernel,rules}`), which know what may be in them."""


class SiteFile(Frozen, frozen=True, kw_only=True):
    """A site file, read. `path` is empty where there is none."""

    site: Site = Site()
    tables: dict[str, Any] = {}
    """The sections of `TABLES` as TOML has them."""
    path: str = ""
    drain_requests: str = DRAIN_FOLDER
    """Folder of a node where jobs leave requests to drain it, and root's programs read them."""


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    expect: Expect = Expect()
    limits: dict[str, dict[str, float]] = {}
    skip: tuple[str, ...] = ()
    interfaces_left_out: tuple[str, ...] = ()
    drain_requests: str = DRAIN_FOLDER
    xid: dict[str, Any] = {}
    sxid: dict[str, Any] = {}
    kernel: dict[str, Any] = {}
    rule: list[dict[str, Any]] = []


class _RulesFile(msgspec.Struct, forbid_unknown_fields=True):
    rule: list[dict[str, Any]] = []


def load(named: str = "") -> SiteFile:
    """The file that is named, else the default one where it is. Raises ConfigError, which names file and key."""
    path = Path(named) if named else DEFAULT_PATH
    if not named and not os.path.isfile(path):  # or one that is not ours to see
        return SiteFile()
    content = config.read_toml(path)
    if isinstance(expect := content.get("expect"), dict):
        content["expect"] = {key: value for key, value in expect.items() if key not in DROPPED}
    try:
        read = msgspec.convert(content, _Content)
    except msgspec.ValidationError as error:
        where = str(error).replace("`$.", "`")
        known = ", ".join(_Content.__struct_fields__)
        hint = f" (known are {known})" if "unknown field" in where and "path" not in where else ""
        raise ConfigError(f"{path}: {where}{hint}") from None
    for check, numbers in read.limits.items():
        if not all(map(math.isfinite, numbers.values())):
            raise ConfigError(f"{path}: `limits.{check}` has a number that is not finite")
    tables: dict[str, Any] = {name: content[name] for name in TABLES if name in content}
    if tables:
        from supervisor.node_health.kernel_log import KernelLog

        try:
            KernelLog(site=Site(tables=tables))
            rules.packaged().with_site(read.rule)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
    site = Site(
        expect=read.expect,
        limits=read.limits,
        skip=read.skip,
        interfaces_left_out=read.interfaces_left_out,
        tables=tables,
    )
    return SiteFile(site=site, tables=tables, path=str(path), drain_requests=read.drain_requests)


def use_rules(site_file: SiteFile, job_dir: Path | None = None) -> str:
    """From now on this process reads output with the site's rules, and with those in the job folder's `rules.toml`.

    Returns what is wrong with the latter, in words: then these are left out.
    """
    return _use(site_file, job_dir)[1]


def use_rules_of_life(site_file: SiteFile, job_dir: Path, *, begun: bool) -> str:
    """The same for a process that replays the journal: a job that has `begun` keeps the rules that it began with.

    A rule that was approved since would judge anew what has been decided, and come to another history.
    """
    if begun and use_begun_rules(job_dir):
        return ""
    rows, problem = _use(site_file, job_dir)
    try:
        write_atomically(job_dir / BEGUN, msgspec.json.encode(rows) + b"\n")
    except OSError as error:
        problem = problem or f"{job_dir / BEGUN} cannot be written: {error.strerror or error}"
    return problem


def use_begun_rules(job_dir: Path) -> bool:
    """Use the rules that this folder's job began with. False: they were not recorded, and nothing has changed."""
    try:
        rules.use(msgspec.json.decode((job_dir / BEGUN).read_bytes(), type=list[dict[str, Any]]))
    except (OSError, ValueError):
        return False
    return True


def _use(site_file: SiteFile, job_dir: Path | None) -> tuple[list[dict[str, Any]], str]:
    """The rows that are used from now on, and what is wrong with the job's own."""
    own = list(site_file.tables.get("rule", []))
    path = job_dir / "rules.toml" if job_dir is not None else None
    if path is not None and os.path.isfile(path):
        try:
            both = [*own, *msgspec.convert(config.read_toml(path), _RulesFile).rule]
            rules.use(both)
            return both, ""
        except (ConfigError, ValueError) as error:
            rules.use(own)
            return own, f"the job's rules are not used: {path}: {error}"
    rules.use(own)
    return own, ""


def load_or_default(named: str = "") -> tuple[SiteFile, str]:
    """As `load`, but never raises: the defaults for a file that cannot be used, and what is wrong with it, in words."""
    try:
        return load(named), ""
    except ConfigError as error:
        return SiteFile(), f"the site file is not used: {error}"
