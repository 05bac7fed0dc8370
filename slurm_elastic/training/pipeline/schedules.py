"""Order of the forward and backward passes of a rank.

- gpipe: all forward, then all backward (GPipe, NeurIPS'19).
- 1f1b: as many forward as the pipeline is deep, then one backward, one forward in
  turn, and the rest backward (PipeDream-Flush, ICML'21). Same result as gpipe, fewer
  activations kept.
- pipedream: the order of 1f1b over a whole run, with an update of the weights after
  each backward pass (PipeDream, SOSP'19, section 3.2).

Where each rank holds one stage, the order has a closed form. Interleaved layouts take the
order of a simulated run (our definition). Both orders are those of a possible execution,
so there is no deadlock as long as sending does not block.

>>> from slurm_elastic.training.pipeline.stage_layout import StageLayout
>>> def show(rank, schedule, layout=StageLayout.of(1, 1)):
...     return " ".join(map(str, order(layout, schedule, rank=rank, count=3)))
>>> show(0, "1f1b"), show(1, "1f1b")
('F0.0 F0.1 B0.0 F0.2 B0.1 B0.2', 'F1.0 B1.0 F1.1 B1.1 F1.2 B1.2')
>>> show(0, "pipedream")
'F0.0 F0.1 B0.0 U0.0 F0.2 B0.1 U0.1 B0.2 U0.2'
>>> show(0, "1f1b", StageLayout.grid(replicas=1, stages=2, chunks=2))
'F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 B2.1 B0.0 B0.1 F2.2 B2.2 B0.2'
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from slurm_elastic.training.pipeline.stage_layout import LayoutError, StageLayout

SCHEDULES = ("gpipe", "1f1b", "pipedream")


class PassKind(enum.Enum):
    """Kind of a step of a schedule."""

    FORWARD = "F"
    BACKWARD = "B"
    #: Add up the gradients of a round, one micro-batch per replica, and change the weights.
    UPDATE = "U"


class MicroBatchStep(NamedTuple):
    """One step of a schedule.

    Attributes:
        kind: forward pass, backward pass or update.
        stage: its number.
        micro: the micro-batch; of an update its round.
    """

    kind: PassKind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.micro}"


def in_flight(layout: StageLayout, stage: int) -> int:
    """Return the forward passes of each replica of a stage before its first backward pass.

    The paper's NOAM (SOSP'19, section 3.2) for the first stage, and the same rule for the rest
    of the pipeline from each later stage on: ceil(workers from here on / replicas).
    """
    workers = sum(len(ranks) for ranks in layout.stages[stage:])
    return -(-workers // len(layout.stages[stage]))


def order(layout: StageLayout, schedule: str, *, rank: int, count: int) -> Iterator[MicroBatchStep]:
    """Yield the steps of a rank, in order, for `count` micro-batches over all replicas.

    Raises:
        LayoutError: an unknown schedule, or pipedream with several stages on a rank.
    """
    if schedule not in SCHEDULES:
        raise LayoutError(
            f"schedule: {schedule!r} is invalid: expected one of {', '.join(SCHEDULES)}"
        )
    if not layout.interleaved:
        (stage,) = layout.held_by(rank)
        return _plain(layout, schedule, stage, layout.share(stage, rank, count), count)
    if schedule == "pipedream":
        raise LayoutError(
            f"layout {layout} is invalid: expected one stage per rank with schedule pipedream; "
            "use 1f1b, or another layout"
        )
    return iter(_simulated(layout, schedule, count)[rank])


def _plain(
    layout: StageLayout, schedule: str, stage: int, own_micro_batches: range, count: int
) -> Iterator[MicroBatchStep]:
    ahead = (
        len(own_micro_batches)
        if schedule == "gpipe"
        else min(in_flight(layout, stage), len(own_micro_batches))
    )
    for micro in own_micro_batches[:ahead]:
        yield MicroBatchStep(PassKind.FORWARD, stage, micro)
    for done, micro in enumerate(own_micro_batches):
        yield MicroBatchStep(PassKind.BACKWARD, stage, micro)
        if schedule == "pipedream":
            yield MicroBatchStep(PassKind.UPDATE, stage, done)
        if ahead + done < len(own_micro_batches):
            yield MicroBatchStep(PassKind.FORWARD, stage, own_micro_batches[ahead + done])
    rounds = -(-count // len(layout.stages[stage]))
    if schedule == "pipedream" and len(own_micro_batches) < rounds:
        # No micro-batch is left for this replica in the last round; its all-reduce is.
        yield MicroBatchStep(PassKind.UPDATE, stage, rounds - 1)


#: Time units of one pass; a backward pass computes about twice as much.
_TICKS = {PassKind.FORWARD: 1, PassKind.BACKWARD: 2}


def _simulated(layout: StageLayout, schedule: str, count: int) -> list[list[MicroBatchStep]]:
    """Return the orders of all ranks: each free rank starts a pass that is ready."""
    run = _Run(layout, schedule, count)
    total = 2 * count * len(layout.stages)
    orders: list[list[MicroBatchStep]] = [[] for _ in range(layout.world_size)]
    while sum(map(len, orders)) < total:
        for rank, done in enumerate(orders):
            action = run.take(rank)
            if action is not None:
                done.append(action)
        run.now += 1
    return orders


class _Run:
    """A simulated run.

    With 1f1b backward passes come first, then the forward pass deepest in the pipeline, as
    long as no stage has more in flight than `in_flight`.
    """

    def __init__(self, layout: StageLayout, schedule: str, count: int) -> None:
        self.now = 0
        self._layout, self._all_first = layout, schedule == "gpipe"
        self._free = [0] * layout.world_size
        self._ends: dict[MicroBatchStep, int] = {}
        held = [(rank, s) for rank in range(layout.world_size) for s in layout.held_by(rank)]
        #: Micro-batches of each stage on each rank whose forward, or backward, pass is still to
        #: come.
        self._ahead = {at: list(layout.share(at[1], at[0], count)) for at in held}
        self._back = {at: list(todo) for at, todo in self._ahead.items()}

    def take(self, rank: int) -> MicroBatchStep | None:
        """Return the pass that this rank starts now, or None."""
        if self._free[rank] > self.now:
            return None
        stages = self._layout.held_by(rank)[::-1]
        backward = (self._backward(rank, stage) for stage in stages)
        forward = (self._forward(rank, stage) for stage in stages)
        action = next((a for a in (*backward, *forward) if a is not None), None)
        if action is not None:
            todo = self._ahead if action.kind is PassKind.FORWARD else self._back
            todo[rank, action.stage].pop(0)
            self._ends[action] = self._free[rank] = self.now + _TICKS[action.kind]
        return action

    def _forward(self, rank: int, stage: int) -> MicroBatchStep | None:
        todo = self._ahead[rank, stage]
        full = len(self._back[rank, stage]) - len(todo) >= in_flight(self._layout, stage)
        if not todo or (full and not self._all_first):
            return None
        if stage > 0 and not self._ended(MicroBatchStep(PassKind.FORWARD, stage - 1, todo[0])):
            return None
        return MicroBatchStep(PassKind.FORWARD, stage, todo[0])

    def _backward(self, rank: int, stage: int) -> MicroBatchStep | None:
        todo = self._back[rank, stage]
        if self._all_first and any(self._ahead[rank, s] for s in self._layout.held_by(rank)):
            return None
        if len(todo) == len(self._ahead[rank, stage]):
            return None
        last = stage == self._layout.last
        needed_pass = (PassKind.FORWARD, stage) if last else (PassKind.BACKWARD, stage + 1)
        return (
            MicroBatchStep(PassKind.BACKWARD, stage, todo[0])
            if self._ended(MicroBatchStep(*needed_pass, todo[0]))
            else None
        )

    def _ended(self, action: MicroBatchStep) -> bool:
        return self._ends.get(action, self.now + 1) <= self.now
