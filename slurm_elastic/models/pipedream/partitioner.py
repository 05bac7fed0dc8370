"""PipeDream's partitioner: a layer profile becomes stages, each with its replicas.

After *PipeDream: Generalized Pipeline Parallelism for DNN Training* (Narayanan et al.,
SOSP'19). Machines form a hierarchy: GPUs in a node, nodes in a rack, ... each level
with its bandwidth. The answer minimises the time per minibatch in steady state, which
is that of the slowest stage, gradient reduction and (if counted) activations included.

By default costs are those of the published code, from which the paper differs
(partition_tables.py states both). With the same costs the answer is exact up to `limit`
states, beyond that (`PipelinePartition.exact` False) the best of those cuts that some
topological orders offer, and `bound_s` says what no plan can beat.

>>> from slurm_elastic.core.layers import Layer, chain
>>> net = chain([Layer("conv", 0.02, 0.04, 8e6, 1e6), Layer("fc", 0.01, 0.01, 4e3, 4e8)])
>>> plan = partition(net, [Level(4, 1e9)])
>>> [(stage.layers, stage.replicas) for stage in plan.stages]
[(('conv',), 3), (('fc',), 1)]
>>> round(plan.pipeline_time_s, 4), round(plan.data_parallel_time_s, 4)
(0.0209, 0.3208)
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.core.layers import LayerProfile
from slurm_elastic.models.pipedream import model_cuts
from slurm_elastic.models.pipedream.partition_tables import (
    PartitionProblem,
    PartitionTables,
    StageCandidate,
)

#: States up to which the answer is exact.
LIMIT = 2000
#: Components of one level: tables grow with them.
MOST_MACHINES = 256
#: Numbers of one table; 8 bytes each.
_MOST_CELLS = 60_000_000


#: Least bandwidth or similar value, so that times are finite.
_LEAST = 1e-6


class PipelineError(InvalidInputError):
    """No partition exists; the text names the cause and the remedy."""


class ArgumentError(PipelineError):
    """Invalid arguments, whatever the model."""


class Cost(enum.Enum):
    """Cost of a stage (partition_tables.py)."""

    #: Rule of the published code: compute plus gradient reduction.
    PUBLISHED = "published"
    #: Rule of the paper: the larger of both; activations always count.
    PAPER = "paper"


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the hierarchy.

    Attributes:
        machines: components: GPUs on the innermost level, whole lower levels above.
        bandwidth: bytes/s between them.
    """

    machines: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """Layers that are computed together.

    Attributes:
        layers: names, each after those it reads from.
        replicas: GPUs that each compute them for other minibatches.
        replicas_by_level: innermost first; their product is `replicas`.
        compute_s: forward and backward of one minibatch.
        parameter_bytes: of its parameters.
        output_bytes: what later stages read of it and of those before, per minibatch.
        in_flight: minibatches of which a replica keeps weights and activations at once.
        memory_bytes: what those take: parameters and activations, without gradients,
            optimizer and workspace.
    """

    layers: tuple[str, ...]
    replicas: int
    replicas_by_level: tuple[int, ...]
    compute_s: float
    parameter_bytes: float
    output_bytes: float
    in_flight: int
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class PipelinePartition:
    """Stages of a model on all machines, and their times.

    Attributes:
        stages: from the input on.
        pipeline_time_s: seconds per minibatch in steady state.
        data_parallel_time_s: the same with all layers on every GPU, memory not considered.
        single_time_s: seconds of one minibatch on one GPU.
        replication_by_level: of each level, innermost first, the replicas of its stages.
        states: cuts that were looked at, the empty one not counted.
        exact: False when there were more than the limit.
        bound_s: no plan on as many GPUs is faster; the answer itself when it is exact.
    """

    stages: tuple[PlannedStage, ...]
    pipeline_time_s: float
    data_parallel_time_s: float
    single_time_s: float
    replication_by_level: tuple[tuple[int, ...], ...]
    states: int
    exact: bool
    bound_s: float

    @property
    def in_flight(self) -> int:
        """Minibatches that each replica of the first stage starts with (the paper's NOAM)."""
        return self.stages[0].in_flight


def partition(
    profile: LayerProfile,
    levels: Sequence[Level],
    *,
    cost: Cost = Cost.PUBLISHED,
    compression: float | None = None,
    memory: float | None = None,
    straight: bool = False,
    free_sources: bool = False,
    limit: int = LIMIT,
) -> PipelinePartition:
    """Return the fastest pipeline on all machines; deterministic.

    Args:
        profile: the model.
        levels: innermost first; all machines are used.
        cost: of a stage.
        compression: activations count, this many times smaller than profiled; None: they are
            free, as in the published code without its option (the paper always counts them).
        memory: bytes of one GPU for weight versions and activations; None: no limit.
        straight: no stage is replicated.
        free_sources: a source beside the first (an embedding of the decoder) may be placed on its
            own; else, as in the published code, it is where it is first read.
        limit: states up to which the answer is exact. Work grows with its square, on more
            than one level with its third power.

    Raises:
        ArgumentError: nonsense in the arguments.
        PipelineError: no pipeline uses all machines, or it would take too much memory to find.
    """
    _check(levels, compression, memory, limit)
    states = model_cuts.states(profile, limit=limit, free=free_sources)
    problem = PartitionProblem(
        states=states,
        machines=tuple(level.machines for level in levels),
        bandwidths=tuple(level.bandwidth for level in levels),
        paper=cost is Cost.PAPER,
        compression=compression,
        memory=memory,
        straight=straight,
    )
    _check_size(problem)
    tables = PartitionTables(problem)
    best = float(tables.top().best[-1, 0, -1])
    if math.isinf(best):
        raise PipelineError(_why_none(problem))
    replication, placed = _unfolded(tables)
    gpus = math.prod(problem.machines)
    return PipelinePartition(
        stages=tuple(_stage(profile, problem, piece, widths) for piece, widths in placed),
        pipeline_time_s=best,
        data_parallel_time_s=_data_parallel(profile, levels, cost),
        single_time_s=profile.compute_s,
        replication_by_level=replication,
        states=len(states) - 1,
        exact=states.complete,
        bound_s=best if states.complete else min(best, profile.compute_s / gpus),
    )


def _check(
    levels: Sequence[Level], compression: float | None, memory: float | None, limit: int
) -> None:
    if not levels:
        raise ArgumentError("no machines: give at least one level")
    for level in levels:
        if not 1 <= level.machines <= MOST_MACHINES:
            raise ArgumentError(f"{level.machines} machines on a level: give 1-{MOST_MACHINES}")
        _positive("bandwidth", level.bandwidth, "bytes/s")
    if compression is not None:
        _positive("compression", compression, "a ratio")
    if memory is not None:
        _positive("memory", memory, "bytes")
    if limit < 1:
        raise ArgumentError(f"a limit of {limit} states: give at least 1")


def _positive(name: str, value: float, unit: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ArgumentError(f"{name} {value:g}: must be above 0, in {unit}")
    if value < _LEAST:
        raise ArgumentError(f"{name} {value:g}: give {_LEAST:g} or more, in {unit}")


def _check_size(problem: PartitionProblem) -> None:
    """Reject a problem that would not fit in memory, before it is begun."""
    count = len(problem.states)
    outermost = len(problem.machines) - 1
    for level, machines in enumerate(problem.machines):
        cells = machines * count * (1 if level == outermost else count)
        if cells > _MOST_CELLS:
            raise PipelineError(
                f"{machines} machines on level {level + 1} and {count} states need "
                f"{cells * 8 / 1e9:.1f} GB: lower the limit of states"
            )


def _why_none(problem: PartitionProblem) -> str:
    gpus = math.prod(problem.machines)
    if problem.memory is not None:
        return f"no pipeline on {gpus} GPUs keeps to {problem.memory:g} bytes of memory per GPU"
    return (
        f"no straight pipeline of {gpus} stages: the model can be cut into at most "
        f"{max(s.bit_count() for s in problem.states.sets)} layers; let stages be replicated"
    )


def _unfolded(
    tables: PartitionTables,
) -> tuple[tuple[tuple[int, ...], ...], list[tuple[StageCandidate, tuple[int, ...]]]]:
    """Return the replicas of each level, innermost first, and the innermost stages with theirs."""
    whole_model = StageCandidate(0, len(tables.problem.states) - 1, replicas=1, waiting=0)
    placed: list[tuple[StageCandidate, tuple[int, ...]]] = [(whole_model, ())]
    replication: list[tuple[int, ...]] = []
    for level in range(len(tables.problem.machines) - 1, -1, -1):
        placed = [
            (piece, (piece.replicas, *widths))
            for outer, widths in placed
            for piece in tables.table(level, outer.waiting).pieces(
                outer.first, outer.last, outer.waiting
            )
        ]
        replication.append(tuple(piece.replicas for piece, _ in placed))
    return tuple(replication[::-1]), placed


def _stage(
    profile: LayerProfile, problem: PartitionProblem, piece: StageCandidate, widths: tuple[int, ...]
) -> PlannedStage:
    states = problem.states
    members = states.sets[piece.last] & ~states.sets[piece.first]
    layers = [profile.layers[i] for i in profile.topological() if members >> i & 1]
    parameters = math.fsum(layer.parameter_bytes for layer in layers)
    activations = math.fsum(layer.activation_bytes for layer in layers)
    in_flight = piece.waiting + 1
    last = piece.last == len(states) - 1
    return PlannedStage(
        layers=tuple(layer.name for layer in layers),
        replicas=math.prod(widths),
        replicas_by_level=widths,
        compute_s=math.fsum(layer.compute_s for layer in layers),
        parameter_bytes=parameters,
        output_bytes=0.0 if last else float(states.output_bytes[piece.last]),
        in_flight=in_flight,
        memory_bytes=in_flight * (parameters + activations),
    )


def _data_parallel(profile: LayerProfile, levels: Sequence[Level], cost: Cost) -> float:
    """Return the seconds per minibatch with all layers on every GPU, by the same costs."""
    seconds, inner = profile.compute_s, 1
    for level in levels:
        n = level.machines
        if cost is Cost.PAPER:
            reduction = 2 * (n - 1) * profile.parameter_bytes / level.bandwidth
            seconds = max(seconds, reduction) / n
        else:
            reduction = 4 * (n - 1) * profile.parameter_bytes / (level.bandwidth * n) / inner
            seconds = (seconds + reduction) / n
        inner = n
    return seconds
