"""Tracebacks out of messy output."""

from __future__ import annotations

import json

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
    assert found is not None
    assert (found.exception, found.message) == ("ValueError", "batch is empty")
    assert found.own_frame is not None
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
    text = json.dumps({"message": message})
    assert tracebacks.from_error_file(text).line == "ValueError: batch is empty"
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
