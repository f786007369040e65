from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.paths import LocalPaths
from supervisor.run.terminal import HOLD_S, Terminal, _Stream


class Screen:
    """A terminal on two pipes, and the ranks' files that it shows."""

    def __init__(self, folder: Path) -> None:
        self.paths = LocalPaths(folder)
        self.out, out = os.pipe()
        self.err, err = os.pipe()
        self.write_ends = [out, err]
        self.terminal = Terminal(self.paths, out=out, err=err)
        for end in (self.out, self.err):
            os.set_blocking(end, False)

    def attempt(self, number: int, ranks: int = 1, terminal: bool = True) -> None:
        folder = self.paths.attempt(number)
        folder.mkdir(parents=True)
        streams = [
            {"rank": r, "local_rank": r, "stream": s, "path": str(folder / f"rank{r}.{s}"), "terminal": terminal}
            for r in range(ranks)
            for s in ("out", "err")
        ]
        for stream in streams:
            Path(str(stream["path"])).touch()
        self.paths.streams(number).write_text(json.dumps(streams))

    def write(self, text: str, attempt: int = 1, rank: int = 0, stream: str = "out") -> None:
        with open(self.paths.rank_file(attempt, rank, stream), "a") as file:
            file.write(text)

    def read(self, end: int | None = None) -> str:
        try:
            return os.read(self.out if end is None else end, 1 << 20).decode()
        except BlockingIOError:
            return ""

    def shown(self, now: float = 0.0) -> str:
        self.terminal.pump(now)
        return self.read()


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    screen = Screen(tmp_path)
    yield screen
    screen.terminal.close()
    for end in (screen.out, screen.err, *screen.write_ends):
        try:
            os.close(end)
        except OSError:
            pass  # closed by the test


def test_the_start_of_a_line_waits_for_its_end_but_not_for_ever(screen: Screen) -> None:
    screen.attempt(1, ranks=2)
    screen.write("loss ")
    assert screen.shown(now=1.0) == ""
    screen.write("other rank\n", rank=1)
    assert screen.shown(now=1.001) == "other rank\n"
    screen.write("0.5\n")
    assert screen.shown(now=1.002) == "loss 0.5\n"
    screen.write("epoch 1:  10%|#  ")
    assert screen.shown(now=2.0) == ""
    assert screen.shown(now=2.0 + HOLD_S) == "epoch 1:  10%|#  "


def test_a_rest_behind_whole_lines_is_shown_in_time(screen: Screen) -> None:
    screen.attempt(1)
    screen.write("a\nb")
    assert screen.terminal.pump(1.0) <= HOLD_S
    assert screen.read() == "a\n"
    assert screen.shown(now=1.0 + HOLD_S) == "b"


def test_a_new_attempt_is_taken_up_and_nothing_is_shown_twice(screen: Screen) -> None:
    screen.attempt(1)
    screen.write("one\n")
    assert screen.shown(now=0.0) == "one\n"
    screen.write("last words\n")
    screen.attempt(2)
    screen.write("two\n", attempt=2)
    assert sorted((screen.shown(now=1.0) + screen.shown(now=1.1)).split("\n")) == ["", "last words", "two"]
    screen.attempt(3)
    screen.write("three\n", attempt=3)
    assert screen.shown(now=2.0) == "three\n"


def test_a_half_written_list_of_streams_is_read_again(screen: Screen) -> None:
    screen.attempt(1)
    whole = screen.paths.streams(1).read_text()
    screen.paths.streams(1).write_text(whole[:20])
    screen.write("x\n")
    assert screen.shown(now=0.0) == ""
    screen.paths.streams(1).write_text(whole)
    assert screen.shown(now=1.0) == "x\n"


def test_notices_are_marked_and_never_cut(screen: Screen) -> None:
    with open(screen.paths.notices, "a") as file:
        file.write("rank 1 was killed\nattempt 2")
        file.flush()
        screen.terminal.pump(0.0)
        screen.terminal.pump(10.0)
        assert screen.read(screen.err) == "unbroken: rank 1 was killed\n"
        file.write(" begins\n")
    screen.terminal.pump(20.0)
    assert screen.read(screen.err) == "unbroken: attempt 2 begins\n"


def test_a_truncated_file_is_read_from_its_beginning(screen: Screen) -> None:
    screen.attempt(1)
    screen.write("a long first line\n")
    assert screen.shown(now=0.0) == "a long first line\n"
    screen.paths.rank_file(1, 0, "out").write_text("new\n")
    assert screen.shown(now=1.0) == "new\n"


def test_a_reader_that_went_away_is_given_up(screen: Screen) -> None:
    screen.attempt(1)
    os.close(screen.out)
    screen.write("nobody reads this\n")
    screen.write("this is read\n", stream="err")
    assert screen.terminal.drain(0.0)
    assert screen.read(screen.err) == "this is read\n"


def test_a_blocked_terminal_loses_nothing(screen: Screen) -> None:
    text = "".join(f"line {n}\n" for n in range(60_000))
    screen.attempt(1)
    screen.write(text)
    assert not screen.terminal.drain(0.0)
    assert screen.terminal.blocked
    seen = ""
    while not screen.terminal.drain(0.0):
        seen += screen.read()
    assert seen + screen.read() == text


def test_without_inotify_files_are_looked_at_regularly(screen: Screen) -> None:
    screen.terminal.changes.close()
    screen.attempt(1)
    screen.write("x\n")
    assert screen.terminal.pump(0.0) <= 0.02
    assert screen.read() == "x\n"


def test_a_line_wakes_the_loop_at_once(screen: Screen) -> None:
    screen.attempt(1)
    screen.terminal.pump(0.0)
    poll = select.poll()
    poll.register(screen.terminal.changes.fd, select.POLLIN)
    assert not poll.poll(0)
    screen.write("x\n")
    assert poll.poll(1000)
    assert screen.shown(now=1.0) == "x\n"
    assert not poll.poll(0)


def test_who_spoke_first_is_shown_first(screen: Screen) -> None:
    screen.attempt(1, ranks=3)
    screen.terminal.pump(0.0)
    for rank in (2, 0, 1, 2):
        screen.write(f"rank {rank}\n", rank=rank)
    assert screen.shown(now=0.1) == "rank 2\nrank 2\nrank 0\nrank 1\n"


def test_what_was_not_told_as_changed_is_found_in_time(screen: Screen) -> None:
    screen.attempt(1)
    screen.terminal.pump(0.0)
    screen.write("x\n")
    screen.terminal.changes.drain()
    assert screen.shown(now=0.1) == ""
    assert screen.shown(now=0.3) == "x\n"


def test_output_that_was_shown_is_given_back_to_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "rank0.out"
    line = b"x" * 1023 + b"\n"
    path.write_bytes(line * 8192)
    stream = _Stream(path, 1, 1, keep=1 << 20)
    shown = 0
    while piece := stream.take(0.0, flush=True):
        shown += len(piece)
    assert shown == 8 << 20
    assert path.stat().st_size == 8 << 20
    assert path.stat().st_blocks * 512 <= 3 << 20
    with open(path, "ab") as file:
        file.write(b"more\n")
    assert stream.take(0.0, flush=True) == b"more\n"


@pytest.mark.root
def test_on_a_disk_that_is_nearly_full_less_is_kept_and_notices_are_still_told(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)], check=True, timeout=10)
    screen = Screen(tmp_path)
    try:
        screen.attempt(1)
        line = "x" * 1023 + "\n"
        now, shown = 0.0, 0
        for _ in range(16):  # twice the disk
            screen.write(line * 1024)
            for _ in range(40):
                now += 1.0
                screen.terminal.pump(now)
                shown += len(screen.read())
        assert shown == 16 << 20
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "filler").write_bytes(bytes(16 << 20))
        with open(screen.paths.notices, "a") as notices:
            notices.write("the disk is full\n")
        screen.terminal.pump(now + 1.0)
        assert screen.read(screen.err) == "unbroken: the disk is full\n"
    finally:
        screen.terminal.close()
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True, timeout=10)


@pytest.mark.root
def test_the_last_words_have_room_on_a_full_disk(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True, timeout=10)
    try:
        paths = LocalPaths(tmp_path)
        paths.set_reserve()
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "filler").write_bytes(bytes(2 << 20))
        paths.write_surely(paths.outcome, b"{}")
        assert paths.outcome.read_bytes() == b"{}"
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True, timeout=10)
