from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.signals import clean_text
from diagnosis.tables import load
from diagnosis.text import HIDDEN, hide_keys, redact, redact_words
from tests.tables import table

CASES = table(__file__)

_TABLE = load("diagnosis", "secrets.toml")
_ROWS = {row["id"]: row for row in (*_TABLE["token"], *_TABLE["place"], {"id": "names", **_TABLE["names"]})}


def filled(sample: str) -> tuple[str, list[str]]:
    """The sample with its secrets, and the secrets."""
    secrets = [("aB3dE9" * 20)[: int(size)] for size in re.findall(r"\{(\d+)\}", sample)]
    text = sample
    for secret in secrets:
        text = re.sub(r"\{\d+\}", secret, text, count=1)
    return text, secrets


@pytest.mark.parametrize("row", _ROWS.values(), ids=_ROWS)
def test_each_row_hides_its_samples_and_nothing_of_its_counter_samples(row: dict[str, Any]) -> None:
    for sample in row.get("samples", ()):
        text, secrets = filled(sample)
        clean = redact(text)
        assert HIDDEN in clean
        assert not [secret for secret in secrets if secret in clean]
        assert not row.get("marks") or any(mark in text.lower() for mark in row["marks"])
    for other in row.get("others", ()):
        assert redact(other) == other
    assert row["id"] == "tokens" or row["samples"]


@pytest.mark.parametrize("text", CASES["what_is_no_secret_stays"])
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@given(st.text(max_size=300))
def test_redacting_twice_changes_nothing(text: str) -> None:
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize(("text", "secret"), CASES["further_kinds_of_secrets_go"])
def test_further_kinds_of_secrets_go(text: str, secret: str) -> None:
    assert secret not in redact(text)


@pytest.mark.parametrize(
    "lines",
    [
        ["-----BEGIN PRIVATE KEY-----", "abcd", "efgh==", "-----END PRIVATE KEY-----"],
        ["abcd", "efgh==", "-----END OPENSSH PRIVATE KEY-----"],
        ["-----BEGIN RSA PRIVATE KEY-----", "abcd"],
    ],
)
def test_a_key_over_several_lines_goes_also_when_it_is_cut_off(lines: list[str]) -> None:
    assert hide_keys(["loss 2.3: fine", *lines]) == ["loss 2.3: fine", *[HIDDEN] * len(lines)]


def test_lines_around_a_key_stay() -> None:
    lines = ["before it: x", "-----BEGIN PRIVATE KEY-----", "abcd", "-----END PRIVATE KEY-----", "after it: y"]
    assert hide_keys(lines) == ["before it: x", HIDDEN, HIDDEN, HIDDEN, "after it: y"]


@given(st.lists(st.text(max_size=80), max_size=10))
def test_as_many_lines_as_there_were(lines: list[str]) -> None:
    assert len(hide_keys(lines)) == len(lines)


def test_a_key_is_known_also_after_its_lines_were_cleaned() -> None:
    lines = [clean_text(line) for line in ("ValueError: bad", "-----BEGIN RSA PRIVATE KEY-----", "MIIEvQIBADANBgkq")]

    assert hide_keys(lines) == ["ValueError: bad", HIDDEN, HIDDEN]


def test_a_key_whose_end_never_comes_hides_nothing_else() -> None:
    lines = ["-----BEGIN PRIVATE KEY-----", "MIIEvQ==", *(f"step {n}: loss 2.3" for n in range(9)), "Traceback", "done"]

    assert hide_keys(lines) == [HIDDEN, HIDDEN, *lines[2:]]


def test_secrets_go_before_the_text_is_cut() -> None:
    long = f"{'x' * 485} HF_TOKEN=hf_abcdefghijklmnopqrstuv"

    assert "hf_a" not in clean_text(long)
    assert "hf_a" not in clean_text("A_TOKEN=abcdefgh " * 100 + "hf_abcdefghijklmnopqrstuv" * 10, 400)
    assert clean_text("pass\x1b[0mword=hun\x1b[1mter2") == f"password={HIDDEN}"


@pytest.mark.parametrize("hostile", ["key=", "-eyJ", "token: ", "a://a:", "pass pass ", "-----BEGIN PRIVATE KEY-----"])
def test_hostile_text_takes_no_time(hostile: str) -> None:
    text = hostile * (8000 // len(hostile))
    began = time.process_time()
    redact(text)

    assert time.process_time() - began < 0.25


def test_secrets_of_a_command_line_go() -> None:
    words = ("train.py", "--hub-token", "abcdef", "--password=xyzw1", "-u", "bob:geheim", "--max-tokens", "4096")

    assert redact_words(words) == (
        *("train.py", "--hub-token", HIDDEN, f"--password={HIDDEN}", "-u", f"bob:{HIDDEN}", "--max-tokens", "4096"),
    )
