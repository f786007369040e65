from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.redact import HIDDEN, redact, redact_lines


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("HF_TOKEN=hf_abcdefghijklmnopqrstuv set", "hf_abcdefghijklmnopqrstuv"),
        ("using key sk-proj-0123456789abcdefgh", "sk-proj-0123456789abcdefgh"),
        ("export WANDB_API_KEY='0a1b2c3d4e5f'", "0a1b2c3d4e5f"),
        ('{"password": "hunter22"}', "hunter22"),
        ("Authorization: Bearer abcdefgh.ijkl0123", "abcdefgh.ijkl0123"),
        ("connecting to postgres://user:pa55word@db:5432/x", "pa55word"),
        ("GET https://bucket/x?X-Amz-Signature=deadbeef0123&y=1", "deadbeef0123"),
        ("id AKIAIOSFODNN7EXAMPLE here", "AKIAIOSFODNN7EXAMPLE"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "MIIE"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI/K7MDENG"),
    ],
)
def test_a_secret_goes(text: str, secret: str) -> None:
    clean = redact(text)

    assert secret not in clean
    assert HIDDEN in clean


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
        ("torchrun train.py --hub-token abcdefgh --steps 5", "abcdefgh"),
        ("login with nvapi-abcdEFGH0123456789", "nvapi-abcdEFGH"),
        ("POST https://hooks.chat.example/services/T00/B00/XXXXYYYY", "XXXXYYYY"),
        ("Cookie: session=abc; other=12345", "12345"),
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
    assert redact_lines(["loss 2.3: fine", *lines]) == ["loss 2.3: fine", *[HIDDEN] * len(lines)]


def test_lines_around_a_key_stay() -> None:
    lines = ["before it: x", "-----BEGIN PRIVATE KEY-----", "abcd", "-----END PRIVATE KEY-----", "after it: y"]
    assert redact_lines(lines) == ["before it: x", HIDDEN, HIDDEN, HIDDEN, "after it: y"]


@given(st.lists(st.text(max_size=80), max_size=10))
def test_as_many_lines_as_there_were(lines: list[str]) -> None:
    assert len(redact_lines(lines)) == len(lines)
