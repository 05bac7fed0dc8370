"""Changes in place: which companions leave and join."""

import dataclasses

import pytest

from slurm_elastic.core.cluster import Allocation, Companion, Job, JobState
from slurm_elastic.core.plan import ASSUMED_PAUSE_S, JobRecord
from slurm_elastic.core.resize_kind import CompanionChange, ResizeKind, companion_change


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


def test_a_job_holds_its_base_and_its_companions():
    job = Job(
        job_id=1, display_id="1", name="a", user="u", uid=1000, state=JobState.RUNNING,
        partition="gpu", allocation=place(n1=3, n2=4),
        companions=(Companion(2, place(n1=1)), Companion(3, place(n2=4))),
    )  # fmt: skip
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
