"""Rolling estimates: the published rule in its four cases, ours, and names made to hurt."""

import difflib

import pytest

from slurm_elastic.models.durations.finished_job import FinishedJob, JobRequest
from slurm_elastic.models.durations.job_names import family, similar
from slurm_elastic.models.durations.rolling_history import RollingHistory


def request(user="alice", name="bert", gpus=1, **more):
    return JobRequest(user=user, name=name, gpus=gpus, **more)


def history(*rows):
    past = RollingHistory()
    for user, name, gpus, seconds in rows:
        past.add(FinishedJob(request=request(user, name, gpus), seconds=seconds, ended=0.0))
    return past


PAST = (
    ("alice", "bert", 1, 100.0),
    ("alice", "bert", 1, 300.0),
    ("alice", "bert", 8, 1000.0),
    ("bob", "bert", 4, 5000.0),
    ("bob", "resnet50-train", 1, 40.0),
    ("carol", "resnet50-eval", 1, 80.0),
    ("carol", "zzz", 1, 7.0),
)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        # 1. The user's jobs of that name, those of that size if there are any.
        (request("alice", "bert", 1), 200.0),
        (request("alice", "bert", 8), 1000.0),
        (request("alice", "bert", 2), 1400.0 / 3),
        # ... else anybody's.
        (request("carol", "bert", 1), 6400.0 / 4),
        (request("dave", "bert", 1), 6400.0 / 4),
        # 2. The two most similar names: the user's own jobs of them, else anybody's.
        (request("carol", "resnet50-trial", 1), 80.0),
        (request("dave", "resnet50-trial", 1), 60.0),
        # 3. The user's mean; 4. a new user: the mean over all.
        (request("carol", "0123456789", 1), 43.5),
        (request("dave", "0123456789", 1), 6527.0 / 7),
    ],
)
def test_the_published_rule(asked, expected):
    assert history(*PAST).published_s(asked) == pytest.approx(expected)


def test_similar_names_are_those_of_difflib():
    names = ["resnet50-train", "resnet50-eval", "bert-large", "x", "train-resnet50"]
    assert similar("resnet50-trial", names) == difflib.get_close_matches(
        "resnet50-trial", names, n=2, cutoff=0.6
    )
    assert similar("", names) == []


def test_without_a_past_there_is_no_estimate():
    assert RollingHistory().published_s(request()) is None
    assert RollingHistory().estimate(request()) is None


def test_a_sweep_is_one_kind_of_job():
    rows = [("alice", f"sweep_lr{i / 100}_seed{i}", 2, 900.0 + i) for i in range(12)]
    others = [("alice", "notebook", 1, 30.0 + i) for i in range(12)]
    estimate = history(*rows, *others).estimate(request("alice", "sweep_lr3e-4_seed99", 2))
    assert family("a1b22") == family("a7b0.5")
    assert estimate.basis == "similar-name"
    assert 700 < estimate.median < 1000
    assert estimate.quantile(0.9) > estimate.median


def test_a_job_that_became_longer_is_noticed():
    rows = [("alice", "bert", 1, 60.0)] * 40 + [("alice", "bert", 1, 3600.0)] * 20
    assert history(*rows).estimate(request("alice", "bert", 1)).median > 3000


def test_names_made_to_hurt_are_bounded_in_time_and_memory():
    past = RollingHistory()
    for i in range(3000):
        name = "\n|a" * 400 + chr(33 + i % 90) * (i % 60) + str(i)
        past.add(FinishedJob(request=request("mallory", name, 1), seconds=5.0, ended=0.0))
        past.add(FinishedJob(request=request("eve", f"{i:x}\x00\u202e", 1), seconds=5.0, ended=0.0))
    for i in range(20):
        past.estimate(request("mallory", "a" * 10_000 + str(i)))
        past.published_s(request("mallory", ("ab" * 5_000) + str(i)))
    assert all(len(user.names) <= 500 for user in past._users.values())
    assert len(past._owners) <= 1000
    assert past.estimate(request("alice", "train")).median == pytest.approx(5.0)
