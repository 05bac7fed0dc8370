"""What others ask of a running job, and how all ranks obey together.

A request reaches one rank first: rank 0 hears esrun, any rank may hear
SIGTERM. Each step's all-reduce carries it to all of them, so that all stop
after the same step. All here happens between two steps.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from slurm_elastic.training.keeper import Keeper
from slurm_elastic.training.parallel import World
from slurm_elastic.training.reporting import Reporter
from slurm_elastic.training.sampler import Cursor
from slurm_elastic.training.signals import STOPPED, Signals, leave

#: An hour: how long ranks wait for rank 0 to save, or to be sent on.
_LONG_S = 3600.0
#: Ranks hear SIGTERM at slightly different times; one that left breaks the others' connections.
_TOGETHER_S = 3.0
_LINGER_S = 0.1


class Requests:
    """Obeys on behalf of one rank.

    Args:
        progress: fraction of the training that a cursor stands for.
    """

    def __init__(
        self,
        *,
        signals: Signals,
        reporter: Reporter,
        keeper: Keeper,
        world: World,
        progress: Callable[[Cursor], float],
    ) -> None:
        self._signals = signals
        self._reporter = reporter
        self._keeper = keeper
        self._world = world
        self._progress = progress
        self._pauses = 0

    def heard(self) -> tuple[bool, bool]:
        """Whether this rank has heard (a notice, the end)."""
        notice = self._world.rank == 0 and (self._signals.notice or self._reporter.notice())
        return notice, self._signals.stop

    def obey(self, cursor: Cursor, *, notice: bool, stop: bool) -> None:
        """Do what all ranks have agreed on; does not return if that is the end."""
        if stop:
            self._stop(cursor)
        elif self._progress(cursor) >= 1:
            return  # what follows is `finish`, which saves
        elif notice:
            self._pause(cursor)
        elif self._world.rank == 0:
            self._go_on(cursor)

    def finish(self, cursor: Cursor) -> None:
        """The training is complete: save it and part."""
        with self.together():
            if self._world.rank == 0:
                self._keeper.save(cursor)
                self._report_end(cursor, 0)
                self._world.tell("finished", "")
            else:
                self._world.hear("finished", _LONG_S)
            # What the script does after the training belongs into the next run of this job.
            self._nothing_to_lose()
            self._world.leave()
        self._signals.restore()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A broken connection is no error if the others were told to end just before us."""
        try:
            yield
        except RuntimeError:
            end = time.monotonic() + _TOGETHER_S
            while time.monotonic() < end:
                if self._signals.stop:
                    leave(STOPPED)
                time.sleep(0.05)
            raise

    def _go_on(self, cursor: Cursor) -> None:
        if self._reporter.rehearse():
            self._keeper.hurry()
        if self._keeper.due():
            self._keeper.save(cursor)
            self._reporter.timer.pause()
        self._reporter.training(
            step=cursor.step, progress=self._progress(cursor), checkpoint=self._keeper.facts()
        )

    def _pause(self, cursor: Cursor) -> None:
        """Save, say so, and wait to be ended or sent on."""
        self._pauses += 1
        key = f"pause/{self._pauses}"
        if self._world.rank == 0:
            self._lead(cursor, key)
        else:
            self._follow(key)
        self._signals.leave_at_once(False)
        # A signal that came late belongs to the notice that is now over.
        self._signals.notice = False
        self._reporter.timer.pause()

    def _lead(self, cursor: Cursor, key: str) -> None:
        self._reporter.saving(step=cursor.step)
        if not self._keeper.save(cursor):
            self._reporter.not_saved(step=cursor.step, checkpoint=self._keeper.facts())
            self._world.tell(key, "failed")
            return
        self._world.tell(key, "saved")
        self._reporter.saved(step=cursor.step, checkpoint=self._keeper.facts())
        say(f"saved step {cursor.step}; waiting to be moved")
        self._nothing_to_lose()
        why = self._reporter.wait(step=cursor.step, checkpoint=self._keeper.facts())
        say(f"goes on after step {cursor.step}: {why}")
        self._world.tell(f"{key}/on", why)

    def _follow(self, key: str) -> None:
        with self.together():
            # Only now: a rank that ends earlier makes srun end the one that saves.
            if self._world.hear(key, _LONG_S) == "saved":
                self._nothing_to_lose()
                self._world.hear(f"{key}/on", _LONG_S)

    def _nothing_to_lose(self) -> None:
        """All is saved: from now on SIGTERM ends this rank at once."""
        # The store is in rank 0: let the others hear SIGTERM before they miss it.
        leads = self._world.rank == 0 and self._world.size > 1
        self._signals.leave_at_once(True, linger_s=_LINGER_S if leads else 0.0)

    def _stop(self, cursor: Cursor) -> None:
        """Slurm ends the job: save, and leave together."""
        if self._world.rank == 0:
            if self._keeper.save(cursor):
                say(f"told to end: saved step {cursor.step}")
            self._report_end(cursor, STOPPED)
            self._world.tell("stopped", "")
        else:
            self._world.hear("stopped", _LONG_S)
        self._world.gather("leaving", _TOGETHER_S)
        leave(STOPPED)

    def _report_end(self, cursor: Cursor, code: int) -> None:
        self._reporter.ended(
            step=cursor.step,
            progress=self._progress(cursor),
            code=code,
            checkpoint=self._keeper.facts(),
        )


def say(line: str) -> None:
    """One line for the job's log."""
    sys.stderr.write(f"slurm-elastic: {line}\n")
    sys.stderr.flush()
