"""Snapshots in memory: what is kept, what a kill leaves, what is refused."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery import snapshot_memory, worker
from tests.conftest import Later

torch = Later("torch")
snapshot = Later("recovery.snapshot")
"""It imports torch."""

Restart = Callable[..., None]


@pytest.fixture(autouse=True)
def slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[snapshot_memory.Slot]]:
    """As `unbroken run` gives them to a rank: alone in its job, in attempt 1."""
    made = snapshot_memory.make_slots(1)
    paths = snapshot_memory.addresses(made)
    monkeypatch.setenv(snapshot_memory.PID_VARIABLE, "")
    monkeypatch.delenv(snapshot_memory.PID_VARIABLE)
    for name, value in {"FILES": ":".join(paths), "ATTEMPT": "1"}.items():
        key = snapshot_memory.FILES_VARIABLE if name == "FILES" else "UNBROKEN_ATTEMPT"
        monkeypatch.setenv(key, value)
    monkeypatch.delenv(snapshot_memory.CHOSEN_VARIABLE, raising=False)
    monkeypatch.setattr("recovery.snapshot._said", set())
    forget(monkeypatch)
    opened = [snapshot_memory.Slot(path) for path in paths]
    yield opened
    if snapshot._memory is not None:
        snapshot._memory.stop_sums()
    for slot in opened:
        slot.close()
    for descriptor in made:
        os.close(descriptor)


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Restart:
    """The rank is killed, and the next attempt starts from this step (None: from none)."""

    def again(attempt: int, start: tuple[int, int] | None = None) -> None:
        if snapshot._memory is not None:
            snapshot._memory.stop_sums()
        forget(monkeypatch)
        monkeypatch.setenv("UNBROKEN_ATTEMPT", str(attempt))
        if start is not None:
            monkeypatch.setenv(snapshot_memory.CHOSEN_VARIABLE, f"{start[0]}:{start[1]}")

    return again


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recovery.snapshot._memory", None)
    monkeypatch.setattr("recovery.snapshot._owner", 0)


def state_of(step: int, size: int = 1000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"weight": torch.randn(size, 3, generator=generator), "half": torch.full((7,), step).bfloat16()},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step)), "m": torch.randn(size, generator=generator)}}},
        "groups": [{"lr": 0.1 * step, "betas": (0.9, 0.99), "empty": torch.zeros(0, 4)}],
        "turned": torch.arange(12).view(3, 4).t(),
        "mask": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "step": step,
        "rng": b"\x00\x01",
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and bool(torch.equal(one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def steps(slots: list[snapshot_memory.Slot]) -> set[int]:
    return {header.step for slot in slots if (header := slot.header()) is not None}


def test_what_is_saved_comes_back(restart: Restart, slots: list[snapshot_memory.Slot]) -> None:
    for step in (10, 20, 30):
        assert snapshot.save(state_of(step), step)
    assert steps(slots) == {20, 30}
    for step in (20, 30):
        restart(2, (1, step))
        assert snapshot.step() == step
        assert equal(snapshot.load(), state_of(step))


def test_outside_of_a_job_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(snapshot_memory.FILES_VARIABLE)
    assert not snapshot.save(state_of(1), 1)
    assert snapshot.load() is None
    assert snapshot.step() is None
    assert equal(snapshot.Stager().stage(state_of(1)), state_of(1))


def test_a_staged_state_is_a_copy_and_its_slot_is_not_written_while_it_is_read(
    slots: list[snapshot_memory.Slot], capfd: pytest.CaptureFixture[str]
) -> None:
    stager, state = snapshot.Stager(), state_of(10)
    first = stager.stage(state)
    state["model"]["weight"].zero_()
    assert equal(first, state_of(10))
    second = stager.stage(state_of(20))
    third = stager.stage(state_of(30))  # both are still read: this one is a plain copy
    assert (steps(slots), equal(third, state_of(30))) == ({10, 20}, True)
    assert "still under way" in capfd.readouterr().err
    del first
    fourth = stager.stage(state_of(40))
    assert steps(slots) == {20, 40}
    assert equal(second, state_of(20))
    assert equal(fourth, state_of(40))


def test_the_step_is_found(slots: list[snapshot_memory.Slot]) -> None:
    stager = snapshot.Stager()
    stager.stage({"train_state": {"step": torch.tensor(3)}, "w": torch.ones(2)})
    stager.at(4).stage({"w": torch.ones(2)})
    assert steps(slots) == {3, 4}
    worker.heartbeat(5)
    stager.stage({"w": torch.ones(2)})
    assert steps(slots) == {4, 5}


def test_the_state_may_change_its_size(restart: Restart, slots: list[snapshot_memory.Slot]) -> None:
    for step, size in ((1, 1000), (2, 500_000), (3, 10), (4, 10), (5, 300_000)):
        assert snapshot.save(state_of(step, size), step)
        for attempt_step in steps(slots):
            restart(1, (1, attempt_step))
            assert snapshot.load()["step"] == attempt_step
    assert max(slot.allocated_bytes for slot in slots) < 30e6


def test_the_snapshot_from_which_a_run_came_back_is_written_over_last(
    restart: Restart, slots: list[snapshot_memory.Slot]
) -> None:
    """This rank has a newer one than the others had: that one goes."""
    snapshot.save(state_of(10), 10)
    snapshot.save(state_of(20), 20)
    restart(2, (1, 10))
    assert snapshot.load()["step"] == 10
    snapshot.save(state_of(15), 15)
    assert steps(slots) == {10, 15}


def test_one_snapshot_of_a_step(slots: list[snapshot_memory.Slot]) -> None:
    assert snapshot.save(state_of(10), 10)
    assert not snapshot.save({"other": torch.ones(3)}, 10)
    assert steps(slots) == {10}


def test_a_script_that_goes_back_leaves_no_later_step(slots: list[snapshot_memory.Slot]) -> None:
    for step in (10, 20, 12):
        assert snapshot.save(state_of(step), step)
    assert steps(slots) == {12}


def test_no_room_is_one_sentence_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch, slots: list[snapshot_memory.Slot], capfd: pytest.CaptureFixture[str]
) -> None:
    assert snapshot.save(state_of(1), 1)
    monkeypatch.setattr(snapshot_memory, "free_bytes", lambda: 10 << 20)
    for step in (2, 3):
        assert not snapshot.save(state_of(step, 1_000_000), step)
    assert steps(slots) == {1}
    assert capfd.readouterr().err.count("two copies of the state need") == 1
    assert equal(snapshot.Stager().stage(state_of(4, 1_000_000)), state_of(4, 1_000_000))
    assert sum(slot.allocated_bytes for slot in slots) < 1 << 20


def test_a_limit_on_files_is_one_sentence_and_nothing_is_lost(
    slots: list[snapshot_memory.Slot], capfd: pytest.CaptureFixture[str]
) -> None:
    assert snapshot.save(state_of(1), 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        kept = [snapshot.save(state_of(step, 1_000_000), step) for step in (2, 3)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert kept == [False, False]
    assert steps(slots) == {1}
    assert capfd.readouterr().err.count("ulimit -f") == 1
    assert snapshot.save(state_of(4), 4)


@pytest.mark.parametrize(
    "state", [lambda: {"w": torch.ones(3).to_sparse()}, lambda: {"w": torch.ones(3), "f": lambda: None}]
)
def test_what_cannot_be_kept_is_refused(state: Callable[[], Any], slots: list[snapshot_memory.Slot]) -> None:
    assert snapshot.save(state_of(1), 1)
    assert not snapshot.save(state(), 2)
    assert 1 in steps(slots)


def test_a_snapshot_that_changed_afterwards_is_refused_once(
    restart: Restart, slots: list[snapshot_memory.Slot]
) -> None:
    snapshot.save(state_of(10), 10)
    assert snapshot._memory is not None
    snapshot._memory.summing.join()
    header = slots[0].header()
    assert header is not None
    with open(slots[0].path, "r+b") as file:
        file.seek(snapshot_memory.DATA_AT + header.size_bytes // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))
    restart(2, (1, 10))
    with pytest.raises(snapshot.SnapshotError):
        snapshot.load()
    assert steps(slots) == set()


def test_another_ranks_snapshot_is_refused(
    restart: Restart, monkeypatch: pytest.MonkeyPatch, slots: list[snapshot_memory.Slot]
) -> None:
    snapshot.save(state_of(10), 10)
    restart(2, (1, 10))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(snapshot.SnapshotError):
        snapshot.load()
    assert steps(slots) == set()


class Settings:
    """Of a script: a snapshot has one."""


def test_a_snapshot_that_cannot_be_unpickled_is_not_chosen_again(
    restart: Restart, monkeypatch: pytest.MonkeyPatch, slots: list[snapshot_memory.Slot]
) -> None:
    snapshot.save({"settings": Settings(), "step": 10}, 10)
    snapshot.save({"step": 20}, 20)
    restart(2, (1, 10))
    monkeypatch.delattr(f"{__name__}.Settings")  # the script was changed
    with pytest.raises(snapshot.SnapshotError):
        snapshot.load()
    assert steps(slots) == {20}


def test_a_snapshot_for_which_no_device_has_room_is_not_chosen_again(
    restart: Restart, slots: list[snapshot_memory.Slot]
) -> None:
    snapshot.save(state_of(10), 10)
    restart(2, (1, 10))
    with pytest.raises(snapshot.SnapshotError):
        snapshot.load(map_location="no-such-device")
    assert steps(slots) == set()


@pytest.mark.parametrize("word", ["", "#0123456789abcdef", "#"])
def test_what_is_not_our_memory_is_neither_written_nor_voided(
    word: str, tmp_path: Path, restart: Restart, monkeypatch: pytest.MonkeyPatch, slots: list[snapshot_memory.Slot]
) -> None:
    """Another process has that number now, or another namespace or node is meant."""
    snapshot.save(state_of(10), 10)
    kept = Path(slots[0].path).read_bytes()
    precious = [tmp_path / "one", tmp_path / "two"]
    for path in precious:
        path.write_bytes(kept)
    with precious[0].open("rb") as one, precious[1].open("rb") as two:
        files = ":".join(f"/proc/{os.getpid()}/fd/{file.fileno()}{word}" for file in (one, two))
        monkeypatch.setenv(snapshot_memory.FILES_VARIABLE, files)
        restart(2, (1, 10))
        assert not snapshot.save(state_of(20), 20)
        with pytest.raises(snapshot.SnapshotError):
            snapshot.load()
    assert [path.read_bytes() == kept for path in precious] == [True, True]


def test_another_jobs_memory_is_refused(slots: list[snapshot_memory.Slot]) -> None:
    made = snapshot_memory.make_slots(1)
    own, others = snapshot_memory.addresses([made[0]])[0], slots[0].path
    snapshot_memory.Slot(own).close()
    with pytest.raises(OSError, match="not the memory"):
        snapshot_memory.Slot(f"{others}#{own.partition('#')[2]}")
    for descriptor in made:
        os.close(descriptor)


def test_a_pipe_or_a_device_is_never_opened(tmp_path: Path) -> None:
    """A FIFO without a writer would hold us up for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not the memory"):
        snapshot_memory.Slot(f"{tmp_path / 'pipe'}#0123456789abcdef")


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from recovery import snapshot
print(snapshot.save({"step": 20}, 20), snapshot.load())
"""


def test_what_a_rank_starts_leaves_its_snapshots_alone(restart: Restart, slots: list[snapshot_memory.Slot]) -> None:
    snapshot.save(state_of(10), 10)
    restart(2, (1, 10))
    root = str(Path(snapshot.__file__).parents[1])
    for variables in ({}, {"WORLD_SIZE": "2"}):
        run = [sys.executable, "-c", CHILD, root]
        child = subprocess.run(run, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
        assert child.stdout == "False None\n"
    pid = os.fork()
    if pid == 0:
        os._exit(int(snapshot.save(state_of(30), 30) or snapshot.load() is not None))
    assert os.waitpid(pid, 0)[1] == 0
    assert steps(slots) == {10}
    assert equal(snapshot.load(), state_of(10))


def test_a_rank_that_has_other_tensors_is_in_no_group_with_the_rest(slots: list[snapshot_memory.Slot]) -> None:
    """As where rank 0 begins to keep an average of its own: it is not compared with ranks that do not."""

    def group(state: dict[str, Any], step: int, replicas: Any) -> Any:
        assert snapshot.save(state, step, replicas=replicas)
        assert snapshot._memory is not None
        snapshot._memory.summing.join()
        newest = max(slots, key=lambda slot: header.sequence if (header := slot.header()) is not None else 0)
        header = newest.header()
        assert header is not None
        return newest.sums(header.sequence)["group"]

    state = state_of(1)
    before = group(state, 1, replicas=True)
    assert before
    assert group(state, 2, replicas=True) == before
    averaged = {**state, "average": torch.zeros(3)}
    assert group(averaged, 3, replicas=True) != before
    assert group({**state, "bytes": torch.zeros(3, dtype=torch.uint8)}, 4, replicas=True) == before
    assert group(state, 5, replicas=None) == ""


def test_digests_tell_replicas_apart(slots: list[snapshot_memory.Slot]) -> None:
    def digests(state: dict[str, Any], step: int) -> dict[str, str]:
        assert snapshot.save(state, step, replicas=True)
        assert snapshot._memory is not None
        snapshot._memory.summing.join()
        newest = max(slots, key=lambda slot: header.sequence if (header := slot.header()) is not None else 0)
        header = newest.header()
        assert header is not None
        found: dict[str, str] = newest.sums(header.sequence)["replicas"]
        return found

    state = state_of(1)
    first, again = digests(state, 1), digests(state, 2)
    state["model"]["weight"].view(torch.int32)[999, 2] ^= 1
    changed = digests(state, 3)
    assert first == again
    assert sum(first[name] != changed[name] for name in first) == 1


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from recovery import snapshot
base = torch.arange(2_000_000, dtype=torch.int64)
parts = [torch.ones(n % 50) for n in range(100)]
print("ready", flush=True)
for line in sys.stdin:                       # a start: from this step on
    pid = os.fork()
    if pid == 0:
        step = int(line)
        base += step
        while True:
            step += 1
            base += 1
            for part in parts:
                part.fill_(step)
            snapshot.save({"base": base, "parts": parts, "step": step}, step)
            os.write(1, f"{step}\\n".encode())
    os.write(1, f"pid {pid}\\n".encode())
    os.waitpid(pid, 0)
    os.write(1, b"ended\\n")
"""


KILLS = 40


def test_a_kill_at_any_moment_leaves_the_snapshot_before(
    slots: list[snapshot_memory.Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a rank that does nothing but save."""
    root = str(Path(snapshot.__file__).parents[1])
    chance = random.Random(0)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        done = 0
        torn = 0
        for _ in range(KILLS):
            print(done, file=process.stdin, flush=True)
            pid, saves = 0, 0
            while not pid or saves < 2:  # from then on it is in the middle of a save nearly all the time
                line = process.stdout.readline()
                if line.startswith("pid"):
                    pid = int(line.split()[1])
                else:
                    done, saves = int(line), saves + 1
            until = time.monotonic() + chance.uniform(0.0, 0.01)
            while time.monotonic() < until:
                pass
            os.kill(pid, signal.SIGKILL)
            while (line := process.stdout.readline()) != "ended\n":
                done = int(line)
            held = steps(slots)
            torn += len(held) < 2
            assert done in held or done + 1 in held or done == 0
            for step in held:
                monkeypatch.setenv(snapshot_memory.CHOSEN_VARIABLE, f"1:{step}")
                state = snapshot.load()
                assert state["step"] == step
                assert int(state["base"][0]) == step
                assert bool((state["base"].diff() == 1).all())
                assert all(bool((part == step).all()) for part in state["parts"])
            done = max(held, default=0)
        process.stdin.close()
    assert torn >= 1, "the kills hit no save"
    assert done > 2 * KILLS


def test_memory_of_control_groups_counts(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 90 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    for folder, limit in (("job/step", "max"), ("job", str(60 * 1024))):
        group = tmp_path / "cgroup" / folder
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text(str(50 * 1024))
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {8 * 1024}\nactive_file 0\n")
    found = snapshot_memory.free_bytes(str(tmp_path / "proc"), str(tmp_path / "cgroup"))
    assert found == 18 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    assert snapshot_memory.free_bytes(str(tmp_path / "proc"), str(tmp_path / "cgroup")) == 90 * 1024


@pytest.mark.parametrize(
    ("sequences", "keep", "expected"), [((0, 0), None, 0), ((3, 0), None, 1), ((3, 2), None, 1), ((3, 2), 1, 0)]
)
def test_the_slot_that_is_written_next(sequences: tuple[int, int], keep: int | None, expected: int) -> None:
    headers = [
        snapshot_memory.Header(number, 0, 1, 1, number, 0.0, 0, 0, 0, 0) if number else None for number in sequences
    ]
    assert snapshot_memory.next_slot(headers, keep) == expected
