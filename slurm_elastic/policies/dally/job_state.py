"""State of each job under `dally`: its lease, its waits, its work. Our definition.

Kept from round to round, per job: when it last got or gave up GPUs (`since`), when its lease began,
its running time, the computing part of it, its service in GPU seconds, and the GPUs that it first
asked for. Its *work*, ideal seconds on those GPUs without communication, is

* reported progress p: the seconds computed so far over p;
* else its time limit;
* else twice the seconds computed so far: as much is left as was done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Allocation, Job, JobState
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import JobRecord
from slurm_elastic.models.live_communication import LiveCommunication, key_of
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.placement.best_fit import even_splits
from slurm_elastic.placement.delay.free_map import GangTier
from slurm_elastic.placement.free_resources import ResourceNeed
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.policies.baselines.rigid import Shape, arrival, elapsed, requests
from slurm_elastic.policies.dally.bid_order import Start
from slurm_elastic.policies.dally.gang import Gang
from slurm_elastic.policies.policy_protocol import Question

#: Least running time before a gang bids again, as a multiple of its restart.
RESTARTS = 10.0
#: Least part of its work that a gang counts as left.
_LEAST_LEFT = 1e-3
#: Smaller sizes that an elastic gang bids at, at most.
_SMALLER = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GangState:
    """One elastic job as a gang.

    Attributes:
        gang: attributes for orders; `gpus` is the requested size.
        shapes: requested (type, GPUs), in order of preference.
        held: its present allocation.
        until_s: the end of its lease, never before `firm_s`.
        firm_s: nothing is taken from it before.
        restart_s: assumed seconds of a restart that has not been measured.
    """

    gang: Gang
    job: Job
    record: JobRecord
    directive: Directive
    model: SpeedModel
    need: ResourceNeed
    shapes: tuple[Shape, ...]
    held: Allocation | None
    until_s: float
    firm_s: float
    restart_s: float

    @property
    def job_id(self) -> int:
        """Slurm's id."""
        return self.job.job_id

    @property
    def name(self) -> str:
        """Id for people."""
        return self.job.display_id

    @property
    def legal(self) -> bool:
        """Whether its directive in force allows what it holds."""
        return self.held is None or self.directive.allows(self.held.gpus, self.held.gpu_type)

    def change_s(self, place: Allocation) -> float:
        """Return the seconds without training of a change to a place, by its kind."""
        return self.record.cost_s(self.record.kind_of(self.job, place), self.restart_s)

    def sizes(self, gpu_type: str, per_node: int) -> tuple[int, ...]:
        """Return the sizes at which it may bid on a type, the requested one first, down to MIN.

        The others are those that fit evenly on the fewest nodes; of many, halves are tried.
        """
        requested = dict(self.shapes).get(gpu_type, 0)
        if not requested:
            return ()
        smaller = [s for s in self.directive.sizes(gpu_type) if s < requested]
        unit = self.directive.unit_for(gpu_type)
        even = [s for s in smaller[::-1] if _compact(s, per_node, unit)]
        chosen = even[:_SMALLER]
        while len(even) > _SMALLER:
            even = [s for s in even if s <= even[0] // 2]
            chosen += even[:1]
        return tuple(dict.fromkeys((requested, *chosen, *even, *smaller[:1])))


class GangStates:
    """State of all elastic jobs, updated to the question's time.

    Attributes:
        entries: by job key; JSON-serialisable.
        starts: jobs that began to run since the last round.
        live: cost of distance to them.
    """

    def __init__(self, question: Question, state: Mapping[str, Any], frame: NodeArrays) -> None:
        self._question = question
        self._frame = frame
        self.live = LiveCommunication.of(question.records, question.models)
        self.entries: dict[str, dict[str, Any]] = {}
        self.starts: list[Start] = []
        now, earlier = question.snapshot.time, state.get("jobs", {})
        held_s = elapsed(question, state.get("time"))
        for job in question.snapshot.jobs:
            if job.submission is None or job.state is JobState.ENDED:
                continue
            entry = dict(earlier.get(job.key) or _fresh(job))
            if job.allocation is not None:
                seconds = held_s[job.key]
                entry["ran"] += seconds
                entry["computed"] += seconds * self._part(job)
                entry["service"] += seconds * job.allocation.gpus
            place = _place(job.allocation)
            if place != entry["place"]:
                began = job.start_time if job.start_time is not None else now
                if job.allocation is not None and not entry["place"] and earlier:
                    tier = tier_of(frame, job.allocation)
                    waited_s = max(0.0, began - entry["since"])
                    self.starts.append(Start(began, job.allocation.gpus, tier, waited_s))
                entry["since"] = entry["lease"] = began if place else now
                entry["place"] = place
            application = self._application(job)
            entry["gpus"] = application or max(entry["gpus"], job.gpus)
            self.entries[job.key] = entry

    def renew(self, bidder: GangState) -> None:
        """Begin another lease."""
        entry = self.entries[bidder.job.key]
        entry["since"] = entry["lease"] = self._question.snapshot.time

    def bidders(self, config: Config) -> Iterator[GangState]:
        """Iterate over the question's jobs."""
        for request in requests(self._question):
            job, record = request.job, request.record
            directive = job.directive
            if directive is None:
                continue
            entry = self.entries[job.key]
            restart_s = config.resize.restart_s
            floor_s = max(config.dally.floor_s, RESTARTS * record.change_s(restart_s))
            began = max(job.start_time or entry["since"], record.last_change or 0.0)
            firm_s = began + floor_s
            model = self._question.models[job.job_id]
            shapes = list(_shapes(request.shapes, directive, entry["gpus"]))
            if not directive.types:
                shapes.sort(key=lambda s: -model.base(s[0]))
            yield GangState(
                gang=self._gang(job, record, entry),
                job=job,
                record=record,
                directive=directive,
                model=model,
                need=ResourceNeed.of(job),
                shapes=tuple(shapes),
                held=request.held,
                until_s=max(firm_s, entry["lease"] + config.dally.lease_s),
                firm_s=firm_s,
                restart_s=restart_s,
            )

    def _gang(self, job: Job, record: JobRecord, entry: Mapping[str, Any]) -> Gang:
        ran, computed = entry["ran"], entry["computed"]
        limit = float(job.time_limit_s or 0)
        if record.progress:
            done = min(1.0, record.progress)
            ideal = computed / done if computed else limit
        elif limit:
            ideal = max(limit, computed)
            done = computed / ideal
        else:
            ideal, done = 2 * computed, 0.5 if computed else 0.0
        return Gang(
            job_id=job.job_id,
            model=job.name,
            gpus=entry["gpus"],
            arrival_s=arrival(job),
            since_s=entry["since"],
            ideal_s=ideal,
            done=min(done, 1 - _LEAST_LEFT),
            ran_s=ran,
            service_gpu_s=entry["service"],
        )

    def _part(self, job: Job) -> float:
        """Return the part of its time that a running job computes."""
        held = job.allocation
        if held is None or job.job_id not in self._question.models:
            return 1.0
        nodes, racks = self._frame.topology.spread(n for n in held.nodes if n in self._frame.index)
        span = max(1, racks), max(1, nodes), max(1, nodes)
        return self.live.part(key_of(job.job_id, held.gpu_type), held.gpus, span)

    def _application(self, job: Job) -> int:
        record = self._question.records.get(job.job_id)
        learned = record.learned if record else None
        return learned.application.gpus if learned and learned.application.gpus else 0


def tier_of(frame: NodeArrays, held: Allocation) -> GangTier:
    """Return the tier of an allocation."""
    nodes, racks = frame.topology.spread(n for n in held.nodes if n in frame.index)
    if racks > 1:
        return GangTier.NETWORK
    if nodes > 1:
        return GangTier.RACK
    return GangTier.NODE if held.gpus > 1 else GangTier.SINGLE


@lru_cache(maxsize=65536)
def _compact(gpus: int, per_node: int, unit: int) -> bool:
    """Return whether a size divides evenly over the fewest nodes possible."""
    splits = even_splits(gpus, per_node, unit)
    return bool(splits) and splits[0][0] == -(-gpus // per_node)


def _fresh(job: Job) -> dict[str, Any]:
    return {
        "gpus": 0, "since": arrival(job), "lease": 0.0, "ran": 0.0, "computed": 0.0,
        "service": 0.0, "place": [],
    }  # fmt: skip


def _place(held: Allocation | None) -> list[list[Any]]:
    return [[node, gpus] for node, gpus in held.shares] if held else []


def _shapes(shapes: tuple[Shape, ...], directive: Directive, requested: int) -> Iterator[Shape]:
    """Iterate over the shapes of a request, at the size that was first asked for."""
    for gpu_type, gpus in shapes:
        sizes = directive.sizes(gpu_type)
        larger = [s for s in sizes if gpus <= s <= requested]
        yield gpu_type, (larger[-1] if larger else gpus)
