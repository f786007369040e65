"""The command line's end of the wire: finds a job, asks its controller, or reads the journal when none answers.

A controller proves that it knows the job's token before it is asked anything; requests and answers are signed with it,
and it is never sent. On the controller's own node its unix socket is used.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import secrets
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec

from diagnosis.signals import clean_line, clean_text
from supervisor.errors import (
    NOT_PROVEN,
    CommandDenied,
    ControllerSilent,
    ControllerUnreachable,
    ControllerUnusable,
    JobNotFound,
)
from supervisor.files import SECRET_BYTES, Here, read_token, start_time
from supervisor.messages import CommandRequest, encode
from supervisor.wire.access import MUNGE_HEADER, TOKEN_HEADER, munge_payload, read_access_token
from supervisor.wire.authentication import (
    CHALLENGE_HEADER,
    CHALLENGE_PATH,
    PROOF_HEADER,
    Exchange,
    SharedSecret,
    Unproven,
    equal,
    exchange_of,
    munge_credential,
    new_nonce,
)
from supervisor.wire.peers import explain_tls, is_loopback, not_private, own_users, peer_uid, tls_context

TIMEOUT_S = 5.0
ALIVE_S = 3.0
"""A controller must answer the challenge within this time. One that hangs is sent no command."""
WANTS_CPU = 0.5
"""A process that computes, or waits for a CPU, for this share of the time does not hang."""
WHOLE_S = 30.0
"""The whole answer may take this long; each piece of it `TIMEOUT_S`."""
ANSWER_BYTES = 256 << 20
"""More than the timeline of any job."""
HEALTH_BYTES = 64 << 10
SOMETHING_ELSE = "something else does"
REPLAY_TIMEOUT_S = 20.0
"""For answers that need the whole journal."""
NOT_YET = 504
"""The controller's answer while its journal does not take the command."""
SCHEDULER_TIMEOUT_S = 10.0
_SLURM_FIELD = re.compile(r"(?:^| )(WorkDir|JobId|Command)=(.*?)(?= [A-Za-z/:]+=|$)")
_SLURM_JOB = re.compile(r"\d+([_+]\d+)?")


def find_job(job_dir: str, cwd: Path) -> Path:
    """The job folder that was named (a path, or a name under `unbroken-jobs`), else the newest. Raises JobNotFound."""
    try:
        return _find(job_dir, cwd)
    except OSError as error:
        raise JobNotFound(f"{error.filename or cwd} cannot be read: {error.strerror}") from None


def _find(job_dir: str, cwd: Path) -> Path:
    root = cwd / "unbroken-jobs"
    if job_dir:
        folder = next((path for path in (cwd / job_dir, root / job_dir) if path.exists()), None)
        if folder is None:
            raise JobNotFound(f"there is no job folder {cwd / job_dir}")
        if folder.is_dir() and not any(folder.glob("journal.*.jsonl")):
            raise JobNotFound(f"{folder} is not a job folder: there is no journal in it")
        if not folder.is_dir() and not _is_journal(folder):
            raise JobNotFound(f"{folder} is neither a job folder nor a journal")
        return folder
    jobs = jobs_of(cwd)
    return next((job for job in jobs if job.stat().st_uid == os.geteuid()), jobs[0])  # one's own come first


def jobs_of(cwd: Path, also: Callable[[Path], bool] = lambda _: False) -> list[Path]:
    """The job folders under `unbroken-jobs`, the newest first. Raises JobNotFound where there is none, and OSError.

    `also`: which folders count although no controller has ever begun a journal there.
    """
    root = cwd / "unbroken-jobs"
    jobs = [path for path in root.iterdir() if _is_job(path) or also(path)] if root.is_dir() else []
    if not jobs:
        raise JobNotFound(f"no job under {root}: give its folder with --job-dir, or go to the folder it was started in")
    return sorted(jobs, key=_changed_at, reverse=True)


def _is_job(folder: Path) -> bool:
    """False also for another user's folder that is closed to us."""
    try:
        return (folder / "epochs").is_dir()
    except PermissionError:
        return False


def _is_journal(file: Path) -> bool:
    from supervisor.controller.journal import read_history

    return file.is_file() and bool(read_history(file).records)


def find_slurm_job(job: str, cwd: Path) -> Path:
    """The job folder of a Slurm job: under `unbroken-jobs` here, else where Slurm says it works. Raises JobNotFound."""
    if not _SLURM_JOB.fullmatch(job):
        raise JobNotFound(f"{job!r} is not the id of a Slurm job")
    here = cwd / "unbroken-jobs" / job
    if here.is_dir():
        return find_job(str(here), cwd)
    try:
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", job],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SCHEDULER_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobNotFound(f"there is no {here}, and scontrol does not answer ({error})") from None
    told = dict(_SLURM_FIELD.findall(done.stdout.strip()))
    if done.returncode or "WorkDir" not in told:
        raise JobNotFound(
            f"there is no {here}, and Slurm knows no job {job}: {clean_line(done.stderr, 200)}".rstrip(": ")
        )
    # Slurm does not tell where the job was submitted: by default that is WorkDir, else the folder of its script.
    places = [Path(told["WorkDir"]), Path(told.get("Command", "")).parent]
    folders = [place / "unbroken-jobs" / told.get("JobId", job) for place in places]
    return find_job(str(next((folder for folder in folders if folder.is_dir()), folders[0])), cwd)


def _controller_of(job_dir: Path) -> dict[str, Any]:
    found = msgspec.json.decode((job_dir / "controller.json").read_bytes(), type=dict[str, Any])
    if not found.get("address"):
        raise ControllerUnreachable(f"no controller is known for {job_dir}: its controller.json names no address")
    return {key: clean_line(str(value), 200) for key, value in found.items()}


def _seen_from_here(found: dict[str, Any]) -> int | None:
    """The process of a controller, where its number means the same here and it is no other by now."""
    try:
        pid = int(found["pid"])
        here = Here.find().sees(found["boot_id"], found["pid_namespace"])
        return pid if here and start_time(pid) == int(found["start_time"]) else None
    except (OSError, KeyError, ValueError):
        return None


def _token_in(path: Path, *, shared: bool) -> str:
    """Raises ControllerUnusable."""
    try:
        token = read_token(path, shared=shared)
    except OSError as error:
        raise ControllerUnusable(f"the job's token cannot be read: {path}: {error.strerror or error}") from None
    if not token:
        raise ControllerUnusable(f"the token file {path} is empty")
    if not token.isascii() or not token.isprintable() or len(token) == SECRET_BYTES:
        raise ControllerUnusable(f"the token file {path} does not hold a job's token")
    return token


def _other_owner(job_dir: Path) -> int | None:
    """The user whose job this is, where it is another's, and munge can prove who we are; None otherwise."""
    with contextlib.suppress(OSError):
        owner = os.stat(job_dir).st_uid
        if owner not in own_users() and shutil.which("munge"):
            return owner
    return None


def _changed_at(job: Path) -> float:
    files = (*job.glob("journal.*.jsonl"),) or job.glob("leases/*.json")  # it has just begun
    return max((path.stat().st_mtime for path in files), default=0.0)


class CpuUse(NamedTuple):
    """Of a process, all its threads together."""

    at: float
    """Monotonic seconds."""
    ran_s: float
    queued_s: float
    """It could have run, and waited for a CPU."""
    stopped: bool


def _cpu_use(pid: int) -> CpuUse | None:
    """None where that cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        threads = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        ran_ns, queued_ns = (sum(int(times[field]) for times in threads) for field in (0, 1))
    except (OSError, ValueError, IndexError):
        return None
    return CpuUse(time.monotonic(), ran_ns / 1e9, queued_ns / 1e9, stat[stat.rfind(")") + 2 :][:1] in "tTZ")


def why_silent(before: CpuUse | None, after: CpuUse | None, process: str) -> str:
    """Of a controller that accepts connections and does not answer: what is wrong, and what to do."""
    which = f": it is {process}" if process else ""
    kill = "kill it (`kill -9`): `unbroken run` starts another, the ranks go on meanwhile"
    if before is None or after is None:
        return f"hangs, or its host has no CPU for it{which}. Where the host is not overloaded, {kill}"
    ran_s, queued_s, seconds = after.ran_s - before.ran_s, after.queued_s - before.queued_s, after.at - before.at
    if after.stopped or ran_s + queued_s < WANTS_CPU * seconds:
        return f"hangs{which}. {kill.capitalize()}"
    times = f"{process} computed for {ran_s:.1f} s and waited {queued_s:.1f} s for a CPU in {seconds:.1f} s"
    if queued_s > ran_s:
        return f"is slow: it waits for a CPU ({times}). Leave it: it answers when other processes leave it one"
    return f"is busy ({times}). Ask again; if that stays so for minutes, {kill}"


class ControllerClient:
    """One controller, over plain HTTP/1.1 requests."""

    def __init__(self, address: str, token: str, tls_ca: str = "", process: str = "", unix_socket: str = "") -> None:
        """`process`: where to find it, in words. `unix_socket`: its own, tried first where it is one of ours."""
        self.address = address if "://" in address else f"http://{address}"
        self._secret = SharedSecret(token)
        self._token = read_access_token(token)
        self._owner: int | None = None
        """Whose controller it is, where this user is to be proven by munge and has no token."""
        self._job = ""
        """The mark of the job that munge is to vouch for."""
        self._tls_ca = tls_ca
        self._process = process
        self._pid: int | None = None
        """Where its processes are seen from here."""
        self._unix_socket = unix_socket
        self._only_on = ""
        """The one host that reaches it, where that is another one by its name."""

    @classmethod
    def of_job(cls, job_dir: Path, *, controller: str = "", token_file: str = "", tls_ca: str = "") -> ControllerClient:
        """The client for the controller of a job folder. Raises ControllerUnreachable when there is none to ask."""
        try:
            found = {"address": controller} if controller else _controller_of(job_dir)
            owners = own_users() | ({os.stat(job_dir).st_uid} if "socket" in found else set())
        except (OSError, msgspec.DecodeError) as error:
            raise ControllerUnreachable(f"no controller is known for {job_dir}: {error}") from None
        owner: int | None = None
        try:
            token = _token_in(Path(token_file or job_dir / "token"), shared=bool(token_file))
        except ControllerUnusable:
            if controller or token_file or (owner := _other_owner(job_dir)) is None:
                raise
            token = ""
        process = f"process {found['pid']} on {found['host']}" if {"pid", "host"} <= found.keys() else ""
        tls_ca = tls_ca or os.environ.get("UNBROKEN_TLS_CA", "")
        path = str(found.get("socket", ""))
        usable = path and os.path.exists(path) and not not_private(Path(path).parent, owners)
        address, host = str(found["address"]), str(found.get("host", ""))
        alone = is_loopback(address.partition("://")[2].rpartition(":")[0])
        client = cls(address, token, tls_ca, process, path if usable else "")
        client._pid = _seen_from_here(found)
        client._owner, client._job = owner, str(found.get("job", ""))
        client._only_on = host if alone and host != socket.gethostname() else ""
        return client

    def prove(self) -> None:
        """Have it prove that it is the controller, and ask nothing. Raises ControllerUnreachable and CommandDenied."""
        with self._connected(ALIVE_S) as connection:
            self._challenge(connection)

    def get(self, path: str) -> dict[str, Any]:
        """Raises ControllerUnreachable and CommandDenied."""
        return self._ask("GET", path, None)

    def command(self, request: CommandRequest) -> dict[str, Any]:
        """Have the controller carry out an operator's command, or say what it would do.

        Raises ControllerUnreachable and CommandDenied.
        """
        if not request.dry_run:
            munge = munge_credential(self._secret.command_digest(*request.words))
            request = msgspec.structs.replace(request, munge=munge)
        replays = request.dry_run or request.confirm
        return self._ask("POST", "/v1/override", encode(request), REPLAY_TIMEOUT_S if replays else TIMEOUT_S)

    def ask_model(self, incident: str) -> dict[str, Any]:
        """Have the language model asked about an incident. Raises ControllerUnreachable and CommandDenied."""
        return self._ask("POST", "/v1/ask", msgspec.json.encode({"incident": incident}))

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        target = quote(path, safe="/?=&")
        with self._connected(timeout_s) as connection:
            exchange = self._challenge(connection)
            if connection.sock is None:  # closed after the first answer, as proxies do
                connection.connect()
            connection.sock.settimeout(timeout_s)
            signed = {"Authorization": self._secret.authorization(exchange, method, target, body or b"")}
            if self._token is not None:
                signed[TOKEN_HEADER] = self._token.id
            try:
                with _no_longer_than(WHOLE_S, connection.sock):
                    connection.request(method, target, body, signed)
                    status, content, proof = _read(connection, ANSWER_BYTES)
            except OSError as error:
                raise ControllerSilent(self._no_answer(error)) from None
        if not equal(proof, self._secret.answer_proof(exchange, status, content)):
            perhaps = "this token was withdrawn a moment ago, or " if self._token is not None and status == 403 else ""
            why = f"{perhaps}another program answers in its place"
            raise ControllerSilent(f"the answer from {self.address} is not signed by the controller: {why}")
        answer = _object(content)
        if status != 200:
            why = clean_text(str(answer.get("error", f"status {status}")))
            raise ControllerSilent(why) if status == NOT_YET else CommandDenied(status, why)
        return answer

    @contextlib.contextmanager
    def _connected(self, timeout_s: float) -> Iterator[http.client.HTTPConnection]:
        connection: http.client.HTTPConnection | None = None
        try:
            connection = self._connection(timeout_s)
            yield connection
        except ssl.SSLError as error:
            raise ControllerUnusable(explain_tls(error, self.address, self._tls_ca)) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ControllerUnreachable(self._no_answer(error)) from None
        finally:
            if connection is not None:
                connection.close()

    def _no_answer(self, error: Exception) -> str:
        where = f" (it listens on {self._only_on} alone: ask there, or start runs with --listen 0.0.0.0:0)"
        return f"no controller answers at {self.address}: {clean_line(str(error), 200)}{where if self._only_on else ''}"

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Raises ControllerUnreachable, ControllerUnusable and OSError."""
        if self._unix_socket:
            nearby = _UnixConnection(self._unix_socket, timeout_s)
            try:
                nearby.connect()
                return nearby
            except OSError:
                nearby.close()  # its controller is gone, or in another world: by its address, then
        distant = self._distant(timeout_s)
        distant.connect()
        return distant

    def _distant(self, timeout_s: float) -> http.client.HTTPConnection:
        try:
            url = urlsplit(self.address)
            host, port = url.hostname or "", url.port
            if url.scheme != "https":
                return http.client.HTTPConnection(host, port, timeout=timeout_s)
        except (ValueError, http.client.InvalidURL) as error:
            raise ControllerUnreachable(f"{self.address} is not the address of a controller: {error}") from None
        try:
            context = tls_context(self._tls_ca)
        except OSError as error:
            raise ControllerUnusable(
                f"the certificates in {self._tls_ca} cannot be used: {error.strerror or error}"
            ) from None
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)

    def _challenge(self, connection: http.client.HTTPConnection) -> Exchange:
        """Raises ControllerUnusable when it accepts connections and does not answer, CommandDenied when it cannot prove
        that it knows the token."""
        nonce = new_nonce()
        headers = {CHALLENGE_HEADER: nonce, **self._other_proof(nonce)}
        connection.sock.settimeout(ALIVE_S)
        before = _cpu_use(self._pid) if self._pid is not None else None
        try:
            with _no_longer_than(2 * ALIVE_S, connection.sock):
                connection.request("GET", CHALLENGE_PATH, headers=headers)
                status, content, _ = _read(connection, HEALTH_BYTES)
        except TimeoutError:
            after = _cpu_use(self._pid) if self._pid is not None else None
            why = why_silent(before, after, self._process)
            raise ControllerUnusable(f"the controller at {self.address} {why}") from None
        answer = _object(content)
        if status == NOT_PROVEN and "error" in answer:
            raise ControllerUnusable(
                f"the controller at {self.address} is of another version: use the same version of unbroken here"
            )
        if status in (HTTPStatus.FORBIDDEN, HTTPStatus.TOO_MANY_REQUESTS):
            raise CommandDenied(status, clean_text(str(answer.get("error", f"status {status}"))))
        try:
            return exchange_of(answer, nonce, self._secret)
        except Unproven as error:
            why = f"what listens at {self.address} is not this job's controller, or the token is another job's: {error}"
            raise CommandDenied(NOT_PROVEN, why) from None
        except ValueError:
            raise ValueError(SOMETHING_ELSE) from None

    def _other_proof(self, nonce: str) -> dict[str, str]:
        """Of a challenge, where this end does not have the job's own token. Raises ControllerUnusable."""
        if self._token is not None:
            return {TOKEN_HEADER: self._token.id}
        if self._owner is None:
            return {}
        key = secrets.token_hex(32)
        credential = munge_credential(munge_payload(self._job, nonce, key), reader=self._owner)
        if not credential:
            raise ControllerUnusable("the job's token is not for this user to read, and munge does not answer here")
        self._secret = SharedSecret(key)
        return {MUNGE_HEADER: credential}


class _UnixConnection(http.client.HTTPConnection):
    """To a unix socket of this user's."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
        if peer_uid(self.sock) not in own_users() | {os.stat(self._path).st_uid}:
            raise PermissionError(1, "somebody else listens there")


def _read(connection: http.client.HTTPConnection, limit: int) -> tuple[int, bytes, str]:
    """Status, content and signature. Raises ValueError where it is too long, OSError and HTTPException."""
    response = connection.getresponse()
    content = response.read(limit)
    if response.read(1):
        raise ValueError(SOMETHING_ELSE)
    return response.status, content, response.headers.get(PROOF_HEADER, "")


def _object(content: bytes) -> dict[str, Any]:
    """Raises ValueError where it is no JSON object."""
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise ValueError(SOMETHING_ELSE) from None


@contextlib.contextmanager
def _no_longer_than(seconds: float, through: socket.socket) -> Iterator[None]:
    """Raises TimeoutError if the other end is not done by then, also if it sends one byte at a time."""
    late = threading.Event()

    def cut() -> None:
        late.set()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(through, socket.SHUT_RDWR)  # TLS's own would wait for the reader

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError):
        if not late.is_set():
            raise
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError("timed out")
