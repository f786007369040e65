"""The probe that looks for checkpoints on a thread of its own."""

from __future__ import annotations

import threading
import time

from supervisor.probes.checkpoints import CheckpointProbe


def test_without_a_thread_it_says_so_and_tries_again(tmp_path, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    probe = CheckpointProbe([str(tmp_path)], str(tmp_path), [])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        probe.scan([])
    assert probe.problem == "checkpoints are not looked for: can't start new thread"
    probe.scan([])
    assert probe.problem == ""
    (tmp_path / "model.pt").write_bytes(b"")
    until = time.monotonic() + 10
    while probe._looks == 0:
        assert time.monotonic() < until
        time.sleep(0.01)
