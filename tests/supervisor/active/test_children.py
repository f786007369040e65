"""Children of the active tests: what they say is kept, and they end when their time is up, whatever they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from recovery.active_verdicts import Figure, judge
from recovery.group_tests import group_outcome
from supervisor.active import children
from supervisor.active.children import ChildReport, WarmParent, run_children
from supervisor.active.suite import figures_of, mark_busy, part_of

SCRIPT = """#!{python}
import json, os, signal, sys, time
order = json.loads(sys.stdin.readline())
def tell(**words): print(json.dumps(words), flush=True)
tell(kind="a kind", uuid="")
{body}
tell(end=True)
"""


@pytest.fixture
def training_python(tmp_path: Path) -> Any:
    """A program in place of the training Python, which does `body`."""

    def made(body: str) -> str:
        path = tmp_path / f"python{len(list(tmp_path.iterdir()))}"
        path.write_text(SCRIPT.format(python=sys.executable, body=body))
        path.chmod(0o755)
        return str(path)

    return made


def run(python: str, count: int = 1, deadline_s: float = 20.0, **more: Any) -> tuple[ChildReport, ...]:
    orders = [{"do": "node", "device": f"cuda:{number}"} for number in range(count)]
    given = {"environment": {**os.environ, "RANK": "3"}, "memory_bytes": 1 << 34, **more}
    return run_children(python, orders, deadline_s, **given)


def test_what_a_child_says_is_kept(training_python: Any) -> None:
    body = 'tell(test="t", ok=True, unit="s", values=[1.0, 3.0, 2.0], rank=os.environ.get("RANK"))'
    (report,) = run(training_python(body))
    (figure,) = figures_of("n1", (report,), 5.0)
    assert (figure.node, figure.gpu, figure.kind, figure.value, figure.unit) == ("n1", "cuda:0", "a kind", 2.0, "s")
    assert report.lines[1]["rank"] is None, "torchrun's variables are not for children"


def test_one_that_hangs_is_killed_and_the_others_are_heard(training_python: Any) -> None:
    body = """
tell(test="first", ok=True)
if order["device"] == "cuda:1":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
    time.sleep(600)
"""
    started = time.monotonic()
    well, hung = run(training_python(body), 2, 3.0)
    assert time.monotonic() - started < 25
    assert not well.hung
    assert not well.died
    assert "first" in hung.hung
    assert not hung.unkillable
    assert [bool(one.hung) for one in figures_of("n1", (hung,), 0.0)] == [False, True]


def test_a_stopped_one_is_killed(training_python: Any) -> None:
    (report,) = run(training_python("os.kill(os.getpid(), signal.SIGSTOP)"), 1, 2.0)
    assert report.hung


def test_how_one_died(training_python: Any) -> None:
    (report,) = run(training_python("os.kill(os.getpid(), signal.SIGSEGV)"))
    assert "SIGSEGV" in report.died
    (figure,) = figures_of("n1", (report,), 0.0)
    assert figure.crashed
    (report,) = run(training_python('sys.exit("out of memory")'))
    assert "out of memory" in report.died
    (figure,) = figures_of("n1", (report,), 0.0)
    assert figure.unfinished
    assert not figure.fault


def test_words_after_the_end_of_the_answer(training_python: Any) -> None:
    body = 'os.close(1); time.sleep(0.5); os.write(2, b"last words"); os._exit(3)'
    (report,) = run(training_python(body))
    assert "last words" in report.died


def test_one_that_takes_too_much_memory_is_killed(training_python: Any) -> None:
    (report,) = run(
        training_python("held = bytearray(os.urandom(1)) * (200 << 20); time.sleep(600)"), memory_bytes=100 << 20
    )
    assert "memory" in report.hung


def test_a_flood_is_bounded(training_python: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "ANSWER_BYTES", 4096)
    body = """
print("[1, 2]"); print("{"); print("\\x00\\xff")
for number in range(100000): tell(test="t" * 50, ok=True)
"""
    (report,) = run(training_python(body))
    assert sum(len(json.dumps(line)) for line in report.lines) <= 4096
    assert report.lines


def test_ranks_of_a_group_do_not_wait_for_a_dead_one(training_python: Any) -> None:
    body = 'sys.exit("broken") if order["device"] == "cuda:0" else time.sleep(600)'
    started = time.monotonic()
    dead, waiting = run(training_python(body), 2, 120.0, together=True)
    assert time.monotonic() - started < 60
    assert dead.died
    assert waiting.hung


def test_a_python_that_is_not_there_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        run(str(tmp_path / "nothing"))


def test_a_gpu_that_others_use_is_not_called_slow() -> None:
    figures = [
        Figure(node="n1", gpu="GPU-1", test="matmul", value=300.0),
        Figure(node="n1", gpu="GPU-1", test="memory_patterns", fault="8 words changed"),
        Figure(node="n1", gpu="GPU-2", test="matmul", value=700.0),
    ]
    results = judge(mark_busy(figures, {"GPU-1": "python, process 4711"}))
    assert [one.verdict for one in results] == ["unknown", "fail", "unknown"]
    assert "4711" in results[0].reason


def report(device: str = "cpu", *lines: dict[str, Any], **more: Any) -> ChildReport:
    return ChildReport(device=device, lines=({"kind": "k"}, *lines), **more)


def test_a_group_is_as_slow_as_its_slowest_rank() -> None:
    fast = report("cpu", {"test": "all_reduce_large", "ok": True, "unit": "s", "values": [1.0]})
    slow = report("cpu", {"test": "all_reduce_large", "ok": True, "unit": "s", "values": [3.0]})
    outcome = group_outcome(("a", "b"), {"a": part_of((fast, slow)), "b": part_of((fast,))})
    assert outcome.seconds == {"all_reduce_large": 3.0}
    assert not outcome.failed


def test_what_makes_a_group_fail() -> None:
    well = report()
    wrong = report("cpu", {"test": "all_reduce_small", "ok": False, "why": "what arrived is not what was sent"})
    for bad in ((wrong,), (report(hung="x"),), (report(died="x"),), None):
        assert group_outcome(("a", "b"), {"a": part_of((well,)), "b": None if bad is None else part_of(bad)}).failed
    assert not group_outcome(("a", "b"), {"a": part_of((well,)), "b": part_of((well,))}).failed


def test_what_says_nothing_of_a_node() -> None:
    """torch that is slow to come, memory that is not there: another partner would feel the same."""
    well = report(died="store: timed out")
    for bad in (
        ChildReport(device="cpu", hung="did not end within 15 s, after its start"),
        ChildReport(device="cpu", died="ended with code 1: ImportError"),
        report(died="OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
        report(hung="it took more than 16384 MiB of memory, after all_reduce_small"),
        report(died="was killed by SIGKILL"),
    ):
        outcome = group_outcome(("a", "b"), {"a": part_of((well,)), "b": part_of((well, bad))})
        assert outcome.busy, "nobody is blamed for it"


def test_a_group_of_which_every_node_is_busy() -> None:
    hung = report(hung="did not end", took_s=15.0, waited_s=6.0)
    free = report(took_s=15.0, waited_s=0.5)
    wrong = report("cpu", {"test": "all_reduce_small", "ok": False}, took_s=15.0, waited_s=6.0)
    assert group_outcome(("a", "b"), {"a": part_of((hung,)), "b": part_of((hung, free))}).busy
    assert not group_outcome(("a", "b"), {"a": part_of((hung,)), "b": part_of((free,))}).busy
    assert not group_outcome(("a", "b"), {"a": part_of((hung,)), "b": part_of((wrong,))}).busy


JOINED = {"joined": True}


@pytest.mark.parametrize(
    ("waited_s", "others_s", "stalled_s", "lines", "busy"),
    [
        (0.2, 0.3, 4.8, (JOINED,), False),  # both waited for the other's data, and no CPU kept them from it
        (0.2, 4.0, 4.8, (JOINED,), True),  # one of them had no CPU, the other waited for it
        (1.4, 1.4, 4.8, (JOINED,), True),  # each for a part
        (0.0, 0.0, 1.0, (JOINED,), True),  # too short to tell
        (0.0, 0.0, 4.8, (), True),  # one of them may not have been told to come
    ],
)
def test_an_exchange_that_stalls_although_the_cpus_had_time(
    waited_s: float, others_s: float, stalled_s: float, lines: Any, busy: bool
) -> None:
    """On busy nodes: what kept it from its end was what is between them."""
    one, other = (
        report("cpu", *lines, died="timed out", took_s=9.0, waited_s=5.0, stalled_s=stalled_s, stalled_waited_s=waited)
        for waited in (waited_s, others_s)
    )
    outcome = group_outcome(("a", "b"), {"a": part_of((one,)), "b": part_of((other,))})
    assert outcome.failed
    assert bool(outcome.busy) == busy


def test_what_a_quota_takes_is_no_want_of_cpus() -> None:
    """Of one node: it is slow by itself. Of all: a missed deadline says nothing, that they are slow may be compared."""
    held = {"took_s": 9.0, "waited_s": 6.5, "throttled_s": 6.3}
    slow, free = report(**held), report(took_s=9.0, waited_s=3.0)
    one = group_outcome(("a", "b"), {"a": part_of((slow,)), "b": part_of((free,))})
    assert not one.busy
    assert one.throttled == {"a": 0.7}
    late = report(died="timed out", **held)
    assert not group_outcome(("a", "b"), {"a": part_of((late,)), "b": part_of((free,))}).busy
    assert group_outcome(("a", "b"), {"a": part_of((late,)), "b": part_of((slow,))}).busy
    assert not group_outcome(("a", "b"), {"a": part_of((slow,)), "b": part_of((slow,))}).busy


def test_how_long_a_child_had_said_nothing(training_python: Any) -> None:
    """What it says of its own end is no progress."""
    body = 'tell(joined=True)\ntime.sleep(3)\ntell(error="timed out")\ntime.sleep(1)\nsys.exit(1)'
    (one,) = run(training_python(body), 1, 120.0)
    assert one.died == "timed out"
    assert 3.0 <= one.stalled_s <= one.took_s


# ----- forked from a parent that has imported torch -----


@pytest.fixture
def warm(tmp_path: Path) -> Any:
    """A parent of this Python with `torch` as given, in place of the real one; and how it came up."""
    made = []

    def start(more: str = "") -> tuple[WarmParent, str]:
        package = tmp_path / "torch"
        (package / "distributed").mkdir(parents=True, exist_ok=True)
        (package / "distributed" / "__init__.py").touch()
        lines = ["import time", "class cuda:", "    is_initialized = is_available = staticmethod(lambda: False)", more]
        (package / "__init__.py").write_text("\n".join(lines))
        parent = WarmParent(sys.executable, {**os.environ, "PYTHONPATH": str(tmp_path)}, tmp_path)
        made.append(parent)
        return parent, parent.ready(30.0)

    yield start
    for parent in made:
        parent.close()


def forked(parent: WarmParent, deadline_s: float = 20.0) -> ChildReport:
    """`/bin/false` in place of Python: whoever is not forked ends with code 1."""
    environment = {**os.environ, "PYTHONPATH": "x", "TEST_CHANGED": "yes"}
    (one,) = run_children(
        "/bin/false", [{"do": "look"}], deadline_s, environment=environment, memory_bytes=1 << 34, warm=parent
    )
    return one


def test_children_are_forked_after_the_import(warm: Any) -> None:
    parent, why = warm()
    assert why == ""
    first, second = forked(parent), forked(parent)
    assert "device" in first.died, "the torch that is imported here has no devices: the child says so itself"
    assert first.died == second.died
    parent.close()
    assert "code 1" in forked(parent).died


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ("import threading; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "threads"),
        ("import _no_such_module", "imported"),
        ("import os; os._exit(3)", "ended"),
    ],
)
def test_none_is_forked_where_it_is_not_safe(warm: Any, more: str, word: str) -> None:
    parent, why = warm(more)
    assert word in why
    assert "code 1" in forked(parent).died


def test_an_import_that_takes_too_long(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    parent = WarmParent(str(python), os.environ, tmp_path)
    with pytest.raises(TimeoutError):
        parent.ready(0.5)


def test_a_stopped_parent_forks_no_more(warm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "FORK_S", 1.0)
    parent, _ = warm()
    os.kill(parent.pid, signal.SIGSTOP)
    assert "code 1" in forked(parent).died


def test_children_end_with_the_one_that_is_killed(warm: Any) -> None:
    """Parent and child die with SIGKILL of what started them, and leave nothing."""
    parent, _ = warm("    is_available = staticmethod(lambda: time.sleep(600))")
    done: list[ChildReport] = []
    thread = threading.Thread(target=lambda: done.append(forked(parent, 60.0)))
    thread.start()
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    deadline = time.monotonic() + 30
    while not (begun := children.read_text().split()):
        assert time.monotonic() < deadline
    os.kill(parent.pid, signal.SIGKILL)
    thread.join(30)
    # A parent that dies before it has told the child's number counts as one that cannot fork: /bin/false is run then.
    assert any(word in done[0].died for word in ("SIGKILL", "ended"))
    while any(Path(f"/proc/{pid}").exists() for pid in begun):
        assert time.monotonic() < deadline


LEAKS = """
import json, os, resource, subprocess, sys, time
from pathlib import Path
from supervisor.active.children import WarmParent, run_children
python, warm_up = sys.argv[1], sys.argv[2] == "warm"
warm = WarmParent(sys.executable, os.environ, Path("/")) if warm_up else None
assert warm is None or warm.ready(60.0) == ""
def lives(pid):
    try: return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError: return False
def held(): return sorted(os.listdir("/proc/self/fd"), key=int)
def children():
    parents = [os.getpid(), *([warm.pid] if warm is not None and warm.pid else [])]
    pids = [int(pid) for one in parents for pid in open(f"/proc/{one}/task/{one}/children").read().split()]
    return [pid for pid in pids if lives(pid) and pid not in parents]
found, before = [], len(held())
limit = max(map(int, held()[:-1])) + 1
for more in range(1, 30):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit + more, hard))
    raised = False
    try:
        run_children(python, [{"do": "look"}] * 2, 20.0, environment=dict(os.environ), memory_bytes=1 << 34, warm=warm)
    except OSError:
        raised = True
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    end = time.monotonic() + 20.0
    while (left := children()) and time.monotonic() < end: time.sleep(0.05)
    if warm is not None and not warm.pid:
        warm = WarmParent(sys.executable, os.environ, Path("/"))
        assert warm.ready(60.0) == ""
    found.append([more, raised, len(held()) - before, len(left)])
print(json.dumps(found))
"""


@pytest.mark.parametrize("how", ["fresh", "warm"])
def test_where_no_descriptor_is_left_none_is_lost(how: str, training_python: Any, tmp_path: Path) -> None:
    """Whatever cannot be opened of what a child needs: it ends, and all that was opened is closed."""
    package = tmp_path / "torch"
    (package / "distributed").mkdir(parents=True)
    (package / "distributed" / "__init__.py").touch()
    (package / "__init__.py").write_text("class cuda:\n    is_initialized = staticmethod(lambda: False)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    argv = [sys.executable, "-c", LEAKS, training_python("time.sleep(0.2)"), how]
    done = subprocess.run(argv, stdout=subprocess.PIPE, env=environment, timeout=200, check=True)
    found = json.loads(done.stdout)
    assert {raised for _, raised, *_ in found} == {True, False}, "it fails with few, and goes on with enough"
    assert [one for one in found if one[2:] != [0, 0]] == []
