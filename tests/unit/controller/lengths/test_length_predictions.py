"""Predictions in the controller: trained in a process of its own, failures, records, advice."""

import dataclasses
import stat
import sys
import time

import pytest

from slurm_elastic.config.schema import Config, ControllerSettings, DurationSettings
from slurm_elastic.controller.lengths import training_process
from slurm_elastic.controller.lengths.length_predictions import LengthPredictions
from slurm_elastic.controller.lengths.training_process import Trained, TrainingError, train
from slurm_elastic.controller.queries.durations_answer import durations, limits
from slurm_elastic.models.durations.duration_predictor import DurationPredictor
from slurm_elastic.models.durations.finished_job import FinishedJob, JobRequest
from slurm_elastic.models.durations.limit_use import LimitUse
from tests.support.decisions.synthetic_clusters import Cluster, node
from tests.support.patience import PATIENCE_S

#: Prints eight ended jobs of one name for the first day that is asked for.
SACCT = f"""#!{sys.executable}
import os, sys
if "--version" in sys.argv:
    print("slurm 24.11.5"); sys.exit(0)
(separator,) = (w.partition("=")[2] for w in sys.argv if w.startswith("--delimiter="))
for i in range(8):
    start = 1000 * (i + 1)
    row = [str(i + 1), "alice", "gpu", str(start), str(start), str(start + 600), "600", "1440",
           "COMPLETED", "gres/gpu=2", f"net-{{i}}"]
    print(separator.join([*row, ""]))
"""


class Log:
    def __init__(self):
        self.lines = []

    def info(self, text):
        self.lines.append(text)

    warning = error = info


@pytest.fixture
def sacct(tmp_path, monkeypatch):
    def write(text):
        path = tmp_path / "sacct"
        path.write_text(text, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return write


def config(**more):
    return dataclasses.replace(Config(), durations=DurationSettings(predict=True, **more))


def learned(seconds=600.0, jobs=8, at=1.0):
    past = [
        FinishedJob(
            request=JobRequest(user="bob", name="job1", gpus=2, group="gpu"),
            seconds=seconds,
            ended=float(i),
        )
        for i in range(jobs)
    ]
    return Trained(predictor=DurationPredictor.trained(past, boosted=False), jobs=jobs, at=at)


def after_training(predictions):
    predictions.tick()
    until = time.monotonic() + PATIENCE_S
    while predictions._thread.is_alive() and time.monotonic() < until:
        time.sleep(0.005)
    return predictions


def snapshot(name="job1"):
    cluster = Cluster([node("g1")])
    cluster.add(1, elastic="2", gpus=2)
    cluster.jobs[0] = dataclasses.replace(cluster.jobs[0], name=name)
    return cluster


def test_a_training_reads_sacct_in_a_process_of_its_own(sacct):
    sacct(SACCT)
    trained = train(days=1, most=100, boosted=False, timeout_s=60)
    assert trained.jobs == 8
    estimate = trained.predictor.predict(JobRequest(user="alice", name="net-99", gpus=2))
    assert (estimate.basis, round(estimate.median)) == ("similar-name", 600)
    assert trained.errors["time limit"].factor_p50 == pytest.approx(144.0)
    (use,) = trained.limits
    assert (use.user, use.name, use.jobs, use.limit_s) == ("alice", "net-#", 8, 86400.0)


@pytest.mark.parametrize(
    ("text", "timeout_s", "expected"),
    [
        ("#!/bin/sh\necho 'slurmdbd is away' >&2\nexit 1\n", 60, "slurmdbd is away"),
        ("#!/bin/sh\nexec sleep 60\n", 2, "timeout_s|no answer in"),
    ],
)
def test_a_training_that_fails_says_why_in_one_line(sacct, text, timeout_s, expected):
    sacct(text)
    with pytest.raises(TrainingError, match=expected) as error:
        train(days=1, most=100, boosted=False, timeout_s=timeout_s)
    assert "\n" not in str(error.value)


def test_records_get_predictions_that_stay_while_a_job_runs():
    results = [learned(600.0, at=1.0), learned(6000.0, at=2.0), learned(60_000.0, at=3.0)]
    predictions = LengthPredictions(config(), Log(), lambda **_: results.pop(0))
    pending = snapshot()
    assert predictions.attached(pending.records, pending.snapshot())[1].length is None

    def median(cluster):
        predictions._next = 0.0
        after_training(predictions)
        records = predictions.attached(cluster.records, cluster.snapshot())
        return round(records[1].length.median)

    assert median(pending) == 600
    assert median(pending) == 6000
    running = Cluster([node("g1")])
    running.add(1, elastic="2", on={"g1": 2})
    assert median(running) == 6000


def test_a_failure_is_logged_once_and_the_last_result_stays():
    log, results = Log(), [learned()]

    def training(**_):
        if results:
            return results.pop()
        raise TrainingError("sacct: no answer")

    predictions = after_training(LengthPredictions(config(), log, training))
    for _ in range(2):
        predictions._next = 0.0
        after_training(predictions)
    assert predictions.problem == "sacct: no answer"
    assert predictions.trained.jobs == 8
    assert [line for line in log.lines if "no answer" in line] == [
        "sacct: no answer; run times are predicted as before"
    ]


@pytest.mark.parametrize(("mode", "record", "start_s"), [
    ("act", {}, 600.0),
    ("observe", {}, 7200.0),
    ("act", {"proven": False}, 7200.0),
])  # fmt: skip
def test_starts_count_with_elastic_jobs_that_give_way(mode, record, start_s):
    settings = dataclasses.replace(config(), controller=ControllerSettings(mode=mode))
    predictions = after_training(LengthPredictions(settings, Log(), lambda **_: learned(9e6)))
    cluster = Cluster([node("g1")])
    fields = {"start_time": cluster.time, "time_limit_s": 7200}
    cluster.add(1, elastic="1-4", on={"g1": 2}, record=record, **fields)
    cluster.add(2, on={"g1": 2}, start_time=cluster.time, time_limit_s=600)
    cluster.add(3, elastic="3-4", gpus=3)
    predictions.attached(cluster.records, cluster.snapshot())
    assert predictions.starts[3].median == cluster.time + start_s


def test_without_the_setting_nothing_is_read():
    predictions = LengthPredictions(Config(), Log(), lambda **_: pytest.fail("trained"))
    predictions.tick()
    assert predictions._thread is None
    answer = durations(predictions, "bob", {"name": "job1"}, own_names=False)
    assert (answer["enabled"], answer["length"], answer["trained"]) == (False, None, None)


def test_the_answer_advises_a_limit_for_names_that_recur():
    predictions = after_training(LengthPredictions(config(), Log(), lambda **_: learned()))
    answer = durations(predictions, "bob", {"name": "job1", "gpus": 2}, own_names=False)
    assert answer["length"]["basis"] == "same-name"
    assert answer["advised_limit_s"] == 900.0
    other = durations(predictions, "bob", {"name": "quite different"}, own_names=False)
    assert other["length"]["basis"] == "user"
    assert other["advised_limit_s"] is None


def test_names_of_others_stay_private():
    predictions = after_training(LengthPredictions(config(), Log(), lambda **_: learned()))
    for own_names, basis in ((False, "similar-name"), (True, "all")):
        answer = durations(predictions, "eve", {"name": "job1"}, own_names=own_names)
        assert answer["length"]["basis"] == basis


def test_limits_of_others_stay_private():
    use = LimitUse(
        user="bob", name="job#", jobs=8, limit_s=3600.0, median_s=600.0, p90_s=600.0, reached=0,
        advised_s=900.0, gpu_hours=12.0,
    )  # fmt: skip
    trained = dataclasses.replace(learned(), limits=(use, dataclasses.replace(use, user="eve")))
    predictions = after_training(LengthPredictions(config(), Log(), lambda **_: trained))

    def users(private_to=None, **args):
        return [row["user"] for row in limits(predictions, args, private_to=private_to)["limits"]]

    assert users() == ["bob", "eve"]
    assert users(user="bob") == users(private_to="bob") == users("bob", user="bob") == ["bob"]
    assert users("eve", user="bob") == []


def test_short_runs_teach_nothing():
    assert training_process.finished([]) == []


def test_starts_of_pending_jobs_are_estimated_where_predictions_are_on():
    cluster = Cluster([node("g1")])
    cluster.add(1, on={"g1": 4}, start_time=cluster.time)
    cluster.add(3, elastic="2-4", gpus=2)
    snapshot = cluster.snapshot()
    predictions = LengthPredictions(config(), Log(), train=lambda **_: learned())
    assert not predictions.starts
    after_training(predictions)
    predictions.attached(cluster.records, snapshot)
    assert 0 < predictions.starts[3].median - cluster.time <= 1300
    old = predictions.starts[3]
    predictions.attached(cluster.records, snapshot)
    assert predictions.starts[3] is old  # not anew in each round
    cluster.add(5, elastic="1-4", gpus=1)
    predictions.attached(cluster.records, cluster.snapshot())
    assert set(predictions.starts) == {3, 5}
    predictions.config = Config()
    predictions.attached(cluster.records, snapshot)
    assert not predictions.starts
