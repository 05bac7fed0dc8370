"""Whole rounds: who changes, who is left alone, what is owed to pending jobs."""

import dataclasses
import doctest
import importlib
import json
from collections.abc import Mapping

import pytest

from benchmarks.controller.round import measure
from slurm_elastic.config.schema import (
    Config,
    ControllerSettings,
    ResizeSettings,
    SleepSettings,
    SpeedupSettings,
)
from slurm_elastic.core.cluster import Allocation, JobState, Partition
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import Action, Measurement
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node, racks

CONTROLLER = Config(controller=ControllerSettings(queue="controller"))


def nodes(count, gpus=4, **more):
    return [node(f"g{i}", gpus, **more) for i in range(1, count + 1)]


def decide(cluster, config=None, previous=None, state=None):
    config = config or Config()
    plan, state = decide_round(
        cluster.snapshot(),
        cluster.records,
        config=config,
        policy=FairShare(config),
        state=state or {},
        previous=previous,
    )
    json.dumps(state)
    return plan, state


def changes(cluster, config=None):
    plan, _ = decide(cluster, config)
    return {d.job_id: (d.action, dict(d.target.shares) if d.target else {}) for d in plan.changes}


# --- growth, moves, shares ------------------------------------------------------------------


def test_idle_gpus_are_used():
    c = Cluster(nodes(2))
    c.add(1, elastic="1-8", on={"g1": 1})
    plan, _ = decide(c)
    (decision,) = plan.changes
    assert decision.action is Action.GROW
    assert decision.target.gpus == 8
    assert decision.gain > 4
    assert decision.cost_s == 15.0
    assert words(decision.why_not_more) == "8 is its MAX"


def test_a_job_alone_that_has_its_max_keeps_it():
    c = Cluster(nodes(2))
    c.add(1, elastic="1-4", on={"g1": 4})
    plan, _ = decide(c)
    assert not plan.changes
    assert "adds 24% of its speed" in words(plan.decision[1].why_not_fewer)


def test_speeds_are_in_samples_once_measured():
    c = Cluster(nodes(1))
    seen = Measurement(gpu_type="a100", gpus=4, nodes=1, samples_per_s=400.0, steps=9)
    c.add(1, elastic="2-4", on={"g1": 4}, record={"measurements": (seen,)})
    plan, _ = decide(c)
    assert "samples/s" in words(plan.decision[1].why_not_fewer)


@pytest.mark.parametrize(
    ("record", "more", "why"),
    [
        ({"held": True}, {}, "selastic hold"),
        ({"proven": False}, {}, "not proven"),
        ({"reporting": False}, {}, "first report"),
        (
            {"reporting": False, "proven": False},
            {},
            "waits for the first report of esrun in this run",
        ),
        ({"last_change": NOW - 10}, {}, "minimum interval until"),
        ({"changes": tuple(NOW - 60.0 * i for i in range(6, 0, -1))}, {}, "used up until"),
        ({"in_transition": True, "target": None}, {}, "under way"),
        ({"jump": "1 → 4 ranks: epoch 3.0, 9.0"}, {}, "keep the global batch"),
        ({}, {"state": JobState.COMPLETING}, "ending"),
        ({}, {"state": JobState.SUSPENDED}, "suspended"),
        ({}, {"requeueable": False}, "--no-requeue"),
        ({}, {"managed": False, "unmanaged_reason": Reason("interactive")}, "interactive"),
        ({}, {"partition": "debug"}, "debug is not managed"),
    ],
)
def test_jobs_that_may_not_change_and_why(record, more, why):
    c = Cluster(nodes(2))
    c.add(1, elastic="1-8", on={"g1": 1}, record=record, **more)
    plan, _ = decide(c, Config(controller=ControllerSettings(partitions=("gpu",))))
    assert not plan.changes
    assert why in words(plan.decision[1].waiting_for)


def test_a_job_without_a_record_is_not_proven():
    c = Cluster(nodes(2))
    c.add(1, elastic="1-8", on={"g1": 1})
    c.records.clear()
    assert not changes(c)


def test_budget_counts_the_last_hour_only():
    c = Cluster(nodes(2))
    old = tuple(NOW - 4000.0 - i for i in range(6, 0, -1))
    c.add(1, elastic="1-8", on={"g1": 1}, record={"changes": old})
    assert changes(c)


@pytest.mark.parametrize(
    "record",
    [
        {"restart_s": 2000.0},
        {"checkpoint_s": 2000.0},
        {"progress": 0.999},
    ],
)
def test_growth_that_does_not_pay_back_is_refused_in_words(record):
    c = Cluster(nodes(2))
    c.add(1, elastic="4-8", on={"g1": 4}, record=record)
    plan, _ = decide(c)
    assert not plan.changes
    assert "growing to 8 would gain 80%" in words(plan.decision[1].why_not_more)


def test_growth_just_before_the_time_limit_is_refused():
    c = Cluster(nodes(2))
    c.add(1, elastic="4-8", on={"g1": 4}, time_limit_s=5_010)
    assert not changes(c)


def test_growth_below_the_least_gain_is_refused():
    c = Cluster(nodes(2))
    flat = SpeedupSettings(loss_in_node=0.0, loss_across_nodes=0.49)
    c.add(1, elastic="4-8", on={"g1": 4})
    plan, _ = decide(c, Config(speedup=flat))
    assert not plan.changes


def test_a_scattered_job_comes_together_when_that_pays():
    c = Cluster(nodes(3))
    c.add(1, elastic="2-4", on={"g1": 2, "g2": 2})
    c.add(2, on={"g3": 1})
    c.records[1] = dataclasses.replace(c.records[1], restart_s=5.0)
    c.add(3, on={"g1": 1})
    c.add(4, on={"g2": 1})
    plan, _ = decide(c)
    assert not plan.changes  # no node has room for four
    c.jobs = [j for j in c.jobs if j.job_id != 3]
    (decision,) = decide(c)[0].changes
    assert decision.action is Action.MOVE
    assert dict(decision.target.shares) == {"g1": 4}
    assert words(decision.reason) == (
        "moves to one node: 1.1 times as fast, pays back its 5 s in 80 s"
    )


def test_two_racks_become_one():
    c = Cluster(nodes(4), switches=racks([f"g{i}" for i in range(1, 5)], 2))
    c.add(1, elastic="8-8", on={"g2": 4, "g3": 4})
    plan, _ = decide(c)
    (decision,) = plan.changes
    assert dict(decision.target.shares) == {"g1": 4, "g2": 4}
    assert words(decision.why_here) == "its 2 nodes share one rack"


def test_the_place_is_explained():
    c = Cluster(nodes(2), switches=racks(["g1", "g2"], 1))
    c.add(1, elastic="8-8", on={"g1": 4, "g2": 4})
    plan, _ = decide(c)
    assert "across 2 racks it runs at 0.90 of its speed in one" in words(plan.decision[1].why_here)


def test_a_job_with_many_gpus_gives_to_one_with_few_and_that_is_promised():
    c = Cluster(nodes(3))
    c.add(1, elastic="1-12", on={"g1": 4, "g2": 4, "g3": 2})
    c.add(2, elastic="1-12", on={"g3": 1})
    plan, state = decide(c)
    (decision,) = plan.changes
    assert (decision.job_id, decision.action, decision.target.gpus) == (1, Action.SHRINK, 8)
    assert words(plan.decision[2].waiting_for) == "4 a100 on g3, which others give up first"
    c.carry_out(plan)
    c.records[1] = dataclasses.replace(c.records[1], last_change=NOW)
    plan, state = decide(c, previous=plan, state=state)
    (decision,) = plan.changes
    assert dict(decision.target.shares) == {"g3": 4}
    assert words(decision.reason) == "takes the GPUs that were given up for it"
    c.carry_out(plan)
    plan, state = decide(c, previous=plan, state=state)
    assert not plan.changes
    assert not state["promised"]


def test_nothing_more_is_taken_while_a_promise_waits_for_its_gpus():
    c = Cluster(nodes(3))
    c.add(1, elastic="1-12", on={"g1": 4, "g2": 4, "g3": 2})
    c.add(2, elastic="1-12", on={"g3": 1})
    plan, state = decide(c)
    c.records[1] = dataclasses.replace(
        c.records[1], in_transition=True, target=plan.decision[1].target
    )
    again, state = decide(c, previous=plan, state=state)
    assert not again.changes
    assert "which others give up first" in words(again.decision[2].waiting_for)


def test_a_narrowed_directive_is_obeyed_whatever_it_costs():
    c = Cluster(nodes(2))
    c.add(1, elastic="1-8", on={"g1": 4, "g2": 4}, record={"restart_s": 1e6})
    narrow = dataclasses.replace(c.jobs[0].directive, max_gpus=4)
    c.jobs[0] = dataclasses.replace(c.jobs[0], override=narrow)
    assert changes(c) == {1: (Action.SHRINK, {"g1": 4})}


def test_it_is_obeyed_where_the_faster_type_that_helps_more_is_ruled_out():
    c = Cluster([node("g1", 8, "v100", features=frozenset({"old"})), node("g2", 8, "a100")])
    c.add(1, elastic="1-8", on={"g1": 8}, features="old")
    narrow = dataclasses.replace(c.jobs[0].directive, max_gpus=4)
    c.jobs[0] = dataclasses.replace(c.jobs[0], override=narrow)
    speeds = Config(speedup=SpeedupSettings(types={"a100": 3.0, "v100": 1.0}))
    assert changes(c, speeds) == {1: (Action.SHRINK, {"g1": 4})}


def test_gpus_of_a_change_under_way_are_not_offered():
    c = Cluster(nodes(2))
    c.add(1, elastic="1-8", on={"g1": 1})
    target = Allocation.of("a100", {"g2": 4})
    moving = {"in_transition": True, "target": target}
    c.add(2, elastic="1-4", on={"g1": 1}, record=moving)
    plan, _ = decide(c)
    assert not plan.changes
    assert words(plan.decision[1].waiting_for) == "4 a100 on g1, which others give up first"


def test_a_pending_job_in_transition_keeps_its_target():
    c = Cluster(nodes(1))
    c.add(1, elastic="1-4", on={"g1": 1})
    target = Allocation.of("a100", {"g1": 2})
    c.add(2, elastic="1-4", gpus=2, record={"in_transition": True, "target": target})
    assert changes(c) == {1: (Action.GROW, {"g1": 2})}


# --- room for waiting jobs ---------------------------------------------------------------------


def test_a_rigid_job_gets_what_it_needs_and_no_more():
    c = Cluster(nodes(3))
    c.add(1, elastic="2-8", on={"g1": 4, "g2": 4})
    c.add(2, on={"g3": 2})
    c.add(3, gpus=4)
    plan, _ = decide(c)
    (decision,) = plan.changes
    assert (decision.action, decision.target.gpus) == (Action.SHRINK, 4)
    assert words(decision.reason).startswith("gives 4 GPUs so that bob's 3 (rigid, waiting")
    (claim,) = plan.claims
    assert claim.job_id == 3
    assert claim.until == NOW + 120
    assert len(claim.shares) == 1
    (note,) = plan.notes
    assert words(note) == f"bob's 3 gets 4 GPUs on {claim.shares[0][0]}: bob's 1 gives way"


def test_the_minimum_interval_does_not_protect_from_a_neighbour_but_a_transition_does():
    c = Cluster(nodes(1))
    c.add(1, elastic="1-4", on={"g1": 4}, record={"last_change": NOW - 1})
    c.add(2, gpus=2)
    assert changes(c) == {1: (Action.SHRINK, {"g1": 2})}
    c.records[1] = dataclasses.replace(
        c.records[1], in_transition=True, target=c.jobs[0].allocation
    )
    assert not changes(c)


def test_several_jobs_on_a_node_give_a_part_each():
    c = Cluster([node("g1", 8)])
    for job_id, held in ((1, 2), (2, 2), (3, 4)):
        c.add(job_id, elastic="1-4", on={"g1": held})
    c.add(4, gpus=4)
    given = changes(c)
    assert {job_id: sum(shares.values()) for job_id, (_, shares) in given.items()} == {1: 1, 3: 1}
    c.jobs[-1] = dataclasses.replace(c.jobs[-1], gpus=3)
    assert set(changes(c)) == {3}, "one that can give all of it does"
    c.jobs[-1] = dataclasses.replace(c.jobs[-1], gpus=6)
    assert not decide(c)[0].claims, "not below MIN"


@pytest.mark.parametrize("record", [{"last_change": NOW - 1}, {"on_trial": NOW - 1}])
def test_a_job_gives_up_at_once_what_its_owner_has_ruled_out(record):
    c = Cluster(nodes(1))
    c.add(1, elastic="1-4", on={"g1": 3}, record=record)
    assert not changes(c)
    c.jobs[0] = dataclasses.replace(c.jobs[0], override=Directive.parse("1-1"))
    assert changes(c) == {1: (Action.SHRINK, {"g1": 1})}
    c.jobs[0] = dataclasses.replace(c.jobs[0], override=Directive.parse("1-3"))
    assert not changes(c)


@pytest.mark.parametrize(
    ("features", "shrinks"),
    [("[rack1|rack2]", {2, 4}), ("(rack1|rack2)&ib", {4}), ("rack1*2", set())],
)
def test_jobs_give_way_where_the_constraint_of_a_waiting_job_lets_it_start(features, shrinks):
    """In rack 1 only one of two nodes can be made free, in rack 2 both."""
    c = Cluster(
        [
            node("g1", features=frozenset({"rack1"})),
            node("g2", features=frozenset({"rack1"})),
            node("g3", features=frozenset({"rack2"})),
            node("g4", features=frozenset({"rack2", "ib"})),
        ]
    )
    c.add(1, elastic="1-4", on={"g1": 4})
    c.add(3, on={"g2": 4})
    c.add(2, elastic="1-4", on={"g3": 4})
    c.add(4, elastic="1-4", on={"g4": 4})
    alone = features == "(rack1|rack2)&ib"
    c.add(5, gpus=2 if alone else 4, min_nodes=1 if alone else 2, features=features)
    assert set(changes(c)) == shrinks


def test_no_job_shrinks_below_min_nor_in_vain():
    c = Cluster(nodes(2))
    c.add(1, elastic="3-4", on={"g1": 4})
    c.add(2, on={"g2": 4})
    c.add(3, gpus=2)
    plan, _ = decide(c)
    assert not plan.changes
    assert not plan.claims
    c.jobs[-1] = dataclasses.replace(c.jobs[-1], gpus=1)
    assert changes(c) == {1: (Action.SHRINK, {"g1": 3})}


def test_no_job_shrinks_for_one_that_fits_nor_grows_into_its_gpus():
    c = Cluster(nodes(2))
    c.add(1, elastic="1-8", on={"g1": 4})
    c.add(2, gpus=4)
    plan, _ = decide(c)
    assert not plan.changes
    assert plan.claims[0].shares == (("g2", 4),)
    assert "bob's 2" not in words(plan.decision[1].why_not_more)
    assert "alice's 2 needs 4 GPUs" in words(plan.decision[1].why_not_more)


@pytest.mark.parametrize(
    "more",
    [
        {"reason": "Dependency"},
        {"reason": "QOSMaxGRESPerUser"},
        {"reason": "JobHeldUser"},
        {"dependency": "yes"},
        {"begin_time": NOW + 100},
        {"gpu_type": "h100"},
        {"partition": "elsewhere"},
        {"gpus": 0},
        {"required_nodes": ("g9",), "features": "none"},
    ],
)
def test_jobs_that_could_not_start_anyway_are_not_served(more):
    c = Cluster(nodes(1))
    c.add(1, elastic="1-4", on={"g1": 4})
    c.add(2, **({"gpus": 2} | more))
    assert not changes(c)


def test_the_higher_priority_is_served_first():
    c = Cluster(nodes(1))
    c.add(1, elastic="2-4", on={"g1": 4})
    c.add(2, gpus=2, priority=1)
    c.add(3, gpus=2, priority=9, reason="Priority")
    plan, _ = decide(c)
    assert [claim.job_id for claim in plan.claims] == [3]


def test_the_shape_it_asked_for_counts():
    c = Cluster(nodes(3))
    c.add(1, elastic="1-8", on={"g1": 4, "g2": 4})
    c.add(2, on={"g3": 2})
    c.add(3, gpus=4, min_nodes=2)
    plan, _ = decide(c)
    (claim,) = plan.claims
    assert sorted(g for _, g in claim.shares) == [2, 2]
    assert "g3" in dict(claim.shares)
    assert plan.changes[0].target.gpus == 4


def test_without_a_type_its_nodes_may_be_of_several():
    c = Cluster([node("a1"), node("v1", gpu_type="v100"), node("v2", gpu_type="v100")])
    c.add(1, elastic="1-4", on={"a1": 4})
    c.add(2, elastic="1-4", on={"v1": 4})
    c.add(3, on={"v2": 3})
    c.add(4, gpus=4, min_nodes=2)
    assert changes(c) == {1: (Action.SHRINK, {"a1": 2}), 2: (Action.SHRINK, {"v1": 2})}
    c.jobs[-1] = dataclasses.replace(c.jobs[-1], gpu_type="v100")
    assert not changes(c)
    c.jobs[-1] = dataclasses.replace(c.jobs[-1], gpu_type="", gpus=2)
    assert changes(c) == {2: (Action.SHRINK, {"v1": 3})}, "of one type if possible"


def test_its_node_list_type_and_cpus_count():
    c = Cluster([*nodes(2), node("v1", 4, "v100")])
    c.add(1, elastic="1-4", on={"g1": 4})
    c.add(2, elastic="1-4", on={"g2": 4})
    c.add(3, elastic="1-4", on={"v1": 4})
    c.add(4, gpus=2, required_nodes=("g2",))
    assert changes(c) == {2: (Action.SHRINK, {"g2": 2})}
    c.jobs[-1] = dataclasses.replace(c.jobs[-1], required_nodes=(), gpu_type="v100")
    assert changes(c) == {3: (Action.SHRINK, {"v1": 2})}
    c.jobs[-1] = dataclasses.replace(c.jobs[-1], cpus=28)
    assert changes(c) == {3: (Action.SHRINK, {"v1": 2})}
    c.jobs[-1] = dataclasses.replace(c.jobs[-1], cpus=30)
    assert changes(c) == {3: (Action.SHRINK, {"v1": 1})}


def test_the_cheapest_gives():
    c = Cluster(nodes(2))
    c.add(1, elastic="1-4", on={"g1": 4}, record={"checkpoint_s": 100.0})
    c.add(2, elastic="1-4", on={"g2": 4}, record={"checkpoint_s": 1.0})
    c.add(3, gpus=1)
    assert changes(c) == {2: (Action.SHRINK, {"g2": 3})}


def test_small_jobs_move_together_so_that_a_whole_node_is_free():
    c = Cluster(nodes(2))
    c.add(1, elastic="1-2", on={"g1": 2})
    c.add(2, elastic="1-2", on={"g2": 2})
    c.add(3, gpus=4)
    plan, _ = decide(c)
    (decision,) = plan.changes
    assert (decision.action, decision.target.gpus) == (Action.MOVE, 2)
    assert "so that bob's 3 (rigid" in words(decision.reason)
    assert words(decision.reason).endswith("finds 4 GPUs together")
    c.carry_out(plan)
    assert c.jobs[2].state is JobState.RUNNING


def test_without_a_job_to_unblock_none_is_moved_together():
    c = Cluster(nodes(2))
    c.add(1, elastic="1-2", on={"g1": 2})
    c.add(2, elastic="1-2", on={"g2": 2})
    assert not changes(c)


def test_no_job_gives_way_while_another_is_just_leaving():
    c = Cluster(nodes(2))
    c.add(1, elastic="1-4", on={"g1": 4})
    c.add(2, on={"g2": 4}, state=JobState.COMPLETING, end_time=NOW - 5)
    c.add(3, gpus=4)
    plan, _ = decide(c)
    assert not plan.changes
    assert plan.claims[0].shares == (("g2", 4),)
    c.jobs[1] = dataclasses.replace(c.jobs[1], end_time=NOW - 500)  # it is stuck
    c.jobs[2] = dataclasses.replace(c.jobs[2], gpus=3)
    assert changes(c) == {1: (Action.SHRINK, {"g1": 1})}


def test_no_job_grows_into_gpus_before_they_are_free():
    c = Cluster(nodes(2))
    c.add(1, elastic="1-8", on={"g1": 4})
    c.add(2, on={"g2": 4}, state=JobState.COMPLETING, end_time=NOW - 5)
    plan, _ = decide(c)
    assert not plan.changes
    assert words(plan.decision[1].waiting_for) == "8 a100 on g1, g2, which others give up first"


def test_rigid_jobs_are_never_disturbed():
    c = Cluster(nodes(1))
    c.add(1, on={"g1": 4})
    c.add(2, gpus=2, priority=10**9)
    plan, _ = decide(c, CONTROLLER)
    assert not plan.decisions
    assert not plan.claims


def test_a_claim_lasts_until_its_job_runs_or_keep_s_after_its_gpus_are_free():
    c = Cluster(nodes(1))
    c.add(1, elastic="1-4", on={"g1": 4})
    c.add(2, gpus=2)
    plan, state = decide(c)
    assert plan.claims[0].until == NOW + 120
    c.time += 60  # still shrinking: the clock has not started
    c.records[1] = dataclasses.replace(
        c.records[1], in_transition=True, target=plan.decision[1].target
    )
    plan, state = decide(c, previous=plan, state=state)
    assert (plan.claims[0].since, plan.claims[0].until) == (NOW, NOW + 180)
    c.jobs[0] = dataclasses.replace(c.jobs[0], allocation=Allocation.of("a100", {"g1": 2}), gpus=2)
    c.records[1] = dataclasses.replace(c.records[1], in_transition=False, target=None)
    c.time += 119
    plan, state = decide(c, previous=plan, state=state)
    assert plan.claims[0].until == NOW + 180
    assert not plan.changes
    c.time += 2
    plan, state = decide(c, previous=plan, state=state)
    assert not plan.claims
    assert list(state["refused"].values()) == [c.time + 1200]
    assert plan.decision[1].target.gpus == 4  # grows again, and is not asked again for a while
    c.carry_out(plan)
    c.time += 1000
    plan, state = decide(c, previous=plan, state=state)
    assert not plan.changes
    c.time += 201
    plan, state = decide(c, previous=plan, state=state)
    assert plan.claims


def test_once_its_job_runs_a_claim_is_gone():
    c = Cluster(nodes(1))
    c.add(1, elastic="1-4", on={"g1": 4})
    c.add(2, gpus=2)
    plan, state = decide(c)
    c.carry_out(plan)
    assert c.jobs[1].state is JobState.RUNNING
    plan, state = decide(c, previous=plan, state=state)
    assert not plan.claims
    assert not plan.changes


def test_with_slurms_queue_a_pending_elastic_job_is_served_like_any_other():
    c = Cluster(nodes(1))
    c.add(1, elastic="1-4", on={"g1": 4})
    c.add(2, elastic="2-4", gpus=2)
    plan, _ = decide(c)
    assert plan.decision[1].target.gpus == 2
    assert "(elastic, waiting" in words(plan.decision[1].reason)
    assert plan.decision[2].action is Action.KEEP
    assert words(plan.decision[2].waiting_for) == "2 GPUs: bob's 1 gives way"


# --- queue = "controller" ---------------------------------------------------------------------


def test_our_pending_jobs_start_at_the_best_size():
    c = Cluster(nodes(2))
    c.add(1, elastic="2-8", gpus=2)
    plan, _ = decide(c, CONTROLLER)
    (decision,) = plan.changes
    assert decision.action is Action.START
    assert dict(decision.target.shares) == {"g1": 4, "g2": 4}


def test_a_leased_job_is_ours_even_with_a_begin_time():
    c = Cluster(nodes(1))
    leased = {"leased": True}
    c.add(1, elastic="2-4", gpus=2, begin_time=NOW + 200, reason="BeginTime", record=leased)
    c.add(2, elastic="2-4", gpus=2, begin_time=NOW + 200, reason="BeginTime")
    assert list(changes(c, CONTROLLER)) == [1]


def test_another_job_shrinks_first_and_then_it_starts():
    c = Cluster(nodes(1))
    c.add(1, elastic="1-4", on={"g1": 4})
    c.add(2, elastic="2-4", gpus=2)
    plan, state = decide(c, CONTROLLER)
    assert [(d.job_id, d.action) for d in plan.changes] == [(1, Action.SHRINK)]
    assert plan.claims
    c.jobs[0] = dataclasses.replace(
        c.jobs[0], allocation=plan.decision[1].target, gpus=2, start_time=NOW
    )
    c.time += 400
    plan, state = decide(c, CONTROLLER, plan, state)
    assert [(d.job_id, d.action) for d in plan.changes] == [(2, Action.START)]


def test_the_lowest_priority_is_preempted_only_for_a_higher_one():
    c = Cluster(nodes(2))
    c.add(1, elastic="4-4", on={"g1": 4}, priority=5)
    c.add(2, elastic="4-4", on={"g2": 4}, priority=3)
    c.add(3, gpus=4, priority=4)
    plan, _ = decide(c, CONTROLLER)
    (decision,) = plan.changes
    assert (decision.job_id, decision.action) == (2, Action.PREEMPT)
    assert "of higher priority, can start" in words(decision.reason)
    assert not changes(c)  # with queue = "slurm" nobody is preempted
    c.jobs[-1] = dataclasses.replace(c.jobs[-1], priority=3)
    assert not changes(c, CONTROLLER)


def test_a_job_that_has_just_started_is_not_preempted():
    c = Cluster(nodes(1))
    c.add(1, elastic="4-4", on={"g1": 4}, priority=1, record={"last_change": NOW - 10})
    c.add(2, gpus=4, priority=9)
    assert not changes(c, CONTROLLER)


def test_a_waiting_job_says_what_it_waits_for():
    c = Cluster(nodes(1))
    c.add(1, on={"g1": 4})
    c.add(2, elastic="2-4", gpus=2)
    plan, _ = decide(c, CONTROLLER)
    assert words(plan.decision[2].waiting_for).startswith("2 GPUs: not even its MIN has room")


# --- odd inputs -------------------------------------------------------------------------------


def test_an_empty_cluster():
    plan, state = decide(Cluster([]))
    assert plan.decisions == ()
    assert state == {"policy": {}, "refused": {}, "promised": {}}


def test_jobs_on_nodes_that_are_gone():
    c = Cluster(nodes(2))
    c.add(1, elastic="1-8", on={"g1": 1})
    c.add(2, elastic="1-8", on={"g2": 1})
    snapshot = dataclasses.replace(c.snapshot(), nodes=c.snapshot().nodes[:1])
    config = Config()
    plan, _ = decide_round(snapshot, c.records, config=config, policy=FairShare(config), state={})
    assert set(plan.decision) == {1, 2}


def test_partitions_that_are_down_get_nothing():
    c = Cluster(nodes(2), partitions=(Partition(name="gpu", up=False),))
    c.add(1, elastic="1-8", on={"g1": 1})
    assert not changes(c)


def test_no_resizes_at_all_with_a_budget_of_none():
    c = Cluster(nodes(2))
    c.add(1, elastic="1-8", on={"g1": 1})
    plan, _ = decide(c, Config(resize=ResizeSettings(per_hour=0)))
    assert not plan.changes
    assert "per_hour = 0" in words(plan.decision[1].waiting_for)


@pytest.mark.parametrize(
    "module",
    [
        "tests.support.decisions.synthetic_clusters",
        "slurm_elastic.models.speedup",
        "slurm_elastic.placement.best_fit",
        "slurm_elastic.topology",
    ],
)
def test_the_examples_in_the_docstrings(module):
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted
    assert not results.failed


def test_the_benchmark_runs():
    found = measure(20, 60, repeat=1, seed=1)
    assert found["against_plain_loop"]["value_ours"] == pytest.approx(
        found["against_plain_loop"]["value_plain"], rel=0.01
    )
    json.dumps(found)


def test_a_policy_sees_values_and_nothing_of_the_placement():
    questions = []

    class Watching(FairShare):
        def decide(self, question, state):
            questions.append(question)
            return super().decide(question, state)

    cluster = Cluster(nodes(2))
    cluster.add(1, elastic="1-8", on={"g1": 1})
    decide_round(
        cluster.snapshot(), cluster.records, config=Config(), policy=Watching(Config()), state={}
    )
    for question in questions:
        hash(question.free)
        with pytest.raises(TypeError):
            question.records[1] = None
        for field in dataclasses.fields(question):
            value = getattr(question, field.name)
            parts = [value, *(value.values() if isinstance(value, Mapping) else ())]
            assert not any("placement" in type(part).__module__ for part in parts), field.name
    assert questions[0].free.gpus == (3, 4)


# --- nodes that sleep -----------------------------------------------------------------------


def asleep(name):
    return node(name, available=False, asleep=True, state="IDLE+POWERED_DOWN")


def test_no_job_gives_way_to_one_that_slurm_starts_after_a_boot():
    c = Cluster([node("g1"), asleep("g2")])
    c.add(1, elastic="1-4", on={"g1": 4})
    c.add(2, gpus=2)
    plan, _ = decide(c)
    assert not plan.changes
    assert plan.claims[0].shares == (("g2", 2),)
    c.nodes = [node("g1"), node("g2", available=False, state="DOWN+POWERED_DOWN")]
    plan, _ = decide(c)
    assert [d.action for d in plan.changes] == [Action.SHRINK]


def test_awake_nodes_come_before_sleeping_ones():
    c = Cluster([asleep("g1"), node("g2")])
    c.add(2, gpus=4)
    plan, _ = decide(c)
    assert plan.claims[0].shares == (("g2", 4),)


def test_a_job_of_the_controllers_queue_waits_for_the_boot():
    c = Cluster([asleep("g1")])
    c.add(2, elastic="1-4", gpus=1, record={"leased": True})
    plan, _ = decide(c, CONTROLLER)
    assert not plan.claims  # nobody would wake the node
    acts = dataclasses.replace(CONTROLLER, sleep=SleepSettings(mode="act"))
    plan, _ = decide(c, acts)
    assert not plan.changes
    assert plan.claims[0].shares == (("g1", 1),)
    (claim,) = plan.claims
    too_long = dataclasses.replace(plan, claims=(dataclasses.replace(claim, since=NOW - 5_000),))
    assert not decide(c, acts, previous=too_long)[0].claims
    assert words(plan.decision[2].waiting_for) == "g1 must boot for it"


def test_no_job_grows_onto_a_sleeping_node():
    c = Cluster([node("g1"), asleep("g2")])
    c.add(1, elastic="1-8", on={"g1": 4})
    assert changes(c) == {}
