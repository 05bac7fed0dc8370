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

    seat: NodeDemand
    gpu_type: str
    gpus: int
    unit: int = 1

    @property
    def key(self) -> tuple[object, ...]:
        """Key, equal for shapes that fit in the same places; equal constraints share masks."""
        seat = self.seat
        nodes = (seat.required, seat.min_nodes, seat.max_nodes, id(seat.allowed))
        each = (seat.need.cpus_per_gpu, seat.need.memory_per_gpu_mb)
        return (self.gpu_type, self.gpus, self.unit, *nodes, *each)

    def place(self, ledger: FreeResources) -> Allocation | None:
        """Return the place in which it would start on these resources; None: none."""
        return fit(self.seat, self.gpu_type, self.gpus, ledger, unit=self.unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Concession:
    """Change of an elastic job for another job's sake: its target (None: wait), and that job."""

    tenant: RoundJob
    target: Allocation | None
    beneficiary: Job
    cost_s: float


class ConcessionSearch:
    """Elastic jobs that may give way, by node; each at most once a round.

    Attributes:
        held: GPUs that these jobs hold, by node index.
        trials: attempts made so far.
    """

    def __init__(self, frame: NodeArrays, tenants: Sequence[RoundJob], payback_s: float) -> None:
        self.frame = frame
        self.payback_s = payback_s
        self.trials = 0
        self.on_node: dict[int, list[tuple[RoundJob, int]]] = {}
        self.held = np.zeros(len(frame.names), dtype=np.int64)
        for tenant in tenants:
            if tenant.current is not None:
                for i, gpus in frame.shares(tenant.current.shares).items():
                    self.on_node.setdefault(i, []).append((tenant, gpus))
                    self.held[i] += gpus

    def spend(self, way: Concession, books: ResourceViews) -> None:
        """Book a concession; its job makes no further one."""
        tenant = way.tenant
        books.change(tenant.need, tenant.current, way.target)
        for i, gpus in self.frame.shares(tenant.current.shares if tenant.current else ()).items():
            self.on_node[i] = [(t, g) for t, g in self.on_node[i] if t is not tenant]
            self.held[i] -= gpus


def ways_for(
    job: Job, form: StartShape, donors: ConcessionSearch, books: ResourceViews, *, preempt: bool
) -> tuple[tuple[Concession, ...], Allocation] | None:
    """Return the cheapest concessions found that let a job start, and its place; book nothing.

    Args:
        job: pending.
        form: the shape it would start in.
        donors: jobs that may give way.
        books: free resources; no job moves into what is not free now.
        preempt: jobs of lower priority may lose all GPUs, unless they changed just now.
    """
    later = books.later
    frame = later.frame
    usable = form.seat.allowed & frame.of_type(form.gpu_type)
    room = np.where(usable, later.room(form.seat.need), 0)
    reach = np.where(usable, np.maximum(later.gpus, 0) + donors.held, 0)
    most = frame.per_node.get(form.gpu_type, int(frame.gpus.max(initial=0)))
    for nodes, share in even_splits(form.gpus, most, form.unit):
        if nodes < form.seat.min_nodes or nodes > (form.seat.max_nodes or nodes):
            continue
        candidates = np.flatnonzero(reach >= share)
        if form.seat.required:
            candidates = candidates[np.isin(candidates, form.seat.required)]
        if len(candidates) < nodes:
            continue
        missing = np.maximum(0, share - room[candidates])
        order = candidates[np.lexsort((candidates, missing))].tolist()
        best: tuple[float, tuple[Concession, ...], Allocation] | None = None
        # One node: each of the most promising is tried. Several: the most promising, one try.
        starts = range(min(_MOST_NODES, len(order))) if nodes == 1 else range(1)
        for start in starts:
            donors.trials += 1
            trial = _Trial(job, form, donors, books.copy(), preempt)
            span = 1 if nodes == 1 else nodes + _MOST_NODES
            if not trial.clear(order[start : start + span], nodes, share):
                continue
            place = form.place(trial.books.later)
            cost = sum(way.cost_s for way in trial.ways.values())
            if place is not None and (best is None or cost < best[0]):
                best = (cost, tuple(trial.ways.values()), place)
        if best is not None:
            return best[1], best[2]
    return None


@dataclass(slots=True)
class _Trial:
    """One attempt on a copy of the resources."""

    job: Job
    form: StartShape
    donors: ConcessionSearch
    books: ResourceViews
    preempt: bool
    ways: dict[int, Concession] = field(default_factory=dict)
    chosen: list[int] = field(default_factory=list)

    def clear(self, order: Sequence[int], nodes: int, share: int) -> bool:
        """Free `share` GPUs on `nodes` of these nodes; return whether that was possible."""
        need = self.form.seat.need
        for i in order:
            before = self.books.copy(), dict(self.ways)
            while int(self.books.later.room(need)[i]) < share:
                way = self._cheapest(i, share)
                if way is None:
                    self.books, self.ways = before
                    break
                self.books.change(way.tenant.need, way.tenant.current, way.target)
                self.ways[way.tenant.job.job_id] = way
            else:
                self.chosen.append(i)
            if len(self.chosen) == nodes:
                return True
        return False

    def _cheapest(self, node: int, share: int) -> Concession | None:
        """Return the change that frees GPUs on a node at the least cost per GPU freed.

        Preemption comes last, of the job with the lowest priority.
        """
        found: list[tuple[int, float, int, Concession]] = []
        for tenant, held in self.donors.on_node.get(node, ()):
            if tenant.job.job_id in self.ways:
                continue
            freed = min(held, self._missing(node, share, tenant.need))
            way = self._way(tenant, node, freed)
            rank = -1
            if (
                way is None
                and self.preempt
                and tenant.standing is Eligibility.FREE
                and tenant.job.priority < self.job.priority
            ):
                rank = tenant.job.priority
                way = Concession(
                    tenant=tenant, target=None, beneficiary=self.job, cost_s=_PREEMPTION_S
                )
            if way is not None:
                found.append((rank, way.cost_s / freed, tenant.job.job_id, way))
        return min(found, key=lambda f: f[:3])[3] if found else None

    def _missing(self, node: int, share: int, giver: ResourceNeed) -> int:
        """Return the GPUs that a job must free on a node, so that CPUs and memory suffice, too."""
        need, later = self.form.seat.need, self.books.later
        missing = float(share - later.gpus[node])
        if giver.cpus_per_gpu > 0:
            missing = max(missing, (need.cpus(share) - later.cpus[node]) / giver.cpus_per_gpu)
        if giver.memory_per_gpu_mb > 0:
            lacks = need.memory(share) - later.memory[node]
            missing = max(missing, lacks / giver.memory_per_gpu_mb)
        return max(1, math.ceil(missing - 1e-6))

    def _way(self, tenant: RoundJob, node: int, freed: int) -> Concession | None:
        """Return the largest size, moved or shrunk, at which a job frees `freed` GPUs on a node."""
        current, frame = tenant.current, self.donors.frame
        assert current is not None
        unit = tenant.directive.unit_for(current.gpu_type)
        sizes = [s for s in tenant.directive.sizes(current.gpu_type) if s <= current.gpus]
        if not sizes:
            return None
        held = frame.shares(current.shares)
        caps: Mapping[int, int] = {i: held.get(i, 0) for i in self.chosen} | {
            node: held[node] - freed
        }
        seat = tenant.seat(frame)
        self.books.give(tenant.need, current)
        free, target = self.books.later.meet(self.books.now), None
        for size in dict.fromkeys([*sizes[::-1][:_MOST_SIZES], sizes[0]]):
            target = fit(seat, current.gpu_type, size, free, unit=unit, caps=caps)
            if target is not None:
                break
        self.books.take(tenant.need, current)
        if target is None:
            return None
        before, after = tenant.speed(frame, current), tenant.speed(frame, target)
        loss = math.log(max(before, 1e-12) / max(after, 1e-12)) * self.donors.payback_s
        return Concession(
            tenant=tenant,
            target=target,
            beneficiary=self.job,
            cost_s=tenant.cost_s + max(0.0, loss),
        )
