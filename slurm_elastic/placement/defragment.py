"""Consolidation: a running job moves to fewer nodes or racks at its size, if that pays.

It pays when the predicted gain over a horizon exceeds the measured cost of the change. The
horizon is the payback window; with `[placement] mode = "delay"` the job's remaining time, where
that is known. Binding proposals do not consider racks, so under `delay` their jobs are
consolidated as well.
"""

from __future__ import annotations

from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.assignment import Assignment, JobOutcome
from slurm_elastic.placement.best_fit import even_splits
from slurm_elastic.placement.eligibility import RoundJob, remaining_s


def consolidate(assignment: Assignment) -> None:
    """Move jobs that keep their size to fewer nodes or racks, where that pays."""
    for outcome in assignment.outcomes.values():
        # A finished place was chosen by the policy.
        if outcome.wished is None or not outcome.wished.shares:
            _consolidate_job(assignment, outcome)


def _consolidate_job(assignment: Assignment, outcome: JobOutcome) -> None:
    """Move the job, or note why it stays."""
    round_job, current = outcome.round_job, outcome.round_job.current
    frame = assignment.frame
    if outcome.changed or current is None or len(current.shares) < 2:
        return
    nodes, racks = frame.topology.spread(n for n in current.nodes if n in frame.index)
    unit = round_job.directive.unit_for(current.gpu_type)
    most = frame.per_node.get(current.gpu_type, 1)
    fewest = next((n for n, _ in even_splits(current.gpus, most, unit)), nodes)
    if nodes <= fewest and racks <= 1:
        return
    assignment.later.give(round_job.need, current)
    target = assignment.find(round_job, current.gpu_type, current.gpus)
    if target is not None and frame.topology.spread(target) < (nodes, racks):
        _weigh(assignment, outcome, target)
    assignment.later.take(round_job.need, outcome.target)


def _weigh(assignment: Assignment, outcome: JobOutcome, target: Allocation) -> None:
    round_job, frame = outcome.round_job, assignment.frame
    speed = round_job.speed(frame, round_job.current)
    gain = round_job.speed(frame, target) / speed - 1 if speed > 0 else 0.0
    if round_job.current is not None:
        gain = min(gain, round_job.most_gain(frame, round_job.current))
    horizon, cost = _horizon_s(assignment, round_job), round_job.change_cost_s(target)
    least = assignment.config.resize.min_gain
    if gain > 0 and gain >= least and gain * horizon > cost:
        outcome.target = target
        unit, spread = _spread(assignment, target)
        outcome.reason = Reason("consolidates", unit=unit, spread=spread, gain=gain, cost_s=cost)
        return
    unit, spread = _spread(assignment, outcome.round_job.current)
    outcome.stays = Reason(
        "stays-spread",
        unit=unit,
        spread=spread,
        gain=max(0.0, gain),
        window_s=horizon if gain * horizon <= cost and gain > 0 else None,
        cost_s=cost,
    )


def _horizon_s(assignment: Assignment, round_job: RoundJob) -> float:
    """Return the seconds over which the move has to pay."""
    if assignment.gate.open:
        return round_job.window_s
    left = remaining_s(round_job.job, round_job.record, assignment.frame.snapshot.time)
    return round_job.window_s if left == float("inf") else left


def _spread(assignment: Assignment, allocation: Allocation | None) -> tuple[str, int]:
    """Return the widest unit that is crossed, node or rack, and how many of them."""
    frame = assignment.frame
    nodes, racks = frame.topology.spread(
        n for n in (allocation.nodes if allocation else ()) if n in frame.index
    )
    if nodes == 1:
        return "node", 1
    if racks > 1:
        return "rack", racks
    return ("rack", 1) if len(frame.topology.racks) > 1 else ("node", nodes)
