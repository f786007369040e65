"""Which stage of the input is slow: each row of the table by its own samples, and stacks as py-spy writes them."""

from __future__ import annotations

import json

import pytest

from diagnosis.input_stages import ROWS, LoaderFrame, LoaderSample, advice, profile, read_stack, stage_of
from diagnosis.tables import load

TABLE = load("diagnosis", "input_stages.toml")["stage"]
FETCH = LoaderFrame("_MapDatasetFetcher.fetch", "/v/site-packages/torch/utils/data/_utils/fetch.py", 54)
WORKER = LoaderFrame("_worker_loop", "/v/site-packages/torch/utils/data/_utils/worker.py", 374)
QUEUE = LoaderFrame("Queue.get", "/usr/lib/python3.11/multiprocessing/queues.py", 113)
GET = LoaderFrame("Photos.__getitem__", "/home/me/data.py", 8)
NEXT = LoaderFrame("_SingleProcessDataLoaderIter._next_data", "/v/torch/utils/data/dataloader.py", 1)
LOAD = LoaderFrame("ImageFile.load", "/v/site-packages/PIL/ImageFile.py", 300)
OWN = LoaderFrame("clean_up", "/home/me/data.py", 20)


def frame(text: str) -> LoaderFrame:
    place, _, source = text.partition(" | ")
    file, _, function = place.partition(": ")
    return LoaderFrame(function, file, 1, source)


@pytest.mark.parametrize("row", TABLE, ids=[row["stage"] for row in TABLE])
def test_rows(row: dict[str, object]) -> None:
    for text in row["samples"]:  # type: ignore[attr-defined]
        found = stage_of(LoaderSample((frame(text), GET, FETCH, WORKER)))
        assert found is not None
        assert found[0].stage == row["stage"], text
    (own,) = (one for one in ROWS if one.stage == row["stage"])
    for text in row["counter_samples"]:  # type: ignore[attr-defined]
        assert not own.pattern.search(frame(text).text), text


@pytest.mark.parametrize(
    ("sample", "stage", "words"),
    [
        (LoaderSample((LOAD, GET, FETCH, WORKER)), "decode images", "PIL"),
        (LoaderSample((LOAD, GET, FETCH, WORKER), "file"), "read", "Photos.__getitem__"),
        (LoaderSample((GET, FETCH, WORKER), "network"), "network", "network"),
        (LoaderSample((OWN, GET, FETCH, WORKER)), "own code", "clean_up (data.py)"),
        (LoaderSample((FETCH, WORKER)), "own code", "fetch"),
        (LoaderSample((GET, NEXT)), "own code", "__getitem__"),
    ],
)
def test_stages(sample: LoaderSample, stage: str, words: str) -> None:
    found = stage_of(sample)
    assert found is not None
    assert found[0].stage == stage
    assert words in found[1]


def test_nothing_to_do_and_no_loader_at_all() -> None:
    assert stage_of(LoaderSample((QUEUE, WORKER))) is None
    assert stage_of(LoaderSample((QUEUE, NEXT))) is None
    assert stage_of(LoaderSample((WORKER,))) is None
    assert stage_of(LoaderSample((OWN,))) is None


def test_shares() -> None:
    samples = [LoaderSample((LOAD, GET, FETCH, WORKER))] * 6 + [LoaderSample((OWN, GET, FETCH, WORKER))] * 2
    found = profile([*samples, LoaderSample((QUEUE, WORKER)), LoaderSample((QUEUE, WORKER)), LoaderSample(())])
    assert (found.samples, found.idle) == (10, 0.2)
    assert [(one.stage, one.share) for one in found.stages] == [("decode images", 0.75), ("own code", 0.25)]
    assert any("num_workers" in one for one in advice(found, 2, 8.0, 0))
    assert not any("num_workers" in one for one in advice(found, 8, 8.0, 0))
    assert any("64 GiB" in one for one in advice(found, 8, 8.0, 64 << 30))
    assert profile([]).stages == ()


def test_a_dump_of_py_spy() -> None:
    def thread(name: str, *frames: LoaderFrame) -> dict[str, object]:
        told = [{"name": one.function, "filename": one.file, "line": one.line} for one in frames]
        return {"pid": 1, "thread_name": name, "frames": told}

    dump = json.dumps([thread("QueueFeederThread", QUEUE), thread("MainThread", LOAD, GET, FETCH, WORKER)]).encode()
    assert read_stack(dump) == (LOAD, GET, FETCH, WORKER)


@pytest.mark.parametrize("dump", [b"", b"{}", b"[]", b"[1]", b'[{"frames": 7}]', b'[{"frames": [{"line": "x"}]}]'])
def test_no_dump(dump: bytes) -> None:
    assert read_stack(dump) == ()
