"""The failure taxonomy: one closed list that everything else keys on.

Rules, policy, metric labels, the model's answer schema and the docs name a failure only by an id of this table.
A *cause* can end a diagnosis; a *symptom* stands only when nothing beneath it is found; an *outcome* says how
the job ended. Nothing here decides anything: `triage` picks a class, `recovery.policy` picks what to do.
"""

from __future__ import annotations

import enum
from typing import Final, Literal, NamedTuple

from diagnosis.tables import load

RemedyAction = Literal[
    "none",
    "restart",
    "restart_excluding",
    "rollback_and_restart",
    "cordon_gpu_and_restart",
    "cordon_node_and_restart",
    "wait_and_retry",
    "stop",
    "hold",
    "requeue",
]
"""What can be done about a failure; policy decides."""
Kind = Literal["cause", "symptom", "outcome", "unknown", "none"]
Domain = Literal[
    "accelerator",
    "host",
    "network",
    "storage",
    "system_software",
    "framework",
    "user",
    "numerics",
    "performance",
    "scheduler",
    "unknown",
    "none",
]
Retry = Literal["same", "exclude", "back", "never", "wait", "none"]


class FailureClass(enum.Enum):
    """The id of a failure class. Its value is the stable, public name."""

    GPU_ECC_UNCORRECTABLE = "gpu_ecc_uncorrectable"
    GPU_FALLEN_OFF_BUS = "gpu_fallen_off_bus"
    GPU_HANG = "gpu_hang"
    NVLINK_ERROR = "nvlink_error"
    GPU_DRIVER = "gpu_driver"
    GPU_THERMAL_POWER = "gpu_thermal_power"
    PCIE_ERROR = "pcie_error"
    CUDA_ILLEGAL_ACCESS = "cuda_illegal_access"
    SILENT_DATA_CORRUPTION = "silent_data_corruption"
    GPU_OOM = "gpu_oom"
    HOST_OOM = "host_oom"
    SHM_EXHAUSTED = "shm_exhausted"
    CPU_OR_MEMORY_HW = "cpu_or_memory_hw"
    KERNEL_FAULT = "kernel_fault"
    NODE_FAILURE = "node_failure"
    NCCL_NETWORK = "nccl_network"
    NCCL_SETUP = "nccl_setup"
    RENDEZVOUS_STORE = "rendezvous_store"
    DNS_OR_CONNECT = "dns_or_connect"
    STORAGE_ERROR = "storage_error"
    DISK_FULL = "disk_full"
    CHECKPOINT_CORRUPT_OR_MISMATCH = "checkpoint_corrupt_or_mismatch"
    DATA_LOADING_ERROR = "data_loading_error"
    DEPENDENCY_IMPORT_ERROR = "dependency_import_error"
    CONFIG_OR_ARGUMENT_ERROR = "config_or_argument_error"
    PERMISSION_OR_AUTH = "permission_or_auth"
    SCRIPT_ERROR = "script_error"
    FRAMEWORK_BUG = "framework_bug"
    COLLECTIVE_MISMATCH = "collective_mismatch"
    LOSS_SPIKE_OR_NAN = "loss_spike_or_nan"
    INPUT_STALL = "input_stall"
    STRAGGLER_OR_SLOW = "straggler_or_slow"
    NCCL_TIMEOUT = "nccl_timeout"
    SILENT_HANG = "silent_hang"
    EXIT_HANG = "exit_hang"
    WORKER_CRASH = "worker_crash"
    PREEMPTED_OR_CANCELLED = "preempted_or_cancelled"
    UNKNOWN = "unknown"
    NONE = "none"


class ClassEntry(NamedTuple):
    kind: Kind
    domain: Domain
    what: str
    """Typical evidence, in a line."""
    remedy: str
    """The default remedy, in a line."""
    retry: Retry
    """`same`: a restart in place may cure it; `exclude`: restart without the culprit; `back`: restart from an
    earlier checkpoint; `never`: a restart repeats it; `wait`: retry after backing off; `none`: nothing restarts."""


TAXONOMY: Final = {FailureClass(name): ClassEntry(**row) for name, row in load("diagnosis", "taxonomy.toml").items()}
