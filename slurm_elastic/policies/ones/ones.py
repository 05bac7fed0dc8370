"""Policy `ones`: the published evolution of schedules, with batches that follow the GPUs.

ONES (Bian et al., SC'21). A population of schedules evolves (evolution.py); each job starts on its
least size, and its limit doubles with the epochs that it does (size_limits.py). Jobs of which the
best schedule fits into free GPUs start at once. The rest of it is put into effect once every
running job that it changes has ended an epoch since the schedule was last changed, for whatever
job.

The score of a schedule is the GPU seconds that its jobs still need. They follow here from the
progress that jobs report, else from their predicted run time, else a job takes as long again as it
has run; the published prediction from losses is `benchmarks/ones/beta_progress.py`. Jobs here
have no epochs: a training counts as `_EPOCHS` epochs, or as one a minute without progress.

ONES knows one GPU type. Each type has a population of its own here; a waiting job belongs to the
type, of those that it may have, with the fewest GPUs asked for per GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slurm_elastic.config.schema import Config
from slurm_elastic.core.plan import Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.baselines.rigid import RigidRequest, elapsed, proposal, requests
from slurm_elastic.policies.ones.block_order import EMPTY
from slurm_elastic.policies.ones.evolution import (
    EvolvingJobs,
    Ints,
    first_generation,
    next_generation,
    sizes_of,
)
from slurm_elastic.policies.ones.size_limits import EPOCHS, SizeLimit, room_of_largest
from slurm_elastic.policies.policy_protocol import Capabilities, Question

#: Epochs of a training, as in the median of the 20 published types, and seconds of one without
#: reported progress.
_EPOCHS, _EPOCH_S = 30.0, 60.0
#: Generations in a round; published is one a second.
_GENERATIONS = 5
#: Progress below this predicts nothing.
_LEAST_PROGRESS = 1e-3


@dataclass(frozen=True, slots=True)
class _OnesJob:
    """One job on its GPU type, with what it has done.

    Attributes:
        scheduled_at: epochs that it had done when the schedule that it is in was last changed.
    """

    request: RigidRequest
    gpu_type: str
    sizes: tuple[int, ...]
    limit: SizeLimit
    epochs: float
    scheduled_at: float
    ran_s: float
    worked_s: float

    @property
    def key(self) -> str:
        return self.request.job.key

    @property
    def held(self) -> int:
        return self.request.held.gpus if self.request.held else 0

    def largest(self, gpus: int) -> int:
        """Return its largest size within a number of GPUs, 0: none."""
        return max((s for s in self.sizes if s <= gpus), default=0)

    def remaining_s(self) -> float:
        """Return the predicted seconds on one GPU until its end."""
        record = self.request.record
        if record.progress is not None and record.progress >= _LEAST_PROGRESS:
            return self.worked_s * max(0.0, 1 / record.progress - 1)
        if record.length is not None:
            return record.length.given(self.ran_s).mean * self.limit.requested
        return max(self.worked_s, 1.0)


class Ones:
    """The policy; its state is what each job has done, and the population of each GPU type."""

    capabilities = Capabilities(binding_proposals=True, batch_chosen_by="controller")

    def __init__(self, config: Config) -> None:
        del config

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Evolve the schedules of each type, and propose the best one; see the module."""
        rng = np.random.default_rng(question.round_seed)
        jobs = self._account(question, state)
        proposals: list[Proposal] = []
        entries: dict[str, dict[str, Any]] = {}
        populations: dict[str, list[list[str]]] = {}
        old = state.get("populations", {})
        for gpu_type in sorted(question.capacity):
            of_type = [j for j in jobs if j.gpu_type == gpu_type]
            gpus = question.capacity[gpu_type]
            if not of_type:
                continue
            evolving = _evolving(of_type, question, gpus)
            present = _present(of_type, gpus)
            rows = _rows(old.get(gpu_type), of_type, gpus)
            if rows is None:
                rows = first_generation(evolving, gpus, rng)
            for _ in range(_GENERATIONS):
                rows = next_generation(rows, evolving, present, rng)
            keys = [*(j.key for j in of_type), ""]
            populations[gpu_type] = [[keys[at] for at in row] for row in rows.tolist()]
            sizes = sizes_of(rows[:1], len(of_type))[0]
            entries |= self._propose(of_type, sizes, gpus, proposals)
        known = {p.job_id for p in proposals}
        proposals += [
            proposal(request, request.present, Reason("no-suitable-gpus"))
            for request in requests(question)
            if request.job.job_id not in known
        ]
        return tuple(proposals), {
            "time": question.snapshot.time,
            "jobs": entries,
            "populations": populations,
        }

    def _propose(
        self, jobs: Sequence[_OnesJob], sizes: Ints, gpus: int, proposals: list[Proposal]
    ) -> dict[str, dict[str, Any]]:
        """Add the proposals of one type's jobs; return what is to be kept of them."""
        targets = [j.largest(int(n)) for j, n in zip(jobs, sizes, strict=True)]
        changed = [j for j, n in zip(jobs, targets, strict=True) if j.held and n != j.held]
        ready = all(j.epochs - j.scheduled_at >= 1 for j in changed)
        free = gpus - sum(j.held for j in jobs)
        given = []
        for job, target in zip(jobs, targets, strict=True):
            chosen, reason = target, Reason("evolved-schedule", gpus=target, gpu_type=job.gpu_type)
            if not ready and job.held:
                chosen, reason = job.held, Reason("schedule-waits-for-epoch")
            elif not ready:
                chosen = target if target <= free else 0
                free -= chosen
            if not chosen and ready:
                reason = Reason("others-scheduled")
            elif not chosen:
                reason = Reason("schedule-waits-for-epoch")
            shape = (job.gpu_type, chosen) if chosen else None
            proposals.append(proposal(job.request, shape, reason, float(chosen)))
            given.append(chosen)
        is_changed = any(n != j.held for j, n in zip(jobs, given, strict=True))
        entries = {}
        for job, chosen in zip(jobs, given, strict=True):
            limit = job.limit
            if chosen != job.held:
                limit = dataclasses.replace(limit, scaled_at=job.epochs)
            elif not chosen and ready and job.ran_s:
                limit = limit.stopped()
            entries[job.key] = {
                "type": job.gpu_type,
                "limit": limit.limit,
                "scaled_at": limit.scaled_at,
                "scheduled_at": job.epochs if is_changed and chosen else job.scheduled_at,
                "ran_s": job.ran_s,
                "worked_s": job.worked_s,
            }
        return entries

    def _account(self, question: Question, state: Mapping[str, Any]) -> list[_OnesJob]:
        """Return the jobs with what they have done up to now, on one type each."""
        since = elapsed(question, state.get("time"))
        old: Mapping[str, Any] = state.get("jobs", {})
        load: dict[str, float] = dict.fromkeys(question.capacity, 0.0)
        jobs = []
        for request in requests(question):
            entry = old.get(request.job.key, {})
            gpu_type = _type(request, entry, question, load)
            if gpu_type is None:
                continue
            sizes = [
                s for s in _sizes(request, gpu_type) if s <= question.capacity.get(gpu_type, 0)
            ]
            requested = dict(request.shapes).get(gpu_type, sizes[0])
            load[gpu_type] += requested / max(1, question.capacity[gpu_type])
            seconds = since.get(request.job.key, 0.0)
            held = request.held.gpus if request.held else 0
            model = question.models[request.job.job_id]
            worked = seconds * _speedup(model, gpu_type, held, question) if held else 0.0
            ran_s = entry.get("ran_s", 0.0) + seconds
            progress = request.record.progress
            epochs = ran_s / _EPOCH_S if progress is None else progress * _EPOCHS
            limit = SizeLimit(
                requested=requested,
                limit=entry.get("limit", max(sizes[0], held)),
                scaled_at=entry.get("scaled_at", 0.0),
            )
            if held:
                limit = limit.after_epochs(held, epochs, question.capacity[gpu_type])
            jobs.append(
                _OnesJob(
                    request,
                    gpu_type,
                    tuple(sizes),
                    limit,
                    epochs,
                    entry.get("scheduled_at", 0.0),
                    ran_s,
                    entry.get("worked_s", 0.0) + worked,
                )
            )
        return jobs


def _evolving(jobs: Sequence[_OnesJob], question: Question, gpus: int) -> EvolvingJobs:
    known = np.array([j.epochs >= EPOCHS for j in jobs])
    single = np.array([j.remaining_s() for j in jobs])
    service = np.zeros((len(jobs), gpus + 1))
    counts = np.arange(1, gpus + 1)
    per_node = question.snapshot.per_node
    for row, job in enumerate(jobs):
        if known[row]:
            nodes = -(-counts // max(1, per_node.get(job.gpu_type, 1)))
            speeds = question.models[job.request.job.job_id].speeds(job.gpu_type, counts, nodes)
            service[row, 1:] = counts * single[row] * speeds[0] / np.maximum(speeds, 1e-12)
    most = [j.sizes[-1] for j in jobs]
    room = [j.limit.room(j.held, j.epochs) for j in jobs]
    if lowered := _lowered(jobs, gpus):
        room[lowered[0]] = lowered[1]
    return EvolvingJobs(
        known=known,
        least=np.array([j.sizes[0] for j in jobs], dtype=np.int64),
        room=np.minimum(room, most).astype(np.int64),
        limit=np.minimum([j.limit.limit for j in jobs], most).astype(np.int64),
        single_s=single,
        service=service,
    )


def _lowered(jobs: Sequence[_OnesJob], gpus: int) -> tuple[int, int] | None:
    """Return the index and the lowered room of the job that is the largest for long."""
    counted = {i: j for i, j in enumerate(jobs) if j.held and j.epochs >= EPOCHS}
    return room_of_largest(
        {i: j.held for i, j in counted.items()},
        {i: j.ran_s for i, j in counted.items()},
        [j.ran_s for i, j in enumerate(jobs) if i not in counted and j.ran_s],
        gpus,
    )


def _present(jobs: Sequence[_OnesJob], gpus: int) -> Ints:
    present = np.full(gpus, EMPTY, dtype=np.int64)
    held = np.repeat(np.arange(len(jobs)), [j.held for j in jobs])[:gpus]
    present[: len(held)] = held
    return present


def _rows(kept: Any, jobs: Sequence[_OnesJob], gpus: int) -> Ints | None:
    """Return the schedules of the last round; jobs that ended leave, new GPUs are empty."""
    if not kept:
        return None
    index = {job.key: at for at, job in enumerate(jobs)}
    rows = np.full((len(kept), gpus), EMPTY, dtype=np.int64)
    for row, keys in zip(rows, kept, strict=True):
        entries = [index.get(key, EMPTY) for key in keys[:gpus]]
        row[: len(entries)] = entries
    return rows


def _type(
    request: RigidRequest, entry: Mapping[str, Any], question: Question, load: Mapping[str, float]
) -> str | None:
    """Return the GPU type that a job belongs to; None: it fits on none."""
    fitting = [
        name
        for name, gpus in sorted(question.capacity.items())
        if (sizes := _sizes(request, name)) and sizes[0] <= gpus
    ]
    for name in (request.held.gpu_type if request.held else None, entry.get("type")):
        if name in fitting:
            return str(name)
    return min(fitting, key=lambda name: load[name], default=None)


def _sizes(request: RigidRequest, gpu_type: str) -> Sequence[int]:
    directive = request.job.directive
    if directive is None or (directive.types and gpu_type not in directive.types):
        return ()
    if gpu_type not in dict(request.shapes):
        return ()
    return directive.sizes(gpu_type)


def _speedup(model: Any, gpu_type: str, gpus: int, question: Question) -> float:
    """Return the speed on this many GPUs in multiples of that on one."""
    nodes = -(-gpus // max(1, question.snapshot.per_node.get(gpu_type, gpus)))
    one, many = model.speeds(gpu_type, [1, gpus], [1, nodes])
    return float(many / one) if one > 0 else float(gpus)
