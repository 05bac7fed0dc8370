"""Which companions count for a job, and what decisions see of them."""

import pytest

from slurm_elastic.controller.companions.companion_folding import fold
from slurm_elastic.core.cluster import Job, JobState
from slurm_elastic.core.member_orders import CompanionComment
from slurm_elastic.core.reason import Reason
from tests.support.controller.job_records import allocation, job


def companion(job_id, shares, *, base=7, run=0, **fields):
    values = {
        "job_id": job_id, "display_id": str(job_id), "name": "", "user": "alice", "uid": 2001,
        "partition": "gpu", "state": JobState.RUNNING if shares else JobState.PENDING,
        "allocation": allocation(shares), "gpus": sum((shares or {}).values()), "cpus": 3,
        "companion": CompanionComment(base=base, run=run, change=1), "companion_recorded": True,
    }  # fmt: skip
    return Job(**(values | fields))


def folded(*jobs, placed=(8, 9), awaited=False):
    return fold(
        {j.job_id: j for j in jobs}, placed=lambda _: set(placed), awaited=lambda _: awaited
    )


def test_a_job_has_the_gpus_of_its_companions():
    base = job({"n1": 2}, cpus=4, devices=(("n1", "0-1"),))
    parts = companion(9, {"n2": 2}), companion(8, {"n1": 1}, devices=(("n1", "2"),))
    jobs, companions = folded(base, *parts)
    assert list(jobs) == [7]
    assert set(companions) == {8, 9}
    assert jobs[7].allocation == allocation({"n1": 3, "n2": 2})
    assert jobs[7].base_allocation == base.allocation
    assert [c.job_id for c in jobs[7].companions] == [8, 9]
    assert (jobs[7].gpus, jobs[7].cpus) == (5, 10)
    assert jobs[7].indexes["n1"] == (0, 1, 2)


def test_a_job_that_its_owner_has_held_while_it_runs_keeps_its_companions():
    base = job({"n1": 2}, managed=False, unmanaged_reason=Reason("held-while-running"))
    jobs, _ = folded(base, companion(8, {"n2": 2}))
    assert jobs[7].allocation == allocation({"n1": 2, "n2": 2})


@pytest.mark.parametrize(
    "other",
    [
        companion(8, {"n2": 2}, run=1),
        companion(8, {"n2": 2}, uid=2002),
        companion(8, {"n2": 2}, base=6),
        companion(8, {"n2": 2}, state=JobState.COMPLETING),
        companion(8, {"n2": 1, "n3": 1}),
        companion(10, {"n2": 2}),
    ],
    ids=["earlier run", "other user", "no such base", "ending", "two nodes", "not placed"],
)
def test_other_jobs_hold_their_gpus_themselves(other):
    base = job({"n1": 2})
    jobs, _ = folded(base, other)
    assert jobs == {7: base, other.job_id: other}


def test_a_companion_that_a_change_waits_for_is_not_shown():
    base, held = job({"n1": 2}), companion(8, None)
    assert list(folded(base, held, awaited=True).jobs) == [7]
    assert list(folded(base, held).jobs) == [7, 8]
