"""Node arrays, free resources and best-fit."""

import numpy as np
import pytest

from slurm_elastic.config.placement_settings import TopologySettings as Links
from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Allocation, Limit, Partition
from slurm_elastic.fabric import Fabric
from slurm_elastic.placement.best_fit import NodeDemand, even_splits, fit
from slurm_elastic.placement.eligibility import elastic_jobs
from slurm_elastic.placement.free_resources import FreeResources, ResourceNeed
from slurm_elastic.placement.node_arrays import NodeArrays
from tests.support.decisions.synthetic_clusters import Cluster, node, racks


def cluster(count=4, gpus=4, rack=0, **more):
    nodes = [node(f"g{i}", gpus, **more) for i in range(1, count + 1)]
    return Cluster(nodes, switches=racks([n.name for n in nodes], rack) if rack else ())


def place(where, job_id, gpus, gpu_type="a100", **more):
    """Return the place of `fit` for a job of the cluster, its own GPUs freed."""
    frame = NodeArrays(where.snapshot())
    round_job = elastic_jobs(frame, where.records, Config())[job_id]
    resources = FreeResources(frame)
    resources.give(round_job.need, round_job.current)
    unit = round_job.directive.unit_for(gpu_type)
    found = fit(round_job.demand(frame), gpu_type, gpus, resources, unit=unit, **more)
    return dict(found.shares) if found else None


def everywhere(where):
    return NodeArrays(where.snapshot()).open


def test_even_shares_only():
    assert even_splits(6, 4) == ((2, 3), (3, 2), (6, 1))
    assert even_splits(6, 4, 2) == ((3, 2),)
    assert even_splits(16, 8, 16) == ((2, 8), (4, 4), (8, 2), (16, 1))
    assert even_splits(7, 0) == ()


def test_the_fewest_nodes_and_the_tightest():
    c = cluster()
    c.add(1, elastic="1-16")
    c.add(2, on={"g3": 2})
    assert place(c, 1, 2) == {"g3": 2}
    assert place(c, 1, 4) == {"g1": 4}
    assert place(c, 1, 8) == {"g1": 4, "g2": 4}
    assert place(c, 1, 6) == {"g1": 3, "g2": 3}


def test_nodes_that_it_holds_come_first():
    c = cluster()
    c.add(1, elastic="1-16", on={"g4": 2})
    c.add(2, on={"g3": 2})
    assert place(c, 1, 4) == {"g4": 4}
    assert place(c, 1, 8) == {"g1": 4, "g4": 4}


def test_one_rack_before_two():
    c = cluster(6, rack=3)
    c.add(1, elastic="1-24")
    c.add(2, on={"g1": 4})
    c.add(3, on={"g2": 2})
    assert place(c, 1, 8) == {"g4": 4, "g5": 4}
    assert place(c, 1, 16) == {"g3": 4, "g4": 4, "g5": 4, "g6": 4}


def test_replicas_stay_whole():
    c = cluster(5, rack=2)
    c.add(1, elastic="3-12,unit=3")
    assert place(c, 1, 6) == {"g1": 3, "g2": 3}
    c.add(2, elastic="8-16,unit=8")
    # g5 is alone in its rack: a replica of two nodes would straddle racks there
    assert place(c, 2, 16) == {"g1": 4, "g2": 4, "g3": 4, "g4": 4}


def test_a_replica_straddles_racks_only_if_no_rack_can_hold_it():
    c = cluster(6, rack=3)
    c.add(1, elastic="8-16,unit=8")
    c.add(2, on={"g1": 4})
    # two nodes are left in the first rack, three in the second: one replica each
    assert place(c, 1, 16) == {"g2": 4, "g3": 4, "g4": 4, "g5": 4}


def test_cpus_and_memory_bind_like_gpus():
    c = cluster(2, cpus=4)
    c.add(1, elastic="1-8")
    assert place(c, 1, 4) == {"g1": 2, "g2": 2}
    assert place(c, 1, 6) is None
    c = cluster(2)
    c.add(1, elastic="1-8", memory_per_gpu_mb=100_000.0)
    assert place(c, 1, 4) == {"g1": 2, "g2": 2}


@pytest.mark.parametrize("state", [{"available": False}, {"planned": True}])
def test_no_growth_into_closed_nodes_but_what_is_there_may_stay(state):
    c = Cluster([node("g1", **state), node("g2")])
    c.add(1, elastic="1-8", on={"g1": 2})
    assert place(c, 1, 2) == {"g1": 2}
    assert place(c, 1, 4) == {"g2": 4}
    assert place(c, 1, 8) is None


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"req_nodes": "g[3-4]"}, {"g3": 2, "g4": 2}),
        ({"exc_nodes": "g[1-2]"}, {"g3": 4}),
        ({"features": "fast"}, {"g4": 4}),
        ({"features": "fast&big"}, None),
        ({"features": "fast|big"}, {"g2": 4}),
        ({"features": "(fast|big)&ib"}, None),
        ({"features": "(fast|big)"}, {"g2": 4}),
        ({"features": "[fast*2&big]"}, None),
        ({"reservation": "alices"}, None),
    ],
)
def test_the_constraints_of_its_user(shape, expected):
    features = ["", "big", "", "fast"]
    nodes = [node(f"g{i}", features=frozenset({f})) for i, f in enumerate(features, start=1)]
    c = Cluster(nodes)
    c.add(1, elastic="1-8", shape=shape)
    assert place(c, 1, 4) == expected


def test_features_that_were_set_after_the_submission_was_recorded_count():
    nodes = [node(f"g{i}", features=frozenset({f})) for i, f in enumerate(["", "fast"], start=1)]
    c = Cluster(nodes)
    c.add(1, elastic="1-8", shape={"time_limit": 5, "features": ""}, features="fast")
    assert place(c, 1, 4) == {"g2": 4}
    assert place(c, 1, 5) is None


def test_a_job_with_complex_features_keeps_to_its_nodes():
    c = cluster(2)
    c.add(1, elastic="1-8", shape={"features": "[a*2&c]"}, on={"g2": 2})
    assert place(c, 1, 1) == {"g2": 1}
    assert place(c, 1, 3) is None


def test_a_job_with_alternative_features_keeps_to_the_one_of_its_nodes():
    racks = ["rack1", "rack1", "rack2", "rack2"]
    c = Cluster([node(f"g{i}", features=frozenset({r})) for i, r in enumerate(racks, start=1)])
    c.add(1, elastic="1-16", shape={"features": "[rack1|rack2]"}, on={"g3": 2})
    assert place(c, 1, 8) == {"g3": 4, "g4": 4}
    assert place(c, 1, 9) is None


def test_the_controllers_own_pins_are_no_constraint():
    c = cluster()
    c.add(1, elastic="1-8", on={"g1": 2}, required_nodes=("g1",))
    assert place(c, 1, 8) == {"g1": 4, "g2": 4}


def test_only_nodes_of_its_partition_which_must_be_up():
    c = Cluster([node("g1"), node("g2", partitions=frozenset({"other"}))])
    c.add(1, elastic="1-8")
    assert place(c, 1, 8) is None
    c.partitions = (Partition(name="gpu", up=False),)
    assert place(c, 1, 4) is None


def test_a_partition_may_cap_the_nodes():
    c = cluster()
    c.partitions = (Partition(name="gpu", max_nodes=2),)
    c.add(1, elastic="1-16")
    assert place(c, 1, 8) == {"g1": 4, "g2": 4}
    assert place(c, 1, 12) is None


def test_a_running_job_is_not_strewn_over_the_cluster():
    c = cluster()
    for i in range(1, 5):
        c.add(i, on={f"g{i}": 3})
    c.add(9, elastic="1-8", on={"g1": 1})
    assert place(c, 9, 2) == {"g1": 1, "g2": 1}
    assert place(c, 9, 4) is None


def test_types_do_not_mix():
    c = Cluster([node("g1"), node("g2", gpu_type="v100")])
    c.add(1, elastic="1-8")
    assert place(c, 1, 8) is None
    assert place(c, 1, 4, "v100") == {"g2": 4}


def test_uneven_shares_only_where_they_use_up_what_is_free():
    c = cluster(2)
    c.add(1, elastic="1-8")
    c.add(2, on={"g2": 2})
    settled = everywhere(c)
    assert place(c, 1, 6) is None
    assert place(c, 1, 6, settled=settled) == {"g1": 4, "g2": 2}
    assert place(c, 1, 5, settled=settled) is None
    unsettled = settled.copy()
    unsettled[1] = False
    assert place(c, 1, 6, settled=unsettled) is None


@pytest.mark.parametrize("resource", ["gpu", "gpu:a100", "node", "cpu", "mem"])
def test_limits(resource):
    c = cluster()
    c.add(1, elastic="1-16", on={"g1": 4})
    c.add(2, on={"g2": 4})
    each = {"node": 1, "cpu": 8, "mem": 32_000}.get(resource, 4)
    c.limits = (Limit(name="L", resource=resource, cap=3 * each, jobs=frozenset({1, 2})),)
    assert place(c, 1, 8) == {"g1": 4, "g3": 4}
    assert place(c, 1, 12) is None


def test_a_node_that_left_the_cluster_is_forgotten():
    c = cluster(2)
    c.add(1, elastic="1-8", on={"g1": 2})
    gone = Allocation.of("a100", {"g1": 2, "gone": 2})
    frame = NodeArrays(c.snapshot())
    assert frame.shares(gone.shares) == {0: 2}


def linked(devices, gpus=2, counts=(4, 4)):
    """Return the place of a job on two nodes of two link domains of two GPUs."""
    nodes = [node(f"g{i}", n) for i, n in enumerate(counts, start=1)]
    c = Cluster(nodes)
    for job_id, (name, text, held) in enumerate(devices, start=1):
        c.add(job_id, on={name: held}, devices=((name, text),))
    settings = Links(domains={"a100": 2})
    snapshot = c.snapshot()
    resources = FreeResources(NodeArrays(snapshot, Fabric.of(snapshot, settings)))
    allowed = np.ones(len(nodes), dtype=bool)
    found = fit(NodeDemand(need=ResourceNeed(99), allowed=allowed), "a100", gpus, resources)
    return dict(found.shares)


def test_among_equal_nodes_one_whose_free_gpus_are_linked():
    assert linked([("g1", "0,2", 2), ("g2", "0-1", 2)]) == {"g2": 2}
    assert linked([("g1", "0-1", 2), ("g2", "0,2", 2)]) == {"g1": 2}
    # Domains too small for the job, or not known, prefer no node.
    assert linked([("g1", "0", 1), ("g2", "1", 1)], gpus=3) == {"g1": 3}
    assert linked([("g1", "0,2", 2), ("g2", "x", 2)]) == {"g1": 2}
    # The tightest node still comes first.
    assert linked([("g1", "0,2", 2)]) == {"g1": 2}
