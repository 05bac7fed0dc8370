"""Commands that a batch script chooses by the newest checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.job.unmodified.program_command import (
    is_equal_command,
    program_command,
    repeats_command,
)


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., str]:
    for step in (0, 1, 100, 200):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"{step}").mkdir()

    def command(*arguments: str, pattern: str = "step_*", **environ: str) -> str:
        return program_command(["python", *arguments], f"{tmp_path}/{pattern}", environ)

    return command


def test_a_command_is_its_arguments_and_what_names_a_checkpoint(
    command: Callable[..., str],
) -> None:
    first = command("train.py", HOME="/home/alice", SLURM_RESTART_COUNT="1")
    assert repeats_command(command("train.py", HOME="/a", SLURM_RESTART_COUNT="2"), first)
    assert not repeats_command(command("train.py", "--resume", "out/step_100"), first)
    resumed = command("train.py", RESUME="out/step_100/model.pt")
    later = command("train.py", RESUME="out/step_200/model.pt")
    assert not repeats_command(resumed, first)
    assert not repeats_command(later, resumed)
    assert not repeats_command(first, resumed), "it begins anew"
    assert repeats_command(resumed, resumed)
    assert repeats_command(command("train.py", RESUME="out/step_300"), first), "no checkpoint"
    assert repeats_command(command("train.py", SLURM_JOB_NAME="step_100"), first)


def test_a_variable_that_is_always_the_same_names_no_checkpoint(
    command: Callable[..., str],
) -> None:
    none = command(pattern="none", PYTHONHASHSEED="0", CUDA_VISIBLE_DEVICES="0")
    zero = command(pattern="*", PYTHONHASHSEED="0", CUDA_VISIBLE_DEVICES="0,1")
    assert repeats_command(zero, none)
    assert repeats_command(none, zero)
    assert not repeats_command(command(pattern="*", RESUME_STEP="200"), none)


@pytest.mark.parametrize("earlier", ["", "a5c0", "[]", '{"program": 1}', '{"variables": 3}'])
def test_what_is_kept_of_an_older_version_is_repeated_by_none(
    command: Callable[..., str], earlier: str
) -> None:
    assert not repeats_command(command("train.py"), earlier)


def test_another_here_document_is_another_command():
    command, same, other = (
        program_command(["python", "-"], "none-*", {}, stdin=text) for text in (b"a", b"a", b"b")
    )
    assert repeats_command(same, command)
    assert not repeats_command(other, command)
    assert not repeats_command(program_command(["python", "-"], "none-*", {}), command)


def test_commands_of_an_older_version_are_not_equal(command: Callable[..., str]) -> None:
    assert not is_equal_command("{}", "{}")
    assert not is_equal_command("", command("a"))
    assert is_equal_command(command("a", HOSTNAME="x"), command("a", HOSTNAME="y"))
