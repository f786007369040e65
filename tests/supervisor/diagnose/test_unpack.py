"""Packed files: whole, cut off, damaged, followed by something else."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random

import pytest
import zstandard

from supervisor.diagnose.log_files import PIECE, damage, unpacked

TEXT = b"".join(b"step %d loss 2.%d\n" % (n, n * 7919 % 1000) for n in range(20_000)) + b"the end\n"
PACKS = [gzip.compress, bz2.compress, lzma.compress, lambda data: zstandard.ZstdCompressor().compress(data)]


def read(data):
    stream = unpacked(io.BufferedReader(io.BytesIO(data)))
    found = b""
    while more := stream.read1(1 << 20):
        found += more
    return found, damage(stream)


@pytest.mark.parametrize("pack", PACKS)
def test_one_member_or_several(pack):
    assert read(pack(TEXT)) == (TEXT, "")
    assert read(pack(TEXT) + pack(b"more\n")) == (TEXT + b"more\n", "")


def test_a_bomb_of_zstd_comes_in_small_pieces():
    zeros = zstandard.ZstdCompressor().compress(bytes(300 << 20))
    stream = unpacked(io.BufferedReader(io.BytesIO(zeros)))
    size = 0
    while more := stream.read1(1 << 20):
        assert len(more) <= 1 << 20
        size += len(more)
    assert (size, damage(stream)) == (300 << 20, "")


@pytest.mark.parametrize("pack", PACKS)
def test_zeros_after_it_are_padding(pack):
    assert read(pack(TEXT) + b"\0" * 4096) == (TEXT, "")


@pytest.mark.parametrize("pack", PACKS)
def test_what_follows_does_not_hide_what_is_before(pack):
    found, wrong = read(pack(TEXT) + b"garbage" * 10)
    assert found == TEXT
    assert wrong


def test_a_gzip_that_was_cut_off_is_read_to_its_last_byte():
    made = io.BytesIO()
    with gzip.GzipFile(fileobj=made, mode="wb") as file:
        file.write(TEXT)
        file.flush()
        whole = len(made.getvalue())
        file.write(b"lost")
    found, wrong = read(made.getvalue()[:whole])
    assert (found, bool(wrong)) == (TEXT, True)


@pytest.mark.parametrize("pack", PACKS)
def test_any_damage_gives_the_beginning(pack):
    noise = random.Random(7)
    packed = pack(TEXT)
    for _ in range(20):
        data = bytearray(packed)
        data[noise.randrange(8, len(data))] ^= 1 << noise.randrange(8)
        found, _ = read(bytes(data[: noise.randrange(8, len(data) + 1)]))
        assert len(found) <= len(TEXT) + PIECE


@pytest.mark.parametrize("magic", [b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ\x00"])
def test_what_only_begins_like_a_packed_file(magic):
    found, wrong = read(magic + b"RuntimeError: no such thing\n")
    assert (found, bool(wrong)) == (b"", True)


def test_what_is_not_packed_is_given_as_it_is():
    assert read(TEXT) == (TEXT, "")
    assert read(b"") == (b"", "")
