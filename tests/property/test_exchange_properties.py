"""Properties of exchanges of GPUs, in any full cluster and for any wishes of its jobs."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from slurm_elastic.config.schema import Config, LimitSettings, ResizeSettings
from slurm_elastic.core.cluster import JobState
from slurm_elastic.core.plan import Measurement
from slurm_elastic.policies.sia.sia import Sia
from slurm_elastic.round import decide_round
from tests.support.decisions.synthetic_clusters import Cluster, node
from tests.unit.controller.transitions.test_exchange_changes import Pair
from tests.unit.placement.test_binding_proposals import Told

TYPES = ("a100", "h100", "v100")
FREE = ResizeSettings(min_interval_s=0.0, per_hour=1000)


@st.composite
def crowded(draw):
    """Return a cluster with few idle GPUs, and what each of its elastic jobs wishes."""
    kinds = TYPES[: draw(st.integers(2, 3))]
    names = [(f"{kind[0]}{i}", kind) for kind in kinds for i in range(draw(st.integers(1, 2)))]
    c = Cluster([node(name, 4, kind) for name, kind in names])
    wishes = {}
    for name, _ in names:
        for gpus in draw(st.sampled_from([(4,), (2, 2), (3, 1), (4,), (4,), (3,)])):
            job_id = len(c.jobs) + 1
            if draw(st.integers(0, 6)) == 0:
                c.add(job_id, on={name: gpus})
                continue
            least = draw(st.integers(1, gpus))
            busy = draw(st.integers(0, 7)) == 0
            c.add(
                job_id, elastic=f"{least}-8", on={name: gpus},
                record={"held": busy, "checkpoint_s": draw(st.sampled_from([None, 5.0, 300.0]))},
            )  # fmt: skip
            kind, size = draw(st.sampled_from(kinds)), draw(st.integers(least, 8))
            wishes[f"j{job_id}"] = draw(
                st.sampled_from([[(kind, gpus)], [(kind, gpus)], [(kind, size), (kind, least)]])
            )
    return c, wishes


configs = st.builds(
    lambda resize, most: Config(resize=resize, limits=LimitSettings(resizes=most)),
    st.sampled_from([FREE, ResizeSettings(min_interval_s=0.0, per_hour=1)]),
    st.sampled_from([1, 2, 3, 100000]),
)


def decide(cluster, policy, config):
    plan, _ = decide_round(
        cluster.snapshot(), cluster.records, config=config, policy=policy, state={}
    )
    return plan


def groups_of(plan):
    return {frozenset((d.job_id, *d.exchange)) for d in plan.changes if d.exchange}


def check(cluster, plan, config):
    """Check that a plan can be carried out in any order, exchanges as a whole."""
    decision, groups = plan.decision, groups_of(plan)
    for group in groups:
        for job_id in group:
            assert frozenset((job_id, *decision[job_id].exchange)) == group, "all or none"
            assert decision[job_id].target != decision[job_id].current
    together = {job_id for group in groups for job_id in group}
    used = Counter()
    for job in cluster.jobs:
        if job.job_id in together:
            continue
        each = decision.get(job.job_id)
        before = dict(job.allocation.shares)
        after = dict(each.target.shares) if each else {}
        used.update({n: max(before.get(n, 0), after.get(n, 0)) for n in before | after})
    for group in groups:
        before, after = Counter(), Counter()
        for job_id in group:
            before.update(dict(decision[job_id].current.shares))
            after.update(dict(decision[job_id].target.shares))
        used.update({n: max(before[n], after[n]) for n in before | after})
    assert all(used[n.name] <= n.gpus for n in cluster.nodes), "counted twice"
    assert len(plan.changes) <= config.limits.resizes
    by_id = {j.job_id: j for j in cluster.jobs}
    for each in plan.changes:
        directive, target = by_id[each.job_id].directive, each.target
        assert directive.allows(target.gpus, target.gpu_type)
        record = cluster.records[each.job_id]
        assert not record.held
        assert not each.exchange or (record.checkpoint_s or 0.0) <= 60.0
    for job in cluster.jobs:
        assert job.submission is not None or job.job_id not in decision


@settings(max_examples=300)
@given(crowded(), configs)
def test_plans_with_exchanges_can_be_carried_out_and_end(case, config):
    cluster, wishes = case
    rigid = {j.job_id: j.allocation for j in cluster.jobs if j.submission is None}
    begun = 0
    for _ in range(2 * len(cluster.jobs) + 2):
        plan = decide(cluster, Told(**wishes), config)
        check(cluster, plan, config)
        begun += len(groups_of(plan))
        cluster.carry_out(plan)
        if not plan.changes:
            break
    assert not plan.changes, "the same wishes lead to an end"
    assert {j.job_id: j.allocation for j in cluster.jobs if j.submission is None} == rigid
    event(f"exchanges: {min(begun, 3)}")


@given(crowded(), st.data())
def test_sia_makes_no_exchange_twice(case, data):
    cluster, wishes = case
    for name in wishes:
        job_id = int(name[1:])
        held = cluster.jobs[job_id - 1].allocation
        rate = st.sampled_from([1.0, 2.0, 8.0])
        rows = [
            Measurement(gpu_type=t, gpus=4, nodes=1, samples_per_s=data.draw(rate), steps=50)
            for t in sorted({held.gpu_type, *TYPES})
        ]
        known = cluster.records[job_id]
        cluster.records[job_id] = dataclasses.replace(known, measurements=tuple(rows))
    config = Config(resize=FREE)
    policy, made = Sia(config), set()
    for _ in range(3 * len(cluster.jobs)):
        plan = decide(cluster, policy, config)
        check(cluster, plan, config)
        for group in groups_of(plan):
            targets = frozenset((i, plan.decision[i].target) for i in group)
            assert targets not in made
            made.add(targets)
        if not plan.changes:
            break  # the next round would be the same
        cluster.carry_out(plan)
    event(f"exchanges: {min(len(made), 3)}")


#: Seconds, whether the policy wants the exchange, jobs that send no reports, and an event before.
SPANS = st.lists(
    st.tuples(
        st.integers(1, 60),
        st.booleans(),
        st.sets(st.sampled_from([1, 2]), max_size=1),
        st.sampled_from(["", "restart", "rigid job"]),
    ),
    max_size=8,
)


@settings(max_examples=25)
@given(SPANS)
def test_whatever_happens_both_jobs_run_and_the_exchange_is_made_at_last(spans):
    with pytest.MonkeyPatch.context() as monkeypatch:
        pair = Pair(monkeypatch)
        slurm = pair.slurm
        try:
            for seconds, wanted, silent, happens in spans:
                pair.exchange() if wanted else pair.stay()
                pair.silent = silent
                if happens == "restart":
                    pair.site.restart()
                elif happens == "rigid job" and 8 not in slurm.listed:
                    slurm.submit(8, gpus=1, priority=5)
                pair.play(seconds)
            pair.silent = set()
            if 8 in slurm.listed:
                slurm.end(8)
            pair.policy.wishes = {1: [("v100", 2), ("v100", 1)], 2: [("a100", 2), ("a100", 1)]}
            pair.until(lambda: pair.nodes == ("n2", "n1"), seconds=1500)
            pair.until(lambda: not pair.site.controller.engine.live)
            assert [slurm.listed[i].state for i in (1, 2)] == [JobState.RUNNING] * 2
            runs = pair.runs
            pair.play(300)
            assert pair.runs == runs
        finally:
            pair.site.close()
