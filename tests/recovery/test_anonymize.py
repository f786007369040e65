"""Planted names in texts as logs write them: none is left, and what the diagnoser needs stays."""

from __future__ import annotations

import re

import pytest

from diagnosis import rules
from recovery.anonymize import Anonymizer

KEY = "hf_" + "aB3" * 12
TEXTS = (
    # hosts
    ("gpunode-042:1834:2291 [3] NCCL INFO Bootstrap: Using ib0:10.12.0.42<0>", "gpunode-042 10.12.0.42"),
    ("falcon:1834:2291 [3] NCCL WARN Call to connect returned Connection refused", "falcon"),
    ("Nov 23 10:11:12 condor kernel: NVRM: Xid (PCI:0000:c1:00): 79, pid=4711", "condor"),
    ("2026-11-23T10:11:12.123+01:00 osprey slurmd[812]: error: Unable to register", "osprey"),
    ("srun: error: heron: task 3: Killed", "heron"),
    ("slurmstepd: error: *** STEP 81234.0 ON kestrel CANCELLED AT 2026-11-23T10:00:00 ***", "kestrel 81234"),
    ("SLURM_JOB_NODELIST=dgx[01-04,07] MASTER_ADDR=dgx01 MASTER_PORT=29500", "dgx[01 dgx01"),
    ("nodes merlin[001-128] are draining", "merlin[001"),
    ("ssh: Could not resolve hostname harrier: Name or service not known", "harrier"),
    ("[c10d] The client socket has failed to connect to [gyrfalcon.hpc.acme-labs.com]:29500 (errno: 110)",
     "gyrfalcon acme-labs"),
    ("RuntimeError: connect to trainer-abc12-worker-0.default.svc.cluster.local:29400 timed out", "abc12 worker-0"),
    ("Watchdog: peer r12n04 did not answer; x3001c0s1b0n0 neither", "r12n04 x3001c0s1b0n0"),
    ("node 'petrel' is gone, host=petrel state=DOWN", "petrel"),
    ("ip-172-31-44-5.ec2.internal is unreachable", "172-31-44-5"),
    ("lost peregrine-17, peregrine-18", "peregrine-17 peregrine-18"),
    ("srun: error: osprey,buzzard: tasks 3-5: Killed", "osprey buzzard"),
    ("[c10d] The client socket has failed to connect to [egret]:29500 (errno: 113 - No route to host).", "egret"),
    ("The client socket has timed out after 60s while trying to connect to (plover, 29500).", "plover"),
    ("ssh: connect to host sparrow port 22: Connection refused", "sparrow"),
    ("mpirun noticed that process rank 0 with PID 0 on node wren exited on signal 9", "wren"),
    ("error: Nodes vulture,bittern not responding, setting DOWN", "vulture bittern"),
    ("uname: Linux zebra 5.15.0-1 #1 SMP x86_64", "zebra"),
    # users, mails
    ("JobId=1234567 UserId=trixie(12345) GroupId=mlgroup(1234) Name=nightfall", "1234567 trixie mlgroup nightfall"),
    ("OSError: [Errno 122] Disk quota exceeded: user wendy", "wendy"),
    ("wandb: Currently logged in as: victor (skunkworks). Use `wandb login --relogin`", "victor skunkworks"),
    ("login as yvonne", "yvonne"),
    ("alice.smith@gpunode-042:~/runs$ torchrun train.py", "alice.smith alice gpunode-042"),
    ("Please ask bob.jones+hpc@acme-labs.com for quota", "bob.jones acme-labs"),
    ("PermissionError: [Errno 13] Permission denied: '/home/carol/data/shard-001.tar'", "carol"),
    ("open(/Users/Dave Miller/train.py) failed", "/Users/Dave"),
    ('File "/Users/Dave Miller/llm/train.py", line 88, in main', "Dave Miller"),
    ("sshd[991]: Accepted publickey for erin from 10.1.2.3 port 5222", "erin 10.1.2.3"),
    ("uid=1004(frank) gid=1004(frank) groups=1004(frank)", "frank"),
    ("USER=grace LOGNAME=grace HOME=/home/grace", "grace"),
    ("sudo:    heidi : TTY=pts/0 ; PWD=/scratch/heidi ; COMMAND=/usr/bin/nvidia-smi", "heidi"),
    ("disk quota exceeded for user 'ivan' on ~ivan/ckpt", "ivan"),
    ("session opened for user judy(uid=1007) by (uid=0)", "judy"),
    # paths
    ("torch.save failed: /lustre/projects/secret_moe/ckpt/step_100/model.pt: No space left", "secret_moe lustre"),
    ("loading s3://acme-corpus/redpajama/v2/part-0001.parquet failed", "acme-corpus redpajama"),
    ("C:\\Users\\mallory\\runs\\out.log not found", "mallory"),
    ("config experiments/projectx/moe.yaml does not match", "projectx"),
    ("GET https://mlflow.acme-labs.com/api/runs/99?user=oscar failed", "acme-labs oscar"),
    ("path%3A%2Fhome%2Fpeggy%2Fdata", "peggy"),
    ("error at \\n/home/trent/x.py\\nnext", "trent"),
    # addresses
    ("Connection to 192.168.17.4:29500 refused (from 10.0.0.7)", "192.168.17.4 10.0.0.7"),
    ("bind [2001:db8:85a3::8a2e:370:7334]:29500: Address in use", "2001:db8 8a2e 7334"),
    ("fe80::1ff:fe23:4567:890a%eth0 is down; ::ffff:10.9.8.7 too", "1ff:fe23 890a 10.9.8.7"),
    ("link of b8:59:9f:12:ab:cd is down, port guid 0xb8599f030012abcd", "b8:59 abcd 0xb859"),
    # ids
    ("GPU-3f2a9c1d-77aa-4b1e-9d0c-1234567890ab: uncorrectable ECC", "3f2a9c1d 1234567890ab"),
    ("MIG-GPU-3f2a9c1d-77aa-4b1e-9d0c-1234567890ab/1/0 lost", "3f2a9c1d"),
    ("Serial Number: 1654922006789, Board ID: 0x8100ab", "1654922006789"),
    ("container 7f3a9b2c4d5e6f70 of pod=train-x1 exited", "7f3a9b2c4d5e6f70 train-x1"),
    ("run 4f9c2b1a-6d3e-4a5b-8c7d-0e1f2a3b4c5d ended", "4f9c2b1a 0e1f2a3b4c5d"),
    ("Node GUID: 0c42:a103:003e:1122, MAC 0c42.a13e.1122", "0c42 1122"),
    # jobs and secrets
    ("slurmd: launch task StepId=7654321.0 request", "7654321"),
    ("sbatch --account=bluelab --job-name dawn-9b train.sh", "bluelab dawn-9b"),
    ("torchrun --rdzv_endpoint=ibis:29400 --rdzv_id skylark", "ibis skylark"),
    ("pod evicted in namespace moonbase", "moonbase"),
    ("SLURM_JOB_NAME=moonshot-70b SLURM_JOB_ID=812345", "moonshot 812345"),
    ("wandb: WANDB_PROJECT=stealth run_name=quiet-fog-12", "stealth quiet-fog"),
    (f"HF_TOKEN={KEY} is set", KEY),
    ("moonshot-70b: checkpoint of moonshot-70b at step 100", "moonshot"),
    # not to be fooled
    ("al\u200bice.smith was \uff41lice.smith", "alice.smith"),
    ("\x1b[31mcar\x1b[0mol\x1b[0m wrote", "carol"),
)  # fmt: skip


def made(*texts: str, salt: bytes = b"s" * 16) -> list[str]:
    one = Anonymizer(salt)
    for text in texts:
        one.learn(text)
    return [one.text(text) for text in texts]


BY_OTHERS = ("al", "\x1b", "moonshot", "open(")
"""How texts begin whose names are names only by what other texts say."""


@pytest.mark.parametrize(("text", "planted"), [one for one in TEXTS if not one[0].startswith(BY_OTHERS)])
def test_nothing_planted_is_left_of_one_text_by_itself(text: str, planted: str) -> None:
    (found,) = made(text)
    assert not [one for one in planted.split() if one.lower() in found.lower()], found


def test_nothing_planted_is_left_in_all_of_them() -> None:
    """What one text says is a name, is one in all."""
    found = "\n".join(made(*(text for text, _ in TEXTS))).lower()
    left = {one for _, planted in TEXTS for one in planted.lower().split() if one in found}
    assert left == set()


def test_the_same_name_has_the_same_pseudonym_and_another_one_with_another_salt() -> None:
    one, other = made("host=falcon is down", "falcon.acme.com: no answer from falcon")
    (name,) = re.findall(r"host-\w+", one)
    assert re.findall(r"host-\w+", other) == [name, name]
    assert name not in made("host=falcon is down", salt=b"t" * 16)[0]


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid (PCI:0000:c1:00): 79, pid=4711, name=python, GPU has fallen off the bus.",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 79.15 GiB",
        "[rank3]: RuntimeError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, Timeout(ms)=600000)",
        "mlx5_0: port 1 is down; bf16 matmul on cuda:0 at 12:34:56, step 420 loss 2.31, 3.1 it/s, 17/100",
        "ValueError: expected sequence of length 8 at dim 1 (got 7)",
        "NCCL WARN NET/IB : mlx5_2:1 Got async event : port error",
        "misc/socket.cc:450 NCCL WARN socketStartConnect: Connect failed : Address family not supported by protocol",
        "Failed to initialize NVML: Driver/library version mismatch",
        "error: Node was unexpectedly rebooted",
        "KeyError: 'model.layers.0.self_attn.q_proj.weight'",
        "bind to 127.0.0.1:29500 failed: /dev/shm is full, libcudart.so.12 and sm_90 are fine",
    ],
)
def test_what_the_diagnoser_reads_stays(text: str) -> None:
    assert made(text) == [text]


def test_few_rules_of_the_diagnoser_lose_their_line() -> None:
    found = rules.default()
    samples = [(rule.id, source, text) for rule in found.rules for source in rule.sources for text in rule.samples]
    lost = {
        (name, text)
        for (name, source, text), hidden in zip(samples, made(*(text for *_, text in samples)), strict=True)
        if name not in {match.rule for match in found.scan(hidden.encode(), source)}
    }
    assert len(lost) <= 15, lost


@pytest.mark.parametrize("name", ["vm", "gpu1", "h100", "rank7"])
def test_a_name_that_is_sure_may_be_short_or_a_technical_term(name: str) -> None:
    one = Anonymizer(b"s" * 16)
    one.know("host", name, sure=True)
    assert name not in one.text(f"rank 1 on {name} ended; {name}: down").replace("rank 1", "")


def test_hostile_text_takes_no_time() -> None:
    for text in (
        "a-" * 2000,
        "/" * 4000,
        "a.a" * 1500,
        ":" * 4000,
        "0x" * 2000,
        "@a" * 2000,
        "%2F" * 1500,
        "1." * 2000,
    ):
        made(text)
