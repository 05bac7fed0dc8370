"""Steps of one start of a program: which ranks made it fail."""

from pathlib import Path

import pytest

from slurm_elastic.job.companions import joint_step
from slurm_elastic.job.companions.joint_step import JointStep
from slurm_elastic.job.launch import SrunProcess


def stand_in(script: str) -> SrunProcess:
    """Start a shell in place of srun."""
    return SrunProcess(["sh", "-c", script], {"PATH": "/usr/bin:/bin"}, "mark")


KILLED = "echo 'srun: error: g02: tasks 0-1: Killed' >&2; exit 137"
FAILED = "echo 'srun: error: g01: task 0: Exited with exit code 1' >&2; exit 1"


@pytest.mark.parametrize(
    ("base", "part", "code", "failed_in"),
    [
        (FAILED, f"sleep 0.4; {KILLED}", 137, 7),  # its ranks were killed: others noticed it first
        (f"sleep 0.4; {FAILED}", KILLED, 137, 7),
        (FAILED, f"sleep 0.4; {FAILED}", 1, None),
        (KILLED, f"sleep 0.4; {FAILED}", 137, None),
        ("exit 0", "exit 0", 0, None),
    ],
)
def test_ranks_that_were_killed_are_the_cause(
    base: str, part: str, code: int, failed_in: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_step, "_OTHERS_S", 60.0)  # shells are late on a busy machine
    step = JointStep(stand_in(base), [(7, stand_in(part))])
    assert step.wait() == code
    assert step.failed_in == failed_in


def test_ranks_that_wait_in_vain_are_killed_and_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_step, "_OTHERS_S", 0.5)
    killed = tmp_path / "killed"
    waiting = stand_in(f"until [ -e {killed} ]; do sleep 0.1; done; {KILLED}")
    step = JointStep(stand_in(FAILED), [(7, waiting)], end_ranks=lambda _: killed.touch())
    assert step.wait() == 1
    assert step.failed_in is None


@pytest.mark.parametrize(("base_fails", "in_companions"), [(False, True), (True, False)])
def test_ranks_of_companions_fail_alone_or_with_those_of_the_base(
    base_fails: bool, in_companions: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_step, "_OTHERS_S", 60.0 if base_fails else 0.5)
    killed, failed = tmp_path / "killed", tmp_path / "failed"
    # The process of the companion has ended, and its end has been seen.
    has_failed = f"[ -s {failed} ] && ! kill -0 $(cat {failed}) 2>/dev/null"
    waiting = stand_in(
        f"until {has_failed if base_fails else f'[ -e {killed} ]'}; do sleep 0.1; done; exit 1"
    )
    companion = stand_in(f"echo $$ >{failed}; exit 2")
    step = JointStep(waiting, [(7, companion)], end_ranks=lambda _: killed.touch())
    assert step.wait() == 2
    assert (step.failed_in, step.failed_in_companions) == (7, in_companions)


def test_ranks_that_others_leave_before_the_first_checkpoint_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_step, "_ALONE_S", 0.5)
    killed = tmp_path / "killed"
    waiting = f"until [ -e {killed} ]; do sleep 0.1; done; {KILLED}"
    step = JointStep(
        stand_in(waiting),
        [(7, stand_in("exit 0"))],
        end_ranks=lambda _: killed.touch(),
        wait_in_vain=lambda: True,
    )
    assert step.wait() == 0
    assert step.failed_in is None


def test_ranks_that_have_more_to_do_than_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joint_step, "_ALONE_S", 0.2)
    kills: list[object] = []
    parts = [(7, stand_in("exit 0"))]
    step = JointStep(stand_in("sleep 1; exit 0"), parts, end_ranks=kills.append)
    assert step.wait() == 0
    assert kills == []
