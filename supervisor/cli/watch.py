"""`unbroken watch`: one job, live on the terminal, with keys for what an operator does at once.

A key only asks. The question says in the dry run's words what would happen; the command is given when `y` is pressed,
and only if it would still do the same.
"""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, TypeVar

from supervisor.cli import render
from supervisor.cli.screen import ESCAPE, Screen
from supervisor.cli.watch_view import StepRate, picture
from supervisor.errors import UnbrokenError
from supervisor.messages import CommandName

T = TypeVar("T")

READ_SHARE: Final = 3.0
"""After an answer `watch` waits at least so many times as long as it took: it does not keep a large job busy."""
LATE_S: Final = 2.0
"""An answer that is older than this is told to be old."""
STEP_LINE_S: Final = 10.0
"""Into a pipe, steps alone are worth a line so often."""
TURN_S: Final = 0.05
LOOK_FIRST_S: Final = 0.5
"""A question must have been there for so long before it can be answered."""
ASK_S: Final = 30.0
NOTICE_S: Final = 10.0
SAME: Final = ("state", "refused", "interrupts", "drains", "attempt", "leave", "join")
"""Of a dry run: what must not have changed when somebody has said yes. (Its sentence may: a newer checkpoint.)"""
HELP: Final = (
    "p  pause: watch and record, but do nothing; p again: resume, also a job that is held",
    "a  approve the plan, or the swap, that waits for it        x  reject it",
    "q  leave; the job goes on        ?  this help",
    "Every key first says what it would do, and asks.",
)

Act = Callable[[CommandName, str, bool], dict[str, Any]]
"""Gives a command to the job: name, argument, whether it is a dry run. Raises UnbrokenError."""


def watch(read: Callable[[], dict[str, Any]], act: Act, every_s: float, as_json: bool) -> None:
    """Show the job until it ends, or somebody has seen enough."""
    console = render.console()
    if as_json or not console.is_terminal or console.is_dumb_terminal:
        _print_changes(read, every_s, as_json)
        return
    answer = read()  # a job that cannot be read is told here, and not on another screen
    screen = Screen()
    shown = LiveWatch(StatusReader(read, answer, every_s), act, screen, console.color_system)
    with contextlib.suppress(KeyboardInterrupt), screen.taken(), contextlib.redirect_stderr(io.StringIO()):
        shown.run()
    last = shown.answer
    if last["outcome"] is not None:
        render.status(last)
    else:
        print(one_line(last))


def _print_changes(read: Callable[[], dict[str, Any]], every_s: float, as_json: bool) -> None:
    last: dict[str, Any] = {}
    printed_at = 0.0
    with contextlib.suppress(KeyboardInterrupt):
        while last.get("outcome") is None:
            began = time.monotonic()
            answer = read()
            took_s = time.monotonic() - began
            moved = _lasting(answer) != _lasting(last)
            if moved and (as_json or not last or _news(answer) != _news(last) or began - printed_at >= STEP_LINE_S):
                print(json.dumps(answer, separators=(",", ":")) if as_json else one_line(answer), flush=True)
                printed_at = began
            last = answer
            if last["outcome"] is None:
                time.sleep(max(every_s, READ_SHARE * took_s))


def _lasting(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what changes while nothing happens."""
    return {**answer, "now": "", "ranks": [{**row, "quiet_s": None} for row in answer.get("ranks", ())]}


def _news(answer: dict[str, Any]) -> tuple[object, ...]:
    """What is worth a line at once: no step, not how long something lasts, nor when the next checkpoint is due."""
    calm = {**answer, "now": "", "step": None, "counted": 0, "silence": None, "swaps": ()}
    silent = (answer.get("silence") or {}).get("since")
    return one_line(calm), silent, [(one["node"], one["state"], one["why"]) for one in answer.get("swaps", ())]


def one_line(answer: dict[str, Any]) -> str:
    incident = next((one for one in reversed(answer["incidents"]) if one["open"]), None)
    trouble = f"; {incident['id']}: {incident['why']}" if incident else ""
    trouble += f"; {answer['silence']['text']}" if answer.get("silence") else ""
    trouble += "".join(f"; {one['text']}" for one in answer.get("swaps", ()))
    step = render.step_text(answer)
    waits = f"; waits for: {waits}" if (waits := answer["waiting"] or answer.get("forming")) else ""
    return f"{render.clock(answer['now'])} {answer['state']} attempt {answer['attempt']}{step}{waits}{trouble}"


class StatusReader:
    """Reads the status again and again, beside the screen: a controller that hangs does not freeze the keys."""

    def __init__(self, read: Callable[[], dict[str, Any]], first: dict[str, Any], every_s: float) -> None:
        self._read, self._every_s = read, every_s
        self.newest, self.read_at, self.problem = first, time.monotonic(), ""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self.newest["outcome"] is None:
            began = time.monotonic()
            try:
                self.newest, self.problem = self._read(), ""
                self.read_at = time.monotonic()
            except UnbrokenError as error:
                self.problem = str(error)
            except Exception as error:  # a file that went, an answer of another version: the next one may be good
                self.problem = f"{type(error).__name__}: {error}"
            time.sleep(max(self._every_s, READ_SHARE * (time.monotonic() - began)))


class OpenQuestion(NamedTuple):
    """What would be done, in words, and since when that stands on the screen."""

    command: CommandName
    argument: str
    would: dict[str, Any]
    asked_at: float


class Keys:
    """What keys mean: they ask, and `y` to the question acts."""

    def __init__(self, act: Act) -> None:
        self._act = act
        self.question: OpenQuestion | None = None
        self.notice: tuple[str, float] = ("", 0.0)
        self.has_help = False
        self._running: tuple[Future[dict[str, Any]], CommandName, str, bool] | None = None

    def press(self, key: str, answer: dict[str, Any], now: float) -> None:
        asked, self.question = self.question, None
        self.has_help = key == "?" and not self.has_help
        if self._running is not None:
            return
        if asked is not None and now - asked.asked_at < LOOK_FIRST_S:
            self.question = asked
        elif asked is not None and key == "y":
            self._begin(asked.command, asked.argument, asked.would)
        elif asked is not None:
            self._say(f"{asked.command}: nothing was done", now)
        elif key in ("p", "a", "x"):
            found = meaning(key, answer)
            if isinstance(found, str):
                self._say(found, now)
            else:
                self._begin(*found)

    def turn(self, now: float) -> bool:
        """Take what has come of the last key; whether a question has just been asked."""
        if self.question is not None and now - self.question.asked_at > ASK_S:
            self._say(f"{self.question.command}: nobody has answered, nothing was done", now)
            self.question = None
        if self._running is None or not self._running[0].done():
            return False
        (future, command, argument, given), self._running = self._running, None
        try:
            told = future.result()
        except UnbrokenError as error:
            self._say(f"{command}: {error}", now)
            return False
        if given and "would" not in told:
            self._say("; ".join(told["notes"]) or f"{command}: done", now)
        elif told["refused"]:
            self._say(told["would"].replace("\n", "; "), now)
        else:
            self.question = OpenQuestion(command, argument, told, now)
        return self.question is not None

    def lines(self, answer: dict[str, Any], now: float) -> Iterator[str]:
        """What stands below the picture."""
        if self.has_help:
            yield from HELP
        if self._running is not None:
            yield f"{self._running[1]}: asking the controller ..."
        elif self.question is not None:
            yield from self.question.would["would"].splitlines()
            what = f"{self.question.command} {self.question.argument}".rstrip()
            yield f"{what}?  y: do it    any other key: no"
        elif self.notice[0] and now - self.notice[1] < NOTICE_S:
            yield self.notice[0]
        else:
            resume = answer["paused"] or (answer["hold"] or {}).get("why")
            decide = "a approve   x reject   " if not isinstance(meaning("a", answer), str) else ""
            yield f"{decide}p {'resume' if resume else 'pause'}   ? help   q quit"

    def _say(self, text: str, now: float) -> None:
        self.notice = (text, now)

    def _begin(self, command: CommandName, argument: str, agreed: dict[str, Any] | None = None) -> None:
        """`agreed`: what somebody has said yes to; where it would be another thing now, ask again."""

        def work() -> dict[str, Any]:
            would = self._act(command, argument, True)
            if agreed is None or differs(would, agreed):
                return would
            return self._act(command, argument, False)

        self._running = (_beside(work), command, argument, agreed is not None)


def differs(would: dict[str, Any], agreed: dict[str, Any]) -> bool:
    """Whether a command would do another thing now than somebody has said yes to."""
    return any(would.get(field) != agreed.get(field) for field in SAME)


def meaning(key: str, answer: dict[str, Any]) -> tuple[CommandName, str] | str:
    """Command and argument, or why there is nothing to do."""
    if answer["outcome"] is not None:
        return "the job has ended"
    hold = answer["hold"]
    if key == "p":
        return ("resume", "") if answer["paused"] or (hold and hold["why"]) else ("pause", "")
    command: CommandName = "approve" if key == "a" else "reject"
    if hold and not hold["why"]:
        return command, hold.get("approves", "")  # by its version: a plan that nobody here has seen is not approved
    swap = next((one["node"] for one in answer.get("swaps", ()) if one["state"] == "recommended"), "")
    return (command, swap) if swap else "nothing waits for approval"


def _beside(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except UnbrokenError as error:
            future.set_exception(error)
        except Exception as error:
            future.set_exception(UnbrokenError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=run, daemon=True).start()
    return future


class LiveWatch:
    """The picture and the keys, until the job has ended or `q`."""

    def __init__(self, reader: StatusReader, act: Act, screen: Screen, color_system: str | None) -> None:
        self._reader, self._screen, self._color_system = reader, screen, color_system
        self._keys = Keys(act)
        self._pace = StepRate()
        self._drawn: tuple[object, ...] = ()

    @property
    def answer(self) -> dict[str, Any]:
        return self._reader.newest

    def run(self) -> None:
        self._screen.forget_keys()
        while self.answer["outcome"] is None:
            self._draw(time.monotonic())
            key = self._screen.wait(TURN_S)
            now = time.monotonic()
            if key == "q" or (key == ESCAPE and self._keys.question is None):
                return
            if key:
                self._keys.press(key, self.answer, now)
            if self._keys.turn(now):
                self._screen.forget_keys()

    def _draw(self, now: float) -> None:
        answer, size = self.answer, self._screen.size()
        self._pace.see(answer, self._reader.read_at)
        below = list(self._keys.lines(answer, now)) if self._screen.has_keyboard else ["Ctrl-C leaves; the job goes on"]
        late_s = now - self._reader.read_at
        if late_s > LATE_S:
            why = f": {self._reader.problem}" if self._reader.problem else ""
            below.insert(0, f"no answer for {late_s:.0f} s{why}")
        wanted = (id(answer), size, tuple(below))
        if wanted != self._drawn and self._screen.is_ready:
            self._screen.draw(picture(answer, self._pace, size, below, self._color_system))
            self._drawn = wanted
