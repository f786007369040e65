"""What complaints are about whose wording no rule knows; the samples of each row of complaints.toml."""

from __future__ import annotations

import re

import pytest

from diagnosis import complaints, exceptions
from diagnosis.incident import LogEvidence, LogSummary, of_logs
from diagnosis.tables import load
from diagnosis.taxonomy import FailureClass
from diagnosis.tracebacks import Traceback
from diagnosis.verdict import triage

TABLE = load("diagnosis", "complaints.toml")


@pytest.mark.parametrize("row", TABLE["name"], ids=lambda row: row["class"])
def test_names(row):
    for line in row["samples"]:
        assert complaints.named(line) is FailureClass(row["class"]), line
    for line in row["others"]:
        assert complaints.named(line) is not FailureClass(row["class"]), line


def test_each_cell_names_a_subject_and_a_trouble():
    troubles = {*TABLE["trouble"], "any"}
    assert {*TABLE["cell"]} == {*TABLE["subject"], "nothing"}
    assert all(troubles.issuperset(row) for row in TABLE["cell"].values())
    for regex in [*TABLE["trouble"].values(), *TABLE["subject"].values()]:
        assert not re.search(regex, "step 12 of 90", re.IGNORECASE), regex


@pytest.mark.parametrize(
    ("line", "failure_class"),
    [
        ("the shard index of split B is truncated", "data_loading_error"),
        ("the saved optimizer state does not match", "checkpoint_corrupt_or_mismatch"),
        ("allreduce 88 timed out", "nccl_timeout"),
        ("lustre client lost its server", "storage_error"),
        ("bucket write refused: quota", "disk_full"),
        ("a GPU is unresponsive", "gpu_hang"),
        ("out of memory on device ordinal 3", "gpu_oom"),
        ("out of memory in the parser", "host_oom"),
        ("libfoo.so has an undefined symbol, version mismatch", "dependency_import_error"),
        ("license denied", "permission_or_auth"),
    ],
)
def test_what_is_wrong_with_what(line, failure_class):
    assert complaints.readings(line)[0].failure_class.value == failure_class


def test_what_does_not_complain_is_about_nothing():
    assert complaints.readings("loading the shard index of split B") == []
    assert complaints.readings("NCCL version 2.27, timeout 600 s, 8 GPUs, bucket gs://b") == []


def concluded(*tail, **more):
    log = LogSummary(source="a.log", lines=len(tail), tail=tail, **more)
    return triage.conclude(of_logs(LogEvidence(logs=(log,)))).failure_class.value


def test_a_complaint_counts_after_the_last_progress_only():
    assert concluded("step 7", "ERROR: weka: client timed out", progress_line=1) == "storage_error"
    assert concluded("ERROR: weka: client timed out", "step 7", progress_line=2) == "none"


def test_a_complaint_that_was_dealt_with_is_none():
    assert exceptions.last_words(["weka client timed out, retrying"]) is None
    assert exceptions.last_words(["ERROR: weka client timed out, gave up after 5 tries"]) is not None
    assert exceptions.last_words(["if CUDA_ERROR_NO_DEVICE is seen, load the driver"]) is None


def test_a_name_tells_why_a_process_ended_that_nothing_else_explains():
    assert concluded("lib/IR.cpp:21: Assertion `isa<X>(v)' failed.", "Aborted (core dumped)") == "framework_bug"


@pytest.mark.parametrize(
    ("line", "failure_class"),
    [
        ("kafka.errors.NoBrokers: none", "dns_or_connect"),
        ("fsspec.exceptions.OddOne: nothing", "storage_error"),
        ("gin.config.UnknownThing: of that", "config_or_argument_error"),
        ("mylib.errors.ConnectionLost: the server is gone", "dns_or_connect"),
        ("mylib.errors.OddError: the flux is out of phase", "script_error"),
    ],
)
def test_exceptions_of_libraries(line, failure_class):
    assert exceptions.last_exception([line]).failure_class.value == failure_class


def test_numbers_of_any_length_are_no_trouble():
    lines = [f"sum {'1' * (17 + place)} of {place}" for place in range(9)]
    assert concluded(*lines) == "unknown"


@pytest.mark.parametrize(
    "said", ["a GPU of the fabric is lost", "DIMM A2 failed", "NVLink 3 is down", "node n3 is unreachable"]
)
def test_no_node_is_cordoned_because_an_exception_says_so(said):
    found = exceptions.read(Traceback(exception="mylib.OddError", message=said))
    assert triage.action_for(found.failure_class) not in ("cordon_node_and_restart", "cordon_gpu_and_restart")


def test_of_the_kernel_only_names_count():
    assert concluded("[    1.23] ACPI Error: a task died, the link is lost", kind="kernel") == "unknown"
    assert concluded("[    1.23] foo 0000:83:00.0: device lost from bus", kind="kernel") == "gpu_fallen_off_bus"


@pytest.mark.parametrize(
    "line", ["torch.nn.Linear: 12 layers", "mypkg.models.Decoder", "mylib.errors.OddOne: the flux"]
)
def test_a_name_with_a_capital_is_no_exception_unless_its_library_is_known(line):
    assert exceptions.last_exception([line]) is None
    assert concluded("building", line) == "unknown"
