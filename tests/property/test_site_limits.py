"""Properties of site limits: no plan exceeds shares or resizes, under any policy."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.config.schema import Config, ControllerSettings, LimitSettings, ResizeSettings
from slurm_elastic.core.plan import Action
from slurm_elastic.placement import site_limits
from slurm_elastic.policies import policy_protocol
from slurm_elastic.round import decide_round
from tests.support.decisions.cluster_strategies import clusters
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import NOW

EASY = ResizeSettings(min_interval_s=0.0, per_hour=1000, min_gain=0.0, restart_s=0.0)
POLICIES = ("fair", "las", "dally", "sia", "goodput")
SHARES = st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0])


def decide(cluster, limits, policy="fair", queue="controller", resized=None):
    config = Config(
        resize=EASY, limits=limits, controller=ControllerSettings(policy=policy, queue=queue)
    )  # fmt: skip
    plan, _ = decide_round(
        cluster.snapshot(),
        cluster.records,
        config=config,
        policy=policy_protocol.load(config),
        state={},
        resized=resized,
    )
    return plan


@given(
    clusters(transitions=False), SHARES, SHARES, st.sampled_from(POLICIES)
)  # fmt: skip
def test_no_user_gets_more_than_the_share(cluster, share, user_share, policy):
    limits = LimitSettings(share=share, user_share=user_share)
    plan = decide(cluster, limits, policy)
    before = cluster.snapshot()
    jobs = tuple(
        dataclasses.replace(j, allocation=d.target) if (d := plan.decision.get(j.job_id)) else j
        for j in before.jobs
    )
    after = dataclasses.replace(before, jobs=jobs)
    for cap in site_limits.shares(before, limits):
        held = site_limits.above_min(cap, before)
        assert site_limits.above_min(cap, after) <= max(cap.cap, held)


@given(
    clusters(transitions=False),
    st.integers(0, 3),
    st.integers(0, 4),
    st.lists(st.floats(1.0, 7000.0), max_size=4),
    st.sampled_from(POLICIES),
)
def test_no_round_makes_more_resizes_than_are_left(cluster, of_user, of_all, ago, policy):
    limits = LimitSettings(resizes_per_user=of_user, resizes=of_all)
    spent = {"alice": [NOW - s for s in ago]}
    plan = decide(cluster, limits, policy, resized=spent)
    user = cluster.snapshot().job
    counted = [
        user[d.job_id].user
        for d in plan.changes
        if d.action is not Action.START and "so that" not in words(d.reason)
    ]  # fmt: skip
    used = sum(s < site_limits.HOUR_S for s in ago)
    assert counted.count("alice") <= max(0, of_user - used)
    assert counted.count("bob") <= of_user
    assert len(counted) <= max(0, of_all - used)


@given(clusters(transitions=False, costs=False), st.sampled_from(POLICIES))
def test_what_is_not_limited_is_decided_as_if_there_were_no_limits(cluster, policy):
    assert decide(cluster, LimitSettings(), policy) == decide(
        cluster, LimitSettings(resizes=900_000, resizes_per_user=900_000), policy
    )
