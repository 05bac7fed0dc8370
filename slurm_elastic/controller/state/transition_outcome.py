"""Outcome of a transition, recorded in its job: intervals, counts, pins, and what failed. Pure."""

from __future__ import annotations

from slurm_elastic.controller.state.directive_in_force import directive_in_force
from slurm_elastic.controller.state.stored_job import StoredJob
from slurm_elastic.controller.state.transition import Transition, TransitionState
from slurm_elastic.core.cluster import Allocation, Job
from slurm_elastic.core.plan import Action
from slurm_elastic.core.reason import Reason
from slurm_elastic.slurm.shape import rounded_off_s

#: Node lists set by the controller that are recognised later.
_PINS = 6
#: Slurm's reasons, by their beginning, that say nothing about the shape of a job.
_NOT_THE_SHAPE = (
    *("AssocGrpJobsLimit", "AssocMaxJobsLimit", "QOSGrpJobsLimit", "QOSMaxJobsPer"),
    *("BeginTime", "Dependency", "JobHeld", "Licenses", "Nodes_required", "Nodes required"),
    *("JobArrayTaskLimit", "QOSUsageThreshold"),
    *("PartitionDown", "PartitionInactive", "ReqNodeNotAvail", "Reservation"),
)
#: A job that did not save in time is not asked again for so long at least.
_DEAF_S = 300.0
#: Ends of a change in place that say nothing about the next one.
_BY_OTHERS = frozenset(
    (
        *("job-ended", "job-changed", "job-left-gpus", "gpus-taken", "not-written"),
        *("controller-restarted", "controller-stopped", "node-down", "node-excluded"),
        *("no-checkpoint", "held-in-slurm", "directive-changed"),
    )
)


def record_outcome(entry: StoredJob, transition: Transition, job: Job, now: float) -> bool:
    """Record the end of a transition; return whether it counts as a resize.

    Args:
        entry: of the job; it is changed.
        transition: an ended one. It is recorded once: later calls change nothing.
        job: as Slurm shows it now.
        now: epoch s.
    """
    if transition.id <= entry.counted:
        return False
    entry.counted = transition.id
    is_unanswered = "unanswered" in transition.entered
    if transition.by_companions:
        moved = _record_in_place(entry, transition, now)
        if not moved and not is_unanswered:
            return False
    problem = transition.problem
    if problem is not None and problem.code == "directive-changed" and not transition.moved:
        return False  # what its owner wants instead need not wait
    entry.watch.excused |= transition.run == entry.watch.run
    entry.last_change = now
    entry.checkpoint_s = entry.checkpoint_s or transition.seconds()["checkpoint"]
    if transition.action is Action.REHEARSE:
        entry.rehearsal.end(transition.id, now, moved=transition.moved)
    elif is_unanswered:
        entry.deaf_until = now + max(_DEAF_S, 10 * transition.notice_s)
    entry.dirty = True
    if not transition.moved:
        return False
    planned = transition.planned
    by_requeue = not transition.by_companions
    if by_requeue and planned and problem and _refuses_shape(planned, problem):
        entry.trials.shapes.refuse(
            planned,
            problem,
            now=now,
            old=transition.old,
            directive=directive_in_force(entry, job),
        )
    entry.changes = [t for t in entry.changes if now - t < 86400] + [now]
    entry.resizes += 1
    if not transition.by_companions:
        _record_requeue(entry, transition, job)
        if transition.nice and TransitionState.CLEAR.value in transition.entered:
            entry.nice = (transition.nice, now, 1)
    return True


def _refuses_shape(planned: Allocation, problem: Reason) -> bool:
    """Return whether Slurm did not let a job start in its planned shape, or gave it another one."""
    if not planned.gpus:
        return False
    if planned.half and problem.code in ("no-gpus-held", "change-partial"):
        return True  # the shards that it got are not half of a GPU, or a plugin refuses shards
    if problem.code == "not-started":
        return not str(problem.parameters.get("slurm_reason", "")).startswith(_NOT_THE_SHAPE)
    if problem.code == "runs-elsewhere":  # whole nodes, in a partition OverSubscribe=EXCLUSIVE
        return problem.parameters.get("gpus") not in (0, planned.gpus)
    return problem.code == "slurm-refused"


def _record_requeue(entry: StoredJob, transition: Transition, job: Job) -> None:
    if transition.target is not None:
        entry.trials.begun(job.run, transition.id)
    entry.leased = transition.target is None and not transition.given_up
    entry.pin = list(transition.target.nodes) if transition.target else []
    node_lists = [list(a.nodes) for a in (transition.planned, transition.target) if a]
    entry.pins = [p for p in entry.pins if p not in node_lists][-_PINS:] + node_lists
    entry.spare = (job.run, rounded_off_s(transition.limit_s))
    if transition.budget is not None and transition.budget.set_s is not None:
        entry.budget = transition.budget


def _record_in_place(entry: StoredJob, transition: Transition, now: float) -> bool:
    """Record the end of a change in place; return whether it has changed the job."""
    placed, entry.dirty = entry.placed, True
    joined = [join.job_id for join in transition.joins if join.job_id]
    if transition.moved:
        placed.switch(transition.run, joined=joined, left=transition.leaves)
        placed.succeed(transition.pause_s, kind=transition.kind)
        if transition.failed:
            entry.trials.go_back(transition.target, now=now)
    problem = transition.problem
    if problem is not None and problem.code not in _BY_OTHERS:
        placed.fail(problem, now=now, kind=transition.kind)
    return transition.moved
