"""Rounds of binding proposals: first alternatives are carried out without judging their cost."""

import json
from dataclasses import replace

import pytest

from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings
from slurm_elastic.core.cluster import Allocation, Companion
from slurm_elastic.core.plan import Action, Alternative, Proposal
from slurm_elastic.policies.policy_protocol import Capabilities
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import told, words
from tests.support.decisions.synthetic_clusters import Cluster, node

CONTROLLER = Config(
    controller=ControllerSettings(queue="controller"), resize=ResizeSettings(min_interval_s=0.0)
)


class Told:
    """Policy with given proposals by job id; other jobs keep what they have or wait."""

    capabilities = Capabilities(binding_proposals=True)

    def __init__(self, **wishes):
        self.wishes = {int(k.removeprefix("j")): v for k, v in wishes.items()}
        self.asked = []

    def decide(self, question, state):
        self.asked.append(question)
        proposals = []
        for job_id in question.jobs:
            held = question.snapshot.job[job_id].allocation
            stays = (held.gpu_type, held.gpus) if held else ("", 0)
            wishes = self.wishes.get(job_id, [stays])
            proposals.append(
                Proposal(
                    job_id=job_id,
                    alternatives=tuple(
                        Alternative(gpu_type=t, gpus=g, value=-i, reason=told("told so"))
                        for i, (t, g) in enumerate(wishes)
                    ),
                )
            )
        return tuple(proposals), state


def cluster(count=2, gpus=4):
    return Cluster([node(f"g{i}", gpus) for i in range(1, count + 1)])


def decide(c, policy, config=CONTROLLER, **more):
    plan, state = decide_round(
        c.snapshot(), c.records, config=config, policy=policy, state={}, **more
    )
    json.dumps(state)
    return plan


def targets(plan):
    return {d.job_id: dict(d.target.shares) if d.target else None for d in plan.changes}


BOTH = pytest.mark.parametrize("at_once", [False, True])


@BOTH
def test_changes_that_would_not_pay_are_carried_out(at_once):
    c = cluster()
    c.add(1, elastic="1-8", on={"g1": 4}, record={"restart_s": 1e6, "progress": 0.999})
    plan = decide(c, Told(j1=[("a100", 2)]), at_once=at_once)
    assert targets(plan) == {1: {"g1": 2}}
    assert words(plan.decision[1].reason) == "told so"


@BOTH
def test_what_it_gives_up_is_not_given_back(at_once):
    c = cluster()
    c.add(1, elastic="1-8", on={"g1": 4})
    c.add(2, elastic="1-8", on={"g2": 4})
    plan = decide(c, Told(j1=[("", 0)], j2=[("a100", 2)]), at_once=at_once)
    assert targets(plan) == {1: None, 2: {"g2": 2}}
    assert plan.decision[1].action is Action.PREEMPT


@BOTH
def test_the_policy_is_asked_once_and_about_all_waiting_jobs(at_once):
    c = cluster(1)
    c.add(1, elastic="1-8", on={"g1": 4})
    c.add(2, elastic="4-8", gpus=4)
    c.add(3, elastic="1-8", gpus=1)
    policy = Told()
    plan = decide(c, policy, at_once=at_once)
    (question,) = policy.asked
    assert question.jobs == (1, 2, 3)
    assert question.capacity == {"a100": 4}
    # No job gives way for a waiting one unless the policy proposes it.
    assert targets(plan) == {}


def test_starts_use_gpus_given_up_at_once():
    c = cluster(1)
    c.add(1, elastic="1-8", on={"g1": 4})
    c.add(2, elastic="1-8", gpus=1)
    policy = Told(j1=[("a100", 2)], j2=[("a100", 2)])
    assert targets(decide(c, policy, at_once=True)) == {1: {"g1": 2}, 2: {"g1": 2}}
    # Live, Slurm must show them as free first.
    assert targets(decide(c, policy)) == {1: {"g1": 2}}


def test_jobs_of_two_types_change_places_at_once():
    c = Cluster([node("g1", 4, "a100"), node("g2", 4, "v100")])
    c.add(1, elastic="1-8", on={"g1": 4})
    c.add(2, elastic="1-8", on={"g2": 4})
    policy = Told(j1=[("v100", 4)], j2=[("a100", 4)])
    assert targets(decide(c, policy, at_once=True)) == {1: {"g2": 4}, 2: {"g1": 4}}


def test_a_job_that_keeps_its_shape_keeps_its_place():
    c = cluster(3)
    c.add(1, elastic="1-8", on={"g2": 2})
    c.add(2, elastic="1-8", gpus=1)
    c.add(3, elastic="1-8", gpus=1)
    plan = decide(c, Told(j2=[("a100", 8)], j3=[("a100", 1)]), at_once=True)
    assert targets(plan) == {2: {"g1": 4, "g3": 4}, 3: {"g2": 1}}


def test_all_are_placed_anew_when_a_job_finds_no_whole_node():
    c = cluster(2)
    c.add(1, elastic="1-8", on={"g1": 2})
    c.add(2, elastic="1-8", on={"g2": 2})
    c.add(3, elastic="1-8", gpus=1)
    plan = decide(c, Told(j3=[("a100", 4)]), at_once=True)
    assert sorted(plan.decision) == [1, 2, 3]
    held = {j: plan.decision[j].target for j in (1, 2, 3)}
    assert [len(a.shares) for a in held.values()] == [1, 1, 1]
    assert held[1].nodes == held[2].nodes != held[3].nodes


def test_restarting_jobs_make_room_too():
    c = cluster(2)
    for job_id, name in ((1, "g1"), (2, "g2")):
        c.add(job_id, elastic="1-8", on={name: 2})
        held = c.jobs[-1].allocation
        c.records[job_id] = replace(c.records[job_id], in_transition=True, target=held)
    c.add(3, elastic="1-8", gpus=1)
    policy = Told(j3=[("a100", 4)])
    plan = decide(c, policy, at_once=True)
    assert policy.asked[0].jobs == (3,)
    assert plan.decision[3].target.gpus == 4
    assert plan.decision[1].target.nodes == plan.decision[2].target.nodes


def test_odd_sizes_are_scattered_only_when_they_must():
    c = cluster(3)
    c.add(1, elastic="1-8", gpus=1)
    c.add(2, elastic="1-8", gpus=1)
    c.add(3, elastic="1-8", gpus=1)
    plan = decide(c, Told(j1=[("a100", 3)], j2=[("a100", 3)], j3=[("a100", 6)]), at_once=True)
    shapes = {d.job_id: sorted(g for _, g in d.target.shares) for d in plan.decisions}
    assert shapes == {1: [3], 2: [1, 2], 3: [2, 4]}


def test_a_scattered_job_keeps_its_shape_when_others_are_placed_anew():
    c = cluster(3)
    c.add(1, elastic="1-8", on={"g1": 1, "g2": 2})
    c.add(2, elastic="1-8", on={"g3": 1})
    c.add(3, elastic="1-8", gpus=1)
    plan = decide(c, Told(j3=[("a100", 4)]), at_once=True)
    assert plan.decision[1].target == c.jobs[0].allocation
    assert plan.decision[3].target.nodes == ("g3",)
    assert len(plan.decision[2].target.shares) == 1


@BOTH
def test_a_job_grows_on_no_node_that_is_drained(at_once):
    c = Cluster([node("g1", 8, available=False), node("g2", 3)])
    c.add(1, elastic="1-8", on={"g1": 3})
    policy = Told(j1=[("a100", 7), ("a100", 3)])
    assert targets(decide(c, policy, at_once=at_once)) == {}
    c.add(2, elastic="1-8", on={"g2": 2})
    # It may keep its own there, when others are placed anew.
    policy = Told(j1=[("a100", 2)], j2=[("a100", 3)])
    assert targets(decide(c, policy, at_once=at_once)) == {1: {"g1": 2}, 2: {"g2": 3}}


def test_the_next_alternative_when_there_are_too_few():
    c = cluster(1)
    c.add(1, elastic="1-8", on={"g1": 1})
    c.add(2, elastic="1-8", gpus=1)
    plan = decide(c, Told(j2=[("a100", 8), ("v100", 1), ("a100", 2)]), at_once=True)
    assert targets(plan) == {2: {"g1": 2}}
    plan = decide(c, Told(j2=[("a100", 8), ("", 0)]), at_once=True)
    assert targets(plan) == {}


def test_a_job_without_a_place_keeps_what_it_has():
    c = cluster(1)
    c.add(1, elastic="1-8", on={"g1": 2})
    c.add(2, elastic="1-8", on={"g1": 1})
    plan = decide(c, Told(j1=[("a100", 8)], j2=[("a100", 2)]), at_once=True)
    assert targets(plan) == {2: {"g1": 2}}
    assert plan.decision[1].target == c.jobs[0].allocation


def test_words_can_be_left_out():
    c = cluster(1)
    c.add(1, elastic="1-8", on={"g1": 2})
    told, untold = (decide(c, Told(), explain=e).decision[1] for e in (True, False))
    assert words(told.why_not_more)
    assert not words(untold.why_not_more)
    assert told.target == untold.target


class InPlace(Told):
    """The same, the first alternative of each job weighed as a change in place."""

    def decide(self, question, state):
        proposals, state = super().decide(question, state)
        return tuple(
            replace(
                p, alternatives=(replace(p.alternatives[0], in_place=True), *p.alternatives[1:])
            )
            for p in proposals
        ), state


@BOTH
def test_a_change_weighed_as_one_in_place_is_not_made_by_a_requeue(at_once):
    c = cluster()
    c.add(1, elastic="1-8", on={"g1": 2}, record={"in_place": True})
    c.add(2, on={"g1": 1})
    plan = decide(c, InPlace(j1=[("a100", 4)]), at_once=at_once)
    assert targets(plan) == {}
    plan = decide(c, InPlace(j1=[("a100", 4), ("a100", 3)]), at_once=at_once)
    assert targets(plan) == {1: {"g1": 3}}
    # the same size by a requeue, where it is worth one
    plan = decide(c, InPlace(j1=[("a100", 4), ("a100", 4)]), at_once=at_once)
    assert targets(plan) == {1: {"g2": 4}}


def test_whole_companions_leave_and_the_base_stays():
    c = cluster(3)
    companions = tuple(
        Companion(10 + i, Allocation.of("a100", shares))
        for i, shares in enumerate([{"g1": 1}, {"g3": 4}])
    )
    on = {"g1": 4, "g3": 4}
    c.add(1, elastic="1-8", on=on, record={"in_place": True}, companions=companions)
    plan = decide(c, InPlace(j1=[("a100", 3)]), at_once=True)
    assert targets(plan) == {1: {"g1": 3}}
    plan = decide(c, InPlace(j1=[("a100", 2)]), at_once=True)
    assert targets(plan) == {}
