"""Requests of jobs at the requested size, and proposals of that size or nothing.

The requested size is the application's (`record.learned`), else what the job holds or, while
pending, asks for, else its MIN; on each GPU type the nearest legal size not above it, or the
type's smallest.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_elastic.core.cluster import Allocation, Job, Snapshot
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import Alternative, JobRecord, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.policy_protocol import Question

#: A GPU type and a number of GPUs.
Shape = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RigidRequest:
    """One job with the shapes that count as its request.

    Attributes:
        shapes: (type, GPUs) in order of preference, those that this cluster can ever give.
        held: its allocation, also when that is of another size.
    """

    job: Job
    record: JobRecord
    shapes: tuple[Shape, ...]
    held: Allocation | None

    @property
    def present(self) -> Shape | None:
        """Type and number of the GPUs that it holds."""
        return (self.held.gpu_type, self.held.gpus) if self.held else None

    @property
    def staying_first(self) -> tuple[Shape, ...]:
        """Return its shapes, the type that it runs on before the others."""
        kind = self.held.gpu_type if self.held else None
        return tuple(sorted(self.shapes, key=lambda s: s[0] != kind))


class Pool:
    """GPUs by type that are not allocated yet."""

    def __init__(self, capacity: Mapping[str, int]) -> None:
        self.free = dict(capacity)

    def room(self, shape: Shape) -> bool:
        """Return whether a shape fits."""
        return shape[1] <= self.free.get(shape[0], 0)

    def take(self, shape: Shape) -> None:
        """Allocate a shape."""
        self.free[shape[0]] = self.free.get(shape[0], 0) - shape[1]

    def first(self, shapes: Iterable[Shape]) -> Shape | None:
        """Return the first of these that fits, None if none does."""
        return next((s for s in shapes if self.room(s)), None)


def requests(question: Question) -> list[RigidRequest]:
    """Return the question's jobs in order of their first submission, then of their ids."""
    total = gpus_of(question.snapshot)
    rigid_requests = []
    for job, record, directive in question.elastic():
        shapes = tuple(_shapes(job, record, directive, total))
        rigid_requests.append(
            RigidRequest(job=job, record=record, shapes=shapes, held=job.allocation)
        )
    return sorted(rigid_requests, key=lambda r: (arrival(r.job), r.job.job_id))


def arrival(job: Job) -> float:
    """Return when the job was first submitted (epoch s); a requeue does not change it."""
    return float(job.submission.submitted if job.submission else 0) or job.submit_time


def gpus_of(snapshot: Snapshot) -> dict[str, int]:
    """Return the GPUs by type, in use or not."""
    total: dict[str, int] = {}
    for node in snapshot.nodes:
        if node.gpus:
            total[node.gpu_type] = total.get(node.gpu_type, 0) + node.gpus
    return dict(sorted(total.items()))


def proposal(
    request: RigidRequest, chosen: Shape | None, reason: Reason, value: float = 0.0
) -> Proposal:
    """Propose the chosen shape, else the present one, else waiting; None: waiting first."""
    wait = Alternative(gpu_type="", gpus=0, value=-math.inf, reason=reason)
    ranked = [] if chosen else [wait]
    for shape in dict.fromkeys((chosen, request.present)):
        if shape:
            shape_reason = reason if shape == chosen else Reason("choice-no-place")
            ranked.append(
                Alternative(gpu_type=shape[0], gpus=shape[1], value=value, reason=shape_reason)
            )
    ranked += [wait] if chosen else []
    return Proposal(job_id=request.job.job_id, alternatives=tuple(ranked))


def waits(request: RigidRequest) -> Reason:
    """Return why a job gets nothing."""
    if not request.shapes:
        return Reason("no-suitable-gpus")
    return Reason("waits-for-shapes", shapes=request.shapes)


def elapsed(question: Question, since: Any) -> dict[str, float]:
    """Return the seconds that each elastic job held GPUs since a time (epoch s), by its key.

    None: since the start of its present run.
    """
    now, seconds = question.snapshot.time, {}
    for job in question.snapshot.jobs:
        if job.allocation is not None and job.submission is not None:
            begin = since if job.start_time is None else job.start_time
            begin = begin if since is None or begin is None else max(begin, since)
            seconds[job.key] = max(0.0, now - begin) if begin is not None else 0.0
    return seconds


def rates(
    request: RigidRequest, question: Question, per_node: Mapping[str, int]
) -> dict[Shape, float]:
    """Return the throughput in each shape: measured, else in proportion to the speed model."""
    model = question.models[request.job.job_id]
    learned = request.record.learned
    speeds, measured = {}, {}
    for kind, gpus in request.shapes:
        nodes = -(-gpus // per_node.get(kind, gpus))
        speeds[kind, gpus] = model.speed(kind, gpus, nodes)
        profile = learned.application.on(kind) if learned else None
        if profile is not None and profile.rate:
            measured[kind, gpus] = profile.rate
    if not measured:
        return speeds
    scale = sum(measured[s] / speeds[s] for s in measured) / len(measured)
    return {s: measured.get(s, scale * speeds[s]) for s in speeds}


def _shapes(
    job: Job, record: JobRecord, directive: Directive, total: Mapping[str, int]
) -> Iterator[Shape]:
    application = record.learned.application if record.learned else None
    names = directive.types or tuple(total)
    if not directive.types and not job.allocation and job.gpu_type in total:
        names = (job.gpu_type,)
    for name in names:
        sizes = directive.sizes(name)
        if not sizes or (application and not application.on(name)):
            continue
        requested_gpus = application.gpus if application else job.gpus
        legal = [s for s in (sizes[0], *_at_most(sizes, requested_gpus)) if s <= total.get(name, 0)]
        if legal:
            yield name, legal[-1]


def _at_most(sizes: Sequence[int], gpus: int) -> tuple[int, ...]:
    """Return the largest size within a number of GPUs, None if there is none."""
    count = bisect_right(sizes, gpus)
    return (sizes[count - 1],) if count > 0 else ()
