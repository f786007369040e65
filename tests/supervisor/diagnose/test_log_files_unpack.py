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


def test_a_bomb_of_zstd_comes_in_small_pieces():
    zeros = zstandard.ZstdCompressor().compress(bytes(300 << 20))
    stream = unpacked(io.BufferedReader(io.BytesIO(zeros)))
    size = 0
    while more := stream.read1(1 << 20):
        assert len(more) <= 1 << 20
        size += len(more)
    assert (size, damage(stream)) == (300 << 20, "")


@pytest.mark.parametrize("pack", PACKS)
def test_what_follows_does_not_hide_what_is_before(pack):
    found, wrong = read(pack(TEXT) + b"garbage" * 10)
    assert found == TEXT
    assert wrong


@pytest.mark.parametrize("pack", PACKS)
def test_any_damage_gives_the_beginning(pack):
    noise = random.Random(7)
    packed = pack(TEXT)
    for _ in range(20):
        data = bytearray(packed)
        data[noise.randrange(8, len(data))] ^= 1 << noise.randrange(8)
        found, _ = read(bytes(data[: noise.randrange(8, len(data) + 1)]))
        assert len(found) <= len(TEXT) + PIECE
