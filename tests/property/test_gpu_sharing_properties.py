"""Properties of plans with two jobs on one GPU, on random clusters, over several rounds."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.config.schema import (
    Config,
    ControllerSettings,
    NeighbourSettings,
    ResizeSettings,
)
from slurm_elastic.core.cluster import JobState
from slurm_elastic.core.gpu_parts import held_gpus, jobs_by_gpu
from slurm_elastic.core.plan import Action
from slurm_elastic.models.colocation.node_sharing import application_of, shared_gpu_type
from slurm_elastic.models.colocation.shared_speeds import PartOfNode, SharedSpeeds
from slurm_elastic.placement.neighbours.gpu_pair_table import GpuPairTable
from slurm_elastic.policies.baselines.fifo import Fifo
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.policies.goodput.marginal_value import MarginalValue
from slurm_elastic.round import decide_round
from tests.support.decisions.synthetic_clusters import Cluster, node

ACT = NeighbourSettings(share_gpus="act")
GATE = ACT.gate


@st.composite
def shared_clusters(draw):
    """Draw a cluster of nodes with few GPUs, and jobs of one GPU or more; none is divided yet."""
    nodes = [
        node(f"g{i}", gpus=draw(st.integers(1, 2)), shards=draw(st.sampled_from([0, 2, 3, 4])))
        for i in range(draw(st.integers(1, 3)))
    ]
    cluster = Cluster(nodes)
    free = {n.name: n.gpus for n in nodes}
    for job_id in range(1, draw(st.integers(2, 7)) + 1):
        share = draw(st.sampled_from([",share=yes", ",share=yes", ""]))
        elastic = draw(
            st.sampled_from([f"1{share}", f"1-2{share}", f"1-4{share}", f"2{share}", ""])
        )
        gpus = int(elastic[0]) if elastic else 1
        name = draw(st.sampled_from(sorted(free)))
        runs = free[name] >= gpus and draw(st.integers(0, 3)) > 0
        if runs:
            free[name] -= gpus
        cluster.add(
            job_id,
            elastic=elastic,
            on={name: gpus} if runs else None,
            gpus=gpus,
            cpus_per_gpu=draw(st.sampled_from([1.0, 4.0, 8.0])),
            shape={"min_nodes": 1} if elastic else None,
            submit_time=cluster.time - draw(st.sampled_from([60, 10_000])),
            record={"proven": draw(st.booleans()) or not runs} if elastic else None,
        )
    return cluster


@st.composite
def speeds_of_pairs(draw, cluster):
    """Draw what was measured of some pairs of jobs on one GPU."""
    speeds, snapshot = SharedSpeeds(), cluster.snapshot()
    for job in snapshot.jobs:
        for other in snapshot.jobs:
            speed = draw(st.sampled_from([None, None, 0.5, 0.95, 1.0]))
            if job is other or speed is None:
                continue
            part, beside = (PartOfNode(application=application_of(j), gpus=1) for j in (job, other))
            speeds.record_alone(part.application, "s", 1.0)
            for _ in range(9):
                kind = shared_gpu_type(snapshot.nodes[0])
                speeds.record_shared(part, [beside], node_type=kind, setting="s", step_s=1 / speed)
    return speeds


CONFIGS = st.builds(
    lambda queue, settings: Config(
        controller=ControllerSettings(queue=queue), neighbours=settings,
        resize=ResizeSettings(min_interval_s=0.0, per_hour=1000, restart_s=5.0),
    ),
    st.sampled_from(["slurm", "controller"]),
    st.sampled_from([ACT, NeighbourSettings()]),
)  # fmt: skip
POLICIES = st.sampled_from([FairShare, Fifo, MarginalValue])


def decide(cluster, config, policy, speeds, previous=None, state=None):
    table = None
    if speeds is not None:
        table = GpuPairTable(cluster.snapshot(), speeds, {}, config.neighbours)
    return decide_round(
        cluster.snapshot(), cluster.records, config=config, policy=policy(config),
        state=state or {}, previous=previous, gpu_pairs=table,
    )  # fmt: skip


def check_holdings(cluster):
    """Check that no GPU has more than two jobs, which all may share, and no node too much."""
    for present in jobs_by_gpu(cluster.jobs).values():
        assert len(present) <= 2
        assert all(job.directive.share == "yes" for job in present)
    in_use = held_gpus(cluster.jobs)
    for known in cluster.snapshot().nodes:
        assert in_use[known.name] <= known.gpus
        assert known.used_cpus <= known.cpus


@given(st.data())
def test_no_gpu_has_more_than_two_jobs_and_no_pair_is_made_below_the_gate(data):
    cluster = data.draw(shared_clusters())
    speeds = data.draw(speeds_of_pairs(cluster))
    config, policy = data.draw(CONFIGS), data.draw(POLICIES)
    plan, state = None, {}
    for _ in range(4):
        plan, state = decide(cluster, config, policy, speeds, plan, state)
        table = GpuPairTable(cluster.snapshot(), speeds, {}, config.neighbours)
        for decision in plan.changes:
            job = cluster.snapshot().job[decision.job_id]
            if decision.target is None or not decision.target.half:
                continue
            assert config.neighbours.share_gpus == "act"
            assert job.directive.share == "yes"
            assert cluster.snapshot().node[decision.target.nodes[0]].shards in (2, 4)
            if decision.action is Action.START and decision.reason.code == "starts-on-half":
                other = int(decision.reason.parameters["job"])
                name = decision.target.nodes[0]
                for pair in ((job.job_id, other), (other, job.job_id)):
                    assert table.speed(name, *pair) >= GATE
        cluster.carry_out(plan)
        check_holdings(cluster)
        cluster.time += 60


@given(shared_clusters(), POLICIES, st.sampled_from(["slurm", "controller"]))
def test_where_sharing_is_off_the_plan_is_that_without_it(cluster, policy, queue):
    config = Config(controller=ControllerSettings(queue=queue))
    plan, state = decide(cluster, config, policy, None)
    assert (plan, state) == decide(cluster, config, policy, SharedSpeeds())


@given(shared_clusters())
def test_what_shares_no_gpu_is_decided_as_without_it(cluster):
    config = Config(neighbours=ACT)
    plan, _ = decide(cluster, config, FairShare, None)
    shared, _ = decide(cluster, config, FairShare, SharedSpeeds())
    for decision in shared.decisions:
        target = decision.target
        if target is None or not target.half:
            before = plan.decision[decision.job_id]
            assert dataclasses.replace(decision, waiting_for=None) == dataclasses.replace(
                before, waiting_for=None
            )


@given(shared_clusters(), st.sampled_from([(FairShare, "slurm"), (MarginalValue, "controller")]))
def test_pairs_do_not_part_and_meet_again(cluster, setup):
    policy, queue = setup
    config = Config(
        controller=ControllerSettings(queue=queue), neighbours=ACT,
        resize=ResizeSettings(min_interval_s=0.0, restart_s=5.0),
    )  # fmt: skip
    plan, state, changes = None, {}, []
    for _ in range(12):
        plan, state = decide(cluster, config, policy, SharedSpeeds(), plan, state)
        cluster.carry_out(plan)
        cluster.time += 60
        changes.append(len(plan.changes))
    assert changes[-3:] == [0, 0, 0]
    assert all(j.allocation is not None for j in cluster.jobs if j.state is JobState.RUNNING)


@given(shared_clusters())
def test_goodput_decides_the_same_where_no_job_may_share(cluster):
    config = Config(controller=ControllerSettings(queue="controller"), neighbours=ACT)
    for at, job in enumerate(cluster.jobs):
        if job.submission is not None:
            directive = dataclasses.replace(job.submission.directive, share="no")
            submission = dataclasses.replace(job.submission, directive=directive)
            cluster.jobs[at] = dataclasses.replace(job, submission=submission)
    plan, state = decide(cluster, config, MarginalValue, None)
    assert (plan, state) == decide(cluster, config, MarginalValue, SharedSpeeds())
