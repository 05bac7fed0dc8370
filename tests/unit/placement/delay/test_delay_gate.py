"""Delay gate (`[placement] mode = "delay"`): waits, and the places taken instead."""

import pytest

from slurm_elastic.config.placement_settings import PlacementSettings
from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings, SpeedupSettings
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Alternative, Measurement, Proposal
from slurm_elastic.placement.delay.delay_gate import DelayGate
from slurm_elastic.placement.eligibility import elastic_jobs
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.policies.policy_protocol import Capabilities
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import Cluster, node, racks

#: Far places cost half the speed, as configured, unless measured.
STATED = SpeedupSettings(loss_across_nodes=0.5)
DELAY = PlacementSettings(mode="delay", timers="fixed", wait_node_s=100.0, wait_rack_s=300.0)


def config(placement=DELAY):
    return Config(
        controller=ControllerSettings(queue="controller"), speedup=STATED, placement=placement,
        resize=ResizeSettings(min_interval_s=0.0, payback_s=1e6),
    )  # fmt: skip


def cluster():
    """Cluster of two racks of two nodes of four GPUs; one of each is taken by a rigid job."""
    nodes = [node(f"g{i}", 4) for i in range(1, 5)]
    c = Cluster(nodes, switches=racks([n.name for n in nodes], 2))
    c.add(90, on={"g2": 4})
    c.add(91, on={"g4": 4})
    return c


def target(c, job_id, settings):
    plan, _ = decide_round(
        c.snapshot(), c.records, config=settings, policy=FairShare(settings), state={}
    )
    decision = plan.decision[job_id]
    return dict(decision.target.shares) if decision.target else None


def waiting(c, seconds, **more):
    c.add(1, elastic="8", gpus=8, submit_time=c.time - seconds, **more)
    return c


@pytest.mark.parametrize(("seconds", "starts"), [(0, False), (299, False), (300, True)])
def test_a_job_that_suffers_waits_for_one_rack_and_not_for_ever(seconds, starts):
    found = target(waiting(cluster(), seconds), 1, config())
    assert found == ({"g1": 4, "g3": 4} if starts else None)


def test_without_delay_it_starts_at_once():
    assert target(waiting(cluster(), 0), 1, config(PlacementSettings())) == {"g1": 4, "g3": 4}


def test_a_job_that_does_not_suffer_starts_at_once():
    c = cluster()
    seen = tuple(
        Measurement(gpu_type="a100", gpus=8, nodes=n, samples_per_s=100.0, steps=100)
        for n in (1, 2, 4)
    )
    waiting(c, 0, record={"measurements": seen})
    patient = PlacementSettings(mode="delay", tolerance=0.6)
    assert target(c, 1, config(patient)) == {"g1": 4, "g3": 4}


def test_a_refused_growth_leaves_the_job_what_it_has():
    c = cluster()
    c.add(1, elastic="4-8", on={"g1": 4}, record={"last_change": c.time - 10})
    assert target(c, 1, config()) == {"g1": 4}
    c = cluster()
    c.add(1, elastic="4-8", on={"g1": 4}, record={"last_change": c.time - 301})
    assert target(c, 1, config(PlacementSettings(mode="near"))) == target(c, 1, config())


def test_no_job_waits_for_an_impossible_place():
    nodes = [node(f"g{i}", 4) for i in range(1, 5)]
    c = Cluster(nodes, switches=racks([n.name for n in nodes], 2))
    c.add(1, elastic="16", gpus=16, submit_time=c.time)
    assert target(c, 1, config()) == {f"g{i}": 4 for i in range(1, 5)}


def test_the_words_say_what_it_waits_for():
    c = waiting(cluster(), 60)
    frame = NodeArrays(c.snapshot())
    settings = config()
    round_job = elastic_jobs(frame, c.records, settings)[1]
    gate = DelayGate(settings.placement, frame)
    refusal = gate.refusal(round_job, Allocation.of("a100", {"g1": 4, "g3": 4}))
    assert words(refusal) == (
        "over 2 racks it would run at 0.50 of its speed in one rack; it waited 60 s of at most"
        " 300 s for that"
    )
    plan, _ = decide_round(
        c.snapshot(), c.records, config=settings, policy=FairShare(settings), state={}
    )
    assert words(plan.decision[1].reason) == f"waits for a nearer place: {words(refusal)}"
    thin = Allocation.of("a100", {"g1": 2, "g2": 2})
    c.add(2, elastic="4", gpus=4, submit_time=c.time - 99)
    frame = NodeArrays(c.snapshot())
    round_job = elastic_jobs(frame, c.records, settings)[2]
    assert "over 2 nodes" in words(DelayGate(settings.placement, frame).refusal(round_job, thin))


def test_giving_up_gpus_and_moving_are_not_its_business():
    c = cluster()
    c.add(1, elastic="2-8", on={"g1": 4})
    frame = NodeArrays(c.snapshot())
    round_job = elastic_jobs(frame, c.records, config())[1]
    gate = DelayGate(DELAY, frame)
    assert gate.refusal(round_job, Allocation.of("a100", {"g1": 1, "g3": 1})) is None
    assert gate.refusal(round_job, Allocation.of("a100", {"g1": 2, "g3": 2})) is None


@pytest.mark.parametrize("mode", ["near", "delay"])
def test_binding_proposals_get_whole_nodes_of_one_rack(mode):
    class Told:
        capabilities = Capabilities(binding_proposals=True)

        def decide(self, question, state):
            eight = Alternative(gpu_type="a100", gpus=8, value=1.0)
            return tuple(Proposal(job_id=j, alternatives=(eight,)) for j in question.jobs), state

    nodes = [node(f"g{i}", 4) for i in range(1, 6)]
    c = Cluster(nodes, switches=racks([n.name for n in nodes], 2))
    c.add(90, on={"g1": 1})
    c.add(1, elastic="8", gpus=8, submit_time=c.time)
    settings = config(PlacementSettings(mode=mode))
    plan, _ = decide_round(
        c.snapshot(), c.records, config=settings, policy=Told(), state={}, at_once=True
    )
    held = plan.decision[1].target
    assert held is not None
    assert held.nodes == (("g3", "g4") if mode == "delay" else ("g2", "g3"))


def stalled(sync_s):
    """Measurement over two racks: a second of computing, and a time of waiting."""
    return Measurement(
        gpu_type="a100", gpus=8, nodes=2, racks=2, samples_per_s=100.0, steps=100,
        compute_s=1.0, sync_s=sync_s, reports=9,
    )  # fmt: skip


@pytest.mark.parametrize(("sync_s", "starts"), [(0.03, True), (0.5, False)])
def test_no_job_waits_for_more_than_its_steps_were_measured_to_stall(sync_s, starts):
    found = target(waiting(cluster(), 0, record={"measurements": (stalled(sync_s),)}), 1, config())
    assert found == ({"g1": 4, "g3": 4} if starts else None)


@pytest.mark.parametrize(("sync_s", "moves"), [(0.03, False), (0.5, True)])
def test_no_job_moves_for_more_than_its_steps_were_measured_to_stall(sync_s, moves):
    nodes = [node(f"g{i}", 4) for i in range(1, 5)]
    c = Cluster(nodes, switches=racks([n.name for n in nodes], 2))
    c.add(1, elastic="8", on={"g1": 4, "g3": 4}, record={"measurements": (stalled(sync_s),)})
    found = target(c, 1, config())
    assert (found in ({"g1": 4, "g2": 4}, {"g3": 4, "g4": 4})) == moves
    assert moves or found == {"g1": 4, "g3": 4}


@pytest.mark.parametrize("preempts", [False, True])
def test_a_job_that_waits_for_a_nearer_place_delays_no_other(preempts):
    c = cluster()
    more = {"priority": 900} if preempts else {}
    waiting(c, 50, **more)
    c.add(2, elastic="8", gpus=8, submit_time=c.time, record={"measurements": (stalled(0.01),)})
    assert target(c, 1, config()) is None
    assert target(c, 2, config()) == {"g1": 4, "g3": 4}
    plan, _ = decide_round(
        c.snapshot(), c.records, config=config(), policy=FairShare(config()), state={}
    )
    assert words(plan.decision[1].reason).startswith("waits for a nearer place: over 2 racks")


def test_no_job_is_preempted_for_a_place_that_would_be_refused():
    c = cluster()
    c.add(2, elastic="4", on={"g1": 4}, priority=1)
    c.add(3, elastic="4", on={"g3": 4}, priority=1)
    waiting(c, 50, priority=900)
    assert target(c, 2, config()) == {"g1": 4}
    assert target(c, 3, config()) == {"g3": 4}
