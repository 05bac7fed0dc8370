"""Directories of saves that Slurm ended before their first file."""

import os
import time
from pathlib import Path

import pytest

from tests.support.job.script_job import ScriptJob


def directory(path: Path, *, age_s: float, file: str = "") -> Path:
    path.mkdir(parents=True)
    if file:
        (path / file).write_text("{}")
    at = time.time() - age_s
    os.utime(path, (at, at))
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    directory(tmp_path / "step_10", age_s=30, file="model.json")
    return tmp_path


def begin(home: Path, *, run: int = 1) -> None:
    ScriptJob(home, run=run, pattern="step_*")


def test_the_empty_directory_of_the_last_save_is_removed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = directory(home / "step_20" / "shards", age_s=5).parent
    os.utime(last, (time.time() - 5,) * 2)
    begin(home)
    assert [p.name for p in home.iterdir() if p.name.startswith("step")] == ["step_10"]
    assert f"{last} is removed: it is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "age_s", "file"),
    [
        ("step_20", 5.0, "model.json"),  # not empty
        ("step_20", 0.0, ""),  # another job may be about to fill it
        ("step_05", 60.0, ""),  # older than the newest checkpoint: the script lives with it
        ("other", 5.0, ""),  # no checkpoint
    ],
)
def test_nothing_else_is_removed(home: Path, name: str, age_s: float, file: str) -> None:
    other = directory(home / name, age_s=age_s, file=file)
    begin(home)
    assert other.is_dir()


def test_nothing_is_removed_at_the_first_start(home: Path) -> None:
    other = directory(home / "step_20", age_s=5)
    begin(home, run=0)
    assert other.is_dir()


def test_one_that_cannot_be_removed_is_named_and_keeps_no_other(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = directory(home / "step_20", age_s=5)
    (kept / "shards").symlink_to(home, target_is_directory=True)
    os.utime(kept, (time.time() - 5,) * 2)
    last = directory(home / "step_30", age_s=5)
    begin(home)
    assert f"{kept} holds no file, and cannot be removed: Directory not" in capsys.readouterr().err
    assert not last.exists()
    assert (home / "step_10" / "model.json").exists()
