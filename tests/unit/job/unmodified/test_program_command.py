"""Commands that a batch script chooses by the newest checkpoint."""

from pathlib import Path

import pytest

from slurm_elastic.job.unmodified.program_command import command_digest
from tests.support.job.script_job import ScriptJob


def test_a_command_is_its_arguments_and_what_names_a_checkpoint(tmp_path: Path) -> None:
    for step in (100, 200):
        (tmp_path / f"step_{step}").mkdir()

    def digest(*arguments: str, **environ: str) -> str:
        return command_digest(["python", *arguments], f"{tmp_path}/step_*", environ)

    first = digest("train.py", HOME="/home/alice", SLURM_RESTART_COUNT="1")
    assert digest("train.py", HOME="/home/alice2", SLURM_RESTART_COUNT="2") == first
    assert digest("train.py", "--resume", "out/step_100") != first
    resumed = digest("train.py", RESUME="out/step_100/model.pt")
    assert resumed not in (first, digest("train.py", RESUME="out/step_200/model.pt"))
    assert digest("train.py", RESUME="out/step_300") == first, "no checkpoint"
    assert digest("train.py", SLURM_JOB_NAME="step_100") == first


def test_numbers_of_gpus_and_threads_name_no_checkpoint(tmp_path: Path) -> None:
    digests = set()
    for step in (0, 1, 20):
        environ = {"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "1", "SHLVL": "1"}
        digests.add(command_digest(["train"], f"{tmp_path}/*", environ))
        (tmp_path / str(step)).mkdir()
    assert len(digests) == 1
    assert command_digest(["train"], f"{tmp_path}/*", {"RESUME_STEP": "20"}) not in digests


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
        last = job.watch.repeats_command
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
    assert not ScriptJob(tmp_path, run=2, command="a --resume s1.pt").watch.repeats_command
