"""Errors of predictions: their measures, and that both ways of predicting learn."""

import csv
import gzip
import math
import random

import pytest

from slurm_elastic.core.prediction.duration_estimate import DurationEstimate
from slurm_elastic.models.durations import prediction_error
from slurm_elastic.models.durations.duration_predictor import DurationPredictor
from slurm_elastic.models.durations.finished_job import FinishedJob, JobRequest
from tests.support import published_data


def recurring(count, seed=0):
    """Return jobs of ten users with three recurring kinds each, limits that say nothing."""
    rng = random.Random(seed)
    kinds = {
        user: [(f"net{k}", rng.choice((1, 2, 8)), math.exp(rng.gauss(7, 1.5))) for k in range(3)]
        for user in range(10)
    }
    jobs, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(1 / 200)
        user = rng.randrange(10)
        name, gpus, seconds = rng.choice(kinds[user])
        seconds *= math.exp(rng.gauss(0, 0.3))
        asked = JobRequest(
            user=f"u{user}",
            name=f"{name}-{number}",
            gpus=gpus,
            group="gpu",
            submitted=now,
            limit_s=86400.0,
        )
        jobs.append(FinishedJob(request=asked, seconds=seconds, ended=now + seconds))
    return jobs


def test_errors_are_factors_ranks_and_the_part_within_the_quantile():
    error = prediction_error.of_points([10.0, 100.0, 1000.0], [10.0, 200.0, 250.0])
    assert (error.jobs, error.factor_p50, error.within_p90) == (3, 2.0, None)
    assert error.rank == pytest.approx(1.0)
    estimates = [DurationEstimate.of_sample([50.0, 60.0, 70.0])] * 2
    assert prediction_error.of_estimates([55.0, 99.0], estimates).within_p90 == 0.5


def test_names_that_recur_predict_and_limits_do_not():
    errors = prediction_error.of_ways(recurring(700), boosted=False)
    assert set(errors) == {"rolling", "time limit"}
    assert errors["rolling"].factor_p50 < 1.5 < 5 < errors["time limit"].factor_p50
    assert errors["rolling"].rank > 0.8
    assert 0.8 < errors["rolling"].within_p90 < 1.0


def test_no_outcome_is_known_before_the_end():
    jobs = [
        FinishedJob(
            request=JobRequest(user="a", name="b", gpus=1, submitted=float(i)),
            seconds=1e6,
            ended=1e6 + i,
        )
        for i in range(50)
    ]
    assert prediction_error.of_ways(jobs, boosted=False) == {}


def test_the_boosted_model_learns():
    pytest.importorskip("sklearn")
    jobs = recurring(700)
    error = prediction_error.of_ways(jobs, boosted=True)["boosted"]
    assert error.factor_p50 < 1.8
    assert error.rank > 0.7
    assert 0.7 < error.within_p90 <= 1.0
    predictor = DurationPredictor.trained(jobs)
    assert predictor.boosted is not None
    assert predictor.predict(jobs[0].request).median == pytest.approx(jobs[0].seconds, rel=2.0)


def test_too_few_jobs_are_predicted_by_rolling_estimates():
    jobs = recurring(40)
    predictor = DurationPredictor.trained(jobs)
    assert predictor.boosted is None
    assert predictor.predict(jobs[0].request) == predictor.history.estimate(jobs[0].request)
    assert DurationPredictor().predict(jobs[0].request) is None


def test_philly_without_names_is_predicted_by_shape():
    folder = published_data.require("helios", "philly_oct_nov.csv.gz")
    jobs = []
    with gzip.open(folder / "philly_oct_nov.csv.gz", "rt", encoding="utf-8") as lines:
        for row, _ in zip(csv.DictReader(lines), range(3000), strict=False):
            submitted, seconds = float(row["submit_s"]), float(row["duration_s"])
            asked = JobRequest(
                user="", name="", gpus=int(row["gpus"]), group=row["vc"], submitted=submitted
            )
            jobs.append(FinishedJob(request=asked, seconds=seconds, ended=submitted + seconds))
    error = prediction_error.of_ways(jobs, boosted=False)["rolling"]
    assert error.jobs > 800
    assert error.factor_p50 < 2
    assert 0.85 < error.within_p90 < 0.99
