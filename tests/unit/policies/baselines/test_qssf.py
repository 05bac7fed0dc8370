"""Policy qssf: order by predicted GPU seconds, backfill by predicted ends, ageing."""

import dataclasses

import pytest

from slurm_elastic.config.policy_settings import QssfSettings
from slurm_elastic.config.schema import Config
from slurm_elastic.core.plan import JobRecord
from slurm_elastic.core.prediction.duration_estimate import DurationEstimate
from slurm_elastic.policies.baselines.qssf import QuasiShortestService
from slurm_elastic.policies.policy_protocol import Question
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node


def exactly(seconds):
    return DurationEstimate.of_sample([seconds])


def ask(cluster, lengths, state=None, **settings):
    """Return the first alternative of each job, and the state."""
    snapshot = cluster.snapshot()
    records = {
        job: dataclasses.replace(
            cluster.records.get(job, JobRecord(job_id=job)),
            length=exactly(lengths[job]) if job in lengths else None,
        )
        for job in cluster.records
    }
    question = Question(
        snapshot=snapshot,
        records=records,
        models={},
        jobs=tuple(records),
        capacity={"a100": sum(n.gpus for n in snapshot.nodes)},
    )
    config = dataclasses.replace(Config(), qssf=QssfSettings(**settings))
    proposals, after = QuasiShortestService(config).decide(question, state or {})
    return {p.job_id: p.alternatives[0] for p in proposals}, after


def started(cluster, lengths, **settings):
    firsts, _ = ask(cluster, lengths, **settings)
    return {job for job, first in firsts.items() if first.gpus}


def queue(*jobs, running=(), nodes=1):
    """Return a cluster with pending jobs (id, GPUs, s since submission), and running ones."""
    cluster = Cluster([node(f"a{i}", 4, "a100") for i in range(nodes)])
    for job, on, since in running:
        cluster.add(job, elastic=str(sum(on.values())), on=on, start_time=NOW - since)
    for job, gpus, waited in jobs:
        cluster.add(job, elastic=str(gpus), gpus=gpus, submit_time=NOW - waited)
    return cluster


def test_the_least_predicted_service_goes_first():
    cluster = queue((1, 4, 30), (2, 2, 20), (3, 4, 10))
    assert started(cluster, {1: 1000.0, 2: 5000.0, 3: 600.0}) == {3}
    assert started(cluster, {1: 1000.0, 2: 1000.0, 3: 600.0}) == {2}


def test_running_jobs_run_until_their_end():
    cluster = queue((2, 4, 10), running=[(1, {"a0": 4}, 100.0)])
    firsts, _ = ask(cluster, {1: 1e6, 2: 1.0})
    assert (firsts[1].gpus, firsts[2].gpus) == (4, 0)


def test_a_job_that_waits_comes_nearer():
    cluster = queue((1, 4, 100_000), (2, 4, 0))
    lengths = {1: 10_000.0, 2: 4_000.0}
    assert started(cluster, lengths, ageing=0.0) == {2}
    assert started(cluster, lengths, ageing=0.3) == {1}


def test_backfill_counts_with_predicted_ends():
    # Two GPUs are free; job 1 has 1,000 s left, then job 2 can start.
    cluster = queue((2, 4, 50), (3, 2, 40), (4, 2, 30), running=[(1, {"a0": 2}, 1000.0)])
    lengths = {1: 2000.0, 2: 100.0, 3: 3000.0, 4: 900.0}
    assert started(cluster, lengths) == {1, 4}
    assert started(cluster, lengths, backfill=False) == {1}
    assert started(cluster, lengths | {4: 1100.0}) == {1}


def test_a_job_that_outlives_its_prediction_counts_as_half_way():
    # Job 1 was to take 100 s and has run for 1,000: it is expected to run for as long again.
    cluster = queue((2, 4, 50), (3, 2, 40), running=[(1, {"a0": 2}, 1000.0)])
    assert started(cluster, {1: 100.0, 2: 10.0, 3: 800.0}, quantile=0.5) == {1, 3}
    assert started(cluster, {1: 100.0, 2: 10.0, 3: 1200.0}, quantile=0.5) == {1}


def test_a_requeued_job_counts_with_what_it_has_left():
    cluster = queue((1, 4, 50), (2, 4, 40))
    key = cluster.snapshot().job[1].key
    lengths = {1: 10_000.0, 2: 4_000.0}
    firsts, _ = ask(cluster, lengths, state={"time": NOW - 10, "ran": {key: 9_000.0}})
    assert firsts[1].gpus == 4


def test_without_a_prediction_the_limit_counts_then_an_hour():
    cluster = queue((1, 4, 50), (2, 4, 40))
    cluster.jobs[0] = dataclasses.replace(cluster.jobs[0], time_limit_s=7200)
    assert started(cluster, {}) == {2}
    cluster.jobs[0] = dataclasses.replace(cluster.jobs[0], time_limit_s=1800)
    assert started(cluster, {}) == {1}


def test_the_reason_names_the_predicted_service():
    firsts, _ = ask(queue((1, 4, 50)), {1: 3600.0})
    assert words(firsts[1].reason) == (
        "its turn, and there is room; about 4.0 GPU hours are predicted"
    )


@pytest.mark.parametrize("lengths", [{}, {1: 1.0, 2: 1e9}])
def test_the_same_question_has_the_same_answer(lengths):
    cluster = queue((1, 2, 5), (2, 2, 5), (3, 2, 5))
    assert ask(cluster, lengths) == ask(cluster, lengths)
