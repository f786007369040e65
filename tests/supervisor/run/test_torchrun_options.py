from __future__ import annotations

import shlex
from argparse import ArgumentParser

import pytest

from supervisor.errors import LaunchRefused
from supervisor.run.torchrun_options import OPTIONS, TorchrunCommand, read_command


def read(line: str, nproc: str | None = None, **environment: str) -> TorchrunCommand:
    return read_command(shlex.split(line), nproc_per_node=nproc, environment=environment)


def refusal(line: str, nproc: str | None = None, **environment: str) -> str:
    with pytest.raises(LaunchRefused) as caught:
        read(line, nproc, **environment)
    return str(caught.value)


@pytest.fixture(scope="module")
def torchrun() -> ArgumentParser:
    """torchrun's own parser."""
    run = pytest.importorskip("torch.distributed.run")
    parser: ArgumentParser = run.get_args_parser()
    return parser


OURS = {"rdzv_backend", "rdzv_endpoint", "rdzv_id", "max_restarts", "monitor_interval", "logs_specs"}
DROPPED = {"rdzv_conf", "standalone", "run_path", "node_rank", "master_addr", "master_port"}


@pytest.mark.parametrize(
    "line",
    [
        "torchrun train.py",
        "torchrun --nproc-per-node 2 train.py --nproc-per-node 3 -m x",
        "torchrun --nproc_per_node=gpu --nnodes 1:4 train.py",
        "torchrun --standalone --nproc-per-node=2 -m pkg.train --lr 1e-3",
        "torchrun --no-python ./run.sh a b",
        "torchrun --no_python bash -c 'exit 3'",
        "torchrun --run-path /abs/train.py --x",
        "torchrun -t 3 -r0:1,1:2 --log-dir logs --local-ranks-filter 0,1 t.py",
        "torchrun -r=3 --tee=0:3 --role trainer --local_addr 10.0.0.1 t.py",
        "torchrun --rdzv-backend c10d --rdzv-endpoint h:29500 --rdzv-id 7 --rdzv-conf a=1 --max-restarts 3 t.py",
        "torchrun --master-addr h --master_port 1 --node-rank 0 --nnodes 2 t.py",
        "torchrun --start-method fork --event-log-handler null --monitor-interval 5 t.py",
        "torchrun --numa-binding node --signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 5 t.py",
        "torchrun --virtual-local-rank --duplicate-stdout-filters a,b --duplicate_stderr_filters '' t.py",
        "torchrun --nn 2 --stand --no-p x.sh",
        "torchrun --nproc-per-node 2 -- t.py -- --x",
        "torchrun t.py",
        "torchrun t.py - -- x",
        "python -m torch.distributed.run --nproc-per-node 2 t.py",
    ],
)
def test_torchrun_reads_our_arguments_as_it_would_have_read_the_users(torchrun: ArgumentParser, line: str) -> None:
    words = shlex.split(line)
    theirs = vars(torchrun.parse_args(words[3:] if words[0] == "python" else words[1:]))
    command = read(line)
    ours = vars(torchrun.parse_args(list(command.launcher_argv("job"))))
    same = set(theirs) - OURS - DROPPED
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    assert ours["rdzv_backend"] == "unbroken"
    assert ours["rdzv_id"] == ("7" if theirs["rdzv_id"] == "7" else "job")
    assert {key: ours[key] for key in DROPPED} == {key: torchrun.get_default(key) for key in DROPPED}
    assert command.nproc_per_node == theirs["nproc_per_node"]


def test_every_option_of_this_torchrun_is_known(torchrun: ArgumentParser) -> None:
    theirs = {text for action in torchrun._actions for text in action.option_strings}
    assert theirs == {text for option in OPTIONS for text in option.spellings}
    flags = {text for action in torchrun._actions if action.nargs == 0 for text in action.option_strings}
    assert flags == {text for option in OPTIONS if option.flag for text in option.spellings}


def test_plain_python_becomes_torchrun() -> None:
    command = read("python -u train.py --x -m 1", nproc="4")
    assert command.launcher_argv("j")[-5:] == ("--nproc-per-node=4", "train.py", "--x", "-m", "1")
    assert command.program_is_python
    module = read("python3.11 -m pkg.train --x")
    assert (module.kind, module.script, module.script_args) == ("module", "pkg.train", ("--x",))
    assert module.launcher_argv("j")[-3:] == ("--module", "pkg.train", "--x")
    assert read("/opt/env/bin/python -mpkg.train").script == "pkg.train"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "no command"),
        ("torchrun", "needs a script"),
        ("torchrun --nproc-per-node", "--nproc-per-node needs a value"),
        ("torchrun --nproc-per-node --tee 3 t.py", "--nproc-per-node needs a value"),
        ("torchrun --nproc-per-node 0 t.py", "--nproc-per-node 0"),
        ("torchrun --nnodes 2:1 t.py", "--nnodes 2:1"),
        ("torchrun --nnodes x t.py", "--nnodes x"),
        ("torchrun --max-restarts -1 t.py", "--max-restarts -1"),
        ("torchrun --standalone=1 t.py", "--standalone takes no value"),
        ("torchrun --rdzv c10d t.py", "could be --rdzv-backend, --rdzv-endpoint"),
        ("torchrun --no-python -m x", "exclude each other"),
        ("accelerate launch t.py", "`unbroken run -- torchrun --nproc-per-node gpu t.py`"),
        (
            "python -m accelerate.commands.launch --num_processes 2 t.py --lr 1",
            "torchrun --nproc-per-node 2 t.py --lr 1`",
        ),
        (
            "deepspeed --num_gpus=4 --master_port 29501 t.py --deepspeed",
            "--nproc-per-node 4 --master-port 29501 t.py --deepspeed`",
        ),
        ("python -m deepspeed.launcher.launch t.py", "torchrun --nproc-per-node gpu t.py`"),
        (
            "accelerate launch --num_machines 2 --num_processes 16 --mixed_precision bf16 -m pkg.t",
            "`ACCELERATE_MIXED_PRECISION=bf16 unbroken run -- torchrun --nnodes 2 --nproc-per-node 8 -m pkg.t`",
        ),
        (
            "accelerate launch --config_file fsdp.yaml --use_fsdp t.py --a 1",
            "no word for --config_file fsdp.yaml, --use_fsdp:",
        ),
        ("srun torchrun t.py", "must come first"),
        ("mpirun -n 2 python t.py", "must come first"),
        ("numactl -N 0 torchrun t.py", "must come before unbroken"),
        ("uv run torchrun t.py", "must come before unbroken"),
        ("python -m torch.distributed.launch t.py", "deprecated"),
        ("python -O t.py", "`python -O`"),
        ("python -c pass", "`python -c`"),
        ("python", "needs a script"),
        ("python -m", "name of a module"),
        ("unbroken run -- torchrun t.py", "inside unbroken run"),
        ("./train.sh", "not a launcher"),
    ],
)
def test_refusals_name_what_is_wrong_in_one_line(line: str, says: str) -> None:
    text = refusal(line)
    assert says in text
    assert "\n" not in text


def test_restart_budget_and_what_is_not_used_are_said() -> None:
    command = read("torchrun --max-restarts 3 --rdzv-endpoint h:1 --node-rank 1 --nnodes 2 t.py")
    assert (command.max_restarts, command.node_rank) == (3, 1)
    assert command.notices == (
        "--rdzv-endpoint: not used, the controller is the rendezvous",
        "--max-restarts 3 is now unbroken's budget: restarts without progress in between",
    )
    zero = read("torchrun --max-restarts 0 t.py")
    assert zero.max_restarts is None
    assert "replaced" in zero.notices[0]
    assert read("torchrun --standalone --nproc-per-node 2 t.py").notices == ()
    assert "neither watched nor shown" in read("torchrun --logs-specs mine t.py").notices[0]


def test_options_of_a_newer_torchrun_are_passed_on() -> None:
    command = read("torchrun --brand-new 4 --nproc-per-node 2 t.py")
    assert command.has_unknown_options
    assert command.launcher_argv("j")[-5:] == ("--brand-new", "4", "--nproc-per-node", "2", "t.py")


@pytest.mark.parametrize(
    ("line", "label"),
    [
        ("torchrun runs/train_gpt.py", "train_gpt"),
        ("torchrun -m titan.train", "titan"),
        ("torchrun -m train", "train"),
        ("torchrun --no-python ./go.sh", "go"),
    ],
)
def test_the_jobs_name_comes_from_the_script(line: str, label: str) -> None:
    assert read(line).label == label
