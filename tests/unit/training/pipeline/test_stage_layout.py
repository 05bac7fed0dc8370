"""Schedules of all ranks, without processes: complete, bounded and free of deadlocks."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator

import pytest

from slurm_elastic.training.pipeline import LayoutError, StageLayout
from slurm_elastic.training.pipeline.schedules import (
    SCHEDULES,
    MicroBatchStep,
    PassKind,
    in_flight,
    order,
)
from slurm_elastic.training.pipeline.weight_stashing import newest, synchronised

MODULES = ("stage_layout", "schedules", "stages", "weight_stashing")


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    yield (total,)
    for first in range(1, total):
        yield from ((first, *rest) for rest in compositions(total - first))


PLAIN = [StageLayout.of(*replicas) for total in range(1, 8) for replicas in compositions(total)]
FOLDED = [
    StageLayout.grid(replicas=replicas, stages=stages, chunks=chunks)
    for replicas in (1, 2)
    for stages in (1, 2, 3)
    for chunks in (2, 3)
]
UNEVEN = [
    StageLayout(((0,), (1, 2), (0,))),
    StageLayout(((0, 1), (0,), (1,))),
    StageLayout(((1,), (0, 1), (0,))),
]


def runs_dry(layout: StageLayout, schedule: str, count: int) -> str:
    """Return a description of a deadlock, or "" if all ranks reach the end."""
    left = [
        list(order(layout, schedule, rank=rank, count=count))[::-1]
        for rank in range(layout.world_size)
    ]
    done: set[MicroBatchStep] = set()
    while any(left):
        moved = False
        for rank, todo in enumerate(left):
            while todo and _possible(layout, todo[-1], rank, left, done):
                done.add(todo.pop())
                moved = True
        if not moved:
            return "; ".join(f"{rank}: {todo[-1]}" for rank, todo in enumerate(left) if todo)
    return ""


def _possible(
    layout: StageLayout,
    action: MicroBatchStep,
    rank: int,
    left: list[list[MicroBatchStep]],
    done: set[MicroBatchStep],
) -> bool:
    kind, stage, micro = action
    if kind is PassKind.FORWARD:
        return stage == 0 or MicroBatchStep(kind, stage - 1, micro) in done
    if kind is PassKind.BACKWARD:
        return stage == layout.last or MicroBatchStep(kind, stage + 1, micro) in done
    # A sum over replicas: those that came here leave together.
    return action in done or all(left[r][-1:] == [action] for r in layout.stages[stage])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", [*PLAIN, *FOLDED, *UNEVEN], ids=lambda x: str(x.stages))
def test_a_schedule_contains_each_pass_once_and_has_no_deadlock(
    layout: StageLayout, schedule: str
) -> None:
    if layout.interleaved and schedule == "pipedream":
        with pytest.raises(LayoutError, match="one stage per rank"):
            order(layout, schedule, rank=0, count=1)
        return
    for count in (1, 2, 3, 5, 12):
        assert runs_dry(layout, schedule, count) == ""
        found: list[MicroBatchStep] = []
        for rank in range(layout.world_size):
            mine = list(order(layout, schedule, rank=rank, count=count))
            found += [a for a in mine if a.kind is not PassKind.UPDATE]
            for stage in layout.held_by(rank):
                check_rank(layout, schedule, stage, [a for a in mine if a.stage == stage])
        expected = {
            MicroBatchStep(kind, stage, micro)
            for kind in (PassKind.FORWARD, PassKind.BACKWARD)
            for stage in range(len(layout.stages))
            for micro in range(count)
        }
        assert len(found) == len(expected)
        assert set(found) == expected


def check_rank(
    layout: StageLayout, schedule: str, stage: int, actions: list[MicroBatchStep]
) -> None:
    forward = [a.micro for a in actions if a.kind is PassKind.FORWARD]
    backward = [a.micro for a in actions if a.kind is PassKind.BACKWARD]
    # Links give values in the order in which they were sent.
    assert forward == backward == sorted(forward)
    most = now = updates = 0
    for action in actions:
        now += {PassKind.FORWARD: 1, PassKind.BACKWARD: -1, PassKind.UPDATE: 0}[action.kind]
        most = max(most, now)
        if action.kind is PassKind.UPDATE:
            assert action.micro == updates
            updates += 1
        if action.kind is PassKind.FORWARD and schedule == "pipedream":
            assert newest(layout, stage, action.micro) == updates
            assert synchronised(layout, stage, action.micro) <= updates
    if schedule != "gpipe":
        assert most <= in_flight(layout, stage)


def test_in_flight_is_the_noam_of_the_paper() -> None:
    # SOSP'19: NOAM = ceil(workers / replicas of the input stage).
    assert [in_flight(StageLayout.of(1, 1, 1, 1), stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(StageLayout.of(15, 1), stage) for stage in range(2)] == [2, 1]
    assert in_flight(StageLayout.of(2, 1), 0) == 2


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((), "no stages is invalid"),
        (((0,), ()), "stage 1 without ranks is invalid"),
        (((0, 0),), r"ranks \(0, 0\) of stage 0 are invalid"),
        (((0,), (2,)), "rank 1 is missing"),
        (((1,),), "rank 0 is missing"),
    ],
)
def test_invalid_layouts_are_refused(stages: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        StageLayout(stages)


def test_numbers_of_replicas_and_chunks_below_one_are_refused() -> None:
    with pytest.raises(LayoutError, match="replicas of stage 1: 0 is invalid"):
        StageLayout.of(1, 0)
    with pytest.raises(LayoutError, match="chunks per rank: 0 is invalid"):
        StageLayout.grid(replicas=1, stages=1, chunks=0)


@pytest.mark.parametrize("module_name", MODULES)
def test_examples_in_docstrings_hold(module_name: str) -> None:
    module = importlib.import_module(f"slurm_elastic.training.pipeline.{module_name}")
    failed, tried = doctest.testmod(module)
    assert (failed, tried > 0) == (0, True)
