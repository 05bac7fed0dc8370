"""Rounds use link speeds, configured or measured, and the present users of each link."""

import dataclasses

import pytest

from slurm_elastic.config.placement_settings import PlacementSettings, TopologySettings
from slurm_elastic.config.schema import Config, ControllerSettings, SpeedupSettings
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Measurement
from slurm_elastic.placement.eligibility import elastic_jobs
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.policies.policy_protocol import load
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import Cluster, node, racks

SPEEDS = {"node": 2400.0, "rack": 100.0, "spine": 10.0}
VGG, SMALL = 500e6, 1e6
SPREAD = {"g1": 4, "g3": 4}


def config(speeds=SPEEDS, loss=0.1):
    return Config(
        controller=ControllerSettings(queue="controller"),
        placement=PlacementSettings(mode="delay", timers="fixed"),
        speedup=SpeedupSettings(loss_across_nodes=loss),
        topology=TopologySettings(speeds=speeds),
    )


def seen(gpus=4, nodes=1, racks=1, *, compute=0.4, sync=0.0, reports=3):
    """Measurement with 0.2 s of computing on 8 GPUs."""
    return Measurement(
        gpu_type="a100", gpus=gpus, nodes=nodes, racks=racks, samples_per_s=640.0, steps=50,
        compute_s=compute, sync_s=sync, reports=reports,
    )  # fmt: skip


def cluster(gradient_bytes, *measurements, other=None):
    """Cluster of two racks of two nodes of four GPUs, one of each taken; job 1 waits for 8 GPUs."""
    nodes = [node(f"g{i}", 4) for i in range(1, 5)]
    c = Cluster(nodes, switches=racks([n.name for n in nodes], 2))
    c.add(90, on={"g2": 4})
    c.add(91, on={"g4": 4}, elastic="4" if other else "", record=other)
    known = {"gradient_bytes": gradient_bytes, "measurements": measurements or (seen(),)}
    c.add(1, elastic="8", gpus=8, submit_time=c.time, record=known)
    return c


def decided(c, settings, job_id=1):
    plan, _ = decide_round(
        c.snapshot(), c.records, config=settings, policy=FairShare(settings), state={}
    )
    return plan.decision[job_id]


def starts(c, settings):
    found = decided(c, settings).target
    return found is not None and dict(found.shares) == SPREAD


def test_a_job_of_many_gradients_waits_at_a_slow_spine_a_small_one_does_not():
    assert not starts(cluster(VGG), config())
    assert "over 2 racks it would run at 0.40" in words(decided(cluster(VGG), config()).reason)
    assert starts(cluster(SMALL), config())


def test_the_speed_of_the_spine_decides_not_the_stated_losses():
    assert not starts(cluster(VGG), config(loss=0.0)), "stated: distance costs nothing"
    assert starts(cluster(VGG), config({**SPEEDS, "rack": 4000.0, "spine": 4000.0}, loss=0.3))
    for unknown in (cluster(None), cluster(VGG, seen(compute=None))):
        assert starts(unknown, config(loss=0.0)), "too little is known: the stated losses count"
        assert not starts(unknown, config(loss=0.3))


def test_measured_links_count_where_none_are_configured():
    bare = config({}, loss=0.0)
    assert starts(cluster(VGG), bare)
    told = {"gradient_bytes": VGG, "measurements": (seen(8, 2, 2, compute=0.2, sync=0.4),)}
    # Job 91 once ran across the racks. Owners are equal where ids are odd.
    assert not starts(cluster(VGG, other=told), bare)
    assert starts(cluster(VGG, other={**told, "gradient_bytes": None}), bare)
    fast = config({"spine": 4000.0}, loss=0.0)
    assert starts(cluster(VGG, other=told), fast), "what is configured wins"


@pytest.mark.parametrize(("crossing", "share"), [(0, 1.0), (1, 0.5), (2, 1 / 3)])
def test_jobs_that_already_cross_an_uplink_share_it(crossing, share):
    nodes = [node(f"g{i}", 4) for i in range(1, 5)]
    c = Cluster(nodes, switches=racks([n.name for n in nodes], 2))
    for i in range(crossing):
        c.add(90 + i, on={"g2": 1, "g4": 1})
    known = {"gradient_bytes": VGG, "measurements": (seen(),)}
    c.add(1, elastic="8", gpus=8, record=known)
    frame = NodeArrays(c.snapshot())
    round_job = elastic_jobs(frame, c.records, config())[1]
    place = Allocation.of("a100", SPREAD)
    assert round_job.speed(frame, place) == round_job.model.speed("a100", 8, 2, 2, share=share)
    near = Allocation.of("a100", {"g1": 4, "g2": 4})
    assert round_job.speed(frame, near) == round_job.model.speed("a100", 8, 2, 1)


def test_where_it_is_the_others_are_in_its_measurements():
    nodes = [node(f"g{i}", 4) for i in range(1, 5)]
    c = Cluster(nodes, switches=racks([n.name for n in nodes], 2))
    c.add(90, on={"g2": 1, "g4": 1})
    known = {"gradient_bytes": VGG, "measurements": (seen(8, 2, 2, compute=0.2, sync=0.8),)}
    c.add(1, elastic="4-8", on=SPREAD, record=known)
    frame = NodeArrays(c.snapshot())
    round_job = elastic_jobs(frame, c.records, config())[1]
    assert round_job.speed(frame, round_job.current) == pytest.approx(640.0)
    elsewhere = Allocation.of("a100", {"g2": 4, "g4": 4})
    assert round_job.speed(frame, elsewhere) < 640.0
    assert frame.crowd(("g2", "g4"), 90) == 1, "it does not count itself"


@pytest.mark.parametrize(
    ("size", "starts_at_once", "text"),
    [
        (VGG, False, "over 2 racks it would compute 0.33 of its time"),
        (SMALL, True, "distance costs it nothing"),
    ],
)
def test_dally_asks_what_the_links_cost(size, starts_at_once, text):
    controller = ControllerSettings(queue="controller", policy="dally")
    settings = dataclasses.replace(config(), controller=controller)
    c = cluster(size)
    plan, _ = decide_round(
        c.snapshot(), c.records, config=settings, policy=load(settings), state={}
    )
    found = plan.decision[1]
    assert (found.target is not None) is starts_at_once
    assert text in words(found.reason)
