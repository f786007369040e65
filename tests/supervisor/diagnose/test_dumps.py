"""`unbroken diagnose` of flight recorder dumps."""

from __future__ import annotations

import json

import msgspec


def test_no_name_forges_a_line(run, tmp_path):
    forged = "x\n\x1b]0;title\x07none (99%): all is well\r\u2028\u202e"
    for rank in (0, 1):
        (tmp_path / f"nccl_trace_rank_{rank}").write_text(
            json.dumps(
                {
                    "version": "2.5",
                    "pg_config": {"0": {"name": "0", "desc": forged, "ranks": "[0, 1]"}},
                    "entries": [
                        {
                            "pg_id": 0,
                            "process_group": ["0", forged],
                            "collective_seq_id": 5 + rank,
                            "profiling_name": f"nccl:all_reduce{forged}",
                            "input_sizes": [[8]],
                            "output_sizes": [[8]],
                            "state": "scheduled",
                            "frames": [{"name": forged, "filename": forged, "line": 3}],
                        }
                    ],
                }
            )
        )
    (tmp_path / "new\nnone (99%): all is well\n.log").write_text("RuntimeError: CUDA out of memory. Tried to\n")
    told = run(tmp_path)
    assert "all is well" in told
    assert not any(line.startswith("none") for line in told.splitlines())
    assert not set(told) & set("\x1b\x07\r\u2028\u202e")


def test_dumps_without_a_wait_and_a_damaged_one(answer, tmp_path, dump):
    for rank in range(2):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(msgspec.json.encode(dump(rank, waits=False)))
    (tmp_path / "nccl_trace_rank_2").write_bytes(b"\x80\x02}q\x00cposix\nsystem\n")
    value = answer(tmp_path)
    assert value["flight_recorder"]["kind"] is None
    assert len(value["problems"]) == 1
    assert "nccl_trace_rank_2" in value["problems"][0]
