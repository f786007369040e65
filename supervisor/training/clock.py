"""Counts the steps of the script's optimizers, and the time that it waits for data, with no change to the script.

Steps: torch's public hook for all optimizers (`register_optimizer_step_post_hook`). Waits: two attributes of torch's
data loader iterator, one read when a batch is asked for, one set when it is there. Nothing of ours is in a stack while
torch works, and nothing is kept in an optimizer: no copy, pickle or traceback shows it. The figures go into the
beacon's page at once, so that they are exact when the process is killed.

It must never disturb the script: it takes about a microsecond for a step or a batch, and swallows its own errors.
"""

from __future__ import annotations

import os
import sys
import weakref
from _thread import get_ident
from time import monotonic
from typing import Any, Callable  # noqa: UP035 (Python 3.9)

OPTIMIZER, COMPILER = "torch.optim.optimizer", "torch.compiler"
LOADER = "torch.utils.data.dataloader"
MOST_OPTIMIZERS = 4096
"""That are told from each other within a step. (Some scripts have one for each parameter.)"""
RECENT = 50
STEPS, AT, SLOWEST_S, CALLS, INPUT_S, BATCHES = range(6)
"""Where each figure is. The newest step's time is monotonic; `SLOWEST_S`: the longest of the last 50 to 100 steps."""


class CompiledSteps:
    """`stepped`: a compiled optimizer has made a step.

    To set a slot is all that a hook may do while torch compiles it: that is done again at each step, without a break in
    the graph. Nothing can be counted there.
    """

    __slots__ = ("stepped",)

    def __init__(self) -> None:
        self.stepped = False


class StepClock:
    """Writes into `figures`, a writable sequence of six numbers, from `listen` on. Made on the script's main thread."""

    def __init__(self, figures: Any, now: Callable[[], float] = monotonic) -> None:
        self.figures = figures
        self.now = now
        self.compiled = CompiledSteps()
        self.main_thread = get_ident()
        self.counts = self.times = False
        os.register_at_fork(after_in_child=self._forget)

    def listen(self) -> bool:
        """Begin with what of torch is imported by now; True when there is nothing left to begin with.

        On the main thread only: it may be going through torch's hooks at this moment.
        """
        if get_ident() != self.main_thread:
            return False
        try:
            return self._listen(sys.modules)
        except Exception as error:
            let_pass_what_is_not_ours(error)
            self.counts = self.times = True  # another torch: what has begun goes on
            return True

    def _listen(self, modules: Any) -> bool:
        if not self.counts:
            register = getattr(modules.get(OPTIMIZER), "register_optimizer_step_post_hook", None)
            tracing = getattr(modules.get(COMPILER), "is_dynamo_compiling", None)
            if register is not None and tracing is not None:
                self.counts = True
                register(self._counter(tracing))
        if not self.times:
            iterator = getattr(modules.get(LOADER), "_BaseDataLoaderIter", None)
            if iterator is not None and callable(vars(iterator).get("__next__")):
                self.times = True
                if not {"_profile_name", "_num_yielded"} & set(vars(iterator)):
                    asked = Asked("_profile_name", self)
                    iterator._profile_name, iterator._num_yielded = asked, Given("_num_yielded", self, asked)
        return self.counts and self.times

    def beat(self) -> None:
        """The beacon's thread: a compiled optimizer's step is seen now."""
        if self.compiled.stepped:
            self.compiled.stepped = False
            self.figures[AT] = self.now()

    def _forget(self) -> None:
        """In a forked child: the page is the rank's alone."""
        self.figures = [0.0] * 6

    def _counter(self, tracing: Callable[[], bool]) -> Callable[..., None]:
        """The hook. A step is a round in which no optimizer steps twice: several that take turns make one step, and
        one that takes the place of another goes on counting."""
        now, compiled = self.now, self.compiled
        seen: set[int] = set()
        first: Callable[[], Any] = object
        """The optimizer that has begun this round; None once it is gone: what steps now has come in its place."""
        slowest = before = 0.0

        def stepped(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if tracing():
                compiled.stepped = True
                return
            nonlocal first, slowest, before
            try:
                figures = self.figures
                figures[CALLS] += 1
                key = id(optimizer)
                if key not in seen and 0 < len(seen) < MOST_OPTIMIZERS and first() is not None:
                    seen.add(key)
                    return
                seen.clear()
                seen.add(key)
                if first() is not optimizer:
                    first = weakref.ref(optimizer)
                at, last = now(), figures[AT]
                if last and at - last > slowest:
                    slowest = at - last
                    figures[SLOWEST_S] = max(slowest, before)
                steps = figures[STEPS] + 1
                if not steps % RECENT:
                    before, slowest = slowest, 0.0
                    figures[SLOWEST_S] = before
                figures[AT] = at
                figures[STEPS] = steps
            except Exception as error:
                let_pass_what_is_not_ours(error)

        return stepped


class Asked:
    """An attribute of the loader's iterator that torch reads when the script asks for a batch."""

    def __init__(self, name: str, clock: StepClock) -> None:
        self.name = name
        self.main_thread = clock.main_thread
        self.by: Any = None
        self.at = 0.0

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        try:
            value = instance.__dict__[self.name]
        except (AttributeError, KeyError):  # as if the class had none of that name
            raise AttributeError(self.name) from None
        if get_ident() == self.main_thread:
            self.by, self.at = id(instance), monotonic()
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self.name] = value
        if self.by == id(instance):  # a new one, where an old one was whose end had been asked for
            self.by = None


class Given:
    """The one that it sets when the batch is there: the number of batches."""

    def __init__(self, name: str, clock: StepClock, asked: Asked) -> None:
        self.name = name
        self.clock = clock
        self.main_thread = clock.main_thread
        self.asked = asked

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        try:
            return instance.__dict__[self.name]
        except (AttributeError, KeyError):
            raise AttributeError(self.name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self.name] = value
        try:
            asked = self.asked
            if asked.by == id(instance) and get_ident() == self.main_thread:
                asked.by = None
                if not value:  # it begins anew: what lies between two epochs is no wait
                    return
                figures = self.clock.figures
                figures[INPUT_S] += monotonic() - asked.at
                figures[BATCHES] += 1
        except Exception as error:
            let_pass_what_is_not_ours(error)


def let_pass_what_is_not_ours(error: Exception) -> None:
    """The script's signal handler may have raised it while this was running."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None and trace.tb_frame.f_code.co_filename != __file__:
        raise error
