"""Wait timers (`[placement] timers`): fixed, published and tuned, and their state."""

import dataclasses
import json

import pytest

from slurm_elastic.config.placement_settings import PlacementSettings
from slurm_elastic.config.schema import (
    Config,
    ConfigError,
    ControllerSettings,
    ResizeSettings,
    SpeedupSettings,
    parse,
)
from slurm_elastic.core.plan import Action, Alternative, Proposal
from slurm_elastic.placement.delay.wait_timers import NODE, RACK, WaitTimers, demand
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.policies.policy_protocol import Capabilities
from slurm_elastic.round import decide_round
from tests.support.decisions import reasons
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import Cluster, node, racks

LEASE = 100.0


def patience(timers, *, now=10_000.0, waits=None, waiting=None):
    settings = PlacementSettings(
        mode="delay", timers=timers, lease_s=LEASE, wait_node_s=100.0, wait_rack_s=300.0,
        tolerance=0.05,
    )  # fmt: skip
    return WaitTimers(settings, now, {"waits": waits or {}, "waiting": waiting or {}})


def limits(found, gpus=8):
    return found.limit_s(NODE, gpus, "me"), found.limit_s(RACK, gpus, "me")


@pytest.mark.parametrize(
    ("timers", "expected"),
    [
        ("fixed", (100.0, 300.0)),
        ("own", (100.0, 300.0)),
        ("nowait", (0.0, 0.0)),
        ("full", (float("inf"), float("inf"))),
        ("12,24", (1200.0, 2400.0)),
        ("auto", (600.0, 1200.0)),
    ],
)
def test_limits_while_nothing_is_remembered(timers, expected):
    assert limits(patience(timers)) == expected


def test_own_timers_follow_the_waits_of_the_class_between_their_bounds():
    now = 10_000.0
    fours = [[now - 10, 4.0], [now - 20, 4.0], [now - 30, 4.0]]
    long = {RACK: {"8": [[now - 1, 1000.0]] * 3, "4": fours, "1": [[now - 2500, 20.0]] * 3}}
    found = patience("own", waits=long)
    assert found.limit_s(RACK, 3, "me") == 400.0
    assert found.limit_s(RACK, 8, "me") == 24 * LEASE
    # Too old to count, and too few of its own class: those of all classes.
    assert found.limit_s(RACK, 1, "me") == 24 * LEASE
    assert found.limit_s(NODE, 4, "me") == 100.0


def test_waits_that_go_on_count_but_for_the_job_itself():
    wait = {"tier": RACK, "since": 10_000.0 - 900, "gpus": 8, "seen": 10_000.0}
    found = patience("own", waiting={"me": wait})
    assert found.limit_s(RACK, 8, "me") == 300.0
    assert found.limit_s(RACK, 8, "other") == 900.0


def test_the_longer_it_has_waited_the_more_a_job_puts_up_with():
    own, fixed = patience("own"), patience("fixed")
    assert own.accepted_loss(0, 300.0) == pytest.approx(0.05)
    assert own.accepted_loss(150, 300.0) == pytest.approx(0.525)
    assert own.accepts_at_s(0.525, 300.0) == pytest.approx(150)
    assert fixed.accepted_loss(299, 300.0) == 0.05
    assert fixed.accepts_at_s(0.5, 300.0) == 300.0
    assert own.accepted_loss(300, 300.0) == fixed.accepted_loss(300, 300.0) == 1.0


@pytest.mark.parametrize("timers", ["own", "auto"])
def test_ended_waits_are_remembered_and_forgotten(timers):
    found = patience(timers)
    state = found.next_state([(RACK, "a", 8, 500.0), (RACK, "b", 8, 1.0)], {})
    assert state["waits"] == {RACK: {"8": [[10_000.0, 5.0]]}}
    later = patience(timers, now=10_000.0 + 25 * LEASE, waits=state["waits"])
    assert later.next_state([(RACK, "c", 8, 200.0)], {})["waits"] == {
        RACK: {"8": [[12_500.0, 2.0]]}
    }


def test_classes_of_demand():
    assert [demand(g) for g in (1, 2, 3, 4, 5, 64, 65)] == ["1", "2", "4", "4", "8", "64", "128"]


@pytest.mark.parametrize("text", ["sometimes", "24,12", "3", "-1,2", ""])
def test_timers_that_cannot_be_are_one_line(text):
    with pytest.raises(ConfigError) as error:
        parse(f'[placement]\ntimers = "{text}"')
    assert str(error.value) == (
        f"elastic.toml:2: timers = '{text}' is invalid: expected own, fixed, auto, nowait, full, or"
        " NODE,RACK in leases with NODE <= RACK: 12,24"
    )


def cluster():
    """Cluster of two racks of two nodes of four GPUs; one of each is taken by a rigid job."""
    nodes = [node(f"g{i}", 4) for i in range(1, 5)]
    c = Cluster(nodes, switches=racks([n.name for n in nodes], 2))
    c.add(90, on={"g2": 4})
    c.add(91, on={"g4": 4})
    return c


def settings(timers="own"):
    return Config(
        controller=ControllerSettings(queue="controller"),
        speedup=SpeedupSettings(loss_across_nodes=0.5),
        resize=ResizeSettings(min_interval_s=0.0, payback_s=1e6),
        placement=PlacementSettings(
            mode="delay", timers=timers, lease_s=LEASE, wait_node_s=100.0, wait_rack_s=300.0,
        ),
    )  # fmt: skip


def decide(c, config, state):
    plan, after = decide_round(
        c.snapshot(), c.records, config=config, policy=FairShare(config), state=state
    )
    return plan, json.loads(json.dumps(after))


def test_rounds_remember_a_wait_wake_when_it_ends_and_learn_from_it():
    c = cluster()
    c.add(1, elastic="8", gpus=8, submit_time=c.time - 20)
    plan, state = decide(c, settings(), {})
    assert plan.decision[1].target is None
    # It loses half: accepted after (0.5 - 0.05) / 0.95 of 300 s.
    assert plan.wake == pytest.approx(c.time - 20 + 300 * 0.45 / 0.95)
    key = c.jobs[-1].key
    assert state["placement"]["waiting"][key]["tier"] == RACK
    assert state["placement"]["waiting"][key]["since"] == c.time - 20
    c.time = plan.wake + 0.1
    plan, state = decide(c, settings(), state)
    assert plan.decision[1].target.gpus == 8
    assert plan.wake is None
    assert state["placement"]["waiting"] == {}
    ((at, leases),) = state["placement"]["waits"][RACK]["8"]
    assert at == c.time
    assert leases == pytest.approx(300 * 0.45 / 0.95 / LEASE, abs=0.01)


def test_jobs_that_never_wait_leave_no_state():
    c = cluster()
    c.add(1, elastic="8", gpus=8, submit_time=c.time)
    plan, state = decide(c, settings("nowait"), {})
    assert plan.decision[1].target.gpus == 8
    assert state["placement"] == {"waits": {}, "waiting": {}}
    plan, state = decide(c, settings("full"), {})
    assert plan.decision[1].target is None
    assert "of any length of time" in words(plan.decision[1].reason)
    assert plan.wake is None


class Told:
    """Policy that gives job 1 eight GPUs, and the others as many as there are, in their order."""

    capabilities = Capabilities(binding_proposals=True)

    def __init__(self):
        self.asked = []

    def decide(self, question, state):
        self.asked.append(question.jobs)
        left = sum(question.capacity.values())
        proposals = []
        for job, _, directive in question.elastic():
            size = max([s for s in directive.sizes("a100") if s <= left], default=0)
            left -= size
            wishes = [
                Alternative(gpu_type="a100", gpus=size, value=1.0, reason=reasons.told("told"))
            ]
            proposals.append(Proposal(job_id=job.job_id, alternatives=tuple(wishes)))
        return tuple(proposals), state


def told(c, state, *, at_once=False):
    policy = Told()
    plan, after = decide_round(
        c.snapshot(), c.records, config=settings(), policy=policy, state=state, at_once=at_once
    )
    return policy, plan, json.loads(json.dumps(after))


BOTH = pytest.mark.parametrize("at_once", [False, True])


@BOTH
def test_a_running_jobs_wait_begins_with_its_first_refusal(at_once):
    c = cluster()
    c.add(1, elastic="4-8,unit=4", on={"g1": 4}, record={"last_change": c.time - 10_000})
    key = c.jobs[-1].key
    _, plan, state = told(c, {}, at_once=at_once)
    assert plan.decision[1].target.gpus == 4
    begin = c.time
    assert state["placement"]["waiting"][key]["since"] == begin
    c.time += 60
    _, plan, state = told(c, state, at_once=at_once)
    assert plan.decision[1].target.gpus == 4
    assert state["placement"]["waiting"][key]["since"] == begin
    c.time = begin + 150
    _, plan, state = told(c, state, at_once=at_once)
    assert plan.decision[1].target.gpus == 8


@BOTH
def test_gpus_that_a_waiting_job_leaves_idle_are_offered_to_the_others(at_once):
    c = cluster()
    c.add(1, elastic="8", gpus=8, submit_time=c.time)
    c.add(2, elastic="1-4", gpus=1, submit_time=c.time)
    policy, plan, _ = told(c, {}, at_once=at_once)
    assert policy.asked == [(1, 2), (2,)]
    assert plan.decision[1].target is None
    assert words(plan.decision[1].reason).startswith("waits for a nearer place: over 2 racks")
    assert plan.decision[2].target.gpus == 4
    # No job waits: the policy is asked once.
    c.time += 300
    policy, plan, _ = told(c, {}, at_once=at_once)
    assert policy.asked == [(1, 2)]
    assert plan.decision[1].target.gpus == 8


def spread(**record):
    """Cluster with a job over two racks, and room for it in the second one."""
    nodes = [node(f"g{i}", 4) for i in range(1, 5)]
    c = Cluster(nodes, switches=racks([n.name for n in nodes], 2))
    c.add(1, elastic="8", on={"g1": 4, "g3": 4}, record={"restart_s": 40.0} | record)
    c.add(90, on={"g2": 4})
    return c


@BOTH
def test_under_binding_proposals_a_job_comes_together_when_that_pays(at_once):
    _, plan, _ = told(spread(), {}, at_once=at_once)
    (decision,) = plan.changes
    assert decision.action is Action.MOVE
    assert decision.target.nodes == ("g3", "g4")
    # Twice as fast in one rack: the 40 s are made up for after 40 s more.
    assert words(decision.reason) == (
        "moves to one rack: 2 times as fast, pays back its 40 s in 80 s"
    )


@BOTH
def test_it_stays_when_it_ends_too_soon_and_says_so(at_once):
    c = spread(progress=0.999)
    c.jobs[0] = dataclasses.replace(c.jobs[0], start_time=c.time - 30_000)
    _, plan, _ = told(c, {}, at_once=at_once)
    assert not plan.changes
    assert words(plan.decision[1].why_here) == (
        "stays spread over 2 racks: moving together would gain 100%, less in 30 s than the 40 s it"
        " costs"
    )


def test_its_remaining_time_counts_and_not_only_the_payback_window():
    config = dataclasses.replace(
        settings(),
        resize=ResizeSettings(min_interval_s=0.0, payback_s=30.0),
        speedup=SpeedupSettings(),
    )
    for mode, moves in (("delay", True), ("near", False)):
        placement = dataclasses.replace(config.placement, mode=mode)
        c = spread(progress=0.5)
        plan, _ = decide(c, dataclasses.replace(config, placement=placement), {})
        assert bool(plan.changes) == moves


def test_plain_placement_leaves_jobs_under_binding_proposals_where_they_are():
    config = dataclasses.replace(settings(), placement=PlacementSettings())
    c = spread()
    plan, state = decide_round(
        c.snapshot(), c.records, config=config, policy=Told(), state={}, at_once=True
    )
    assert not plan.changes
    assert "placement" not in state
