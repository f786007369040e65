"""`unbroken check` as a process: real stations, probes of the test's own as plug-ins, files as an agent writes them."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from diagnosis.health import Reading, Standing
from supervisor.agent.health import Health
from supervisor.check import health_files
from supervisor.check import show as show_checks
from supervisor.check.choice import table
from supervisor.check.one_look import Told
from supervisor.node import write_atomically
from supervisor.probes.probe import Place
from supervisor.probes.standings import HealthFile

PlugIn = Callable[[str], dict[str, str]]
REPOSITORY = Path(__file__).parents[3]


class Done(NamedTuple):
    code: int
    out: str
    err: str
    took_s: float

    @property
    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.out)
        assert answer["schema"] == 1
        return answer

    def entry(self, check: str, device: str = "") -> dict[str, Any]:
        found: list[dict[str, Any]] = [
            one for one in self.answer["checks"] if (one["check"], one["device"]) == (check, device)
        ]
        assert len(found) == 1, (check, found)
        return found[0]


Check = Callable[..., Done]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Runs it apart from this machine's own state, agents and site file."""
    (tmp_path / "site.toml").write_text("")

    def run(*arguments: str, env: dict[str, str] | None = None, site: str | None = "") -> Done:
        chosen = ["--site", str(tmp_path / "site.toml")] if site is not None else []
        (tmp_path / "site.toml").write_text(site or "")
        argv = [sys.executable, "-m", "supervisor.cli", "check", "--state-dir", str(tmp_path / "kept"), *chosen]
        variables = {key: value for key, value in (env or os.environ).items() if not key.startswith("UNBROKEN")}
        variables["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), variables.get("PYTHONPATH", "")])
        variables["TMPDIR"] = str(tmp_path)
        began = time.monotonic()
        done = subprocess.run([*argv, *arguments], capture_output=True, text=True, env=variables, check=False)
        return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - began)

    return run


BROKEN = """
class BrokenProbe:
    name, every_s, deadline_s = "broken", 60.0, 5.0
    checks = (
        check("broken_disk", limits={"percent": 5.0}),
        check("broken_fan", scope="storage"),
        check("broken_before", when="preflight"),
        check("broken_none"),
    )
    def look(self, place, now):
        return [
            unhealthy("broken_disk", "2 % \\x1b[31mleft", "sda", values={"left_percent": 2.0}),
            healthy("broken_disk", "sdb"),
            unhealthy("broken_fan", "slow", level=os.environ.get("FAN", "warning")),
            unhealthy("broken_before", "old"),
            unknown("broken_none", "only root can read it"),
        ]
"""

FLICKERING = """
class FlickerProbe:
    name, every_s, deadline_s = "flicker", 60.0, 5.0
    checks = (check("flicker_once", looks=3), check("flicker_stays", looks=3), check("flicker_kept", clears=False))
    def look(self, place, now):
        time.sleep(float(os.environ.get("FLICKER_S", "0")))
        looks = (place.load("flicker") or 0) + 1
        place.keep("flicker", looks)
        bad = lambda id, when: unhealthy(id, "seen") if when else healthy(id)
        return [
            bad("flicker_once", looks == 1), bad("flicker_stays", looks < 4), bad("flicker_kept", looks == 1)
        ]
"""

STUCK = """
class StuckProbe:
    name, every_s, deadline_s = "stuck", 60.0, float(os.environ.get("STUCK_DEADLINE_S", "30"))
    checks = (check("stuck"), check("stuck_too"))
    doing = ""
    def look(self, place, now):
        self.doing = "statvfs /mnt"
        time.sleep(3600)
"""

STUCK_FOR_GOOD = """
import ctypes
class GilProbe:
    name, every_s, deadline_s = "gil", 60.0, 30.0
    checks = (check("gil"),)
    def look(self, place, now):
        ctypes.PyDLL(None).pause()
"""


# ----- a look of our own -----


def test_what_is_wrong_comes_first(check: Check, plug_in: PlugIn) -> None:
    env = plug_in(BROKEN)
    done = check("--only", "broken", env=env)
    lines = done.out.splitlines()
    assert done.code == 2
    assert lines[0] == "CRITICAL: 2 of 3 checks: broken_disk sda: 2 % left; broken_fan: slow"
    assert lines[1] == "CRITICAL  broken_disk sda: 2 % left  [storage_error]"
    assert lines[2] == "WARNING   broken_fan: slow  [storage_error]"
    assert lines[3] == "UNKNOWN   broken_none: only root can read it"
    assert lines[4].startswith("3 checks of ")
    assert lines[4].endswith(": 1 critical, 1 warning, 1 healthy, 1 unknown")
    assert len(lines) == 5
    assert "healthy   broken_disk sdb" in check("--only", "broken", "-v", env=env).out.splitlines()


def test_json_has_every_field(check: Check, plug_in: PlugIn) -> None:
    done = check("--only", "broken_d*", "--json", "--node-name", "n7", env=plug_in(BROKEN))
    answer = done.answer
    assert {key: answer[key] for key in ("node", "from", "status", "exit_code", "problems")} == {
        "node": "n7",
        "from": "standalone",
        "status": "critical",
        "exit_code": 2,
        "problems": [],
    }
    assert answer["boot_id"] == Place().boot_id
    entry = done.entry("broken_disk", "sda")
    assert entry.pop("since").endswith("Z")
    assert entry == {
        "check": "broken_disk",
        "probe": "broken",
        "status": "unhealthy",
        "level": "critical",
        "failure_class": "storage_error",
        "scope": "node",
        "device": "sda",
        "gpu": "",
        "gpu_uuid": "",
        "rank": None,
        "text": "2 % left",
        "values": {"left_percent": 2.0},
        "threshold": "t",
        "source": "s",
    }
    assert done.entry("broken_disk", "sdb")["level"] is None


def test_exit_codes_are_those_of_nagios(check: Check, plug_in: PlugIn) -> None:
    env = plug_in(BROKEN)
    codes = {name: check("--only", name, env=env).code for name in ("broken_fan", "broken_none", "memory_available")}
    assert codes == {"broken_fan": 1, "broken_none": 3, "memory_available": 0}


RAISING = """
class RaisingProbe:
    name, every_s, deadline_s = "raising", 60.0, 5.0
    checks = (check("raising"), check("raising_too"))
    def look(self, place, now):
        raise ValueError("of ours")
"""


def test_a_probe_that_raises_leaves_the_node_unknown(check: Check, plug_in: PlugIn) -> None:
    env = plug_in(RAISING + BROKEN)
    why = "a fault of our own: the probe raising failed: ValueError('of ours')"
    done = check("--only", "raising", "--only", "memory_available", env=env)
    first = f"UNKNOWN: not everything could be looked at: {why}"
    assert (done.code, done.out.splitlines()[0]) == (3, first)
    answer = check("--only", "raising", "--only", "memory_available", "--json", env=env).answer
    assert (answer["status"], answer["problems"]) == ("unknown", [why])
    worse = check("--only", "raising", "--only", "broken_fan", env=env)
    assert (worse.code, worse.out.splitlines()[0]) == (
        1,
        f"WARNING: 1 of 3 checks: broken_fan: slow; not everything could be looked at: {why}",
    )
    allowed = check("--only", "broken_none", "--only", "memory_available", env=env)
    assert allowed.code == 0, "what only root may read is no fault of ours"


def test_a_probe_that_cannot_be_loaded_leaves_the_node_unknown(check: Check, plug_in: PlugIn) -> None:
    env = plug_in("raise ImportError('half written')\nclass HalfProbe: pass")
    done = check("--only", "memory_available", "--json", env=env)
    assert (done.code, done.answer["status"], done.entry("memory_available")["status"]) == (3, "unknown", "healthy")
    (problem,) = done.answer["problems"]
    assert problem.startswith("probe ")
    assert "half written" in problem
    assert check("--only", "check_of_half", env=env).code == 3, "which checks it has is not known"
    drained = check("--slurm", "prolog", "--only", "memory_available", env=env)
    assert (drained.code, drained.out, "half written" in drained.err) == (0, "", True)


def test_preflight_checks_are_made_when_asked_for(check: Check, plug_in: PlugIn) -> None:
    env = plug_in(BROKEN)
    named = check("--only", "broken_before", "--json", env=env)
    assert named.entry("broken_before")["status"] == "unhealthy"
    with_all = check("--only", "broken", "--preflight", "--skip", "*_fan", "--json", env=env).answer["checks"]
    assert {one["check"] for one in with_all} == {"broken_disk", "broken_before", "broken_none"}


def test_what_takes_several_looks_is_looked_at_again(check: Check, plug_in: PlugIn) -> None:
    env = plug_in(FLICKERING)
    first = check("--only", "flicker", "--json", env=env)
    assert first.entry("flicker_once")["status"] == "healthy"
    assert first.entry("flicker_stays")["status"] == "unhealthy"
    assert first.entry("flicker_kept")["status"] == "unhealthy"
    later = check("--only", "flicker", "--json", env=env)
    assert later.entry("flicker_once")["status"] == "healthy"
    assert later.entry("flicker_stays")["status"] == "healthy"
    kept = later.entry("flicker_kept")
    assert kept["status"] == "unhealthy"
    assert kept["text"] == "seen (not seen at the last look; it stands until the node is booted anew)"


def test_without_time_for_another_look_it_is_not_known(check: Check, plug_in: PlugIn) -> None:
    env = {**plug_in(FLICKERING), "FLICKER_S": "1"}
    done = check("--only", "flicker", "--timeout", "5", "--json", env=env)
    entry = done.entry("flicker_stays")
    assert (entry["status"], entry["text"]) == ("unknown", "seen in 1 of the 3 looks that it takes: seen")


def test_a_look_that_does_not_return_is_unknown_and_delays_nothing_else(check: Check, plug_in: PlugIn) -> None:
    done = check("--only", "stuck*", "--only", "broken", "--timeout", "4", "--json", env=plug_in(STUCK + BROKEN))
    assert done.took_s < 4 + 6
    assert done.entry("stuck_too")["status"] == "unknown"
    text = done.entry("stuck_too")["text"]
    assert text.startswith("no answer from stuck within ")
    assert text.endswith(" s (in statvfs /mnt)")
    assert done.entry("broken_disk", "sda")["status"] == "unhealthy"


def test_a_look_past_its_own_deadline_is_a_finding(check: Check, plug_in: PlugIn) -> None:
    env = {**plug_in(STUCK), "STUCK_DEADLINE_S": "0.5"}
    done = check("--only", "stuck*", "--only", "station*", "--skip", "gpu*", "--json", env=env)
    assert done.took_s < 10, "it does not wait for the end of its time"
    entry = done.entry("station_node_responds", "stuck")
    assert (entry["status"], entry["level"]) == ("unhealthy", "warning")
    assert "statvfs /mnt has not returned for " in entry["text"]
    assert done.entry("stuck")["status"] == "unknown"


def test_a_station_that_talks_nonsense_is_bounded() -> None:
    told = Told("node")
    for _ in range(1000):
        told.take(b"\x1b[31m\xff")
    assert 0 < len(told.problems) < 100


def test_a_station_that_cannot_speak_any_more_is_ended(check: Check, plug_in: PlugIn) -> None:
    done = check("--only", "gil", "--timeout", "4", "--json", env=plug_in(STUCK_FOR_GOOD))
    assert (done.code, done.entry("gil")["status"]) == (3, "unknown")
    assert done.took_s < 4 + 6


ZOMBIE_LEADER = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(3600,)).start()
ctypes.CDLL(None).syscall({exit}, 0)
"""
"""As the kernel leaves a process that was killed while one of its threads hangs in a driver."""


@pytest.mark.parametrize("first_thread_is_gone", [False, True])
def test_beside_a_process_that_does_not_die_no_other_is_started(
    check: Check, tmp_path: Path, first_thread_is_gone: bool
) -> None:
    """The note is what an earlier check would have left; the process is any that lives."""
    number = {"x86_64": 60}.get(platform.machine(), 93)
    source = ZOMBIE_LEADER.format(exit=number) if first_thread_is_gone else "import time; time.sleep(3600)"
    left = subprocess.Popen([sys.executable, "-c", source])

    def fields() -> list[str]:
        return Path(f"/proc/{left.pid}/stat").read_text().rpartition(")")[2].split()

    try:
        while first_thread_is_gone and fields()[0] != "Z":
            time.sleep(0.01)
        (tmp_path / "kept").mkdir()
        note = {"group": "gpu", "pid": left.pid, "start_time": int(fields()[19]), "at": time.time() - 60}
        (tmp_path / "kept" / "left.json").write_text(json.dumps([note]))
        done = check("--only", "gpu_*", "--only", "memory_size", "--json", site="[expect]\ngpus = 8\n")
        entry = done.entry("gpu_driver_responds")
        assert (entry["status"], entry["level"]) == ("unhealthy", "critical")
        assert f"the process {left.pid} " in entry["text"]
        assert done.entry("gpu_nvml")["status"] == "unknown"
        assert done.entry("memory_size")["status"] == "healthy"
    finally:
        left.kill()
        left.wait()
    after = check("--only", "gpu_*", "--json", site="[expect]\ngpus = 8\n").entry("gpu_driver_responds")
    assert after["status"] == "healthy", "a new one was started, and answers"


@pytest.mark.gpu
def test_a_real_driver_answers(check: Check) -> None:
    done = check("--only", "nvml", "--only", "gpu_driver_responds", "--preflight", "--json")
    assert done.entry("gpu_driver_responds")["status"] == "healthy"
    assert done.entry("gpu_nvml")["status"] == "healthy"


# ----- an agent's answer -----


@pytest.fixture
def health_file(tmp_path: Path) -> Path:
    """What a real agent's eyes write of this machine, with one flaw that it does not have."""
    folder = tmp_path / "local" / "job-1" / "n7"
    folder.mkdir(parents=True)
    health = Health("n7", folder / "health.json", tmp_path / "probes", only=("memory",))

    async def see() -> None:
        running = asyncio.create_task(health.run())
        while not (folder / "health.json").exists() or not health.standings.stands("memory_size", ""):
            health.tend(health.standings.job)
            await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(see(), 30))
    file = msgspec.json.decode((folder / "health.json").read_bytes(), type=HealthFile)
    flaw = Standing(
        reading=Reading(check="memory_available", status="unhealthy", text="9 MiB left"), status="unhealthy", since=1.0
    )
    others = tuple(one for one in file.standings if one.reading.check != "memory_available")
    file = msgspec.structs.replace(file, standings=(flaw, *others), mono=time.monotonic(), waiting=())
    write_atomically(folder / "health.json", msgspec.json.encode(file))
    return folder / "health.json"


def test_a_running_agent_answers_at_once(check: Check, health_file: Path) -> None:
    ask = ("--only", "memory", "--local-dir", str(health_file.parents[2]), "--json")
    done = check(*ask, site=None)
    assert (done.answer["from"], done.answer["node"], done.code) == ("agent", "n7", 2)
    assert done.entry("memory_available")["text"] == "9 MiB left"
    assert done.entry("memory_available")["since"] == "1970-01-01T00:00:01.000Z"
    assert done.entry("memory_size")["status"] == "healthy"
    problem = "probe supervisor.probes.pci:PciProbe cannot be used: ImportError()"
    file = msgspec.json.decode(health_file.read_bytes(), type=HealthFile)
    well = tuple(one for one in file.standings if one.status == "healthy")
    for problems, code in (((), 0), (("3 events not told",), 0), ((problem,), 3)):
        write_atomically(
            health_file, msgspec.json.encode(msgspec.structs.replace(file, standings=well, problems=problems))
        )
        assert check(*ask, site=None).code == code
    assert check(*ask, "--fresh", site=None).answer["from"] == "standalone"
    assert check(*ask, "--preflight", site=None).answer["from"] == "standalone"
    assert check(*ask, "--node-name", "n8", site=None).answer["from"] == "standalone"


def test_only_what_can_be_true_is_believed(health_file: Path) -> None:
    where, boot_id = str(health_file.parent), Place().boot_id
    good = msgspec.json.decode(health_file.read_bytes(), type=HealthFile)

    def believed(**changes: Any) -> bool:
        health_file.write_bytes(msgspec.json.encode(msgspec.structs.replace(good, **changes)))
        return health_files.of_agent(boot_id, where) is not None

    assert believed()
    assert not believed(mono=good.mono - 200)
    assert not believed(mono=time.monotonic() + 50)
    assert not believed(boot_id="another")
    assert not believed(pid=2**22 - 1)
    assert not believed(schema=2)
    assert believed()
    health_file.chmod(0o666)
    assert not believed(), "anybody could have written it"
    health_file.chmod(0o600)
    target = health_file.rename(health_file.with_name("elsewhere.json"))
    health_file.symlink_to(target)
    assert health_files.of_agent(boot_id, where) is None, "a link leads to what its writer chose"
    health_file.unlink()
    os.mkfifo(health_file)
    assert health_files.of_agent(boot_id, where) is None


@pytest.mark.root
def test_what_another_user_wrote_is_not_believed(health_file: Path) -> None:
    assert health_files.of_agent(Place().boot_id, str(health_file.parent)) is not None
    os.chown(health_file.parent, 65534, 65534)
    assert health_files.of_agent(Place().boot_id, str(health_file.parent)) is None, "the folder is another's"
    os.chown(health_file.parent, 0, 0)
    os.chown(health_file, 65534, 65534)
    assert health_files.of_agent(Place().boot_id, str(health_file.parent)) is None


# ----- a captured tree -----

PORT = "sys/class/infiniband/mlx5_0/ports/1"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    files = {
        "proc/sys/kernel/hostname": "gpu-17\n",
        "proc/sys/kernel/random/boot_id": "11111111-2222-3333-4444-555555555555\n",
        "proc/meminfo": "MemTotal:       2113478448 kB\nMemFree:        51200 kB\nMemAvailable:   51200 kB\n",
        f"{PORT}/state": "1: DOWN\n",
        f"{PORT}/phys_state": "3: Disabled\n",
        f"{PORT}/rate": "10 Gb/sec (4X)\n",
        f"{PORT}/link_layer": "InfiniBand\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_captured_tree_is_judged_by_its_files_alone(check: Check, tree: Path, tmp_path: Path) -> None:
    done = check("--root", str(tree), "--json", site="[expect]\nib_ports = 1\n")
    answer = done.answer
    assert (answer["node"], answer["from"], done.code) == ("gpu-17", "root", 2)
    assert answer["boot_id"] == "11111111-2222-3333-4444-555555555555"
    assert answer["problems"] == []
    assert done.entry("memory_available")["level"] == "critical"
    assert "50 of 2063944 MiB" in done.entry("memory_available")["text"]
    assert done.entry("ib_port_state", "mlx5_0/1")["status"] == "unhealthy", (
        "one look is enough: a tree does not change"
    )
    assert done.entry("gpu_driver_responds")["status"] == "not_applicable"
    assert not (tmp_path / "kept").exists(), "nothing of another node is kept"


def test_a_captured_tree_has_its_own_site_file(check: Check, tree: Path) -> None:
    (tree / "etc/unbroken").mkdir(parents=True)
    (tree / "etc/unbroken/site.toml").write_text('skip = ["memory_a*"]\n[expect]\nib_ports = 2\n')
    done = check("--root", str(tree), "--json", site=None)
    assert "memory_available" not in {one["check"] for one in done.answer["checks"]}
    assert done.entry("ib_port_count")["status"] == "unhealthy"


def test_a_port_that_nobody_expects_is_not_applicable(check: Check, tree: Path) -> None:
    done = check("--root", str(tree), "--only", "infiniband", "--json")
    assert done.entry("ib_port_state", "mlx5_0/1")["status"] == "not_applicable"
    assert done.code == 0


# ----- for Slurm -----


def test_forms_for_slurm(check: Check, plug_in: PlugIn) -> None:
    env = {**plug_in(BROKEN), "FAN": "critical"}
    prolog = check("--slurm", "prolog", "--only", "broken", env=env)
    assert (prolog.code, prolog.out) == (1, "unbroken: storage_error sda 2 % left (broken_disk)\n")
    health = check("--slurm", "health", "--only", "broken", env=env)
    assert (health.code, health.out) == (0, "unbroken: storage_error sda 2 % left (broken_disk)\n")
    assert check("--slurm", "prolog", "--only", "broken_none", env=env).code == 0, "unknown is no reason"
    as_json = check("--slurm", "health", "--only", "broken", "--json", env=env)
    assert (as_json.code, as_json.answer["exit_code"]) == (0, 2)
    epilog = check("--slurm", "epilog")
    assert (epilog.code, epilog.out, epilog.err) == (0, "", "")


def test_nothing_that_is_wrong_with_us_drains_a_node(check: Check) -> None:
    bad_site = check("--slurm", "prolog", "--only", "memory_size", site="limits = 3\n")
    assert (bad_site.code, bad_site.out) == (0, "")
    assert "the site file is not used" in bad_site.err
    bad_name = check("--slurm", "prolog", "--only", "memroy_size")
    assert bad_name.code == 0
    assert "memory_size" in bad_name.err
    argv = [sys.executable, "-m", "supervisor.cli", "check", "--slurm", "prolog", "--only", "memroy_size"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(argv, stdout=full, stderr=full, check=False).returncode == 0


def test_an_answer_that_cannot_be_written_is_unknown_and_no_warning() -> None:
    argv = [sys.executable, "-m", "supervisor.cli", "check", "--only", "memory_size"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)


def test_a_trees_site_file_is_its_own(check: Check, tmp_path: Path) -> None:
    outside, tree = tmp_path / "outside.toml", tmp_path / "tree"
    outside.write_text("limits = 3\n")
    (tree / "etc/unbroken").mkdir(parents=True)
    (tree / "etc/unbroken/site.toml").symlink_to(outside)
    assert check("--root", str(tree), "--only", "memory_size", site=None).err == ""


# ----- what there is, and what is refused -----


def test_the_list_has_the_sites_own_limits_and_says_what_applies(check: Check) -> None:
    site = "[limits.memory_available]\nmib = 4096\n[limits.memory_availabel]\nmib = 1\n"
    done = check("--list", "--json", "--only", "memory", "--only", "gpu_*", site=site)
    listed = {one["check"]: one for one in done.answer["checks"]}
    assert done.code == 0
    assert "4096 MiB" in listed["memory_available"]["threshold"]
    assert listed["memory_available"]["limits"]["mib"] == 4096
    assert listed["memory_available"]["applies"] is True
    assert (listed["swap_in_use"]["applies"], listed["swap_in_use"]["when"]) == (None, "preflight")
    people = check("--list", "--only", "memory_*", site=site).out.splitlines()
    assert people[0].split("\t")[:2] == ["check", "applies"]
    assert any(line.startswith("memory_available\tyes\t") for line in people)
    (wrong,) = check("--only", "memory_size", "--json", site=site).answer["problems"]
    assert wrong.startswith("the site file sets limits of memory_availabel, which is no check: did you mean memory_ava")
    (wrong,) = check("--only", "memory_size", "--json", site='skip = ["memroy_*", "eth_*"]').answer["problems"]
    assert wrong == "the site file skips memroy_*, and no check or probe is called so"


@pytest.mark.parametrize(
    ("arguments", "site", "code", "says"),
    [
        (("--only", "gpu_ecc_uncorected"), "", 2, "did you mean gpu_ecc_uncorrected"),
        (("--skip", "zzz"), "", 2, "no check or probe is called zzz"),
        (("--root", "/nowhere/at/all"), "", 3, "cannot be read: No such file"),
        (("--root", "{tmp}"), "", 3, "is no captured tree"),
        ((), "[expect]\ngpu = 8\n", 78, "site.toml"),
    ],
)
def test_what_makes_no_sense_is_refused(
    check: Check, tmp_path: Path, arguments: tuple[str, ...], site: str, code: int, says: str
) -> None:
    done = check(*(argument.format(tmp=tmp_path) for argument in arguments), site=site)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("unbroken: ")
    assert says in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--root", "/nowhere/at/all"), 3, "cannot be read: No such file"),
        (("--root", "{tmp}"), 3, "is no captured tree"),
        (("--only", "gpu_ecc_uncorected"), 2, "did you mean gpu_ecc_uncorrected"),
        (("--site", "{tmp}/no.toml"), 3, "no.toml"),
        (("--list", "--site", "{tmp}/wrong.toml"), 3, "expect"),
        (("--root", "{tmp}", "--site", "{tmp}/wrong.toml"), 3, "expect"),
    ],
)
def test_json_is_printed_where_nothing_can_be_said(
    check: Check, tmp_path: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    (tmp_path / "wrong.toml").write_text("[expect]\ngpu = 8\n")
    done = check(*(argument.format(tmp=tmp_path) for argument in arguments), "--json")
    answer = done.answer
    assert (done.code, done.err, answer["status"], answer["exit_code"]) == (code, "", "unknown", code)
    assert says in answer["problems"][0]
    assert answer["checks"] == []
    assert set(answer) == set(check("--only", "memory_size", "--json").answer)


def test_the_page_has_the_table() -> None:
    text = (REPOSITORY / "docs" / "checks.md").read_text(encoding="utf-8")
    again = "python -m supervisor.check.show docs/checks.md"
    assert text[text.index(show_checks.TABLE_BEGINS) :] == show_checks.as_markdown(table().values()), again
