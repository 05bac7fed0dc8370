"""Policy `dally`: order, waits, shrinks, preemption, and their reasons."""

import dataclasses
import json

import pytest

from slurm_elastic.config.policy_settings import DallySettings
from slurm_elastic.config.schema import (
    Config,
    ConfigError,
    ControllerSettings,
    ResizeSettings,
    SpeedupSettings,
)
from slurm_elastic.core.cluster import Limit
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import Action, Alternative, Proposal
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.policies import policy_protocol
from slurm_elastic.policies.dally.dally import Dally
from slurm_elastic.policies.dally.job_state import GangStates
from slurm_elastic.policies.dally.shrink_selection import ShrinkCandidate, collect
from slurm_elastic.policies.policy_protocol import Capabilities
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import told, words
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node, racks

BOTH = pytest.mark.parametrize("at_once", [False, True])


def config(*, queue="controller", loss=0.3, **dally):
    return Config(
        controller=ControllerSettings(queue=queue, policy="dally"),
        resize=ResizeSettings(min_interval_s=0.0),
        speedup=SpeedupSettings(loss_in_node=min(loss, 0.04), loss_across_nodes=loss),
        dally=DallySettings(**dally),
    )


def cluster(*sizes, kind="a100", per_rack=2):
    members = [node(f"g{i}", gpus, kind) for i, gpus in enumerate(sizes)]
    return Cluster(members, switches=racks([n.name for n in members], per_rack))


def decide(c, settings=None, *, at_once=True, state=None, policy=None):
    settings = settings or config()
    plan, after = decide_round(
        c.snapshot(), c.records, config=settings, policy=policy or Dally(settings),
        state=state or {}, at_once=at_once,
    )  # fmt: skip
    json.dumps(after)
    return plan, after


def targets(plan):
    return {d.job_id: dict(d.target.shares) if d.target else None for d in plan.changes}


def waiting(c, job_id, elastic, gpus, *, since=0.0, limit=None, **more):
    c.add(job_id, elastic=elastic, gpus=gpus, submit_time=NOW - since, time_limit_s=limit, **more)


def running(c, job_id, elastic, on, *, ran=5000.0, record=None, **more):
    known = {"last_change": NOW - ran, **(record or {})}
    c.add(job_id, elastic=elastic, on=on, start_time=NOW - ran, record=known, **more)


def test_it_is_installed():
    assert "dally" in policy_protocol.known()


@pytest.mark.parametrize("timers", ["soon", "24,12", "own,2"])
def test_timers_that_cannot_be(timers):
    with pytest.raises(
        ConfigError, match=r"\[dally\] timers: .* is invalid: expected auto.*; or own"
    ):
        Dally(config(timers=timers))


def test_least_gpu_time_left_goes_first():
    c = cluster(4)
    waiting(c, 1, "4", 4, limit=10_000, since=500)
    waiting(c, 2, "4", 4, limit=1000)
    plan, _ = decide(c)
    assert targets(plan) == {2: {"g0": 4}}
    assert "go to jobs before it (least GPU time left)" in words(plan.decision[1].reason)


def test_published_order_is_by_communication_suffered():
    c = cluster(4)
    waiting(c, 1, "4", 4, limit=100)
    waiting(c, 2, "4", 4, limit=1000)
    state = {
        "policy": {
            "time": NOW - 1,
            "jobs": {
                c.jobs[i].key: {
                    "gpus": 4, "since": NOW - 100, "lease": 0.0, "ran": 100.0,
                    "computed": computed, "service": 400.0, "place": [],
                }
                for i, computed in enumerate((90.0, 40.0))
            },
        }
    }  # fmt: skip
    settings = config(timers="nowait")
    assert targets(decide(c, settings, state=state)[0]) == {2: {"g0": 4}}
    # By ours the first one, of which nearly nothing is left.
    assert targets(decide(c, state=state)[0]) == {1: {"g0": 4}}


def test_a_sensitive_gang_waits_and_an_insensitive_one_starts_at_once():
    c = cluster(4, 4, 4, 4)
    for job_id, name in enumerate(("g0", "g2"), start=1):
        running(c, job_id, "4", {name: 4}, ran=1000)
    waiting(c, 3, "8", 8)
    plan, _ = decide(c, config(loss=0.3))
    assert targets(plan) == {}
    reason = words(plan.decision[3].reason)
    assert reason.startswith("waits for one rack: over 2 racks it would compute 0.")
    assert reason.endswith("waited 0 s of at most 10800 s")
    plan, _ = decide(c, config(loss=0.001))
    assert targets(plan) == {3: {"g1": 4, "g3": 4}}
    assert (
        words(plan.decision[3].reason) == "starts at once, across racks: distance costs it nothing"
    )


def test_timers_of_the_published_system():
    c = cluster(4, 4, 4, 4)
    for job_id, name in enumerate(("g0", "g2"), start=1):
        running(c, job_id, "4", {name: 4}, ran=1000)
    waiting(c, 3, "8", 8, since=5000)
    assert targets(decide(c, config(timers="full"))[0]) == {}
    assert targets(decide(c, config(timers="1,2"))[0]) == {}
    assert targets(decide(c, config(timers="0,1"))[0]) == {3: {"g1": 4, "g3": 4}}
    assert targets(decide(c, config(timers="nowait"))[0]) == {3: {"g1": 4, "g3": 4}}


def test_nodes_are_kept_for_a_gang_that_waited_long():
    c = cluster(4, 4, per_rack=4)
    running(c, 1, "2", {"g0": 2}, ran=1000)
    running(c, 2, "4", {"g1": 4}, ran=1000)
    waiting(c, 3, "4", 4, since=50_000, limit=100_000)
    waiting(c, 4, "2", 2, limit=100)
    plan, _ = decide(c)
    # What is idle on g0 is kept for job 3, though job 4 would go first.
    assert targets(plan) == {}
    c.jobs[2] = dataclasses.replace(c.jobs[2], submit_time=NOW - 10)
    assert targets(decide(c)[0]) == {4: {"g0": 2}}


def test_a_gang_that_waited_long_without_a_near_place_spreads():
    c = cluster(4, 4, per_rack=4)
    # The ends of these are not known.
    c.add(1, on={"g0": 2})
    c.add(2, on={"g1": 2})
    waiting(c, 3, "4", 4, since=5000)
    assert targets(decide(c)[0]) == {}
    c.jobs[2] = dataclasses.replace(c.jobs[2], submit_time=NOW - 50_000)
    assert targets(decide(c)[0]) == {3: {"g0": 2, "g1": 2}}


@BOTH
def test_a_lease_holds_and_then_the_first_in_order_takes_over(at_once):
    c = cluster(4)
    running(c, 1, "4", {"g0": 4}, ran=1000, time_limit_s=1_000_000)
    waiting(c, 2, "4", 4, limit=100)
    plan, _ = decide(c, at_once=at_once)
    assert targets(plan) == {}
    assert words(plan.decision[1].reason).startswith("keeps its GPUs: its lease ends at ")
    settings = config(lease_s=900.0)
    plan, _ = decide(c, settings, at_once=at_once)
    assert plan.decision[1].action is Action.PREEMPT
    assert words(plan.decision[1].reason) == "gives way to job 2 (least GPU time left, 0.1 h)"
    # Live, the other one starts when Slurm calls the GPUs free.
    assert plan.decision[2].action is (Action.START if at_once else Action.KEEP)
    assert "wait" in words(plan.decision[2].reason) or at_once


def test_live_the_first_in_order_starts_when_the_gpus_are_free():
    c = cluster(4)
    running(c, 1, "4", {"g0": 4}, time_limit_s=1_000_000)
    waiting(c, 2, "4", 4, limit=100, since=20)
    plan, state = decide(c, at_once=False)
    assert targets(plan) == {1: None}
    c.carry_out(plan)
    c.time += 30
    # A job of the same kind that came later does not get in between.
    c.add(3, elastic="4", gpus=4, submit_time=c.time, time_limit_s=100)
    plan, state = decide(c, at_once=False, state=state)
    assert targets(plan) == {2: {"g0": 4}}
    entry = state["policy"]["jobs"][c.jobs[1].key]
    assert entry["since"] == NOW - 20


def test_a_gang_whose_gpus_are_on_their_way_counts_them_as_its_own():
    c = cluster(4, 4)
    running(c, 1, "4", {"g0": 4}, record={"in_transition": True, "target": None})
    running(c, 2, "4", {"g1": 4}, time_limit_s=1_000_000)
    waiting(c, 3, "4", 4, limit=100)
    plan, _ = decide(c, at_once=False)
    # g0 comes free: no job is preempted for job 3 a second time.
    assert targets(plan) == {}
    assert words(plan.decision[3].reason).startswith("waits until g0 is free")


def test_no_gang_is_preempted_before_the_floor():
    c = cluster(4)
    running(c, 1, "4", {"g0": 4}, ran=500, time_limit_s=1_000_000)
    waiting(c, 2, "4", 4, limit=100)
    assert targets(decide(c, config(lease_s=60.0))[0]) == {}
    assert targets(decide(c, config(lease_s=60.0, floor_s=400.0))[0])[1] is None
    # A restart that takes long raises the floor.
    c.records[1] = dataclasses.replace(c.records[1], restart_s=60.0)
    plan, _ = decide(c, config(lease_s=60.0, floor_s=400.0))
    assert targets(plan) == {}


def test_with_slurms_queue_no_gang_is_preempted():
    c = cluster(4)
    running(c, 1, "4", {"g0": 4}, time_limit_s=1_000_000)
    waiting(c, 2, "4", 4, limit=100)
    assert targets(decide(c, config(queue="slurm"))[0]) == {}


@BOTH
def test_elastic_gangs_shrink_before_any_is_preempted(at_once):
    c = cluster(4, 4)
    running(c, 1, "4", {"g0": 4}, time_limit_s=1_000_000)
    # During its lease, and it has two to spare.
    running(c, 2, "2-4", {"g1": 4}, ran=1000, time_limit_s=1_000_000)
    waiting(c, 3, "2", 2, limit=100)
    plan, _ = decide(c, at_once=at_once)
    assert plan.decision[1].action is Action.KEEP
    assert targets(plan)[2] == {"g1": 2}
    assert words(plan.decision[2].reason) == (
        "gives 2 GPUs, which job 3 starts on, so that no job is preempted"
    )
    if at_once:
        assert targets(plan)[3] == {"g1": 2}
    # With nothing to spare a job is preempted, by the order.
    c.records[2] = dataclasses.replace(c.records[2], held=True)
    plan, _ = decide(c, at_once=at_once)
    assert plan.decision[1].action is Action.PREEMPT


def test_an_elastic_gang_starts_smaller_and_grows_when_gpus_are_idle():
    c = cluster(4, 4)
    running(c, 1, "1", {"g0": 1}, ran=1000)
    running(c, 2, "4", {"g1": 4}, ran=1000)
    waiting(c, 3, "1-4", 4, limit=100_000)
    plan, state = decide(c)
    assert targets(plan) == {3: {"g0": 3}}
    assert words(plan.decision[3].reason).startswith("starts on one node with 3 of 4")
    c.carry_out(plan)
    c.jobs = [j for j in c.jobs if j.job_id != 2]
    c.time += 700
    plan, _ = decide(c, state=state)
    assert targets(plan) == {3: {"g1": 4}}
    assert "that it asked for" in words(plan.decision[3].reason)


def test_a_gang_grows_in_place_where_a_requeue_would_not_pay():
    c = cluster(4)
    running(c, 1, "1", {"g0": 1}, ran=1000)
    waiting(c, 2, "1-4", 4, limit=1_000_000)
    plan, state = decide(c)
    c.carry_out(plan)
    c.jobs = [j for j in c.jobs if j.job_id != 1]
    c.time += 100_000
    for in_place, after in ((False, {}), (True, {2: {"g0": 4}})):
        c.records[2] = dataclasses.replace(c.records[2], in_place=in_place, checkpoint_s=4000.0)
        assert targets(decide(c, state=state)[0]) == after


@pytest.mark.parametrize(("elastic", "after"), [("1-2", {1: {"g0": 2}}), ("8", {})])
def test_a_changed_directive_is_followed_where_that_can_be(elastic, after):
    c = cluster(4)
    running(c, 1, "4", {"g0": 4}, ran=1000)
    c.jobs[0] = dataclasses.replace(c.jobs[0], override=Directive.parse(elastic))
    assert targets(decide(c)[0]) == after


def test_a_rigid_gang_has_all_its_gpus_or_none():
    c = cluster(4)
    running(c, 1, "1", {"g0": 1}, ran=100)
    waiting(c, 2, "4", 4)
    assert targets(decide(c)[0]) == {}


def test_a_spread_gang_comes_together_if_that_pays():
    c = cluster(4, 4, 4, 4)
    running(c, 1, "8", {"g0": 4, "g2": 4})
    plan, _ = decide(c)
    assert len(plan.decision[1].target.nodes) == 2
    assert c.switches[0].nodes == ("g0", "g1")
    assert set(plan.decision[1].target.nodes) in ({"g0", "g1"}, {"g2", "g3"})
    assert words(plan.decision[1].reason).startswith("moves to one place: ")
    c.records[1] = dataclasses.replace(c.records[1], restart_s=100.0, checkpoint_s=3000.0)
    assert targets(decide(c)[0]) == {}


def test_nodes_of_unequal_size_and_two_types():
    c = Cluster([node("a", 2), node("b", 8), node("c", 4, "v100"), node("d", 3)])
    waiting(c, 1, "8,types=a100", 8, limit=4)
    waiting(c, 2, "4,types=v100:a100", 4, limit=3)
    waiting(c, 3, "2", 2, limit=2)
    waiting(c, 4, "3,types=a100", 3, limit=1)
    plan, _ = decide(c)
    assert targets(plan) == {1: {"b": 8}, 2: {"c": 4}, 3: {"a": 2}, 4: {"d": 3}}


def test_what_it_may_not_use_is_not_offered():
    c = cluster(4, 4, 4, 4)
    c.nodes = [
        dataclasses.replace(n, **more)
        for n, more in zip(
            c.nodes,
            ({"planned": True}, {"available": False}, {"features": frozenset({"ib"})}, {}),
            strict=True,
        )
    ]
    waiting(c, 1, "4", 4, features="ib", limit=10)
    waiting(c, 2, "8", 8, limit=5)
    waiting(c, 3, "4", 4, limit=20)
    plan, _ = decide(c)
    assert targets(plan) == {1: {"g2": 4}, 3: {"g3": 4}}


def test_a_refusal_by_a_limit_preempts_no_gang():
    c = cluster(4)
    running(c, 1, "4", {"g0": 4}, time_limit_s=1_000_000)
    waiting(c, 2, "4", 4, limit=100)
    c.limits = (Limit(name="QOS", resource="gpu", cap=2, jobs=frozenset({2})),)
    assert targets(decide(c)[0]) == {}


class Told:
    """Policy that proposes given places."""

    capabilities = Capabilities(binding_proposals=True)

    def __init__(self, *places):
        self.places = places

    def decide(self, question, state):
        ranked = [
            Alternative(gpu_type="a100", gpus=sum(p.values()), value=0, shares=tuple(p.items()))
            for p in self.places
        ]
        wait = Alternative(gpu_type="", gpus=0, value=0, reason=told("waits"))
        return tuple(
            Proposal(job_id=j, alternatives=(*ranked, wait)) for j in question.jobs if j == 2
        ), state


@BOTH
@pytest.mark.parametrize(
    ("places", "found"),
    [
        (({"g1": 2},), {"g1": 2}),
        (({"g0": 4}, {"g1": 3}), {"g1": 3}),
        (({"g1": 2, "g2": 1}, {"g2": 1}), {"g2": 1}),
        (({"g9": 2},), None),
        (({"g3": 2},), None),
        (({"g1": 9},), None),
    ],
)
def test_a_finished_place_is_taken_as_it_is_or_the_next_alternative(at_once, places, found):
    c = cluster(4, 4, 4, 4)
    c.nodes = [dataclasses.replace(n, planned=n.name == "g3") for n in c.nodes]
    running(c, 1, "4", {"g0": 4})
    waiting(c, 2, "1-8", 2)
    plan, _ = decide(c, policy=Told(*places), at_once=at_once)
    assert targets(plan) == ({2: found} if found else {})


@BOTH
def test_a_finished_place_moves_a_job_of_the_same_size(at_once):
    c = cluster(4, 4)
    running(c, 2, "1-8", {"g0": 2})
    plan, _ = decide(c, policy=Told({"g1": 2}), at_once=at_once)
    assert targets(plan) == {2: {"g1": 2}}
    plan, _ = decide(c, policy=Told({"g0": 2}), at_once=at_once)
    assert targets(plan) == {}


def test_a_gang_that_gives_keeps_an_even_share():
    c = cluster(4, 4, 4)
    running(c, 1, "4-12", {"g0": 4, "g1": 4, "g2": 4})
    settings = config()
    seen = []

    class Spy(Dally):
        def decide(self, question, state):
            seen.append(question)
            return super().decide(question, state)

    decide(c, settings, policy=Spy(settings))
    (question,) = seen
    job = question.snapshot.job[1]
    (bidder,) = GangStates(question, {}, NodeArrays(question.snapshot)).bidders(settings)
    giver = ShrinkCandidate(bidder, job.allocation, {"g1": 4, "g2": 4})
    ((who, left),) = collect([giver], {"g2": 1}, 4)
    assert who is giver
    assert dict(left.shares) == {"g0": 4, "g1": 4}
    assert collect([giver], {"g0": 1}, 4) is None
