"""Runs a training script without any supervision: `python unsupervised.py RANKS SCRIPT ARGUMENTS`. Without arguments,
each line of standard input is such a list as JSON, with the file for what is printed before it, and is answered.

As under torchrun on one node, but the ranks are forked from one process that has torch: with torchrun itself each of
them would import it, three seconds of a core. The same for torch._dynamo, which DDP and every optimizer import.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import traceback

import torch._dynamo
import torch.distributed


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _train(rank: int, ranks: int, port: int, script: str, arguments: list[str]) -> int:
    """In a process of its own: the code with which the script ends."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in own.items()})
    sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def main(ranks: int, script: str, arguments: list[str]) -> int:
    """0 when all ranks end well; the first that does not ends the others."""
    assert torch.distributed.is_available()
    port = _free_port()
    living = set()
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os._exit(_train(rank, ranks, port, script, arguments))
        living.add(pid)
    failed = False
    while living:
        pid, status = os.wait()
        living.discard(pid)
        if status and not failed:
            failed = True
            for other in living:
                os.kill(other, signal.SIGKILL)
    return int(failed)


def serve() -> None:
    for line in sys.stdin:
        printed, ranks, script, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            with open(printed, "wb") as output:
                for number in (1, 2):
                    os.dup2(output.fileno(), number)
            os._exit(main(ranks, script, arguments))
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        serve()
    else:
        sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
