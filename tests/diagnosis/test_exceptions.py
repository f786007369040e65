"""What exceptions mean, by their words, their place and their type."""

from __future__ import annotations

import pytest

from diagnosis import exceptions
from diagnosis.signals import Frame
from diagnosis.taxonomy import FailureClass
from diagnosis.tracebacks import CUT_OFF, Traceback

TRAIN = Frame(function="main", file="/home/u/train.py", line=9)
STEP = Frame(function="train_step", file="/home/u/train.py", line=41)
LOADER = Frame(function="__next__", file="/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line=630)
BOOKS = Frame(function="__getitem__", file="/home/u/books_dataset.py", line=4)
JSON = Frame(function="raw_decode", file="/usr/lib/python3.11/json/decoder.py", line=355)
TORCH = Frame(function="_call_impl", file="/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line=1750)
TRITON = Frame(function="make_ptx", file="/env/lib/python3.11/site-packages/triton/compiler/compiler.py", line=70)
SAVE = Frame(function="load", file="/env/lib/python3.11/site-packages/torch/serialization.py", line=1100)
ARGUMENTS = Frame(function="validate_args", file="/opt/megatron/training/arguments.py", line=300)
ENVIRON = Frame(function="__getitem__", file="/usr/lib/python3.11/os.py", line=679)
HEAP = Frame(function="__init__", file="/usr/lib/python3.11/multiprocessing/heap.py", line=76)
PIPE = Frame(function="_recv", file="/usr/lib/python3.11/multiprocessing/connection.py", line=383)


def raised(line, *frames, **more):
    name, _, message = line.partition(": ")
    return Traceback(exception=name, message=message, frames=(TRAIN, *frames), **more)


@pytest.mark.parametrize(
    ("line", "frames", "expected"),
    [
        ("NameError: name 'oss' is not defined", [STEP], "script_error"),
        ("AttributeError: 'list' object has no attribute 'split'", [STEP], "script_error"),
        ("AttributeError: module 'numpy' has no attribute 'float'", [STEP], "dependency_import_error"),
        ("RuntimeError: Expected all tensors to be on the same device, cuda:1 and cpu!", [STEP, TORCH], "script_error"),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x9 and 7x8)", [STEP, TORCH], "script_error"),
        ("RuntimeError: flash attention is not installed, pip install flash-attn", [STEP], "dependency_import_error"),
        ("RuntimeError: CUDA out of memory. Tried to allocate 2 GiB", [STEP, TORCH], "gpu_oom"),
        ("RuntimeError: Internal PTX codegen error", [TRITON], "framework_bug"),
        ("RuntimeError: unable to write to file </torch_9_8_7>: No space left on device (28)", [], "shm_exhausted"),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", [STEP], "dns_or_connect"),
        ("RuntimeError: DataLoader worker (pid 9) is killed by signal: Terminated.", [LOADER], "worker_crash"),
        ("ValueError: not enough values to unpack (expected 2, got 1)", [STEP], "script_error"),
        ("ValueError: lr must be positive", [STEP], "config_or_argument_error"),
        ("AssertionError: ", [ARGUMENTS], "config_or_argument_error"),
        ("AssertionError: sequence of 9 is longer than the block size", [STEP], "config_or_argument_error"),
        ("KeyError: 'LOCAL_RANK'", [ENVIRON], "config_or_argument_error"),
        ("KeyError: 'text'", [LOADER, BOOKS], "data_loading_error"),
        ("KeyError: 'text'", [STEP], "script_error"),
        ("KeyError: 'optimizer'", [Frame(function="load_checkpoint", file="/home/u/train.py", line=3)], "checkpoint"),
        ("IndexError: list index out of range", [LOADER, BOOKS], "data_loading_error"),
        ("json.decoder.JSONDecodeError: Extra data: line 2", [LOADER, BOOKS, JSON], "data_loading_error"),
        ("json.decoder.JSONDecodeError: Extra data: line 2", [JSON], "config_or_argument_error"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data/train.bin.idx'", [BOOKS], "data_loading_error"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/ckpt/step_10/model.pt'", [SAVE], "checkpoint"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'conf/a.yaml'", [STEP], "config_or_argument_error"),
        ("EOFError: Ran out of input", [SAVE], "checkpoint"),
        ("_pickle.UnpicklingError: invalid load key, 'v'.", [LOADER, BOOKS], "data_loading_error"),
        ("OSError: [Errno 28] No space left on device", [HEAP], "shm_exhausted"),
        ("OSError: [Errno 28] No space left on device: '/tmp/pymp-7/x'", [HEAP], "disk_full"),
        ("OSError: [Errno 28] No space left on device: '/ckpt/a'", [SAVE], "disk_full"),
        ("OSError: [Errno 116] Stale file handle", [LOADER, BOOKS], "storage_error"),
        ("PermissionError: [Errno 13] Permission denied: '/ckpt'", [SAVE], "permission_or_auth"),
        ("requests.exceptions.ReadTimeout: timed out", [STEP], "dns_or_connect"),
        ("hydra.errors.ConfigCompositionException: Could not override 'x'", [STEP], "config_or_argument_error"),
        ("pydantic_core._pydantic_core.ValidationError: 1 validation error", [STEP], "config_or_argument_error"),
        ("triton.runtime.errors.OutOfResources: out of resource", [STEP], "framework_bug"),
        ("FloatingPointError: Loss became infinite or NaN at iteration=7!", [STEP], "loss_spike_or_nan"),
        ("KeyboardInterrupt", [STEP], "preempted_or_cancelled"),
        ("Fatal Python error: Segmentation fault", [TORCH], "framework_bug"),
        ("Fatal Python error: Segmentation fault", [STEP], "worker_crash"),
    ],
)
def test_classes(line, frames, expected):
    found = exceptions.read(raised(line, *frames))
    assert found.failure_class.value.startswith(expected)
    assert not found.is_cascade
    assert 0.2 < found.confidence < 1


@pytest.mark.parametrize(
    ("line", "frames"),
    [
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:3, something new", [STEP]),
        ("BrokenPipeError: [Errno 32] Broken pipe", [PIPE]),
        ("RuntimeError: cannot schedule new futures after interpreter shutdown", [STEP]),
        ("RuntimeError: [/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:43211", [STEP]),
    ],
)
def test_what_only_says_that_somebody_else_is_gone(line, frames):
    assert exceptions.read(raised(line, *frames)).is_cascade


def test_what_wraps_an_exception_hides_it_not():
    wrapped = raised("RuntimeError: step failed", causes=("OSError: [Errno 5] Input/output error",))
    assert exceptions.read(wrapped).failure_class is FailureClass.STORAGE_ERROR
    failed_by_hand = raised("KeyboardInterrupt", causes=("TypeError: unhashable type",))
    assert exceptions.read(failed_by_hand).failure_class is FailureClass.SCRIPT_ERROR
    stopped = raised("TypeError: 'NoneType' object is not callable", causes=("KeyboardInterrupt",))
    assert exceptions.read(stopped).failure_class is FailureClass.PREEMPTED_OR_CANCELLED


def test_an_end_that_is_missing_says_little():
    found = exceptions.read(Traceback(exception=CUT_OFF, frames=(TRAIN,)))
    assert found.confidence <= 0.3


@pytest.mark.parametrize(
    ("line", "code", "expected"),
    [
        ("KeyError: 'net'", "model.load_state_dict(checkpoint['net'])", FailureClass.CHECKPOINT_CORRUPT_OR_MISMATCH),
        ("KeyError: 'optimizer'", "", FailureClass.CHECKPOINT_CORRUPT_OR_MISMATCH),
        ("KeyError: 'lr'", "lr = cfg['lr']", FailureClass.CONFIG_OR_ARGUMENT_ERROR),
        ("ValueError: empty vocabulary", "for batch in train_loader:", FailureClass.DATA_LOADING_ERROR),
    ],
)
def test_the_line_of_code_tells_what_it_was_for(line, code, expected):
    assert exceptions.read(raised(line, STEP, code=code)).failure_class is expected


def test_a_model_called_in_a_loop_over_data_is_not_the_data():
    loop = Frame(function="inference_on_dataset", file="/home/u/engine.py", line=3)
    found = exceptions.read(raised("RuntimeError: unexpected layout", loop, TORCH, STEP))
    assert found.failure_class is FailureClass.SCRIPT_ERROR
