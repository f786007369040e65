"""The step clock in the rank: what it counts, and that no script can notice it."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.agent.ranks import BeaconFile
from supervisor.training import beacon, bootstrap, clock
from supervisor.training.clock import AT, BATCHES, CALLS, INPUT_S, SLOWEST_S, STEPS
from tests.conftest import Later, need

need("torch")
torch = Later("torch")


@pytest.fixture
def figures() -> Iterator[list[float]]:
    """A clock that runs."""
    from torch.optim.optimizer import _global_optimizer_post_hooks as hooks
    from torch.utils.data import dataloader

    one = clock.StepClock([0.0] * 6)
    assert not hooks
    assert one.listen()
    yield one.figures
    hooks.clear()
    del dataloader._BaseDataLoaderIter._profile_name, dataloader._BaseDataLoaderIter._num_yielded


def model() -> Any:
    return torch.nn.Linear(4, 4)


def train(one: Any, *optimizers: Any) -> None:
    one(torch.ones(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def accumulates(net: Any) -> int:
    optimizer = torch.optim.AdamW(net.parameters())
    for micro in range(12):
        train(net, *([optimizer] if micro % 4 == 3 else []))
    return 3


def is_fused(net: Any) -> int:
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    for _ in range(3):
        train(net, optimizer)
    return 3


def takes_turns(net: Any) -> int:
    discriminator, generator = torch.optim.Adam(net.parameters()), torch.optim.SGD(net.parameters())
    for _ in range(7):
        train(net, discriminator, generator)
    return 7


def trains_the_critic_more(net: Any) -> int:
    critic, generator = torch.optim.Adam(net.parameters()), torch.optim.SGD(net.parameters())
    for _ in range(3):
        for _ in range(5):
            train(net, critic)
        train(net, generator)
    return 15


def has_one_for_each_parameter(net: Any) -> int:
    each = [torch.optim.SGD([one]) for one in net.parameters()]
    for _ in range(4):
        train(net, *each)
    return 4


def is_made_anew_when_it_is_loaded(net: Any) -> int:
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(3):
        for _ in range(3):
            train(net, optimizer)
        optimizer, old = torch.optim.AdamW(net.parameters()), optimizer.state_dict()
        optimizer.load_state_dict(old)
    return 9


def skips_steps_that_overflow(net: Any) -> int:
    optimizer, scaler = torch.optim.SGD(net.parameters()), torch.amp.GradScaler("cpu")
    for step in range(6):
        scaler.scale(net(torch.full((2, 4), float("inf") if step == 2 else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return 5


def has_closures(net: Any) -> int:
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return 3


def wraps_one_in_another(net: Any) -> int:
    class Outer(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
        def __init__(self, inner: Any) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self) -> None:
            self.inner.step()

    optimizer = Outer(torch.optim.SGD(net.parameters()))
    for _ in range(4):
        train(net, optimizer)
    return 4


def has_none_of_torch(net: Any) -> int:
    for _ in range(3):
        train(net)
        with torch.no_grad():
            for one in net.parameters():
                one -= 0.1 * one.grad
    return 0


@pytest.mark.parametrize(
    "script",
    [
        accumulates,
        is_fused,
        takes_turns,
        trains_the_critic_more,
        has_one_for_each_parameter,
        is_made_anew_when_it_is_loaded,
        skips_steps_that_overflow,
        has_closures,
        wraps_one_in_another,
        has_none_of_torch,
    ],
    ids=lambda script: script.__name__,
)
def test_steps_of_a_script_that(script: Any, figures: list[float]) -> None:
    assert script(model()) == figures[STEPS]


def test_times_and_calls() -> None:
    now = [100.0]
    one = clock.StepClock([0.0] * 6, lambda: now[0])
    hook = one._counter(lambda: False)
    first, second = Slow(), Slow()

    def step(seconds: float) -> None:
        now[0] += seconds
        for optimizer in (first, second):
            hook(optimizer, (), {})

    for seconds in (9.0, 1.0, 4.0, 1.0):
        step(seconds)
    assert one.figures[:4] == [4, 115.0, 4.0, 8], "how long the first one took is not known"
    for _ in range(45):
        step(1.0)
    assert one.figures[SLOWEST_S] == 4.0
    for _ in range(52):
        step(1.0)
    assert (one.figures[STEPS], one.figures[SLOWEST_S]) == (101, 1.0)


class Slow:
    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        if index == self.fails_at:
            raise ValueError("a bad sample")
        time.sleep(0.01)
        return torch.ones(4)


def test_the_main_thread_waits_for_batches(figures: list[float]) -> None:
    loader = torch.utils.data.DataLoader(Slow())
    began = time.monotonic()
    assert len(list(loader)) == 5
    assert figures[BATCHES] == 5
    assert 0.05 <= figures[INPUT_S] <= time.monotonic() - began
    thread = threading.Thread(target=lambda: list(loader))
    thread.start()
    thread.join()
    assert figures[BATCHES] == 5, "somebody else's waits hold nobody up"


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["own", "kept workers"])
def test_what_lies_between_two_epochs_is_no_wait(options: dict[str, Any], figures: list[float]) -> None:
    """A new iterator may stand where the old one was, and kept workers' iterator is used again."""
    loader = torch.utils.data.DataLoader(torch.ones(2, 4), **options)
    for _ in range(4):
        for _ in loader:
            pass
        before = figures[INPUT_S]
        iterator = iter(loader)  # it is made, or begins anew, long after the end was asked for
        assert figures[INPUT_S] == before
        del iterator
    assert figures[BATCHES] == 8


def test_an_error_of_a_loader_has_no_frame_of_ours(figures: list[float]) -> None:
    iterator = iter(torch.utils.data.DataLoader(Slow(fails_at=1)))
    next(iterator)
    with pytest.raises(ValueError, match="a bad sample") as caught:
        next(iterator)
    assert "supervisor" not in "".join(traceback.format_tb(caught.value.__traceback__)[1:])
    assert (figures[BATCHES], iterator._num_yielded) == (1, 1)
    assert not hasattr(type(iterator), "_profile_name")


def test_nothing_is_left_in_an_optimizer_and_no_random_number_is_used(figures: list[float]) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    known = set(vars(optimizer))
    net(torch.ones(2, 4)).sum().backward()
    state = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), state)
    assert set(vars(optimizer)) == known
    assert not optimizer._optimizer_step_post_hooks
    again = pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
    assert again.state_dict().keys() == {"state", "param_groups"}
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    assert b"supervisor" not in buffer.getvalue()
    assert figures[STEPS] == 1


def test_no_script_sees_an_error_of_ours(figures: list[float]) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters())
    figures.clear()  # IndexError at each access
    train(net, optimizer)
    assert len(list(torch.utils.data.DataLoader(Slow()))) == 5


def test_what_a_signal_handler_of_the_script_raises_is_not_lost(figures: list[float]) -> None:
    """It may come while the hook runs."""

    class Preempted(Exception):
        pass

    def handler(*_: object) -> None:
        raise Preempted

    class Figures(list[float]):
        def __setitem__(self, index: Any, value: Any) -> None:
            if index == CALLS:
                os.kill(os.getpid(), signal.SIGUSR1)
            super().__setitem__(index, value)

    one = clock.StepClock(Figures(figures))
    hook = one._counter(lambda: False)
    old = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Preempted):
            hook(one, (), {})
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_a_forked_child_does_not_count_for_its_parent(tmp_path: Path) -> None:
    one = beacon.Beacon(str(tmp_path / "b"), str(tmp_path / "s"))
    counting = clock.StepClock(one.figures)
    hook = counting._counter(lambda: False)
    hook(counting, (), {})
    pid = os.fork()
    if pid == 0:
        hook(counting, (), {})
        os._exit(0)
    os.waitpid(pid, 0)
    one.beat()
    assert BeaconFile(tmp_path / "b").read().clock.steps == 1


COLD = """
import sys, torch
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters())
for batch in torch.utils.data.DataLoader(torch.ones(6, 4)):
    net(batch).sum().backward()
    optimizer.step()
import os; os.kill(os.getpid(), 9)
"""


def test_a_rank_that_is_not_forked_is_counted_from_its_first_step_to_its_death(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COLD)
    ours = {"UNBROKEN_KEEPER_SOCKET": str(tmp_path / "keeper.sock"), "UNBROKEN_ATTEMPT": "1", "RANK": "0"}
    command = [sys.executable, "-u", bootstrap.__file__, "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **ours}, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    read = BeaconFile(tmp_path / "attempts/1/rank0.beacon").read()
    assert (read.clock.steps, read.clock.calls, read.clock.batches) == (6, 6, 6)


@pytest.mark.slow
def test_a_compiled_optimizer_is_seen_without_a_break_in_its_graph(figures: list[float]) -> None:
    """It cannot be counted."""
    from torch._dynamo.testing import CompileCounter

    class Plain(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
        @torch.no_grad()  # type: ignore[untyped-decorator]
        def step(self) -> None:
            for group in self.param_groups:
                for one in group["params"]:
                    one.add_(one.grad, alpha=-0.1)

    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
    hooks.clear()
    one = clock.StepClock(figures)
    one.listen()
    net = model()
    optimizer = Plain(net.parameters(), {})
    graphs = CompileCounter()
    step = torch.compile(optimizer.step, fullgraph=True, backend=graphs)
    for _ in range(5):
        train(net)
        before = one.compiled.stepped, figures[AT]
        step()
        assert one.compiled.stepped
        one.beat()
        assert (before[0], figures[STEPS]) == (False, 0)
        assert figures[AT] > before[1]
    assert graphs.frame_count == 1
