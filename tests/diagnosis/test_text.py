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


@pytest.mark.parametrize(
    "text",
    [
        "iteration 10 | tokens: 4096 | loss: 2.3",
        "max_tokens=2048",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "token=None, use_auth_token=False",
        "tokenizer loaded from /data/tokenizer.json",
        "store at tcp://10.0.0.1:29500",
        "Basic training of 100 steps",
        "tokens_per_second: 1.2e4, tokens/s: 12.3k, num_tokens: 12345678",
        "KeyError: 'HF_TOKEN'",
        "the token: expired",
        "bos_token: <s>, pad_token: [PAD], tokenizer=LlamaTokenizerFast",
        "passed: true, bypass: enabled, PWD=/root/x",
        "GPU-12345678-1234-1234-1234-123456789abc at 0000:c1:00.0 of mlx5_0 in asia-east1",
        "commit e7685b1a0a1b2c3d4e5f0a1b2c3d4e5f01234567",
        "KeyError: 'model.layers.0.self_attn.q_proj.weight'",
        "missing key: model.layers.0.self_attn.k_proj.weight",
        "GOOGLE_APPLICATION_CREDENTIALS=/etc/gcp/key.json",
        "auth_munge: Authentication failed: Invalid credential",
        "user@host:/path/file, http://host:8080/path?x=y",
        "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        "/scratch/project/users/someone/checkpoints/run/global/step/files/model",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@given(st.text(max_size=300))
def test_redacting_twice_changes_nothing(text: str) -> None:
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("environ({'PATH': '/bin', 'DB_PASSWORD': 'letmein', 'HOME': '/root'})", "letmein"),
        ("headers={'Authorization': 'Basic dXNlcjpwYXNz', 'Accept': '*'}", "dXNlcjpwYXNz"),
        ("locals: [('password', 'hunter2')]", "hunter2"),
        ('sent b\'{\\"password\\": \\"hunter2\\"}\'', "hunter2"),
        ("RuntimeError: cannot log in with password 'my pass phrase'", "phrase"),
        ("machine api.wandb.ai login user password 0123456789abcdef0123456789abcdef01234567", "0123456789abcdef"),
        ("$ wandb login 0123456789abcdef0123456789abcdef01234567", "0123456789abcdef"),
        ("redis://:p@ss@cache:6379/0", "p@ss"),
        ("git clone https://0123456789abcdef0123@git.example/x", "0123456789abcdef"),
        ("AccountName=x;AccountKey=abcDEF123==;EndpointSuffix=core", "abcDEF123"),
        ("KAGGLE_KEY=abcdef MYSQL_PWD=ghijkl", "ghijkl"),
        ("password=12345678", "12345678"),
        ("PRIVATE-TOKEN: abcdefgh12", "abcdefgh12"),
    ],
)
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
