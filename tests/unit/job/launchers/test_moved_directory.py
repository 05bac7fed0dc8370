"""A program that changes its working directory writes where a relative pattern does not match."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_elastic.job.launchers import moved_directory
from slurm_elastic.job.launchers.moved_directory import MovedDirectoryWatch, moved_line
from tests.support.patience import PATIENCE_S


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory of the ranks; that of esrun is above it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "19-14-03"
    (folder / "ckpt").mkdir(parents=True)
    return folder


@pytest.fixture
def mark(run: Path) -> Iterator[str]:
    """Start a rank below a process in the place of srun; yield the mark of its step."""
    name = f"{run.parent.parent.name}"
    command = ("sh", "-c", f"cd {run}; sleep 600 & wait")
    process = subprocess.Popen(command, env={"SLURM_ELASTIC_STEP": name}, start_new_session=True)
    yield name
    subprocess.run(("kill", "-KILL", "--", f"-{process.pid}"), check=True)
    process.wait()


def test_the_log_names_the_directory(run: Path, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved_directory, "_PAUSES_S", ())
    monkeypatch.setattr(moved_directory, "_LATER_PAUSE_S", 0.1)
    lines: list[str] = []
    watch = MovedDirectoryWatch(mark, "ckpt/*.pt", has_begun_save=lambda: False, log=lines.append)
    watch.start()
    (run / "ckpt" / "last.pt").touch()
    end = time.monotonic() + PATIENCE_S
    while not lines and time.monotonic() < end:
        time.sleep(0.02)
    watch.end()
    expected = (
        f"--checkpoint ckpt/*.pt matches nothing in {Path.cwd()}, where esrun runs, but"
        f" matches in {run}, which the program has made its working directory: give a pattern that"
        " matches there, and have the program use the same directory at each start (hydra:"
        " hydra.run.dir=out, --checkpoint 'out/…'). Until then the job is not resized"
    )
    assert lines == [expected]


def test_nothing_is_said_without_checkpoints_there_or_with_some_here(run: Path) -> None:
    own = Path.cwd()
    assert not moved_line("ckpt/*.pt", [str(run), str(own), "/missing"])
    (run / "ckpt" / "last.pt").touch()
    assert not moved_line("ckpt/*.pt", [])
    assert moved_line("ckpt/*.pt", [str(own), str(run)])
    (own / "ckpt").mkdir()
    (own / "ckpt" / "last.pt").touch()
    assert not moved_line("ckpt/*.pt", [str(run)])
