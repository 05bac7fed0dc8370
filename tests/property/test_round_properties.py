"""What every plan must keep to, on invented clusters."""

import random

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.clusters import NOW, Cluster, node, racks
from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings, TopologySettings
from slurm_elastic.core.cluster import Allocation, JobState, Limit
from slurm_elastic.core.plan import Action, Measurement
from slurm_elastic.placement.free_resources import ResourceNeed
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.round import decide_round
from tests.support.reasons import words

FREE_OF_COST = ResizeSettings(min_interval_s=0.0, per_hour=1000, min_gain=0.0, restart_s=0.0)


def decide(cluster, config=None, previous=None, state=None):
    config = config or Config()
    return decide_round(
        cluster.snapshot(),
        cluster.records,
        config=config,
        policy=FairShare(config),
        state=state or {},
        previous=previous,
    )


def clusters(*, transitions=True, costs=True):
    """Mostly full clusters; what hypothesis can make smaller are the counts."""
    counts = (st.integers(1, 8), st.integers(1, 12), st.integers(0, 2**32))
    return st.builds(lambda *args: invent(*args, transitions=transitions, costs=costs), *counts)


def invent(count, jobs, seed, *, transitions=True, costs=True):
    rng = random.Random(seed)
    kinds = rng.choice([["a100"], ["a100", "v100"], ["a100", "a100", "v100"]])
    nodes = []
    for i in range(count):
        gpus = rng.choice([2, 4, 8, 8])
        nodes.append(
            node(
                f"n{i}",
                gpus,
                rng.choice(kinds),
                cpus=rng.choice([2, 3, 8]) * gpus,
                available=rng.random() < 0.93,
                planned=rng.random() < 0.07,
            )
        )
    cluster = Cluster(nodes, switches=racks([n.name for n in nodes], rng.choice([2, 4])))
    free = {n.name: n.gpus for n in nodes}
    for job_id in range(1, jobs + 1):
        add(rng, cluster, free, job_id, transitions=transitions, costs=costs)
    limits = []
    for i in range(rng.choice([0, 0, 1, 2])):
        members = [j.job_id for j in cluster.jobs if rng.random() < 0.5]
        resource = rng.choice(["gpu", "gpu:a100", "node", "cpu", "mem"])
        cap = rng.randint(1, 40) * (8_000 if resource == "mem" else 1)
        limits.append(Limit(name=f"limit {i}", resource=resource, cap=cap, jobs=frozenset(members)))
    cluster.limits = tuple(limits)
    return cluster


def add(rng, cluster, free, job_id, *, transitions, costs):
    kind = rng.choice([n.gpu_type for n in cluster.nodes])
    on = {}
    if rng.random() < 0.75:
        homes = [n.name for n in cluster.nodes if n.gpu_type == kind and free[n.name]]
        for name in rng.sample(homes, min(len(homes), rng.choice([1, 1, 1, 2, 3]))):
            on[name] = rng.randint(1, min(free[name], 8))
    for name, gpus in on.items():
        free[name] -= gpus
    elastic, record = "", {}
    held = sum(on.values())
    size = held or rng.choice([1, 2, 3, 4, 4, 8])
    if rng.random() < 0.7:
        unit = rng.choice([u for u in (1, 1, 2, 4) if size % u == 0])
        least = unit * rng.randint(1, size // unit)
        elastic = f"{least}-{size + unit * rng.randint(0, 8)}"
        elastic += f",unit={unit}" if unit > 1 else ""
        elastic += rng.choice(["", f",types={kind}", ",types=a100:v100"])
        if rng.random() < 0.5 and held:
            seen = Measurement(
                gpu_type=kind,
                gpus=held,
                nodes=len(on),
                samples_per_s=10 ** rng.uniform(-2, 3),
                steps=9,
                racks=rng.randint(1, len(on)),
                compute_s=rng.choice([None, 0.01, 0.1, 1.0]),
                sync_s=rng.choice([None, 0.0, 0.01, 1.0]),
                reports=rng.choice([0, 3]),
            )
            record["measurements"] = (seen,)
            record["gradient_bytes"] = rng.choice([None, 1e6, 1e8, 1e10])
        if costs and held:
            record["checkpoint_s"] = rng.choice([None, 0.0, 30.0])
            record["last_change"] = NOW - rng.choice([10.0, 5000.0, 5000.0])
            record["proven"] = rng.random() < 0.9
            record["held"] = rng.random() < 0.1
        if transitions and held and rng.random() < 0.1:
            record["in_transition"] = True
            target = {n: max(1, g - rng.choice([0, 1, 2])) for n, g in on.items()}
            record["target"] = Allocation.of(kind, target)
    cluster.add(
        job_id,
        elastic=elastic,
        on=on or None,
        gpus=size,
        record=record,
        gpu_type=kind if on or rng.random() < 0.5 else "",
        min_nodes=1 if on else rng.choice([1, 1, 1, 2]),
        priority=rng.randint(0, 3),
        memory_per_gpu_mb=8_000.0 if on else rng.choice([0.0, 8_000.0, 60_000.0]),
    )


def holdings(cluster, plan, *, during):
    """What each job holds once (or `during`, at most while) the plan is carried out."""
    held = {}
    for job in cluster.jobs:
        decision = plan.decision.get(job.job_id)
        record = cluster.records.get(job.job_id)
        shapes = [job.allocation]
        if record and record.in_transition:
            shapes = [job.allocation, record.target] if during else [record.target]
        elif decision:
            shapes = [job.allocation, decision.target] if during else [decision.target]
        both = {}
        for shape in shapes:
            for name, gpus in shape.shares if shape else ():
                both[name] = max(both.get(name, 0), gpus)
        held[job.job_id] = both
    return held


SPEEDS = ({}, {"spine": 10.0}, {"node": 2000.0, "rack": 100.0, "spine": 10.0})

configs = st.builds(
    lambda queue, resize, speeds: Config(
        controller=ControllerSettings(queue=queue),
        resize=resize,
        topology=TopologySettings(speeds=speeds),
    ),
    st.sampled_from(["slurm", "controller"]),
    st.sampled_from([ResizeSettings(), FREE_OF_COST]),
    st.sampled_from(SPEEDS),
)


@given(clusters(), configs)
def test_no_node_ever_holds_more_than_it_has(cluster, config):
    plan, _ = decide(cluster, config)
    snapshot = cluster.snapshot()
    for during in (False, True):
        held = holdings(cluster, plan, during=during)
        for n in snapshot.nodes:
            needs = [ResourceNeed.of(j) for j in cluster.jobs]
            here = [(need, held[need.job_id].get(n.name, 0)) for need in needs]
            assert sum(g for _, g in here) <= n.gpus
            assert sum(need.cpus(g) for need, g in here) <= n.cpus
            assert sum(need.memory(g) for need, g in here) <= n.memory_mb
    kept = dict.fromkeys((n.name for n in snapshot.nodes), 0)
    for claim in plan.claims:
        for name, gpus in claim.shares:
            kept[name] += gpus
    held = holdings(cluster, plan, during=False)
    for n in snapshot.nodes:
        here = sum(shares.get(n.name, 0) for shares in held.values())
        assert here + kept[n.name] <= n.gpus


@given(clusters(), configs)
def test_every_target_is_one_the_user_allows(cluster, config):
    plan, _ = decide(cluster, config)
    types = {n.name: n.gpu_type for n in cluster.nodes}
    job = cluster.snapshot().job
    for decision in plan.changes:
        if decision.target is None:
            assert config.controller.queue == "controller"
            continue
        directive = job[decision.job_id].directive
        assert directive.allows(decision.target.gpus, decision.target.gpu_type)
        assert {types[n] for n in decision.target.nodes} == {decision.target.gpu_type}
        assert words(decision.reason)


@given(clusters(), configs)
def test_nobody_grows_where_he_may_not(cluster, config):
    plan, _ = decide(cluster, config)
    snapshot = cluster.snapshot()
    for decision in plan.changes:
        now = dict(decision.current.shares) if decision.current else {}
        for name, gpus in decision.target.shares if decision.target else ():
            n = snapshot.node[name]
            assert gpus <= now.get(name, 0) or (n.available and not n.planned)


@given(clusters(), configs)
def test_rigid_held_and_moving_jobs_are_left_alone(cluster, config):
    plan, _ = decide(cluster, config)
    for job in cluster.jobs:
        record = cluster.records.get(job.job_id)
        decision = plan.decision.get(job.job_id)
        if job.submission is None:
            assert decision is None
        elif job.state is JobState.RUNNING and (
            record.in_transition or record.held or not record.proven
        ):
            assert decision.action is Action.KEEP
            assert decision.target == job.allocation
            assert words(decision.waiting_for)


@given(clusters(), configs)
def test_limits_are_never_exceeded_by_a_change(cluster, config):
    plan, _ = decide(cluster, config)
    snapshot = cluster.snapshot()

    def used(limit, held):
        total = 0
        for job_id in limit.jobs:
            need = ResourceNeed.of(snapshot.job[job_id])
            for name, gpus in held[job_id].items():
                total += {
                    "gpu": gpus,
                    "node": 1,
                    "cpu": need.cpus(gpus),
                    "mem": need.memory(gpus),
                }.get(limit.resource, gpus if snapshot.node[name].gpu_type == "a100" else 0)
        return total

    before = {j.job_id: dict(j.allocation.shares if j.allocation else ()) for j in cluster.jobs}
    moving = any(r.in_transition for r in cluster.records.values())
    for limit in cluster.limits:
        now, then = used(limit, before), used(limit, holdings(cluster, plan, during=False))
        assert then <= max(limit.cap, now) or moving


@given(clusters(), configs)
def test_the_same_question_has_the_same_answer(cluster, config):
    assert decide(cluster, config) == decide(cluster, config)


@given(clusters(), configs, st.data())
def test_a_job_that_disappears_breaks_nothing(cluster, config, data):
    plan, state = decide(cluster, config)
    gone = data.draw(st.sampled_from(cluster.jobs))
    cluster.jobs = [j for j in cluster.jobs if j is not gone]
    if data.draw(st.booleans()):
        cluster.records.pop(gone.job_id, None)
    again, _ = decide(cluster, config, previous=plan, state=state)
    assert gone.job_id not in again.decision


@given(
    clusters(transitions=False, costs=False),
    st.sampled_from(["slurm", "controller"]),
    st.sampled_from(SPEEDS),
)
def test_it_comes_to_rest(cluster, queue, speeds):
    """Carried out and asked again, at no cost and with nothing new, a plan wants no more."""
    config = Config(
        controller=ControllerSettings(queue=queue),
        resize=FREE_OF_COST,
        topology=TopologySettings(speeds=speeds),
    )
    state, plan = {}, None
    seen = []
    for _ in range(12):
        plan, state = decide(cluster, config, plan, state)
        if not plan.changes and not any(c.since == cluster.time for c in plan.claims):
            break
        seen.append([(d.job_id, str(d.current), str(d.target), d.reason) for d in plan.changes])
        cluster.carry_out(plan)
        cluster.time += 1
    else:
        raise AssertionError(seen)


@given(clusters(), configs)
def test_nothing_changes_without_a_gain(cluster, config):
    """Whoever loses speed loses it to somebody, whoever changes otherwise wins."""
    plan, _ = decide(cluster, config)
    for decision in plan.changes:
        if decision.action is Action.GROW:
            assert decision.gain > config.resize.min_gain - 1e-9
        if decision.action is Action.PREEMPT:
            assert "can start" in words(decision.reason)
        if decision.action is Action.MOVE and "together" not in words(decision.reason):
            assert decision.gain > config.resize.min_gain - 1e-9
