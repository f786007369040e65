"""Every rank but the last waits for something of its own, honestly, while the last one waits for them in a barrier.

`waits.py OUT STEPS PACE SECONDS`: in the middle of the run each of the ranks 0, 1, ... does what `WAITS` says at its
number, for about so many seconds. Nothing from outside can tell these from hangs: a supervisor tells, and sits still.
"""

from __future__ import annotations

import ctypes
import fcntl
import http.server
import os
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import rigging

rigging.sign_in()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def polls(seconds: float, _: Path) -> None:
    done = time.monotonic() + seconds
    while not time.monotonic() > done:
        time.sleep(1)


def calls_a_program(seconds: float, _: Path) -> None:
    os.system(f"sleep {seconds}")


def slow_rows(seconds: float) -> Iterator[int]:
    for row in range(3):
        time.sleep(seconds / 3)
        yield row


def reads_a_generator(seconds: float, _: Path) -> None:
    sum(slow_rows(seconds))


def one_long_call(seconds: float, _: Path) -> None:
    ctypes.CDLL(None).usleep(int(seconds * 1e6))


def one_long_call_that_keeps_the_interpreter(seconds: float, _: Path) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def waits_for_a_future(seconds: float, _: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(time.sleep, seconds).result()


def asks_a_server(seconds: float, _: Path) -> None:
    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(seconds)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=10 * seconds).close()
        server.shutdown()


def wants_a_file_lock(seconds: float, folder: Path) -> None:
    path = folder / "lock"
    code = f"import fcntl, time; fcntl.flock(open({str(path)!r}, 'w'), 2); print(flush=True); time.sleep({seconds})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)


def polls_a_child(seconds: float, _: Path) -> None:
    child = subprocess.Popen(["sleep", str(seconds)])
    while child.poll() is None:
        time.sleep(0.5)


def reads_a_pipe(seconds: float, folder: Path) -> None:
    path = folder / "pipe"
    os.mkfifo(path)
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; echo done > {path}"])
    path.read_text()


def waits_for_a_thread_that_computes(seconds: float, _: Path) -> None:
    def compress() -> None:
        until, data = time.monotonic() + seconds, os.urandom(1 << 20)
        while time.monotonic() < until:
            zlib.compress(data, 9)
            time.sleep(0.2)  # there are two cores for all

    thread = threading.Thread(target=compress)
    thread.start()
    thread.join()


def computes(seconds: float, _: Path) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.randn(64, 64).square().mean().item()
        time.sleep(0.01)


WAITS: tuple[Callable[[float, Path], None], ...] = (
    polls,
    calls_a_program,
    reads_a_generator,
    one_long_call,
    one_long_call_that_keeps_the_interpreter,
    waits_for_a_future,
    asks_a_server,
    wants_a_file_lock,
    polls_a_child,
    reads_a_pipe,
    waits_for_a_thread_that_computes,
    computes,
)


def main() -> None:
    out, steps, pace, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    dist.init_process_group("gloo")
    rank, weights = dist.get_rank(), torch.zeros(64)
    for step in range(1, steps + 1):
        rigging.strike(step)
        time.sleep(pace)
        gradient = weights - torch.randn(64, generator=torch.Generator().manual_seed(step))
        dist.all_reduce(gradient)
        weights = weights - 0.1 * gradient / dist.get_world_size()
        if rank == 0:
            print(f"step {step}/{steps} loss {gradient.square().mean().item():.5f}", flush=True)
        if step == steps // 2 and seconds:
            if rank < min(len(WAITS), dist.get_world_size() - 1):
                mine = out / f"rank{rank}"
                mine.mkdir(exist_ok=True)
                WAITS[rank](seconds, mine)
            dist.barrier()
    if rank == 0:
        rigging.write_weights([weights], out / "final.bin")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
