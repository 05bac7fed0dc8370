"""Trial of an attempt: whether a failing program ends the job (docs/esrun-exit.md).

A start of the program is *on trial* until it has completed a checkpoint, if the job had completed
one in an earlier start. A program that fails on trial does not end the job: esrun stays, reports
it, and waits for the controller, which takes the job back to the shape in which it worked last.
Without a controller the program is started again in place, after longer and longer pauses.

A start whose members have changed is on trial, too, until it has completed a checkpoint after that.
Its companions have ended with it, so the program is started again on the job's own GPUs.

A training that runs out of memory is reported, and esrun waits, too, if the library has reported
the size of its model: the controller may know an execution plan that needs less.

Whether earlier attempts had a checkpoint is kept in an empty file beside that of
`unmodified.resume_state`. Where it could not be written the controller is asked, and decides.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence

from slurm_elastic.job.environment.state_directory import state_directories, versions, write_own
from slurm_elastic.job.launch import log_line
from slurm_elastic.job.report_state import ReportState

#: Slurm ends the ranks of a job a moment before esrun: no failure of theirs.
_GRACE_S = 3.0
#: Seconds for which esrun waits for an answer if it does not know whether the attempt is on trial.
_ASK_S = 30.0
#: Seconds without an answer of the controller after which the program is started again in place;
#: doubled each time, up to the second value.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 120.0, 1800.0
#: Seconds after which the program is started again although the controller answers.
_PATIENCE_S = 1800.0
#: Seconds without an answer after which exit code 0 of a program is accepted as its end.
_ACCEPT_S = 900.0
_REPORT_EVERY_S, _TICK_S = 5.0, 0.2


class AttemptTrial:
    """Trial of the starts in one run of a job.

    Args:
        state: its report, and the controller's orders.
        run_id: name of the job's file.
        run: restart count.
        has_controller: whether one is configured.
        directories: for the file; None: those of `state_directory`.
        clock: monotonic seconds, as that of `state`.
    """

    def __init__(
        self,
        state: ReportState,
        *,
        run_id: str,
        run: int,
        has_controller: bool,
        directories: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directories = state_directories(os.environ) if directories is None else directories
        self._marker = f"{run_id}.trained"
        self._state, self._run, self._clock = state, run, clock
        self._has_controller = has_controller
        self._trained = run > 0 and bool(versions(self._directories, self._marker))
        self._marked = self._trained
        self._base: int | None = None
        self._start = 0
        #: Step of the last change of members, and GPUs since then; None: there was none.
        self._members: tuple[int, int] | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._stopped = threading.Event()
        state.on_update = self.note

    def begin(self) -> None:
        """Begin the trial of another start of the program."""
        self.note()
        self._start += 1
        self._members = None
        self._base = self._state.report().checkpoint_step

    def change_members(self, gpus: int, *, step: int | None = None) -> None:
        """Begin the trial of a change of the start's members.

        Args:
            gpus: of all members, or those of the job itself while others are only about to join.
            step: after which the members have changed; None: the newest one that is known.
        """
        if step is None:
            report = self._state.report()
            step = max(report.step or 0, report.checkpoint_step or 0)
        self._members = (step, gpus)

    def note(self) -> None:
        """Keep that the job has completed a checkpoint, as soon as there is one."""
        if self._marked or not self.has_checkpoint:
            return
        self._marked = True
        for directory in self._directories:
            with contextlib.suppress(OSError):
                write_own(f"{directory}/{self._marker}", "")
                return
        # The controller is asked instead.

    @property
    def has_checkpoint(self) -> bool:
        """Whether this start has completed a checkpoint."""
        report = self._state.report()
        if report.checkpoint_step is None:
            return False
        before = [s for s in (self._base, report.resumed_from) if s is not None]
        return report.checkpoint_step > max(before, default=-1)

    @property
    def on(self) -> bool:
        """Whether this start is on trial, as far as it is known without the controller."""
        return (self._trained or self._base is not None) and not self.has_checkpoint

    @property
    def failed_gpus(self) -> int | None:
        """GPUs since a change of members that no checkpoint has followed; None: there was none."""
        if self._members is None:
            return None
        (step, gpus), saved = self._members, self._state.report().checkpoint_step
        return gpus if saved is None or saved <= step else None

    def stop(self) -> None:
        """End the wait: Slurm ends the job."""
        self._stopped.set()

    def goes_on(
        self,
        code: int,
        *,
        unmodified: bool,
        out_of_memory: bool = False,
        in_companions: bool = False,
        is_due: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait, after the end of a program on trial, for the controller.

        Slurm ends this process when the controller sends the job back.

        Args:
            code: exit code of the program.
            unmodified: whether its checkpoints are watched. Exit code 0 of others is their end: the
                training library has saved the complete training.
            out_of_memory: whether a rank has shown that it ran out of memory.
            in_companions: whether ranks of companions failed while those of the job itself went on.
            is_due: returns whether the program is to be started again with other companions.

        Returns:
            Whether to start the program again in place; else the job ends with the code.
        """
        self.note()
        failed_gpus = self.failed_gpus
        certain = self.on or failed_gpus is not None
        asks = self._run > 0 and not self.has_checkpoint and code != 0
        out_of_memory = out_of_memory and code != 0
        asks = asks or (out_of_memory and self._state.report().weight_bytes is not None)
        if not self._has_controller or not (certain or asks) or (code == 0 and not unmodified):
            return False
        if self._stopped.wait(_GRACE_S):
            return False
        self._state.set_own({
            "failed_gpus": failed_gpus, "out_of_memory": out_of_memory,
            "failed_in_companions": in_companions,
        })  # fmt: skip
        self._state.update({"phase": "ended", "exit_code": code, "failed_start": self._start})
        if out_of_memory:
            log_line("the program ran out of memory: asking the controller for another plan")
        if failed_gpus is not None:
            log_line(
                f"the program ended with exit code {code} on {failed_gpus} GPUs before it completed"
                " a checkpoint since the last change of its ranks"
            )
        elif certain:
            log_line(
                f"the program ended with exit code {code} before it completed a checkpoint in this"
                " attempt: waiting for the controller, which returns the job to its last working"
                " size if a change may be the cause"
            )
        in_place = failed_gpus is not None
        again = self._wait(code, certain=certain, in_place=in_place, is_due=is_due)
        if again:
            self._state.begin_attempt()
        return again

    def _wait(
        self, code: int, *, certain: bool, in_place: bool, is_due: Callable[[], bool]
    ) -> bool:
        """Wait for an answer; return whether to start the program again in place.

        Args:
            code: exit code of the program.
            certain: whether it was on trial.
            in_place: whether its members had changed: without an answer it is started again soon.
            is_due: returns whether it is to be started again with other companions.
        """
        begun = reported = self._clock()
        while not self._stopped.wait(_TICK_S):
            if is_due():
                return True
            now = self._clock()
            orders = self._state.orders()
            answer = orders.on_failure if orders.failed_start == self._start else None
            if answer == "restart" or (answer is None and in_place and now > begun + _ASK_S):
                where = " on the GPUs of the job itself" if in_place else ""
                log_line(f"the program is started again{where}")
                return True
            if answer == "end":
                if certain:
                    log_line("the controller does nothing: no resize caused this end")
                return False
            if answer is None and not certain and now > begun + _ASK_S:
                return False
            if answer is None and now > reported + _REPORT_EVERY_S:
                reported = now
                self._state.request_report()
            # A controller that does not know the question counts as no controller.
            heard = self._state.heard if answer is not None else None
            silent_s = now - max(begun, heard or begun)
            if code == 0 and silent_s > _ACCEPT_S:
                return False
            if code and (silent_s > self._pause_s or now - begun > _PATIENCE_S):
                self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
                log_line("the controller has not taken the job back: starting the program again")
                return True
        return False
