"""The failure taxonomy: one closed list that everything else keys on.

Rules, policy, metric labels, the model's answer schema and the docs name a failure only by an id of this table.
A *cause* can end a diagnosis; a *symptom* stands only when nothing beneath it is found; an *outcome* says how
the job ended. Nothing here decides anything: `triage` picks a class, `recovery.policy` picks what to do.
"""

from __future__ import annotations

import enum
from typing import Final, Literal, NamedTuple

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
    """What the taxonomy says of one failure class."""

    kind: Kind
    domain: Domain
    what: str
    """Typical evidence, in a line."""
    remedy: str
    """The default remedy, in a line."""
    retry: Retry
    """`same`: a restart in place may cure it; `exclude`: restart without the culprit; `back`: restart from an
    earlier checkpoint; `never`: a restart repeats it; `wait`: retry after backing off; `none`: nothing restarts."""


TAXONOMY: Final[dict[FailureClass, ClassEntry]] = {
    FailureClass.GPU_ECC_UNCORRECTABLE: ClassEntry(
        "cause",
        "accelerator",
        "uncorrectable memory error: Xid 48 63 64 94 95, DBE, SRAM, row remap pending or failed, "
        "'uncorrectable ECC error encountered'",
        "cordon GPU (node if uncontained), reset, qualify",
        "exclude",
    ),
    FailureClass.GPU_FALLEN_OFF_BUS: ClassEntry(
        "cause",
        "accelerator",
        "Xid 79, GPU is lost, no device handle, device count below expected",
        "cordon node",
        "exclude",
    ),
    FailureClass.GPU_HANG: ClassEntry(
        "cause",
        "accelerator",
        "GSP or engine hang: Xid 8 61 62 109 119 120, driver calls that do not return",
        "cordon node, reset or reboot",
        "exclude",
    ),
    FailureClass.NVLINK_ERROR: ClassEntry(
        "cause",
        "accelerator",
        "Xid 74 and 144-150, SXid, fabric manager or fabric state, CUDA 802",
        "test within the node, cordon",
        "exclude",
    ),
    FailureClass.GPU_DRIVER: ClassEntry(
        "cause",
        "system_software",
        "driver and library mismatch, insufficient driver, CUDA initialization, no device visible, "
        "device busy or unavailable, foreign process on the GPU",
        "fix or reboot node, cordon meanwhile",
        "exclude",
    ),
    FailureClass.GPU_THERMAL_POWER: ClassEntry(
        "cause",
        "accelerator",
        "thermal or power-brake slowdown that lasts, over-temperature",
        "cordon if it is one of its peers, else alert",
        "exclude",
    ),
    FailureClass.PCIE_ERROR: ClassEntry(
        "cause",
        "host",
        "AER fatal, link width or speed degraded, replay storms",
        "cordon node",
        "exclude",
    ),
    FailureClass.CUDA_ILLEGAL_ACCESS: ClassEntry(
        "cause",
        "user",
        "illegal address, device-side assert, misaligned access; Xid 13 31 43 from code; on one GPU "
        "again and again: suspect the GPU",
        "restart once, then stop; same GPU twice: cordon",
        "same",
    ),
    FailureClass.SILENT_DATA_CORRUPTION: ClassEntry(
        "cause",
        "accelerator",
        "replicas disagree, checksums differ, a node that fails validation",
        "roll back beyond the detection delay, cordon",
        "back",
    ),
    FailureClass.GPU_OOM: ClassEntry(
        "cause",
        "user",
        "CUDA out of memory (check first for a foreign process on the GPU)",
        "stop and tell the user; restart once if fragmentation",
        "never",
    ),
    FailureClass.HOST_OOM: ClassEntry(
        "cause",
        "host",
        "kernel or cgroup OOM kill, data loader worker killed",
        "restart once, then stop; at a limit of the job: ask for more memory",
        "same",
    ),
    FailureClass.SHM_EXHAUSTED: ClassEntry(
        "cause",
        "host",
        "bus error, /dev/shm full",
        "stop and tell the user",
        "never",
    ),
    FailureClass.CPU_OR_MEMORY_HW: ClassEntry(
        "cause",
        "host",
        "MCE, EDAC, CPER, DIMM",
        "cordon node",
        "exclude",
    ),
    FailureClass.KERNEL_FAULT: ClassEntry(
        "cause",
        "system_software",
        "oops, panic, soft lockup, hung tasks, a D-state that lasts",
        "reboot and cordon",
        "exclude",
    ),
    FailureClass.NODE_FAILURE: ClassEntry(
        "cause",
        "host",
        "node lost: NODE_FAIL, no heartbeat, host down or rebooted",
        "cordon, replace",
        "exclude",
    ),
    FailureClass.NCCL_NETWORK: ClassEntry(
        "cause",
        "network",
        "ncclRemoteError, ncclSystemError on the wire, IB completion errors, ibv failures, link "
        "down or flapping, connection closed with no dead peer",
        "back off; the same link or node twice in 5 minutes: cordon",
        "exclude",
    ),
    FailureClass.NCCL_SETUP: ClassEntry(
        "cause",
        "framework",
        "NCCL init, configuration or version: no interface, bootstrap, duplicate GPU, NVLS, invalid usage",
        "stop and tell the user; one bad node: exclude",
        "never",
    ),
    FailureClass.RENDEZVOUS_STORE: ClassEntry(
        "cause",
        "framework",
        "rendezvous time-out, TCPStore connect, reset or broken pipe at start, address in use",
        "retry with a fresh port and store",
        "wait",
    ),
    FailureClass.DNS_OR_CONNECT: ClassEntry(
        "cause",
        "network",
        "name resolution, hub, tracking service, object store connection",
        "auxiliary service: keep training; needed: back off",
        "wait",
    ),
    FailureClass.STORAGE_ERROR: ClassEntry(
        "cause",
        "storage",
        "I/O error, stale handle, mount missing or hanging, quota, object store error",
        "back off; one node: cordon",
        "wait",
    ),
    FailureClass.DISK_FULL: ClassEntry(
        "cause",
        "storage",
        "no space or inodes left",
        "hold, tell the operator, resume when there is space",
        "wait",
    ),
    FailureClass.CHECKPOINT_CORRUPT_OR_MISMATCH: ClassEntry(
        "cause",
        "storage",
        "unreadable, incomplete or incompatible checkpoint",
        "fall back to the one before; mismatch with the model: stop",
        "back",
    ),
    FailureClass.DATA_LOADING_ERROR: ClassEntry(
        "cause",
        "user",
        "dataset missing or corrupt, index or decode error in the input pipeline",
        "skip what policy allows, else stop",
        "never",
    ),
    FailureClass.DEPENDENCY_IMPORT_ERROR: ClassEntry(
        "cause",
        "user",
        "ImportError, undefined symbol, ABI; on one node only: that node",
        "stop; one node: exclude",
        "never",
    ),
    FailureClass.CONFIG_OR_ARGUMENT_ERROR: ClassEntry(
        "cause",
        "user",
        "arguments, configuration, shape or batch divisibility",
        "stop",
        "never",
    ),
    FailureClass.PERMISSION_OR_AUTH: ClassEntry(
        "cause",
        "user",
        "permission, token, credential",
        "stop",
        "never",
    ),
    FailureClass.SCRIPT_ERROR: ClassEntry(
        "cause",
        "user",
        "a plain bug in the training code",
        "stop at the second occurrence on the same step",
        "never",
    ),
    FailureClass.FRAMEWORK_BUG: ClassEntry(
        "cause",
        "framework",
        "internal assert, segfault inside torch, NCCL, DeepSpeed, Megatron",
        "restart once, then stop",
        "same",
    ),
    FailureClass.COLLECTIVE_MISMATCH: ClassEntry(
        "cause",
        "framework",
        "ranks disagree on collective, order, shape, dtype",
        "stop and show the two call sites",
        "never",
    ),
    FailureClass.LOSS_SPIKE_OR_NAN: ClassEntry(
        "cause",
        "numerics",
        "NaN or Inf, spike, divergence, loss scale at its minimum",
        "roll back and skip the data window; again: hold",
        "back",
    ),
    FailureClass.INPUT_STALL: ClassEntry(
        "cause",
        "performance",
        "the step waits for data",
        "tell the user which stage",
        "none",
    ),
    FailureClass.STRAGGLER_OR_SLOW: ClassEntry(
        "cause",
        "performance",
        "one GPU, node or link slows all",
        "measure, swap at a checkpoint when it pays",
        "exclude",
    ),
    FailureClass.NCCL_TIMEOUT: ClassEntry(
        "symptom",
        "unknown",
        "watchdog time-out with nothing found beneath",
        "two-round test, then restart",
        "same",
    ),
    FailureClass.SILENT_HANG: ClassEntry(
        "symptom",
        "unknown",
        "no progress and no error with nothing found beneath",
        "collect stacks and flight recorder, restart",
        "same",
    ),
    FailureClass.EXIT_HANG: ClassEntry(
        "symptom",
        "framework",
        "the work is complete but the end hangs: one rank done and others waiting, process group teardown stuck",
        "end the ranks, report success",
        "none",
    ),
    FailureClass.WORKER_CRASH: ClassEntry(
        "symptom",
        "unknown",
        "a signal or exit code with nothing found beneath",
        "restart once, then two-round test",
        "same",
    ),
    FailureClass.PREEMPTED_OR_CANCELLED: ClassEntry(
        "outcome",
        "scheduler",
        "preemption, time limit, scancel, maintenance, a clean SIGTERM from outside",
        "checkpoint and requeue; never counts against a budget",
        "wait",
    ),
    FailureClass.UNKNOWN: ClassEntry(
        "unknown",
        "unknown",
        "no evidence",
        "restart once, then two-round test, then hold",
        "same",
    ),
    FailureClass.NONE: ClassEntry(
        "none",
        "none",
        "a healthy log: warnings are not failures",
        "nothing",
        "none",
    ),
}


def as_markdown() -> str:
    """The table of docs/taxonomy.md (a test keeps the two equal)."""
    head = ["| id | kind | domain | what it is, typical evidence | default remedy | retry |", "| --- " * 6 + "|"]
    rows = [
        f"| {name.value} | {entry.kind} | {entry.domain} | {entry.what} | {entry.remedy} | {entry.retry} |"
        for name, entry in TAXONOMY.items()
    ]
    return "\n".join([*head, *rows]) + "\n"
