"""Site limits: refused growth with its reasons; pending jobs are not refused."""

import dataclasses

import pytest

from slurm_elastic.config.schema import (
    Config,
    ConfigError,
    ControllerSettings,
    LimitSettings,
    ResizeSettings,
    parse,
)
from slurm_elastic.core.cluster import Limit
from slurm_elastic.core.plan import Action
from slurm_elastic.policies import policy_protocol
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node

EASY = ResizeSettings(min_interval_s=0.0, per_hour=1000, min_gain=0.0, restart_s=0.0)


def decide(cluster, limits, *, queue="slurm", resized=None):
    config = Config(resize=EASY, limits=limits, controller=ControllerSettings(queue=queue))
    plan, _ = decide_round(
        cluster.snapshot(),
        cluster.records,
        config=config,
        policy=policy_protocol.load(config),
        state={},
        resized=resized,
    )
    return plan


def cluster_with(*jobs):
    """Cluster of elastic jobs 1-4, one GPU each on a node of its own."""
    cluster = Cluster([node(f"n{j}") for j in jobs])
    for j in jobs:
        cluster.add(j, elastic="1-4", on={f"n{j}": 1}, record={"proven": True, "reporting": True})
    return cluster


def gpus(plan):
    return {d.job_id: d.target.gpus if d.target else 0 for d in plan.decisions}


def test_the_site_s_share():
    cluster = cluster_with(1, 2)
    assert gpus(decide(cluster, LimitSettings())) == {1: 4, 2: 4}
    plan = decide(cluster, LimitSettings(share=0.5))
    assert sum(gpus(plan).values()) == 2 + 4
    assert gpus(decide(cluster, LimitSettings(share=0.0))) == {1: 1, 2: 1}


def test_a_users_share_names_the_user():
    cluster = cluster_with(2, 3, 4)  # 3 is bob's
    plan = decide(cluster, LimitSettings(user_share=0.25))  # 3 of 12
    found = gpus(plan)
    assert (found[3], found[2] + found[4]) == (4, 2 + 3)
    full = Cluster([node("n2"), node("n4")])
    for j, held in ((2, 4), (4, 1)):
        full.add(j, elastic="1-4", on={f"n{j}": held}, record={"proven": True, "reporting": True})
    decision = decide(full, LimitSettings(user_share=0.4)).decision[4]
    assert decision.action is Action.KEEP
    assert words(decision.why_not_more) == (
        "alice's elasticity may have 3 GPUs above MIN ([limits]), and 3 are in use"
    )


def test_a_partition_s_share():
    assert gpus(decide(cluster_with(1, 2), LimitSettings(partition_shares={"other": 0.0}))) == {
        1: 4,
        2: 4,
    }


def test_min_starts_whatever_is_used_up():
    cluster = cluster_with(1)
    cluster.add(2, elastic="2-4", gpus=2)
    limits = LimitSettings(share=0.0, resizes=0, resizes_per_user=0)
    plan = decide(cluster, limits, queue="controller")
    assert gpus(plan) == {1: 1, 2: 2}


def test_a_user_s_resizes_are_used_up():
    spent = {"alice": [NOW - 600.0, NOW - 60.0]}
    plan = decide(cluster_with(1, 2), LimitSettings(resizes_per_user=2), resized=spent)
    assert gpus(plan) == {1: 4, 2: 1}
    why = words(plan.decision[2].waiting_for)
    assert why.startswith(
        "would grow to 4 a100, but alice has used 2 of 2 resizes this hour, until"
    )


def test_an_hour_later_they_are_not():
    spent = {"alice": [NOW - 3601.0, NOW - 3700.0]}
    assert gpus(decide(cluster_with(2), LimitSettings(resizes_per_user=2), resized=spent)) == {2: 4}


def test_the_site_s_resizes_go_round_in_order():
    plan = decide(cluster_with(1, 2), LimitSettings(resizes=1), resized={})
    assert sorted(gpus(plan).values()) == [1, 4]
    left = next(d for d in plan.decisions if d.action is Action.KEEP)
    assert "the site has used 0 of 1 resizes this hour, and others come first" in words(
        left.waiting_for
    )


def test_a_job_without_resizes_left_still_gives_way():
    cluster = Cluster([node("n1")])
    cluster.add(2, elastic="1-4", on={"n1": 4}, record={"proven": True, "reporting": True})
    cluster.add(3, gpus=2, priority=9)
    limits = LimitSettings(resizes_per_user=0, resizes=0)
    assert gpus(decide(cluster, limits, resized={"alice": [NOW] * 5})) == {2: 2}


@pytest.mark.parametrize(("left", "grows"), [(89.0, False), (95.0, True)])
def test_near_the_end_of_its_time_a_job_is_left_alone(left, grows):
    cluster = Cluster([node("n1")])
    known = {"proven": True, "reporting": True, "checkpoint_s": 1.0, "restart_s": 14.0}
    cluster.add(1, elastic="1-4", on={"n1": 1}, record=known)
    (job,) = cluster.jobs
    started = NOW - 600.0 + left
    cluster.jobs = [dataclasses.replace(job, start_time=started, time_limit_s=600)]
    decision = decide(cluster, LimitSettings()).decision[1]
    assert (decision.action is Action.GROW) == grows
    assert grows or words(decision.waiting_for).startswith("its time limit ends it at ")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("share = 1.5", "f.toml:2: share = 1.5 is invalid: expected 0 to 1"),
        ("resizes = -1", "f.toml:2: resizes = -1 is invalid: expected 0 to 1000000"),
        (
            "partition_shares = { gpu = 2 }",
            "f.toml:2: partition_shares of gpu = 2 is invalid: expected 0 to 1",
        ),
    ],
)
def test_a_faulty_limit_is_named_with_its_line(text, line):
    with pytest.raises(ConfigError) as caught:
        parse(f"[limits]\n{text}", name="f.toml")
    assert str(caught.value).startswith(line)


def test_a_limit_of_slurm_is_named_while_a_change_is_on_trial_too():
    c = Cluster([node("g1", 4)])
    c.add(1, elastic="1-4", on={"g1": 2}, record={"on_trial": NOW - 5})
    c.limits = (Limit(name="QOS q", resource="gpu", cap=2, jobs=frozenset({1})),)
    assert words(decide(c, LimitSettings()).decision[1].why_not_more) == "QOS q is reached"
