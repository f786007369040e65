"""GPUs and InfiniBand ports for a machine that has none, as files: what the probes read is there to be read.

They lie over /sys/class and /sys/bus/pci/devices in a mount namespace of the measured command's own, beside what the
machine really has; nobody else sees them. Root only. What a real adapter's driver does when it is read is not in them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

CLASSES: Final = Path("/sys/class")
DEVICES: Final = Path("/sys/bus/pci/devices")
GPU_BUS, NIC_BUS = 0x10, 0x40
"""First bus numbers: the GPUs are where tests/fake_nvml says that its own are."""
_COUNTERS: Final = (
    "excessive_buffer_overrun_errors link_downed link_error_recovery local_link_integrity_errors port_rcv_errors "
    "port_rcv_data port_rcv_packets port_rcv_remote_physical_errors port_xmit_data port_xmit_discards port_xmit_wait "
    "symbol_error"
).split()
_HW_COUNTERS: Final = (
    "duplicate_request implied_nak_seq_err local_ack_timeout_err out_of_buffer out_of_sequence packet_seq_err "
    "req_transport_retries_exceeded rnr_nak_retry_err roce_adp_retrans roce_slow_restart rx_icrc_encapsulated"
).split()
_AER: Final = {
    "COR": "RxErr BadTLP BadDLLP Rollover Timeout NonFatalErr CorrIntErr HeaderOF",
    "NONFATAL": "DLP SDES TLP FCP CmpltTO CmpltAbrt UnxCmplt RxOF MalfTLP ECRC UnsupReq ACSViol",
    "FATAL": "DLP SDES TLP FCP CmpltTO CmpltAbrt UnxCmplt RxOF MalfTLP ECRC UnsupReq ACSViol",
}


def command(folder: Path, gpus: int, ports: int) -> list[str]:
    """What to put before a command so that it, and only it, sees so many of them. Makes the files below `folder`."""
    classes, devices = folder / "class", folder / "pci"
    _copy_links(CLASSES, classes)
    devices.mkdir(parents=True)
    for entry in DEVICES.iterdir() if DEVICES.is_dir() else ():
        (devices / entry.name).symlink_to(os.readlink(entry))
    for number in range(gpus):
        _function(folder, GPU_BUS + number, "0x030200", "0x10de", "0x2330")
    for number in range(ports):
        _adapter(classes / "infiniband" / f"mlx5_{number}", _function(folder, NIC_BUS + number, "0x020700"))
    script = 'mount --bind "$1" "$2" && mount --bind "$3" "$4" && shift 4 && exec "$@"'
    places = [str(classes), str(CLASSES), str(devices), str(DEVICES)]
    return ["unshare", "--mount", "sh", "-c", script, "sh", *places]


def _copy_links(source: Path, target: Path) -> None:
    """The links of /sys/class as they are: relative ones lead to the same devices from the same place."""
    for group in source.iterdir():
        (target / group.name).mkdir(parents=True)
        for entry in group.iterdir():
            if entry.is_symlink():
                (target / group.name / entry.name).symlink_to(os.readlink(entry))
            elif entry.is_file():
                (target / group.name / entry.name).touch()


def _function(folder: Path, bus: int, pci_class: str, vendor: str = "0x15b3", device: str = "0x1021") -> Path:
    """A PCI function in a slot of a root port of its own: both ends have links and AER counters."""
    port, address = f"0000:{bus + 0x80:02x}:01.0", f"0000:{bus:02x}:00.0"
    at = folder / "devices" / f"pci0000:{bus + 0x80:02x}" / port / address
    for path, name, kind, maker in ((at.parent, port, "0x060400", "0x8086"), (at, address, pci_class, vendor)):
        _write(path, {"class": kind, "vendor": maker, "device": device, "power/runtime_status": "active"})
        _write(path, dict.fromkeys(("current_link_width", "max_link_width"), "16"))
        _write(path, dict.fromkeys(("current_link_speed", "max_link_speed"), "32.0 GT/s PCIe"))
        for suffix, names in _AER.items():
            lines = [*(f"{error} 0" for error in names.split()), f"TOTAL_ERR_{suffix} 0"]
            _write(path, {f"aer_dev_{'correctable' if suffix == 'COR' else suffix.lower()}": "\n".join(lines)})
        (path / "config").write_bytes(bytes.fromhex(maker[4:] + maker[2:4]) + bytes(4094))
        (folder / "pci" / name).symlink_to(path)
    return at


def _adapter(at: Path, function: Path) -> None:
    """One ConnectX-7 with one NDR port."""
    _write(at, {"fw_ver": "28.39.1002", "board_id": "MT_0000000838", "hca_type": "MT4129", "node_type": "1: CA"})
    _write(at, {"sys_image_guid": f"a088:c203:00e5:{at.name.rpartition('_')[2]:0>4}"})
    port = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    _write(at / "ports/1", port)
    _write(at / "ports/1/counters", dict.fromkeys(_COUNTERS, "0"))
    _write(at / "ports/1/hw_counters", dict.fromkeys(_HW_COUNTERS, "0"))
    (at / "device").symlink_to(function)


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
