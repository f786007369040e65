"""One rank as seen from outside: what it wrote last is read before its end is told."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from diagnosis import rules
from diagnosis.signals import RankClock
from supervisor.agent.ranks import (
    BACKLOG_BYTES,
    CHUNK_BYTES,
    LAST_READS,
    BeaconFile,
    ClockReading,
    ClockWindow,
    OutputTail,
    RankTracker,
    Stream,
    last_bytes,
    parse,
    read_streams,
)
from supervisor.keeper_client import WorkerProcess
from supervisor.paths import LocalPaths


@pytest.fixture
def make_probe(tmp_path: Path) -> Callable[[], tuple[RankTracker, Path]]:
    def make() -> tuple[RankTracker, Path]:
        path = tmp_path / "rank0.out"
        path.touch()
        worker = WorkerProcess(attempt=1, rank=0, local_rank=0, pid=os.getpid(), start_time=1, started_at=1.0)
        stream = Stream(rank=0, local_rank=0, stream="out", path=str(path))
        return RankTracker(worker, LocalPaths(str(tmp_path)), [stream], rules.default(), {}), path

    return make


def end(probe: RankTracker) -> None:
    probe.worker = msgspec.structs.replace(probe.worker, status=9, ended_at=2.0, order=0)


def test_all_that_a_rank_has_written_is_read_when_it_has_ended(
    make_probe: Callable[[], tuple[RankTracker, Path]],
) -> None:
    probe, path = make_probe()
    line = "step {} loss 2.5 and some more words\n"
    path.write_text("".join(line.format(step) for step in range(1, 3 * CHUNK_BYTES // len(line))))
    last = 3 * CHUNK_BYTES // len(line) - 1
    _, more = probe.look()
    assert more
    end(probe)
    _, more = probe.look()
    assert not more
    assert probe.sample().step == last


def test_of_very_much_output_the_end_is_read(make_probe: Callable[[], tuple[RankTracker, Path]]) -> None:
    probe, path = make_probe()
    path.write_text("step 1 loss 2.5\nstep 2 loss 2.5\n")
    probe.look()
    with path.open("a") as file:
        file.write("words that mean nothing\n" * ((LAST_READS + 4) * CHUNK_BYTES // 24) + "step 51 loss 2.5\n")
    end(probe)
    probe.look()
    assert probe.sample().step == 51


def test_a_last_line_without_an_end_is_read(make_probe: Callable[[], tuple[RankTracker, Path]]) -> None:
    probe, path = make_probe()
    path.write_text("step 1 loss 2.5\nstep 2 loss 2.5\nstep 3 loss 2.5\nOSError: [Errno 28] No space left on device")
    found, _ = probe.look()
    assert not found
    end(probe)
    found, _ = probe.look()
    assert [one.rule for one in found] == ["disk_full"]
    assert not probe.look()[0]


def test_nan_in_a_progress_bar_is_found_while_the_bar_is_drawn(
    make_probe: Callable[[], tuple[RankTracker, Path]],
) -> None:
    probe, path = make_probe()
    bars = [f"\rEpoch 0: {n}%|# | {n}/100 [00:01<00:09, 10.0it/s, v_num=0, train_loss=nan.0]" for n in range(1, 9)]
    path.write_text("".join(bars))
    found, _ = probe.look()
    assert {one.rule for one in found} == {"nan_loss"}
    assert probe.sample().bad_reports >= 6
    assert probe.sample().bad_since is not None


def test_a_spike_in_the_output_and_in_the_attempt_after_it(
    make_probe: Callable[[], tuple[RankTracker, Path]],
) -> None:
    """The next attempt begins shortly before the spike: what is usual is known from the one before."""
    probe, path = make_probe()
    losses = [2.0 + 0.01 * (step % 7) for step in range(1, 61)]
    path.write_text("".join(f"step {step} loss {loss}\n" for step, loss in enumerate(losses, 1)))
    probe.look()
    assert probe.sample().watches_loss
    assert (probe.sample().loss, probe.sample().loss_step) == (losses[-1], 60)
    assert probe.sample().loss_alarm is None
    spike = "".join(f"step {step} loss 19.{step}\n" for step in range(61, 72))
    with open(path, "a") as file:
        file.write(spike)
    probe.look()
    alarm = probe.sample().loss_alarm
    assert alarm is not None
    assert (alarm.kind, alarm.step) == ("spike", 61)
    again, path = make_probe()
    path.write_text("")
    again.go_on_from(probe.curves)
    again.look()
    assert again.sample().loss_alarm is None
    assert again.sample().loss is None  # that was another attempt's
    for step in range(51, 61):
        with open(path, "a") as file:
            file.write(f"step {step} loss 2.0{step % 7}\n")
        again.look()
    with open(path, "a") as file:
        file.write(spike)
    again.look()
    assert again.sample().loss_alarm == alarm


def test_losses_that_a_script_tells_by_its_beacon(
    make_probe: Callable[[], tuple[RankTracker, Path]], tmp_path: Path
) -> None:
    probe, _ = make_probe()
    path = LocalPaths(str(tmp_path)).rank_file(1, 0, "beacon")
    path.parent.mkdir(parents=True, exist_ok=True)
    for told, losses in [(2, "[[1,2.0],[2,null]]"), (2, "[[1,2.0],[2,null]]"), (9, "[[8,null],[9,null]]")]:
        path.write_bytes(beacon(b'{"step":4,"losses_seen":%d,"losses":%s}' % (told, losses.encode())))
        assert probe.sample().loss_alarm is None
        probe.look()
    sample = probe.sample()
    assert (sample.bad_reports, sample.bad_since) == (3, 2)
    assert sample.loss_alarm is not None
    assert (sample.loss_alarm.kind, sample.loss_alarm.step, sample.loss_alarm.interval) == ("nan", 2, 1)
    path.write_bytes(beacon(b'{"losses_seen":13,"losses":[[10,2.0],[20,null],[21,null],[22,null]]}'))
    probe.look()
    assert probe.sample().loss_alarm is not None
    assert probe.sample().loss_alarm.interval == 10, "it began somewhere between 10 and 20"


def beacon(payload: bytes, sequence: int = 2) -> bytes:
    return struct.pack("<8sIIddI", b"UBEACON1", sequence, 42, 1.0, 2.0, len(payload)) + payload + bytes(100)


def test_a_beacon_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rank0.beacon"
    reader = BeaconFile(path)
    assert reader.read() is None
    path.write_bytes(beacon(b'{"groups":{"0":[7,6]},"step":12}'))
    seen = reader.read()
    assert (seen.groups, seen.step, seen.monotonic) == ({"0": (7, 6)}, 12, 2.0)
    assert parse(beacon(b"{}", sequence=3)) is None
    assert parse(beacon(b'{"groups":')) is None
    assert parse(b"") is None
    assert parse(bytes(4096)) is None
    reader.close()


def page(*figures: float) -> bytes:
    return beacon(b"{}").ljust(4040, b"\0")[:4040] + struct.pack("=6d", *figures).ljust(56, b"\0")


@pytest.mark.parametrize(
    ("data", "read"),
    [
        (page(12, 100.5, 0.25, 24, 3.5, 48), ClockReading(12, 100.5, 0.25, 24, 3.5, 48)),
        (page(0, 0, 0, 0, 0, 0), ClockReading()),
        (page(float("nan"), 1, 1, 1, 1, 1), ClockReading()),
        (page(1, float("inf"), 1, 1, 1, 1), ClockReading()),
        (page(-1, 1, 1, 1, 1, 1), ClockReading()),
        (beacon(b"{}"), ClockReading()),
    ],
)
def test_the_figures_of_the_step_clock_are_numbers_or_nothing(data: bytes, read: ClockReading) -> None:
    found = parse(data)
    assert found is not None
    assert found.clock == read


def test_the_step_clock_over_half_a_minute() -> None:
    """A slow beginning counts until it is long ago; a rank that stands still goes on waiting."""
    window = ClockWindow()
    window.add(0.0, ClockReading(), None)
    assert window.sample(0.0) is None
    for second in range(1, 41):
        steps = second * 2
        window.add(float(second), ClockReading(steps, second - 0.1, 0.5, steps, second * 0.25, steps), None)
        if second == 2:
            assert window.sample(2.0) == RankClock(steps=4, age_s=0.1, step_s=None, slowest_s=0.5)
    assert window.sample(40.0) == RankClock(steps=80, age_s=0.1, step_s=0.5, slowest_s=0.5, input_share=0.25)
    assert window.sample(45.0) == RankClock(steps=80, age_s=5.1, step_s=0.5, slowest_s=0.5, input_share=0.215)


def test_a_compiled_optimizer_has_times_and_no_steps_and_other_loaders_no_share() -> None:
    window = ClockWindow()
    window.add(0.0, ClockReading(at=0.0), None)
    window.add(10.0, ClockReading(at=9.5), None)
    assert window.sample(10.0) == RankClock(steps=0, age_s=0.5)


def test_the_clocks_step_is_never_further_than_the_next_line() -> None:
    """An optimizer that makes a second step in every 16th, as regularizers do: the ratio is nearly 1."""
    window, told = ClockWindow(), 0
    for step in range(4001):
        told = step // 100 * 100
        window.add(step / 10, ClockReading(step + step // 16, step / 10), told or None)
        sample = window.sample(step / 10)
        if sample is not None and sample.step is not None:
            assert told <= sample.step <= told + 100
    sample = window.sample(400.0)
    assert sample is not None
    assert sample.step is not None


def test_the_step_between_two_lines(make_probe: Callable[[], tuple[RankTracker, Path]], tmp_path: Path) -> None:
    """The output tells every tenth step of a run that has resumed at 400."""
    probe, output = make_probe()
    path = LocalPaths(str(tmp_path)).rank_file(1, 0, "beacon")
    path.parent.mkdir(parents=True, exist_ok=True)
    for count in range(1, 58):
        path.write_bytes(page(count, 1.0 + count, 0.5, count, 0, 0))
        if not count % 10:
            with output.open("a") as file:
                file.write(f"step {400 + count} loss 2.5\n")
        probe.look()
    sample = probe.sample()
    assert sample.clock is not None
    assert (sample.step, sample.clock.step, sample.clock.steps) == (450, 457, 57)


def test_a_step_of_the_clock_is_progress(make_probe: Callable[[], tuple[RankTracker, Path]], tmp_path: Path) -> None:
    probe, _ = make_probe()
    path = LocalPaths(str(tmp_path)).rank_file(1, 0, "beacon")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(page(0, 0, 0, 0, 0, 0))
    probe.look()
    assert not probe.shows_progress
    at = time.monotonic()
    path.write_bytes(page(3, at, 0, 3, 0, 0))
    probe.look()
    sample = probe.sample()
    assert probe.shows_progress
    assert sample.clock is not None
    assert (sample.clock.steps, sample.step) == (3, None)
    assert sample.moved_age_s <= time.monotonic() - at + 0.001


def test_output_is_followed_over_truncation_and_a_huge_backlog(tmp_path: Path) -> None:
    path = tmp_path / "rank0.out"
    tail = OutputTail(str(path))
    assert tail.read() == b""
    path.write_bytes(b"one\n")
    assert tail.read() == b"one\n"
    assert tail.read() == b""
    path.write_bytes(b"2\n")
    assert tail.read() == b"2\n"
    with open(path, "ab") as file:
        file.truncate(BACKLOG_BYTES * 2)
        file.seek(0, os.SEEK_END)
        file.write(b"end\n")
    pieces = b""
    while piece := tail.read():
        pieces += piece
    assert pieces.endswith(b"end\n")
    assert tail.skipped_bytes > BACKLOG_BYTES
    assert last_bytes(str(path), 4) == b"end\n"
    assert last_bytes(str(tmp_path / "absent")) == b""
    tail.close()


def test_a_missing_or_damaged_streams_file_gives_no_streams(tmp_path: Path) -> None:
    assert read_streams(tmp_path / "streams.json") == ()
    (tmp_path / "streams.json").write_bytes(b'[{"rank":1,')
    assert read_streams(tmp_path / "streams.json") == ()
