"""Who shares a GPU with whom, when, and when they part."""

import dataclasses

import pytest

from slurm_elastic.config.schema import (
    Config,
    ControllerSettings,
    NeighbourSettings,
    ResizeSettings,
)
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import Action
from slurm_elastic.core.reason import Reason
from slurm_elastic.models.colocation.gpu_memory import GpuMemory
from slurm_elastic.models.colocation.node_sharing import application_of, shared_gpu_type
from slurm_elastic.models.colocation.shared_speeds import MeasuredUse, PartOfNode, SharedSpeeds
from slurm_elastic.placement.neighbours.gpu_pair_table import GpuPairTable
from slurm_elastic.policies.baselines.fifo import Fifo
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.policies.goodput.marginal_value import MarginalValue
from slurm_elastic.round import decide_round
from tests.support.decisions.synthetic_clusters import Cluster, node

SETTINGS = NeighbourSettings(share_gpus="act")
CONFIG = Config(neighbours=SETTINGS, resize=ResizeSettings(min_interval_s=0.0))
SHAPE = {"min_nodes": 1}
HALF = Allocation.of("a100", {"g1": 1}, half=True)


def site(*, gpus=1, shards=2, first="1,share=yes", second="1,share=yes", **more):
    """Return a node whose GPU job 1 holds, and job 2 that waits for one."""
    cluster = Cluster([node("g1", gpus=gpus, shards=shards)])
    cluster.add(1, elastic=first, on={"g1": 1}, shape=SHAPE)
    cluster.add(2, elastic=second, gpus=1, shape=SHAPE, **more)
    return cluster


def pair(cluster, **more):
    """Let jobs 1 and 2 have the halves of one GPU of g1."""
    for at in (0, 1):
        cluster.jobs[at] = dataclasses.replace(
            cluster.jobs[at], allocation=HALF, parts=(("g1", 0),), state=cluster.jobs[0].state,
            reason="", start_time=cluster.time - 5000 + at, **more,
        )  # fmt: skip
    return cluster


def measured(cluster, speeds):
    """Return the measurements after job a ran at this speed beside job b: {(a, b): speed}."""
    known, snapshot = SharedSpeeds(), cluster.snapshot()
    for (job, other), speed in speeds.items():
        part, beside = (
            PartOfNode(application=application_of(snapshot.job[i]), gpus=1) for i in (job, other)
        )
        known.record_alone(part.application, "s", 1.0)
        for _ in range(9):
            known.record_shared(
                part, [beside], node_type=shared_gpu_type(snapshot.nodes[0]), setting="s",
                step_s=1 / speed,
            )  # fmt: skip
    return known


def plan(cluster, speeds=None, config=CONFIG, memory=None, policy=FairShare):
    snapshot = cluster.snapshot()
    table = GpuPairTable(snapshot, speeds or SharedSpeeds(), {}, config.neighbours, memory)
    return decide_round(
        snapshot, cluster.records, config=config, policy=policy(config), state={},
        gpu_pairs=table,
    )[0]  # fmt: skip


def changes(cluster, speeds=None, config=CONFIG, policy=FairShare):
    made = plan(cluster, speeds, config, policy=policy).changes
    return [(d.job_id, d.action, d.target, d.reason.code) for d in made]


def test_a_node_that_backfill_has_planned_for_a_waiting_job_counts_as_well():
    cluster = site()
    cluster.nodes = [dataclasses.replace(cluster.nodes[0], planned=True)]
    assert [c[3] for c in changes(cluster)] == ["halves-gpu"]


@pytest.mark.parametrize(("use", "expected"), [(0.95, []), (0.3, ["halves-gpu"])])
def test_jobs_that_fill_a_gpu_each_are_not_put_on_one(use, expected):
    cluster, speeds = site(), SharedSpeeds()
    for job in cluster.jobs:
        used = MeasuredUse(gpu=use, gpu_memory=use)
        speeds.record_use(application_of(job), used, alone=True)
    assert [c[3] for c in changes(cluster, speeds)] == expected


def test_the_running_job_gives_half_first_and_the_waiting_one_starts_there():
    cluster = site()
    first = plan(cluster)
    assert first.decision[2].waiting_for.code == "half-given-first"
    assert changes(cluster) == [(1, Action.MOVE, HALF, "halves-gpu")]
    cluster.carry_out(first)
    assert changes(cluster) == [(2, Action.START, HALF, "starts-on-half")]
    cluster.carry_out(plan(cluster))
    assert changes(cluster) == []
    assert plan(cluster).decision[1].waiting_for.code == "shares-gpu"


@pytest.mark.parametrize(
    "other",
    [
        {"first": "1"},
        {"second": "1"},
        {"second": "2,share=yes"},
        {"second": "1,share=yes,types=v100"},
        {"shards": 0},
        {"shards": 1},
        {"shards": 3},
        {"cpus_per_gpu": 7.0},
        {"memory_per_gpu_mb": 60_000.0},
        {"reason": "QOSMaxGRESPerUser"},
        {"excluded_nodes": ("g1",), "shape": {"min_nodes": 1, "exc_nodes": "g1"}},
        {"shape": {"min_nodes": 1, "mem_per_tres": "gres/gpu:100"}},
        {"shape": {}},
        {"cpus_follow_gpus": True},
        {"record": {"held": True}},
        {"record": {"half_barred": Reason("program-failed", exit_code=1)}},
        {"managed": False},
    ],
)
def test_jobs_that_may_not_share_a_gpu_do_not(other):
    options = {"shape": SHAPE, **other}
    cluster = Cluster([node("g1", gpus=1, shards=options.pop("shards", 2))])
    cluster.add(1, elastic=options.pop("first", "1,share=yes"), on={"g1": 1}, shape=SHAPE)
    second = options.pop("second", "1,share=yes")
    cluster.add(2, elastic=second, gpus=int(second[0]), **options)
    assert changes(cluster) == []


def test_an_unproven_job_keeps_its_gpu_but_one_with_half_of_it_is_joined():
    cluster = site()
    cluster.records[1] = dataclasses.replace(cluster.records[1], proven=False)
    assert changes(cluster) == []
    cluster.jobs[0] = dataclasses.replace(cluster.jobs[0], allocation=HALF, parts=(("g1", 0),))
    assert changes(cluster) == [(2, Action.START, HALF, "starts-on-half")]


def test_a_pair_below_the_gate_is_not_made_again():
    cluster = site()
    assert changes(cluster, measured(cluster, {(1, 2): 0.8, (2, 1): 1.0})) == []
    good = measured(cluster, {(1, 2): 0.95, (2, 1): 0.95})
    assert changes(cluster, good) == [(1, Action.MOVE, HALF, "halves-gpu")]
    strict = dataclasses.replace(CONFIG, neighbours=NeighbourSettings(share_gpus="act", gate=0.92))
    assert changes(cluster, config=strict) == []  # unknown pairs are expected to reach 0.91


def test_a_pair_whose_memory_does_not_suffice_is_not_made():
    cluster, memory = site(), GpuMemory()
    for job, peak in zip(cluster.snapshot().jobs, (20, 30), strict=True):
        memory.record(application_of(job), "a100", peak=peak, capacity=50)
    assert plan(cluster, memory=memory).changes == ()
    memory.record(application_of(cluster.snapshot().jobs[0]), "a100", peak=20, capacity=80)
    memory.record(application_of(cluster.snapshot().jobs[1]), "a100", peak=30, capacity=80)
    assert plan(cluster, memory=memory).changes


def test_the_better_partner_is_chosen():
    cluster = Cluster([node("g1", shards=2, gpus=1), node("g2", shards=2, gpus=1)])
    for job_id, name in ((1, "g1"), (2, "g2")):
        cluster.add(job_id, elastic="1,share=yes", on={name: 1}, shape=SHAPE)
    cluster.add(3, elastic="1,share=yes", gpus=1, shape=SHAPE)
    known = measured(cluster, {(1, 3): 0.92, (3, 1): 0.92, (2, 3): 0.99, (3, 2): 0.99})
    assert [c[0] for c in changes(cluster, known)] == [2]


def test_where_slurm_could_choose_another_gpu_of_the_node_nothing_is_shared():
    cluster = site(gpus=2)
    cluster.add(3, on={"g1": 1})
    assert [c[3] for c in changes(cluster)] == ["halves-gpu"]
    cluster.jobs[2] = dataclasses.replace(  # a job that asks for a shard
        cluster.jobs[2], allocation=None, parts=(("g1", 1),)
    )
    assert changes(cluster) == []


def test_a_pair_parts_when_a_gpu_is_free_and_the_job_may_grow_then():
    cluster = pair(site(gpus=2, first="1-4,share=yes"))
    whole = Allocation.of("a100", {"g1": 1})
    assert changes(cluster) == [(1, Action.MOVE, whole, "leaves-shared-gpu")]
    cluster.carry_out(plan(cluster))
    assert changes(cluster) == []
    # Both have GPUs of their own: the half counts as a whole one, but stays what it is.
    kept = plan(cluster).decision[2]
    assert (kept.current, kept.target, kept.action) == (HALF, HALF, Action.KEEP)


def test_a_free_gpu_goes_to_a_job_that_waits_before_a_pair_parts():
    cluster = pair(site(gpus=2))
    cluster.add(3, gpus=1)
    assert changes(cluster) == []
    assert [c.job_id for c in plan(cluster).claims] == [3]


@pytest.mark.parametrize("policy", [FairShare, Fifo])
def test_where_the_controller_starts_jobs_a_free_gpu_goes_to_one_that_may_not_share(policy):
    cluster = pair(site(gpus=2))
    config = dataclasses.replace(CONFIG, controller=ControllerSettings(queue="controller"))
    assert [c[3] for c in changes(cluster, config=config, policy=policy)] == ["leaves-shared-gpu"]
    cluster.add(3, elastic="1", gpus=1)
    assert [(c[0], c[1]) for c in changes(cluster, config=config, policy=policy)] == [
        (3, Action.START)
    ]
    # One that may share gets the half that falls free.
    cluster.jobs.pop()
    cluster.add(3, elastic="1,share=yes", gpus=1, shape=SHAPE)
    assert changes(cluster, config=config, policy=policy)[0][3] == "leaves-shared-gpu"


def test_a_pair_at_full_speed_that_cannot_grow_stays():
    cluster = pair(site(gpus=2))
    assert changes(cluster, measured(cluster, {(1, 2): 1.0, (2, 1): 1.0})) == []


def test_consent_can_be_withdrawn():
    cluster = pair(site(gpus=2))
    full = measured(cluster, {(1, 2): 1.0, (2, 1): 1.0})
    for change in ({"override": Directive.parse("1")}, {"submission": None}):
        cluster.jobs[1] = dataclasses.replace(cluster.jobs[1], **change)
        assert [(c[0], c[3]) for c in changes(cluster, full)] == [(1, "leaves-shared-gpu")]


def test_a_job_that_failed_on_half_of_a_gpu_gets_the_next_free_one():
    cluster = pair(site(gpus=2))
    full = measured(cluster, {(1, 2): 1.0, (2, 1): 1.0})
    barred = Reason("program-failed", exit_code=1)
    cluster.records[2] = dataclasses.replace(cluster.records[2], half_barred=barred)
    assert [(c[0], c[3]) for c in changes(cluster, full)] == [(2, "leaves-shared-gpu")]


def test_the_newcomer_waits_again_if_it_slows_the_job_that_was_there():
    cluster = pair(site())
    slowed = measured(cluster, {(1, 2): 0.6, (2, 1): 1.0})
    assert changes(cluster, slowed) == [(2, Action.PREEMPT, None, "slows-partner")]
    # A newcomer that is slowed itself loses by waiting.
    assert changes(cluster, measured(cluster, {(1, 2): 1.0, (2, 1): 0.6})) == []


def test_pairs_that_are_left_when_sharing_is_switched_off_part_as_well():
    cluster = pair(site(gpus=2))
    assert [c[3] for c in changes(cluster, config=Config())] == ["leaves-shared-gpu"]


def waiting_for_two(share="yes"):
    """Return two free GPUs of one node, and jobs 1, 2 and 3 that wait; 3 does not share."""
    cluster = Cluster([node("g1", gpus=2, shards=4)])
    for job_id in (1, 2):
        cluster.add(job_id, elastic=f"1,share={share}", gpus=1, shape=SHAPE)
    cluster.add(3, elastic="1", gpus=1, shape=SHAPE)
    cluster.jobs = [dataclasses.replace(j, submit_time=cluster.time - 60) for j in cluster.jobs]
    return cluster


def goodput_changes(cluster, speeds=None):
    config = dataclasses.replace(CONFIG, controller=ControllerSettings(queue="controller"))
    return changes(cluster, speeds, config, MarginalValue)


def test_under_goodput_two_waiting_jobs_share_so_that_a_third_one_starts():
    whole = Allocation.of("a100", {"g1": 1})
    cluster = waiting_for_two()
    started = goodput_changes(cluster)
    assert [(job, target) for job, _, target, _ in started] == [(1, whole), (3, whole)]
    hurting = measured(cluster, {(1, 2): 0.8, (2, 1): 0.95})
    assert [c[0] for c in goodput_changes(cluster, hurting)] == [1, 2]
    assert [c[0] for c in goodput_changes(waiting_for_two("no"))] == [1, 2]


def test_a_job_that_another_one_is_to_join_starts_on_half_of_the_last_free_gpu():
    cluster = waiting_for_two()
    cluster.add(4, elastic="1", on={"g1": 1}, shape=SHAPE)
    cluster.jobs = [j for j in cluster.jobs if j.job_id != 3]
    assert [c[:3] for c in goodput_changes(cluster)] == [(1, Action.START, HALF)]
    made = plan(
        cluster,
        config=dataclasses.replace(CONFIG, controller=ControllerSettings(queue="controller")),
        policy=MarginalValue,
    )
    cluster.carry_out(made)
    assert goodput_changes(cluster) == [(2, Action.START, HALF, "starts-on-half")]
