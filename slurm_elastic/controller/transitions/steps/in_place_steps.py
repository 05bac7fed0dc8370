"""Steps of a change in place: the action of each state, while the job trains on.

esrun submits companions and knows their ranks, the controller places them and decides when they
are over: docs/adr/0018-in-place-changes.md. As in `transition_steps`, each function looks at what
Slurm shows, does at most one thing, and may be called again after a crash.

Only jobs that came over the channel of the base's esrun, and that Slurm shows as that change's, of
the base's owner and of the planned size, are placed and get a priority.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from slurm_elastic.controller.state.transition import (
    PlannedCompanion,
    Transition,
    TransitionState,
)
from slurm_elastic.controller.transitions import handovers
from slurm_elastic.controller.transitions.order_outbox import OrderOutbox
from slurm_elastic.controller.transitions.steps.state_steps import (
    GIVE_UP_S,
    HELD,
    StateSteps,
    runs_elsewhere,
)
from slurm_elastic.controller.transitions.steps.step_inputs import StepInputs
from slurm_elastic.core.cluster import Allocation, Job, JobState
from slurm_elastic.core.member_orders import CompanionComment, MemberOrders
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report
from slurm_elastic.slurm import shape
from slurm_elastic.slurm.scontrol import Scontrol, ScontrolError

#: Seconds in which esrun submits companions.
_ASK_S = 30.0
#: Seconds in which ranks start in companions, import their libraries and join (our choice).
JOIN_S = 180.0
#: Seconds in which ranks of a companion leave at the end of a step and its job ends.
LEAVE_S = 60.0
#: Seconds that esrun has, after its deadline, before the controller cancels companions itself.
_GRACE_S = 15.0
#: Seconds between two cancels of the same companions.
_AGAIN_S = 10.0
#: Longest wait for the end of a companion, which an epilog may delay, in seconds.
_EPILOG_S = 300.0
#: Seconds after which other jobs have left the GPUs of new companions, or are expected to stay.
_HANDED_OVER_S = LEAVE_S + _GRACE_S + GIVE_UP_S
#: Seconds that a change waits for GPUs that another job is about to leave.
_RESERVE_S = 60.0
#: Reasons of a pending companion that waits for nothing but its GPUs.
_WAITS_FOR_GPUS = ("", "None", "Resources", "Priority", "BeginTime", "Reservation", "Cleaning")
#: Seconds in which esrun says why companions have ended: whether the program has failed.
_REPORT_S = 10.0
#: Seconds for which other reasons of Slurm are ignored, as they may be temporary.
_PASSES_S = 3.0
_OVER = (None, JobState.ENDED)
#: States in which esrun has not been told yet to change the members.
_BEFORE_MEMBERS = (
    *(TransitionState.RESERVE, TransitionState.ASK, TransitionState.PIN),
    *(TransitionState.START, TransitionState.NOTIFY),
)


class InPlaceSteps(StateSteps):
    """Actions of the states.

    Args:
        scontrol: writes.
        outbox: orders to jobs.
        log: structlog logger.
    """

    def __init__(self, scontrol: Scontrol, outbox: OrderOutbox, log: Any) -> None:
        super().__init__(scontrol, log)
        self._outbox = outbox
        self._actions = {
            TransitionState.RESERVE: self._reserve,
            TransitionState.ASK: self._ask,
            TransitionState.PIN: self._pin,
            TransitionState.START: self._start,
            TransitionState.JOIN: self._join,
            TransitionState.LEAVE: self._leave,
            TransitionState.FREE: self._free,
            TransitionState.CANCEL: self._cancel,
        }

    def _job_ended(self, t: Transition, site: StepInputs) -> None:
        """Cancel the companions of a job that has ended; what fails is left to the cleanup."""
        with contextlib.suppress(ScontrolError):
            self._scancel(t, self._of_change(t, site), site)

    def _interrupted(self, t: Transition, job: Job) -> TransitionState | None:
        over = job.run != t.run or job.state is JobState.PENDING
        if over and t.state is not TransitionState.CANCEL:
            return self._given_up(t, Reason("job-left-gpus"))
        if "revised" in t.entered and t.state in _BEFORE_MEMBERS:
            return self._given_up(t, Reason("directive-changed"))
        return None

    def end(self, t: Transition) -> None:
        """Withdraw the order of a change that is over."""
        self._outbox.tell(t.job_id, run=t.run, members=None)

    # --- growing ---

    def _reserve(self, t: Transition, job: Job, site: StepInputs) -> TransitionState | None:
        if job.state is not JobState.RUNNING or job.allocation != t.old:
            return self._given_up(t, Reason("job-changed"))
        if not t.joins:
            waits = handovers.takers_unready(t, site.live)
            if waits and t.waited(time.time()) < handovers.HANDOVER_S:
                return None
            return self._members_due(t)
        if t.id in site.admitted:
            return TransitionState.ASK
        waited = t.waited(time.time())
        vain = t.id in site.hopeless or not site.donors(t)
        if waited > _RESERVE_S or (waited > 3.0 and vain):
            return self._given_up(t, Reason("gpus-taken"))
        return None

    def _ask(self, t: Transition, job: Job, site: StepInputs) -> TransitionState | None:
        self._order(t)
        report = _answer(t, site)
        if report is not None and report.change_state == "failed":
            because = report.change_reason or Reason("members-fixed")
            return self._given_up(t, Reason("companions-refused", reason=because))
        if report is not None and report.change_state and self._match(t, job, site, report):
            return TransitionState.PIN
        if t.waited(time.time()) > _ASK_S:
            return self._given_up(t, Reason("companions-unanswered"))
        return None

    def _match(self, t: Transition, job: Job, site: StepInputs, report: Report) -> bool:
        """Find the submitted job of each planned companion; return whether all are there."""
        submitted = [
            companion
            for job_id, _, _ in report.companions
            if (companion := site.companions.get(job_id)) is not None
            and companion.companion == _mark(t)
            and companion.uid == job.uid
            and companion.state is JobState.PENDING
        ]
        for join in t.joins:
            match = next((c for c in submitted if c.gpus == join.gpus), None)
            if match is None:
                return False
            submitted.remove(match)
            join.job_id = match.job_id
        return True

    def _pin(self, t: Transition, job: Job, site: StepInputs) -> TransitionState | None:
        wrong = []
        for join in t.joins:
            companion = _companion(t, site, join.job_id)
            if companion is None or companion.state is not JobState.PENDING:
                return self._given_up(t, Reason("companion-ended", job=str(join.job_id)))
            if text := _difference(t, join, companion):
                wrong.append((join, companion, text))
        if not wrong:
            return TransitionState.START
        t.tries += 1
        if t.tries > 4:
            return self._given_up(t, Reason("change-partial", difference=wrong[0][2]))
        if t.reservation:
            site.open(t)
        for join, companion, _ in wrong:
            place = _place(t, join)
            fields = shape.placed_companion(job, place, reservation=t.reservation, now=time.time())
            self._scontrol.update(companion, fields)
        return None

    def _start(self, t: Transition, _: Job, site: StepInputs) -> TransitionState | None:
        companions = [(j, _companion(t, site, j.job_id)) for j in t.joins]
        waiting = list[tuple[PlannedCompanion, Job]]()
        for join, companion in companions:
            if companion is None or companion.state not in (JobState.PENDING, JobState.RUNNING):
                return self._given_up(t, Reason("companion-ended", job=str(join.job_id)))
            if companion.state is JobState.PENDING:
                waiting.append((join, companion))
            elif companion.allocation != _place(t, join):
                return self._given_up(t, runs_elsewhere(companion.allocation))
        if not waiting:
            return self._started(t, [c for _, c in companions if c is not None])
        return self._waits(t, waiting, site)

    def _waits(
        self, t: Transition, waiting: list[tuple[PlannedCompanion, Job]], site: StepInputs
    ) -> TransitionState | None:
        """Release companions; end the change if they cannot start.

        The time limit begins when other jobs have left the GPUs; they are told to leave when the
        companions are released. The change ends at once if another job, which Slurm started
        elsewhere than planned, has got these GPUs.
        """
        waited, could_start = t.waited(time.time()), self._could_start(t, site)
        if (could_start > _PASSES_S or not t.tries) and site.taken(t):
            return self._given_up(t, Reason("gpus-taken"))
        for join, companion in waiting:
            if obstacle := site.obstacle(companion, _place(t, join)):
                return self._given_up(t, obstacle)
            stuck = companion.reason not in (*_WAITS_FOR_GPUS, *HELD) and could_start > _PASSES_S
            if stuck or could_start > GIVE_UP_S:
                reason = Reason("companion-waits", slurm_reason=companion.reason)
                return self._given_up(t, reason)
        if t.tries and waited < _PASSES_S * t.tries:
            return None
        t.tries += 1
        for _, companion in waiting:
            if companion.reason in HELD or not companion.priority:
                self._scontrol.release(companion)
            if companion.priority != int(shape.FIRST):
                self._scontrol.update(companion, {"Priority": shape.FIRST})
        return None

    @staticmethod
    def _could_start(t: Transition, site: StepInputs) -> float:
        """Return the seconds in which released companions could have started."""
        now = time.time()
        waited = t.waited(now)
        if not t.givers or waited > _HANDED_OVER_S:
            return waited
        if handovers.givers(t, site.live):
            t.entered.pop("given", None)
            return 0.0
        t.entered.setdefault("given", now)
        return min(waited, t.waited(now, "given"))

    def _started(self, t: Transition, companions: list[Job]) -> TransitionState | None:
        """Take reservation and priority from companions: the end of a reservation ends its jobs."""
        borrowed = [c for c in companions if c.reservation and c.reservation == t.reservation]
        for companion in borrowed:
            self._scontrol.release(companion)
            self._scontrol.update(companion, {"ReservationName": ""})
        t.entered.setdefault("running", time.time())
        return self._members_due(t)

    def _members_due(self, t: Transition) -> TransitionState:
        """Return the state in which esrun changes the members."""
        return TransitionState.JOIN if t.joins else TransitionState.LEAVE

    def _join(self, t: Transition, _: Job, site: StepInputs) -> TransitionState | None:
        self._order(t, leave=True)
        report = _answer(t, site)
        state = report.change_state if report is not None else ""
        if report is not None and report.failed_gpus is not None:
            return self._program_failed(t, report)
        if report is not None and state == "done":
            return self._joined(t, report, site)
        if report is not None and state == "failed":
            late = Reason("companions-not-joined", reason=report.change_reason)
            return self._given_up(t, late)
        companions = [_companion(t, site, j.job_id) for j in t.joins]
        if all((c.state if c else None) in _OVER for c in companions):
            t.entered.setdefault("over", time.time())
            if t.waited(time.time(), "over") > _REPORT_S:
                return self._given_up(t, Reason("companion-ended", job=str(t.joins[0].job_id)))
        if t.waited(time.time()) > JOIN_S + _GRACE_S:
            return self._given_up(t, Reason("companions-not-joined"))
        return None

    def _joined(self, t: Transition, report: Report, site: StepInputs) -> TransitionState:
        """Note which companions have joined; the others are cancelled."""
        joined = {job_id for job_id, _, state in report.companions if state == "joined"}
        late = [j for j in t.joins if j.job_id not in joined]
        self._note_switch(t, report)
        if late:
            self._scancel(t, [j.job_id for j in late], site)
            late_reason = Reason("companions-not-joined", reason=report.change_reason)
            t.problem = t.problem or late_reason
            t.joins = [j for j in t.joins if j.job_id in joined]
        return TransitionState.FREE if t.leaves else _end(t)

    def _program_failed(self, t: Transition, report: Report) -> TransitionState:
        """End a change whose program has failed: its companions end with it."""
        if report.change_state != "done":
            return self._given_up(t, Reason("program-failed", exit_code=report.exit_code))
        self._note_switch(t, report)
        t.joins = []
        return TransitionState.FREE if t.leaves else _end(t)

    # --- shrinking ---

    def _leave(self, t: Transition, _: Job, site: StepInputs) -> TransitionState | None:
        self._order(t, leave=True)
        report = _answer(t, site)
        self._note_switch(t, report)
        running = [i for i in t.leaves if _state(t, site, i) is JobState.RUNNING]
        # slurmctld may have been killed before it saved that a companion has ended.
        ended = {i for i, _, state in report.companions if state == "ended"} if report else set()
        if ended.issuperset(running):
            return TransitionState.FREE
        failed = report is not None and report.change_state == "failed"
        if failed or t.waited(time.time()) > LEAVE_S + _GRACE_S:
            self._log.warning(f"{t} Companions={running} Problem=did not leave, cancelled")
            self._scancel(t, running, site)
            return TransitionState.FREE
        return None

    def _free(self, t: Transition, _: Job, site: StepInputs) -> TransitionState | None:
        self._note_switch(t, _answer(t, site))
        waited = t.waited(time.time())
        states = {i: _state(t, site, i) for i in t.leaves}
        if all(state in _OVER for state in states.values()) or waited > _EPILOG_S:
            t.entered.setdefault("switched", time.time())
            return _end(t)
        running = [i for i, state in states.items() if state is JobState.RUNNING]
        if running and waited > _AGAIN_S * (t.tries + 1):
            t.tries += 1
            self._scancel(t, running, site)
        return None

    # --- ends of a change ---

    def _cancel(self, t: Transition, _: Job, site: StepInputs) -> TransitionState | None:
        """Cancel the companions of an abandoned change, a few seconds after the order to esrun."""
        self._order(t, cancel=True)
        waited = t.waited(time.time())
        alive = [i for i in self._of_change(t, site) if _state(t, site, i) not in _OVER]
        if not alive or waited > _EPILOG_S:
            t.joins = []
            return TransitionState.UNDONE
        pending = [i for i in alive if _state(t, site, i) is JobState.PENDING]
        running = [i for i in alive if _state(t, site, i) is JobState.RUNNING]
        if waited < _PASSES_S and not t.tries:
            running = []
        if (pending or running) and (not t.tries or waited > _AGAIN_S * t.tries):
            t.tries += bool(running) or waited > _PASSES_S
            self._scancel(t, pending + running, site)
        return None

    def _of_change(self, t: Transition, site: StepInputs) -> list[int]:
        """Return the companions of a change: those that were matched or are recorded."""
        submitted = {
            i
            for i, c in site.companions.items()
            if c.companion == _mark(t) and c.companion_recorded and c.uid == t.uid
        }
        return sorted(submitted | {j.job_id for j in t.joins if j.job_id})

    def _scancel(self, t: Transition, job_ids: list[int], site: StepInputs) -> None:
        for job_id in job_ids:
            companion = _companion(t, site, job_id)
            if companion is not None and companion.state not in (
                JobState.ENDED,
                JobState.COMPLETING,
            ):
                self._log.info(f"{t} Companion={job_id} Action=cancel")
                self._scontrol.cancel(companion)

    def _given_up(self, t: Transition, reason: Reason) -> TransitionState:
        self._log.warning(f"{t} Problem={reason}")
        t.problem = t.problem or reason
        if t.state in (TransitionState.RESERVE, TransitionState.LEAVE, TransitionState.FREE):
            return TransitionState.UNDONE
        return TransitionState.CANCEL

    def _refused(
        self, t: Transition, _job: Job, _site: StepInputs, error: ScontrolError
    ) -> TransitionState:
        reason = Reason("slurm-refused", error=str(error))
        if t.state is TransitionState.CANCEL:
            self._log.warning(f"{t} Problem={reason}")
            return TransitionState.UNDONE  # the cleanup of a later round goes on with it
        if t.state is TransitionState.FREE:
            return _end(t)
        return self._given_up(t, reason)

    def _order(self, t: Transition, *, leave: bool = False, cancel: bool = False) -> None:
        """Send the change to esrun, in this attempt only."""
        orders = self._orders(t, leave=leave, cancel=cancel)
        self._outbox.tell(t.job_id, run=t.run, members=orders)
        self._outbox.tell(t.job_id, run=t.run + 1, members=None)

    def _orders(self, t: Transition, *, leave: bool, cancel: bool) -> MemberOrders:
        """Return the orders of a change in its present state."""
        return MemberOrders(
            change=t.id,
            join=tuple(j.gpus for j in t.joins),
            gpu_type=t.target.gpu_type if t.target else "",
            leave=t.leaves if leave else (),
            deadline_s=JOIN_S if t.joins else LEAVE_S,
            cancel=cancel,
        )

    @staticmethod
    def _note_switch(t: Transition, report: Report | None) -> None:
        if report is not None and report.change_state == "done":
            t.pause_s = report.pause_s if t.pause_s is None else t.pause_s
            t.entered.setdefault("switched", time.time())


def _mark(t: Transition) -> CompanionComment:
    """Return the mark of the companions of a change."""
    return CompanionComment(base=t.job_id, run=t.run, change=t.id)


def _answer(t: Transition, site: StepInputs) -> Report | None:
    """Return the last report of a job if it answers this change."""
    report = site.report(t.job_id)
    if report is None or (report.run, report.change) != (t.run, t.id):
        return None
    return report


def _place(t: Transition, join: PlannedCompanion) -> Allocation:
    return Allocation.of(t.target.gpu_type if t.target else "", {join.node: join.gpus})


def _companion(t: Transition, site: StepInputs, job_id: int) -> Job | None:
    """Return a companion of a transition's job; None if it is gone, or its id is another's now.

    A slurmctld that is killed forgets jobs of the last seconds, and gives their ids to others.
    """
    companion = site.companions.get(job_id)
    mark = companion.companion if companion is not None else None
    if companion is None or mark is None:
        return None
    own = (mark.base, mark.run, companion.uid) == (t.job_id, t.run, t.uid)
    return companion if own else None


def _state(t: Transition, site: StepInputs, job_id: int) -> JobState | None:
    companion = _companion(t, site, job_id)
    return companion.state if companion is not None else None


def _difference(t: Transition, join: PlannedCompanion, companion: Job) -> str:
    """Return how a pending companion differs from its plan; "" if it does not."""
    if companion.companion != _mark(t):
        return "does not name its base any more"
    if companion.gpus != join.gpus:
        return f"asks for {companion.gpus} GPUs instead of {join.gpus}"
    if companion.required_nodes != (join.node,):
        return f"asks for other nodes than {join.node}"
    if companion.reservation != t.reservation:
        return "is not in the reservation"
    return ""


def _end(t: Transition) -> TransitionState:
    return TransitionState.UNDONE if t.given_up else TransitionState.DONE
