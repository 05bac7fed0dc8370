"""Pool of an application's measurements, and shrinkage of a job's deviation."""

import math
import random

import pytest

from slurm_elastic.core.application import Observation
from slurm_elastic.models import throughput
from slurm_elastic.models.application_pool import ApplicationPool, merged, pooled


def curve(factor=1.0, shapes=((1, 1), (1, 2), (1, 4), (2, 8)), batches=(8, 16, 32)):
    """Return the measurements of a job that takes `factor` times as long as others."""
    return tuple(
        Observation("t4", n, g, m, factor * (0.01 * m + 0.02 * g), factor * 0.01 * m)
        for n, g in shapes
        for m in batches
    )


def step_of(points, gpus, micro_batch=16):
    return next(p.step_s for p in points if (p.gpus, p.micro_batch) == (gpus, micro_batch))


def test_of_equal_jobs_the_pool_is_the_measurements_of_one():
    pool = pooled([curve(), curve(), curve()])
    assert set(pool.points) == set(curve())
    assert merged((), pool) == pool.points
    assert set(merged(curve()[:2], pool)) == set(curve())


def test_own_measurements_count_before_those_of_others():
    own = (Observation("t4", 1, 1, 16, 7.0, 6.0),)
    points = merged(own, pooled([curve()]))
    assert step_of(points, 1) == 7.0
    assert len(points) == len(curve())


def test_a_slower_job_moves_what_it_inherits():
    pool = pooled([curve(f) for f in (0.6, 0.8, 1.0, 1.3, 1.7)])
    slow = curve(2.0, shapes=((1, 1),))
    unmeasured = step_of(merged(slow, pool), 8)
    assert unmeasured == pytest.approx(step_of(curve(2.0), 8), rel=0.1)
    assert step_of(merged((), pool), 8) == pytest.approx(step_of(curve(1.0), 8), rel=0.15)


def test_the_spread_between_jobs_is_estimated():
    rng = random.Random(1)
    alike = pooled([curve(math.exp(rng.gauss(0, 0.02))) for _ in range(20)])
    different = pooled([curve(math.exp(rng.gauss(0, 0.4))) for _ in range(20)])
    assert max(alike.spread) < 0.06
    assert 0.2 < min(different.spread) < 0.8


def test_where_jobs_differ_shrinkage_predicts_better_than_the_plain_pool_and_than_own_points():
    rng = random.Random(3)
    jobs = [curve(math.exp(rng.gauss(0, 0.4))) for _ in range(12)]
    plain, shrunk, alone = 0.0, 0.0, 0.0
    for i, job in enumerate(jobs):
        others = [other for k, other in enumerate(jobs) if k != i]
        truth = math.log(step_of(job, 8))
        own = [o for o in job if o.gpus == 1]
        shrunk += abs(math.log(step_of(merged(own, pooled(others)), 8)) - truth)
        plain += abs(math.log(step_of(others[0], 8)) - truth)
        alone += abs(math.log(float(throughput.fit(own).step_time(2, 8, 16))) - truth)
    assert shrunk < 0.2 * plain
    assert shrunk < 0.2 * alone


def test_noise_of_the_measurements_does_not_move_the_inherited_points():
    pool = pooled([curve(), curve()])
    own = tuple(
        Observation(o.gpu_type, o.nodes, o.gpus, o.micro_batch, o.step_s * 1.004, o.micro_step_s)
        for o in curve(shapes=((1, 1),))
    )
    others = [p for p in merged(own, pool) if p.gpus > 1]
    assert set(others) <= set(pool.points)


def test_without_a_pool_a_job_has_its_own_measurements():
    assert merged(curve(), ApplicationPool()) == curve()
    assert pooled([]).points == ()
