"""The table of checks of a GPU that NVML answers: what, source, threshold, failure class. Judged in `gpu_judge`.

Numbers without a remark are those of NVIDIA's documents and tools (RMA criteria, DCGM's health watches); where ours
differ, a comment says why.
"""

from __future__ import annotations

from typing import Final

from diagnosis.health import Check
from diagnosis.taxonomy import FailureClass

# fmt: off
NVML: Final = Check(id="gpu_nvml", failure_class=FailureClass.GPU_DRIVER, scope="node", looks=2,
    what="the NVIDIA driver does not answer its management library",
    source="nvmlInitWithFlags",
    threshold="driver and library versions differ, or initialization fails though a GPU and its driver are there")
NVML_COUNT: Final = Check(id="gpu_nvml_count", failure_class=FailureClass.GPU_FALLEN_OFF_BUS, scope="node", looks=2,
    what="the driver knows fewer GPUs than this node has",
    source="nvmlDeviceGetCount_v2, /sys/bus/pci/devices, /proc/driver/nvidia/gpus",
    threshold="a GPU that the driver is bound to and that we may open is missing, or fewer than the site expects")
PRESENT: Final = Check(id="gpu_present", failure_class=FailureClass.GPU_FALLEN_OFF_BUS, scope="gpu",
    what="the GPU has fallen off the bus",
    source="any NVML call: NVML_ERROR_GPU_IS_LOST",
    threshold="a call says that the GPU is lost")
ANSWERS: Final = Check(id="gpu_answers", failure_class=FailureClass.GPU_HANG, scope="gpu", looks=2,
    what="the GPU wants a reset, or its calls fail",
    source="any NVML call: NVML_ERROR_RESET_REQUIRED, NVML_ERROR_UNKNOWN, NVML_ERROR_TIMEOUT",
    threshold="a call says that a reset is required, or the share {share} of the calls of a look fails",
    limits={"share": 0.5})
RECOVERY: Final = Check(id="gpu_recovery_action", failure_class=FailureClass.GPU_HANG, scope="gpu",
    what="the driver asks for a reset, drain or reboot",
    source="NVML field 230 (GPU recovery action)",
    threshold="any action; draining peer-to-peer traffic is a warning")
ECC_UNCORRECTED: Final = Check(id="gpu_ecc_uncorrected", failure_class=FailureClass.GPU_ECC_UNCORRECTABLE, scope="gpu",
    what="uncorrected memory errors since the driver was loaded",
    source="nvmlDeviceGetTotalEccErrors (volatile)",
    # What is older than our watch has been dealt with or shows as a pending row remap, and is a warning only.
    threshold="one more than when we first saw this GPU since the node was booted; older ones are a warning")
ECC_CORRECTED: Final = Check(id="gpu_ecc_corrected_rate", failure_class=FailureClass.GPU_ECC_UNCORRECTABLE, scope="gpu",
    what="a storm of corrected memory errors",
    source="nvmlDeviceGetTotalEccErrors (volatile)",
    # No peer has it: 17 700 a second once wedged DCGM, which reported the GPU healthy.
    threshold="{per_s}/s over {for_s} s is a warning, {critical_per_s}/s critical",
    limits={"per_s": 100, "for_s": 300, "critical_per_s": 1000})
SRAM: Final = Check(id="gpu_ecc_sram_threshold", failure_class=FailureClass.GPU_ECC_UNCORRECTABLE, scope="gpu",
    when="periodic",
    what="so many SRAM errors that the GPU must be replaced",
    source="nvmlDeviceGetSramEccErrorStatus",
    threshold="the GPU's own threshold flag is set")
REMAP_PENDING: Final = Check(id="gpu_row_remap_pending", failure_class=FailureClass.GPU_ECC_UNCORRECTABLE, scope="gpu",
    when="periodic", calm_looks=1,
    what="a memory row waits for a reset to be remapped",
    source="nvmlDeviceGetRemappedRows",
    # NVIDIA's memory error guide: programs go on unharmed and new ones may start, since the page is out of use already.
    # Peers stop a running job for it; we have it repaired before the next one.
    threshold="pending (before a job; else a warning)")
REMAP_FAILED: Final = Check(id="gpu_row_remap_failed", failure_class=FailureClass.GPU_ECC_UNCORRECTABLE, scope="gpu",
    when="periodic",
    what="remapping a memory row failed: the GPU must be replaced",
    source="nvmlDeviceGetRemappedRows",
    threshold="failed")
HW_SLOWDOWN: Final = Check(id="gpu_hw_slowdown", failure_class=FailureClass.GPU_THERMAL_POWER, scope="gpu",
    what="the hardware slows the GPU down (heat or power brake), and it lasts",
    source="nvmlDeviceGetCurrentClocksEventReasons",
    threshold="in the share {share} of the looks of {for_s} s, at work",
    limits={"share": 0.6, "for_s": 600})
SW_THERMAL: Final = Check(id="gpu_sw_thermal_slowdown", failure_class=FailureClass.GPU_THERMAL_POWER, scope="gpu",
    what="the driver slows the GPU down because of heat, and it lasts",
    source="nvmlDeviceGetCurrentClocksEventReasons",
    threshold="in the share {share} of the looks of {for_s} s, at work (a warning)",
    limits={"share": 0.6, "for_s": 600})
TEMPERATURE: Final = Check(id="gpu_temperature", failure_class=FailureClass.GPU_THERMAL_POWER, scope="gpu", looks=3,
    what="the GPU is too hot",
    source="nvmlDeviceGetTemperature, nvmlDeviceGetTemperatureThreshold",
    threshold="above its own operating maximum is a warning, from its slowdown temperature on critical")
NVLINK: Final = Check(id="gpu_nvlink_inactive", failure_class=FailureClass.NVLINK_ERROR, scope="gpu",
    when="periodic", looks=2,
    what="NVLinks are inactive",
    source="nvmlDeviceGetNvLinkState",
    threshold="a link that was active since the node was booted, or fewer links than most GPUs of this model here have")
NVLINK_ERRORS: Final = Check(id="gpu_nvlink_errors", failure_class=FailureClass.NVLINK_ERROR, scope="gpu",
    when="periodic",
    what="NVLink errors",
    source="NVML fields 161-163, 206-208, 214-215 by link (38, 45, 52, 59 where it counts only sums)",
    # Replays are how a link lives with noise: on PAM4 links single ones are normal, so they are judged by rate. A
    # recovery retrains the link and stalls traffic; one an hour is told, never acted on.
    threshold="CRC {crc_per_s}/s or {recoveries} recoveries in 10 min; warning: {replays_per_s} replays/s, "
    "a recovery, a malformed or lost packet",
    limits={"crc_per_s": 100, "recoveries": 10, "replays_per_s": 10})
FABRIC: Final = Check(id="gpu_fabric", failure_class=FailureClass.NVLINK_ERROR, scope="gpu", when="periodic", looks=2,
    what="the GPU is not part of the NVLink fabric, or its route is unhealthy",
    source="nvmlDeviceGetGpuFabricInfoV",
    threshold="registration failed or lost, or in progress (before a job; else a warning); "
    "a health bit of bandwidth, route or configuration")
PCIE_REPLAYS: Final = Check(id="gpu_pcie_replays", failure_class=FailureClass.PCIE_ERROR, scope="gpu",
    what="PCIe replays",
    source="NVML field 94 (PCIe replay counter)",
    threshold="{per_min} a minute for each lane and GT/s is a warning, {storm} times as much critical",
    limits={"per_min": 0.06, "storm": 20})
PCIE_GENERATION: Final = Check(id="gpu_pcie_generation", failure_class=FailureClass.PCIE_ERROR, scope="gpu",
    when="periodic", looks=3,
    what="the GPU's PCIe link is slow under load",
    source="nvmlDeviceGetCurrPcieLinkGeneration",
    threshold="below what it, or most GPUs of this model here, had since the node was booted, at {utilization} % "
    "utilization (a warning; an idle link slows down by itself)",
    limits={"utilization": 50})
PROCESSES: Final = Check(id="gpu_processes_foreign", failure_class=FailureClass.GPU_DRIVER, scope="gpu",
    when="periodic", looks=2,
    what="a process that is not the job's holds memory of the GPU",
    source="nvmlDeviceGetComputeRunningProcesses_v3, /proc",
    threshold="{memory_mib} MiB of a GPU on which a rank runs (a warning); before a job: of any GPU",
    limits={"memory_mib": 100})
ZOMBIE_MEMORY: Final = Check(id="gpu_memory_zombie", failure_class=FailureClass.GPU_DRIVER, scope="gpu",
    when="periodic", looks=3,
    what="GPU memory is held and no process has it",
    source="nvmlDeviceGetMemoryInfo_v2, nvmlDeviceGetComputeRunningProcesses_v3",
    # Peers use 15 MiB with the older call, which counts the driver's own share as used; drivers keep up to some
    # hundred MiB of their own (display, ECC pages), so 500.
    threshold="{memory_mib} MiB",
    limits={"memory_mib": 500})
MODES: Final = Check(id="gpu_modes", failure_class=FailureClass.GPU_DRIVER, scope="gpu", when="preflight",
    what="the GPU cannot be used as a whole",
    source="nvmlDeviceGetComputeMode, nvmlDeviceGetMigMode",
    threshold="compute mode prohibits programs; MIG on or about to change is a warning")
CLOCKS: Final = Check(id="gpu_application_clocks", failure_class=FailureClass.STRAGGLER_OR_SLOW, scope="gpu",
    when="preflight",
    what="application clocks are set below the GPU's own",
    source="nvmlDeviceGetApplicationsClock, nvmlDeviceGetDefaultApplicationsClock",
    threshold="below the default, or below {sm_mhz} (SM) or {memory_mhz} MHz (memory) of the site (a warning)",
    limits={"sm_mhz": 0, "memory_mhz": 0})
# fmt: on
