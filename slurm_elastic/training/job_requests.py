"""Requests to a running job, which all ranks carry out after the same step.

A request reaches one rank first: rank 0 those of esrun, any rank a SIGTERM.
Each step's all-reduce carries it to the other ranks. Everything here happens
between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slurm_elastic.job.rank_socket import RESTART_CODE
from slurm_elastic.training.checkpoint.checkpoint_manager import CheckpointManager
from slurm_elastic.training.job_log import log_line
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.reporting import Reporter
from slurm_elastic.training.sampler import Cursor
from slurm_elastic.training.signals import PEERS_END_S, STOPPED, Signals, exit_now
from slurm_elastic.training.step_requests import StepRequests

#: An hour: how long ranks wait for rank 0 to save, or to continue.
_LONG_S = 3600.0
_LINGER_S = 0.1
#: Seconds from a failed save to the next attempt to restart in another layout.
_RETRY_S = 60.0


class JobRequests:
    """Requests to one rank: collected before a step, carried out after it.

    Args:
        progress: returns the fraction of the training that is done at a cursor.
    """

    def __init__(
        self,
        *,
        signals: Signals,
        reporter: Reporter,
        checkpoint_manager: CheckpointManager,
        rank_group: RankGroup,
        progress: Callable[[Cursor], float],
    ) -> None:
        self._signals = signals
        self._reporter = reporter
        self._checkpoint_manager = checkpoint_manager
        self._rank_group = rank_group
        self._progress = progress
        self._restart_at = 0.0

    def collect(self, *, restart: bool) -> StepRequests:
        """Return the requests to this rank.

        Args:
            restart: whether another layout would be better.
        """
        leads = self._rank_group.rank == 0
        if leads and self._reporter.rehearse():
            self._checkpoint_manager.hurry()
        return StepRequests(
            notice=leads and (self._signals.notice or self._reporter.notice()),
            # A companion that Slurm ends leaves the training, which goes on.
            stop=self._signals.stop and not self._rank_group.companion,
            save=leads and self._checkpoint_manager.due(),
            restart=restart and time.monotonic() >= self._restart_at,
        )

    def carry_out(self, cursor: Cursor, agreed: StepRequests) -> None:
        """Carry out what all ranks have agreed on; does not return if the process ends by it."""
        if agreed.stop:
            self._stop(cursor)
        elif self.ended(cursor):
            return  # `finish` follows, which saves
        elif agreed.notice:
            self._pause(cursor)
        elif agreed.restart:
            self._restart(cursor)
        else:
            self._continue(cursor, save=agreed.save > 0)

    def ended(self, cursor: Cursor) -> bool:
        """Return whether the training is complete, so that only `finish` follows."""
        return self._progress(cursor) >= 1

    def finish(self, cursor: Cursor) -> None:
        """Save the complete training and end the group of ranks."""
        with self._signals.tolerate_ending_peers():
            self._checkpoint_manager.save(cursor)
            if self._rank_group.rank == 0:
                self._report_end(cursor, 0)
                self._rank_group.publish("finished", "")
            else:
                self._rank_group.wait_for("finished", _LONG_S)
            # A requeue after this repeats only what the script does after the training.
            self._allow_exit()
            self._rank_group.leave()
        self._signals.restore()

    def _continue(self, cursor: Cursor, *, save: bool) -> None:
        if save:
            with self._signals.tolerate_ending_peers():
                self._checkpoint_manager.save(cursor, wait=False)
            self._reporter.timer.pause()
        if self._rank_group.rank == 0:
            self._reporter.training(
                step=cursor.step,
                progress=self._progress(cursor),
                checkpoint=self._checkpoint_manager.report_fields(),
            )

    def _pause(self, cursor: Cursor) -> None:
        """Save, report it, and wait to be ended or resumed."""
        key = f"pause/{cursor.step}"
        if self._rank_group.rank == 0:
            self._lead(cursor, key)
        else:
            self._follow(cursor, key)
        self._signals.exit_at_once(False)
        # A SIGUSR2 that arrived during the wait belongs to the notice that is now over.
        self._signals.notice = False
        self._reporter.timer.pause()

    def _lead(self, cursor: Cursor, key: str) -> None:
        self._reporter.saving(step=cursor.step)
        if not self._checkpoint_manager.save(cursor):
            self._reporter.not_saved(
                step=cursor.step, checkpoint=self._checkpoint_manager.report_fields()
            )
            self._rank_group.publish(key, "failed")
            return
        self._rank_group.publish(key, "saved")
        self._reporter.saved(step=cursor.step, checkpoint=self._checkpoint_manager.report_fields())
        log_line(f"saved step {cursor.step}; waiting to be requeued or resumed")
        self._allow_exit()
        reason = self._reporter.wait(
            step=cursor.step, checkpoint=self._checkpoint_manager.report_fields()
        )
        log_line(f"continues after step {cursor.step}: {reason}")
        self._rank_group.publish(f"{key}/on", reason)

    def _follow(self, cursor: Cursor, key: str) -> None:
        with self._signals.tolerate_ending_peers():
            self._checkpoint_manager.save(cursor)
            # Not before: srun ends the rank that saves when another one exits.
            if self._rank_group.wait_for(key, _LONG_S) == "saved":
                self._allow_exit()
                self._rank_group.wait_for(f"{key}/on", _LONG_S)

    def _restart(self, cursor: Cursor) -> None:
        """Save, and exit on all ranks with the code that makes esrun start the step again."""
        key = f"restart/{cursor.step}"
        with self._signals.tolerate_ending_peers():
            saved = self._checkpoint_manager.save(cursor)
            if self._rank_group.rank == 0:
                self._rank_group.publish(key, "saved" if saved else "failed")
            else:
                saved = self._rank_group.wait_for(key, _LONG_S) == "saved"
        if not saved:
            self.postpone_restart()
            return
        if self._rank_group.rank == 0:
            log_line(f"saved step {cursor.step}; restarting in another layout")
        self._signals.exit_at_once(True)
        self._rank_group.barrier("leaving", PEERS_END_S)
        exit_now(RESTART_CODE)

    def postpone_restart(self) -> None:
        """Request another layout only after some time again, as saving before it has failed."""
        self._restart_at = time.monotonic() + _RETRY_S

    def _allow_exit(self) -> None:
        """Let SIGTERM end this rank at once from now on, as everything is saved."""
        # Rank 0 serves the store: it exits last, so that no other rank misses it.
        leads = self._rank_group.rank == 0 and self._rank_group.size > 1
        self._signals.exit_at_once(True, linger_s=_LINGER_S if leads else 0.0)

    def _stop(self, cursor: Cursor) -> None:
        """Save and exit on all ranks, as Slurm ends the job."""
        saved = self._checkpoint_manager.save(cursor)
        if self._rank_group.rank == 0:
            if saved:
                log_line(f"SIGTERM: saved step {cursor.step}")
            self._report_end(cursor, STOPPED)
            self._rank_group.publish("stopped", "")
        else:
            self._rank_group.wait_for("stopped", _LONG_S)
        self._rank_group.barrier("leaving", PEERS_END_S)
        exit_now(STOPPED)

    def _report_end(self, cursor: Cursor, code: int) -> None:
        self._reporter.ended(
            step=cursor.step,
            progress=self._progress(cursor),
            code=code,
            checkpoint=self._checkpoint_manager.report_fields(),
        )
