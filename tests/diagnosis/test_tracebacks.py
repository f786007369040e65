"""Tracebacks out of messy output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis import tracebacks

PLAIN = """\
step 3 loss 2.0
Traceback (most recent call last):
  File "/home/u/train.py", line 90, in <module>
    main()
  File "/home/u/train.py", line 41, in step
    loss = model(batch)
           ^^^^^^^^^^^^
  File "/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1750, in _call_impl
    return forward_call(*args, **kwargs)
ValueError: batch is empty
""".splitlines()


def prefixed(prefix, lines):
    return [prefix + line for line in lines]


def test_exception_and_places():
    found = tracebacks.last(PLAIN)
    assert (found.exception, found.message) == ("ValueError", "batch is empty")
    assert (found.own_frame.function, found.own_frame.line) == ("step", 41)
    assert tracebacks.fingerprint(found) == "ValueError in step (/home/u/train.py:41)"


def test_rank_prefixes_keep_mixed_ranks_apart():
    other = [line.replace("ValueError: batch is empty", "KeyError: 'x'") for line in PLAIN]
    mixed = [
        line for pair in zip(prefixed("[rank1]:", PLAIN), prefixed("[rank0]: ", other), strict=True) for line in pair
    ]
    found = {one.rank: one.line for one in tracebacks.read(mixed)}
    assert found == {1: "ValueError: batch is empty", 0: "KeyError: 'x'"}
    assert tracebacks.last(prefixed("[default0]:", PLAIN)).rank == 0


def test_chained_causes():
    wrapper = [*PLAIN, "", "The above exception was the direct cause of the following exception:", "", *PLAIN[1:-1]]
    found = tracebacks.last([*wrapper, "RuntimeError: step failed"])
    assert found.line == "RuntimeError: step failed"
    assert found.causes == ("ValueError: batch is empty",)
    assert len(tracebacks.collect([*wrapper, "RuntimeError: step failed"])) == 21


def test_torchruns_own_traceback_is_passed_over():
    launcher = [
        "Traceback (most recent call last):",
        '  File "/env/bin/torchrun", line 8, in <module>',
        "    sys.exit(main())",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    ]
    assert tracebacks.last([*PLAIN, *launcher]).name == "ValueError"
    assert tracebacks.last(launcher) is None


def test_syntax_errors_and_cut_off_beginnings():
    syntax = [
        "Traceback (most recent call last):",
        '  File "a.py", line 3',
        "    x = (",
        "        ^",
        "SyntaxError: '(' was never closed",
    ]
    assert tracebacks.last(syntax).line == "SyntaxError: '(' was never closed"
    assert tracebacks.last(PLAIN[4:]).line == "ValueError: batch is empty"
    assert tracebacks.last(PLAIN[:-1]).exception == tracebacks.CUT_OFF


def test_error_files():
    message = {"message": "KeyError: 3", "extraInfo": {"py_callstack": "\n".join(PLAIN), "timestamp": "1"}}
    assert tracebacks.from_error_file(json.dumps({"message": message})).line == "ValueError: batch is empty"
    assert tracebacks.from_error_file("RuntimeError: no way").message == "no way"
    assert tracebacks.from_error_file('{"message": 3}') is None


def test_bounded():
    deep = ["Traceback (most recent call last):"]
    deep += ['  File "a.py", line 1, in f', "    f()"] * 500 + ["RecursionError: too deep"]
    assert len(tracebacks.collect(deep)) == tracebacks.MAX_LINES
    assert tracebacks.collect(deep)[-1] == "RecursionError: too deep"


_lines = st.lists(
    st.sampled_from([*PLAIN, "", "[rank0]: x", "During handling of the above exception"]) | st.text(max_size=50),
    max_size=40,
)


@given(_lines)
def test_any_lines_are_survived(lines):
    tracebacks.read(lines)
    tracebacks.collect(lines)
    tracebacks.from_error_file("\n".join(lines))


def one(text):
    found = [one for one in tracebacks.read(text.strip("\n").splitlines()) if not one.is_launchers]
    assert len(found) == 1, [each.line for each in found]
    return found[0]


def places(found):
    return [frame.function for frame in found.frames]


CASES = [case.partition("\n") for case in Path(__file__).with_name("tracebacks.txt").read_text().split("### ")[1:]]


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, _, text in CASES])
def test_tracebacks_as_tools_write_them(text):
    lines, line, functions = text.rstrip("\n").split("\n=> ")
    found = one(lines)
    assert (found.line, places(found)) == (line, functions.split())


def test_a_pool_names_what_its_worker_raised():
    pool = '\n"""\n'.join(["multiprocessing.pool.RemoteTraceback: ", "\n".join(PLAIN[1:]), ""])
    again = "\nThe above exception was the direct cause of the following exception:\n\n" + "\n".join(PLAIN[1:])
    assert one(pool + again).causes[-1] == "ValueError: batch is empty"


def test_of_an_exception_group_what_is_in_it_counts():
    group = """
  + Exception Group Traceback (most recent call last):
  |   File "/home/u/train.py", line 9, in <module>
  |     main()
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/home/u/train.py", line 4, in step
    |     raise ValueError("batch is empty")
    | ValueError: batch is empty
    +------------------------------------
"""
    assert tracebacks.last(group.strip("\n").splitlines()).line == "ValueError: batch is empty"


def test_any_prefix_that_goes_on_is_one():
    for prefix in ("n7: ", "(train pid=77, ip=10.0.0.7) ", "2026-01-01 12:00:00,%03d ERROR ", "[1,3]<stderr>:"):
        lines = [(prefix % n if "%" in prefix else prefix) + line for n, line in enumerate(PLAIN)]
        (found,) = tracebacks.read(lines)
        assert found.line == "ValueError: batch is empty", prefix
        assert places(found) == ["<module>", "step", "_call_impl"]


def test_ranks_that_write_into_each_other():
    mixed = """
Traceback (most recent call last):
Traceback (most recent call last):
  File "train.py", line 3, in <module>
  File "train.py", line 3, in <module>
        main()main()

NameError
: NameErrorname 'oss' is not defined:
name 'oss' is not defined
step 4
""".strip("\n")
    found = one(mixed)
    assert found.name == "NameError"
    assert "name 'oss' is not defined" in found.message
    assert places(found) == ["<module>"]


def test_what_python_ignored_is_no_failure_and_a_thread_is_not_the_process():
    ignored = ["Exception ignored in: <function Pool.__del__ at 0x7f>", *PLAIN[1:]]
    assert tracebacks.read(ignored) == []
    assert tracebacks.last(["Exception in thread Thread-3 (_feed):", *PLAIN[1:]]).is_passing
    feeder = ["Traceback (most recent call last):", '  File "/usr/lib/multiprocessing/queues.py", line 2, in _feed']
    assert tracebacks.last([*feeder, "OSError: [Errno 9] Bad file descriptor"]).is_passing
    cause = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "KeyError: 3"]
    assert tracebacks.last([*cause, "", "Exception in thread Thread-3:", *PLAIN[1:]]).name == "KeyError"


def test_what_nccl_adds_belongs_to_the_message():
    found = one("""
Traceback (most recent call last):
  File "/home/u/train.py", line 9, in <module>
    dist.barrier()
torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1207, internal error, NCCL version 2.17.1
ncclInternalError: Internal check failed.
Last error:
Bootstrap : no socket interface found
step 4
""")
    assert found.message.endswith("Last error: Bootstrap : no socket interface found")


def test_the_innermost_line_of_own_code():
    assert one("\n".join(PLAIN)).code == "loss = model(batch)"


def test_paths_of_windows():
    found = one(r"""
Traceback (most recent call last):
  File "C:\Users\u\train.py", line 9, in <module>
    main()
  File "C:\env\Lib\site-packages\torch\serialization.py", line 3, in load
    raise
EOFError: Ran out of input
""")
    assert found.own_frame.file == "C:/Users/u/train.py"


def test_an_exception_whose_frames_were_cut_off():
    found = tracebacks.read(["    raise ValueError(text)", "ValueError: no such split", *PLAIN[1:3]])
    assert found[0].line == "ValueError: no such split"
    assert tracebacks.read(["step 3", "ValueError: printed by a log"]) == []


@pytest.mark.parametrize(
    ("left", "right"), [("> ", ""), ("│ ", "      │"), ("┃ ", " ┃"), ("| ", " |"), ("│ ", ""), (">> ", "")]
)
@pytest.mark.parametrize("end", ["RuntimeError: shapes differ", "RuntimeError"])
def test_what_is_drawn_around_a_traceback_takes_no_line_of_it(left, right, end):
    lines = ["Traceback (most recent call last):", '  File "/app/train.py", line 5, in main', "    y = a @ b", end]
    (found,) = tracebacks.read(["step 1", *(f"{left}{line}{right}" for line in lines), "wandb: Run failed"])
    assert found.line == end
