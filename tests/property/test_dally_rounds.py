"""Properties of policy `dally` in rounds: whole gangs, leases, shrinks before preemption."""

import json
import random
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from slurm_elastic.config.policy_settings import DallySettings
from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings, SpeedupSettings
from slurm_elastic.core.plan import Action
from slurm_elastic.placement.delay.free_map import GangTier, NodeLayout
from slurm_elastic.policies.dally.bid_order import order_of
from slurm_elastic.policies.dally.dally import Dally
from slurm_elastic.round import decide_round
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node, racks

FLOOR = 600.0
TIMERS = ("own", "auto", "nowait", "full", "1,2")


def config(timers="own", loss=0.3, lease_s=3600.0):
    return Config(
        controller=ControllerSettings(queue="controller", policy="dally"),
        resize=ResizeSettings(min_interval_s=0.0, per_hour=1000),
        speedup=SpeedupSettings(loss_across_nodes=loss),
        dally=DallySettings(timers=timers, lease_s=lease_s, floor_s=FLOOR),
    )


def invent(count, jobs, seed):
    """Draw a crowded cluster of nodes of unequal size, with rigid and elastic gangs."""
    rng = random.Random(seed)
    kinds = rng.choice([["a100"], ["a100"], ["a100", "v100"]])
    nodes = [node(f"n{i}", rng.choice([2, 4, 4, 8]), rng.choice(kinds)) for i in range(count)]
    cluster = Cluster(nodes, switches=racks([n.name for n in nodes], rng.choice([2, 3])))
    free = {n.name: n.gpus for n in nodes}
    for job_id in range(1, jobs + 1):
        size = rng.choice([1, 2, 3, 4, 4, 8])
        on = {}
        if rng.random() < 0.6:
            home = rng.choice(nodes)
            size = min(size, free[home.name])
            on = {home.name: size} if size else {}
            free[home.name] -= size
        size = size or rng.choice([1, 2, 4])
        least = size if rng.random() < 0.4 else rng.randint(1, size)
        elastic = "" if rng.random() < 0.1 else f"{least}-{size + rng.choice([0, 0, 1, 4])}"
        if elastic.partition("-")[0] == elastic.partition("-")[2]:
            elastic = elastic.partition("-")[0]
        began = NOW - rng.choice([10.0, 1000.0, 5000.0])
        record = {"progress": rng.choice([None, 0.2, 0.9])} if elastic else None
        if on and elastic:
            record["last_change"] = began
        cluster.add(
            job_id,
            elastic=elastic,
            on=on or None,
            gpus=size,
            record=record,
            time_limit_s=rng.choice([None, 7200, 100_000]),
            submit_time=NOW - rng.choice([5.0, 4000.0, 50_000.0]),
            start_time=began if on else None,
        )
    return cluster


clusters = st.builds(invent, st.integers(1, 6), st.integers(1, 10), st.integers(0, 2**32))
options = st.sampled_from(TIMERS)
at_once = st.booleans()


def decide(cluster, timers="own", *, at_once=True, state=None, **more):
    settings_ = config(timers, **more)
    return decide_round(
        cluster.snapshot(), cluster.records, config=settings_, policy=Dally(settings_),
        state=state or {}, at_once=at_once,
    )  # fmt: skip


def without(cluster, unwanted):
    """Return the cluster without some of its jobs."""
    cluster.jobs = [j for j in cluster.jobs if not unwanted(j)]
    known = {j.job_id for j in cluster.jobs}
    cluster.records = {j: r for j, r in cluster.records.items() if j in known}
    return cluster


def held(cluster, plan):
    """Return the allocations after the plan, by job."""
    found = {j.job_id: j.allocation for j in cluster.jobs}
    found |= {d.job_id: d.target for d in plan.decisions}
    return {j: a for j, a in found.items() if a is not None}


@given(clusters, options, at_once)
def test_gangs_are_whole_and_fit(cluster, timers, at_once):
    plan, state = decide(cluster, timers, at_once=at_once)
    json.dumps(state)
    used = {}
    for job_id, allocation in held(cluster, plan).items():
        job = next(j for j in cluster.jobs if j.job_id == job_id)
        if job.directive is not None:
            assert job.directive.min_gpus <= allocation.gpus <= job.directive.max_gpus
        for name, gpus in allocation.shares:
            used[name] = used.get(name, 0) + gpus
    assert all(used.get(n.name, 0) <= n.gpus for n in cluster.nodes)


@given(clusters, options, at_once)
def test_the_same_question_has_one_answer(cluster, timers, at_once):
    first, second = (decide(cluster, timers, at_once=at_once) for _ in range(2))
    assert first == second


@given(clusters, options, at_once)
def test_no_gang_loses_gpus_before_the_floor(cluster, timers, at_once):
    # The round, not the policy, makes room for waiting rigid jobs.
    cluster = without(cluster, lambda j: j.directive is None and j.allocation is None)
    plan, _ = decide(cluster, timers, at_once=at_once)
    for decision in plan.changes:
        job = next(j for j in cluster.jobs if j.job_id == decision.job_id)
        if job.allocation is not None:
            assert job.start_time + FLOOR <= NOW


@example(invent(4, 9, 1060159781), "full")  # one elastic gang gives more than is needed
@given(clusters, options)
def test_no_gang_is_preempted_while_an_elastic_one_could_have_given(cluster, timers):
    # Shrinks for a waiting rigid job come after the gangs' order: docs/dally.md.
    cluster = without(cluster, lambda j: j.directive is None and j.allocation is None)
    if timers == "own":  # without gangs that are due: GPUs kept for them count as taken
        cluster.jobs = [replace(j, submit_time=max(j.submit_time, NOW - 5.0)) for j in cluster.jobs]
    plan, _ = decide(cluster, timers)
    after = held(cluster, plan)
    for decision in plan.changes:
        if decision.action is not Action.PREEMPT or len(decision.current.nodes) > 1:
            continue
        (name, _), *_ = decision.current.shares
        lost = next(j for j in cluster.jobs if j.job_id == decision.job_id)
        size = next(n.gpus for n in cluster.nodes if n.name == name)
        free = size - sum(a.on(name) for a in after.values())
        least = lost.directive.min_gpus
        assert free < least
        for job in cluster.jobs:
            has = after.get(job.job_id)
            if job.directive is None or has is None or has.nodes != (name,):
                continue
            if job.allocation is not None and job.start_time + FLOOR > NOW:
                continue
            assert has.gpus - job.directive.min_gpus + free < least


@given(clusters, options, at_once)
def test_a_quiet_cluster_stays_as_it_is(cluster, timers, at_once):
    """Without waiting gangs, idle GPUs are taken once, and all keep what they have."""
    cluster, state = without(cluster, lambda j: j.allocation is None), {}
    for _ in range(2):
        plan, state = decide(cluster, timers, at_once=at_once, state=state)
        assert {d.action for d in plan.changes} <= {Action.GROW, Action.MOVE}
        cluster.carry_out(plan)
    plan, _ = decide(cluster, timers, at_once=at_once, state=state)
    assert not plan.changes


@given(st.sampled_from(TIMERS), st.integers(1, 40), st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_gang_that_waits_longer_accepts_no_less(timers, gpus, one, other):
    order = order_of(DallySettings(timers=timers))
    order.begin(NOW, waiting=(), waits={}, starts=())
    sites = NodeLayout.regular(racks=2, nodes=2, gpus=8)
    short, long = sorted((one, other))
    assert order.farthest(gpus, sites, short) <= order.farthest(gpus, sites, long)
    assert order.limit_s(gpus, GangTier.RACK) <= order.limit_s(gpus, GangTier.NETWORK)


@given(clusters, options, st.sampled_from((0.0, 3000.0, 20_000.0)), st.sampled_from((1.0, 1e6)))
def test_a_gang_that_waits_longer_starts_if_it_would_have_started_before(
    cluster, timers, waited, more
):
    cluster = without(cluster, lambda j: j.allocation is None)
    starts = []
    for since in (waited, waited + more):
        jobs = list(cluster.jobs)
        cluster.add(99, elastic="4", gpus=4, submit_time=NOW - since, time_limit_s=7)
        plan, _ = decide(cluster, timers)
        starts.append(plan.decision[99].target is not None)
        cluster.jobs = jobs
    assert starts[1] >= starts[0]
