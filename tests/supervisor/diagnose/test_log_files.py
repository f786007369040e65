"""Which files there are, what is in them, and how they are unpacked."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import pickle

import pytest
import zstandard

from supervisor.diagnose import log_files

TEXT = b"".join(b"step %d loss 2.5\n" % n for n in range(5000))


def read(path):
    with log_files.open_source(log_files.Source(str(path))) as stream:
        return log_files.read_up_to(stream, 1 << 30)


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, bz2.compress, lzma.compress, lambda data: zstandard.ZstdCompressor().compress(data)]
)
def test_packed_files_are_unpacked_by_what_is_in_them(tmp_path, pack):
    path = tmp_path / "log"
    path.write_bytes(pack(TEXT))
    assert read(path) == TEXT


@pytest.mark.parametrize("pack", [gzip.compress, lambda data: zstandard.ZstdCompressor().compress(data)])
def test_several_frames_in_one_file(tmp_path, pack):
    path = tmp_path / "log"
    path.write_bytes(pack(TEXT) + pack(TEXT))
    assert read(path) == TEXT * 2


@pytest.mark.parametrize("pack", [gzip.compress, lambda data: zstandard.ZstdCompressor().compress(data), lzma.compress])
def test_what_is_cut_off_or_damaged_is_read_as_far_as_it_goes(tmp_path, pack):
    path = tmp_path / "log"
    noise = os.urandom(300_000).hex().encode()
    packed = pack(noise)
    path.write_bytes(packed[: len(packed) * 2 // 3])
    assert noise.startswith(read(path))
    path.write_bytes(packed[:5000] + b"\xff" * 5000 + packed[10_000:])
    assert noise[:100].startswith(read(path)[:100])


@pytest.mark.parametrize(
    ("head", "name", "content"),
    [
        (b"hello\n", "x.log", "text"),
        (b"", "x.log", "text"),
        (pickle.dumps({"entries": []}, protocol=2), "nccl_trace_rank_3", "flight"),
        (b'{"version": "2.4", "pg_config": {}}', "dump.json", "flight"),
        (b'{"node": "n", "attempt": 2, "exits": []}', "evidence-0.json", "evidence"),
        (b'{"message": {"message": "x", "extraInfo": {}}}', "error.json", "error"),
        (b'{"rank": 1, "status": 9}', "rank1.exit", "exit"),
        (b'{"seq":1,"at":2.0,"epoch":1,"kind":"opened","body":{},"crc32":1}\n', "journal.1.jsonl", "journal"),
        (b'{"step": 3, "loss": 2.5}\n{"step": 4, "loss": 2.4}\n', "metrics.jsonl", "text"),
        (
            b"Process 7: python train.py\nPython v3.11\n\nThread 7 (idle): MainThread\n    f (train.py:3)\n",
            "s",
            "stacks",
        ),
        (b"\x00\x01\x02\x00\x00\x00" * 100, "x", "binary"),
        ("\ufeffhello\n".encode("utf-16-le"), "x", "text"),
    ],
)
def test_what_a_file_is(head, name, content):
    assert log_files.content(head, name) == content


def test_folders_are_walked_and_what_is_no_log_is_left_out(tmp_path):
    ours = ("b/token", "b/node.json", "b/pending_rules.toml", "c/rules.toml")
    for name in ("a/rank0.log", "a/model.pt", "b/rank0.err", "c/token", *ours):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    found = [os.path.relpath(one.path, tmp_path) for one in log_files.find([str(tmp_path)]).sources]
    assert found == ["a/rank0.log", "b/rank0.err", "c/token"]


@pytest.mark.parametrize("folder", ["run/attempt_{n}/0/stderr.log", "job/attempts/{n}/node0/evidence-0.json"])
def test_of_several_attempts_the_newest_with_output_is_read(tmp_path, folder):
    for number, text in ((0, "a"), (1, "b"), (10, "c"), (11, "")):
        path = tmp_path / folder.format(n=number)
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (found,) = log_files.find([str(tmp_path)]).sources
    assert "10/" in found.path


@pytest.mark.parametrize("size", [7, 64, 1000, 1 << 20])
def test_blocks_are_whole_lines(size):
    stream = io.BufferedReader(io.BytesIO(TEXT))
    found = list(log_files.blocks(stream, size=size))
    assert b"\n".join(found) + b"\n" == TEXT
    assert all(block.startswith(b"step") and block.endswith(b"2.5") for block in found)


@pytest.mark.parametrize("coding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("mark", ["\ufeff", ""])
def test_text_of_two_or_four_bytes_a_character(coding, mark):
    if coding.startswith("utf-32") and not mark:
        return  # nobody writes that
    data = (mark + "step 1\nRuntimeError: na\u00efve\n").encode(coding)
    assert log_files.content(data, "a.log") == "text"
    assert list(log_files.blocks(io.BytesIO(data))) == ["step 1\nRuntimeError: na\u00efve".encode()]


def test_a_pipe_or_a_device_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero", "/dev/tty"):
        with pytest.raises(OSError, match=r"pipe|device|address"):
            log_files.find([path])


def test_what_the_shell_opened_is_read_also_where_its_writer_has_ended():
    """`diagnose <(dmesg)` names /dev/fd/63."""
    ours, theirs = os.pipe()
    os.write(theirs, b"step 1\n")
    os.close(theirs)
    path = f"/dev/fd/{ours}"
    (source,) = log_files.find([path]).sources
    with log_files.open_source(source) as stream:
        assert log_files.read_up_to(stream, 100) == b"step 1\n"
    os.close(ours)
