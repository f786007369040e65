"""Publishers and senders that are killed at random moments. Nothing here imports torch: a fork must be cheap."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recovery.tiers import OwnedFile, PartFile, Save, SavePart
from supervisor.mover.copying import CopyPace
from supervisor.mover.peer import Mirrors, PeerServer, call, send_part
from supervisor.mover.publish import Publisher
from supervisor.wire.authentication import SharedSecret

SECRET = SharedSecret("t" * 40)


def nothing(_: int) -> None:
    pass


def no_pause() -> CopyPace:
    return CopyPace(lambda _: None)


def part_files(content: dict[str, bytes]) -> tuple[PartFile, ...]:
    return tuple(PartFile(name=path, size=len(data)) for path, data in content.items())


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".unbroken" not in str(path.relative_to(folder))
    }


def seconds_of(work: Callable[[], None]) -> float:
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return time.monotonic() - began


def run_and_kill(work: Callable[[], None], after_s: float) -> None:
    """In a child that is killed after so long."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def end_at_call(number: int, work: Callable[[], None]) -> bool:
    """Whether `work` came to its end in a child that ends, as if it were killed, before so many calls of the system."""
    pid = os.fork()
    if pid == 0:
        left = number

        def count(_: object, event: str, called: Any) -> None:
            nonlocal left
            if event == "c_call" and getattr(called, "__module__", "") == "posix":
                left -= 1
                if left <= 0:
                    os._exit(9)

        sys.setprofile(count)
        try:
            work()
        finally:
            sys.setprofile(None)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 9)
    return code == 0


class Publishing:
    """One save that is to be published, and what a reader may see of it."""

    def __init__(self, root: Path, format_name: str, number: int, dice: random.Random) -> None:
        self.format = format_name
        self.name = "ckpt.pt" if format_name == "torch_save" else f"step-{number}"
        files = ("__0_0.distcp", "a/b.bin", ".metadata")
        paths = [self.name] if format_name == "torch_save" else [f"{self.name}/{file}" for file in files]
        self.content = {path: dice.randbytes(dice.randrange(1, 100_000)) for path in paths}
        self._source = root / f"local-{number}"
        self.target, self._job = root / "shared", root / "job"
        for folder in (self.target, self._job):
            folder.mkdir(exist_ok=True)
        for path, data in self.content.items():
            (self._source / path).parent.mkdir(parents=True, exist_ok=True)
            (self._source / path).write_bytes(data)
        stamp = number if format_name == "torch_save" else 0
        owned = tuple(OwnedFile(name=path, size=len(data), owner="a") for path, data in self.content.items())
        self._save = Save(name=self.name, attempt=1, stamp=stamp, format=format_name, step=number, files=owned)
        self._part = SavePart(
            name=self.name, owner="a", attempt=1, stamp=stamp, format=format_name, files=part_files(self.content)
        )

    def work(self) -> None:
        publisher = Publisher(self.target, self._job, "a")
        publisher.read_records()
        publisher.stage(self._part, self._source, no_pause(), nothing, lambda: True)
        publisher.commit(self._save)

    def go_on(self) -> None:
        """As a mover that is started again: what is published already is not committed once more."""
        publisher = Publisher(self.target, self._job, "a")
        publisher.read_records()
        if not publisher.is_published(self._save.key):
            publisher.stage(self._part, self._source, no_pause(), nothing, lambda: True)
            publisher.commit(self._save)
        publisher.drop(self._save.key)

    def left(self) -> list[str]:
        """What of ours is still beside the checkpoints, besides versions that were replaced."""
        home = self.target / ".unbroken-publishing"
        return [str(path) for path in (*home.glob("*/*/part-*"), *home.glob("*/*/going-*"), *home.glob("committing/*"))]

    def seen(self, before: dict[str, bytes]) -> bool:
        """Whether a reader finds it; `before`: what was under its name before. Fails where it is torn."""
        found = content_of(self.target)
        mine = {path: data for path, data in found.items() if path == self.name or path.startswith(f"{self.name}/")}
        ends = {"dcp": f"{self.name}/.metadata", "torch_save": self.name}.get(self.format)
        visible = ends in mine if ends else bool(mine)
        if visible and mine != before:
            assert mine == self.content, "torn"
        return visible and mine == self.content


ALSO = [pytest.param(name, marks=pytest.mark.slow) for name in ("folder", "torch_save")]
FORMATS = pytest.mark.parametrize("format_name", ["dcp", *ALSO])


@FORMATS
def test_a_publisher_may_be_cut_off_before_any_call_of_the_system(memory: Path, format_name: str) -> None:
    """A reader finds no save or a whole one; whoever goes on finishes it."""
    dice = random.Random(format_name)
    seen: list[bool] = []
    for number in range(1, 1000):
        root = memory / str(number)
        root.mkdir()
        one = Publishing(root, format_name, number, dice)
        ended = end_at_call(number, one.work)
        seen.append(one.seen({}))
        assert not ended or seen[-1]
        one.go_on()
        assert one.seen({})
        assert not one.left(), "it would be in the way of another job, and is never removed"
        shutil.rmtree(root)
        if ended:
            break
    assert len(seen) > 50
    assert seen == sorted(seen), "what was visible stays visible"


@pytest.mark.slow
@FORMATS
def test_a_publisher_that_is_killed_publishes_nothing_torn(memory: Path, format_name: str) -> None:
    """Over 100 kills each, in the middle of calls, with earlier saves beside it; in the end all are there."""
    dice = random.Random(format_name)
    kills = done_in_spite = 0
    usual_s, number = 0.01, 0
    known: dict[str, dict[str, bytes]] = {}
    while kills < 100:
        number += 1
        one = Publishing(memory, format_name, number, dice)
        done = False
        for _ in range(dice.randrange(1, 6)):
            kills += 1
            run_and_kill(one.work, dice.uniform(0.0, 1.2 * usual_s))
            before, done = done, one.seen(known.get(one.name, {}))
            done_in_spite += done
            usual_s *= 1.0 if before else 0.8 if done else 1.1  # a busy machine is slow at times
            others = {path: data for name, kept in known.items() if name != one.name for path, data in kept.items()}
            assert others.items() <= content_of(one.target).items()
        one.work()
        assert one.seen({})
        known[one.name] = one.content
    assert 0 < done_in_spite < kills


@pytest.mark.slow
def test_a_sender_that_is_killed_leaves_no_half_mirror(memory: Path) -> None:
    """After each kill the receiver's folder is read as a new mover there would read it."""
    dice = random.Random(1)
    source = memory / "mine"
    (memory / "theirs").mkdir()
    server = PeerServer(Mirrors(memory / "theirs", "job"), SECRET, lambda *_: None, host="127.0.0.1")
    server.start()
    usual_s = 0.02
    whole = 0
    for number in range(100):
        content = {f"step-{number}/f{i}": dice.randbytes(dice.randrange(1, 100_000)) for i in range(3)}
        for path, data in content.items():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_bytes(data)
        part = SavePart(
            name=f"step-{number}", owner="b", format="folder", modified_at=float(number), files=part_files(content)
        )

        def work(part: SavePart = part) -> None:
            wire, connection = call("127.0.0.1", server.port, SECRET, None)
            with connection:
                send_part(wire, part, source, no_pause(), nothing)

        if number % 10 == 0:
            usual_s = seconds_of(work)
            continue
        run_and_kill(work, dice.uniform(0.0, 1.2 * usual_s))
        found = Mirrors(memory / "theirs", "job")
        for held in found.parts:
            data = found.data("b", held.key)
            assert all((data / file.name).stat().st_size == file.size for file in held.files)
            if held.name == part.name:
                whole += 1
                assert content_of(data) == content
        assert len(found.parts) <= 3  # an old one is removed after the new one is whole
    server.close()
    assert 0 < whole < 90, "the moments are badly chosen"
