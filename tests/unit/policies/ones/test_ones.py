"""Policy ones: starts at once on the least size, growth with epochs, one gate for all changes."""

import dataclasses
import json

from slurm_elastic.config.schema import Config
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.policies.ones.ones import Ones
from slurm_elastic.policies.policy_protocol import Question
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node


def ask(cluster, state=None, *, seed=0, later_s=0.0, progress=None, capacity=None):
    snapshot = cluster.snapshot()
    snapshot = dataclasses.replace(snapshot, time=snapshot.time + later_s)
    records = {
        job: dataclasses.replace(record, progress=(progress or {}).get(job))
        for job, record in cluster.records.items()
    }
    config = Config()
    question = Question(
        snapshot=snapshot,
        records=records,
        models={j: SpeedModel.fit(config.speedup, r.measurements) for j, r in records.items()},
        jobs=tuple(records),
        capacity=capacity or {"a100": sum(n.gpus for n in snapshot.nodes)},
        seed=seed,
    )
    proposals, after = Ones(config).decide(question, state or {})
    json.dumps(after)
    return {p.job_id: p.alternatives[0] for p in proposals}, after


def test_new_jobs_start_on_their_least_size():
    c = Cluster([node("a1", 8, "a100")])
    c.add(1, elastic="1-8", gpus=4)
    c.add(2, elastic="2-4", gpus=4)
    firsts, state = ask(c)
    assert {job: first.gpus for job, first in firsts.items()} == {1: 1, 2: 2}
    assert words(firsts[1].reason) == "the best evolved schedule gives it 1 a100"
    assert set(state["populations"]) == {"a100"}


def test_a_job_that_has_done_two_epochs_grows_twofold_and_no_further():
    c = Cluster([node("a1", 8, "a100")])
    c.add(1, elastic="1-8", on={"a1": 1}, start_time=NOW - 600)
    firsts, state = ask(c, progress={1: 0.2})
    assert firsts[1].gpus == 2
    again, _ = ask(c, state, later_s=60.0, progress={1: 0.25})
    assert again[1].gpus == 2


def test_a_schedule_waits_for_the_epoch_of_a_job_that_it_changes():
    c = Cluster([node("a1", 4, "a100")])
    c.add(1, elastic="1-4", on={"a1": 1}, start_time=NOW - 600)
    _, state = ask(c, progress={1: 0.5})
    key = next(iter(state["jobs"]))
    # It has just changed: its next epoch is not over.
    state["jobs"][key] |= {"scheduled_at": 15.0, "limit": 2, "scaled_at": 0.0}
    firsts, _ = ask(c, state, progress={1: 0.5})
    assert (firsts[1].gpus, words(firsts[1].reason)) == (
        1,
        "a better schedule waits until all that it changes end an epoch",
    )


def test_the_start_of_another_job_begins_the_wait_for_an_epoch_anew():
    c = Cluster([node("a1", 4, "a100")])
    c.add(1, elastic="1-1", on={"a1": 1}, start_time=NOW - 600)
    _, state = ask(c, progress={1: 0.5})
    first = state["jobs"][next(iter(state["jobs"]))]
    c.add(2, elastic="1-1", gpus=1)
    firsts, state = ask(c, state, later_s=60.0, progress={1: 0.6})
    assert firsts[2].gpus == 1
    again = state["jobs"][next(iter(state["jobs"]))]
    assert (first["scheduled_at"], again["scheduled_at"]) == (0.0, 18.0)


def test_a_job_that_fits_nowhere_waits():
    c = Cluster([node("a1", 4, "a100")])
    c.add(1, elastic="8-16", gpus=8)
    firsts, _ = ask(c)
    assert firsts[1].gpus == 0


def test_gpus_that_are_gone_leave_the_schedules():
    c = Cluster([node("a1", 8, "a100")])
    for job in range(1, 7):
        c.add(job, elastic="1-2", gpus=1)
    _, state = ask(c)
    firsts, after = ask(c, state, capacity={"a100": 3})
    assert sum(first.gpus for first in firsts.values()) == 3
    assert {len(row) for row in after["populations"]["a100"]} == {3}
