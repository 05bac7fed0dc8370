"""Words of a batch script that depend on the size of its job, and what follows from them."""

import doctest
from pathlib import Path

import pytest

from slurm_elastic.job.unmodified import size_words
from slurm_elastic.job.unmodified.program_command import is_equal_command, program_command
from slurm_elastic.job.unmodified.size_words import read_batch_script, size_word
from tests.support.job.script_job import ScriptJob as Job


def command(*words: str, **environ: str) -> str:
    return program_command(["python", *words], "none-*", environ)


def test_examples() -> None:
    assert doctest.testmod(size_words).failed == 0


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("#SBATCH --gpus=2\nesrun python train.py\n", ""),
        ("# SLURM_NTASKS is not needed\nesrun python train.py", ""),
        ("esrun python train.py --accum $((64 / SLURM_NTASKS))", "SLURM_NTASKS"),
        ("G=${SLURM_GPUS_ON_NODE:-1}", "SLURM_GPUS_ON_NODE"),
        ("hosts=$(scontrol show hostnames $SLURM_JOB_NODELIST)", "SLURM_JOB_NODELIST"),
        ("n=$(nvidia-smi -L | wc -l)", "nvidia-smi"),
        ("n=$(echo $CUDA_VISIBLE_DEVICES | tr , ' ' | wc -w)", "CUDA_VISIBLE_DEVICES"),
        ("echo $SLURM_JOB_ID $SLURM_ARRAY_TASK_ID", ""),
    ],
)
def test_words(script: str, word: str) -> None:
    assert size_word(script) == word


def test_the_script_is_read_from_slurmctld(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tool = tmp_path / "scontrol"
    tool.write_text('#!/bin/sh\n[ "$*" = "write batch_script 7 -" ] && echo "#!/bin/bash"\n')
    tool.chmod(0o755)
    assert read_batch_script(7) == "#!/bin/bash\n"
    assert read_batch_script(8) is None
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert read_batch_script(7) is None


def test_a_command_of_two_sizes_does_not_depend_on_them(tmp_path: Path) -> None:
    same = command("train.py", MASTER_ADDR="g01")
    Job(tmp_path, command=same).save()
    rehearsed = Job(tmp_path, run=1, command=same)
    assert not rehearsed.watch.command.has_another_size, "both on one rank"
    rehearsed.save()
    grown = Job(tmp_path, run=2, world=2, command=command("train.py", MASTER_ADDR="g02"))
    assert grown.watch.command.is_repeated
    assert grown.watch.command.has_another_size
    grown.save()
    moved = Job(tmp_path, run=3, world=2, command=same)
    assert moved.watch.command.has_another_size


@pytest.mark.parametrize(
    "grown",
    [
        command("train.py", "--accum", "4"),
        command("train.py", ACCUM="4"),
        command("train.py", ACCUM="8", LOCAL_BATCH="4"),
    ],
)
def test_a_command_that_was_computed_from_the_size(tmp_path: Path, grown: str) -> None:
    small = command("train.py", *(["--accum", "8"] if "ACCUM" not in grown else []), ACCUM="8")
    for run in (0, 1):
        Job(tmp_path, run=run, command=small).save()
    for run in (2, 3):
        larger = Job(tmp_path, run=run, world=2, command=grown)
        assert not larger.watch.command.has_another_size
        larger.save()


def test_commands_of_an_older_version_are_not_equal() -> None:
    assert not is_equal_command("{}", "{}")
    assert not is_equal_command("", command("a"))
    assert is_equal_command(command("a", HOSTNAME="x"), command("a", HOSTNAME="y"))
