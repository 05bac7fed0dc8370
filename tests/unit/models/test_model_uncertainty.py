"""How sure the models are: where was measured, how far away, on which type, by which job."""

from dataclasses import replace

import pytest

from slurm_elastic.core.application import Application, Learned, Observation, TypeProfile
from slurm_elastic.models.application_pool import own_deviation, pooled
from slurm_elastic.models.model_uncertainty import goodput_deviation

NET = Application(
    name="net",
    initial_batch=32,
    max_batch=256,
    batch=32,
    types=(TypeProfile("t4", least=1, most=64), TypeProfile("a100", least=1, most=64)),
)


def at(gpus, micro_batch=16, seconds=0.2):
    return Observation("t4", -(-gpus // 4), gpus, micro_batch, seconds, seconds)


def deviation(observations, gpus, *, gpu_type="t4", **fields):
    learned = Learned(NET, tuple(observations), **fields)
    return goodput_deviation(learned, gpu_type, -(-gpus // 4), gpus, 16)


def test_nothing_is_promised_before_a_measurement_or_on_an_unknown_type():
    assert deviation((), 1) is None
    assert deviation((at(1),), 1, gpu_type="h100") is None


def test_it_grows_with_the_distance_from_what_was_measured():
    seen = (at(1), at(2))
    values = [deviation(seen, gpus) for gpus in (2, 4, 8, 16)]
    assert values == sorted(values)
    assert values[0] < 0.05
    assert 0.2 < values[1] < 0.4
    assert deviation((*seen, at(4)), 4) < 0.05
    assert deviation((at(1), at(8)), 4) < deviation((at(1),), 4), "between two measured sizes"
    assert deviation((at(2, micro_batch=256),), 2) > deviation((at(2),), 2)


def test_a_type_that_was_not_measured_is_less_sure():
    assert deviation((at(1),), 1, gpu_type="a100") == pytest.approx(0.2, abs=0.02)


def test_jobs_that_differ_make_a_new_job_less_sure_until_it_has_measured():
    shapes = (1, 2, 4)
    jobs = [[at(g, seconds=f / g) for g in shapes] for f in (0.5, 1.0, 2.0, 1.4, 0.7)]
    pool = pooled(jobs)
    new, own = own_deviation((), pool), own_deviation([at(1, seconds=1.5)], pool)
    assert new > 0.3
    assert own < 0.1
    assert own_deviation((), pooled([])) == 0.0
    learned = Learned(NET, pool.points)
    assert goodput_deviation(replace(learned, deviation=new), "t4", 1, 1, 16) > 0.3
