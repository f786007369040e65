"""The numbers of the verdict, and the rows that say where they apply."""

from __future__ import annotations

import importlib.resources
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from diagnosis.incident import HangReport
from diagnosis.verdict import triage, weights

TEXT = importlib.resources.files("diagnosis.verdict").joinpath("weights.toml").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _packaged() -> Iterator[None]:
    yield
    weights.use(None)


def test_the_packaged_file_is_valid_and_reads_the_same_again() -> None:
    assert weights.parse(TEXT) == weights.packaged() == weights.current()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("elsewhere = 0.5", "elsewhere = 1.5"),
        ("elsewhere = 0.5", ""),
        ("elsewhere = 0.5", "elsewhere = 0.5\nnobody_reads_this = 0.5"),
        ("cause = 1.0", "cause = 'much'"),
        ("[0.3, 0.35]", "[0.3, 0.65]"),
        ('stopped = ["silent_hang", 0.9]', 'stopped = ["no_such_class", 0.9]'),
        ("1 = {", "2 = {"),
    ],
)
def test_a_wrong_file_is_refused(old: str, new: str) -> None:
    assert old in TEXT

    with pytest.raises(ValueError, match=r"."):
        weights.parse(TEXT.replace(old, new, 1))


@pytest.mark.parametrize("table", ["factor", "confidence", "verdict", "instead"])
def test_the_code_names_each_number(table: str) -> None:
    """A key is text in the code: one that nobody names is a mistake."""
    code = "".join(path.read_text(encoding="utf-8") for path in Path(weights.__file__).parent.glob("*.py"))

    assert [key for key in getattr(weights.packaged(), table) if f'"{key}"' not in code] == []


def test_each_kind_of_hang_has_a_class() -> None:
    assert weights.packaged().hang.keys() == set(get_args(get_type_hints(HangReport)["kind"]))


def test_rows_have_names_of_their_own_and_a_factor_where_they_need_one() -> None:
    names = Counter(row.name for row in triage.ADJUSTMENTS)
    factors = weights.packaged().factor

    assert [name for name, count in names.items() if count > 1] == []
    assert [row.name for row in triage.ADJUSTMENTS if (row.effect == "factor") != (row.name in factors)] == []


def test_a_row_and_a_factor_can_be_left_out() -> None:
    row = weights.Row[int]("elsewhere", "factor", lambda number: number > 3, "a_xid_on_another_node")

    assert weights.first_factor([row], 4) == weights.packaged().factor["elsewhere"]
    weights.use(weights.without(weights.packaged(), "elsewhere"))
    assert weights.first_factor([row], 4) == 1.0
    assert weights.current().factor["elsewhere"] == 1.0
