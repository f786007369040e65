"""Stock torchrun with our rendezvous, logs specs and stub: the same results as plain torchrun, and restarts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import until

pytestmark = pytest.mark.e2e
TORCHRUN = Path(sys.executable).with_name("torchrun")
DDP = """
import os, time, torch, torch.distributed as dist
print('up', os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT'], time.time(), os.getpid(), flush=True)
dist.init_process_group('gloo')
x = torch.ones(1); dist.all_reduce(x); print('sum', x.item(), flush=True)
if os.environ['UNBROKEN_ATTEMPT'] in os.environ.get('WAIT', '').split(','): time.sleep(300)
dist.barrier(); dist.destroy_process_group()
"""
RECORD = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise RuntimeError('CUDA out of memory')
main()
"""
ONE = "import os, time\nif os.environ['RANK'] == '0': time.sleep(60)\n"
"""Rank 1 fails and torchrun ends rank 0: or the order would be by chance."""
SLEEP = "import os, time; print('up', os.getpid(), flush=True); time.sleep(300)"


def plain(script: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The same under torchrun alone."""
    command = [TORCHRUN, "--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.02", *options, script]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("UNBROKEN_", "OMP_"))}
    return subprocess.run(
        command, env={**environment, **variables}, capture_output=True, text=True, timeout=90, cwd=script.parent
    )


def report(text: str) -> list[str]:
    """Lines of torchrun's own report, without what differs from run to run."""
    lines = [line for line in text.splitlines() if "exitcode" in line or "error_file" in line or "traceback" in line]
    lines = [line for line in lines if not line.startswith(("E1", "W1"))]
    return [re.sub(r"pid: \d+|PID \d+|<N/A>|error_file *: .*|/\S*", "", line).strip() for line in lines]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(ONE + "raise SystemExit(3)", id="exit 3", marks=pytest.mark.slow),
        pytest.param(ONE + "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", id="segfault"),
        pytest.param("import os; os._exit(0)", id="hard exit", marks=pytest.mark.slow),
        pytest.param(ONE + RECORD, id="record"),
    ],
)
def test_ends_as_under_torchrun(text: str, agent: Any, script: Callable[..., Path], keeper: Any) -> None:
    path = script(text)
    expected = plain(path)
    assert agent.run("--nproc-per-node", "2", str(path), timeout_s=90) == expected.returncode
    assert report((keeper.local_dir / "launcher.err").read_text())[-4:] == report(expected.stderr)[-4:]
    if "record" in text:
        rank = next(worker["rank"] for worker in keeper.workers(agent.attempt) if worker["order"] == 0)
        error = json.loads((keeper.attempt_dir(agent.attempt) / f"rank{rank}.error.json").read_text())
        assert "CUDA out of memory" in error["message"]["message"]


def test_output_goes_to_files_as_wished(agent: Any, script: Callable[..., Path], keeper: Any, tmp_path: Path) -> None:
    path = script("import os, sys; r = os.environ['RANK']; print('out', r, 'ö'); print('err', r, file=sys.stderr)")
    streams: dict[str, dict[tuple[int, str], dict[str, Any]]] = {}
    terminal: dict[str, str] = {}

    def run(name: str, *options: str) -> Path:
        assert agent.run("--nproc-per-node", "2", *options, str(path)) == 0
        folder: Path = keeper.attempt_dir(agent.attempt)
        entries = json.loads((folder / "streams.json").read_text())
        streams[name] = {(entry["rank"], entry["stream"]): entry for entry in entries}
        for (rank, stream), entry in streams[name].items():
            assert f"{stream} {rank}" in " ".join(Path(entry["path"]).read_text().splitlines())
        terminal[name] = (keeper.local_dir / "launcher.out").read_text()
        return folder

    folder = run("default")
    assert all(entry["terminal"] and not entry["tee"] for entry in streams["default"].values())
    assert streams["default"][1, "err"]["path"] == str(folder / "rank1.err")

    run("tee", "--tee", "0:3,1:1", "--log-dir", str(tmp_path / "logs"))
    assert terminal["tee"].splitlines().count("[default0]:out 0 ö") == 1
    assert "[default1]:out 1 ö" in terminal["tee"]
    assert [entry["terminal"] for entry in streams["tee"].values()] == [False, False, False, True]
    layout = f"job_[^/]+/attempt_{agent.attempt - 1}/1/stdout.log"
    assert re.fullmatch(layout, str(Path(streams["tee"][1, "out"]["path"]).relative_to(tmp_path / "logs")))

    run("redirects", "-r", "3")
    assert not any(entry["terminal"] for entry in streams["redirects"].values())
    run("filter", "--local-ranks-filter", "1")
    assert [entry["terminal"] for entry in streams["filter"].values()] == [False, False, True, True]
    run("filtered tee", "--local-ranks-filter", "1", "--tee", "3")
    assert "[default0]" not in terminal["filtered tee"]
    assert "[default1]:out 1 ö" in terminal["filtered tee"]


def test_killed_rank_to_both_new_workers(agent: Any, script: Callable[..., Path], keeper: Any) -> None:
    path = script(DDP)
    agent.restarts = 2
    first = agent.attempt + 1
    pid, _ = agent.launch("--nproc-per-node", "2", str(path), WAIT=f"{first},{first + 1}")
    took = []
    for attempt in (first, first + 1):
        until_all(keeper, attempt, "sum 2.0")
        victim = next(worker for worker in keeper.workers(attempt) if worker["rank"] == 1)
        killed = time.time()
        os.kill(victim["pid"], signal.SIGKILL)
        until_all(keeper, attempt + 1, "up")
        ups = [float(agent.output(rank, attempt=attempt + 1).split()[3]) for rank in (0, 1)]
        took.append(max(ups) - killed)
    state = keeper.wait_for(lambda state: state["launcher"]["status"] is not None)
    assert (state["launcher"]["pid"], state["launcher"]["status"]) == (pid, 0)
    assert agent.output(0).split()[2] == str(first + 1)  # the restart count is the attempt's, on every node
    first_ends = [worker for worker in keeper.workers(first) if worker["order"] == 0]
    assert [(worker["rank"], worker["stopped_by_us"]) for worker in first_ends] == [(1, False)]
    print("killed rank to both new workers, seconds:", took)
    assert min(took) < 3


def until_all(keeper: Any, attempt: int, word: str, ranks: int = 2) -> None:
    """Wait until every rank of the attempt has written a whole line with `word`."""
    paths = [keeper.attempt_dir(attempt) / f"rank{rank}.out" for rank in range(ranks)]

    def written() -> bool:
        return all(path.exists() and word in path.read_text().rpartition("\n")[0] for path in paths)

    until(written, 60, lambda: str([path.exists() and path.read_text() for path in paths]))


def test_launcher_killed_leaves_nothing(
    agent: Any, script: Callable[..., Path], keeper: Any, alive: Callable[[int], bool], wait_until: Callable[..., None]
) -> None:
    pid, attempt = agent.launch("--nproc-per-node", "2", str(script(SLEEP)))
    until_all(keeper, attempt, "up")
    workers = keeper.workers(attempt)
    os.kill(pid, signal.SIGKILL)
    keeper.wait_for(lambda state: all(worker["status"] == 9 for worker in state["workers"][-2:]))
    wait_until(lambda: not any(alive(worker[key]) for worker in workers for key in ("pid", "stub")))
    assert all(worker["stopped_by_us"] for worker in keeper.workers(agent.attempt))
    assert json.loads((keeper.local_dir / "launcher.exit").read_text())["status"] == 9


def test_keeper_killed_leaves_nothing(
    own_keeper: Callable[..., Any],
    make_agent: Callable[..., Any],
    script: Callable[..., Path],
    alive: Callable[[int], bool],
    wait_until: Callable[..., None],
) -> None:
    keeper = own_keeper()
    agent = make_agent(keeper)
    launcher, _attempt = agent.launch("--nproc-per-node", "2", str(script(SLEEP)))
    until_all(keeper, 1, "up")
    pids = [worker[key] for worker in keeper.workers(1) for key in ("pid", "stub")]
    keeper.process.kill()
    wait_until(lambda: not any(alive(pid) for pid in [launcher, *pids]))


def test_stop_is_torchruns_own(agent: Any, script: Callable[..., Path], keeper: Any) -> None:
    # Short sleeps: Python calls no handler of a signal that came while a thread was giving up its lock to sleep.
    path = script(
        "import os, signal, sys, time\n"
        "def term(*a):\n    print('saving', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, term)\nprint('up', flush=True)\nwhile True: time.sleep(0.05)"
    )
    _pid, attempt = agent.launch("--nproc-per-node", "2", str(path))
    until_all(keeper, attempt, "up")
    assert keeper.ask(op="stop", signal=signal.SIGTERM, grace_s=20) == {"ok": True}
    state = keeper.wait_for(lambda state: state["launcher"]["status"] is not None)
    assert os.waitstatus_to_exitcode(state["launcher"]["status"]) == 1
    said = (keeper.local_dir / "launcher.err").read_text()
    assert "Received 15 death signal" in said
    assert "SignalException" not in said, "nobody wants torchrun's frames for that"
    assert "saving" in agent.output(0) + agent.output(1)
    assert all(worker["stopped_by_us"] for worker in keeper.workers(agent.attempt))


def test_what_slurm_sends_to_every_process_is_the_ranks_alone(
    agent: Any, script: Callable[..., Path], keeper: Any
) -> None:
    """SIGUSR1 leaves keeper and torchrun alone. After SIGTERM, and the stop that follows, the ranks can save."""
    path = script(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *a: print('usr1', flush=True))\n"
        "def term(*a):\n    print('saving', flush=True); time.sleep(2); print('saved', flush=True); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, term)\nprint('up', flush=True)\nwhile True: time.sleep(0.05)"
    )
    launcher, attempt = agent.launch("--nproc-per-node", "2", str(path))
    until_all(keeper, attempt, "up")
    ranks = keeper.workers(attempt)
    everybody = [keeper.process.pid, launcher, *(worker[key] for worker in ranks for key in ("stub", "pid"))]
    for number, word in ((signal.SIGUSR1, "usr1"), (signal.SIGTERM, "saving")):
        for pid in everybody:
            os.kill(pid, number)
        until_all(keeper, attempt, word)
    assert keeper.ask(op="stop", signal=signal.SIGTERM, grace_s=20) == {"ok": True}
    until_all(keeper, attempt, "saved")
    state = keeper.wait_for(lambda state: state["launcher"]["status"] is not None)
    assert [worker["status"] for worker in state["workers"][-2:]] == [0, 0]


def test_stop_ends_what_does_not_listen(agent: Any, script: Callable[..., Path], keeper: Any) -> None:
    path = script("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(300)")
    _pid, attempt = agent.launch("--nproc-per-node", "2", str(path))
    until_all(keeper, attempt, "up")
    keeper.ask(op="stop", signal=signal.SIGTERM, grace_s=0.3)
    assert keeper.wait_for(lambda state: state["launcher"]["status"] is not None)["launcher"]["status"] == 9


def test_agent_gone_and_back(agent: Any, script: Callable[..., Path], keeper: Any) -> None:
    """An agent that dies and returns within seconds is not noticed by the run."""
    pid, attempt = agent.launch("--nproc-per-node", "2", str(script(SLEEP)))
    until_all(keeper, attempt, "up")
    agent.vanish()
    agent.listen()
    victim = keeper.workers(attempt)[0]
    agent.restarts = 1
    os.kill(victim["pid"], signal.SIGKILL)
    until_all(keeper, attempt + 1, "up")
    os.kill(pid, signal.SIGKILL)
    keeper.wait_for(lambda state: state["launcher"]["status"] is not None)


def test_leave_ends_the_launcher_well(agent: Any, script: Callable[..., Path]) -> None:
    agent.leave = True
    assert agent.run("--nproc-per-node", "2", str(script(SLEEP))) == 0


def test_cold_ranks_train_as_well(agent: Any, script: Callable[..., Path], keeper: Any) -> None:
    assert agent.run("--nproc-per-node", "2", str(script(DDP)), UNBROKEN_WARM="0", timeout_s=90) == 0
    assert "sum 2.0" in agent.output(1)
    assert [worker["status"] for worker in keeper.workers(agent.attempt)] == [0, 0]


def test_modules_and_no_python(agent: Any, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "train.py").write_text("from . import __name__ as n; import sys; print(n, sys.argv[1:])")
    assert agent.run("--nproc-per-node", "2", "-m", "pack.train", "--x", "1", cwd=tmp_path) == 0
    assert agent.output(1) == "pack ['--x', '1']\n"
    assert agent.run("--nproc-per-node", "1", "--no-python", "echo", "hi", cwd=tmp_path) == 0
    assert agent.output(0) == "hi\n"
