"""Policy `fair`: each job gets its MIN, then GPU by GPU the job that gains most from one more.

Gains are in utility per GPU (policies/utility_curves.py), so the division maximises
the product of the jobs' speed-ups: jobs that scale alike get equal shares, one that stops scaling
stops growing, and none is starved for a faster one. A GPU that a job holds already counts for
more, by what both sides of a trade would lose to restarting, so that GPUs do not go back and forth
(docs/policies.md, docs/adr/0002-fair-share.md).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Job, JobState, Limit
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import Alternative, JobRecord, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.policies.policy_protocol import Capabilities, Question
from slurm_elastic.policies.utility_curves import UtilityCurve, curve

#: Sizes offered between the best and the present one: in growing steps from both ends.
_STEPS_BETWEEN = 5
_EPSILON = 1e-9
#: Digits of utility per GPU, so that equal jobs tie exactly and the tie rules decide.
_DIGITS = 9


@dataclass(slots=True)
class _Share:
    """Share of one job while GPUs are divided.

    Attributes:
        cost_s: seconds that a requeue of it costs.
        costs_s: of a change to each smaller size on the type that it holds.
        types: types it may run on, in order of preference.
        at: index into the sizes of its curve; -1 while it has nothing.
        held: GPUs it holds now of the type it is to run on.
        fallback: the shape to keep when a change of type is refused.
        short: why it gets nothing; None: it gets something.
    """

    job: Job
    directive: Directive
    model: SpeedModel
    cost_s: float
    costs_s: Mapping[int, float]
    types: tuple[str, ...]
    per_node: Mapping[str, int]
    max_nodes: int | None
    gpu_type: str = ""
    curve: UtilityCurve | None = None
    at: int = -1
    held: int = 0
    fallback: tuple[str, int] | None = None
    short: Reason | None = None

    def on(self, gpu_type: str) -> UtilityCurve | None:
        """Return its curve on a type; None where it cannot run."""
        sizes = self.directive.sizes(gpu_type)
        per_node = self.per_node.get(gpu_type, 0)
        if not sizes or not per_node:
            return None
        return curve(
            self.model,
            sizes,
            gpu_type,
            unit=self.directive.unit_for(gpu_type),
            per_node=per_node,
            max_nodes=self.max_nodes,
        )

    def put(self, gpu_type: str, on: UtilityCurve, at: int) -> None:
        """Set its type and size."""
        self.gpu_type, self.curve, self.at = gpu_type, on, at
        held = self.job.allocation
        self.held = held.gpus if held and held.gpu_type == gpu_type else 0

    @property
    def gpus(self) -> int:
        return int(self.curve.sizes[self.at]) if self.curve and self.at >= 0 else 0


class _Pool:
    """GPUs by type, and the limits on them, that are not allocated yet."""

    def __init__(self, question: Question) -> None:
        self.free = dict(question.capacity)
        job_ids = set(question.jobs)
        self._given: dict[int, int] = {}
        self._limits: list[Limit] = []
        self._left: list[float] = []
        self._limits_of: dict[int, list[int]] = {}
        for limit in question.snapshot.limits:
            counted = limit.jobs & job_ids
            if counted and (limit.resource == "gpu" or limit.resource.startswith("gpu:")):
                for job_id in counted:
                    self._limits_of.setdefault(job_id, []).append(len(self._limits))
                others = (question.snapshot.job.get(j) for j in limit.jobs - job_ids)
                self._limits.append(limit)
                self._left.append(limit.cap - sum(_used(limit, j) for j in others if j))

    def most(self, job_id: int, gpu_type: str) -> int:
        """Return the GPUs of this type that the job could get beyond its share."""
        left = float(self.free.get(gpu_type, 0))
        for i in self._limits_of.get(job_id, ()):
            limit = self._limits[i]
            if limit.resource in ("gpu", f"gpu:{gpu_type}"):
                spared = max(0, limit.spared.get(job_id, 0) - self._given.get(job_id, 0))
                left = min(left, max(0.0, self._left[i]) + spared if spared else self._left[i])
        return int(left)

    def take(self, job_id: int, gpu_type: str, gpus: int) -> None:
        self.free[gpu_type] = self.free.get(gpu_type, 0) - gpus
        given = self._given.get(job_id, 0)
        self._given[job_id] = given + gpus
        for i in self._limits_of.get(job_id, ()):
            limit = self._limits[i]
            if limit.resource in ("gpu", f"gpu:{gpu_type}"):
                spared = limit.spared.get(job_id, 0)
                self._left[i] -= max(0, given + gpus - spared) - max(0, given - spared)


class FairShare:
    """The policy; it keeps no state."""

    capabilities = Capabilities(batch_chosen_by="user")

    def __init__(self, config: Config) -> None:
        self._resize = config.resize

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Rank alternatives for every job of the question; see the module."""
        pool = _Pool(question)
        shares = self._shares(question)
        for share in shares:
            _minimum(share, pool)
        self._fill(shares, pool)
        if self._change_types(shares, pool):
            self._fill(shares, pool)
        return tuple(_proposal(share) for share in shares), state

    def _shares(self, question: Question) -> list[_Share]:
        """Return the jobs' shares: running ones first, then by priority and age."""
        per_node = question.snapshot.per_node
        everything = tuple(sorted(per_node))
        max_nodes = {p.name: p.max_nodes for p in question.snapshot.partitions}
        shares = []
        for job, record, directive in question.elastic():
            shares.append(
                _Share(
                    job=job,
                    directive=directive,
                    model=question.models[job.job_id],
                    cost_s=record.change_s(self._resize.restart_s),
                    costs_s=self._costs_s(job, record, directive),
                    types=directive.types or everything,
                    per_node=per_node,
                    max_nodes=max_nodes.get(job.partition),
                )
            )
        shares.sort(key=_precedence)
        return shares

    def _fill(self, shares: Iterable[_Share], pool: _Pool) -> None:
        """Divide the remaining GPUs by marginal utility; ties go to the lowest job id."""
        heap: list[tuple[float, int, int, int]] = []
        by_id = {s.job.job_id: s for s in shares}
        for share in by_id.values():
            self._offer(heap, share)
        while heap:
            *_, job_id, end = heapq.heappop(heap)
            share = by_id[job_id]
            on = share.curve
            assert on is not None
            left = pool.most(job_id, share.gpu_type) + share.gpus
            target = end if on.sizes[end] <= left else on.best(share.at, left)
            if target > share.at:
                pool.take(job_id, share.gpu_type, int(on.sizes[target]) - share.gpus)
                share.at = target
                if target == end:
                    self._offer(heap, share)

    def _costs_s(self, job: Job, record: JobRecord, directive: Directive) -> Mapping[int, float]:
        held = job.allocation
        if held is None or not record.by_companions:
            return {}
        sizes = [n for n in directive.sizes(held.gpu_type) if n < held.gpus]
        return record.costs_s(job, sizes, self._resize.restart_s)

    def _offer(self, heap: list[tuple[float, int, int, int]], share: _Share) -> None:
        """Push the next step of a job's envelope onto the heap."""
        on = share.curve
        if on is None or share.at < 0:
            return
        vertex = bisect_right(on.vertices, share.at)
        if vertex == len(on.vertices):
            return
        end = on.vertices[vertex]
        begins = int(on.sizes[share.at])
        step = int(on.sizes[end]) - begins
        gain = float(on.utility[end] - on.utility[share.at]) / step
        if gain <= _EPSILON:
            return
        own = min(1.0, max(0.0, (share.held - begins) / step))
        lost_s = share.costs_s.get(begins, share.cost_s) if share.held else share.cost_s
        trade = (lost_s + self._resize.restart_s) / self._resize.payback_s
        gain = gain * (1 + self._resize.min_gain * own) + trade * own
        heapq.heappush(heap, (-round(gain, _DIGITS), 0 if own else 1, share.job.job_id, end))

    def _change_types(self, shares: Iterable[_Share], pool: _Pool) -> bool:
        """Move jobs to remaining GPUs of another type where that pays; return whether any moved."""
        wishes = []
        for share in shares:
            if share.curve is None or share.at < 0 or share.job.state is not JobState.RUNNING:
                continue
            for rank, name in enumerate(share.types):
                gain = self._gain_on(share, name, pool)
                if gain > 0:
                    wishes.append((-round(gain, _DIGITS), rank, share.job.job_id, name, share))
        changed: set[int] = set()
        for _, _, job_id, name, share in sorted(wishes, key=lambda w: w[:3]):
            if job_id in changed or self._gain_on(share, name, pool) <= 0:
                continue
            on = share.on(name)
            assert on is not None
            pool.take(job_id, share.gpu_type, -share.gpus)
            share.fallback = (share.gpu_type, share.gpus)
            share.put(name, on, _largest(on, pool.most(job_id, name)))
            pool.take(job_id, name, share.gpus)
            changed.add(job_id)
        return bool(changed)

    def _gain_on(self, share: _Share, gpu_type: str, pool: _Pool) -> float:
        """Return the log-speed won on another type's idle GPUs less the least of a change, or 0."""
        least = share.directive.sizes(gpu_type)
        if gpu_type == share.gpu_type or not least or share.curve is None:
            return 0.0
        idle = pool.most(share.job.job_id, gpu_type)
        on = share.on(gpu_type) if idle >= least[0] else None
        if on is None or (at := _largest(on, idle)) < 0:
            return 0.0
        worth = math.log1p(self._resize.min_gain) + share.cost_s / self._resize.payback_s
        gain = math.log(on.speeds[at] / share.curve.speeds[share.at])
        return gain if gain > worth + _EPSILON else 0.0


def _minimum(share: _Share, pool: _Pool) -> None:
    """Give a job its smallest size: running on its type, pending on the first that has room."""
    held, names = share.job.allocation, share.types
    if held and held.gpu_type in names:
        names = (held.gpu_type,)
    elif share.job.gpu_type in names and not share.directive.types:
        names = (share.job.gpu_type,)
    share.short = Reason("no-gpu-type")
    for name in names:
        on = share.on(name)
        if on is None:
            continue
        least = int(on.sizes[0])
        if pool.most(share.job.job_id, name) >= least:
            share.put(name, on, 0)
            pool.take(share.job.job_id, name, least)
            return
        share.short = Reason("waits-for-min", gpus=least, gpu_type=name)


def _proposal(share: _Share) -> Proposal:
    """Rank best, next smaller sizes, present shape; for a pending job MIN, and at last waiting."""
    held, on = share.job.allocation, share.curve
    alternatives: dict[tuple[str, int], Alternative] = {}

    def add(gpu_type: str, gpus: int, reason: Reason | None) -> None:
        value = -math.inf
        if on is not None and gpu_type == share.gpu_type and gpus >= on.sizes[0]:
            value = float(on.utility[on.at(gpus)])
        alternatives.setdefault(
            (gpu_type, gpus), Alternative(gpu_type=gpu_type, gpus=gpus, value=value, reason=reason)
        )

    if on is not None and share.at >= 0:
        add(share.gpu_type, share.gpus, _share_reason(share, on))
        kept = held.gpus if held and share.directive.allows(held.gpus, held.gpu_type) else 0
        if share.fallback and share.fallback[1] > kept:
            add(*share.fallback, Reason("share-on-present-type"))
        floor = on.at(share.held) if share.held else 0
        steps = [2**i for i in range(_STEPS_BETWEEN)]
        between = {share.at - step for step in steps} | {floor + step for step in steps}
        for index in sorted(between, reverse=True):
            if floor < index < share.at:
                add(share.gpu_type, int(on.sizes[index]), Reason("next-size"))
    if held:
        add(held.gpu_type, held.gpus, Reason("nothing-better"))
    else:
        if on is not None and share.at >= 0:
            add(share.gpu_type, int(on.sizes[0]), Reason("min-first"))
        add("", 0, share.short if share.at < 0 else Reason("nothing-free"))
    return Proposal(job_id=share.job.job_id, alternatives=tuple(alternatives.values()))


def _precedence(share: _Share) -> tuple[bool, int, float, int]:
    job = share.job
    return (job.allocation is None, -job.priority, job.submit_time, job.job_id)


def _used(limit: Limit, job: Job) -> int:
    held = job.allocation
    if held is None or limit.resource not in ("gpu", f"gpu:{held.gpu_type}"):
        return 0
    return max(0, held.gpus - limit.spared.get(job.job_id, 0))


def _largest(on: UtilityCurve, gpus: int) -> int:
    """Return the index of the largest vertex within this many GPUs; -1: there is none."""
    return max((i for i in on.vertices if on.sizes[i] <= gpus), default=-1)


def _share_reason(share: _Share, on: UtilityCurve) -> Reason:
    """Return the reason for a share."""
    gpus, most = share.gpus, share.directive.sizes(share.gpu_type)[-1]
    if share.fallback:
        return Reason("idle-type-helps", gpu_type=share.gpu_type)
    if gpus == most:
        held = share.job.allocation
        grows = held is not None and held.gpus < gpus
        return Reason("grows-to-max", gpus=gpus) if grows else Reason("holds-max", gpus=gpus)
    if not share.at:
        return Reason("min-share", gpus=gpus)
    if share.at == on.vertices[-1]:
        return Reason("more-not-faster")
    return Reason("fair-share", gpus=gpus, most=most)
