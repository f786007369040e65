"""Who wrote a line, or a file."""

from __future__ import annotations

import pytest

from diagnosis.logs.reader import Origin, Place, Prefixes, place, places
from tests.tables import table

CASES = table(__file__)


@pytest.mark.parametrize(("line", "rank", "node", "text"), CASES["prefixes_that_say_what_they_are"])
def test_prefixes_that_say_what_they_are(line, rank, node, text):
    assert Prefixes().read(line) == Origin(text, rank, node)


@pytest.mark.parametrize(("form", "rank", "node"), CASES["prefixes_that_most_lines_have"])
def test_prefixes_that_most_lines_have(form, rank, node):
    sample = [form.format(n=n % 8, text=f"step {n}") for n in range(40)]
    assert Prefixes(sample).read(form.format(n=3, text="boom")) == Origin("boom", rank, node)


def test_numbers_that_count_up_are_no_ranks():
    assert Prefixes(f"{n}: x" for n in range(40)).read("3: boom").rank is None


@pytest.mark.parametrize("line", ["ERROR: x", "INFO: y", "RuntimeError: z", "Epoch 1: 3"])
def test_levels_and_exceptions_are_no_nodes(line):
    assert Prefixes([line] * 40).read(line).node == ""


def test_the_time_of_a_line():
    origin = Prefixes().origin(b"[rank3]:[E1121 20:20:31.250 ProcessGroupNCCL.cpp:616] x", 2026)
    assert (origin.rank, origin.at) == (3, 1795292431.25)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("logs/n7-dmesg.log", Place(None, "n7")),
        ("dgx-a100-3-rank5.out", Place(5, "dgx-a100-3")),
        ("logs/none_x1y2/attempt_0/3/stderr.log", Place(3, "", 0)),
        ("run/attempt_2/11/error.json", Place(11, "", 2)),
        ("job/attempts/4/node7/evidence-0.json", Place(None, "node7", 4)),
        ("local/attempts/4/rank56.err", Place(56, "", 4)),
        ("logs/rank3.log", Place(3)),
        ("logs/worker-3.out", Place(3)),
        ("logs/node7_rank56.err", Place(56, "node7")),
        ("dumps/nccl_trace_rank_12", Place(12)),
        ("logs/dgx-a01.log.gz", Place(None, "dgx-a01")),
        ("logs/n3.log", Place(None, "n3")),
        ("train.log", Place()),
        ("cifar10.log", Place()),
        ("requirements.txt", Place()),
    ],
)
def test_names_of_files(path, told):
    assert place(path) == told


def test_tasks_of_slurm_show_among_others():
    several = places(["out/1234_0.out", "out/1234_1.out", "out/1234_10.out"])
    assert [one.rank for one in several.values()] == [0, 1, 10]
    assert places(["out/1234_7.out"])["out/1234_7.out"].rank is None


def test_ranks_in_the_folders_of_several_nodes_are_local_ones():
    several = [f"run/node{node}/none_ab/attempt_0/3/stderr.log" for node in (0, 1)]
    one = ["run/none_ab/attempt_0/3/stderr.log", "run/none_ab/attempt_1/3/stderr.log"]

    assert list(places(several).values()) == [Place(None, "node0", 0), Place(None, "node1", 0)]
    assert [told.rank for told in places(one).values()] == [3, 3]
