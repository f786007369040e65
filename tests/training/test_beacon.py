from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from supervisor.agent.ranks import BeaconFile
from supervisor.training import beacon


def recorder(**groups: tuple[int, int]) -> bytes:
    status = {
        name.lstrip("g"): {"last_enqueued_collective": last, "last_completed_collective": done}
        for name, (last, done) in groups.items()
    }
    return json.dumps({"version": "2.10", "pg_status": status}).encode()


def test_the_world_is_group_0_of_the_recorder_that_has_any() -> None:
    assert beacon.statuses([recorder(), recorder(g0=(7, 6))]) == {"0": [7, 6]}
    assert beacon.statuses([recorder(g0=(9, 8)), recorder(g0=(-1, -1))]) == {"0": [9, 8], "other 0": [-1, -1]}


def test_a_recorder_without_groups_and_counts_that_are_no_numbers_are_taken() -> None:
    assert beacon.statuses([b"{}", b'{"pg_status": {"1": {"last_enqueued_collective": null}}}']) == {"1": [-1, -1]}


def test_groups_are_bounded() -> None:
    many = {f"g{number}": (number, number) for number in range(40)}

    assert len(beacon.statuses([recorder(**many), recorder(**many)])) == 32


@pytest.mark.parametrize(
    ("ranks", "told"),
    [([1, 0], "[0, 1]"), (range(0, 4096, 8), "[0-4088:8]"), ([*range(20), 40], ""), (range(16), str([*range(16)]))],
)
def test_members_are_told_in_few_bytes(ranks: Iterable[int], told: str) -> None:
    assert beacon.listed(ranks) == told


def test_a_beacon_tells_who_is_in_which_group(tmp_path: Path) -> None:
    """gloo's flight recorder does not."""
    pytest.importorskip("torch")
    code = (
        "import sys, torch.distributed as dist; from supervisor.training.beacon import Beacon\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "one = Beacon(sys.argv[1], sys.argv[1] + 's'); one.beat(); dist.new_group(); one.beat()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], check=True, timeout=300)
    assert BeaconFile(tmp_path / "b").read().members == {"0": "[0]", "1": "[0]"}


def test_losses_that_the_script_tells(tmp_path: Path) -> None:
    """The newest few; one that is no number is told as none; what is no loss is left out."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    one = beacon.Beacon(str(tmp_path / "b"), str(tmp_path / "s"), reader)
    os.write(writer, b"step 1 loss 2.5\nstep 2 loss nan\nstep 3 loss 1e999\nstep 4 loss what\nstep 5\n")
    one.beat()
    told = BeaconFile(tmp_path / "b").read()
    assert (told.step, told.losses, told.losses_seen) == (5, ((1, 2.5), (2, None), (3, None)), 3)
    os.write(writer, b"".join(b"step %d loss 0.%d\n" % (step, step) for step in range(10, 100)))
    one.beat()
    told = BeaconFile(tmp_path / "b").read()
    assert len(told.losses) == beacon.LOSSES
    assert (told.losses[-1], told.losses_seen) == ((99, 0.99), 93)
    os.close(writer)
    os.close(reader)


@pytest.mark.root
def test_on_a_full_disk_there_is_no_beacon_and_the_script_lives(tmp_path: Path) -> None:
    """Its page was made when it was first written: SIGBUS."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True, timeout=10)
    try:
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "filler").write_bytes(bytes(2 << 20))
        code = (
            "import sys; from supervisor.training.beacon import Beacon\n"
            "try: Beacon(sys.argv[1], sys.argv[1] + 's').write(b'{}')\n"
            "except OSError as error: print(error.strerror)"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "b")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (0, "No space left on device\n")
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True, timeout=10)
