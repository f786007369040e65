"""The benchmark of the flight recorder analyser, small and without torchrun's own (`test_beside_torch` asks that)."""

from __future__ import annotations

import json

from tests.bench import flight
from tests.bench.flight_jobs import FAULTS


def test_answers_and_sizes(tmp_path, capsys):
    said = []
    found = flight.report(tmp_path, flight.Size(cases=1, ranks=64, theirs_up_to=0, seed=11), "", said.append)
    assert sum(row["cases"] for row in found["answers"]) == len(FAULTS) == found["cases"]
    assert found["right"] >= len(FAULTS) - 1
    assert [row["ranks"] for row in found["sizes"]] == [64]
    assert found["sizes"][0]["right"]
    assert json.loads(json.dumps(found)) == found
    flight.show(found)
    assert "one rank is stuck" in capsys.readouterr().out


def test_a_seed_repeats_its_case():
    assert flight.dumps(flight.case("stuck", 5)) == flight.dumps(flight.case("stuck", 5))
