"""Commands of a job's runs, and whether the program may be started again with the present one."""

import os
from pathlib import Path

import pytest

from slurm_elastic.job.unmodified import command_history
from slurm_elastic.job.unmodified.command_history import CommandHistory
from slurm_elastic.job.unmodified.program_command import program_command
from slurm_elastic.job.unmodified.resume_state import ResumeState
from tests.support.job.script_job import ScriptJob


def command(*words: str, **environ: str) -> str:
    return program_command(["python", *words], "none-*", environ)


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


def test_a_command_of_two_sizes_does_not_depend_on_them(tmp_path: Path) -> None:
    same = command("train.py", MASTER_ADDR="g01")
    ScriptJob(tmp_path, command=same).save()
    rehearsed = ScriptJob(tmp_path, run=1, command=same)
    assert not rehearsed.watch.command.has_another_size, "both on one rank"
    rehearsed.save()
    grown = ScriptJob(tmp_path, run=2, world=2, command=command("train.py", MASTER_ADDR="g02"))
    assert grown.watch.command.is_repeated
    assert grown.watch.command.has_another_size
    grown.save()
    moved = ScriptJob(tmp_path, run=3, world=2, command=same)
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
        ScriptJob(tmp_path, run=run, command=small).save()
    for run in (2, 3):
        larger = ScriptJob(tmp_path, run=run, world=2, command=grown)
        assert not larger.watch.command.has_another_size
        larger.save()


@pytest.mark.parametrize(
    ("script", "may", "line"),
    [
        ("#!/bin/sh\nesrun python train.py\n", True, ""),
        ("esrun python train.py --accum $((64 / SLURM_NTASKS))", False, "mentions SLURM_NTASKS"),
        (None, False, "could not be read"),
    ],
)
def test_a_batch_script_that_mentions_no_size_lets_the_command_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str | None,
    may: bool,
    line: str,
) -> None:
    monkeypatch.setattr(command_history, "read_batch_script", {7: script}.get)
    monkeypatch.setattr(command_history, "called_scripts", lambda *_: [])
    same = command("train.py")
    history = CommandHistory(same, 1, ResumeState(command=same, sizes=(1,)))
    assert not history.may_start_again, "not read yet"
    history.read_batch_script(7)
    assert history.may_start_again == may
    assert line in capsys.readouterr().err


def test_a_file_that_the_batch_script_reads_may_mention_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "settings.sh"
    settings.write_text("A=$((64 / SLURM_NTASKS))")
    monkeypatch.setattr(command_history, "read_batch_script", {7: f"source {settings}"}.get)
    monkeypatch.setattr(os, "getpid", lambda: 1)  # no script is between Slurm and esrun
    same = command("train.py")
    history = CommandHistory(same, 1, ResumeState(command=same, sizes=(1,)))
    history.read_batch_script(7)
    assert not history.may_start_again
    assert f"esrun: {settings} mentions SLURM_NTASKS: until" in capsys.readouterr().err
