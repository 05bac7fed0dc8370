"""Policy `pollux`: GPUs by goodput and a genetic search, without regard to GPU types.

Qiao et al., OSDI'21. Each round (section 4.2):

    SPEEDUP_j(A_j) = max_m GOODPUT_j(A_j, m) / max_m GOODPUT_j(a_f, m)
    FITNESS_p(A)   = (1/J sum_j SPEEDUP_j(A_j)^p)^(1/p),    p = -1

with a_f the GPUs of 1/J of the cluster, and SPEEDUP_j times (T_j - R_j d) / (T_j + d) where A_j
changes: T_j the job's age, R_j its restarts, d the seconds of one. It is maximised by
genetic_search.py. A job gets at most twice the GPUs it was measured on (section 4.1).

Ours: where GPUs that are free now let a job reach a number of GPUs in place (placement/
in_place_places.py), d is what such a change costs.

In Sia's setting (SOSP'23, section 5.1) the cluster has several GPU types, which Pollux does
not distinguish: all nodes are shown as nodes of the smallest size, one goodput model is fitted to
all types together, no job gets more than the smallest type has, and of an allocation that mixes
types only the most frequent one is used; the other GPUs stay idle. Ours: a job that needs more than
the smallest type has gets the fewest GPUs that it runs on.

Simplified: the search is smaller and starts from the present allocation (genetic_search.py); the
result is a type and a number of GPUs, for which placement chooses the nodes, as for every policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slurm_elastic.config.schema import Config
from slurm_elastic.core.application import (
    Application,
    JobClass,
    Learned,
    Observation,
    TypeProfile,
)
from slurm_elastic.core.cluster import Job
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import Alternative, JobRecord, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.resize_kind import ResizeKind
from slurm_elastic.models.goodput import GoodputModel
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.placement.in_place_places import FreeRoom, place_in_place
from slurm_elastic.policies.baselines.genetic_search import (
    Bools,
    Floats,
    Ints,
    PlacementProblem,
    search,
)
from slurm_elastic.policies.baselines.rigid import arrival
from slurm_elastic.policies.policy_protocol import Capabilities, Question

#: All GPUs are of this type to Pollux.
_ANY = "any"
_GROWTH = 2
#: Goodput of distributed jobs is predicted for this many nodes; the model tells one from several.
_SEVERAL = 2


@dataclass(frozen=True, slots=True, eq=False)
class _VirtualNodes:
    """Nodes of equal size that stand for the cluster's.

    Attributes:
        names, types: [N] node and GPU type of each.
        capacity: [N] GPUs that jobs of the question may hold.
        size: GPUs of a full one.
    """

    names: tuple[str, ...]
    types: tuple[str, ...]
    capacity: Ints
    size: int


@dataclass(frozen=True, slots=True)
class _PolluxJob:
    """One job to decide on."""

    job: Job
    record: JobRecord
    directive: Directive
    model: SpeedModel


class Pollux:
    """The policy; it has no state."""

    capabilities = Capabilities(binding_proposals=True)

    def __init__(self, config: Config) -> None:
        self._restart_s = config.resize.restart_s
        self._curves: dict[int, tuple[object, Floats]] = {}

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Search an allocation of all jobs; see the module."""
        jobs = [
            _PolluxJob(job, record, directive, question.models[job.job_id])
            for job, record, directive in question.elastic()
        ]
        nodes = _virtual_nodes(question, jobs)
        reached = _reached_in_place(question, jobs)
        problem, fair = self._problem(question, jobs, nodes, reached)
        chosen = search(problem, seed=question.round_seed)
        proposals = tuple(
            _in_place_first(
                _proposal(job, nodes, chosen[row], float(fair[row])),
                reached[row],
                requeue_pays=_requeue_pays(problem, row, chosen[row]),
            )
            for row, job in enumerate(jobs)
        )
        return proposals, state

    def _problem(
        self,
        question: Question,
        jobs: Sequence[_PolluxJob],
        nodes: _VirtualNodes,
        reached: Sequence[Collection[tuple[str, int]]],
    ) -> tuple[PlacementProblem, Floats]:
        """Return the problem, and the GPUs of each job's fair share."""
        by_type: dict[str, int] = {}
        for kind, gpus in zip(nodes.types, nodes.capacity.tolist(), strict=True):
            by_type[kind] = by_type.get(kind, 0) + gpus
        smallest = max(1, min((g for g in by_type.values() if g), default=1))
        most = np.array([_most(j, smallest) for j in jobs], dtype=np.int64)
        present = _present(jobs, nodes)
        widths = most, nodes.capacity, present.sum(axis=1)
        width = max(1, *(int(w.max(initial=0)) for w in widths))
        share = max(1, int(nodes.capacity.sum()) // max(1, len(jobs)))
        fair = np.minimum(np.maximum(share, [_least(j) for j in jobs]), most)
        speedup = np.zeros((len(jobs), 2, width + 1))
        curves: dict[int, tuple[object, Floats]] = {}
        for row, job in enumerate(jobs):
            curve = self._curve(job, max(smallest, int(most[row])), nodes.size)
            curves[job.job.job_id] = (job.record.learned or job.model, curve)
            top = int(most[row])
            least = min(_least(job), top)
            gpus = int(fair[row])
            legal = curve[:, least : top + 1]
            if not legal.any():  # its batch is too small for what every type can: linear scaling
                legal = np.tile(np.arange(least, top + 1) / gpus, (2, 1))
            reference = curve[int(gpus > nodes.size), gpus] or 1.0
            speedup[row, :, least : top + 1] = legal / reference
        self._curves = curves
        now = question.snapshot.time
        factor = self._factors(now, jobs)
        near, near_factor = None, None
        if any(reached):
            near = _nodes_of_own_type(jobs, nodes)
            near_factor = np.tile(factor[:, None], (1, width + 1))
            paused = self._factors(now, jobs, ResizeKind.IN_PLACE)
            for row, shapes in enumerate(reached):
                near_factor[row, [gpus for _, gpus in shapes if gpus <= width]] = paused[row]
        return PlacementProblem(
            capacity=nodes.capacity,
            speedup=speedup,
            least=np.minimum([_least(j) for j in jobs], most).astype(np.int64),
            most=most,
            present=present,
            factor=factor,
            near=near,
            near_factor=near_factor,
        ), fair.astype(np.float64)

    def _curve(self, job: _PolluxJob, most: int, size: int) -> Floats:
        """Return [2, G + 1] goodput on one node and on several; kept until something is learned."""
        knowledge = job.record.learned or job.model
        cached = self._curves.get(job.job.job_id)
        if cached is not None and cached[0] is knowledge and cached[1].shape[1] > most:
            return cached[1]
        gpus = np.arange(1, most + 1)
        curve = np.zeros((2, most + 1))
        learned = job.record.learned
        if learned is None:
            kind = next(iter(job.directive.types), job.job.gpu_type)
            curve[0, 1:] = job.model.speeds(kind, gpus, np.ones_like(gpus))
            curve[1, 1:] = job.model.speeds(kind, gpus, -(-gpus // size))
            return curve
        model = GoodputModel.of(type_blind(learned), per_node={_ANY: size})
        curve[0, 1:] = model.goodputs(_ANY, np.ones_like(gpus), gpus)
        curve[1, 2:] = model.goodputs(_ANY, np.full(most - 1, _SEVERAL), gpus[1:])
        return curve

    def _factors(
        self, now: float, jobs: Sequence[_PolluxJob], kind: ResizeKind = ResizeKind.REQUEUE
    ) -> Floats:
        """Return [J] the factor of an allocation changed so; 1 for jobs that hold nothing.

        Past changes count with the seconds of this kind, those in place at most with their own.
        """
        factors = np.ones(len(jobs))
        for row, job in enumerate(jobs):
            if job.job.allocation is None:
                continue
            record = job.record
            change_s = record.cost_s(kind, self._restart_s)
            pause_s = min(change_s, record.cost_s(ResizeKind.IN_PLACE, self._restart_s))
            lost_s = record.resizes * change_s - record.resizes_in_place * (change_s - pause_s)
            age_s = max(0.0, now - arrival(job.job))
            factors[row] = max(0.0, age_s - lost_s) / max(age_s + change_s, 1e-9)
        return factors


def type_blind(learned: Learned) -> Learned:
    """Return learned data as if all GPUs were of one type; the first value of a shape counts.

    A replica may compute what every type can, and has as many GPUs as on the type where it needs
    most: shapes that are no multiple of these are left out.
    """
    application = _of_one_type(learned.application)
    unit = application.types[0].unit if application.types else 1
    seen: dict[tuple[int, int, int], Observation] = {}
    for observation in learned.observations:
        if observation.gpus % unit:
            continue
        key = (observation.nodes, observation.gpus, observation.micro_batch)
        seen.setdefault(key, dataclasses.replace(observation, gpu_type=_ANY))
    return dataclasses.replace(learned, application=application, observations=tuple(seen.values()))


def _of_one_type(application: Application) -> Application:
    types = application.types
    if not types:
        return application
    least = max(t.least for t in types)
    any_type = TypeProfile(
        _ANY,
        least=least,
        most=max(least, min(t.most for t in types)),
        unit=max(t.unit for t in types),
    )
    return dataclasses.replace(application, types=(any_type,), profiled=False)


def _least(job: _PolluxJob) -> int:
    """Return the fewest GPUs that the job runs on, on any type."""
    sizes = [job.directive.sizes(t) for t in job.directive.types or (job.job.gpu_type or "",)]
    return min((s[0] for s in sizes if len(s)), default=max(1, job.directive.min_gpus))


def _most(job: _PolluxJob, smallest: int) -> int:
    """Return the most GPUs: twice those measured, and no more than the smallest type has.

    A job may keep what it holds, within its directive, and get the fewest GPUs that it runs on.
    """
    learned = job.record.learned
    shapes = learned.observations if learned else job.record.measurements
    measured = max((s.gpus for s in shapes), default=0)
    most = max(_least(job), _GROWTH * measured)
    if learned is not None and learned.application.job_class is JobClass.RIGID:
        most = job.directive.max_gpus
    held = job.job.allocation.gpus if job.job.allocation else 0
    return max(1, min(job.directive.max_gpus, max(held, min(most, max(smallest, _least(job))))))


def _virtual_nodes(question: Question, jobs: Sequence[_PolluxJob]) -> _VirtualNodes:
    """Return the nodes in pieces of the smallest one, with what the question's jobs may hold."""
    own: dict[str, int] = {}
    for job in jobs:
        for name, gpus in job.job.allocation.shares if job.job.allocation else ():
            own[name] = own.get(name, 0) + gpus
    members = [n for n in question.snapshot.nodes if n.gpus]
    size = min((n.gpus for n in members), default=1)
    left = dict(question.capacity)
    names: list[str] = []
    types: list[str] = []
    capacity: list[int] = []
    for node in members:
        idle = max(0, node.gpus - node.used_gpus) if node.available else 0
        usable = min(idle + own.get(node.name, 0), left.get(node.gpu_type, 0), node.gpus)
        left[node.gpu_type] = left.get(node.gpu_type, 0) - usable
        while usable > 0:
            names.append(node.name)
            types.append(node.gpu_type)
            capacity.append(min(size, usable))
            usable -= size
    return _VirtualNodes(tuple(names), tuple(types), np.array(capacity, dtype=np.int64), size)


def _present(jobs: Sequence[_PolluxJob], nodes: _VirtualNodes) -> Ints:
    """Return [J, N] the GPUs that each job holds."""
    left = nodes.capacity.copy()
    present = np.zeros((len(jobs), len(left)), dtype=np.int64)
    for row, job in enumerate(jobs):
        for name, gpus in job.job.allocation.shares if job.job.allocation else ():
            for at, of_node in enumerate(nodes.names):
                if of_node == name and gpus:
                    taken = min(gpus, int(left[at]))
                    present[row, at] += taken
                    left[at] -= taken
                    gpus -= taken  # noqa: PLW2901
    return present


def _reached_in_place(
    question: Question, jobs: Sequence[_PolluxJob]
) -> list[frozenset[tuple[str, int]]]:
    """Return for each job the types and GPUs that it can reach in place, into GPUs free now."""
    per_node = question.snapshot.per_node
    free_room = FreeRoom(question.snapshot)
    reached = []
    for job in jobs:
        held, base = job.job.allocation, job.job.base_allocation
        shapes: list[tuple[str, int]] = []
        if held is not None and base is not None and job.record.in_place:
            kind, most = held.gpu_type, per_node.get(held.gpu_type, 0)
            sizes = [n for n in job.directive.sizes(kind) if n >= base.gpus and n != held.gpus]
            room = free_room.of(job.job, -(-max(sizes, default=1) // max(1, most)))
            shapes = [(kind, n) for n in sizes if place_in_place(job.job, n, most, room)]
        reached.append(frozenset(shapes))
    return reached


def _nodes_of_own_type(jobs: Sequence[_PolluxJob], nodes: _VirtualNodes) -> Bools:
    """Return [J, N] the nodes of the type that each job holds."""
    held = [j.job.allocation.gpu_type if j.job.allocation else None for j in jobs]
    return np.array([[kind == own for kind in nodes.types] for own in held], dtype=np.bool_)


def _requeue_pays(problem: PlacementProblem, row: int, chosen: Ints) -> bool:
    """Return whether a job's chosen GPUs are worth a requeue, too."""

    def speedup(allocation: Ints) -> float:
        spread = int((allocation > 0).sum() > 1)
        return float(problem.speedup[row, spread, int(allocation.sum())])

    return speedup(chosen) * float(problem.factor[row]) > speedup(problem.present[row])


def _in_place_first(
    proposal: Proposal, reached: Collection[tuple[str, int]], *, requeue_pays: bool
) -> Proposal:
    """Return the proposal with the first alternative as a change in place, where it can be one.

    Args:
        proposal: of one job.
        reached: types and GPUs that it can reach in place.
        requeue_pays: whether the first alternative is proposed as a requeue after that.
    """
    first, *others = proposal.alternatives
    if (first.gpu_type, first.gpus) not in reached:
        return proposal
    requeued = [first] if requeue_pays else []
    alternatives = (dataclasses.replace(first, in_place=True), *requeued, *others)
    return dataclasses.replace(proposal, alternatives=alternatives)


def _proposal(job: _PolluxJob, nodes: _VirtualNodes, row: Ints, fair: float) -> Proposal:
    """Rank the most frequent type of an allocation, the present shape, and waiting."""
    held = job.job.allocation
    present = (held.gpu_type, held.gpus) if held else None
    counts: dict[str, int] = {}
    for kind, gpus in zip(nodes.types, row.tolist(), strict=True):
        if gpus:
            counts[kind] = counts.get(kind, 0) + gpus
    ranked: list[Alternative] = []
    by_count = sorted(counts, key=lambda k: (-counts[k], not held or held.gpu_type != k, k))
    for kind in by_count:
        sizes = [s for s in job.directive.sizes(kind) if s <= counts[kind]]
        if sizes:
            reason = Reason("speedup-search", gpus=sizes[-1], gpu_type=kind, fair=fair)
            value = sizes[-1] / max(fair, 1.0)
            ranked.append(Alternative(gpu_type=kind, gpus=sizes[-1], value=value, reason=reason))
            break
    waits = Alternative(gpu_type="", gpus=0, value=0.0, reason=Reason("others-speedup-more"))
    if not ranked:
        ranked.append(waits)
    if present and present not in [(a.gpu_type, a.gpus) for a in ranked]:
        ranked.append(
            Alternative(
                gpu_type=present[0],
                gpus=present[1],
                value=0.0,
                reason=Reason("choice-no-place"),
            )
        )
    if waits not in ranked:
        ranked.append(waits)
    return Proposal(job_id=job.job.job_id, alternatives=tuple(ranked))
