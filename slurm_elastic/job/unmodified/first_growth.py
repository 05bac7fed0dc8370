"""Check of a program that was begun on one GPU, at its first checkpoint on several.

If it was written for one process, each rank trains alone and writes the same checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

from slurm_elastic.job.launch import log_line
from slurm_elastic.job.unmodified.checkpoints.checkpoint_files import contents
from slurm_elastic.job.unmodified.resume_state import ResumeState, ResumeStateFile


class FirstGrowth:
    """Check of one job in all its attempts.

    Args:
        resume: state of the job.
        file: in which it is kept.
        are_alone: returns whether each rank trains alone, from the size of a checkpoint that they
            have written.

    Attributes:
        has_failed: whether they do in this attempt.
    """

    def __init__(
        self, resume: ResumeState, file: ResumeStateFile, are_alone: Callable[[int], bool]
    ) -> None:
        self.has_failed = False
        self._resume, self._file, self._are_alone = resume, file, are_alone

    def check(self, path: str, world: int) -> None:
        """Look at the ranks, at the first complete checkpoint of an attempt; record what is wrong.

        Args:
            path: of the checkpoint.
            world: number of ranks.
        """
        if self.has_failed or world == 1 or self._resume.start_world != 1:
            return
        self.has_failed = self._are_alone(sum(size for _, size, _ in contents(path).values()))
        if self.has_failed:
            problem = f"1 → {world} ranks: each trains alone and writes the same checkpoints"
            self._resume.jump = problem
            self._file.save(self._resume)
            log_line(
                f"{problem}, so they are ended and the job is not resized any more; a program for"
                " one process needs --elastic=1-1"
            )
