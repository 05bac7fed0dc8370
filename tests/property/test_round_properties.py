"""Properties of every plan, on random clusters."""

from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.config.placement_settings import TopologySettings
from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings, SleepSettings
from slurm_elastic.core.cluster import JobState
from slurm_elastic.core.plan import Action
from slurm_elastic.placement.free_resources import ResourceNeed
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.round import decide_round
from tests.support.decisions.cluster_strategies import clusters
from tests.support.decisions.reasons import words

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


def holdings(cluster, plan, *, during):
    """Return the GPUs of each job after the plan (or `during`, at most while it is carried out)."""
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


CLEARING = SleepSettings(mode="act", clear_s=1e6, boot_s=1.0)
SPEEDS = ({}, {"spine": 10.0}, {"node": 2000.0, "rack": 100.0, "spine": 10.0})

configs = st.builds(
    lambda queue, resize, speeds, sleep: Config(
        controller=ControllerSettings(queue=queue),
        resize=resize,
        topology=TopologySettings(speeds=speeds),
        sleep=sleep,
    ),
    st.sampled_from(["slurm", "controller"]),
    st.sampled_from([ResizeSettings(), FREE_OF_COST]),
    st.sampled_from(SPEEDS),
    st.sampled_from([SleepSettings(), CLEARING]),
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
def test_no_job_grows_where_it_may_not(cluster, config):
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
    """A plan carried out at no cost is followed by one without changes."""
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
    """A job loses speed only for another one; all other changes gain."""
    plan, _ = decide(cluster, config)
    for decision in plan.changes:
        if decision.action is Action.GROW:
            assert decision.gain > config.resize.min_gain - 1e-9
        if decision.action is Action.PREEMPT:
            assert "can start" in words(decision.reason)
        if decision.action is Action.MOVE and "together" not in words(decision.reason):
            assert decision.gain > config.resize.min_gain - 1e-9
