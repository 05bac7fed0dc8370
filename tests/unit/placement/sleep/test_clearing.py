"""Jobs leave a node that can sleep then."""

import dataclasses

import pytest

from slurm_elastic.config import schema
from slurm_elastic.core.cluster import Switch
from slurm_elastic.core.plan import Action
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import Cluster, node

ACT = '[sleep]\nmode = "act"\nclear_s = 14400\nboot_s = 600\n[resize]\nrestart_s = 30\n'


def site(*nodes):
    """Return a cluster on whose first two nodes two jobs hold two GPUs each; the third is idle."""
    cluster = Cluster(nodes or [node("g1"), node("g2"), node("g3")])
    cluster.add(1, elastic="2-2", on={"g1": 2})
    cluster.add(2, elastic="2-2", on={"g2": 2})
    return cluster


def plan(cluster, text=ACT, **more):
    config = schema.parse(text)
    decided, _ = decide_round(
        cluster.snapshot(), cluster.records, config=config, policy=FairShare(config), state={},
        **more,
    )  # fmt: skip
    return decided


def change(cluster, number, **fields):
    cluster.jobs[number - 1] = dataclasses.replace(cluster.jobs[number - 1], **fields)


def test_two_half_used_nodes_become_one():
    cluster = site()
    (decision,) = plan(cluster).changes
    assert (decision.action, decision.target.nodes) == (Action.MOVE, ("g2",))
    assert decision.reason.code == "clears-node"
    assert "moves off g1 so that the node can sleep, for up to 4 h" in words(decision.reason)
    cluster.carry_out(plan(cluster))
    assert not plan(cluster).changes


def test_one_node_a_round_and_the_emptiest_first():
    cluster = Cluster([node(f"g{i}", gpus=8) for i in range(1, 5)])
    for job_id, (name, gpus) in enumerate((("g1", 3), ("g2", 2), ("g3", 1), ("g4", 1)), 1):
        cluster.add(job_id, elastic=f"{gpus}-{gpus}", on={name: gpus})
    moved = []
    while changes := plan(cluster).changes:
        moved.append([d.job_id for d in changes])
        cluster.carry_out(plan(cluster))
    assert moved == [[3], [4], [2]]
    assert {j.allocation.nodes for j in cluster.jobs} == {("g1",)}


def test_all_jobs_of_a_node_move_or_none():
    cluster = Cluster([node("g1"), node("g2"), node("g3")])
    cluster.add(1, elastic="1-1", on={"g1": 1})
    cluster.add(2, elastic="2-2", on={"g1": 2})
    cluster.add(3, elastic="3-3", on={"g2": 3}, time_limit_s=3600)
    cluster.records[3] = dataclasses.replace(cluster.records[3], proven=False)
    assert not plan(cluster).changes
    cluster.jobs[2] = dataclasses.replace(
        cluster.jobs[2], gpus=1, allocation=dataclasses.replace(
            cluster.jobs[2].allocation, shares=(("g2", 1),)
        ),
    )  # fmt: skip
    decisions = plan(cluster).changes
    assert {(d.job_id, d.target.nodes) for d in decisions} == {(1, ("g2",)), (2, ("g2",))}


@pytest.mark.parametrize(
    "text",
    [
        ACT.replace("act", "observe"),
        ACT.replace("14400", "0"),
        ACT.replace("restart_s = 30", "restart_s = 700"),  # a twentieth of four hours less a boot
        ACT + '[controller]\npartitions = ["other"]\n',
    ],
)
def test_it_is_off_or_not_worth_it(text):
    assert not plan(site(), text).changes


def test_a_job_that_is_about_to_end_stays():
    cluster = site()
    for number in (1, 2):
        change(cluster, number, time_limit_s=5_000 + 1_100)
    assert not plan(cluster).changes
    change(cluster, 1, time_limit_s=5_000 + 1_300)
    (decision,) = plan(cluster).changes
    assert decision.job_id == 1


@pytest.mark.parametrize(
    ("waits", "moves"),
    [
        ({"gpus": 8}, False),
        ({"gpus": 8, "reason": "JobHeldUser"}, True),
        ({"gpus": 8, "begin_time": 1_750_100_000.0}, True),
        ({"gpus": 8, "dependency": True}, True),
    ],
)
def test_nothing_moves_while_a_job_waits_for_gpus(waits, moves):
    cluster = site()
    cluster.add(3, features="none", **waits)
    assert bool(plan(cluster).changes) is moves


def test_rigid_jobs_keep_their_nodes_awake():
    cluster = site(node("g1", gpus=8), node("g2", gpus=8))
    cluster.add(3, on={"g1": 1})
    (decision,) = plan(cluster).changes
    assert (decision.job_id, decision.target.nodes) == (2, ("g1",))
    cluster.add(4, on={"g2": 1})
    assert not plan(cluster).changes


def test_a_node_that_is_used_by_a_job_without_gpus_is_not_cleared():
    cluster = site()
    snapshot = cluster.snapshot()
    busy = tuple(dataclasses.replace(n, used_cpus=n.used_cpus + 2) for n in snapshot.nodes)
    config = schema.parse(ACT)
    decided, _ = decide_round(
        dataclasses.replace(snapshot, nodes=busy), cluster.records, config=config,
        policy=FairShare(config), state={},
    )  # fmt: skip
    assert not decided.changes


def test_no_job_moves_to_an_idle_node_another_type_or_farther_apart():
    assert not plan(site(node("g1"), node("g2", gpu_type="v100"), node("g3"))).changes
    cluster = Cluster([node(f"g{i}") for i in range(1, 4)])
    cluster.switches = (
        Switch("r1", 0, ("g1", "g2")),
        Switch("r2", 0, ("g3",)),
        Switch("spine", 1, ("g1", "g2", "g3"), children=("r1", "r2")),
    )
    cluster.add(1, elastic="6-6", on={"g1": 3, "g2": 3})
    cluster.add(2, on={"g3": 1})
    assert not plan(cluster).changes
