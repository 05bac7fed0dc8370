"""Assignment of targets: one pass over the jobs, each gets its first alternative that fits.

A job keeps its allocation until it has been given another one, so a refused alternative falls
back to the next, and at last to the present allocation, never to idle GPUs. Jobs that give GPUs
up come first, then urgent starts, then those that move, start, grow. A shrink whose GPUs no other
job takes is undone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Alternative, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.resize_kind import ResizeKind
from slurm_elastic.placement import in_place_places
from slurm_elastic.placement.best_fit import fit, takes
from slurm_elastic.placement.delay.delay_gate import DelayGate
from slurm_elastic.placement.eligibility import RoundJob
from slurm_elastic.placement.free_resources import FreeResources, ResourceViews
from slurm_elastic.placement.node_arrays import Mask

_EPSILON = 1e-9


@dataclass(slots=True)
class JobOutcome:
    """Target of one job, and the refusals on the way to it.

    Attributes:
        waits: why it waits for a nearer place instead of taking a free one, or None.
        stays: why it does not move to fewer nodes or racks although it could, or None.
        partners: jobs with which it exchanges GPUs (placement/exchanges.py).
    """

    round_job: RoundJob
    target: Allocation | None
    reason: Reason | None = None
    wished: Alternative | None = None
    refusals: list[Reason] = field(default_factory=list)
    promised: bool = False
    waits: Reason | None = None
    stays: Reason | None = None
    partners: tuple[int, ...] = ()

    @property
    def job_id(self) -> int:
        """Its job."""
        return self.round_job.job.job_id

    @property
    def changed(self) -> bool:
        """Whether the target differs from what the job holds."""
        return self.target != self.round_job.current

    @property
    def shrinks(self) -> bool:
        """Whether the job gives up GPUs that its directive allows."""
        current, target = self.round_job.current, self.target
        if current is None or not self.round_job.allowed(current):
            return False
        if target is None:
            return True
        return target.gpus < current.gpus and target.gpu_type == current.gpu_type


class Assignment:
    """Targets of one round, booked on the free resources `later` as they are found.

    Attributes:
        at_once: starts may use GPUs that are given up in the same round.
        judging: a change must be worth its cost; False where proposals are binding.
        gate: decides whether a job waits for a nearer place.
    """

    def __init__(
        self,
        views: ResourceViews,
        gate: DelayGate,
        config: Config,
        *,
        at_once: bool = False,
        judging: bool = True,
    ) -> None:
        self.frame = views.later.frame
        self.later = views.later
        self.now = views.now
        self.config = config
        self.at_once = at_once
        self.judging = judging
        self.gate = gate
        self.outcomes: dict[int, JobOutcome] = {}

    def place(self, proposals: Sequence[Proposal], round_jobs: Mapping[int, RoundJob]) -> None:
        """Give every job of the proposals its first alternative that fits and pays."""
        for proposal in sorted(proposals, key=lambda p: _phase(p, round_jobs[p.job_id])):
            round_job = round_jobs[proposal.job_id]
            outcome = JobOutcome(round_job, round_job.current, wished=proposal.alternatives[0])
            self.outcomes[proposal.job_id] = outcome
            self._first_fitting(outcome, proposal.alternatives)

    def grow(self, proposals: Iterable[Proposal]) -> bool:
        """Offer idle GPUs to jobs that have a target; return whether any job grew."""
        grown = False
        for proposal in proposals:
            outcome = self.outcomes[proposal.job_id]
            have = outcome.target
            more = tuple(
                a
                for a in proposal.alternatives
                if have and a.gpu_type == have.gpu_type and a.gpus > have.gpus
            )
            if more:
                self._first_fitting(outcome, more)
                grown |= outcome.target != have
        return grown

    def restore(self) -> None:
        """Undo shrinks whose freed GPUs no other job takes."""
        for outcome in self.outcomes.values():
            round_job, target, current = (
                outcome.round_job,
                outcome.target,
                outcome.round_job.current,
            )
            if current is None or not outcome.shrinks:
                continue
            self.later.give(round_job.need, target)
            if self.holds(round_job, current):
                outcome.target = current
                outcome.reason = Reason("shrink-undone")
            elif target is not None:
                outcome.target = self._between(round_job, target, current) or target
            self.later.take(round_job.need, outcome.target)

    def retry(self, proposals: Iterable[Proposal]) -> None:
        """Try again to grow jobs that found no place, now that others have their targets."""
        for proposal in proposals:
            outcome = self.outcomes[proposal.job_id]
            current = outcome.round_job.current
            if current is None or outcome.changed:
                continue
            better = [
                a
                for a in proposal.alternatives
                if a.gpu_type != current.gpu_type or a.gpus > current.gpus
            ]
            if better:
                outcome.refusals.clear()
                self._first_fitting(outcome, better)

    def keep(self, round_job: RoundJob, promised: Allocation) -> None:
        """Take the target promised in an earlier round, if it still fits and pays."""
        self.later.give(round_job.need, round_job.current)
        good = (
            round_job.allowed(promised)
            and self.holds(round_job, promised)
            and not self._unworthy(round_job, promised)
        )
        if good:
            outcome = JobOutcome(round_job, promised, reason=Reason("takes-promised-gpus"))
            outcome.promised = True
            self.outcomes[round_job.job.job_id] = outcome
        self.later.take(round_job.need, promised if good else round_job.current)

    def welfare(self) -> float:
        """Return the changes' utility gains less their costs; without starts and earlier promises.

        As docs/policies.md defines: log-speed, and the part of the payback window in which each
        changed job does not train.
        """
        total = 0.0
        for outcome in self.outcomes.values():
            round_job = outcome.round_job
            if not outcome.changed or round_job.current is None or outcome.promised:
                continue
            old_speed = round_job.speed(self.frame, round_job.current)
            new_speed = round_job.speed(self.frame, outcome.target)
            if not round_job.allowed(round_job.current):
                continue
            total += math.log(max(new_speed, 1e-12) / max(old_speed, 1e-12))
            total -= round_job.change_cost_s(outcome.target) / self.config.resize.payback_s
        return total

    def idle(self) -> dict[str, int]:
        """Return the idle GPUs by type that elastic jobs may have."""
        free = np.where(self.frame.open, np.maximum(self.later.gpus, 0), 0)
        return {t: int(free[self.frame.of_type(t)].sum()) for t in self.frame.types}

    def _first_fitting(self, outcome: JobOutcome, alternatives: Sequence[Alternative]) -> None:
        round_job, old_target = outcome.round_job, outcome.target
        current = round_job.current
        self.later.give(round_job.need, old_target)
        for alternative in alternatives:
            if not alternative.gpus:
                outcome.target, outcome.reason = None, outcome.waits or alternative.reason
                break
            place = alternative.place
            if current and (place == current or (not place and _same_shape(alternative, current))):
                outcome.target, outcome.reason = current, alternative.reason
                break
            allocation = (
                self.exactly(round_job, place)
                if place
                else self.find(round_job, alternative.gpu_type, alternative.gpus)
            )
            if allocation is None:
                outcome.refusals.append(self._no_place(round_job, alternative))
                continue
            refusal = dearer(round_job, alternative, allocation)
            refusal = refusal or self._unworthy(round_job, allocation)
            if not place:
                refusal = refusal or self.waits(outcome, alternative, allocation)
            if refusal:
                outcome.refusals.append(refusal)
                continue
            outcome.target, outcome.reason = allocation, alternative.reason
            break
        self.later.take(round_job.need, outcome.target)

    def _no_place(self, round_job: RoundJob, alternative: Alternative) -> Reason:
        """Return why the job cannot have an alternative."""
        gpu_type, gpus, place = alternative.gpu_type, alternative.gpus, alternative.place
        not_linked = None if place else self.not_linked(round_job, gpu_type, gpus)
        nodes = place.nodes if place else None
        if bound := self.frame.bound_by(round_job.job):
            return Reason("growth-not-supported", gpus=gpus, gpu_type=gpu_type, option=bound)
        return not_linked or Reason("no-place", gpus=gpus, gpu_type=gpu_type, nodes=nodes)

    def not_linked(self, round_job: RoundJob, gpu_type: str, gpus: int) -> Reason | None:
        """Return the reason if GPUs are free, but not where the job's groups would be linked."""
        if not round_job.group_reach or not round_job.directive.allows(gpus, gpu_type):
            return None
        unit, demand = round_job.directive.unit_for(gpu_type), round_job.demand(self.frame)
        resources = self._resources(round_job)
        apart = dataclasses.replace(demand, group_reach="")
        if fit(demand, gpu_type, gpus, resources, unit=unit) is not None:
            return None
        if fit(apart, gpu_type, gpus, resources, unit=unit) is None:
            return None
        group, reach = unit if unit > 1 else gpus, round_job.group_reach
        return Reason("group-not-linked", gpus=gpus, gpu_type=gpu_type, group=group, reach=reach)

    def waits(
        self, outcome: JobOutcome, wish: Alternative, allocation: Allocation
    ) -> Reason | None:
        """Return why a job waits for a nearer place instead of taking this one, and note it."""
        starts_at_once = wish.urgent and outcome.round_job.current is None
        refusal = None if starts_at_once else self.gate.refusal(outcome.round_job, allocation)
        outcome.waits = refusal and _nearer(refusal)
        return refusal

    def wait(self, round_job: RoundJob, refusal: Reason) -> None:
        """Let a pending job wait for a nearer place."""
        reason = _nearer(refusal)
        self.outcomes[round_job.job.job_id] = JobOutcome(
            round_job, None, reason=reason, waits=reason
        )

    def find(self, round_job: RoundJob, gpu_type: str, gpus: int) -> Allocation | None:
        """Return a place for the job, None if there is none or its directive rules the size out.

        A start takes what is free now, a shrink the job's own nodes first.
        """
        if not round_job.directive.allows(gpus, gpu_type):
            return None
        current = round_job.current
        resources = self._resources(round_job)
        unit = round_job.directive.unit_for(gpu_type)
        if current and gpu_type == current.gpu_type and gpus < current.gpus:
            for fewer in in_place_places.smaller(round_job):
                if fewer.gpus == gpus and self.holds(round_job, fewer):
                    return fewer
        if current and gpu_type == current.gpu_type and gpus < current.gpus:
            place = fit(
                round_job.demand(self.frame, away=False), gpu_type, gpus, resources, unit=unit
            )
            if place is not None:
                return place
        settled = self._settled(round_job)
        place = fit(
            round_job.demand(self.frame), gpu_type, gpus, resources, unit=unit, settled=settled
        )
        if current and gpu_type == current.gpu_type and gpus > current.gpus:
            place = self._better(round_job, place, gpus)
        return current if place == current else place

    def _better(
        self, round_job: RoundJob, place: Allocation | None, gpus: int
    ) -> Allocation | None:
        """Return a place that can be reached in place, if the job does more there, else `place`.

        Compared is what it computes until the end of the payback window, less the time in which it
        stands still (our definition).
        """
        in_place = in_place_places.larger(round_job, round_job.demand(self.frame), gpus, self.later)
        if in_place is None or place is None:
            return in_place or place

        def computed(target: Allocation) -> float:
            trains_s = max(0.0, round_job.window_s - round_job.change_cost_s(target))
            return round_job.speed(self.frame, target) * trains_s

        return in_place if computed(in_place) >= computed(place) else place

    def exactly(self, round_job: RoundJob, place: Allocation) -> Allocation | None:
        """Return the place that the policy chose if the job may have it now, else None."""
        demand = round_job.demand(self.frame)
        if not round_job.allowed(place) or not takes(
            demand,
            place,
            self._resources(round_job),
            unit=round_job.directive.unit_for(place.gpu_type),
            settled=self._settled(round_job),
        ):
            return None
        return place

    def _resources(self, round_job: RoundJob) -> FreeResources:
        """Return the resources that a job may take; for a start, only those free now as well."""
        return self.later if round_job.current or self.at_once else self.later.meet(self.now)

    def _settled(self, round_job: RoundJob) -> Mask:
        """Return the mask of nodes with as many GPUs free now, its own included, as on `later`."""
        free = self.frame.free
        if round_job.current:
            free = free.copy()
            for i, gpus in self.frame.shares(round_job.current.shares).items():
                free[i] += gpus
        return np.asarray(free == self.later.gpus)

    def _unworthy(self, round_job: RoundJob, target: Allocation) -> Reason | None:
        """Return why a change does not pay, or None."""
        current = round_job.current
        if not self.judging or current is None or not round_job.allowed(current):
            return None
        if target.gpus < current.gpus and target.gpu_type == current.gpu_type:
            return None
        gain = round_job.speed(self.frame, target) / round_job.speed(self.frame, current) - 1
        change = "move" if target.gpus == current.gpus else "grow"
        if target.gpu_type != current.gpu_type:
            change = "type"
        gpus, gpu_type = target.gpus, target.gpu_type
        if gain <= _EPSILON:
            return Reason("change-gains-nothing", change=change, gpus=gpus, gpu_type=gpu_type)
        if gain < self.config.resize.min_gain:
            return Reason(
                "change-gains-little", change=change, gpus=gpus, gpu_type=gpu_type, gain=gain
            )
        cost_s = round_job.change_cost_s(target)
        if gain * round_job.window_s <= cost_s:
            return Reason(
                "change-not-paid-back",
                change=change,
                gpus=gpus,
                gpu_type=gpu_type,
                gain=gain,
                window_s=round_job.window_s,
                cost_s=cost_s,
            )
        return None

    def holds(self, round_job: RoundJob, allocation: Allocation) -> bool:
        """Return whether an allocation on the job's own nodes is still free on `later`."""
        room = self.later.room(round_job.need)
        shares = self.frame.shares(allocation.shares)
        return all(room[i] >= g for i, g in shares.items()) and not self.later.exceeds_limits(
            round_job.need, allocation
        )

    def _between(
        self, round_job: RoundJob, target: Allocation, current: Allocation
    ) -> Allocation | None:
        """Return the largest size between target and present that fits on the job's own nodes."""
        if target.gpu_type != current.gpu_type:
            return None
        sizes = [
            s for s in round_job.directive.sizes(current.gpu_type) if target.gpus < s < current.gpus
        ]
        demand = round_job.demand(self.frame, away=False)
        unit = round_job.directive.unit_for(current.gpu_type)
        for fewer in in_place_places.smaller(round_job):
            if fewer.gpus in sizes and self.holds(round_job, fewer):
                return fewer
        for size in reversed(sizes[-16:]):
            place = fit(demand, current.gpu_type, size, self.later, unit=unit)
            if place is not None:
                return place
        return None


def dearer(round_job: RoundJob, wish: Alternative, target: Allocation) -> Reason | None:
    """Return why a target is refused that a choice weighed as one in place cannot reach so."""
    if not wish.in_place or round_job.record.kind_of(round_job.job, target) is ResizeKind.IN_PLACE:
        return None
    return Reason("in-place-no-room", gpus=wish.gpus, gpu_type=wish.gpu_type)


def _nearer(refusal: Reason) -> Reason:
    return Reason("waits-for-nearer-place", reason=refusal)


def _same_shape(alternative: Alternative, current: Allocation) -> bool:
    return (alternative.gpu_type, alternative.gpus) == (current.gpu_type, current.gpus)


def _phase(proposal: Proposal, round_job: RoundJob) -> int:
    first, current = proposal.alternatives[0], round_job.current
    if current is None:
        return 1 if first.urgent else 3
    if first.gpus < current.gpus:
        return 0
    if first.gpu_type != current.gpu_type:
        return 2
    return 5 if first.gpus == current.gpus else 4
