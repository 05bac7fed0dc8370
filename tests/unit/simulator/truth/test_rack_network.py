"""Racks in simulations: the cost of crossing them, and sharing of uplinks."""

import pytest

from slurm_elastic.config.placement_settings import PlacementSettings
from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.policies.policy_protocol import load
from slurm_elastic.simulator.applications import describe
from slurm_elastic.simulator.cluster_state import SimulatedCluster
from slurm_elastic.simulator.simulated_job import SimulatedJob
from slurm_elastic.simulator.simulation import simulate
from slurm_elastic.simulator.truth.ground_truth import GroundTruth
from slurm_elastic.simulator.truth.rack_network import Network
from slurm_elastic.simulator.workloads import (
    application_profiles,
    builtin_profiles,
    cluster_text,
    workload,
)

NODES = ("a", "b", "c", "d", "e")


def network(**more):
    fields = {"rack_nodes": 2, "uplink_bytes_s": 10.0, "gradient_bytes": {"m": 100.0}}
    return Network(**(fields | more))


def racks(net):
    return {n: s.name for s in net.switches(NODES) if not s.children for n in s.nodes}


def on(*nodes):
    return "m", Allocation.of("v100", dict.fromkeys(nodes, 1))


def test_racks_are_made_in_the_order_of_nodes():
    assert racks(network()) == {
        "a": "rack0", "b": "rack0", "c": "rack1", "d": "rack1", "e": "rack2"
    }  # fmt: skip
    assert network().switches(NODES)[-1].children == ("rack0", "rack1", "rack2")


def test_only_who_crosses_pays_and_sharing_costs():
    net = network()
    alone = net.extra_s({1: on("a", "c"), 2: on("c", "d"), 3: on("e")}, racks(net))
    assert alone == {1: pytest.approx(10.0)}
    shared = net.extra_s({1: on("a", "c"), 2: on("b", "e")}, racks(net))
    assert shared == {1: pytest.approx(20.0), 2: pytest.approx(20.0)}
    wide = net.extra_s({1: on("a", "c", "e")}, racks(net))
    assert wide[1] == pytest.approx(2 * 2 / 3 * 10)
    jam = network(congestion=4.0)
    assert jam.extra_s({1: on("a", "c")}, racks(jam)) == {1: pytest.approx(40.0)}
    assert net.extra_s({1: ("unknown", on("a", "c")[1])}, racks(net)) == {1: 0.0}


@pytest.fixture(scope="module")
def two_wide_jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    builtin_profiles.write(folder)
    path = folder / "w.csv"
    path.write_text(
        "name,time,application,num_replicas,batch_size,category\n"
        "one,0,resnet18,8,1024,rigid\ntwo,0,resnet18,8,1024,rigid\n"
    )
    jobs = workload.read(path)
    cluster = cluster_text.parse("v100:4x4")
    return jobs, application_profiles.read(folder, jobs.applications, cluster.types), cluster


def simulated(two_wide_jobs, net):
    config = Config(controller=ControllerSettings(policy="fifo", queue="controller"))
    return simulate(*two_wide_jobs, config=config, policy=load(config), network=net)


def test_a_job_over_racks_takes_longer_and_the_loss_is_counted(two_wide_jobs):
    flat = simulated(two_wide_jobs, None)
    fits = simulated(two_wide_jobs, network(gradient_bytes={"resnet18": 1e9}))
    single = network(rack_nodes=1, uplink_bytes_s=1e10, gradient_bytes={"resnet18": 1e9})
    spread = simulated(two_wide_jobs, single)
    assert fits.crossing_gpu_s == 0
    assert fits.summary()["avg_jct_h"] == flat.summary()["avg_jct_h"]
    assert spread.crossing_gpu_s > 0
    assert spread.summary()["avg_jct_h"] > flat.summary()["avg_jct_h"]
    gained = sum(j.gpu_s for j in spread.jobs) - sum(j.gpu_s for j in flat.jobs)
    assert spread.crossing_gpu_s == pytest.approx(gained, rel=0.02)


def test_jobs_measure_what_crossing_racks_costs_them(two_wide_jobs, monkeypatch):
    measured = {}

    def record(world, job, original=SimulatedCluster._record):
        job_record = original(world, job)
        measured.update(
            {(job.job_id, m.racks, m.nodes): (m, job_record) for m in job_record.measurements}
        )
        return job_record

    monkeypatch.setattr(SimulatedCluster, "_record", record)
    simulated(two_wide_jobs, None)
    assert {m.sync_s for m, _ in measured.values()} <= {None}, (
        "nobody asks where there are no racks"
    )
    measured.clear()
    net = network(rack_nodes=1, uplink_bytes_s=1e10, gradient_bytes={"resnet18": 1e9})
    simulated(two_wide_jobs, net)
    (_, racks, nodes), (m, job_record) = next(iter(measured.items()))
    assert (racks, nodes, job_record.gradient_bytes) == (2, 2, 1e9)
    assert m.sync_s > 0.1, "a ring over two racks: 1e9 bytes at 1e10 bytes/s"
    assert m.samples_per_s == pytest.approx(1024 / (m.compute_s + m.sync_s), rel=0.01)


def rigid(name, time_s, gpus):
    return f"{name},{time_s:.0f},resnet18,{gpus},{128 * gpus},rigid\n"


def test_the_event_clock_wakes_when_a_wait_ends(tmp_path):
    """A job waits for one rack while other jobs, and the next round, are far away."""
    builtin_profiles.write(tmp_path)
    cluster = cluster_text.parse("v100:4x4")

    def ran(*rows, **placement):
        path = tmp_path / "w.csv"
        path.write_text("name,time,application,num_replicas,batch_size,category\n" + "".join(rows))
        jobs = workload.read(path)
        config = Config(
            controller=ControllerSettings(policy="fifo", queue="controller"),
            placement=PlacementSettings(**placement),
        )
        result = simulate(
            jobs, application_profiles.read(tmp_path, jobs.applications, cluster.types), cluster,
            config=config, policy=load(config), interval_s=3600.0, clock="event",
            network=network(uplink_bytes_s=1e10, gradient_bytes={"resnet18": 1e9}),
        )  # fmt: skip
        return {j.name: j for j in result.jobs}

    first = rigid("first", 0, 4)
    end = ran(first)["first"].completion_s
    others = [rigid("second", end / 2, 4), rigid("third", end / 2, 4)]
    wide = rigid("wide", end + 10, 8)
    results = ran(first, *others, wide)
    assert results["wide"].start_s == pytest.approx(end + 10, abs=1)
    stated = {"mode": "delay", "timers": "fixed", "wait_rack_s": 77.0}
    results = ran(first, *others, wide, **stated)
    assert results["second"].completion_s > end + 100
    assert results["wide"].start_s == pytest.approx(end + 10 + 77, abs=1)


@pytest.mark.parametrize(("costs", "starts"), [(False, 1), (True, 2)])
def test_with_racks_a_move_in_the_same_shape_is_a_restart(two_wide_jobs, costs, starts):
    jobs, tables, cluster = two_wide_jobs
    truth = GroundTruth(tables["resnet18"])
    submitted = jobs.jobs[0]
    job = SimulatedJob(
        submitted, truth, describe(submitted, truth, cluster), job_id=1, restart_s=30.0
    )
    for nodes in (("a", "b"), ("c", "d")):
        job.hold(Allocation.of("v100", dict.fromkeys(nodes, 4)), moving_costs=costs)
        # Who is restarting pays nothing more for a move.
        assert job.starts == 1
    job.advance(submitted.time_s + 60.0)
    job.hold(Allocation.of("v100", {"a": 4, "b": 4}), moving_costs=costs)
    assert job.starts == starts
    assert (job.restart_left_s > 0) == costs
    job.hold(job.allocation, moving_costs=costs)
    assert job.starts == starts
