"""`unbroken watch`: the picture, the keys, and a real terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest

from supervisor import messages as m
from supervisor.cli import watch
from supervisor.cli.screen import ALONE_S, ESCAPE, HELD_S, KeyReader
from supervisor.cli.watch import ASK_S, LOOK_FIRST_S, Keys, meaning
from supervisor.cli.watch_view import StepRate, picture
from supervisor.controller.report import status_of
from supervisor.job.job import Job
from supervisor.messages import CommandName
from tests.conftest import until

WOULD = "would send `pause` to job llama\nthe ranks go on"


def status(nodes: int = 1, **given: Any) -> dict[str, Any]:
    job = Job()
    job.handle(m.JobDefined(at=1.0, spec=m.JobSpec(name="llama", nodes_min=nodes, nodes_max=nodes)))
    for number in range(nodes):
        job.handle(m.NodeJoined(at=1.0, node=f"n{number}", host=f"h{number}", address="10.0.0.1"))
    told = {"state": "RUNNING", "attempt": 1, "step": 100, "last_step": 1000, "controller": {"journal": "ok"}}
    return status_of(job.view(), None, None, job.story) | told | given


def open_incident() -> dict[str, Any]:
    return {"id": "i-3", "opened_at": "2026-01-01T00:00:00Z", "open": True, "failure_class": "oom", "why": "no memory"}


def lines(answer: dict[str, Any], width: int = 80, height: int = 24, pace: StepRate | None = None) -> list[str]:
    return picture(answer, pace or StepRate(), (width, height), ["q quit"], None)


# ----- into a pipe -----


def test_a_line_is_printed_when_something_has_changed_and_not_for_time_that_passes() -> None:
    silent = {"since": "2026-01-01T00:00:00Z", "text": "ranks 0, 1 have shown no progress for 31 s"}
    later = {**silent, "text": "ranks 0, 1 have shown no progress for 44 s"}
    swap = {"node": "n7", "state": "planned", "why": "alert X", "text": "n7 leaves, about 14:20 UTC"}
    first = status(silence=silent, swaps=[swap])
    assert watch._news(first) == watch._news(
        {**first, "silence": later, "swaps": [{**swap, "text": "about 14:21 UTC"}], "now": "2026-01-01T00:01:00Z"}
    )
    assert watch._news(first) == watch._news({**first, "step": 101}), "steps alone are worth a line every few seconds"
    for changed in ({"silence": None}, {"swaps": []}, {"waiting": "nodes"}, {"state": "HUNG"}):
        assert watch._news({**first, **changed}) != watch._news(first), changed


# ----- the picture -----


@pytest.mark.parametrize("size", [(80, 24), (100, 40), (40, 10), (20, 4), (300, 60)])
@pytest.mark.parametrize("nodes", [0, 8])
def test_the_picture_fits(size: tuple[int, int], nodes: int) -> None:
    ranks = [{"rank": n, "node": "n0", "step": n, "quiet_s": 0.1, "text": "x" * 300} for n in range(nodes)]
    story = [{"at": "2026-01-01T00:00:00Z", "text": "word " * 50, "incident": "i-3", "loud": True}] * 30
    told = status(nodes, ranks=ranks, story=story, incidents=[open_incident()], degraded=["y" * 500])
    shown = lines(told, *size)
    assert len(shown) == size[1]
    assert max(map(len, shown)) <= size[0]
    assert "q quit" in shown[-1]
    assert "llama"[: size[0] - 4] in shown[0]


def test_what_is_urgent_is_there_among_4000_nodes() -> None:
    told = status(1)
    told["nodes"] = [{**told["nodes"][0], "node": f"n{number}"} for number in range(4000)]
    told["nodes"][3999] |= {"state": "LOST", "why": "silent"}
    told["incidents"] = [open_incident()]
    shown = "\n".join(lines(told))
    assert re.search(r"n3999 +LOST", shown)
    assert "i-3 (open): oom: no memory" in shown


def test_the_question_is_seen_on_a_terminal_that_is_too_small_for_what_would_be_done() -> None:
    below = [*["what would be done"] * 30, "pause?  y: do it"]
    for size in ((20, 5), (40, 10), (80, 24)):
        assert "y: do it" in picture(status(), StepRate(), size, below, None)[-1]


def test_step_rate_time_left_and_loss() -> None:
    pace = StepRate()
    for second in range(40):
        pace.see(status(step=100 + 2 * second), float(second))
    assert pace.per_s == pytest.approx(2.0)
    shown = "\n".join(lines(status(step=178, loss=2.3125), pace=pace))
    assert "step 178 of 1000" in shown
    assert "2 steps/s, 6 min 51 s left, loss 2.3125" in shown
    pace.see(status(step=120, attempt=2), 41.0)
    assert pace.per_s is None


def test_a_count_since_the_start_and_then_the_scripts_own_numbers_make_no_rate() -> None:
    pace = StepRate()
    pace.see(status(step=None, counted=1, attempt=2), 1.0)
    pace.see(status(step=1302, counted=2, attempt=2), 1.2)
    assert pace.per_s is None
    pace.see(status(step=1310, counted=10, attempt=2), 2.2)
    assert pace.per_s == pytest.approx(8.0)


def test_an_entry_of_the_story_is_shown_from_its_beginning() -> None:
    story = [
        {"at": "2026-01-01T00:00:00Z", "text": f"entry{n} " + "word " * 30, "incident": "", "loud": True}
        for n in range(9)
    ]
    for height in range(12, 40):
        shown = lines(status(story=story), 60, height)
        entries = [line for line in shown if "entry" in line or line.startswith("word")]
        assert "entry" in entries[0], height


def test_nothing_from_the_job_moves_the_cursor() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\u202eabc\r\n\x9b1;1H"
    ranks = [{"rank": 0, "node": evil, "step": 1, "quiet_s": 0.1, "text": evil}]
    story = [{"at": "2026-01-01T00:00:00Z", "text": evil, "incident": "", "loud": True}]
    told = status(1, ranks=ranks, story=story, name=evil, waiting=evil, degraded=[evil])
    told["nodes"][0] |= {"node": evil, "why": evil}
    told["incidents"] = [open_incident() | {"why": evil}]
    for shown in (picture(told, StepRate(), (80, 24), [evil], "standard"), lines(told)):
        assert not re.search(r"\x1b(?!\[[0-9;]*m)|[\x07\r\n\u202e\x9b]", "".join(shown))


# ----- keys that were pressed by hand -----


def typed(*pressed: tuple[float, bytes], until_s: float = 10.0) -> list[str]:
    """The keys that count, of bytes that came at these times."""
    reader, found, left = KeyReader(), [], sorted(pressed)
    for tick in range(int(until_s * 100)):
        now = 1000.0 + tick / 100
        while left and left[0][0] + 1000.0 <= now:
            reader.feed(left.pop(0)[1], now)
        if key := reader.due(now):
            found.append(key)
    return found


def test_a_key_counts_when_it_stands_alone() -> None:
    assert typed((1.0, b"p"), (2.0, b"y")) == ["p", "y"]
    assert typed((1.0, b"p"), (1.0 + HELD_S + 0.05, b"p")) == ["p", "p"]
    assert typed((1.0, b"\x1b")) == [ESCAPE]


@pytest.mark.parametrize(
    "pressed",
    [
        pytest.param([(1.0, b"pay the bill\n")], id="pasted at once"),
        pytest.param([(1.0 + n * 0.05, b"py"[n % 2 :][:1]) for n in range(50)], id="typed by a script"),
        pytest.param([(1.0, b"\x1b[200~"), (2.0, b"p"), (3.0, b"y"), (4.0, b"\x1b[201~")], id="pasted slowly"),
        pytest.param([(1.0, b"\x1b[200~p\x1b[201~")], id="one letter pasted"),
        pytest.param([(1.0, b"\x1b[A"), (2.0, b"\x1bOP"), (3.0, b"\x1bp"), (4.0, b"\xc3\xa9p")], id="other keys"),
        pytest.param([(1.0, b"\x1b["), (1.01, b"24;80R")], id="the terminal's answer in two parts"),
    ],
)
def test_what_was_not_pressed_by_hand_does_not_count(pressed: list[tuple[float, bytes]]) -> None:
    assert typed(*pressed) == []


def test_a_key_that_is_held_down_counts_once() -> None:
    held = [(1.0, b"p"), *((1.0 + 0.6 + n / 30, b"p") for n in range(100))]
    assert typed(*held) == ["p"]


def test_the_terminals_answer_is_no_key_and_disturbs_none() -> None:
    reader = KeyReader()
    reader.feed(b"p", 1.0)
    reader.feed(b"\x1b[24;80R", 1.05)
    assert reader.answers == 1
    assert reader.due(1.01 + ALONE_S) == "p"


# ----- what keys do -----


class Desk:
    """Takes commands as a controller does."""

    def __init__(self) -> None:
        self.given: list[tuple[str, str]] = []
        self.would = WOULD
        self.refused = False
        self.state = "RUNNING"

    def act(self, command: CommandName, argument: str, dry: bool) -> dict[str, Any]:
        if dry:
            return {"would": self.would, "refused": self.refused, "state": self.state}
        self.given.append((command, argument))
        return {"notes": [f"{command} is done"]}


def settle(keys: Keys, now: float) -> bool:
    """Until the last key's command has been answered."""
    while "asking" in next(iter(keys.lines(status(), now))):
        if keys.turn(now):
            return True
        time.sleep(0.001)
    return False


def test_a_key_asks_and_y_acts() -> None:
    desk = Desk()
    keys = Keys(desk.act)
    keys.press("p", status(), 0.0)
    assert settle(keys, 1.0)
    assert [*keys.lines(status(), 1.0)][:2] == WOULD.splitlines()
    keys.press("y", status(), 1.0 + LOOK_FIRST_S / 2)  # nobody has read it so soon
    assert desk.given == []
    keys.press("y", status(), 1.0 + LOOK_FIRST_S)
    settle(keys, 2.0)
    assert desk.given == [("pause", "")]
    assert [*keys.lines(status(), 2.0)] == ["pause is done"]


@pytest.mark.parametrize("key", ["n", "p", ESCAPE, " ", "a"])
def test_any_other_key_is_a_no(key: str) -> None:
    desk = Desk()
    keys = Keys(desk.act)
    keys.press("p", status(), 0.0)
    settle(keys, 1.0)
    keys.press(key, status(), 2.0)
    keys.press("y", status(), 3.0)
    settle(keys, 4.0)
    assert desk.given == []


def test_a_question_does_not_wait_for_ever() -> None:
    desk = Desk()
    keys = Keys(desk.act)
    keys.press("p", status(), 0.0)
    settle(keys, 1.0)
    keys.turn(1.0 + ASK_S + 0.1)
    keys.press("y", status(), 60.0)
    settle(keys, 61.0)
    assert desk.given == []


def test_what_would_be_another_thing_now_is_asked_again() -> None:
    desk = Desk()
    keys = Keys(desk.act)
    keys.press("p", status(), 0.0)
    settle(keys, 1.0)
    desk.would, desk.state = "the job would end", "RECOVERING"
    keys.press("y", status(), 2.0)
    assert settle(keys, 3.0)
    assert (desk.given, next(iter(keys.lines(status(), 3.0)))) == ([], "the job would end")
    keys.press("y", status(), 4.0)
    settle(keys, 5.0)
    assert desk.given == [("pause", "")]


def test_a_refused_command_is_no_question() -> None:
    desk = Desk()
    desk.refused = True
    keys = Keys(desk.act)
    keys.press("p", status(), 0.0)
    assert not settle(keys, 1.0)
    assert keys.question is None


def test_what_the_keys_mean() -> None:
    held, waits = {"why": "too many nodes"}, {"why": "", "approves": "i-3@1a2b"}
    assert meaning("p", status()) == ("pause", "")
    assert meaning("p", status(paused=True)) == ("resume", "")
    assert meaning("p", status(hold=held)) == ("resume", "")
    assert meaning("a", status(hold=waits, incidents=[open_incident()])) == ("approve", "i-3@1a2b")
    assert meaning("x", status(swaps=[{"node": "n1", "state": "recommended"}])) == ("reject", "n1")
    assert isinstance(meaning("a", status(swaps=[{"node": "n1", "state": "planned"}])), str)
    assert isinstance(meaning("a", status(hold=held)), str)
    assert isinstance(meaning("p", status(outcome={"line": "over"})), str)


# ----- a terminal -----

PROGRAM = """
import fcntl, json, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from supervisor.cli import watch
where = sys.argv[1]
read = lambda: json.load(open(where + "/status.json"))
def act(command, argument, dry):
    if not dry:
        open(where + "/done", "a").write(command + " ")
    return {"would": "would " + command, "refused": False} if dry else {"notes": [command + ": done"]}
watch.watch(read, act, 0.05, False)
"""


class Emulator:
    """A program on a terminal of this size, which answers as terminals do."""

    def __init__(self, argv: list[str], columns: int, rows: int) -> None:
        self.screen = pyte.Screen(columns, rows)
        self.screen.write_process_input = self._answer  # type: ignore[method-assign]
        self._stream = pyte.ByteStream(self.screen)
        self.bytes = b""
        self.master, worker = pty.openpty()
        self.resize(columns, rows)
        environment = os.environ | {"TERM": "xterm-256color"}
        self.program = subprocess.Popen(
            [sys.executable, *argv],
            stdin=worker,
            stdout=worker,
            stderr=worker,
            start_new_session=True,
            env=environment,
        )
        os.close(worker)
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _answer(self, data: str) -> None:
        os.write(self.master, data.encode())

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.master, 65536) if select.select([self.master], [], [], 60)[0] else b""
            except OSError:
                return
            if not data:
                return
            self.bytes += data
            self._stream.feed(data)

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    @property
    def text(self) -> str:
        return "\n".join(self.screen.display)

    def end(self) -> None:
        self.program.kill()
        self.program.wait()
        self._reading.join(70)
        os.close(self.master)


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[tuple[Emulator, Callable[..., None], Path]]:
    def tell(**given: Any) -> None:
        (tmp_path / "new").write_text(json.dumps(status(**given)))
        (tmp_path / "new").replace(tmp_path / "status.json")

    tell()
    emulator = Emulator(["-c", PROGRAM, str(tmp_path)], 80, 24)
    yield emulator, tell, tmp_path / "done"
    emulator.end()


def test_on_a_terminal(watching: tuple[Emulator, Callable[..., None], Path]) -> None:
    emulator, tell, done = watching
    until(lambda: "step 100 of 1000" in emulator.text, 60, lambda: emulator.text)
    tell(step=100, waiting="x" * 69)  # 80 letters with what is before it
    until(lambda: "waits for: " + "x" * 69 in emulator.screen.display, 60, lambda: emulator.text)
    before = len(emulator.bytes)
    tell(step=101, waiting="x" * 69)
    until(lambda: "step 101 of 1000" in emulator.text, 60, lambda: emulator.text)
    assert len(emulator.bytes) - before < 400, "only what has changed is written"
    emulator.type("pppppppyyyyyyy\ny\n")
    emulator.resize(100, 30)
    tell(step=102)
    until(
        lambda: "step 102 of 1000" in emulator.text and "quit" in emulator.screen.display[29], 60, lambda: emulator.text
    )
    assert "would pause" not in emulator.text
    time.sleep(2 * ALONE_S)  # hands are so slow
    emulator.type("p")
    until(lambda: "would pause" in emulator.text, 60, lambda: emulator.text)
    time.sleep(LOOK_FIRST_S + ALONE_S)
    emulator.type("y")
    until(lambda: done.exists() and "pause: done" in emulator.text, 60, lambda: emulator.text)
    os.killpg(emulator.program.pid, signal.SIGTERM)
    assert emulator.program.wait(60) == 128 + signal.SIGTERM
    until(lambda: b"\x1b[?1049l" in emulator.bytes, 60, lambda: emulator.text)
    assert done.read_text() == "pause "


def test_it_ends_with_the_job_and_leaves_its_last_words(
    watching: tuple[Emulator, Callable[..., None], Path],
) -> None:
    emulator, tell, _ = watching
    until(lambda: "step 100 of 1000" in emulator.text, 60, lambda: emulator.text)
    tell(state="SUCCEEDED", outcome={"line": "the run is complete", "exit_code": 0})
    assert emulator.program.wait(60) == 0
    until(lambda: b"the run is complete" in emulator.bytes.partition(b"\x1b[?1049l")[2], 60, lambda: emulator.text)
