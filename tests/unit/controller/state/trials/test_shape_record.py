"""Shapes that a job is not to get: what Slurm refuses, for how long, and what is barred with it."""

import json

from slurm_elastic.controller.state.trials.shape_record import ShapeRecord
from slurm_elastic.controller.state.trials.slurm_refusals import REFUSAL_S
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.reason import Reason

ONE = Allocation.of("a100", {"n1": 1})
FOUR = Allocation.of("a100", {"n1": 4})


def worked_on_one():
    """Return the record of a job that has worked on one GPU."""
    shapes = ShapeRecord()
    shapes.record_work(ONE)
    return shapes


def test_a_shape_that_slurm_refuses_twice_is_barred_until_it_works_or_the_owner_changes_the_job():
    shapes, refusal = worked_on_one(), Reason("not-started", slurm_reason="BadConstraints")
    shapes.refuse(Allocation.of("a100", {"n2": 4}), refusal, now=200.0)
    assert not shapes.excluded  # another placement may be possible
    shapes = ShapeRecord.from_body(json.loads(json.dumps(shapes.to_body())))
    shapes.refuse(Allocation.of("a100", {"n2": 4}), refusal, now=300.0)
    assert shapes.excluded == {("a100", 4)}
    shapes.refuse(Allocation.of("a100", {"n2": 1}), refusal, now=400.0)
    shapes.refuse(Allocation.of("a100", {"n2": 1}), refusal, now=500.0)
    assert shapes.excluded == {("a100", 4)}  # never the last that worked
    shapes.clear()
    shapes.refuse(Allocation.of("a100", {"n2": 4}), refusal, now=600.0)
    assert not shapes.excluded


def test_sizes_that_need_as_many_nodes_as_a_refused_one_are_barred_with_it():
    shapes, refusal = worked_on_one(), Reason("not-started", slurm_reason="BadConstraints")
    shapes.worked.append(("a100", 6))
    for _ in range(2):
        shapes.refuse(Allocation.of("a100", {"n1": 4, "n2": 3}), refusal, now=200.0)
    assert shapes.excluded == {("a100", 5), ("a100", 7), ("a100", 8)}


LIMIT = Reason("not-started", slurm_reason="QOSMaxGRESPerNode")


def test_a_shape_beyond_an_unknown_limit_is_barred_for_some_hours():
    shapes = worked_on_one()
    for now in (200.0, 300.0):
        assert not shapes.excluded
        shapes.refuse(Allocation.of("a100", {"n2": 8}), LIMIT, now=now, old=ONE)
    # The upper half of the sizes between 1 and 8: otherwise each would cost two requeues.
    assert shapes.excluded == {("a100", n) for n in (5, 6, 7, 8)}
    shapes = ShapeRecord.from_body(json.loads(json.dumps(shapes.to_body())))
    assert not shapes.lapse(300.0 + REFUSAL_S - 1)
    assert shapes.lapse(300.0 + REFUSAL_S)
    assert not shapes.excluded
    shapes.refuse(Allocation.of("a100", {"n2": 8}), LIMIT, now=30000.0, old=ONE)
    assert ("a100", 8) in shapes.excluded


def test_sizes_that_the_directive_does_not_allow_are_not_barred():
    """`selastic explain` would show them, and they would displace others that it allows."""
    shapes, directive = worked_on_one(), Directive.parse("1-256,sizes=1:2:130:200:256")
    for _ in range(2):
        shapes.refuse(
            Allocation.of("a100", {f"n{i}": 8 for i in range(32)}), LIMIT, now=200.0, old=ONE,
            directive=directive,
        )  # fmt: skip
    assert shapes.excluded == {("a100", 130), ("a100", 200), ("a100", 256)}


def test_a_shape_that_worked_before_an_unknown_limit_has_still_worked():
    shapes = worked_on_one()
    shapes.worked.append(("a100", 4))
    for _ in range(2):
        shapes.refuse(FOUR, LIMIT, now=200.0, old=ONE)
    assert shapes.excluded == {("a100", 3), ("a100", 4)}
    assert ("a100", 4) in shapes.worked


HALF = Allocation.of("a100", {"n2": 1}, half=True)


def test_half_of_a_gpu_that_slurm_refuses_is_barred_at_once_and_for_some_hours():
    shapes = worked_on_one()
    shapes.refuse(HALF, LIMIT, now=200.0)
    assert shapes.half.reason == LIMIT
    shapes.refuse(HALF.whole, LIMIT, now=200.0)
    assert not shapes.excluded, "the first refusal of a whole one"
    assert not shapes.lapse(200.0 + REFUSAL_S - 1)
    assert shapes.lapse(200.0 + REFUSAL_S)
    assert shapes.half is None
