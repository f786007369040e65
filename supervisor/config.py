"""The configuration: settings (`Settings`), and what a site says about its own nodes (`SiteFile`).

Settings are one frozen tree, read once from files, then the environment, then flags; the later wins. The files are
TOML: `unbroken.toml` of the working folder, then the one that `UNBROKEN_CONFIG` names. Every default is right for one
machine. `unbroken config` prints each value with where it came from.

The site file is `/etc/unbroken/site.toml` where there is one, or the one that `run.site_file` (UNBROKEN_SITE) names.
"""

from __future__ import annotations

import difflib
import ipaddress
import logging
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_type_hints
from urllib.parse import urlsplit

import msgspec

from diagnosis.signals import Frozen
from diagnosis.text import redact
from recovery.cordon import DRAIN_FOLDER
from recovery.policy import Mode
from recovery.rollback import Guard
from recovery.swaps import SwapMode, SwapSignal
from supervisor.errors import ConfigError
from supervisor.files import open_regular, read_own, write_atomically
from supervisor.messages import JobSpec
from supervisor.node_health.contract import Expect, Site

log = logging.getLogger("unbroken.config")

TOML_CHARS = 4 << 20


Scope = Literal["job", "node", "controller"]
"""Which node's value counts: the first node's for the whole job, each node's own, or that of the controller's node."""


def _knob(what: str, scope: Scope, *, default: str = "", see: str = "", **limits: Any) -> msgspec.Meta:
    """`default`: in words, where the value itself says nothing. `see`: a page that says more."""
    return msgspec.Meta(description=what, extra={"scope": scope, "default": default, "see": see}, **limits)


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `unbroken run` does."""

    job_dir: Annotated[
        str, _knob("The job folder, shared between the nodes.", "node", default="`unbroken-jobs/NAME`")
    ] = ""
    name: Annotated[str, _knob("The job's name.", "job", default="the Slurm job id, else script and time")] = ""
    controller: Annotated[str, _knob("HOST:PORT of a controller that runs elsewhere.", "node", default="none")] = ""
    node_name: Annotated[str, _knob("The node's name.", "node", default="Slurm's node name, else the host name")] = ""
    token_file: Annotated[str, _knob("The file with the job's token.", "node", default="`token` in the job folder")] = (
        ""
    )
    spares: Annotated[int, _knob("How many nodes beyond the needed ones are kept idle, as spares.", "job", ge=0)] = 0
    max_restarts: Annotated[
        int | None,
        _knob(
            "How many restarts without progress in between before the job is given up.",
            "job",
            default="torchrun's `--max-restarts`, else 10",
        ),
    ] = None
    mode: Annotated[Mode, _knob("`observe`: only watch; `recommend`: ask before acting; `enforce`: act.", "job")] = (
        "enforce"
    )
    checkpoint_dirs: Annotated[
        tuple[str, ...],
        _knob(
            "Checkpoint folders of this job alone: every checkpoint in them counts as this job's.",
            "job",
            default="none: what ranks were seen to write",
            see="checkpoints.md",
        ),
    ] = ()
    restart_args: Annotated[
        str,
        _knob("Words that are added to the script's arguments from the second attempt on.", "node", default="none"),
    ] = ""
    kernel_log: Annotated[str, _knob("The kernel log: a device, or a file that grows like one.", "node")] = "/dev/kmsg"
    site_file: Annotated[
        str,
        _knob(
            "The site file: what all nodes of the site have, and other limits.",
            "node",
            default="`/etc/unbroken/site.toml`",
            see="runbook.md#the-site-file",
        ),
    ] = ""
    gather_s: Annotated[
        float | None, _knob("Seconds to wait for more nodes, once there are enough to start.", "job", default="30")
    ] = None
    wait_for_nodes_s: Annotated[
        float | None, _knob("Seconds after which a job that is short of nodes fails.", "job", default="600")
    ] = None
    hold_limit_s: Annotated[
        float, _knob("Seconds after which a job that is held, or waits for approval, ends; 0: never.", "job", ge=0)
    ] = 24 * 3600.0
    quiet: Annotated[bool, _knob("Print only the final status line of ours on the terminal.", "node")] = False


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is done with the checkpoints that the script writes (docs/checkpoints.md)."""

    publish_to: Annotated[
        str,
        _knob(
            "The shared folder for checkpoints that the script writes to a folder on each node's own disk (the only one"
            " in `run.checkpoint_dirs`).",
            "job",
            default="none: checkpoints stay where the script writes them",
            see="checkpoints.md#checkpoints-on-the-nodes-own-disks",
        ),
    ] = ""
    mirror_snapshots: Annotated[
        bool,
        _knob(
            "With `checkpoint.publish_to`: copy snapshots in memory to the memory of another node. Takes up to four"
            " times the memory of a node's snapshots.",
            "job",
            see="snapshots.md#mirrors",
        ),
    ] = False


class HangSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When a silence that nothing proves to be a hang is acted on (docs/hangs.md). Proven hangs never wait."""

    patience_s: Annotated[
        float | None,
        _knob(
            "Seconds of unproven silence before a restart, at least 60.",
            "job",
            default="what a restart would cost, at least 600",
        ),
    ] = None
    factor: Annotated[
        float,
        _knob("A restart waits for this many times the longest harmless wait at a place in the code.", "job", ge=1),
    ] = 3.0
    off: Annotated[
        bool, _knob("Unproven silence is only reported, never acted on. `--patience S` switches it on again.", "job")
    ] = False


class LossSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is done about a loss that spikes, diverges or stays NaN, and about replicas that differ (docs/loss.md)."""

    guard: Annotated[
        Guard,
        _knob(
            "A loss that went wrong, or a replica that differs. `off`: nothing; `recommend`: tell what to do; "
            "`enforce`: roll back by itself.",
            "job",
            see="loss.md",
        ),
    ] = "recommend"


class SwapSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that degrade leave at a checkpoint, where a spare can take their place (docs/swaps.md)."""

    mode: Annotated[
        SwapMode,
        _knob(
            "`off`: nothing; `recommend`: tell; `automatic`: replace nodes whose hardware is proven bad, and tell of "
            "others.",
            "job",
            see="swaps.md",
        ),
    ] = "automatic"
    signal: Annotated[
        SwapSignal,
        _knob(
            "The signal that makes the script save a checkpoint: it is sent before a planned swap.",
            "job",
            default="none: the swap waits for the next checkpoint",
            see="swaps.md#asking-for-a-checkpoint",
        ),
    ] = ""


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the controller is reached."""

    listen: Annotated[
        str,
        _knob(
            "HOST:PORT where the controller listens.",
            "controller",
            default="a free port; on 127.0.0.1 for one node without scheduler",
        ),
    ] = ""
    tls_cert: Annotated[
        str, _knob("The certificate chain (PEM); it switches TLS on.", "controller", default="none")
    ] = ""
    tls_key: Annotated[str, _knob("The private key (PEM).", "controller", default="it is in `tls_cert`")] = ""
    tls_ca: Annotated[
        str, _knob("The certificates that agents and the command line trust (PEM).", "node", default="none")
    ] = ""


class OpinionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which language model is asked about verdicts that are unsure (docs/opinion.md)."""

    backend: Annotated[
        Literal["none", "transformers", "endpoint"],
        _knob("`none`; `transformers`: a model from a folder; `endpoint`: an OpenAI-compatible server.", "controller"),
    ] = "none"
    model: Annotated[str, _knob("The model's folder, or its name at the endpoint.", "controller", default="none")] = ""
    url: Annotated[
        str,
        _knob(
            "The endpoint's address up to its version: `https://host/v1`.",
            "controller",
            default="none",
            pattern="^[^@]*$",
        ),
    ] = ""
    key_file: Annotated[str, _knob("The file with the endpoint's key.", "controller", default="none")] = ""
    below: Annotated[
        float, _knob("The model is asked about verdicts that are less sure than this.", "job", ge=0, le=1)
    ] = 0.6
    timeout_s: Annotated[float, _knob("Seconds to wait for an opinion.", "controller", gt=0, le=3600)] = 120.0


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What Prometheus reads (docs/metrics.md)."""

    enabled: Annotated[bool, _knob("Controller and agents answer `/metrics` to whoever reaches the port.", "node")] = (
        True
    )
    listen: Annotated[
        str,
        _knob(
            "HOST:PORT where agents answer.", "node", default="a free port; on 127.0.0.1 for one node without scheduler"
        ),
    ] = ""
    targets_dir: Annotated[
        str,
        _knob(
            "One folder for the target files of all jobs.",
            "node",
            default="`unbroken-jobs/targets`, else `JOB/targets`",
        ),
    ] = ""

    def where(self, *, alone: bool) -> tuple[str, int]:
        """Host and port (0: any free one) for an agent; `alone`: of a job of one node that nobody else started.

        Raises ConfigError.
        """
        text = self.listen or ("127.0.0.1" if alone else "0.0.0.0")
        host, _, port = text.rpartition(":") if ":" in text else (text, "", "0")
        if not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"metrics.listen = {self.listen!r}: expected HOST:PORT, for example 0.0.0.0:7462")
        return host.strip("[]") or "0.0.0.0", int(port)


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who gave the nodes, drains them and starts the job again (docs/slurm.md)."""

    name: Annotated[
        str,
        _knob(
            "Who gave the nodes, drains them and starts the job again: `slurm`, `local` (nobody), or a plug-in's name.",
            "job",
            default="`slurm` within its jobs, else `local`",
            see="slurm.md#another-scheduler",
        ),
    ] = ""


class LedgerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What all jobs of a cluster know of its nodes (docs/ledger.md) and of past incidents (docs/incident-memory.md)."""

    folder: Annotated[
        str,
        _knob(
            "One shared folder for what all jobs of the cluster know: the ledger of nodes, and past incidents "
            "(incident-memory.md).",
            "controller",
            default="none: a job knows only its own nodes, and incidents of jobs beside it",
            see="ledger.md",
        ),
    ] = ""
    cordons: Annotated[
        Literal["propose", "cordon"],
        _knob(
            "A node with a proven hardware fault. `propose`: tell all jobs; `cordon`: no job uses it until somebody "
            "lifts that.",
            "job",
            see="ledger.md",
        ),
    ] = "propose"


ALIVE: Final = "alive:"
"""Before an address of `notify.to`: a dead man's switch."""
MAIL: Final = "mailto:"
WEB: Final = ("https://", "http://")


class NotifySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Messages to people, where there is no Alertmanager."""

    to: Annotated[
        str | tuple[str, ...],
        _knob(
            "Where messages go, one address or a list: a file that holds the address of a webhook that takes Slack's "
            "form (a secret: only its user should be able to read it), the webhook's `https://...` itself, "
            "`mailto:ANN@HOST`, or a program that gets each message as JSON on stdin. With `alive:` before a URL, such "
            "a file or a program it is told every minute that the controller lives.",
            "controller",
            default="nobody",
            see="runbook.md#who-is-told",
        ),
    ] = ""

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.to if isinstance(self.to, tuple) else tuple(filter(None, [self.to]))


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    run: RunSettings = RunSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    hang: HangSettings = HangSettings()
    loss: LossSettings = LossSettings()
    swap: SwapSettings = SwapSettings()
    controller: ControllerSettings = ControllerSettings()
    metrics: MetricsSettings = MetricsSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    ledger: LedgerSettings = LedgerSettings()
    opinion: OpinionSettings = OpinionSettings()
    notify: NotifySettings = NotifySettings()


ENVIRONMENT = {
    "run.name": "UNBROKEN_NAME",
    "run.controller": "UNBROKEN_CONTROLLER",
    "run.node_name": "UNBROKEN_NODE_NAME",
    "run.token_file": "UNBROKEN_TOKEN_FILE",
    "run.spares": "UNBROKEN_SPARES",
    "run.max_restarts": "UNBROKEN_MAX_RESTARTS",
    "run.mode": "UNBROKEN_MODE",
    "run.hold_limit_s": "UNBROKEN_HOLD_LIMIT",
    "run.kernel_log": "UNBROKEN_KERNEL_LOG",
    "run.site_file": "UNBROKEN_SITE",
    "run.quiet": "UNBROKEN_QUIET",
    "checkpoint.mirror_snapshots": "UNBROKEN_MIRROR_SNAPSHOTS",
    "hang.patience_s": "UNBROKEN_PATIENCE_S",
    "hang.factor": "UNBROKEN_PATIENCE_FACTOR",
    "hang.off": "UNBROKEN_PATIENCE_OFF",
    "loss.guard": "UNBROKEN_LOSS_GUARD",
    "swap.mode": "UNBROKEN_SWAP_MODE",
    "swap.signal": "UNBROKEN_SWAP_SIGNAL",
    "controller.listen": "UNBROKEN_LISTEN",
    "controller.tls_cert": "UNBROKEN_TLS_CERT",
    "controller.tls_key": "UNBROKEN_TLS_KEY",
    "controller.tls_ca": "UNBROKEN_TLS_CA",
    "metrics.enabled": "UNBROKEN_METRICS",
    "metrics.listen": "UNBROKEN_METRICS_LISTEN",
    "metrics.targets_dir": "UNBROKEN_METRICS_TARGETS",
    "scheduler.name": "UNBROKEN_SCHEDULER",
    "ledger.folder": "UNBROKEN_LEDGER",
    "ledger.cordons": "UNBROKEN_LEDGER_CORDONS",
    "opinion.backend": "UNBROKEN_OPINION",
    "opinion.model": "UNBROKEN_OPINION_MODEL",
    "opinion.url": "UNBROKEN_OPINION_URL",
    "opinion.key_file": "UNBROKEN_OPINION_KEY_FILE",
    "opinion.below": "UNBROKEN_OPINION_BELOW",
    "opinion.timeout_s": "UNBROKEN_OPINION_TIMEOUT_S",
}
"""Key -> its variable. Of other variables see `OTHER_VARIABLES`."""
PATHS = (
    "run.token_file", "run.kernel_log", "run.site_file", "controller.tls_cert", "controller.tls_key",
    "controller.tls_ca", "checkpoint.publish_to", "metrics.targets_dir", "ledger.folder", "opinion.key_file",
    "opinion.model",
)  # fmt: skip
"""Files and folders (`opinion.model` may also be a model's name at an endpoint)."""
OTHER_VARIABLES = {
    "UNBROKEN_CONFIG": ("you", "a second file of settings"),
    "UNBROKEN_LOCAL_DIR": ("you", "the local folder; default `${TMPDIR:-/tmp}/unbroken-<uid>`"),
    "UNBROKEN_DISABLE": ("you", "`1`: the command runs as it is, without us"),
    "UNBROKEN_WARM": (
        "you",
        "`0`: ranks start a Python of their own, and are not forked; `torch`: nothing but torch is imported for them",
    ),
    "UNBROKEN_OPINION_PRICE": (
        "you",
        "what a million tokens cost that the model of `[opinion]` reads and writes: `0.25/1.25`. For metrics and `why`",
    ),
    "UNBROKEN_RESUME_FROM": ("agent, for the script", "the checkpoint to resume from, where the job has chosen one"),
    "UNBROKEN_SKIP_BATCHES": (
        "agent, for the script",
        "how many batches after that checkpoint to leave out, after a rollback for the loss (docs/loss.md)",
    ),
    "UNBROKEN_SNAPSHOT_FILES": ("agent, for `recovery.snapshot`", "memory for the snapshots of this node's ranks"),
    "UNBROKEN_SNAPSHOT_PID": ("rank, for what it starts", "the only process that uses that memory: the rank's own"),
    "UNBROKEN_SNAPSHOT": ("agent, for `recovery.snapshot`", "`ATTEMPT:STEP` of the snapshot that all ranks hold"),
    "UNBROKEN_ATTEMPT": ("agent, for the script", "the number of the attempt"),
    "UNBROKEN_JOB_DIR": ("agent, for the script", "the job folder"),
    "UNBROKEN_HEARTBEAT_FD": ("agent, for the script", "a descriptor to which the script may write its step"),
    "UNBROKEN_TRACEABLE": ("`unbroken run --traceable`, for ranks", "they may be asked for traces"),
    "UNBROKEN_NODE": ("`unbroken run`, for launcher and ranks", "the name of the node"),
    "UNBROKEN_AGENT_SOCKET": ("`unbroken run`, for launcher and ranks", "the agent's socket"),
    "UNBROKEN_KEEPER_SOCKET": ("`unbroken run`, for launcher and ranks", "the keeper's socket"),
    "UNBROKEN_LOCAL_RANK": ("launcher, for ranks", "the rank's number on its node"),
}
"""Variable -> who sets it, and what it says: no setting of `unbroken.toml`."""
FLAGS = {
    "run.job_dir": "--job-dir",
    "run.name": "--name",
    "run.controller": "--controller",
    "run.node_name": "--node-name",
    "run.token_file": "--token-file",
    "run.spares": "--spares",
    "run.max_restarts": "--max-restarts",
    "run.mode": "--mode",
    "run.checkpoint_dirs": "--checkpoint-dir",
    "checkpoint.publish_to": "--publish-to",
    "run.restart_args": "--restart-args",
    "run.kernel_log": "--kernel-log",
    "run.gather_s": "--gather",
    "run.wait_for_nodes_s": "--wait-for-nodes",
    "run.hold_limit_s": "--hold-limit",
    "run.quiet": "--quiet",
    "hang.patience_s": "--patience",
    "hang.off": "--patience",
    "controller.listen": "--listen",
}
"""Key -> its option of `unbroken run`."""


class Loaded(NamedTuple):
    settings: Settings
    origins: dict[str, str]
    """Key -> where its value came from; keys that are not here have their default."""


class Knob(NamedTuple):
    """One setting; docs/configuration.md is made from these (`python docs/make_configuration.py`)."""

    key: str
    what: str
    default: object
    default_text: str
    """In words, where the value itself says nothing."""
    scope: Scope
    see: str


def knobs() -> dict[str, Knob]:
    """Every key of the tree, in order."""
    found: dict[str, Knob] = {}
    for table in msgspec.structs.fields(Settings):
        hints = get_type_hints(table.type, include_extras=True)
        for leaf in msgspec.structs.fields(table.type):
            (meta,) = [m for m in hints[leaf.name].__metadata__ if isinstance(m, msgspec.Meta)]
            key = f"{table.name}.{leaf.name}"
            extra = meta.extra or {}
            found[key] = Knob(key, meta.description or "", leaf.default, extra["default"], extra["scope"], extra["see"])
    return found


def load(flags: Mapping[str, object], environment: Mapping[str, str], cwd: Path) -> Loaded:
    """`flags` maps keys (`run.spares`) to values; None means not given. Raises ConfigError."""
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for path in _files(environment, cwd):
        for key, value in _flatten(read_toml(path), path).items():
            values[key] = _checked(key, value, f"{path}", strict=True)
            origins[key] = str(path)
    for key, variable in ENVIRONMENT.items():
        if environment.get(variable):
            values[key] = _checked(key, environment[variable], f"the environment ({variable})", strict=False)
            origins[key] = variable
    for key, value in flags.items():
        if value is not None:
            values[key] = _checked(key, value, FLAGS[key], strict=False)
            origins[key] = FLAGS[key]
    tree: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        table, _, name = key.partition(".")
        tree.setdefault(table, {})[name] = value
    return Loaded(msgspec.convert(tree, Settings), origins)


def load_here(flags: Mapping[str, object] | None = None) -> Loaded:
    """As `load`, for this process: its environment and its working folder. Raises ConfigError."""
    return load(flags or {}, os.environ, working_folder())


def working_folder() -> Path:
    """The folder that this process was started in. Raises ConfigError where it has been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the folder that you are in was removed: change to another one (cd), and try again") from None


def absolute(settings: Settings, cwd: Path) -> Settings:
    """The same with absolute paths: the controller and the agent run in other folders than the user."""
    tables = msgspec.to_builtins(settings)
    for key in PATHS:
        table, _, name = key.partition(".")
        if tables[table][name] and (key != "opinion.model" or settings.opinion.backend == "transformers"):
            tables[table][name] = str(cwd / tables[table][name])
    tables["notify"]["to"] = tuple(_absolute_address(cwd, one) for one in settings.notify.addresses)
    return msgspec.convert(tables, Settings)


def _absolute_address(cwd: Path, given: str) -> str:
    """An address of `notify.to`; a file or program with its whole path."""
    before = ALIVE if given.startswith(ALIVE) else ""
    to = given.removeprefix(ALIVE)
    return given if to.startswith((*WEB, MAIL)) else f"{before}{cwd / to}"


def _files(environment: Mapping[str, str], cwd: Path) -> list[Path]:
    files = [path for path in (cwd / "unbroken.toml",) if os.path.isfile(path)]
    named = environment.get("UNBROKEN_CONFIG", "")
    if named:
        if not os.path.isfile(cwd / named):
            raise ConfigError(f"UNBROKEN_CONFIG names {named}, which is not a file")
        files.append(cwd / named)
    return files


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]
    try:
        with open(open_regular(path), encoding="utf-8") as file:
            text = file.read(TOML_CHARS)
        if len(text) == TOML_CHARS:
            raise ConfigError(f"{path} is too long for a file of unbroken: is it the right one?")
        tables: dict[str, Any] = tomllib.loads(text)
        return tables
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _flatten(tables: dict[str, Any], path: Path) -> dict[str, object]:
    values: dict[str, object] = {}
    names = [field.name for field in msgspec.structs.fields(Settings)]
    for table, content in tables.items():
        if table not in names or not isinstance(content, dict):
            keys = {key.partition(".")[2]: f"[{key.partition('.')[0]}] {key.partition('.')[2]}" for key in knobs()}
            raise ConfigError(f"{path}: unknown key {table!r}{_nearest(table, [*names, *keys], keys)}")
        for name, value in content.items():
            values[f"{table}.{name}"] = value
    known = knobs()
    for key in values:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}{_nearest(key, list(known), {})}")
    return values


def _nearest(word: str, known: list[str], shown: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(word, known, 1, 0.5)
    return f": did you mean {shown.get(near[0], near[0])}?" if near else f"; known are {', '.join(known[:8])}"


def _checked(key: str, value: object, where: str, *, strict: bool) -> object:
    table, _, name = key.partition(".")
    owner = get_type_hints(Settings)[table]
    kind = get_type_hints(owner, include_extras=True)[name]
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        shown = redact(repr(value))
        raise ConfigError(f"{key} = {shown} of {where} cannot be used: {error}") from None


# ----- what one value says about another -----


def check_opinion(given: OpinionSettings) -> None:
    """Raises ConfigError, which names the key and what would do."""
    if given.backend == "transformers" and not given.model:
        raise ConfigError("opinion.model must be the folder of a model when opinion.backend is transformers")
    if given.backend == "endpoint":
        _check_endpoint(given)


class OpinionPrice(NamedTuple):
    """Of a million tokens, in whatever currency."""

    read: float = 0.0
    written: float = 0.0

    def of(self, tokens_read: int, tokens_written: int) -> float:
        return (self.read * tokens_read + self.written * tokens_written) / 1e6


_PRICE: Final = re.compile(r"(\d{1,6}(?:\.\d{1,9})?)/(\d{1,6}(?:\.\d{1,9})?)", re.ASCII)


def opinion_price(environment: Mapping[str, str]) -> OpinionPrice | None:
    """None: nobody said what tokens cost. Raises ConfigError."""
    said = environment.get("UNBROKEN_OPINION_PRICE", "").strip()
    match = _PRICE.fullmatch(said)
    if said and match is None:
        shown = redact(repr(said[:60]))
        raise ConfigError(f"UNBROKEN_OPINION_PRICE = {shown}: expected the prices of a million tokens, as in 0.25/1.25")
    return OpinionPrice(float(match[1]), float(match[2])) if match is not None else None


def missing_for_opinion(given: OpinionSettings, cwd: Path) -> str:
    """What is named and not there, in words. It may be there where the controller runs: no reason to end a run."""
    if given.backend == "transformers" and not any((cwd / given.model).glob("*.safetensors")):
        return f"opinion.model = {given.model!r}: this is no folder with *.safetensors in it"
    if given.backend == "endpoint" and given.key_file and not (cwd / given.key_file).is_file():
        return f"opinion.key_file = {given.key_file!r}: there is no such file"
    return ""


def _check_endpoint(given: OpinionSettings) -> None:
    try:
        url = urlsplit(given.url)
        host, _ = url.hostname, url.port
    except ValueError as error:
        raise ConfigError(f"opinion.url cannot be used: {error}") from None
    if url.username or url.password:
        raise ConfigError("opinion.url has a name or password in it: put a key into a file, opinion.key_file")
    if url.scheme not in ("http", "https") or not host or url.query or url.fragment:
        raise ConfigError(f"opinion.url = {given.url!r}: expected something like https://host/v1")
    if not given.model:
        raise ConfigError("opinion.model is not set: name one of the endpoint's models")
    if given.key_file and url.scheme == "http" and not _is_own(host):
        raise ConfigError(f"opinion.url = {given.url!r}: a key (opinion.key_file) is sent over https only")


def _is_own(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ----- what a node runs -----


class NodePlan(Frozen, frozen=True, kw_only=True):
    """What this node runs: written by the front to `node.json`, read by its agent and controller."""

    node: str
    job_dir: str
    local_dir: str
    spec: JobSpec
    launcher_argv: tuple[str, ...]
    """Arguments of torchrun (without `torchrun` itself), rewritten for us."""
    launcher_env: dict[str, str] = {}
    """Variables for the launcher on top of the front's environment."""
    python: str
    """The training environment's interpreter."""
    cwd: str
    front_pid: int
    front_start_time: int
    """Field 22 of /proc/PID/stat, clock ticks after boot: with the pid it names a process for good."""
    run: str = ""
    """A random name for this `unbroken run`: process ids mean nothing in another container."""
    index: int | None = msgspec.field(default=None, name="order")
    """The node's number in the job, from 0 on; None where it is not known."""
    spare: bool = False
    scheduler_node: str = ""
    """What the scheduler calls this node; empty: as `node`."""
    domain: str = ""
    """Its switch or rack, where the scheduler says it."""
    snapshot_files: tuple[str, ...] = ()
    """Memory for the snapshots of this node's ranks (`recovery.snapshot_memory`), held open by the front."""
    processes: int | None = None
    """How many torchrun starts on this node, as far as that is known before it does."""
    torchrun_options: int = 0
    """How many of `launcher_argv` come before the script."""
    settings: Settings = Settings()
    """Of this node, with absolute paths. Those that count for the whole job are in `spec`, too: it is journalled."""


def read_plan(path: Path) -> NodePlan:
    """Raises OSError and msgspec.DecodeError."""
    data = read_own(path)
    content = msgspec.json.decode(data)
    if "settings" not in content:  # of a front of an older version that still runs
        names = ("controller", "token_file", "kernel_log", "site_file")
        old = {name: content[name] for name in names if name in content}
        old["restart_args"] = shlex.join(content.get("restart_args", ()))
        settings = received(os.environ)
        run = msgspec.structs.replace(settings.run, **old)
        data = msgspec.json.encode({**content, "settings": msgspec.structs.replace(settings, run=run)})
    return msgspec.json.decode(data, type=NodePlan)


def received(environment: Mapping[str, str]) -> Settings:
    """The settings of a daemon that has none in a `node.json`: by its environment alone, in whatever folder it runs."""
    return load({}, {**environment, "UNBROKEN_CONFIG": ""}, Path(os.devnull)).settings


# ----- the site file -----
#
#     skip = ["ethernet_*"]                  # checks that are not looked at
#     interfaces_left_out = ["eno*"]         # not the job's: management, storage
#     [expect]                               # what a node must have; what is not said is found out
#     gpus = 8
#     [limits.gpu_temperature]               # a check's own numbers (`unbroken check --list`)
#     margin_c = 5
#     [xid.79]                               # rows over the tables of Xid, SXid and kernel messages
#     severity = "fatal"
#     [[rule]]                               # over the rules of output (docs/rules.md)
#     id = "our_tracker"
#
# Every key is optional. A job folder may have rules of its own in `rules.toml`, which is read after the site's.

SITE_PATH: Final = Path("/etc/unbroken/site.toml")
RULES_BEGUN: Final = "rules-begun.json"
"""In the job folder: the rules with which its job began."""
DROPPED_EXPECTATIONS: Final = ("memory_gib", "modules", "units", "versions")
"""Keys of `[expect]` that older versions had checks for: a file that still has them is read without them."""
SITE_TABLES: Final = ("xid", "sxid", "kernel", "rule")
"""Sections for the readers of lines (`diagnosis.{xid,kernel,rules}`), which know what may be in them."""


class SiteFile(Frozen, frozen=True, kw_only=True):
    """A site file, read. `path` is empty where there is none."""

    alert: list[dict[str, Any]] = []
    """Rules of alerts from outside, which the controller reads (docs/access.md)."""

    site: Site = Site()
    tables: dict[str, Any] = {}
    """The sections of `SITE_TABLES` as TOML has them."""
    path: str = ""
    drain_requests: str = DRAIN_FOLDER
    """Folder of a node where jobs leave requests to drain it, and root's programs read them."""
    problem: str = ""
    """Why the learned rules beside it are not used, in words."""


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
    alert: list[dict[str, Any]] = []


class _RulesFile(msgspec.Struct, forbid_unknown_fields=True):
    rule: list[dict[str, Any]] = []


def load_site(named: str = "") -> SiteFile:
    """The file that is named, else the default one where it is. Raises ConfigError, which names file and key."""
    path = Path(named) if named else SITE_PATH
    if not named and not os.path.isfile(path):  # or one that is not ours to see
        return _with_learned(SiteFile(), named)
    content = read_toml(path)
    if isinstance(expect := content.get("expect"), dict):
        content["expect"] = {key: value for key, value in expect.items() if key not in DROPPED_EXPECTATIONS}
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
    tables: dict[str, Any] = {name: content[name] for name in SITE_TABLES if name in content}
    if tables:
        from diagnosis import rules  # reads tables: only where it is needed
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
    found = SiteFile(site=site, tables=tables, path=str(path), drain_requests=read.drain_requests, alert=read.alert)
    return _with_learned(found, named)


def learned_rules(named: str = "") -> Path:
    """The file of the rules that a model proposed and an operator approved for all jobs: beside the site file."""
    return (Path(named) if named else SITE_PATH).with_name("learned_rules.toml")


def _with_learned(found: SiteFile, named: str) -> SiteFile:
    """The site file with the rules learned. If one of these cannot be used, none is, and the site's own still are."""
    path = learned_rules(named)
    if not os.path.isfile(path):
        return found
    from diagnosis import rules

    own = found.tables.get("rule", [])
    try:
        rows = [*own, *msgspec.convert(read_toml(path), _RulesFile).rule]
        rules.packaged().with_site(rows)
    except (ConfigError, ValueError) as error:
        return msgspec.structs.replace(found, problem=f"the rules learned are not used: {path}: {error}")
    tables = {**found.tables, "rule": rows}
    return msgspec.structs.replace(found, tables=tables, site=msgspec.structs.replace(found.site, tables=tables))


def use_rules(site_file: SiteFile, job_dir: Path | None = None) -> str:
    """From now on this process reads output with the site's rules, and with those in the job folder's `rules.toml`.

    Returns what is wrong with the latter, in words: then these are left out.
    """
    return _use(site_file, job_dir)[1]


def use_rules_of_job(site_file: SiteFile, job_dir: Path, *, begun: bool) -> str:
    """The same for a process that replays the journal: a job that has `begun` keeps the rules that it began with.

    A rule that was approved since would judge anew what has been decided, and come to another history.
    """
    if begun and use_begun_rules(job_dir):
        return ""
    rows, problem = _use(site_file, job_dir)
    try:
        write_atomically(job_dir / RULES_BEGUN, msgspec.json.encode(rows) + b"\n")
    except OSError as error:
        problem = problem or f"{job_dir / RULES_BEGUN} cannot be written: {error.strerror or error}"
    return problem


def use_begun_rules(job_dir: Path) -> bool:
    """Use the rules that this folder's job began with. False: they were not recorded, and nothing has changed."""
    from diagnosis import rules

    try:
        rules.use(msgspec.json.decode((job_dir / RULES_BEGUN).read_bytes(), type=list[dict[str, Any]]))
    except (OSError, ValueError):
        return False
    return True


def _use(site_file: SiteFile, job_dir: Path | None) -> tuple[list[dict[str, Any]], str]:
    """The rows that are used from now on, and what is wrong with the job's own."""
    from diagnosis import rules

    own = list(site_file.tables.get("rule", []))
    path = job_dir / "rules.toml" if job_dir is not None else None
    if path is not None and os.path.isfile(path):
        try:
            both = [*own, *msgspec.convert(read_toml(path), _RulesFile).rule]
            rules.use(both)
            return both, ""
        except (ConfigError, ValueError) as error:
            rules.use(own)
            return own, f"the job's rules are not used: {path}: {error}"
    rules.use(own)
    return own, ""


def load_site_or_default(named: str = "") -> tuple[SiteFile, str]:
    """As `load_site`, but never raises: the defaults where the file cannot be used, and what is wrong with it."""
    try:
        found = load_site(named)
        return found, found.problem
    except ConfigError as error:
        return SiteFile(), f"the site file is not used: {error}"
