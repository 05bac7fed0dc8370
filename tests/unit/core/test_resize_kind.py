"""Changes in place: which companions leave and join."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.core.cluster import Allocation, Companion, Job, JobState
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import ASSUMED_PAUSE_S, JobRecord
from slurm_elastic.core.resize_kind import (
    CompanionChange,
    ResizeKind,
    change_in_place,
    companion_change,
)


def place(gpu_type="a100", **shares):
    return Allocation.of(gpu_type, shares)


@pytest.mark.parametrize(
    ("companions", "target", "change"),
    [
        ([], place(n1=4), ((), (("n1", 2),))),
        ([], place(n1=2, n2=1, n3=2), ((), (("n2", 1), ("n3", 2)))),
        ([place(n2=2)], place(n1=2, n2=4), ((), (("n2", 2),))),
        ([place(n2=2)], place(n1=2), ((0,), ())),
        ([place(n1=1), place(n1=2)], place(n1=4), ((0,), ())),
        ([place(n1=2), place(n2=4)], place(n1=4, n3=1), ((1,), (("n3", 1),))),
        ([place(n2=4)], place(n1=2, n2=4), ((), ())),
    ],
)
def test_companions_leave_and_join_as_a_whole(companions, target, change):
    assert companion_change(place(n1=2), companions, target) == CompanionChange(*change)


@pytest.mark.parametrize(
    ("companions", "target"),
    [
        ([], place(n1=1)),
        ([], place(n2=2)),
        ([], place("v100", n1=4)),
        ([place(n2=4)], place(n1=2, n2=3)),
        ([place(n2=1), place(n2=1), place(n2=4)], place(n1=2, n2=3)),
        ([place(n1=2)], place(n1=1, n2=3)),
    ],
)
def test_the_base_stays_and_no_companion_is_cut(companions, target):
    assert companion_change(place(n1=2), companions, target) is None


def running(*companions, **fields):
    """Return a job with two GPUs of its own on n1."""
    shares = {"n1": 2}
    for companion in companions:
        for node, gpus in companion.shares:
            shares[node] = shares.get(node, 0) + gpus
    return Job(
        job_id=1, display_id="1", name="a", user="u", uid=1000, state=JobState.RUNNING,
        partition="gpu", allocation=place(**shares),
        companions=tuple(Companion(2 + i, c) for i, c in enumerate(companions)), **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("elastic", "kind"), [("1-5", ResizeKind.REQUEUE), ("1-6", ResizeKind.IN_PLACE)]
)
def test_old_and_new_companions_together_stay_within_max(elastic, kind):
    job = running(place(n2=1), place(n3=1), override=Directive.parse(elastic))
    record = JobRecord(job_id=1, in_place=True)
    assert record.kind_of(job, place(n1=2, n4=2)) is kind
    assert record.kind_of(job, place(n1=2)) is ResizeKind.IN_PLACE
    assert record.kind_of(job, place(n1=2, n2=1, n3=1, n4=1)) is ResizeKind.IN_PLACE


GPUS = st.dictionaries(st.sampled_from(["n1", "n2", "n3"]), st.integers(1, 4), max_size=3)


@given(
    st.lists(st.tuples(st.sampled_from(["n1", "n2", "n3"]), st.integers(1, 3)), max_size=4),
    GPUS,
    st.integers(2, 12),
)
def test_a_change_in_place_leads_to_its_target_and_never_exceeds_max(parts, more, most):
    companions = [place(**{node: gpus}) for node, gpus in parts]
    job = running(*companions, override=Directive(2, most))
    target = place(**(more | {"n1": 2 + more.get("n1", 0)}))
    change = change_in_place(job, target)
    of_any_size = companion_change(place(n1=2), companions, target)
    if of_any_size is None:
        assert change is None
        return
    after = Counter({"n1": 2})
    for i, (node, gpus) in enumerate(parts):
        after[node] += gpus * (i not in of_any_size.leave)
    for node, gpus in of_any_size.join:
        after[node] += gpus
    assert place(**+after) == target
    joined = sum(gpus for _, gpus in of_any_size.join)
    exceeds = joined > 0 and job.allocation.gpus + joined > most
    assert change == (None if exceeds else of_any_size)


def test_a_job_holds_its_base_and_its_companions():
    job = running(place(n1=1), place(n2=4))
    assert job.base_allocation == place(n1=2)
    assert dataclasses.replace(job, companions=()).base_allocation == place(n1=3, n2=4)
    record = JobRecord(job_id=1, in_place=True)
    assert record.kind_of(job, place(n1=2, n2=4)) is ResizeKind.IN_PLACE
    assert record.kind_of(job, place(n1=1)) is ResizeKind.REQUEUE
    assert record.kind_of(job, None) is ResizeKind.REQUEUE
    assert JobRecord(job_id=1).kind_of(job, place(n1=2, n2=4)) is ResizeKind.REQUEUE


def test_the_cost_of_a_change_is_that_of_its_kind():
    record = JobRecord(job_id=1, checkpoint_s=2.0, restart_s=30.0)
    assert record.cost_s(ResizeKind.REQUEUE, 15.0) == record.change_s(15.0) == 32.0
    assert record.cost_s(ResizeKind.IN_PLACE, 15.0) == ASSUMED_PAUSE_S
    measured = dataclasses.replace(record, pause_s=0.25)
    assert measured.cost_s(ResizeKind.IN_PLACE, 15.0) == 0.25


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (place(n1=4), ResizeKind.REQUEUE),
        (place(n1=2, n2=5), ResizeKind.REQUEUE),
        (place(n1=2, n2=4, n3=3), ResizeKind.RESTART),
        (place(n1=2), ResizeKind.RESTART),
        (place(n1=2, n3=1), ResizeKind.RESTART),
        (place(n1=4, n3=1), ResizeKind.REQUEUE),
    ],
)
def test_a_program_that_is_started_again_has_one_local_rank_0_on_each_node(target, kind):
    """Scripts save where LOCAL_RANK is 0."""
    job = Job(
        job_id=1, display_id="1", name="a", user="u", uid=1000, state=JobState.RUNNING,
        partition="gpu", allocation=place(n1=2, n2=4), companions=(Companion(2, place(n2=4)),),
    )  # fmt: skip
    assert JobRecord(job_id=1, restarts=True).kind_of(job, target) is kind
