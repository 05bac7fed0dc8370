"""What others ask of a running job, and how all ranks obey together.

A request reaches one rank first: rank 0 hears esrun, any rank may hear
SIGTERM. Each step's all-reduce carries it to all of them, so that all stop
after the same step. All here happens between two steps.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from slurm_elastic.job.rank_socket import RESTART_CODE
from slurm_elastic.training.checkpoint.checkpoint_manager import CheckpointManager
from slurm_elastic.training.parallel.parallel_strategy import StrategySettings
from slurm_elastic.training.parallel.process_group import World
from slurm_elastic.training.reporting import Reporter
from slurm_elastic.training.sampler import Cursor
from slurm_elastic.training.signals import STOPPED, TOGETHER_S, Signals, leave

#: An hour: how long ranks wait for rank 0 to save, or to be sent on.
_LONG_S = 3600.0
_LINGER_S = 0.1
#: After a save that failed, so long until ranks try again to be laid out anew.
_AGAIN_S = 60.0


class JobRequests:
    """Obeys on behalf of one rank.

    Args:
        progress: fraction of the training that a cursor stands for.
    """

    def __init__(
        self,
        *,
        signals: Signals,
        reporter: Reporter,
        keeper: CheckpointManager,
        world: World,
        progress: Callable[[Cursor], float],
    ) -> None:
        self._signals = signals
        self._reporter = reporter
        self._keeper = keeper
        self._world = world
        self._progress = progress
        self._pauses = 0
        self._again_at = 0.0

    def heard(self, *, again: bool) -> StrategySettings:
        """What this rank has heard; the job adds what it wishes itself.

        Args:
            again: whether it would be better to start in another layout.
        """
        leads = self._world.rank == 0
        if leads and self._reporter.rehearse():
            self._keeper.hurry()
        return StrategySettings(
            notice=leads and (self._signals.notice or self._reporter.notice()),
            stop=self._signals.stop,
            save=leads and self._keeper.due(),
            again=again and time.monotonic() >= self._again_at,
        )

    def obey(self, cursor: Cursor, asked: StrategySettings) -> None:
        """Do what all ranks have agreed on; does not return if that is the end."""
        if asked.stop:
            self._stop(cursor)
        elif self._progress(cursor) >= 1:
            return  # what follows is `finish`, which saves
        elif asked.notice:
            self._pause(cursor)
        elif asked.again:
            self._again(cursor)
        else:
            self._go_on(cursor, save=asked.save > 0)

    def finish(self, cursor: Cursor) -> None:
        """The training is complete: save it and part."""
        with self._signals.together():
            self._keeper.save(cursor)
            if self._world.rank == 0:
                self._report_end(cursor, 0)
                self._world.tell("finished", "")
            else:
                self._world.hear("finished", _LONG_S)
            # What the script does after the training belongs into the next run of this job.
            self._nothing_to_lose()
            self._world.leave()
        self._signals.restore()

    def _go_on(self, cursor: Cursor, *, save: bool) -> None:
        if save:
            with self._signals.together():
                self._keeper.save(cursor, wait=False)
            self._reporter.timer.pause()
        if self._world.rank == 0:
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
            self._follow(cursor, key)
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

    def _follow(self, cursor: Cursor, key: str) -> None:
        with self._signals.together():
            self._keeper.save(cursor)
            # Only now: a rank that ends earlier makes srun end the one that saves.
            if self._world.hear(key, _LONG_S) == "saved":
                self._nothing_to_lose()
                self._world.hear(f"{key}/on", _LONG_S)

    def _again(self, cursor: Cursor) -> None:
        """Save, and leave together with the code by which esrun starts the step again."""
        self._pauses += 1
        key = f"again/{self._pauses}"
        with self._signals.together():
            saved = self._keeper.save(cursor)
            if self._world.rank == 0:
                self._world.tell(key, "saved" if saved else "failed")
            else:
                saved = self._world.hear(key, _LONG_S) == "saved"
        if not saved:
            self._again_at = time.monotonic() + _AGAIN_S
            return
        if self._world.rank == 0:
            say(f"saved step {cursor.step}; starting again in another layout")
        self._signals.leave_at_once(True)
        self._world.gather("leaving", TOGETHER_S)
        leave(RESTART_CODE)

    def _nothing_to_lose(self) -> None:
        """All is saved: from now on SIGTERM ends this rank at once."""
        # The store is in rank 0: let the others hear SIGTERM before they miss it.
        leads = self._world.rank == 0 and self._world.size > 1
        self._signals.leave_at_once(True, linger_s=_LINGER_S if leads else 0.0)

    def _stop(self, cursor: Cursor) -> None:
        """Slurm ends the job: save, and leave together."""
        saved = self._keeper.save(cursor)
        if self._world.rank == 0:
            if saved:
                say(f"told to end: saved step {cursor.step}")
            self._report_end(cursor, STOPPED)
            self._world.tell("stopped", "")
        else:
            self._world.hear("stopped", _LONG_S)
        self._world.gather("leaving", TOGETHER_S)
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
