"""The cheapest set of changes to elastic jobs that lets one pending job start.

Moves that cost no GPUs, shrinks never below MIN, and preemption where that is
allowed. The cost of a change (our definition): the seconds without training plus the log-speed
lost over the payback window, as in docs/policies.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from slurm_elastic.core.cluster import Allocation, Job
from slurm_elastic.placement import in_place_places
from slurm_elastic.placement.best_fit import NodeDemand, even_splits, fit
from slurm_elastic.placement.eligibility import Eligibility, RoundJob
from slurm_elastic.placement.free_resources import FreeResources, ResourceNeed, ResourceViews
from slurm_elastic.placement.node_arrays import NodeArrays

#: Nodes tried for a job that needs one node, and sizes tried for a job that has to shrink.
_MOST_NODES = 8
_MOST_SIZES = 16
#: Cost of a preemption: above any shrink, so that fewer preemptions always win.
_PREEMPTION_S = 1e9


@dataclass(frozen=True, slots=True)
class StartShape:
    """One shape in which a pending job would start, and its nodes."""

    demand: NodeDemand
    gpu_type: str
    gpus: int
    unit: int = 1

    @property
    def key(self) -> tuple[object, ...]:
        """Key, equal for shapes that fit in the same places; equal constraints share masks."""
        demand = self.demand
        nodes = (demand.required, demand.min_nodes, demand.max_nodes, id(demand.allowed))
        each = (demand.need.cpus_per_gpu, demand.need.memory_per_gpu_mb)
        return (self.gpu_type, self.gpus, self.unit, demand.group_reach, *nodes, *each)

    def place(self, resources: FreeResources) -> Allocation | None:
        """Return the place in which it would start on these resources; None: none."""
        return fit(self.demand, self.gpu_type, self.gpus, resources, unit=self.unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Concession:
    """Change of an elastic job for another job's sake: its target (None: wait), and that job."""

    round_job: RoundJob
    target: Allocation | None
    beneficiary: Job
    cost_s: float


class ConcessionSearch:
    """Elastic jobs that may give way, by node; each at most once a round.

    Attributes:
        held: GPUs that these jobs hold, by node index.
        trials: attempts made so far.
    """

    def __init__(self, frame: NodeArrays, round_jobs: Sequence[RoundJob], payback_s: float) -> None:
        self.frame = frame
        self.payback_s = payback_s
        self.trials = 0
        self.on_node: dict[int, list[tuple[RoundJob, int]]] = {}
        self.held = np.zeros(len(frame.names), dtype=np.int64)
        for round_job in round_jobs:
            if round_job.current is not None:
                for i, gpus in frame.shares(round_job.current.shares).items():
                    self.on_node.setdefault(i, []).append((round_job, gpus))
                    self.held[i] += gpus

    def spend(self, concession: Concession, views: ResourceViews) -> None:
        """Book a concession; its job makes no further one."""
        round_job = concession.round_job
        views.change(round_job.need, round_job.current, concession.target)
        for i, gpus in self.frame.shares(
            round_job.current.shares if round_job.current else ()
        ).items():
            self.on_node[i] = [(t, g) for t, g in self.on_node[i] if t is not round_job]
            self.held[i] -= gpus


def find_concessions(
    job: Job, shape: StartShape, search: ConcessionSearch, views: ResourceViews, *, preempt: bool
) -> tuple[tuple[Concession, ...], Allocation] | None:
    """Return the cheapest concessions found that let a job start, and its place; book nothing.

    Args:
        job: pending.
        shape: the one in which it would start.
        search: jobs that may give way.
        views: free resources; no job moves into what is not free now.
        preempt: jobs of lower priority may lose all GPUs, unless they changed just now.
    """
    later = views.later
    frame = later.frame
    usable = shape.demand.allowed & frame.of_type(shape.gpu_type)
    room = np.where(usable, later.room(shape.demand.need), 0)
    reach = np.where(usable, np.maximum(later.gpus, 0) + search.held, 0)
    most = frame.per_node.get(shape.gpu_type, int(frame.gpus.max(initial=0)))
    for nodes, share in even_splits(shape.gpus, most, shape.unit):
        if nodes < shape.demand.min_nodes or nodes > (shape.demand.max_nodes or nodes):
            continue
        candidates = np.flatnonzero(reach >= share)
        if shape.demand.required:
            candidates = candidates[np.isin(candidates, shape.demand.required)]
        if len(candidates) < nodes:
            continue
        missing = np.maximum(0, share - room[candidates])
        order = candidates[np.lexsort((candidates, missing))].tolist()
        best: tuple[float, tuple[Concession, ...], Allocation] | None = None
        # One node: each of the most promising is tried. Several: the most promising, one try.
        starts = range(min(_MOST_NODES, len(order))) if nodes == 1 else range(1)
        for start in starts:
            search.trials += 1
            trial = _Trial(job, shape, search, views.copy(), preempt)
            span = 1 if nodes == 1 else nodes + _MOST_NODES
            if not trial.clear(order[start : start + span], nodes, share):
                continue
            place = shape.place(trial.views.later)
            cost = sum(concession.cost_s for concession in trial.concessions.values())
            if place is not None and (best is None or cost < best[0]):
                best = (cost, tuple(trial.concessions.values()), place)
        if best is not None:
            return best[1], best[2]
    return None


def _parts(round_job: RoundJob, held: int) -> list[int]:
    """Return the GPUs that a job can free on a node by shrinking, the most first.

    Args:
        round_job: it runs.
        held: its GPUs on the node.
    """
    current = round_job.current
    assert current is not None
    sizes = round_job.directive.sizes(current.gpu_type)
    freed = {min(held, current.gpus - size) for size in sizes if size < current.gpus}
    return sorted(freed, reverse=True)


@dataclass(slots=True)
class _Trial:
    """One attempt on a copy of the resources."""

    job: Job
    shape: StartShape
    search: ConcessionSearch
    views: ResourceViews
    preempt: bool
    concessions: dict[int, Concession] = field(default_factory=dict)
    chosen: list[int] = field(default_factory=list)

    def clear(self, order: Sequence[int], nodes: int, share: int) -> bool:
        """Free `share` GPUs on `nodes` of these nodes; return whether that was possible."""
        need = self.shape.demand.need
        for i in order:
            saved = self.views.copy(), dict(self.concessions)
            while int(self.views.later.room(need)[i]) < share:
                concession = self._cheapest(i, share)
                if concession is None:
                    self.views, self.concessions = saved
                    break
                self.views.change(
                    concession.round_job.need, concession.round_job.current, concession.target
                )
                self.concessions[concession.round_job.job.job_id] = concession
            else:
                self.chosen.append(i)
            if len(self.chosen) == nodes:
                return True
        return False

    def _cheapest(self, node: int, share: int) -> Concession | None:
        """Return the change that frees GPUs on a node at the least cost per GPU freed.

        A change that frees all that is missing comes first, then preemption, of the job with the
        lowest priority. Only without these, jobs free a part each.
        """
        options: list[tuple[int, float, int, Concession]] = []
        for round_job, held in self.search.on_node.get(node, ()):
            if round_job.job.job_id in self.concessions:
                continue
            freed = min(held, self._missing(node, share, round_job.need))
            concession = self._concession(round_job, node, freed)
            rank = -1
            if (
                concession is None
                and self.preempt
                and round_job.eligibility is Eligibility.FREE
                and round_job.job.priority < self.job.priority
            ):
                rank = round_job.job.priority
                concession = Concession(
                    round_job=round_job, target=None, beneficiary=self.job, cost_s=_PREEMPTION_S
                )
            if concession is not None:
                options.append((rank, concession.cost_s / freed, round_job.job.job_id, concession))
        return min(options, key=lambda f: f[:3])[3] if options else self._part(node, share)

    def _part(self, node: int, share: int) -> Concession | None:
        """Return the change that frees the most of what is missing on a node, the cheapest one.

        None: all jobs there together could not free it by shrinking.
        """
        givers = [
            (round_job, parts)
            for round_job, held in self.search.on_node.get(node, ())
            if round_job.job.job_id not in self.concessions and (parts := _parts(round_job, held))
        ]
        if sum(parts[0] for _, parts in givers) < share - int(self.views.later.gpus[node]):
            return None
        options: list[tuple[int, float, int, Concession]] = []
        for round_job, parts in givers:
            missing = self._missing(node, share, round_job.need)
            for freed in parts:
                concession = self._concession(round_job, node, freed) if freed < missing else None
                if concession is not None:
                    job_id = round_job.job.job_id
                    options.append((-freed, concession.cost_s, job_id, concession))
                    break
        return min(options, key=lambda f: f[:3])[3] if options else None

    def _missing(self, node: int, share: int, giver: ResourceNeed) -> int:
        """Return the GPUs that a job must free on a node, so that CPUs and memory suffice, too."""
        need, later = self.shape.demand.need, self.views.later
        missing = float(share - later.gpus[node])
        if giver.cpus_per_gpu > 0:
            missing = max(missing, (need.cpus(share) - later.cpus[node]) / giver.cpus_per_gpu)
        if giver.memory_per_gpu_mb > 0:
            lacks = need.memory(share) - later.memory[node]
            missing = max(missing, lacks / giver.memory_per_gpu_mb)
        return max(1, math.ceil(missing - 1e-6))

    def _concession(self, round_job: RoundJob, node: int, freed: int) -> Concession | None:
        """Return the largest size, moved or shrunk, at which a job frees `freed` GPUs on a node.

        One whose companions can leave does that: it costs it next to nothing.
        """
        current, frame = round_job.current, self.search.frame
        assert current is not None
        for place in in_place_places.smaller(round_job):
            if current.on(frame.names[node]) - place.on(frame.names[node]) >= freed:
                return self._as_concession(round_job, place)
        unit = round_job.directive.unit_for(current.gpu_type)
        sizes = [s for s in round_job.directive.sizes(current.gpu_type) if s <= current.gpus]
        if not sizes:
            return None
        held = frame.shares(current.shares)
        caps: Mapping[int, int] = {i: held.get(i, 0) for i in self.chosen} | {
            node: held[node] - freed
        }
        demand = round_job.demand(frame)
        self.views.give(round_job.need, current)
        free, target = self.views.later.meet(self.views.now), None
        for size in dict.fromkeys([*sizes[::-1][:_MOST_SIZES], sizes[0]]):
            target = fit(demand, current.gpu_type, size, free, unit=unit, caps=caps)
            if target is not None:
                break
        self.views.take(round_job.need, current)
        return None if target is None else self._as_concession(round_job, target)

    def _as_concession(self, round_job: RoundJob, target: Allocation) -> Concession:
        """Return a change for the sake of the job that is to start, with its cost."""
        frame, current = self.search.frame, round_job.current
        old_speed, new_speed = round_job.speed(frame, current), round_job.speed(frame, target)
        loss = math.log(max(old_speed, 1e-12) / max(new_speed, 1e-12)) * self.search.payback_s
        return Concession(
            round_job=round_job,
            target=target,
            beneficiary=self.job,
            cost_s=round_job.change_cost_s(target) + max(0.0, loss),
        )
