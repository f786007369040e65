"""One child of the active tests: it tries one device, or its part of a group, and says what it measured.

    python active_tests.py < order.json > results.jsonl

The order says what to do (`ORDERS`); each line of the answer is one result, written as soon as it is there, so that a
child that hangs has said what went before. The parent has the deadline, and kills. Nothing here judges: whether a
figure is good is known only beside those of other nodes (`recovery.active_verdicts`).

With the order `serve` it imports torch, which takes seconds, and forks a child for each order that comes on its
standard input, a socket.

torch and the standard library only, Python 3.9. docs/active-tests.md says what each test finds.
"""

from __future__ import annotations

import ctypes
import datetime
import hashlib
import json
import os
import platform
import signal
import socket
import sys
import time
from typing import Any, Callable  # noqa: UP035 (Python 3.9)

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != HERE]  # no file here may hide a module

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it no product on a GPU is the same twice

MIB = 1 << 20
PR_SET_PDEATHSIG = 1
SEED = 20_261_123
PATTERNS = (0x00, 0xFF, 0x55, 0xAA)
REPETITIONS = 7
FEWEST = 3
BUDGET_SHARE = 0.7
"""Of the time that the parent gives. After that no further test is begun: a busy device is slow, and does not hang."""
STARTED = time.monotonic()
TRAINING_RUNS = 3
"""As many times the same steps are made: what differs between them is a fault, whatever other nodes have."""

# Each size: on a GPU, on a CPU. A CPU is there for the logic, and for clusters without GPUs.
MATMUL_SHAPES = {"cuda": ((8192, 8192, 8192), (4096, 16384, 4096)), "cpu": ((1024, 1024, 1024), (512, 2048, 512))}
COPY_BYTES = {"quick": {"cuda": 1024 * MIB, "cpu": 32 * MIB}, "full": {"cuda": 4096 * MIB, "cpu": 128 * MIB}}
HOST_COPY_BYTES = {"cuda": 256 * MIB, "cpu": 0}
GROUP_BYTES = {"cuda": (1 * MIB, 256 * MIB), "cpu": (64 * 1024, 1 * MIB)}
MEMORY_SHARE = {"quick": 0.2, "full": 0.8}
"""Of the free memory of a GPU that is filled with patterns."""
CPU_PATTERN_BYTES = {"quick": 64 * MIB, "full": 512 * MIB}


class Teller:
    """Writes the answer. Whatever else prints (torch, NCCL) goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def tell(self, **words: Any) -> None:
        self._out.write(json.dumps(words) + "\n")

    def rates(self, test: str, unit: str, values: list[float], **more: Any) -> None:
        self.tell(test=test, unit=unit, values=[round(value, 9) for value in values], ok=True, **more)

    def unfinished(self, test: str) -> None:
        self.tell(test=test, ok=True, unfinished="no time was left for it")

    def fault(self, test: str, why: str, **more: Any) -> None:
        """Wrong data: a fault of the device, without any comparison."""
        self.tell(test=test, ok=False, why=why, **more)


def is_late(order: dict[str, Any]) -> bool:
    return time.monotonic() - STARTED > BUDGET_SHARE * float(order.get("deadline_s", 1e9))


class Device:
    """A GPU or the CPU, with what differs between them."""

    def __init__(self, name: str, threads: int) -> None:
        import torch

        self.torch = torch
        self.is_gpu = name.startswith("cuda")
        self.type = "cuda" if self.is_gpu else "cpu"
        self.device = torch.device(name)
        torch.set_num_threads(max(1, threads))
        if self.is_gpu:
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = False

    def sync(self) -> None:
        if self.is_gpu:
            self.torch.cuda.synchronize(self.device)

    def kind(self) -> str:
        """Only figures and digests of one kind are compared."""
        torch = self.torch
        name = torch.cuda.get_device_name(self.device) if self.is_gpu else _cpu_name()
        runtime = (
            f"CUDA {torch.version.cuda or torch.version.hip}{_driver()}" if self.is_gpu else f"{platform.machine()} CPU"
        )
        return f"{name}, torch {torch.__version__}, {runtime}"

    def uuid(self) -> str:
        if not self.is_gpu:
            return ""
        found = str(getattr(self.torch.cuda.get_device_properties(self.device), "uuid", ""))
        return found if not found or found.startswith("GPU-") else f"GPU-{found}"

    def free_bytes(self) -> int:
        return int(self.torch.cuda.mem_get_info(self.device)[0]) if self.is_gpu else 1 << 40

    def timed(self, work: Callable[[], Any], share_s: float) -> list[float]:
        """Seconds of one call of `work`, several times, in about `share_s` altogether."""
        work()
        self.sync()
        start = time.perf_counter()
        work()
        self.sync()
        once = max(time.perf_counter() - start, 1e-6)
        calls = max(1, min(1000, int(share_s / REPETITIONS / once)))
        end = time.perf_counter() + 3 * share_s
        seconds: list[float] = []
        while len(seconds) < FEWEST or (len(seconds) < REPETITIONS and time.perf_counter() < end):
            seconds.append(self._timed_once(work, calls))
        return seconds

    def _timed_once(self, work: Callable[[], Any], calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            work()
        self.sync()
        return (time.perf_counter() - start) / calls


def _driver() -> str:
    """A new one may be slower, and that is no fault of a node."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii", errors="replace") as file:
            return f", driver {file.read(40).strip()}"
    except OSError:
        return ""


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "CPU")[:80]
    except OSError:
        return "CPU"


# ----- one node, without the others -----


def node(order: dict[str, Any], teller: Teller) -> None:
    """Every test of one device."""
    suite = str(order.get("suite", "quick"))
    device = Device(str(order["device"]), int(order.get("threads", 1)))
    wanted = set(order.get("tests") or ())
    share_s = float(order.get("share_s", 0.5))
    teller.tell(kind=device.kind(), uuid=device.uuid())
    for name, test in NODE_TESTS.items():
        if is_late(order):
            teller.unfinished(name)
        elif not wanted or name in wanted:
            test(device, teller, suite, share_s)
            if device.is_gpu:
                device.torch.cuda.empty_cache()
    if order.get("products") and (not wanted or "replay" in wanted):
        replay(order, device, teller)


def matmul(device: Device, teller: Teller, _suite: str, share_s: float) -> None:
    torch = device.torch
    for dtype in (torch.float32, torch.bfloat16):
        for m, k, n in MATMUL_SHAPES[device.type]:
            rates = product_rate(device, dtype, m, k, n, share_s)
            teller.rates(f"matmul_{_short(dtype)}_{m}x{k}x{n}", "TFLOP/s", rates)


def product_rate(device: Device, dtype: Any, m: int, k: int, n: int, share_s: float, batch: int = 1) -> list[float]:
    """TFLOP/s."""
    flops = 2.0 * batch * m * k * n
    return [flops / once / 1e12 for once in product_seconds(device, dtype, m, k, n, share_s, batch)]


def product_seconds(device: Device, dtype: Any, m: int, k: int, n: int, share_s: float, batch: int = 1) -> list[float]:
    torch = device.torch
    left = torch.randn(batch, m, k, device=device.device, dtype=torch.float32).to(dtype)
    right = torch.randn(batch, k, n, device=device.device, dtype=torch.float32).to(dtype)
    out = torch.empty(batch, m, n, device=device.device, dtype=dtype)
    if batch > 1:
        return device.timed(lambda: torch.bmm(left, right, out=out), share_s)
    left, right, out = left[0], right[0], out[0]
    return device.timed(lambda: torch.mm(left, right, out=out), share_s)


def _short(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2].replace("float", "fp").replace("bfp", "bf")


def memory_copy(device: Device, teller: Teller, suite: str, share_s: float) -> None:
    torch, size = device.torch, min(COPY_BYTES[suite][device.type], device.free_bytes() // 4)
    source = torch.empty(size, dtype=torch.uint8, device=device.device).fill_(0x5A)
    target = torch.empty_like(source)
    seconds = device.timed(lambda: target.copy_(source), share_s)
    teller.rates("memory_copy", "GB/s", [2.0 * size / once / 1e9 for once in seconds])


def memory_patterns(device: Device, teller: Teller, suite: str, _share_s: float) -> None:
    """Fill memory, block by block, and look whether every byte still is what was written."""
    torch = device.torch
    size = int(device.free_bytes() * MEMORY_SHARE[suite]) if device.is_gpu else CPU_PATTERN_BYTES[suite]
    block = min(256 * MIB, size)
    start, wrong = time.perf_counter(), 0
    blocks = [torch.empty(block // 8, dtype=torch.int64, device=device.device) for _ in range(max(1, size // block))]
    places = torch.arange(block // 8, dtype=torch.int64, device=device.device)
    for number, pattern in enumerate(PATTERNS):
        word = int.from_bytes(bytes([pattern]) * 8, "little", signed=True)
        for held in blocks:
            held.copy_(places).bitwise_xor_(word)  # each place has another value: a wrong address shows, too
        for held in blocks:
            wrong += int((held ^ places != word).sum().item())
        if wrong:
            teller.fault("memory_patterns", f"{wrong} words of 8 bytes changed after pattern {number}")
            return
    device.sync()
    teller.tell(test="memory_patterns", ok=True, seconds=round(time.perf_counter() - start, 3), checked=size)


def host_copies(device: Device, teller: Teller, _suite: str, share_s: float) -> None:
    """Between host and device, both ways, through pinned memory."""
    size = HOST_COPY_BYTES[device.type]
    if not size:
        return
    torch = device.torch
    host = torch.arange(size // 8, dtype=torch.int64).pin_memory()
    back = torch.empty_like(host).pin_memory()
    there = torch.empty(size // 8, dtype=torch.int64, device=device.device)
    seconds = device.timed(lambda: there.copy_(host, non_blocking=True), share_s)
    teller.rates("copy_host_to_device", "GB/s", [size / once / 1e9 for once in seconds])
    seconds = device.timed(lambda: back.copy_(there, non_blocking=True), share_s)
    teller.rates("copy_device_to_host", "GB/s", [size / once / 1e9 for once in seconds])
    if not torch.equal(host, back):
        teller.fault("copy_device_to_host", "what came back from the device is not what was sent")


def training_bits(device: Device, teller: Teller, suite: str, _share_s: float) -> None:
    """The same seeded steps several times: every loss, activation and gradient must have the same bits.

    Gradients have their own place in the digest: after AdamW a flipped lowest bit of one is often gone.
    """
    layers, width, steps = (2, 128, 3) if suite == "quick" else (4, 256, 6)
    start = time.perf_counter()
    found = [training_digests(device, layers, width, steps) for _ in range(TRAINING_RUNS)]
    told = {"seconds": round(time.perf_counter() - start, 3), "digest": _joined(found[0]), "parts": found[0]}
    odd = sorted({part for run in found[1:] for part in run if run[part] != found[0][part]})
    if odd:
        teller.fault("training_bits", f"{', '.join(odd)} differ between runs of the same steps", **told)
    else:
        teller.tell(test="training_bits", ok=True, **told)


def _joined(parts: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def training_digests(device: Device, layers: int, width: int, steps: int) -> dict[str, str]:
    """Digests of some steps of a small GPT."""
    torch = device.torch
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        return _training_digests(device, layers, width, steps)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)


def _training_digests(device: Device, layers: int, width: int, steps: int) -> dict[str, str]:
    torch = device.torch
    sums = {part: hashlib.sha256() for part in ("losses", "activations", "gradients", "weights")}

    def add(part: str, tensor: Any) -> None:
        sums[part].update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())

    random = torch.Generator().manual_seed(SEED)  # the CPU's, so that every device starts with the same bits
    weights = _weights(torch, layers, width, random, device)
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3, foreach=False)
    for _ in range(steps):
        tokens = torch.randint(0, 256, (4, 65), generator=random).to(device.device)
        optimizer.zero_grad(set_to_none=True)
        hidden, seen = _forward(torch, weights, layers, width, tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(hidden.reshape(-1, 256), tokens[:, 1:].reshape(-1))
        loss.backward()
        add("losses", loss)
        for one in seen:
            add("activations", one)
        for weight in weights.values():
            add("gradients", weight.grad)
        optimizer.step()
    for weight in weights.values():
        add("weights", weight)
    return {part: digest.hexdigest()[:32] for part, digest in sums.items()}


def _weights(torch: Any, layers: int, width: int, random: Any, device: Device) -> dict[str, Any]:
    shapes = {"tokens": (256, width), "head": (256, width)}
    for layer in range(layers):
        shapes[f"{layer}.qkv"], shapes[f"{layer}.out"] = (3 * width, width), (width, width)
        shapes[f"{layer}.up"], shapes[f"{layer}.down"] = (4 * width, width), (width, 4 * width)
    return {
        name: (torch.randn(*shape, generator=random) * 0.05).to(device.device).requires_grad_(True)
        for name, shape in shapes.items()
    }


def _forward(torch: Any, weights: dict[str, Any], layers: int, width: int, tokens: Any) -> tuple[Any, list[Any]]:
    """A GPT of plain products and a softmax: what is deterministic on every device."""
    heads, (rows, length) = 4, tokens.shape
    one_hot = torch.nn.functional.one_hot(tokens, 256).to(torch.float32)
    hidden, seen = one_hot @ weights["tokens"], []
    mask = torch.full((length, length), float("-inf"), device=tokens.device).triu(1)
    for layer in range(layers):
        normal = torch.nn.functional.layer_norm(hidden, (width,))
        parts = (normal @ weights[f"{layer}.qkv"].T).view(rows, length, 3, heads, width // heads)
        query, key, value = (parts[:, :, number].transpose(1, 2) for number in range(3))
        scores = (query @ key.transpose(2, 3)) / (width // heads) ** 0.5 + mask
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(rows, length, width)
        hidden = hidden + mixed @ weights[f"{layer}.out"].T
        normal = torch.nn.functional.layer_norm(hidden, (width,))
        hidden = hidden + torch.relu(normal @ weights[f"{layer}.up"].T) @ weights[f"{layer}.down"].T
        seen.append(hidden)
    return hidden @ weights["head"].T, seen


NODE_TESTS: dict[str, Callable[[Device, Teller, str, float], None]] = {
    "matmul": matmul,
    "memory_copy": memory_copy,
    "memory_patterns": memory_patterns,
    "host_copies": host_copies,
    "training_bits": training_bits,
}


def peers(order: dict[str, Any], teller: Teller) -> None:
    """Copies between the GPUs of this node, each with the next; what arrives is compared."""
    import torch

    count = torch.cuda.device_count()
    teller.tell(kind=Device("cuda:0", 1).kind(), uuid="")
    size = min(256 * MIB, *(torch.cuda.mem_get_info(number)[0] // 4 for number in range(count)))
    for number in range(count if count > 1 else 0):
        other = (number + 1) % count
        device = Device(f"cuda:{number}", 1)
        source = torch.arange(size // 8, dtype=torch.int64, device=f"cuda:{number}")
        target = torch.empty_like(source, device=f"cuda:{other}")

        def copy(source: Any = source, target: Any = target, other: int = other) -> None:
            target.copy_(source)
            torch.cuda.synchronize(other)

        name = f"peer_copy_{number}_{other}"
        seconds = device.timed(copy, float(order.get("share_s", 0.3)))
        teller.rates(name, "GB/s", [size / once / 1e9 for once in seconds], uuid=device.uuid())
        if not torch.equal(source.cpu(), target.cpu()):
            teller.fault(name, f"what GPU {other} has is not what GPU {number} sent", uuid=device.uuid())


# ----- a group: a pair, a triple, or everybody -----


def group(order: dict[str, Any], teller: Teller) -> None:
    """This rank's part: products of its own, then collectives and messages, small and large."""
    device = Device(str(order["device"]), int(order.get("threads", 1)))
    share_s = float(order.get("share_s", 0.3))
    teller.tell(kind=device.kind(), uuid=device.uuid())
    shape = MATMUL_SHAPES[device.type][0]
    dtype = device.torch.bfloat16 if device.is_gpu else device.torch.float32
    teller.rates("group_matmul", "s", product_seconds(device, dtype, *shape, share_s))
    ours = _Group(order, device, teller)
    teller.tell(joined=True)
    for name, size in zip(("small", "large"), GROUP_BYTES[device.type]):  # noqa: B905 (Python 3.9)
        for test, work in group_tests(order, device, ours.distributed, size).items():
            if ours.agreed(int(is_late(order))):
                teller.unfinished(f"{test}_{name}")
                continue
            run_group_test(f"{test}_{name}", work, size, share_s, device, ours)
    for entry in order.get("collectives") or ():
        size = max(4, int(entry["bytes"]))
        tests = {**group_tests(order, device, ours.distributed, size), **of_jobs(order, device, ours.distributed, size)}
        found = tests.get(str(entry["name"]))
        if found is not None and 8 * size < device.free_bytes():
            run_group_test(f"replay_{entry['name']}_{size}", found, size, share_s, device, ours)
    ours.agreed(0)


class _Group:
    """The process group of an order. It is never left in order: a broken one would be waited for."""

    def __init__(self, order: dict[str, Any], device: Device, teller: Teller) -> None:
        import torch.distributed as distributed

        patience, join = (datetime.timedelta(seconds=float(order[key])) for key in ("timeout_s", "join_s"))
        rank, world = int(order["rank"]), int(order["world"])
        given = {"master_listen_fd": int(order["listen"])} if rank == 0 and "listen" in order else {}
        store = distributed.TCPStore(str(order["host"]), int(order["port"]), world, rank == 0, join, **given)
        backend = "nccl" if device.is_gpu else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
        self.distributed, self.teller = distributed, teller
        self._device = device
        self.agreed(0)

    def agreed(self, number: int) -> int:
        """The largest number that a rank has named; all have come here when it is known."""
        tensor = self._device.torch.tensor([number], dtype=self._device.torch.int64, device=self._device.device)
        self.distributed.all_reduce(tensor, op=self.distributed.ReduceOp.MAX)
        return int(tensor.item())


class GroupTest:
    """One exchange. `work` alone is timed; every rank makes the same calls."""

    def __init__(self, prepare: Callable[[], Any], work: Callable[[], Any], is_whole: Callable[[], bool]) -> None:
        self.prepare = prepare
        self.work = work
        self.is_whole = is_whole
        """Whether what arrived is what was sent."""


def group_tests(order: dict[str, Any], device: Device, distributed: Any, size: int) -> dict[str, GroupTest]:
    torch, rank, world = device.torch, int(order["rank"]), int(order["world"])
    mine = torch.full((max(1, size // 4),), float(rank + 1), device=device.device)
    whole = torch.empty_like(mine)
    part = torch.full((max(1, size // 4 // world),), float(rank + 1), device=device.device)
    parts = [torch.empty_like(part) for _ in range(world)]
    theirs = torch.empty_like(mine)
    before, behind = (rank - 1) % world, (rank + 1) % world

    def exchange() -> None:
        asked = [
            distributed.P2POp(distributed.isend, mine, behind),
            distributed.P2POp(distributed.irecv, theirs, before),
        ]
        for work in distributed.batch_isend_irecv(asked):
            work.wait()

    def is_all(tensor: Any, value: float) -> bool:
        return bool((tensor == value).all().item())

    return {
        "all_reduce": GroupTest(
            lambda: whole.copy_(mine),
            lambda: distributed.all_reduce(whole),
            lambda: is_all(whole, world * (world + 1) / 2),
        ),
        "all_gather": GroupTest(
            lambda: [one.zero_() for one in parts],
            lambda: distributed.all_gather(parts, part),
            lambda: all(is_all(one, number + 1) for number, one in enumerate(parts)),
        ),
        "send_receive": GroupTest(theirs.zero_, exchange, lambda: is_all(theirs, before + 1)),
    }


def of_jobs(order: dict[str, Any], device: Device, distributed: Any, size: int) -> dict[str, GroupTest]:
    """What jobs do besides, and is only repeated. gloo makes an all-reduce of a reduce-scatter, here as there."""
    torch, rank, world = device.torch, int(order["rank"]), int(order["world"])
    mine = torch.full((max(1, size // 4 // world) * world,), float(rank + 1), device=device.device)
    part = torch.empty(mine.numel() // world, device=device.device)
    # torch 2.13 has another name for it, and warns of the old one.
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    expected = world * (world + 1) / 2
    return {
        "reduce_scatter": GroupTest(
            part.zero_, lambda: scatter(part, mine), lambda: bool((part == expected).all().item())
        )
    }


def run_group_test(name: str, test: GroupTest, size: int, share_s: float, device: Device, ours: _Group) -> None:
    whole, once = _one_call(test, device)
    calls = ours.agreed(max(0, min(REPETITIONS, int(share_s / max(once, 1e-6)))))
    seconds = [] if calls > 1 else [once]
    for _ in range(calls):
        good, once = _one_call(test, device)
        whole = whole and good
        seconds.append(once)
    if whole:
        ours.teller.rates(name, "s", seconds, size=size)
    else:
        ours.teller.fault(name, "what arrived is not what was sent")


def _one_call(test: GroupTest, device: Device) -> tuple[bool, float]:
    test.prepare()
    device.sync()
    start = time.perf_counter()
    test.work()
    device.sync()
    seconds = time.perf_counter() - start
    return test.is_whole(), seconds


# ----- the job's own work -----


def replay(order: dict[str, Any], device: Device, teller: Teller) -> None:
    """The job's own matrix products, with the shapes of a captured step."""
    torch = device.torch
    for entry in order["products"]:
        batch, m, k, n = (int(size) for size in entry["shape"])
        dtype = getattr(torch, str(entry["dtype"]))
        name = f"replay_matmul_{_short(dtype)}_{'x'.join(map(str, (batch, m, k, n)[int(batch == 1) :]))}"
        if is_late(order) or (m * k + k * n + m * n) * batch * 8 > device.free_bytes() // 2:
            teller.unfinished(name)
        else:
            rates = product_rate(device, dtype, m, k, n, float(order.get("share_s", 0.2)), batch)
            teller.rates(name, "TFLOP/s", rates)


def look(_: dict[str, Any], teller: Teller) -> None:
    """Which devices there are."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [f"cuda:{number}" for number in range(count)] or ["cpu"]
    device = Device(devices[0], 1)
    teller.tell(devices=devices, kind=device.kind(), torch=torch.__version__)


ORDERS: dict[str, Callable[[dict[str, Any], Teller], None]] = {
    "look": look,
    "node": node,
    "peers": peers,
    "group": group,
}


def serve() -> dict[str, Any]:
    """Import torch, and fork at the parent's orders until it hangs up. Returns in the children only: their order."""
    channel = socket.socket(fileno=os.dup(0))
    why = why_not_forked()
    channel.send(json.dumps({"ready": not why, "why": why}).encode())
    null, own = os.open(os.devnull, os.O_RDWR), os.getpid()
    os.dup2(null, 0)
    while not why:
        data, given, _, _ = socket.recv_fds(channel, MIB, 4)
        if not data:
            break
        message = json.loads(data)
        if "ended" in message:
            _, status = os.waitpid(int(message["ended"]), 0)
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            channel.send(json.dumps({"code": code}).encode())
            continue
        pid = os.fork()
        if not pid:
            channel.close()
            return forked(message, given, own)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(channel, [json.dumps({"pid": pid}).encode()], [pidfd])
        for descriptor in (pidfd, *given):
            os.close(descriptor)
    os._exit(0)


def why_not_forked() -> str:
    """Import torch; why no child may be forked after it, or nothing."""
    try:
        import torch
        import torch.distributed
    except BaseException as error:
        return f"torch cannot be imported: {type(error).__name__}: {error}"[:300]
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"the import of torch leaves {threads} threads"
    with open("/proc/self/maps") as file:
        is_open = "/dev/nvidia" in file.read()
    return "the import of torch has opened the GPUs" if is_open or torch.cuda.is_initialized() else ""


def forked(message: dict[str, Any], given: list[int], parent: int) -> dict[str, Any]:
    """Be a process as if it had been started for this order."""
    global STARTED
    STARTED = time.monotonic()
    os.setsid()
    for number, descriptor in zip((1, 2), given):  # noqa: B905 (Python 3.9)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update(message["environment"])
    order: dict[str, Any] = {**message["order"], "parent": parent}
    if len(given) > 2:
        order["listen"] = given[2]
    return order


def die_with(parent: int) -> None:
    """Should the parent be killed, the kernel ends this process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)


def main() -> int:
    order = json.loads(sys.stdin.readline())
    die_with(int(order.get("parent", 0)))
    if order["do"] == "serve":
        order = serve()
        die_with(int(order["parent"]))
    teller = Teller()
    try:
        ORDERS[order["do"]](order, teller)
    except BaseException as error:
        teller.tell(error=f"{type(error).__name__}: {error}"[:500])
        return 1
    teller.tell(end=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a group that is broken is not waited for, and what was told is written
