"""What an agent remembers over its own death."""

from pathlib import Path

from supervisor.agent.state import OFFSETS_EVERY_S, NotebookFile


def test_what_changed_is_there_for_the_next_agent_at_once(tmp_path: Path) -> None:
    file = NotebookFile(tmp_path / "agent.json", lambda: 0.0)
    file.book.epoch = 3
    file.write()
    assert NotebookFile(tmp_path / "agent.json").book.epoch == 3


def test_offsets_alone_are_written_only_now_and_then(tmp_path: Path) -> None:
    now = 0.0
    file = NotebookFile(tmp_path / "agent.json", lambda: now)
    written = []
    for look in range(10):
        now = look * OFFSETS_EVERY_S / 4
        file.book.offsets = {"rank0.out": look}
        file.write()
        written.append(NotebookFile(tmp_path / "agent.json").book.offsets["rank0.out"])
    assert written == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]
    file.book.notice = 1
    file.write()
    assert NotebookFile(tmp_path / "agent.json").book.offsets == {"rank0.out": 9}


def test_a_broken_file_is_no_reason_to_end(tmp_path: Path) -> None:
    (tmp_path / "agent.json").write_bytes(b"{")
    assert NotebookFile(tmp_path / "agent.json").book.epoch == 0
