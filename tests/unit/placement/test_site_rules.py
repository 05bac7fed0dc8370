"""Limits on single nodes, sites whose jobs take all memory, nodes with several GPU types."""

import dataclasses
from importlib.metadata import entry_points

import pytest

from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.core.cluster import GPUS_OF_A_NODE, Allocation, Limit, Partition, Reservation
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.best_fit import fit, takes
from slurm_elastic.placement.eligibility import Eligibility, elastic_jobs
from slurm_elastic.placement.free_resources import FreeResources
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.policies.policy_protocol import load
from slurm_elastic.round import decide_round
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node, racks

_POLICIES = "slurm_elastic.policies"


def cluster(count=4, **limits):
    nodes = [node(f"g{i}") for i in range(1, count + 1)]
    return Cluster(nodes, partitions=(Partition(name="gpu", **limits),))


def demand_of(where, job_id):
    frame = NodeArrays(where.snapshot())
    round_job = elastic_jobs(frame, where.records, Config())[job_id]
    resources = FreeResources(frame)
    resources.give(round_job.need, round_job.current)
    return round_job.demand(frame), resources


def place(where, job_id, gpus):
    demand, resources = demand_of(where, job_id)
    found = fit(demand, "a100", gpus, resources)
    return dict(found.shares) if found else None


def test_a_partition_may_cap_the_cpus_of_a_node():
    c = cluster(max_cpus_per_node=4)
    c.add(1, elastic="1-8")  # two CPUs for each GPU
    assert place(c, 1, 2) == {"g1": 2}
    assert place(c, 1, 4) == {"g1": 2, "g2": 2}
    c.add(2, on={"g1": 1})  # of the same partition: its CPUs count
    assert place(c, 1, 2) == {"g2": 2}
    c.add(3, on={"g2": 1}, partition="other")
    assert place(c, 1, 4) == {"g2": 2, "g3": 2}
    demand, resources = demand_of(c, 1)
    assert not takes(demand, Allocation.of("a100", {"g3": 3}), resources)


def test_a_partition_may_cap_the_memory_of_a_job_on_a_node():
    c = cluster(max_memory_per_node_mb=20_000)
    c.add(1, elastic="1-8")  # 8 GB for each GPU
    assert place(c, 1, 4) == {"g1": 2, "g2": 2}


def test_a_job_keeps_what_it_holds_beyond_a_limit_that_is_new():
    c = cluster(max_cpus_per_node=4)
    c.add(1, elastic="1-8", on={"g1": 4})
    assert place(c, 1, 4) == {"g1": 4}


def test_a_partition_may_ask_for_several_nodes():
    c = cluster(min_nodes=2)
    c.add(1, elastic="2-8", on={"g1": 1, "g2": 1})
    assert place(c, 1, 4) == {"g1": 2, "g2": 2}
    demand, resources = demand_of(c, 1)
    assert not takes(demand, Allocation.of("a100", {"g1": 2}), resources)


def test_a_qos_may_cap_the_gpus_of_a_node():
    c = cluster()
    c.limits = (Limit(name="q", resource=GPUS_OF_A_NODE, cap=2, jobs=frozenset({1})),)
    c.add(1, elastic="1-8", on={"g1": 1})
    c.add(2, elastic="1-8")
    assert place(c, 1, 4) == {"g1": 2, "g2": 2}
    assert place(c, 2, 4) == {"g2": 4}


def test_nodes_of_one_user_only_are_entered_when_they_are_idle_or_this_users():
    c = cluster(5, exclusive_user=True)
    owners = {"g1": "alice", "g2": "bob", "g5": "alice"}
    c.nodes = [node(f"g{i}", owner=owners.get(f"g{i}", "")) for i in range(1, 6)]
    c.add(2, elastic="1-20", on={"g1": 1})  # alice's
    c.add(3, on={"g2": 1})
    c.add(5, on={"g4": 1}, partition="other")
    assert place(c, 2, 4) == {"g1": 4}
    assert place(c, 2, 12) == {"g1": 4, "g3": 4, "g5": 4}
    assert place(c, 2, 16) is None


def test_a_node_that_another_user_keeps_is_not_entered_from_other_partitions():
    partitions = (Partition(name="gpu"), Partition(name="alone", exclusive_user=True))
    nodes = [node("g1"), node("g2", owner="bob"), node("g3", owner="alice"), node("g4")]
    c = Cluster(nodes, partitions=partitions)
    c.add(2, elastic="1-16")  # alice's
    assert place(c, 2, 12) == {"g1": 4, "g3": 4, "g4": 4}


def test_a_job_that_takes_all_memory_grows_where_it_is_and_goes_where_no_memory_is_used():
    c = cluster(3)
    c.add(1, elastic="1-8", on={"g1": 1}, takes_all_memory=True, memory_per_gpu_mb=0.0)
    c.add(2, on={"g2": 1})
    assert place(c, 1, 4) == {"g1": 4}
    assert place(c, 1, 8) == {"g1": 4, "g3": 4}


def test_a_job_in_a_partition_that_is_down_is_left_alone():
    """A job that is requeued there waits until the partition is up again."""
    c = cluster(up=False)
    c.add(1, elastic="1-8", on={"g1": 4})
    (round_job,) = elastic_jobs(NodeArrays(c.snapshot()), c.records, Config()).values()
    assert round_job.eligibility is Eligibility.FIXED
    assert round_job.reason == Reason("partition-down", partition="gpu")


def mixed_site(*more):
    """Return a cluster of the node g1 with GPUs of several types and a feature, and others."""
    features = frozenset({"ib"})
    mixed = node("g1", 0, "", unmanaged_gpus=4, cpus=32, memory_mb=256_000, features=features)
    return Cluster([mixed, *more], partitions=(Partition(name="gpu"),))


@pytest.mark.parametrize("queue", ["slurm", "controller"])
@pytest.mark.parametrize("policy", sorted(e.name for e in entry_points(group=_POLICIES)))
def test_no_policy_touches_a_job_on_a_node_with_several_types(policy, queue):
    """Some took all GPUs from it: they count none there."""
    config = dataclasses.replace(
        Config(), controller=ControllerSettings(policy=policy, queue=queue)
    )
    for others in ((), (node("g2"),)):
        c = mixed_site(*others)
        held = Allocation.of("a100", {"g1": 2})
        c.add(1, elastic="1-8", on={"g1": 2})
        c.jobs[0] = dataclasses.replace(c.jobs[0], allocation=held, gpu_type="a100")
        c.add(2, elastic="1-8")
        c.add(3, gpus=1)
        state = {}
        for _ in range(2):
            plan, state = decide_round(
                c.snapshot(), c.records, config=config, policy=load(config), state=state
            )
            assert plan.decision[1].target == held
    round_job = elastic_jobs(NodeArrays(c.snapshot()), c.records, config)[1]
    assert round_job.reason == Reason("gpus-not-managed", node="g1")


@pytest.mark.parametrize(
    ("others", "job", "eligibility"),
    [
        ((), {}, Eligibility.SLURMS),
        ((node("g2"),), {}, Eligibility.OURS),
        ((node("g2"),), {"elastic": "1-8,types=v100"}, Eligibility.SLURMS),
        ((node("g2"),), {"required_nodes": ("g1",)}, Eligibility.SLURMS),
        ((node("g2"),), {"excluded_nodes": ("g2",)}, Eligibility.SLURMS),
        ((node("g2", partitions=frozenset({"b"})),), {}, Eligibility.SLURMS),
        ((node("g2"),), {"elastic": "8-16"}, Eligibility.SLURMS),
        ((node("g2"),), {"features": "ib"}, Eligibility.SLURMS),
        ((node("g2"),), {"features": "[ib*2&fast]"}, Eligibility.SLURMS),
        ((node("g2"),), {"reservation": "of-its-user"}, Eligibility.SLURMS),
        ((node("g2"),), {"features": "no-node-has-it"}, Eligibility.OURS),
    ],
)
def test_slurm_starts_a_job_that_fits_only_where_the_controller_counts_no_gpus(
    others, job, eligibility
):
    c = mixed_site(*others)
    c.add(1, **({"elastic": "1-8"} | job))
    config = dataclasses.replace(Config(), controller=ControllerSettings(queue="controller"))
    (round_job,) = elastic_jobs(NodeArrays(c.snapshot()), c.records, config).values()
    assert round_job.eligibility is eligibility


def test_a_changed_job_leaves_a_node_that_was_reserved_while_it_ran():
    c = cluster(2)
    c.add(1, elastic="1-4", on={"g1": 4}, time_limit_s=86400)
    assert place(c, 1, 2) == {"g1": 2}
    snapshot = c.snapshot()
    repair = Reservation(name="repair", nodes=("g1",), start_time=NOW + 3600, end_time=NOW + 7200)
    c.snapshot = lambda: dataclasses.replace(snapshot, reservations=(repair,))
    assert place(c, 1, 2) == {"g2": 2}
    demand, resources = demand_of(c, 1)
    assert takes(demand, Allocation.of("a100", {"g1": 4}), resources)  # unchanged it stays
    assert not takes(demand, Allocation.of("a100", {"g1": 2}), resources)


def test_jobs_of_a_higher_tier_come_first_whatever_their_priority():
    partitions = tuple(Partition(name=n, tier=t) for n, t in (("gpu", 1), ("low", 1), ("high", 5)))
    both = frozenset({"gpu", "low", "high"})
    c = Cluster([node("g1", partitions=both)], partitions=partitions)
    c.add(1, elastic="1-4", on={"g1": 4})
    c.add(2, gpus=3, partition="low", priority=900)
    c.add(3, gpus=3, partition="low,high", priority=10)
    config = Config()
    plan, _ = decide_round(
        c.snapshot(), c.records, config=config, policy=FairShare(config), state={}
    )
    assert [claim.job_id for claim in plan.claims] == [3]


def plan_of(where):
    config = Config()
    plan, _ = decide_round(
        where.snapshot(), where.records, config=config, policy=FairShare(config), state={}
    )
    return plan


def claims(where):
    return {claim.job_id: dict(claim.shares) for claim in plan_of(where).claims}


def targets(where):
    return {d.job_id: dict(d.target.shares) for d in plan_of(where).decisions if d.target}


def test_gpus_are_kept_on_as_many_nodes_as_the_partition_asks_for():
    c = cluster(3, min_nodes=2)
    c.add(1, gpus=2)
    assert claims(c) == {1: {"g1": 1, "g2": 1}}


def test_of_several_partitions_each_has_its_own_limits():
    both = [Partition(name="one", max_nodes=1), Partition(name="many", max_cpus_per_node=4)]
    nodes = [node("g1", partitions=frozenset({"one"}))]
    nodes += [node(f"g{i}", partitions=frozenset({"many"})) for i in (2, 3, 4)]
    c = Cluster(nodes, partitions=tuple(both))
    c.add(1, on={"g1": 1}, partition="one")
    c.add(2, gpus=6, min_nodes=3, partition="one,many")  # two CPUs for each GPU
    assert claims(c) == {2: {"g2": 2, "g3": 2, "g4": 2}}
    c.add(3, gpus=3, partition="one,many")
    assert claims(c)[3] == {"g1": 3}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("by_partition", [False, True])
def test_a_job_that_gets_whole_nodes_has_sizes_of_whole_idle_nodes(by_partition, in_place):
    c = cluster(4, whole_nodes=by_partition)
    more = {"whole_nodes": not by_partition, "record": {"in_place": in_place}}
    c.add(1, elastic="1-16", on={"g1": 4}, cpus_per_gpu=8.0, **more)
    c.add(2, on={"g2": 1})
    assert place(c, 1, 4) == {"g1": 4}
    assert place(c, 1, 6) is None
    assert place(c, 1, 8) == {"g1": 4, "g3": 4}
    demand, resources = demand_of(c, 1)
    assert takes(demand, Allocation.of("a100", {"g1": 4, "g4": 4}), resources)
    for shares in ({"g1": 4, "g2": 3}, {"g1": 2}, {"g1": 4, "g3": 2}):
        assert not takes(demand, Allocation.of("a100", shares), resources)
    assert targets(c)[1] == {"g1": 4, "g3": 4, "g4": 4}


def test_a_job_that_got_more_than_max_with_whole_nodes_stays_as_it_is():
    c = cluster(2)
    c.add(1, elastic="1-3", on={"g1": 4}, whole_nodes=True)
    assert targets(c)[1] == {"g1": 4}


def test_for_a_job_that_needs_whole_nodes_others_leave_one_or_stay():
    """One GPU less on a node does not let it start."""
    c = cluster(2)
    c.add(1, elastic="1-4", on={"g1": 4})
    c.add(2, elastic="4-4", on={"g2": 4})
    c.add(3, gpus=1, whole_nodes=True)
    assert (claims(c), targets(c)[1]) == ({}, {"g1": 4})
    c = cluster(2)
    c.add(1, elastic="1-4", on={"g1": 4})
    c.add(2, elastic="1-4", on={"g2": 2})
    c.add(3, gpus=1, whole_nodes=True)
    assert claims(c) == {3: {"g1": 4}}
    assert targets(c) == {1: {"g2": 2}, 2: {"g2": 2}}


@pytest.mark.parametrize("in_place", [False, True])
def test_a_job_with_switches_is_not_spread_over_more_racks(in_place):
    names = ("g1", "g2", "g3", "g4")
    c = Cluster([node(n) for n in names], switches=racks(names, 2))
    c.add(1, elastic="1-16", on={"g1": 4}, shape={"req_switch": 1}, record={"in_place": in_place})
    assert place(c, 1, 8) == {"g1": 4, "g2": 4}
    assert place(c, 1, 12) is None
    demand, resources = demand_of(c, 1)
    assert not takes(demand, Allocation.of("a100", {"g1": 4, "g3": 4}), resources)
    assert targets(c)[1] == {"g1": 4, "g2": 4}
