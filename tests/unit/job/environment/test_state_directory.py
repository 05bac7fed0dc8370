"""Directories for the state of a job: which one is used, and what is refused."""

import os
import pwd
from pathlib import Path

import pytest

from slurm_elastic.core.report import Report
from slurm_elastic.job.attempt_trial import AttemptTrial
from slurm_elastic.job.environment import state_directory
from slurm_elastic.job.environment.state_directory import (
    claim,
    forget_older,
    read_own,
    state_directories,
    versions,
    writable,
    write_own,
)
from slurm_elastic.job.environment.world_variables import read_start_world
from slurm_elastic.job.report_state import ReportState
from slurm_elastic.job.unmodified.resume_state import ResumeState, ResumeStateFile


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    for name in ("submit", "home"):
        (tmp_path / name).mkdir()
    env = {"SLURM_SUBMIT_DIR": f"{tmp_path}/submit", "HOME": f"{tmp_path}/home/"}
    return list(state_directories(env))


def close_to_all(directory: str) -> None:
    """Make it unusable, for root too."""
    Path(directory).write_text("a file")


def open_to_all(directory: str) -> None:
    Path(directory).unlink()


def test_below_the_directory_of_submission_then_below_home(
    tmp_path: Path, places: list[str]
) -> None:
    assert places == [f"{tmp_path}/submit/.slurm-elastic", f"{tmp_path}/home/.slurm-elastic"]
    same = {"SLURM_SUBMIT_DIR": str(tmp_path), "HOME": str(tmp_path)}
    assert state_directories(same) == (f"{tmp_path}/.slurm-elastic",)


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_without_a_home_in_the_environment_that_of_the_account_counts(home: str | None) -> None:
    env = {"SLURM_SUBMIT_DIR": "/data"} | ({} if home is None else {"HOME": home})
    own = pwd.getpwuid(os.geteuid()).pw_dir
    assert state_directories(env) == ("/data/.slurm-elastic", f"{own}/.slurm-elastic")


def test_an_account_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert state_directories({"SLURM_SUBMIT_DIR": "/data"}) == ("/data/.slurm-elastic",)


def test_it_is_created_for_its_user_only(places: list[str]) -> None:
    assert writable(places) == places[0]
    assert Path(places[0]).stat().st_mode & 0o777 == 0o700
    Path(places[0]).chmod(0o777)
    claim(places[0])
    assert Path(places[0]).stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("kind", ["link", "file", "foreign", "no parent"])
def test_what_cannot_be_trusted_is_not_used(
    tmp_path: Path, places: list[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "r-7.json").write_text('{"count": 9}')
    if kind == "link":
        Path(places[0]).symlink_to(other)
    elif kind == "file":
        close_to_all(places[0])
    elif kind == "no parent":
        Path(places[0]).parent.rmdir()
    else:
        other.rename(places[0])
        uid = os.geteuid()
        stranger = Path(places[0]).stat().st_ino
        monkeypatch.setattr(
            state_directory,
            "is_own",
            lambda status: status.st_ino != stranger and status.st_uid in (uid, 0),
        )
    file = ResumeStateFile("r-7", places)
    assert file.load() == ResumeState()
    assert file.save(ResumeState(count=1))
    assert [directory for directory, _ in versions(places, "r-7.json")] == [places[1]]


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_only_plain_files_are_read_and_links_are_not_written_through(
    tmp_path: Path, places: list[str], kind: str
) -> None:
    claim(places[0])
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = Path(places[0], "r-7.json")
    if kind == "link":
        path.symlink_to(victim)
        Path(f"{path}.tmp").symlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert read_own(str(path)) is None
    if kind == "directory":
        assert ResumeStateFile("r-7", places).save(ResumeState(count=1))
        assert versions(places, "r-7.json")[0][0] == places[1]
    else:
        write_own(str(path), "new")
        assert read_own(str(path)) == "new"
    assert victim.read_text() == "precious"


def test_an_attempt_finds_what_the_one_before_could_only_write_elsewhere(
    places: list[str],
) -> None:
    first = ResumeStateFile("r-7", places)
    first.save(ResumeState(count=1, start_world=2))
    Path(places[0]).rename(f"{places[0]}.away")
    close_to_all(places[0])
    second = ResumeStateFile("r-7", places)
    assert second.save(ResumeState(count=5, start_world=4))
    open_to_all(places[0])
    Path(f"{places[0]}.away").rename(places[0])
    third = ResumeStateFile("r-7", places)
    assert third.load().count == 1, "written twice as first version: the preferred one counts"
    third.save(ResumeState(count=6, start_world=2))
    assert ResumeStateFile("r-7", places[::-1]).load().count == 6


def test_the_newest_version_counts_wherever_it_lies(places: list[str]) -> None:
    first = ResumeStateFile("r-7", places)
    first.save(ResumeState(count=1, start_world=2))
    later = ResumeStateFile("r-7", places)
    assert later.load().count == 1
    Path(places[0]).rename(f"{places[0]}.away")
    close_to_all(places[0])
    assert later.save(ResumeState(count=2, start_world=3))
    open_to_all(places[0])
    Path(f"{places[0]}.away").rename(places[0])
    last = ResumeStateFile("r-7", places)
    assert last.load().count == 2
    last.save(ResumeState(count=3, start_world=3))
    assert versions(places, "r-7.json")[0][0] == places[1], "it stays where it is"
    env = {
        name: str(Path(place).parent)
        for name, place in zip(("SLURM_SUBMIT_DIR", "HOME"), places, strict=True)
    }
    assert read_start_world(env, "r-7") == 3
    Path(places[1], "r-7.json").write_text('{"revision": 9, torn')
    assert ResumeStateFile("r-7", places).load().count == 1


def test_only_when_no_place_is_left_one_line_says_so(
    places: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    close_to_all(places[0])
    file = ResumeStateFile("r-7", places)
    assert file.save(ResumeState(count=1))
    assert capfd.readouterr().err == ""
    Path(places[1], "r-7.json").unlink()
    Path(places[1]).rmdir()
    close_to_all(places[1])
    assert not file.save(ResumeState(count=2))
    assert not file.save(ResumeState(count=3))
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert all(f"{place} (it is a link or a file" in lines[0] for place in places)
    assert "submit from a directory of your own" in lines[0]


def test_that_a_job_had_a_checkpoint_is_found_in_either_place(places: list[str]) -> None:
    def attempt(run: int) -> tuple[AttemptTrial, ReportState]:
        state = ReportState(Report(job_id=7, run=run, phase="starting"))
        trial = AttemptTrial(state, run_id="r-7", run=run, has_controller=False, directories=places)
        trial.begin()
        return trial, state

    close_to_all(places[0])
    _, state = attempt(0)
    state.update({"checkpoint_step": 1})
    open_to_all(places[0])
    assert attempt(1)[0].on


def test_the_state_of_an_earlier_job_of_the_same_number_is_forgotten(places: list[str]) -> None:
    names = ("r-7.json", "r-7.trained", "r-7.0.1.rendezvous", "r-71.json")
    for place in places:
        for name in names:
            write_own(f"{place}/{name}", "old")
            os.utime(f"{place}/{name}", (1000, 1000))
    write_own(f"{places[1]}/r-7.json", "of this job")
    forget_older([*places, "/nowhere"], "r-7", 2000)
    left = [sorted(path.name for path in Path(place).iterdir()) for place in places]
    assert left == [["r-71.json"], ["r-7.json", "r-71.json"]]
