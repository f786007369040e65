"""What a failure that was read as one class may be instead, where nothing in the evidence excludes it.

Few readings have a rival in the evidence itself, and yet some are wrong. These are the classes whose signs are alike,
or whose signs one and the same failure shows together, with how often (of a failure that is not what it seems).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from diagnosis import exits
from diagnosis.signals import ExitRecord
from diagnosis.taxonomy import FailureClass

_ALIKE: Final = """
gpu_ecc_uncorrectable: cuda_illegal_access 25, gpu_hang 20, nvlink_error 15
gpu_fallen_off_bus: pcie_error 35, gpu_hang 25, gpu_driver 20
gpu_hang: gpu_fallen_off_bus 30, gpu_driver 25, kernel_fault 15
nvlink_error: gpu_driver 25, gpu_fallen_off_bus 20, nccl_setup 15
gpu_driver: dependency_import_error 25, gpu_fallen_off_bus 20, config_or_argument_error 20, gpu_hang 15
gpu_thermal_power: straggler_or_slow 40, gpu_hang 15
pcie_error: gpu_fallen_off_bus 40, straggler_or_slow 20
cuda_illegal_access: script_error 30, framework_bug 30, gpu_ecc_uncorrectable 20
silent_data_corruption: loss_spike_or_nan 40, cpu_or_memory_hw 15
gpu_oom: config_or_argument_error 25, gpu_driver 20, framework_bug 10
host_oom: worker_crash 30, shm_exhausted 20, preempted_or_cancelled 15
shm_exhausted: host_oom 35, data_loading_error 25
cpu_or_memory_hw: kernel_fault 30, node_failure 20
kernel_fault: storage_error 30, cpu_or_memory_hw 25, host_oom 15
node_failure: nccl_network 25, kernel_fault 25, preempted_or_cancelled 20
nccl_network: worker_crash 30, node_failure 30, rendezvous_store 15
nccl_setup: nccl_network 30, config_or_argument_error 25, gpu_driver 20
rendezvous_store: dns_or_connect 30, nccl_network 25, node_failure 20, config_or_argument_error 15
dns_or_connect: rendezvous_store 25, permission_or_auth 20, config_or_argument_error 20
storage_error: data_loading_error 25, checkpoint_corrupt_or_mismatch 25, disk_full 15
disk_full: storage_error 35, shm_exhausted 20
checkpoint_corrupt_or_mismatch: config_or_argument_error 35, storage_error 30, script_error 20
data_loading_error: script_error 35, config_or_argument_error 25, storage_error 25
dependency_import_error: config_or_argument_error 30, script_error 30, gpu_driver 15
config_or_argument_error: script_error 40, data_loading_error 25, checkpoint_corrupt_or_mismatch 15
permission_or_auth: config_or_argument_error 30, dns_or_connect 25, storage_error 20
script_error: config_or_argument_error 35, data_loading_error 30, framework_bug 15
framework_bug: cuda_illegal_access 25, script_error 25, worker_crash 20
collective_mismatch: script_error 30, data_loading_error 20, nccl_timeout 15
loss_spike_or_nan: silent_data_corruption 25, config_or_argument_error 20
input_stall: storage_error 30, straggler_or_slow 30
straggler_or_slow: input_stall 30, gpu_thermal_power 25, pcie_error 15
nccl_timeout: silent_hang 30, nccl_network 25, collective_mismatch 20, straggler_or_slow 10
silent_hang: collective_mismatch 25, input_stall 20, storage_error 20, nccl_timeout 15
exit_hang: nccl_timeout 30, silent_hang 20, preempted_or_cancelled 15
worker_crash: host_oom 30, framework_bug 25, script_error 20, preempted_or_cancelled 15
preempted_or_cancelled: worker_crash 25, host_oom 20, node_failure 10
unknown: worker_crash 30, preempted_or_cancelled 20
"""

_BY_END = """
SIGKILL: host_oom 50, preempted_or_cancelled 20, node_failure 5
SIGTERM: preempted_or_cancelled 50, node_failure 10
SIGINT: preempted_or_cancelled 60
SIGABRT: framework_bug 30, nccl_timeout 20, cuda_illegal_access 15
SIGSEGV: framework_bug 40, cuda_illegal_access 15, dependency_import_error 15, cpu_or_memory_hw 10
SIGBUS: shm_exhausted 50, storage_error 15, host_oom 15
0: script_error 35, data_loading_error 30, collective_mismatch 15
1: script_error 35, config_or_argument_error 25, dependency_import_error 15
"""
"""How a process ended of which nothing else is known."""


def _table(text: str) -> dict[str, dict[FailureClass, float]]:
    rows = (line.split(": ") for line in text.strip().splitlines())
    return {
        name: {FailureClass(other): int(percent) / 100 for other, percent in map(str.split, others.split(", "))}
        for name, others in rows
    }


NEIGHBOURS: Final[Mapping[FailureClass, Mapping[FailureClass, float]]] = {
    FailureClass(name): others for name, others in _table(_ALIKE).items()
}
_ENDS: Final = _table(_BY_END)

STOPPED: Final[Mapping[FailureClass, float]] = {
    FailureClass.PREEMPTED_OR_CANCELLED: 0.3,
    FailureClass.SILENT_HANG: 0.25,
    FailureClass.WORKER_CRASH: 0.25,
}
"""Of a log that no failure ends, and no end of the work either."""
GOES_ON: Final[Mapping[FailureClass, float]] = {
    FailureClass.LOSS_SPIKE_OR_NAN: 0.25,
    FailureClass.PREEMPTED_OR_CANCELLED: 0.2,
    FailureClass.STRAGGLER_OR_SLOW: 0.15,
    FailureClass.INPUT_STALL: 0.15,
}
"""Of a log in which training goes on to the last line."""


def of_end(record: ExitRecord) -> Mapping[FailureClass, float]:
    """What ends processes like this one."""
    by_signal = next((others for name, others in _ENDS.items() if exits.ended_by(record, name)), None)
    return by_signal or _ENDS["1" if record.code else "0"]
