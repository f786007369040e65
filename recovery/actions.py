"""The words of recovery: what is decided about a verdict, in which situation."""

from __future__ import annotations

from typing import Literal

from diagnosis.signals import Frozen
from diagnosis.taxonomy import FailureClass

Mode = Literal["observe", "recommend", "enforce"]

OrderOutcome = Literal["done", "already", "foreign", "denied", "unavailable", "unsupported", "failed"]
"""What became of an order to the scheduler. `already`: it was so; `foreign`: somebody else's reason stands and is left
alone; `denied`: we lack the rights; `unavailable`: no answer in time, worth another try; `unsupported`: this scheduler
cannot do it."""


class Checkpoint(Frozen, frozen=True, kw_only=True):
    """One checkpoint on storage, as a `CheckpointFormat` read it without executing anything in it."""

    path: str
    step: int | None
    """None when neither name nor content tells."""
    format: str
    """`torch_save`, `dcp`, `hf`, `megatron`, ..."""
    complete: bool
    why: str = ""
    """Why it is not complete, in words."""
    modified_at: float = 0.0
    size_bytes: int = 0
    in_doubt: bool = False
    """Somebody else wrote in it, and what our ranks wrote does not prove it whole or torn: it is neither offered nor
    touched, and nothing older is offered."""
    suspect: bool = False
    """Written after a numerics incident: used only when nothing else is left."""
    copy_of: str = ""
    """For a safe copy: the file it was copied from (overwritten in place)."""


class SetAside(Frozen, frozen=True, kw_only=True, tag="set_aside"):
    """Move a bad checkpoint out of the way before a restart, and mend its pointer files. Never deletes."""

    path: str
    why: str


class Restore(Frozen, frozen=True, kw_only=True, tag="restore"):
    """Put a safe copy back where the script expects its checkpoint."""

    copy: str
    path: str


Preparation = SetAside | Restore


class Resume(Frozen, frozen=True, kw_only=True):
    """Where the next attempt starts, as the script is told."""

    path: str = ""
    """Empty: from the beginning."""
    step: int | None = None
    prepare: tuple[Preparation, ...] = ()


class Cordon(Frozen, frozen=True, kw_only=True):
    """A node (or one of its GPUs) that this job must not use."""

    node: str
    gpu: str = ""
    reason: str
    by: str = "policy"
    """`policy`, or the operator's name."""
    failure_class: FailureClass | None = None
    incident: str = ""
    at: float = 0.0
    until: float | None = None
    culprit_gpu: str = ""
    """The GPU that gave the reason, where the node as a whole is cordoned for it."""


class Plan(Frozen, frozen=True, kw_only=True):
    """What is done about a verdict. `why` is one sentence."""

    kind: Literal["restart", "stop", "hold", "succeed", "ignore", "requeue"]
    """`requeue`: the scheduler is asked to start the job again on other nodes, if no node comes back in time."""
    why: str
    cordons: tuple[Cordon, ...] = ()
    delay_s: float = 0.0
    """Back-off before the next attempt."""
    counts: bool = True
    """Whether it is charged to the budget."""
    exit_code: int | None = None
    """For `stop`: what `unbroken run` exits with (90: not worth retrying, 91: budgets spent)."""
    until: Literal["", "space", "progress"] = ""
    """`space`, for `hold`: it goes on by itself when there is room on disks again. `progress`, for `ignore`: a hang is
    left to a person, and its incident is open until progress comes back."""
    breaker: bool = False
    """For `hold`: the circuit breaker stood in the way of the cordons that were wanted."""
    needs_approval: bool = False
    """In mode `recommend`: proposed, not done until `unbroken approve`."""
