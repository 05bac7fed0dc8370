"""Duration of a schedule whose operations take given times.

The planner gives the time of a pipeline that is always full and does not wait for transfers. A
replay of the same times in the schedule's order adds filling, draining and transfers. Measured
time beyond that is overhead of the runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slurm_elastic.training.pipeline.schedules import MicroBatchStep, PassKind, order
from slurm_elastic.training.pipeline.stage_layout import StageLayout


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds by stage.

    Attributes:
        forward_s, backward_s: passes of one micro-batch.
        transfer_s: of its output to the next stage, and of the gradient back; one way.
        reduction_s: of the stage's gradients over its replicas.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    transfer_s: Sequence[float]
    reduction_s: Sequence[float]

    def part(self, share: float) -> Times:
        """Return the times of smaller micro-batches; gradients keep their size."""
        return replace(
            self,
            forward_s=[s * share for s in self.forward_s],
            backward_s=[s * share for s in self.backward_s],
            transfer_s=[s * share for s in self.transfer_s],
        )


def replay(layout: StageLayout, schedule: str, count: int, times: Times) -> float:
    """Return the seconds of `count` micro-batches: one step, or a sequence of pipedream's.

    Each rank holds one stage. Transfers do not slow each other down.

    >>> even = Times([1.0, 1.0], [2.0, 2.0], [0.0], [0.0, 0.0])
    >>> replay(StageLayout.of(1, 1), "1f1b", 4, even)
    15.0
    >>> replay(StageLayout.of(2), "1f1b", 4, Times([1.0], [2.0], [], [0.5]))
    6.5
    """
    todo = [list(order(layout, schedule, rank=r, count=count)) for r in range(layout.world_size)]
    free = [0.0] * layout.world_size
    ends: dict[MicroBatchStep, float] = {}
    while any(todo):
        before = sum(map(len, todo))
        for rank, actions in enumerate(todo):
            if not actions:
                continue
            if actions[0].kind is PassKind.UPDATE:
                _update(layout, times, todo, free, actions[0])
                continue
            ready = _ready(layout, times, ends, actions[0])
            if ready is not None:
                kind, stage, _ = action = actions.pop(0)
                passes = times.forward_s if kind is PassKind.FORWARD else times.backward_s
                free[rank] = ends[action] = max(free[rank], ready) + passes[stage]
        assert sum(map(len, todo)) < before, "the schedule waits for itself"
    if schedule == "pipedream":
        return max(free)
    return max(
        max(free[r] for r in ranks) + times.reduction_s[s] for s, ranks in enumerate(layout.stages)
    )


def _ready(
    layout: StageLayout, times: Times, ends: dict[MicroBatchStep, float], action: MicroBatchStep
) -> float | None:
    """Return when an action's inputs are available; None if not known yet."""
    kind, stage, micro = action
    if kind is PassKind.FORWARD:
        if stage == 0:
            return 0.0
        former = ends.get(MicroBatchStep(kind, stage - 1, micro))
        return None if former is None else former + times.transfer_s[stage - 1]
    if stage == layout.last:
        return ends[MicroBatchStep(PassKind.FORWARD, stage, micro)]
    later = ends.get(MicroBatchStep(kind, stage + 1, micro))
    return None if later is None else later + times.transfer_s[stage]


def _update(
    layout: StageLayout,
    times: Times,
    todo: list[list[MicroBatchStep]],
    free: list[float],
    action: MicroBatchStep,
) -> None:
    """Update all replicas of a stage together, once the last of them is ready."""
    ranks = layout.stages[action.stage]
    if all(todo[r] and todo[r][0] == action for r in ranks):
        end = max(free[r] for r in ranks) + times.reduction_s[action.stage]
        for r in ranks:
            todo[r].pop(0)
            free[r] = end
