"""What exceptions mean, by their words, their place and their type; the samples of each row of exceptions.toml."""

from __future__ import annotations

import re

import pytest

from diagnosis import exceptions
from diagnosis.signals import Frame
from diagnosis.tables import load
from diagnosis.taxonomy import TAXONOMY, FailureClass
from diagnosis.tracebacks import CUT_OFF, Traceback
from tests.tables import table

CASES = table(__file__)

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
RESTORE = Frame(function="load_checkpoint", file="/home/u/train.py", line=3)
PIPE = Frame(function="_recv", file="/usr/lib/python3.11/multiprocessing/connection.py", line=383)


def raised(line, *frames, **more):
    name, _, message = line.partition(": ")
    return Traceback(exception=name, message=message, frames=(TRAIN, *frames), **more)


@pytest.mark.parametrize(("line", "frames", "expected"), CASES["classes"])
def test_classes(line, frames, expected):
    found = exceptions.read(raised(line, *(globals()[frame] for frame in frames)))
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


TABLE = load("diagnosis", "exceptions.toml")
PATTERNS = [*TABLE["words"].items(), *TABLE["file"].items(), *((row["class"], row) for row in TABLE["about"])]


def class_of(line: str) -> FailureClass:
    name, _, message = line.partition(": ")
    return exceptions.read(Traceback(exception=name, message=message)).failure_class


@pytest.mark.parametrize("row", [*TABLE["type"], *TABLE["module"]], ids=lambda row: row["names"][0])
def test_types_and_modules(row: dict) -> None:
    assert FailureClass(row["class"]) in TAXONOMY
    assert row["samples"]
    for sample in row["samples"]:
        assert any(name in sample for name in row["names"])
        assert class_of(sample) is FailureClass(row["class"])
    for other in row.get("others", ()):
        assert class_of(other) is not FailureClass(row["class"])


@pytest.mark.parametrize("table", TABLE["decision"], ids=lambda table: table["names"][0])
def test_decisions_end_and_ask_for_what_is_known(table: dict) -> None:
    *_, (_, _, *last) = table["rows"]
    asked = {condition.removeprefix("not ") for _, _, *conditions in table["rows"] for condition in conditions}
    assert last == []
    assert asked <= TABLE["words"].keys() | exceptions._CODE.keys()
    assert TABLE["words"].keys().isdisjoint(exceptions._CODE)


@pytest.mark.parametrize("row", [row for _, row in PATTERNS], ids=[name for name, _ in PATTERNS])
def test_patterns(row: dict) -> None:
    pattern = re.compile(row["regex"])
    assert row["samples"]
    assert row["others"]
    assert all(pattern.search(sample) for sample in row["samples"])
    assert not any(pattern.search(other) for other in row["others"])


@pytest.mark.parametrize("row", TABLE["place"].values(), ids=list(TABLE["place"]))
def test_places(row: dict) -> None:
    for kind in ("file", "function", "code"):
        pattern = re.compile(row[kind])
        assert row[f"{kind}s"]
        assert all(pattern.search(sample) for sample in row[f"{kind}s"])
        assert not any(pattern.search(other) for other in row["others"])
