"""Launchers that torchrun replaces: the line to use in their place.

`unbroken` needs torchrun, whose rendezvous it answers. `accelerate launch` and `deepspeed` start the same processes;
their libraries read torchrun's variables. What torchrun has no option for is told, and left out of the line.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final, NamedTuple


class Launcher(NamedTuple):
    """How a launcher's options are said to torchrun."""

    name: str
    options: dict[str, str]
    """Its option -> torchrun's."""
    variables: dict[str, str] = {}
    """Its option -> the variable that its library reads."""
    flags: tuple[str, ...] = ()
    """Options without a value that torchrun needs no word for."""
    total: bool = False
    """Its number of processes is that of all nodes, not of one."""


_NODES: Final = {"--machine_rank": "--node-rank", "--main_process_ip": "--master-addr", "--node_rank": "--node-rank"}
ACCELERATE: Final = Launcher(
    name="accelerate launch",
    options=_NODES
    | {"--num_processes": "--nproc-per-node", "--num_machines": "--nnodes", "--main_process_port": "--master-port"},
    variables={
        "--mixed_precision": "ACCELERATE_MIXED_PRECISION",
        "--gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "--dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
        "--num_cpu_threads_per_process": "OMP_NUM_THREADS",
    },
    flags=("--multi_gpu", "--cpu", "--quiet", "-q"),
    total=True,
)
DEEPSPEED: Final = Launcher(
    name="deepspeed",
    options={
        "--num_gpus": "--nproc-per-node",
        "--num_nodes": "--nnodes",
        "--node_rank": "--node-rank",
        "--master_addr": "--master-addr",
        "--master_port": "--master-port",
    },
    flags=("--no_local_rank", "--no_ssh"),
)


def advice(launcher: Launcher, words: Sequence[str]) -> str:
    """The line to use instead. `words`: what follows the launcher's name."""
    given: dict[str, str] = {}
    variables: list[str] = []
    left_out: list[str] = []
    rest = list(words)
    module = False
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if name in ("-m", "--module"):
            module = True
        elif name in launcher.options or name in launcher.variables:
            value = value if equals or not rest else rest.pop(0)
            if name in launcher.options:
                given[launcher.options[name]] = value
            else:
                variables.append(f"{launcher.variables[name]}={shlex.quote(value)}")
        elif name not in launcher.flags:
            takes_value = len(rest) > 1 and not (equals or rest[0].startswith("-") or rest[0].endswith(".py"))
            left_out.append(shlex.join([name, rest.pop(0)]) if takes_value else name + equals + value)
    if launcher.total:
        _for_one_node(given)
    given.setdefault("--nproc-per-node", "gpu")
    torchrun = ["torchrun", *(word for pair in given.items() for word in pair), *(["-m"] if module else []), *rest]
    line = " ".join([*variables, "unbroken run --", shlex.join(torchrun)])
    without = f". torchrun has no word for {', '.join(left_out)}: say that in the script" if left_out else ""
    return f"{launcher.name} starts processes by itself: use `{line}` in its place{without}"


def _for_one_node(given: dict[str, str]) -> None:
    """Divide the number of processes by that of nodes, where both are numbers."""
    processes, nodes = given.get("--nproc-per-node", ""), given.get("--nnodes", "1")
    if processes.isdecimal() and nodes.isdecimal() and int(nodes):
        given["--nproc-per-node"] = str(max(1, int(processes) // int(nodes)))
