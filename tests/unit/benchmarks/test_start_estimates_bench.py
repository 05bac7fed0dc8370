"""Start estimates with backfill and elastic jobs that give way have smaller errors."""

import random

import pytest

from benchmarks.helios import planned_queue, start_estimates
from benchmarks.helios.planned_queue import PlannedQueue, QueuedJob


@pytest.mark.parametrize("elastic", [False, True])
def test_the_error_falls_on_the_same_queues(elastic):
    in_order, backfill, gives = start_estimates.errors(25, 1, elastic=elastic)
    assert in_order["jobs"] == backfill["jobs"] == gives["jobs"] > 60
    assert backfill["error_min"] < 0.85 * in_order["error_min"]
    assert gives["error_min"] <= backfill["error_min"]
    assert min(row["within_p90"] for row in (backfill, gives)) > 0.8


def job(job_id, gpus, limit_s, **more):
    fields = {"partition": "gpu", "nodes": range(2), "median_s": limit_s, "elastic": False}
    fields |= {"seconds": limit_s, "limit_s": limit_s, "least": gpus}
    return QueuedJob(job_id=job_id, gpus=gpus, **(fields | more))


def test_the_simulated_queue_plans_all_jobs_with_their_limits():
    jobs = [job(1, 4, 100), job(2, 8, 100), job(3, 4, 100), job(4, 4, 200)]
    queue = PlannedQueue(2, jobs, now=0.0)
    # The third ends before the second can begin; the fourth would delay it.
    assert queue.run() == {1: 0.0, 2: 100.0, 3: 0.0, 4: 200.0}


def test_in_the_simulated_queue_elastic_jobs_give_way():
    jobs = [job(1, 8, 100, elastic=True, least=4), job(2, 4, 10)]
    assert PlannedQueue(2, jobs, now=0.0).run() == {1: 0.0, 2: 0.0}


def test_nothing_can_start_in_a_queue_that_was_drawn():
    for number in range(5):
        queue = planned_queue.drawn(random.Random(number), elastic=True)
        assert not queue.start_all()
