"""Comparison of a run's command with those of earlier runs: whether it may be started again.

The batch script may have chosen the command by the newest checkpoint, or by the number of GPUs. On
other GPUs, in the same run of the job, it would then train on from an old checkpoint, or with the
settings of another size.
"""

from __future__ import annotations

import os

from slurm_elastic.job.launch import log_line
from slurm_elastic.job.unmodified.program_command import is_equal_command, repeats_command
from slurm_elastic.job.unmodified.resume_state import ResumeState
from slurm_elastic.job.unmodified.size_words import (
    ScriptFile,
    called_scripts,
    read_batch_script,
    size_word,
)


class CommandHistory:
    """Command of this run, and the runs that had the same.

    Args:
        command: of this run (`program_command`); "": not known.
        world: number of ranks of this run.
        resume: state of earlier runs; `record` changes it.

    Attributes:
        is_repeated: whether the run of before, which has completed a checkpoint, had the same
            command, so that it names none of the script's checkpoints.
    """

    def __init__(self, command: str, world: int, resume: ResumeState) -> None:
        self._command, self._resume = command, resume
        self.is_repeated = repeats_command(command, resume.command)
        self._sizes = self._sizes_of_command(world)
        #: Whether the batch script mentions the size of its job; None: not known.
        self._mentions_size: bool | None = None

    def _sizes_of_command(self, world: int) -> tuple[int, ...]:
        """Return the ranks of the runs, this one included, that had the command of this one."""
        sizes = self._resume.sizes if self.is_repeated else ()
        last = sizes[-1] if sizes else world
        if last != world and not is_equal_command(self._command, self._resume.command):
            return (world,)
        return (*(size for size in sizes if size != world), world)

    @property
    def has_another_size(self) -> bool:
        """Whether a run on another number of ranks had the same command."""
        return len(self._sizes) > 1

    @property
    def may_start_again(self) -> bool:
        """Whether the program resumes from its newest checkpoint with it, on other GPUs."""
        return self.is_repeated and (self.has_another_size or self._mentions_size is False)

    def read_batch_script(self, job_id: int) -> None:
        """Look whether the batch script mentions the size of its job, if that decides."""
        if not self.is_repeated or self.has_another_size:
            return
        text = read_batch_script(job_id)
        if text is None:
            log_line(
                "the batch script could not be read (scontrol write batch_script): until the"
                " program's command was the same on two numbers of GPUs the job is resized by"
                " requeues only"
            )
            return
        scripts = [ScriptFile("the batch script", text), *called_scripts(text, os.getpid())]
        for script in scripts:
            if word := size_word(script.text):
                log_line(
                    f"{script.path} mentions {word}: until the program's command was the same on"
                    " two numbers of GPUs the job is resized by requeues only"
                )
                return
        self._mentions_size = False

    def log_difference(self) -> None:
        """Log once, at the start, that the command differs from that of the run before."""
        if self._resume.command and not self.is_repeated:
            log_line(
                "the program's command differs from that of the last run: it may name a checkpoint"
                " or depend on the number of GPUs; until it is the same again the job is resized by"
                " requeues only"
            )

    def record(self) -> None:
        """Record the command in the state: a checkpoint is complete."""
        self._resume.command = self._command
        if self._command:
            self._resume.sizes = self._sizes
