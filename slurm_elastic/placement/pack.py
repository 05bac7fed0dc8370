"""Placement of binding proposals, as if all changes happened at once.

Sia (SOSP'23, section 3.4): whole nodes first, what remains on as few GPUs as it needs. A
job that keeps its type and size keeps its place. When that leaves a job without a place although
there are GPUs enough, all jobs of that type are placed anew, largest first: sizes that are powers
of two or whole nodes then all fit. Only other sizes are ever scattered over what is left. Replicas
of several GPUs stay whole: on one node, or where they take several, in one rack if any place is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Alternative, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.assignment import Assignment, JobOutcome, dearer
from slurm_elastic.placement.eligibility import Eligibility, RoundJob
from slurm_elastic.placement.free_resources import FreeResources
from slurm_elastic.placement.in_place_places import place_in_place
from slurm_elastic.placement.node_arrays import Ints


@dataclass(slots=True)
class _Wish:
    """Alternatives of one job, from index `at` on."""

    outcome: JobOutcome
    alternatives: Sequence[Alternative]
    at: int = 0

    @property
    def chosen(self) -> Alternative:
        return self.alternatives[self.at]


def carry_out(
    assignment: Assignment,
    proposals: Iterable[Proposal],
    round_jobs: Mapping[int, RoundJob],
    *,
    moves: bool = True,
) -> None:
    """Give each job the first of its alternatives for which there are GPUs.

    With `moves`, other jobs may change nodes, not their shape, to make room; so may jobs that
    are restarting, at no cost here.
    """
    later = assignment.later
    staying: list[JobOutcome] = []
    wishes: list[_Wish] = []
    for proposal in proposals:
        round_job, first = round_jobs[proposal.job_id], proposal.alternatives[0]
        outcome = JobOutcome(round_job, round_job.current, first.reason, wished=first)
        assignment.outcomes[proposal.job_id] = outcome
        current = round_job.current
        if current is not None and _stays(first, current):
            staying.append(outcome)
        elif current is not None or first.gpus:
            later.give(round_job.need, current)
            outcome.target = None
            wishes.append(_Wish(outcome, (*proposal.alternatives, *_present(current))))
    while wishes:
        refused: list[_Wish] = []
        for gpu_type in sorted({w.chosen.gpu_type for w in wishes if w.chosen.gpus}):
            of_type = [w for w in wishes if w.chosen.gpus and w.chosen.gpu_type == gpu_type]
            packing = _Packing(assignment, gpu_type, staying, round_jobs)
            refused += packing.place(of_type, moves=moves)
        for wish in refused:
            wish.at += 1
        wishes = [w for w in refused if w.at < len(w.alternatives)]
        for wish in wishes:
            wish.outcome.reason = wish.chosen.reason
            if not wish.chosen.gpus:
                wish.outcome.reason = wish.outcome.waits or wish.chosen.reason


def _stays(first: Alternative, current: Allocation) -> bool:
    """Return whether a job keeps its type and size, and its place if it was given one."""
    if first.shares:
        return first.place == current
    return (first.gpu_type, first.gpus) == (current.gpu_type, current.gpus)


def _present(current: Allocation | None) -> tuple[Alternative, ...]:
    """Return the alternative of keeping the present shape, if there is one."""
    if current is None:
        return ()
    reason = Reason("no-choice-free")
    return (Alternative(gpu_type=current.gpu_type, gpus=current.gpus, value=0.0, reason=reason),)


class _Packing:
    """Placement of the jobs of one GPU type."""

    def __init__(
        self,
        assignment: Assignment,
        gpu_type: str,
        staying: list[JobOutcome],
        round_jobs: Mapping[int, RoundJob],
    ) -> None:
        self._assignment = assignment
        self._frame = assignment.frame
        self._type = gpu_type
        self._most = self._frame.per_node.get(gpu_type, 0)
        self._staying = staying
        self._round_jobs = round_jobs

    def place(self, wishes: Sequence[_Wish], *, moves: bool) -> list[_Wish]:
        """Place jobs; return those for which there is no room."""
        later = self._assignment.later
        waiting: list[_Wish] = []
        refused: list[_Wish] = []
        for wish in sorted(wishes, key=lambda w: -w.chosen.gpus):
            outcome, choice = wish.outcome, wish.chosen
            legal = outcome.round_job.directive.allows(choice.gpus, choice.gpu_type)
            if choice.place is not None or choice.in_place or not legal:
                only_place = self._only_place(wish)
                if only_place is None:
                    refused.append(wish)
                else:
                    self._settle(outcome, only_place)
                continue
            allocation = self._clean(outcome.round_job, choice.gpus, later)
            if allocation is None:
                waiting.append(wish)
            elif self._waits(wish, allocation):
                refused.append(wish)
            else:
                self._settle(outcome, allocation)
        if not waiting or (moves and self._again(waiting)):
            return refused
        for wish in waiting:
            allocation = self._scattered(wish.outcome.round_job, wish.chosen.gpus, later)
            if allocation is None:
                wish.outcome.refusals.append(Reason("gpus-short"))
                refused.append(wish)
            elif self._waits(wish, allocation):
                refused.append(wish)
            else:
                self._settle(wish.outcome, allocation)
        return refused

    def _only_place(self, wish: _Wish) -> Allocation | None:
        """Return the place that the policy chose, or the present one, if the job may have it.

        A shape that the directive rules out is kept where it is, and given to no job anew. A
        choice that was weighed as a change in place has no other place.
        """
        outcome, choice = wish.outcome, wish.chosen
        round_job, current = outcome.round_job, outcome.round_job.current
        if choice.place is not None:
            exact = self._assignment.exactly(round_job, choice.place)
            if exact is None:
                outcome.refusals.append(Reason("nodes-not-free", nodes=choice.place.nodes))
            return exact
        if choice.in_place:
            return self._place_in_place(wish)
        same_shape = current and (current.gpu_type, current.gpus) == (choice.gpu_type, choice.gpus)
        if same_shape and current and self._assignment.holds(round_job, current):
            return current
        outcome.refusals.append(Reason("gpus-short"))
        return None

    def _place_in_place(self, wish: _Wish) -> Allocation | None:
        outcome, choice = wish.outcome, wish.chosen
        allocation = self._clean(outcome.round_job, choice.gpus, self._assignment.later)
        if allocation is None:
            outcome.refusals.append(Reason("gpus-short"))
            return None
        refusal = dearer(outcome.round_job, choice, allocation)
        if refusal:
            outcome.refusals.append(refusal)
        return None if refusal or self._waits(wish, allocation) else allocation

    def _waits(self, wish: _Wish, allocation: Allocation) -> bool:
        """Return whether the job waits for a nearer place, and note the refusal."""
        refusal = self._assignment.waits(wish.outcome, wish.chosen, allocation)
        if refusal:
            wish.outcome.refusals.append(refusal)
        return bool(refusal)

    def _settle(self, outcome: JobOutcome, allocation: Allocation) -> None:
        outcome.target = allocation
        self._assignment.later.take(outcome.round_job.need, allocation)
        self._staying.append(outcome)

    def _again(self, waiting: Sequence[_Wish]) -> bool:
        """Place all jobs of the type anew, with these; return whether all fit."""
        later = self._assignment.later.copy()
        settled = [*self._staying, *self._restarting()]
        jobs = [(o, o.target.gpus) for o in settled if o.target and self._movable(o)]
        for outcome, _ in jobs:
            later.give(outcome.round_job.need, outcome.target)
        jobs += [(w.outcome, w.chosen.gpus) for w in waiting]
        placed: list[tuple[JobOutcome, Allocation]] = []
        for outcome, gpus in sorted(jobs, key=lambda job: -job[1]):
            place = self._clean(outcome.round_job, gpus, later)
            if place is None:
                return False
            later.take(outcome.round_job.need, place)
            placed.append((outcome, place))
        self._assignment.later = later
        for outcome, place in placed:
            outcome.target = place
            self._assignment.outcomes[outcome.round_job.job.job_id] = outcome
        self._staying.extend(w.outcome for w in waiting)
        return True

    def _restarting(self) -> list[JobOutcome]:
        return [
            JobOutcome(t, t.current, Reason("makes-room"))
            for t in self._round_jobs.values()
            if t.eligibility is Eligibility.MOVING
            and t.job.job_id not in self._assignment.outcomes
            and t.current is not None
            and t.record.target == t.current
            and not t.job.companions
        ]

    def _movable(self, outcome: JobOutcome) -> bool:
        """Return whether a job is of this type and a new place would keep its shape."""
        target = outcome.target
        if target is None or target.gpu_type != self._type:
            return False
        if not outcome.round_job.allowed(target):
            return False
        if outcome.changed:
            return True
        most, _ = self._replicas(outcome.round_job, target.gpus)
        full, remainder = divmod(target.gpus, most)
        clean = [*([remainder] if remainder else []), *[most] * full]
        return sorted(g for _, g in target.shares) == clean

    def _room(self, round_job: RoundJob, resources: FreeResources) -> Ints:
        """Return [N] the GPUs that a job may hold on each node, those that it holds included."""
        room = resources.room(round_job.need) * self._frame.of_type(self._type)
        # On a node that may give it no further ones, such as a drained one, it may keep its own.
        usable = np.where(self._frame.allowed(round_job.job), room, 0)
        for i, held in self._own(round_job).items():
            usable[i] = max(usable[i], min(int(room[i]), held))
        return usable

    def _replicas(self, round_job: RoundJob, gpus: int) -> tuple[int, int]:
        """Return the GPUs of whole replicas on a node, and the nodes of each replica.

        The GPUs are 0 if no node has any, or if a replica has to be, and cannot be, on one node.
        """
        if not self._most:
            return 0, 1
        unit = round_job.directive.unit_for(self._type)
        if round_job.group_reach and unit == 1:
            unit = gpus  # they are one spatial group
        if unit <= self._most:
            return self._most - self._most % unit, 1
        return 0 if round_job.group_reach else self._most, max(1, unit // self._most)

    def _own(self, round_job: RoundJob) -> Mapping[int, int]:
        return self._frame.shares(round_job.current.shares) if round_job.current else {}

    def _clean(self, round_job: RoundJob, gpus: int, resources: FreeResources) -> Allocation | None:
        """Choose whole nodes, and the rest on the node with the least to spare; own nodes first."""
        most, replica = self._replicas(round_job, gpus)
        if not most:
            return None
        room = self._room(round_job, resources).tolist()
        own = self._own(round_job)
        current = round_job.current
        if current and current.gpu_type == self._type and round_job.record.in_place:
            by_name = {n: r for n, r in zip(self._frame.names, room, strict=True) if r}
            place = place_in_place(round_job.job, gpus, self._most, by_name)
            if place is not None:
                return None if resources.exceeds_limits(round_job.need, place) else place
        full, remainder = divmod(gpus, most)
        chosen: dict[int, int] = {}
        if full:
            free_nodes = [i for i, free in enumerate(room) if free >= most]
            if len(free_nodes) < full:
                return None
            free_nodes.sort(key=self._order(free_nodes, own, full, wide=replica > 1))
            chosen = dict.fromkeys(self._whole_replicas(free_nodes, full, replica), most)
        if remainder:
            fits = [i for i, free in enumerate(room) if free >= remainder and i not in chosen]
            if not fits:
                return None
            near = {int(self._frame.rack[i]) for i in chosen} if self._near else set()
            chosen[
                min(
                    fits,
                    key=lambda i: (
                        bool(near) and self._frame.rack[i] not in near,
                        resources.hurts(round_job.job.job_id, i, remainder),
                        i not in own,
                        room[i],
                        i,
                    ),
                )
            ] = remainder
        return self._allocation(round_job, chosen, resources)

    @property
    def _near(self) -> bool:
        """Return whether racks count: Sia's packing has none."""
        return self._assignment.config.placement.mode == "delay"

    def _whole_replicas(self, ordered: Sequence[int], count: int, replica: int) -> list[int]:
        """Return the first nodes in this order, of each rack those of whole replicas first."""
        if replica == 1:
            return list(ordered[:count])
        chosen: list[int] = []
        left_over: list[int] = []
        for _, of_rack in groupby(ordered, key=lambda i: int(self._frame.rack[i])):
            nodes = list(of_rack)
            whole = min(len(nodes), count - len(chosen)) // replica * replica
            chosen += nodes[:whole]
            left_over += nodes[whole:]
        return chosen + left_over[: count - len(chosen)]

    def _order(
        self, free_nodes: Sequence[int], own: Mapping[int, int], count: int, *, wide: bool
    ) -> Callable[[int], tuple[int, ...]]:
        """Order nodes: own ones first; where racks count, those of the tightest rack with room.

        They count under `[placement] mode = "delay"`, and for `wide` replicas, of several nodes.
        """
        if not self._near and not wide:
            return lambda i: (i not in own,)
        racks = Counter(int(self._frame.rack[i]) for i in free_nodes)
        enough = [r for r, many in racks.items() if many >= count]
        if enough:
            own_per_rack = Counter(int(self._frame.rack[i]) for i in free_nodes if i in own)
            best = min(enough, key=lambda r: (-own_per_rack[r], racks[r], r))
            return lambda i: (self._frame.rack[i] != best, i not in own, i)
        return lambda i: (-racks[int(self._frame.rack[i])], int(self._frame.rack[i]), i not in own)

    def _scattered(
        self, round_job: RoundJob, gpus: int, resources: FreeResources
    ) -> Allocation | None:
        """Choose as few nodes as possible, whatever whole replicas are free on them."""
        most, replica = self._replicas(round_job, gpus)
        if not most or replica > 1:
            return None
        unit = round_job.directive.unit_for(self._type)
        if round_job.group_reach and unit == 1:
            return None
        room = [free - free % unit for free in self._room(round_job, resources).tolist()]
        chosen: dict[int, int] = {}
        for i in sorted(range(len(room)), key=lambda i: (-room[i], i)):
            take = min(room[i], gpus - sum(chosen.values()))
            if take > 0:
                chosen[i] = take
        if sum(chosen.values()) < gpus:
            return None
        return self._allocation(round_job, chosen, resources)

    def _allocation(
        self, round_job: RoundJob, chosen: Mapping[int, int], resources: FreeResources
    ) -> Allocation | None:
        allocation = Allocation.of(self._type, {self._frame.names[i]: g for i, g in chosen.items()})
        return None if resources.exceeds_limits(round_job.need, allocation) else allocation
