"""`unbroken run`: the user's end of a node. Terminal, signals, exit code; starts the other processes.

The keeper comes first, because it has torch to import. Whatever dies is started again; only the keeper's death costs
anything, an attempt. When the agent cannot be kept running the training goes on without it and decides the exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from supervisor.errors import ConfigError, ExitCode, LaunchRefused
from supervisor.files import read_own
from supervisor.messages import Outcome
from supervisor.paths import daemon_argv, daemon_env
from supervisor.run.prepare import Prepared, RunOptions, prepare, remove_old_jobs, say
from supervisor.run.terminal import HOLD_S, Terminal
from supervisor.run.torchrun_options import read_command
from supervisor.training import keeper_command

CRASH_LOOP = 4
"""After so many ends in a row, each soon after the start, a process counts as unable to run."""

GATHER_S, STEADY_GATHER_S = 0.1, 0.2
"""Seconds for which lines are gathered before they are shown together: at first, and in a steady stream."""
STEADY = 10
"""After so many bundles in a row output counts as a steady stream."""
STOP_PATIENCE_S = 45.0
"""The graceful stop has its own grace of 30 s; beyond this everything is killed."""
STOP_BEFORE_START_S = 3.0
CONTROLLER_PATIENCE_S = 60.0
"""How long our controller may run after our own end: it informs the other nodes."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)

__all__ = ["Front", "RunOptions", "main"]


def main(options: RunOptions, command: Sequence[str]) -> int:
    """Run `command` under supervision; the exit code. A command that is not to be supervised replaces this process."""
    untouched = _untouched(command)
    if untouched is not None:
        return _execute(command, untouched)
    open_standard_streams()
    try:
        prepared = prepare(options, command, os.environ, Path.cwd())
    except (LaunchRefused, ConfigError) as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return Front(prepared, options).run()


def _untouched(command: Sequence[str]) -> str | None:
    """Why `command` is run without supervision (may be empty); None when it is supervised."""
    if os.environ.get("UNBROKEN_DISABLE", "").lower() in {"1", "true", "yes"}:
        return ""
    if "UNBROKEN_AGENT_SOCKET" in os.environ or "UNBROKEN_ATTEMPT" in os.environ:
        return "already supervised from outside: the command runs as it is"
    try:
        return "" if read_command(command, nproc_per_node=None, environment=os.environ).wants_help else None
    except LaunchRefused:
        return None  # reported when it is prepared


def _execute(command: Sequence[str], why: str) -> int:
    if why:
        say(why)
    if not command:
        say("there is no command")
        return ExitCode.WRONG_CONFIG
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        say(f"{command[0]}: {error.strerror}")
        return ExitCode.WRONG_CONFIG


def open_standard_streams() -> None:
    """A descriptor of 0 to 2 that was closed (`2>&-`) becomes /dev/null: else the next file of ours would get its
    number, and the output of ranks would go there."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free


class Front:
    """One node's run, from the start of its processes to the end of the last one."""

    def __init__(
        self, prepared: Prepared, options: RunOptions, services: dict[str, ServiceProcess] | None = None
    ) -> None:
        """`services`: other processes than ours under the names keeper, agent, controller (for tests)."""
        self._prepared = prepared
        self._paths = prepared.paths
        self._outcome_file = str(prepared.paths.outcome)
        self._options = options
        self._services = services if services is not None else _services(prepared)
        self._signals: list[int] = []
        self._stop: signal.Signals | None = None
        self._stop_at = 0.0
        self._told_address = not prepared.others_join
        self._wake, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> int:
        """Start everything, stay until the job has ended, leave nothing running; the exit code.

        Afterwards this process ignores signals that would stop it: all it has left to do is to exit.
        """
        self._take_signals()
        if self._prepared.lease is not None:
            self._prepared.lease.keep()
        for service in self._services.values():  # the keeper first
            service.tend(time.monotonic())
        terminal = Terminal(self._paths, notices=not self._options.run.quiet)
        try:
            if not self._options.run.quiet:
                for notice in (*_introduction(self._prepared), *self._prepared.notices):
                    terminal.say(notice)
            outcome = self._watch(terminal)
            self._show_end(terminal, outcome)
            self._end_services(killed=not self._paths.outcome.exists())
        finally:
            self._end_services(killed=True)
            self._prepared.release()
            signal.set_wakeup_fd(-1)
            for number in (*STOP_SIGNALS, *PASSED_ON):
                signal.signal(number, signal.SIG_IGN)  # one Ctrl-C too many must not cost the exit code
            terminal.close()
        with contextlib.suppress(OSError):  # another job may tidy up at the same time
            remove_old_jobs(self._paths.folder)
        return outcome.exit_code

    # ----- the loop -----

    def _watch(self, terminal: Terminal) -> Outcome:
        bundles = 0
        while True:
            now = time.monotonic()
            outcome = (
                self._act_on_signals(terminal, now) or self._outcome() or self._without_us(now) or self._replaced()
            )
            if outcome is not None:
                return outcome
            wait = min(service.tend(now) for service in self._services.values())
            wait = min(wait, terminal.pump(now), 1.0)
            self._tell_address(terminal)
            blocked = terminal.blocked
            bundles = bundles + 1 if terminal.took else 0
            if wait > 0 and not blocked and bundles:  # more will come: one wake for all of it
                self._sleep(STEADY_GATHER_S if bundles > STEADY else GATHER_S)
            else:
                timed = blocked or wait <= HOLD_S  # the start of a line waits: who writes it may write byte by byte
                self._sleep(wait, out=blocked, changes=-1 if timed else terminal.changes.fd)

    def _sleep(self, seconds: float, *, out: Sequence[int] = (), changes: int = -1) -> None:
        """Until a signal, room on `out`, or something to be read from `changes`."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for descriptor in out:
            poll.register(descriptor, select.POLLOUT)
        if changes >= 0:
            poll.register(changes, select.POLLIN)
        poll.poll(max(0.0, seconds) * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)

    def _outcome(self) -> Outcome | None:
        if not os.path.exists(self._outcome_file):  # the usual answer, many times a second
            return None
        try:
            return msgspec.json.decode(read_own(self._paths.outcome), type=Outcome)
        except (OSError, msgspec.DecodeError):
            return None

    def _without_us(self, now: float) -> Outcome | None:
        """How the run ends when one of our processes cannot be kept running, or a stop takes too long."""
        stopping = self._stop is not None
        if stopping and now - self._stop_at > STOP_PATIENCE_S:
            return self._stopped("killed: the graceful stop did not end")
        for name in ("keeper", "controller", "agent"):
            service = self._services.get(name)
            if service is None or service.failures < CRASH_LOOP:
                continue
            if name == "agent" and (outcome := self._launcher_end()) is not None:
                return outcome
            if name == "keeper" or not self._training():
                line = f"the {name} does not start: {service.last_line()} ({self._paths.folder / name}.log)"
                code = ExitCode.WRONG_CONFIG if name == "keeper" else ExitCode.OUR_FAULT
                return Outcome(state="failed", exit_code=code, line=line)
        if stopping and now - self._stop_at > STOP_BEFORE_START_S and not self._training():
            return self._stopped("stopped before the training had begun")
        return None

    def _replaced(self) -> Outcome | None:
        """Two trainings of one job would overwrite each other's checkpoints: the older one ends."""
        lease = self._prepared.lease
        if lease is None or not lease.lost:
            return None
        return Outcome(state="stopped", exit_code=ExitCode.REPLACED, line=lease.lost)

    def _training(self) -> bool:
        """Whether workers were ever started."""
        try:
            return self._paths.launcher_exit.exists() or any(self._paths.attempt(0).parent.iterdir())
        except OSError:
            return True

    def _launcher_end(self) -> Outcome | None:
        try:
            status = int(json.loads(read_own(self._paths.launcher_exit))["status"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        state = ask_keeper(self._paths.keeper_socket, {"op": "watch"})
        if state is None or (state.get("launcher") or {}).get("status", 0) is None:
            return None  # that was an earlier launcher: a newer one is alive, or we cannot tell
        code = os.waitstatus_to_exitcode(status)
        line = (
            f"torchrun ended with {code}, without supervision: the agent does not run ({self._paths.folder}/agent.log)"
        )
        return Outcome(state="failed" if code else "succeeded", exit_code=code if code >= 0 else 128 - code, line=line)

    # ----- signals -----

    def _take_signals(self) -> None:
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, *PASSED_ON, signal.SIGCHLD):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def _act_on_signals(self, terminal: Terminal, now: float) -> Outcome | None:
        while self._signals:
            number = signal.Signals(self._signals.pop(0))
            if number in PASSED_ON:
                ask_keeper(self._paths.keeper_socket, {"op": "signal", "signal": int(number), "ranks": None})
            elif self._stop is None:
                self._stop, self._stop_at = number, now
                self._stop_gracefully(terminal)
            elif now - self._stop_at > 0.1:  # Slurm sends the first one twice
                return self._stopped(f"killed by a second {number.name}")
        return None

    def _stop_gracefully(self, terminal: Terminal) -> None:
        assert self._stop is not None
        name = "SIGINT" if self._stop == signal.SIGINT else "SIGTERM"
        written = True
        try:
            self._paths.write_surely(self._paths.front, json.dumps({"stop": name}).encode())
        except OSError:  # a full disk: the ranks still get their signal and their time
            written = False
        if not self._options.run.quiet:
            terminal.say(f"{self._stop.name}: stopping; press Ctrl-C again to kill everything")
        if not written or self._services["agent"].failures >= CRASH_LOOP:
            ask_keeper(self._paths.keeper_socket, {"op": "stop", "signal": int(self._stop), "grace_s": 30.0})

    def _stopped(self, line: str) -> Outcome:
        number = self._stop or signal.SIGTERM
        return Outcome(state="stopped", exit_code=128 + int(number), line=line)

    # ----- the end -----

    def _show_end(self, terminal: Terminal, outcome: Outcome) -> None:
        """Show the rest of the output, then the last line. Waits for a slow reader until the next signal."""
        if not self._paths.outcome.exists():
            self._kill_ranks()
        self._signals.clear()
        while not terminal.drain(time.monotonic()) and not self._signals:
            self._sleep(0.25, out=terminal.blocked)
        terminal.say(outcome.line)
        if self._options.json:
            terminal.write(json.dumps({"schema": 1, **msgspec.to_builtins(outcome)}))
        while not terminal.drain(time.monotonic()) and not self._signals:
            self._sleep(0.25, out=terminal.blocked)

    def _kill_ranks(self) -> None:
        """Kill the ranks with their process groups: the keeper's own death would not reach these."""
        ask_keeper(self._paths.keeper_socket, {"op": "kill", "attempt": 1 << 30})

    def _end_services(self, *, killed: bool) -> None:
        """Agent and controller end by themselves once the job has ended; the keeper has nothing left to keep."""
        if "agent" in self._services:
            self._services["agent"].end(0.0 if killed else 5.0)
        if "keeper" in self._services and self._services["keeper"].pid:
            self._kill_ranks()
            self._services["keeper"].end(0.0, polite=False)
        if "controller" in self._services:
            self._services["controller"].end(0.0 if killed else CONTROLLER_PATIENCE_S, polite=False)

    def _tell_address(self, terminal: Terminal) -> None:
        """Say once how the other nodes join, as soon as the controller listens."""
        controller = self._services.get("controller")
        if self._told_address or controller is None or not controller.pid:
            return
        try:
            found = json.loads((self._prepared.job_dir / "controller.json").read_bytes())
            if int(found["pid"]) != controller.pid:
                return
        except (OSError, ValueError, KeyError, TypeError):
            return
        self._told_address = True
        if not self._options.run.quiet:
            token = self._prepared.plan.settings.run.token_file or self._prepared.job_dir / "token"
            options = f"--controller {found['address']} --token-file {token}"
            terminal.say(f"other nodes join with: unbroken run {options} -- (the same command)")


def _introduction(prepared: Prepared) -> list[str]:
    """Which job this is and how to watch it: on the node that has its controller."""
    if not prepared.runs_controller:
        return []
    where = shlex.quote(str(prepared.job_dir))
    return [
        f"job {prepared.plan.spec.name} in {prepared.job_dir}",
        f"to watch it: unbroken watch --job-dir {where} (or page, status, why last)",
    ]


def _services(prepared: Prepared) -> dict[str, ServiceProcess]:
    """What runs on this node, in the order in which it is started."""
    plan, paths = prepared.plan, prepared.paths
    cwd = Path(plan.cwd)
    keeper = keeper_command(plan.python, paths.folder)
    services = {"keeper": ServiceProcess("keeper", keeper, env=prepared.keeper_env, cwd=cwd)}
    env = daemon_env(os.environ, cwd)
    if prepared.runs_controller:
        argv = daemon_argv("supervisor.controller.main", "--job-dir", plan.job_dir)
        argv += ["--of-front", "--nodes", str(plan.spec.nodes_max + plan.spec.spares)]
        argv += ["--socket", str(paths.controller_socket), "--plan", str(paths.plan)]
        argv += ["--training-python", plan.python]
        argv += ["--scheduler-job", plan.spec.scheduler_job, "--requeues", str(plan.spec.requeues)]
        services["controller"] = ServiceProcess(
            "controller",
            argv,
            env=env,
            cwd=paths.folder,
            log=paths.folder / "controller.log",
            last_codes=(4,),  # a newer controller took over
            restart_args=["--restarted"],
        )
    services["agent"] = ServiceProcess(
        "agent",
        daemon_argv("supervisor.agent.agent", plan.local_dir),
        env=env,
        cwd=paths.folder,
        log=paths.folder / "agent.log",
    )
    return services


# ----- a process that is kept running -----

FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 5.0
EX_CONFIG = 78
CONFIG_DELAY_S = 60.0
"""Pause after an exit code that says that a person has to change something first."""
LONGEST_DELAY_AFTER_KILL_S = 0.5
"""Pause after a process was killed from outside: it is not at fault."""
STEADY_S = 10.0
"""A process that lived this long did not fail at its start: the back-off starts from the beginning."""
LOG_LIMIT = 8 << 20
"""Bytes of each log; as much of what came before is kept beside it."""
NEVER = float("inf")


class ServiceProcess:
    """One process that is kept running until `end`."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Path | None = None,
        last_codes: Sequence[int] = (),
        restart_args: Sequence[str] = (),
    ) -> None:
        """`log` None: it shares our descriptors. After an exit code in `last_codes` it is not started again."""
        self.name = name
        self.failures = 0
        """Ends in a row, each soon after the start and by its own fault: not killed by a signal."""
        self.finished = False
        self._argv = list(argv)
        self._restart_args = list(restart_args)
        self._env = dict(env)
        self._cwd = cwd
        self._log = log
        self._last_codes = last_codes
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._next_at = 0.0
        self._short_lives = 0

    @property
    def pid(self) -> int:
        """0 while it is not running."""
        return self._process.pid if self._process is not None else 0

    def tend(self, now: float) -> float:
        """Start the process when it is due. Returns the seconds until the next call is needed."""
        self._bound_log()
        if self._process is not None and self._process.poll() is not None:
            self._ended(self._process.returncode, now)
        if self._process is not None or self.finished:
            return NEVER
        if now >= self._next_at:
            try:
                self._start(now)
            except OSError:  # no process, memory or descriptor left just now: the run goes on, we try again
                self._started_at = now
                self._ended(126, now)
                return max(0.0, self._next_at - now)
            return NEVER
        return self._next_at - now

    def _start(self, now: float) -> None:
        again = self._restart_args if self._started_at else []
        output = None
        if self._log is not None:
            output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = subprocess.Popen(
                [*self._argv, *again],
                env=self._env,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL if output is not None else None,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        finally:
            if output is not None:
                os.close(output)
        self._started_at = now

    def _bound_log(self) -> None:
        """Keep its log small, also when its children write to it. They have it open for appending, so the file stays:
        its content is copied to another file, and it is emptied."""
        if self._log is None:
            return
        try:
            if os.stat(self._log).st_size <= LOG_LIMIT:
                return
            with open(self._log, "r+b") as log, open(self._log.with_suffix(".log.1"), "wb") as aside:
                log.seek(-LOG_LIMIT, os.SEEK_END)
                aside.write(log.read(LOG_LIMIT))
                log.truncate(0)
        except FileNotFoundError:
            pass  # it has not written anything yet
        except OSError:  # a full disk: then nothing is kept of it
            with contextlib.suppress(OSError):
                os.truncate(self._log, 0)

    def _ended(self, code: int, now: float) -> None:
        self._process = None
        self.finished = code in self._last_codes
        if now - self._started_at > STEADY_S:
            self._short_lives = self.failures = 0
        self._short_lives += 1
        self.failures += code >= 0
        longest_s = LONGEST_DELAY_S if code >= 0 else LONGEST_DELAY_AFTER_KILL_S
        delay_s = min(longest_s, FIRST_DELAY_S * 2.0 ** min(self._short_lives - 1, 10))
        self._next_at = now + (CONFIG_DELAY_S if code == EX_CONFIG else delay_s)

    def last_line(self) -> str:
        """The last line of its log, which usually says why it failed."""
        try:
            lines = self._log.read_bytes()[-4096:].decode(errors="replace").split("\n") if self._log else []
        except OSError:
            lines = []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")[:300]

    def end(self, patience_s: float, *, polite: bool = True) -> None:
        """Wait for its own end, then end it: SIGTERM and a second, if `polite`, then SIGKILL with all its group."""
        self.finished = True
        process, self._process = self._process, None
        if process is None or _ended_within(process, patience_s):
            return
        if polite:
            process.terminate()
            if _ended_within(process, 1.0):
                return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        _ended_within(process, 5.0)


def _ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def ask_keeper(path: Path, request: Mapping[str, object], timeout_s: float = 1.0) -> dict[str, Any] | None:
    """One request to the keeper and its answer; None when it does not answer in time."""
    deadline = time.monotonic() + timeout_s
    answer = b""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(json.dumps(request).encode() + b"\n")
            while not answer.endswith(b"\n"):
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                chunk = connection.recv(65536)
                if not chunk:
                    return None
                answer += chunk
        found = json.loads(answer.split(b"\n", 1)[0])
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
