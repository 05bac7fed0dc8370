"""Companions of a job whose program is also started again on them, all ranks at once.

A program that cannot regroup has ranks in companions from its start (*parts*). At a change it has
saved, its ranks are ended, and it is started again on the base and the companions that stay or are
new. When a part is lost, it is started again on the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from slurm_elastic.core.reason import Reason
from slurm_elastic.job.companions.companion_set import CompanionSet
from slurm_elastic.job.companions.joint_step import KILLED_CODE
from slurm_elastic.job.companions.rank_restart import ConnectDeadline, RankRestart
from slurm_elastic.job.environment.joint_shape import CompanionPart

#: Longest wait for the thread of the set, which may be submitting companions.
_THREAD_S = 60.0


class ProgramCompanions(CompanionSet):
    """Companions of one job, over all starts of its program.

    Args:
        end_ranks: kills all ranks of the program.
        may_repeat: returns whether its command still resumes from the newest checkpoint.
        more: arguments of `CompanionSet`.

    Attributes:
        restart: of the program.
    """

    def __init__(
        self,
        *arguments: Any,
        end_ranks: Callable[[], object],
        may_repeat: Callable[[], bool] = lambda: True,
        **more: Any,
    ) -> None:
        super().__init__(*arguments, **more)
        self._may_repeat = may_repeat
        self.restart = RankRestart(end_ranks)
        self._connecting = ConnectDeadline(self._clock)
        self._is_known = not self._regroups or self._launch.options.checkpoint is not None

    @property
    def due_change(self) -> int | None:
        """Number of the change that the next start of the program carries out; None: there is none.

        A program is also started again because a companion was lost, without any change.
        """
        change = self._change
        if change is None or change.is_over or change.is_restarted:
            return None
        return change.number if change.orders.restart == "now" else None

    def restarts(self, code: int, failed_in: int | None, *, on_trial: bool) -> bool:
        """Return whether the program, which has ended, is started again with other companions.

        Args:
            code: exit code of the program.
            failed_in: companion whose ranks failed first; None: none.
            on_trial: whether it has completed no checkpoint since its start.
        """
        parts = [job.job_id for job in self._parts()]
        if code and parts and self._server is not None and not self.restart.is_due:
            if failed_in is not None and code == KILLED_CODE and not on_trial:
                killed = Reason("companion-killed", job=str(failed_in))
                self._post(lambda: self._lose(failed_in, killed))
            else:
                self._server.confirm(parts)
            self._wait_for_thread(self._no_event)
        return code != 0 and self.restart.is_due

    def begin_start(self) -> tuple[CompanionPart, ...]:
        """Return the companions in which the next start of the program has ranks."""
        self._wait_for_thread(self._handle_start)
        return tuple(job.part(self._launch) for job in self._parts())

    def started(self) -> None:
        """Take that the program has been started, with the companions of `begin_start`."""
        self._wait_for_thread(self._handle_started)

    def end_start(self, *, failed: bool) -> None:
        """End the companions of a start that has ended, but for the parts of the next one."""
        if not self.restart.is_due and not self._parts():
            self.end_attempt(failed=failed)

    def _wait_for_thread(self, event: Callable[[], None]) -> None:
        """Wait until the thread has handled an event, and those posted before it."""
        done = threading.Event()
        self._post(event)
        self._post(done.set)
        done.wait(_THREAD_S)

    # In the thread of the set.

    def _meet_deadlines(self, now: float) -> None:
        super()._meet_deadlines(now)
        self._demand_restart()

    def _demand_restart(self) -> None:
        """End the ranks, as soon as all are there with which they are to be started again."""
        change = self._change
        if change is None or change.is_over or change.is_restarted:
            return
        if change.orders.restart != "now" or self.restart.is_due or change.orders.cancel:
            return
        joins = [job for job in self._jobs.values() if job.change == change.number and job.awaited]
        if any(job.state == "submitted" for job in joins):
            if not self._connecting.is_over(change.number):
                return
            if not any(job.state == "running" for job in joins):
                self._give_up(change, lambda job: Reason("companion-not-running", job=job))
                return
        self.restart.demand(f"change {change.number} of its GPUs")

    def _handle_start(self) -> None:
        """Carry out a change whose ranks have ended."""
        change = self._change
        if change is not None and self.due_change is not None:
            for job_id in change.orders.leave:
                job = self._jobs.get(job_id)
                if job is not None and job.state != "ended":
                    self._end(job)
            for job in list(self._jobs.values()):
                if job.change == change.number and job.state == "submitted":
                    late = Reason("companion-not-running", job=str(job.job_id))
                    self._lose(job.job_id, late)
                elif job.change == change.number and job.state == "running":
                    job.state, job.is_part = "starting", True
            change.is_restarted = True
        self.restart.done()

    def _handle_started(self) -> None:
        parts = self._parts()
        for job in parts:
            job.state = "joined"
        nodes = self._nodes({job.job_id for job in parts})
        shape = {"gpus": self._launch.ranks, "nodes": len(nodes)}
        self._state.set_own({**self._ability(), **shape})

    def _lose(self, job_id: int, reason: Reason, *, end_by: float = 0.0) -> None:
        was_part = job_id in [job.job_id for job in self._parts()]
        super()._lose(job_id, reason, end_by=end_by)
        if was_part:
            self.restart.demand(f"companion {job_id} is lost")

    def _publish(self) -> None:
        super()._publish()
        may = self._may_restart()
        if self._state.report().restarts != may:
            self._state.set_own({"restarts": may})

    def _may_restart(self) -> bool:
        """Return whether all ranks can be started again on other companions.

        Not before a training of the library has said whether it can regroup; not with options of
        the user for srun, which are about the nodes of one job; not with arguments that the batch
        script may have chosen by the newest checkpoint of its start.
        """
        joined = any(job.desired or job.has_ranks for job in self._jobs.values())
        is_known = self._is_known or bool(self._parts())
        can_start = self._may_repeat() and not self._launch.options.srun_args
        return is_known and not joined and can_start

    def _handle_group(self, fields: dict[str, Any]) -> None:
        self._is_known = self._is_known or "can" in fields
        super()._handle_group(fields)
