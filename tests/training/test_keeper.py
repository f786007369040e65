"""The keeper's socket and its duties as the parent of launcher and ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tables import table

CASES = table(__file__)

TRAINS = """
import os, resource, sys
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
had = set(sys.modules)
import torch
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
torch.distributed.init_process_group("gloo", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 2)).sum().backward()
optimizer.step()
torch.save([model.state_dict(), optimizer.state_dict()], sys.argv[1])
torch.load(sys.argv[1])
print(*sorted(name for name in set(sys.modules) - had if name.startswith("torch")))
"""
DROPS = """
import weakref, torch
import click
class Held: pass
click._cache, torch._cache_of_mine = Held(), Held()
import pluggy
click.echo = print
import iniconfig
held = weakref.ref(click._cache), weakref.ref(torch._cache_of_mine)
click._cache = torch._cache_of_mine = None
print(*[one() for one in held])
"""
SLEEP = "import os, sys, time\nprint('up', flush=True)\ntime.sleep(300)\n"


def stub(keeper: Any, script: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    ours = {"UNBROKEN_KEEPER_SOCKET": str(keeper.socket_path), "RANK": "0", "LOCAL_RANK": "0"}
    return subprocess.Popen(
        [keeper.stub, "-u", script, *arguments],
        env={**keeper.environment, **ours, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start(keeper: Any, script: Path, attempt: int, **variables: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A worker that runs; its stub and the keeper's word about it."""
    process = stub(keeper, script, UNBROKEN_ATTEMPT=str(attempt), **variables)
    assert process.stdout.readline() == "up\n"
    return process, keeper.workers(attempt)[-1]


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_a_rank_is_soon_at_its_first_step(
    keeper: Any, script: Callable[..., Path], tmp_path: Path, local_rank: str
) -> None:
    """Pages that a fork copies, and imports before which it looks for changes, are what a recovery waits for."""
    attempt = str(911 + int(local_rank))
    process = stub(keeper, script(TRAINS), str(tmp_path / "saved.pt"), LOCAL_RANK=local_rank, UNBROKEN_ATTEMPT=attempt)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    copied, imported = out.split("\n")[:2]
    assert int(copied) < 12_000  # of 45,000; 21,000 in a rank that let go of what is remembered of modules
    assert imported == ""


def test_a_rank_that_looks_for_no_more_changes_holds_nothing_of_the_script(
    keeper: Any, script: Callable[..., Path]
) -> None:
    """What a package drops, a tensor say, is let go of as without us."""
    assert stub(keeper, script(DROPS), UNBROKEN_ATTEMPT="914").communicate(timeout=60) == ("None None\n", "")


def test_writes_the_true_end_and_tells_at_once(keeper: Any, script: Callable[..., Path]) -> None:
    process, worker = start(keeper, script(SLEEP), 901, RANK="5", LOCAL_RANK="1")
    assert (worker["rank"], worker["local_rank"], worker["status"]) == (5, 1, None)
    killed_at = time.time()
    os.kill(worker["pid"], signal.SIGSEGV)
    keeper.wait_for(lambda state: state["workers"][-1]["status"] is not None)
    assert process.wait(60) == -signal.SIGSEGV
    record = json.loads((keeper.attempt_dir(901) / "rank5.exit").read_text())
    assert os.WTERMSIG(record["status"]) == signal.SIGSEGV
    assert record["start_time"] == worker["start_time"]
    assert record["order"] == 0
    assert not record["stopped_by_us"]
    assert 0 <= record["ended_at"] - killed_at < 5
    # The stub dies of the same signal, without a core dump of its own.
    assert not list(Path.cwd().glob(f"core.{process.pid}"))


def test_kill_takes_groups_along_and_marks_them(
    keeper: Any, script: Callable[..., Path], alive: Callable[[int], bool], wait_until: Callable[..., None]
) -> None:
    path = script(
        "import os, subprocess, time\n"
        "p = subprocess.Popen(['sleep', '300'])\nopen(__file__ + '.child', 'w').write(str(p.pid))\n"
        "print('up', flush=True)\ntime.sleep(300)"
    )
    old, worker = start(keeper, path, 902)
    new, newer = start(keeper, path, 903)
    child = int(Path(f"{path}.child").read_text())
    os.kill(worker["pid"], signal.SIGSTOP)
    assert keeper.ask(op="kill", attempt=902) == {"killed": [worker["pid"]]}
    assert old.wait(60) == -9
    assert keeper.workers(902)[0]["stopped_by_us"]
    assert alive(newer["pid"])
    assert keeper.ask(op="kill", attempt=903) == {"killed": [newer["pid"]]}
    assert new.wait(60) == -9
    wait_until(lambda: not alive(child))


def test_leftovers_of_a_dead_rank_go_with_the_attempt(
    keeper: Any, script: Callable[..., Path], alive: Callable[[int], bool], wait_until: Callable[..., None]
) -> None:
    path = script("import subprocess; print(subprocess.Popen(['sleep', '300'], stdout=2).pid)")
    process = stub(keeper, path, UNBROKEN_ATTEMPT="904")
    child = int(process.stdout.readline())
    assert process.wait(60) == 0
    assert alive(child)
    assert keeper.ask(op="kill", attempt=904) == {"killed": []}
    wait_until(lambda: not alive(child))


def test_a_rank_without_a_handler_is_not_asked_to_save(keeper: Any, script: Callable[..., Path]) -> None:
    """It may have given the handler back since somebody looked, as Python does when it ends."""
    asked = "import signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *a: print('asked', flush=True))\n"
    ready, its = start(keeper, script(f"{asked}print('up', flush=True)\nwhile True: time.sleep(0.05)\n"), 907, RANK="3")
    other, other_is = start(keeper, script(SLEEP), 907, RANK="4")
    assert keeper.ask(op="signal", signal=signal.SIGUSR1, ranks=[3, 4], handled=True) == {"ok": True}
    assert ready.stdout.readline() == "asked\n"
    assert other.poll() is None
    assert other_is["status"] is None
    for worker in (its, other_is):
        os.kill(worker["pid"], signal.SIGKILL)
    ready.wait(60)
    assert other.wait(60) == -signal.SIGKILL


def test_signals_reach_the_rank_through_stub_and_keeper(keeper: Any, script: Callable[..., Path]) -> None:
    path = script(
        "import os, signal, time\n"
        "signal.signal(signal.SIGUSR1, lambda *a: print('usr1', flush=True))\n"
        "def term(*a):\n    print('term', flush=True); os._exit(17)\n"
        "signal.signal(signal.SIGTERM, term)\nprint('up', flush=True)\nwhile True: time.sleep(0.05)"
    )
    process, _worker = start(keeper, path, 905, RANK="3")
    assert keeper.ask(op="signal", signal=signal.SIGUSR1, ranks=[3]) == {"ok": True}
    assert process.stdout.readline() == "usr1\n"
    os.killpg(process.pid, signal.SIGUSR1)
    assert process.stdout.readline() == "usr1\n"
    os.killpg(process.pid, signal.SIGTERM)
    assert process.stdout.readline() == "term\n"
    assert process.wait(60) == 17


def test_a_dead_stub_takes_its_rank_along(
    keeper: Any, script: Callable[..., Path], alive: Callable[[int], bool], wait_until: Callable[..., None]
) -> None:
    process, worker = start(keeper, script(SLEEP), 906)
    process.kill()
    wait_until(lambda: not alive(worker["pid"]))
    assert not keeper.workers(906)[0]["stopped_by_us"]


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "TORCH_LOGS", "LD_LIBRARY_PATH", "PYTHONHASHSEED"])
def test_another_environment_is_refused_and_runs_cold(variable: str, keeper: Any, script: Callable[..., Path]) -> None:
    path = script("import os, sys; print(os.environ.get('OMP_NUM_THREADS'), 'torch' in sys.modules); sys.exit(4)")
    process = stub(keeper, path, UNBROKEN_ATTEMPT="907", **{variable: "7"})
    out, err = process.communicate(timeout=60)
    assert out.split()[-1] == "False", err
    assert process.returncode == 4
    keeper.wait_for(lambda state: state["workers"][-1]["status"] == 4 << 8)
    assert f"{variable} (7, not" in (keeper.local_dir / "keeper.log").read_text().splitlines()[-1]


def test_other_limits_are_refused(keeper: Any, script: Callable[..., Path]) -> None:
    path = script("import sys; print('torch' in sys.modules)")
    environment = {**keeper.environment, "UNBROKEN_KEEPER_SOCKET": str(keeper.socket_path), "RANK": "0"}
    done = subprocess.run(
        ["prlimit", "--nofile=256:256", keeper.stub, "-u", path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split()[-1] == "False"


def test_cold_ranks_are_watched_and_killed(keeper: Any, script: Callable[..., Path]) -> None:
    process, worker = start(keeper, script(SLEEP), 908, UNBROKEN_WARM="0", RANK="2")
    assert worker["rank"] == 2
    assert keeper.ask(op="kill", attempt=908) == {"killed": [worker["pid"]]}
    assert process.wait(60) == -9
    keeper.wait_for(lambda state: state["workers"][-1]["status"] == 9)
    assert json.loads((keeper.attempt_dir(908) / "rank2.exit").read_text())["stopped_by_us"]


def test_a_dead_stub_takes_its_cold_rank_along(
    keeper: Any, script: Callable[..., Path], alive: Callable[[int], bool], wait_until: Callable[..., None]
) -> None:
    process, worker = start(keeper, script(SLEEP), 909, UNBROKEN_WARM="0")
    process.kill()
    wait_until(lambda: not alive(worker["pid"]))
    keeper.wait_for(lambda state: state["workers"][-1]["status"] == 9)


def test_without_a_keeper_the_stub_runs_python(keeper: Any, script: Callable[..., Path]) -> None:
    path = script(
        "import os, sys; print(sys.argv, [k for k in os.environ if 'UNBROKEN' in k]); os.kill(os.getpid(), 6)"
    )
    process = stub(keeper, path, "x", UNBROKEN_KEEPER_SOCKET="/nowhere/keeper.sock")
    out, _err = process.communicate(timeout=60)
    assert out == f"{[str(path), 'x']} []\n"
    assert process.returncode == -6


def test_a_keeper_that_does_not_answer_is_not_waited_for(
    keeper: Any, script: Callable[..., Path], tmp_path: Path
) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "k.sock"))
    listener.listen()
    started = time.monotonic()
    process = stub(keeper, script("print('cold')"), UNBROKEN_KEEPER_SOCKET=str(tmp_path / "k.sock"))
    assert process.stdout.readline() == "cold\n"
    assert process.wait(60) == 0
    assert 2.9 < time.monotonic() - started < 60
    listener.close()


def test_the_attempts_arguments_and_variables(keeper: Any, script: Callable[..., Path]) -> None:
    path = script("import os, sys; print(sys.argv[1:], os.environ['X'], os.environ['UNBROKEN_ATTEMPT'])")
    keeper.ask(op="attempt", number=910, args=["--resume", "a b"], env={"X": "ö", "UNBROKEN_JOB_DIR": "/j"})
    for variables in ({}, {"UNBROKEN_WARM": "0"}):
        out, err = stub(keeper, path, "--lr", "1", **variables).communicate(timeout=60)
        assert out == "['--lr', '1', '--resume', 'a b'] ö 910\n", err
    keeper.ask(op="attempt", number=911)


@pytest.mark.parametrize(
    "line",
    CASES["bad_requests_are_answered_and_survived"],
)
def test_bad_requests_are_answered_and_survived(line: str, keeper: Any) -> None:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(60)
    client.connect(str(keeper.socket_path))
    client.sendall(line.encode("latin-1") + b'\n{"op":"attempt","number":912}\n')
    with client, client.makefile("rb") as answers:
        while b'"ok": true' not in (answer := answers.readline()):
            assert answer, "it hung up"
    assert keeper.process.poll() is None


def test_heartbeat_descriptor_and_beacon(
    keeper: Any, script: Callable[..., Path], wait_until: Callable[..., None]
) -> None:
    path = script(
        "import os, time\nfd = int(os.environ['UNBROKEN_HEARTBEAT_FD'])\n"
        "os.write(fd, b'step 41\\nstep 42\\nphase checkpoint\\nnonsense\\nstep x\\n')\n"
        "print('up', flush=True)\ntime.sleep(300)"
    )
    process, worker = start(keeper, path, 913)
    header, beacon = struct.Struct("<8sIIddI"), keeper.attempt_dir(913) / "rank0.beacon"
    beats: dict[float, dict[str, Any]] = {}

    def three_beats() -> bool:
        data = beacon.read_bytes()
        magic, sequence, pid, _wall, monotonic, length = header.unpack_from(data)
        if sequence == 0:
            return False  # made, and not written yet
        if sequence % 2 == 0 and beacon.read_bytes()[: header.size] == data[: header.size]:  # not being written
            assert (magic, pid, len(data)) == (b"UBEACON1", worker["pid"], 4096)
            beats[monotonic] = json.loads(data[header.size : header.size + length])
        return len(beats) >= 3

    wait_until(three_beats)
    newest = beats[max(beats)]
    assert (newest["step"], newest["phase"]) == (42, "checkpoint")
    assert abs(time.monotonic() - max(beats)) < 30, "the same clock"
    process.kill()
    process.wait()


def test_a_forked_child_of_the_script_ends_well(keeper: Any, script: Callable[..., Path]) -> None:
    path = script(
        "import os, sys\n"
        "pid = os.fork()\nif pid == 0: sys.exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    out, err = stub(keeper, path, UNBROKEN_ATTEMPT="914").communicate(timeout=60)
    assert (out, err) == ("5\n", "")


def test_no_object_of_the_keeper_closes_a_number_of_the_script(keeper: Any, script: Callable[..., Path]) -> None:
    """A socket whose number alone was closed closes it again when it is freed: what a library has opened by then."""
    path = script(
        "import gc, selectors, socket\n"
        "gc.unfreeze()\n"
        "held = [one for one in gc.get_objects() if isinstance(one, socket.socket) and one.fileno() >= 0]\n"
        "held += [one for one in gc.get_objects() if isinstance(one, selectors.BaseSelector)"
        " and not getattr(one, '_selector').closed]\n"
        "print(held)\n"
    )
    out, _ = stub(keeper, path, UNBROKEN_ATTEMPT="916").communicate(timeout=60)
    assert out == "[]\n"


def test_what_the_script_hung_to_torch_is_freed_at_the_end(
    keeper: Any, script: Callable[..., Path], tmp_path: Path
) -> None:
    """Else a file lacks its last lines, as no rank of plain torchrun's does."""
    path = script(
        "import torch\n"
        "def count_steps(step):\n"
        f"    file = open({str(tmp_path / 'steps')!r}, 'w')\n"
        "    def counted(self):\n"
        "        file.write('a step\\n')\n"
        "        return step(self)\n"
        "    return counted\n"
        "torch.optim.SGD.step = count_steps(torch.optim.SGD.step)\n"
        "torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]).step()\n"
    )
    process = stub(keeper, path, UNBROKEN_ATTEMPT="918")
    process.communicate(timeout=60)
    assert (process.returncode, (tmp_path / "steps").read_text()) == (0, "a step\n")


def test_ps_shows_the_script(keeper: Any, script: Callable[..., Path]) -> None:
    path = script(SLEEP)
    process, worker = start(keeper, path, 915)
    shown = Path(f"/proc/{worker['pid']}/cmdline").read_text().rstrip("\0").split("\0")
    assert shown[1:] == ["-u", str(path)][: len(shown) - 1]
    assert "keeper.py" not in " ".join(shown)
    process.kill()
    process.wait()


def test_dies_with_its_parent_and_takes_all_along(
    own_keeper: Callable[..., Any],
    script: Callable[..., Path],
    alive: Callable[[int], bool],
    wait_until: Callable[..., None],
) -> None:
    keeper = own_keeper()
    process, worker = start(keeper, script(SLEEP), 1)
    keeper.process.kill()
    assert process.wait(60) == -9
    wait_until(lambda: not alive(worker["pid"]))


def test_torch_that_cannot_be_imported(
    own_keeper: Callable[..., Any], script: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open')")
    keeper = own_keeper({**os.environ, "PYTHONPATH": str(tmp_path / "broken")})
    assert "libcudart" in keeper.state["error"]
    _out, err = stub(keeper, script("import torch")).communicate(timeout=60)
    assert re.search(r"File .*train.py.*line 1", err)
    assert "libcudart" in err
    keeper.ask(op="launch", argv=["x.py"], env=dict(keeper.environment))
    keeper.wait_for(lambda state: state["launcher"] and state["launcher"]["status"] is not None)
    assert "libcudart" in (keeper.local_dir / "launcher.err").read_text()


def test_a_worker_told_to_end_at_its_birth_ends(keeper: Any, script: Callable[..., Path]) -> None:
    path = script(SLEEP)
    children = Path(f"/proc/{keeper.process.pid}/task/{keeper.process.pid}/children")
    for attempt in range(930, 940):
        before = {*children.read_text().split()}
        process = stub(keeper, path, UNBROKEN_ATTEMPT=str(attempt))
        while not (born := {*children.read_text().split()} - before):
            assert process.poll() is None
        (pid,) = born
        os.kill(int(pid), signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM
