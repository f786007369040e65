"""What an agent and its mover say to each other: lines of JSON over the mover's standard input and output."""

from __future__ import annotations

import msgspec

from recovery.tiers import BringBack, NodeTiers, PartSource, Save, SnapshotBring, SnapshotOrders


class MoverSetup(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    checkpoint_dir: str
    publish_to: str
    job_dir: str
    token_file: str
    shared_token: bool = False
    """The token's file was named by a person."""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    snapshot_files: tuple[str, ...] = ()
    """The slots of this node's ranks, where snapshots are mirrored."""


class MoverOrders(msgspec.Struct, frozen=True, kw_only=True):
    """All that is wanted of the mover now."""

    paths: tuple[str, ...] = ()
    """The saves that the agent sees in the checkpoint folder, the newest first."""
    attempt: int = 0
    since: float = 0.0
    """When its ranks were let in on this node, Unix time."""
    rest: int = 0
    """The newest attempt whose ranks have all ended here."""
    at_rest: bool = False
    """No rank is left that could write: what is there is taken as it is."""
    peer: PartSource | None = None
    """Who mirrors this node's parts."""
    commit: tuple[Save, ...] = ()
    gone: tuple[str, ...] = ()
    """Nodes that were of the job and are lost."""
    over: bool = False
    """The run has ended well, and its newest save is published: what else we have copied is of no use any more."""
    bring: BringBack | None = None
    bring_number: int = 0
    snapshots: SnapshotOrders | None = None
    bring_snapshot: SnapshotBring | None = None
    """Put it into the slots of this node's ranks; none of them runs."""
    bring_snapshot_number: int = 0


class MoverStatus(msgspec.Struct, frozen=True, kw_only=True):
    tiers: NodeTiers
    brought: int = 0
    """The newest `bring_number` that is done with, well or not."""
    bring_problem: str = ""
    brought_snapshot: int = 0
    """The newest `bring_snapshot_number` that is done with, well or not."""
    bring_snapshot_problem: str = ""
    brought_bytes: int = 0
    mirrored_bytes: int = 0
    published_bytes: int = 0
    cleared: bool = False
    """What was copied of a run that is over is gone."""
    behind_s: float = 0.0
    """How long the oldest part that is to be copied has waited."""
    problems: tuple[str, ...] = ()
