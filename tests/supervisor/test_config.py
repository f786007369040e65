"""The configuration: what wins, what is refused, and in which words."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.cli.main import run, settings_given
from supervisor.config import ENVIRONMENT, FLAGS, HangSettings, RunSettings, knobs, load
from supervisor.controller.client import find_job
from supervisor.errors import ConfigError, JobNotFound

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str, name: str = "unbroken.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


def test_flags_win_over_environment_over_files(tmp_path: Path, write: Write) -> None:
    file = write('[run]\nspares = 1\nmode = "observe"\nkernel_log = "a"\nname = "from-file"\n')
    other = tmp_path / "other.toml"
    other.write_text('[run]\nname = "from-other"\n')
    environment = {"UNBROKEN_SPARES": "2", "UNBROKEN_MODE": "recommend", "UNBROKEN_CONFIG": str(other)}
    loaded = load({"run.spares": 3, "run.max_restarts": None}, environment, tmp_path)
    run = loaded.settings.run
    assert (run.spares, run.mode, run.kernel_log, run.name) == (3, "recommend", "a", "from-other")
    assert loaded.origins == {
        "run.spares": "--spares",
        "run.mode": "UNBROKEN_MODE",
        "run.kernel_log": str(file),
        "run.name": str(other),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nspare = 1\n", r"unknown key 'run\.spare': did you mean run\.spares\?"),
        ("spares = 1\n", r"unknown key 'spares': did you mean \[run\] spares\?"),
        ("[runn]\nspares = 1\n", r"unknown key 'runn': did you mean run\?"),
        ('[run]\nspares = "two"\n', r"run\.spares = 'two' of .*unbroken\.toml cannot be used: Expected `int`"),
        ("[run]\nspares = -1\n", r"run\.spares = -1 .* >= 0"),
        ('[run]\nmode = "force"\n', r"run\.mode = 'force'"),
        ("[run\n", "is not TOML"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(tmp_path: Path, write: Write, text: str, message: str) -> None:
    write(text)
    with pytest.raises(ConfigError, match=message):
        load({}, {}, tmp_path)


def test_a_wrong_flag_is_named_as_it_was_given(tmp_path: Path) -> None:
    options = {option for parameter in run.params for option in parameter.opts}
    assert set(FLAGS) <= set(knobs())
    assert set(FLAGS.values()) <= options
    for key, flag in FLAGS.items():
        with pytest.raises(ConfigError, match=f"{flag} cannot be used"):
            load({key: object()}, {}, tmp_path)


def test_a_patience_on_the_command_line_wins_over_off_in_a_file(tmp_path: Path, write: Write) -> None:
    write("[hang]\noff = true\npatience_s = 60\n")

    def hang(patience: str | None) -> HangSettings:
        return load(settings_given({"patience": patience}), {}, tmp_path).settings.hang

    assert hang(None) == HangSettings(off=True, patience_s=60.0)
    assert hang("900") == HangSettings(off=False, patience_s=900.0)
    assert hang("off").off


def test_there_are_few_knobs_and_each_says_what_it_is() -> None:
    found = knobs()
    assert len(found) <= 41
    assert all(knob.what for knob in found.values())
    assert set(ENVIRONMENT) <= set(found)
    set_for_scripts = {"UNBROKEN_JOB_DIR", "UNBROKEN_ATTEMPT", "UNBROKEN_RESUME_FROM", "UNBROKEN_HEARTBEAT_FD"}
    assert not set_for_scripts & set(ENVIRONMENT.values())


@pytest.mark.root
def test_a_folder_that_is_not_ours_to_see_has_no_file(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    os.seteuid(65534)
    try:
        assert load({}, {}, closed).settings.run == RunSettings()
        with pytest.raises(ConfigError, match="which is not a file"):
            load({}, {"UNBROKEN_CONFIG": "there.toml"}, closed)
        with pytest.raises(JobNotFound, match="cannot be read: Permission denied"):
            find_job("", closed)
    finally:
        os.seteuid(0)
