"""Policy `goodput`: limits of users and accounts in its program."""

import dataclasses

import pytest

from slurm_elastic.core.cluster import GPUS_OF_A_NODE, Limit
from slurm_elastic.policies.goodput.marginal_value import MarginalValue
from tests.support.decisions.synthetic_clusters import NOW, node
from tests.unit.policies.goodput.test_marginal_value import cluster, config, first, question


def limited(made, resource, cap, jobs, **more):
    made.limits = (*made.limits, limit(resource, cap, jobs, **more))
    return made


def limit(resource, cap, jobs, **more):
    return Limit(name=f"{resource}={cap}", resource=resource, cap=cap, jobs=frozenset(jobs), **more)


def sizes(made, **settings):
    chosen, _ = first(MarginalValue(config(**settings)), question(made))
    return [a.gpus for a in chosen.values()]


def test_jobs_share_what_a_limit_leaves_them_and_others_take_the_rest():
    assert sizes(limited(cluster((None, {}), (None, {}), (None, {})), "gpu", 2, {1, 2})) == [
        1,
        1,
        4,
    ]


@pytest.mark.parametrize(
    ("resource", "cap"), [("gpu", 4), ("gpu:a100", 4), ("cpu", 4), ("mem", 4_000), ("node", 1)]
)
def test_every_resource_is_limited(resource, cap):
    made = cluster((None, {}))
    made.jobs = [
        dataclasses.replace(job, cpus_per_gpu=1.0, memory_per_gpu_mb=1000.0) for job in made.jobs
    ]
    assert sizes(made) == [8]
    assert sizes(limited(made, resource, cap, {1})) == [4]


def test_a_limit_of_another_type_does_not_count():
    made = cluster((None, {}), nodes=(node("n1"), node("n2"), node("n3", 4, "t4")))
    assert sizes(limited(made, "gpu:t4", 0, {1})) == [8]


def test_gpus_of_jobs_outside_the_question_count():
    made = limited(cluster(({"n1": 2}, {}), (None, {})), "gpu", 4, {1, 2})
    asked = dataclasses.replace(question(made), jobs=(2,))
    chosen, _ = first(MarginalValue(config()), asked)
    assert chosen[2].gpus == 2


def test_gpus_of_min_are_spared_by_a_share():
    made = cluster((None, {}), (None, {}))
    made = limited(made, "gpu", 2, {1, 2}, spared={1: 1, 2: 1}, scope="user")
    assert sizes(made) == [2, 2]


def test_jobs_above_a_lowered_limit_keep_what_they_hold():
    made = limited(cluster(({"n1": 4}, {}), (None, {})), "gpu", 1, {1, 2})
    assert sizes(made, queue="slurm") == [4, 0]


@pytest.mark.parametrize(("held", "gpus"), [(None, [2, 4]), ({"n1": 4}, [4, 4])])
def test_no_size_takes_more_than_the_limit_of_every_node(held, gpus):
    made = cluster((held, {}), (None, {}))
    assert sizes(limited(made, GPUS_OF_A_NODE, 1, {1})) == gpus


def test_an_overdue_job_waits_while_its_limit_is_used_up():
    made = cluster(({"n1": 1}, {}), ({"n1": 1}, {}), (None, {}))
    made.jobs = [dataclasses.replace(job, start_time=NOW - 60.0) for job in made.jobs]
    asked = question(limited(made, "gpu", 2, {1, 2, 3}))
    waits = {asked.snapshot.job[3].key: NOW - 9000.0}
    chosen, _ = first(MarginalValue(config(wait_s=600.0)), asked, {"waits": waits})
    assert [a.gpus for a in chosen.values()] == [1, 1, 0]
