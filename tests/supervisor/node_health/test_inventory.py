"""What a node is made of, from trees as they are captured and from this machine."""

from pathlib import Path

import pytest

from supervisor.node_health.contract import JobInfo, ProbeContext
from supervisor.node_health.machine import driver_version, inventory, packages

from .tree import plant

PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
    "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n"
)
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15  Release Build  (dvs-builder@U22)  Fri\n"
    "GCC version:  gcc version 13.2.0\n"
)
CPUINFO = (
    "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) Platinum 8480C\n"
    "microcode\t: 0x2b000571\n\nprocessor\t: 1\nmodel name\t: other\n"
)
NODE = {
    "proc/sys/kernel/osrelease": "5.15.0-1071-nvidia\n",
    "proc/driver/nvidia/version": PROPRIETARY,
    "proc/meminfo": "MemTotal:       2113463756 kB\nMemFree:        2000000000 kB\n",
    "proc/cpuinfo": CPUINFO,
    "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.4 LTS"\n',
    "sys/module/mlx5_core/version": "23.10-1.1.9\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    **{
        f"sys/class/infiniband/mlx5_{n}/{name}": text
        for n in range(3)
        for name, text in (
            ("fw_ver", "28.39.1002\n" if n else "22.36.1010\n"),
            ("board_id", "MT_0000000838\n" if n else "MT_0000000359\n"),
        )
    },
    **{
        f"sys/bus/pci/devices/0000:{bus}:00.0/{name}": f"{text}\n"
        for bus, device, kind in (("1b", "2330", "030200"), ("43", "2330", "030200"), ("05", "22a3", "068000"))
        for name, text in (("vendor", "0x10de"), ("device", f"0x{device}"), ("class", f"0x{kind}"))
    },
}


def tree(folder: Path, files: dict[str, str]) -> ProbeContext:
    return ProbeContext(root=plant(folder, files))


def test_a_node_of_two_gpus(tmp_path: Path) -> None:
    place = tree(tmp_path, NODE)
    library = tmp_path / "usr/lib/x86_64-linux-gnu"
    library.mkdir(parents=True)
    (library / "libcuda.so.1").symlink_to("libcuda.so.535.129.03")
    (tmp_path / "usr/local").mkdir()
    (tmp_path / "usr/local/cuda").symlink_to("/etc/alternatives/cuda")
    (tmp_path / "etc/alternatives").mkdir()
    (tmp_path / "etc/alternatives/cuda").symlink_to("/usr/local/cuda-12.4")
    assert inventory(place) == {
        "cuda_toolkit": "12.4",
        "cpu": "Intel(R) Xeon(R) Platinum 8480C",
        "cuda_library": "535.129.03",
        "driver": "535.129.03",
        "driver_kind": "proprietary",
        "gpus": "2 x 10de:2330",
        "infiniband": "1 x MT_0000000359 22.36.1010, 2 x MT_0000000838 28.39.1002",
        "kernel": "5.15.0-1071-nvidia",
        "memory_gib": "2015.6",
        "microcode": "0x2b000571",
        "ofed": "23.10-1.1.9",
        "os": "Ubuntu 22.04.4 LTS",
        "thp": "madvise",
    }


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (PROPRIETARY, "535.129.03"),
        (OPEN, "570.86.15"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module 390.48 Thu Mar 22 00:42:57 PDT 2018\n", "390.48"),
        ("garbage", ""),
        ("", ""),
    ],
)
def test_the_driver(tmp_path: Path, text: str, version: str) -> None:
    assert driver_version(tree(tmp_path, {"proc/driver/nvidia/version": text})) == version


def test_an_empty_tree_has_nothing(tmp_path: Path) -> None:
    assert inventory(ProbeContext(root=tmp_path)) == {}


def test_arm_names_implementer_and_part(tmp_path: Path) -> None:
    text = "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd4f\n\nprocessor\t: 1\n"
    assert inventory(tree(tmp_path, {"proc/cpuinfo": text})) == {"cpu": "0x41 0xd4f"}


def test_packages_of_the_training_environment(tmp_path: Path) -> None:
    place = tree(
        tmp_path,
        {
            "opt/venv/pyvenv.cfg": "home = /usr/bin\ninclude-system-site-packages = true\nversion = 3.10.12\n",
            "opt/venv/lib/python3.10/site-packages/torch-2.4.0+cu121.dist-info/METADATA": "",
            "opt/venv/lib/python3.10/site-packages/nvidia_nccl_cu12-2.20.5.dist-info/METADATA": "",
            "opt/venv/lib/python3.10/site-packages/torchvision-0.19.0.dist-info/METADATA": "",
            "usr/local/lib/python3.10/dist-packages/torch-1.0.dist-info/METADATA": "",
            "usr/local/lib/python3.10/dist-packages/transformer_engine-1.7.0+4e7caa1.dist-info/METADATA": "",
            "usr/lib/python3/dist-packages/numpy-1.21.5.egg-info/PKG-INFO": "",
        },
    )
    assert packages(place, "/opt/venv/bin/python") == {
        "torch": "2.4.0+cu121",
        "nccl": "2.20.5",
        "transformer_engine": "1.7.0+4e7caa1",
        "numpy": "1.21.5",
    }
    assert packages(place, "") == {}
    assert packages(place, "/nowhere/bin/python") == {}


def test_this_machine() -> None:
    import sys

    found = inventory(ProbeContext(job=JobInfo(python=sys.executable)))
    assert {"kernel", "cpu", "memory_gib"} <= set(found)
    assert all(value and len(value) <= 200 for value in found.values())
