"""Check of a program that was begun on one GPU, at its first checkpoint on several.

If it was written for one process, each rank trains alone and writes the same checkpoints: the ranks
are ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from slurm_elastic.job.launch import log_line
from slurm_elastic.job.unmodified.checkpoints.checkpoint_files import contents
from slurm_elastic.job.unmodified.checkpoints.checkpoint_scanner import ScriptCheckpoint
from slurm_elastic.job.unmodified.resume_state import ResumeState, ResumeStateFile

#: Saves at which the ranks are looked at, until it is clear whether they train alone (our choice):
#: one of them may write its file later than another, and a save of several files may be shown to be
#: over by a small one while a large one is written anew.
_MOST_SAVES = 3
#: Ranks of whose saves no end is seen for so long are ended when nothing has changed for the second
#: time, seconds (our choice).
_LATE_S, _PAUSE_S = 60.0, 2.0


class FirstGrowth:
    """Check of one job in all its attempts.

    Args:
        resume: state of the job.
        file: the file that it is kept in.
        are_alone: returns whether each rank trains alone, from the size of a checkpoint that they
            have written; None: perhaps.
        end_ranks: ends them then.
        clock: monotonic seconds.

    Attributes:
        has_failed: whether they do in this attempt.
        is_open: whether it is not known yet; the next save may show it.
    """

    def __init__(
        self,
        resume: ResumeState,
        file: ResumeStateFile,
        are_alone: Callable[[int], bool | None],
        end_ranks: Callable[[], object],
        clock: Callable[[], float],
    ) -> None:
        self.has_failed = self.is_open = False
        self._resume, self._file, self._are_alone = resume, file, are_alone
        self._end_ranks, self._clock = end_ranks, clock
        self._failed_at, self._is_ended = 0.0, False
        self._saves = set[int]()
        self._size = 0

    def begin_attempt(self, newest: Iterable[str], world: int) -> None:
        """Begin to look at the ranks of another attempt.

        Args:
            newest: paths of the newest checkpoints of the attempts before.
            world: number of ranks.
        """
        self.has_failed = self.is_open = self._is_ended = False
        self._saves.clear()
        self._size = 0
        if self._concerns(world):
            self._size = max(map(_size, newest), default=0)

    def check(self, checkpoint: ScriptCheckpoint, world: int) -> None:
        """Look at the ranks, at the first complete checkpoint of an attempt; record what is wrong.

        Args:
            checkpoint: complete.
            world: number of ranks.
        """
        if self.has_failed or not self._concerns(world):
            return
        alone = self._are_alone(max(self._size, _size(checkpoint.path)))
        self._saves.add(checkpoint.save)
        self.has_failed = alone is True
        self.is_open = alone is None and len(self._saves) < _MOST_SAVES
        if self.has_failed:
            self._failed_at = self._clock()
            problem = f"1 → {world} ranks: each trains alone and writes the same checkpoints"
            self._resume.jump = problem
            self._file.save(self._resume)
            log_line(
                f"{problem}, so they are ended and the job is not resized any more; a program for"
                " one process needs --elastic=1-1"
            )

    @property
    def must_end(self) -> bool:
        """Whether the ranks train alone and have not been ended."""
        return self.has_failed and not self._is_ended

    def is_late(self, changed_at: float) -> bool:
        """Return whether the ranks are to be ended although the end of a save is not seen.

        Args:
            changed_at: when a checkpoint changed last, monotonic seconds.
        """
        now = self._clock()
        return now - self._failed_at >= _LATE_S and now - changed_at >= _PAUSE_S

    def end(self) -> None:
        """End the ranks."""
        self._is_ended = True
        self._end_ranks()

    def _concerns(self, world: int) -> bool:
        return world > 1 and self._resume.start_world == 1


def _size(path: str) -> int:
    return sum(size for _, size, _ in contents(path).values())
