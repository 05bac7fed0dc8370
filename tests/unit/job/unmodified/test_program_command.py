"""Commands that a batch script chooses by the newest checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.job.unmodified.program_command import program_command, repeats_command
from tests.support.job.script_job import ScriptJob


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


@pytest.mark.parametrize(
    ("commands", "repeats"),
    [
        (("a", "a"), True),  # the script finds its checkpoint itself
        (("a", "a --resume last.pt", "a --resume last.pt"), True),
        (("a", "a --resume s1.pt"), False),
        (("a", "a --resume s1.pt", "a --resume s2.pt"), False),
        (("a",), False),  # not known yet
    ],
)
def test_a_run_repeats_the_command_of_the_run_before(
    tmp_path: Path, commands: tuple[str, ...], repeats: bool
) -> None:
    for run, command in enumerate(commands):
        job = ScriptJob(tmp_path, run=run, command=command)
        last = job.watch.command.is_repeated
        job.save()
    assert last == repeats


def test_a_run_without_a_checkpoint_shows_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ScriptJob(tmp_path, command="a").save()
    chosen = ScriptJob(tmp_path, run=1, command="a --resume s1.pt")
    chosen.watch.start()
    chosen.watch.stop()
    assert "command differs from that of the last run" in capsys.readouterr().err
    assert not ScriptJob(tmp_path, run=2, command="a --resume s1.pt").watch.command.is_repeated


def test_another_here_document_is_another_command():
    command, same, other = (
        program_command(["python", "-"], "none-*", {}, stdin=text) for text in (b"a", b"a", b"b")
    )
    assert repeats_command(same, command)
    assert not repeats_command(other, command)
    assert not repeats_command(program_command(["python", "-"], "none-*", {}), command)
