"""Spatial groups on random nodes: Slurm's pick of GPUs never tears one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.config.placement_settings import TopologySettings
from slurm_elastic.fabric import Fabric
from slurm_elastic.placement.best_fit import NodeDemand, fit, takes
from slurm_elastic.placement.free_resources import FreeResources, ResourceNeed
from slurm_elastic.placement.node_arrays import NodeArrays
from tests.support.decisions.synthetic_clusters import Cluster, node

NEED = ResourceNeed(99)


@st.composite
def occupied(draw):
    """Nodes of eight GPUs, some of them in use, and the GPUs of a link domain."""
    size = draw(st.sampled_from([1, 2, 4, 8]))
    c = Cluster([node(f"g{i}", 8) for i in range(1, draw(st.integers(1, 4)) + 1)])
    for at, n in enumerate(c.nodes, start=1):
        if used := draw(st.sets(st.integers(0, 7))):
            c.add(at, on={n.name: len(used)}, devices=((n.name, ",".join(map(str, used))),))
    return c, size


def free_of(c, name):
    used = {i for job in c.jobs for i in job.indexes.get(name, ())}
    return [i for i in range(8) if i not in used]


def whole(picked, group, size):
    """Return whether consecutive groups of these GPUs each lie within one domain."""
    groups = [picked[i : i + group] for i in range(0, len(picked), group)]
    return all(len({i // size for i in members}) == 1 for members in groups)


@given(occupied(), st.integers(1, 4), st.integers(2, 8))
def test_no_group_is_torn_and_a_free_domain_is_found(cluster_size, groups, group):
    c, size = cluster_size
    snapshot = c.snapshot()
    fabric = Fabric.of(snapshot, TopologySettings(domains={"a100": size}))
    resources = FreeResources(NodeArrays(snapshot, fabric))
    allowed = np.ones(len(snapshot.nodes), dtype=bool)
    demand = NodeDemand(need=NEED, allowed=allowed, group_reach="domain")
    gpus = groups * group
    place = fit(demand, "a100", gpus, resources, unit=group)
    for name, count in place.shares if place else ():
        assert count % group == 0
        assert whole(free_of(c, name)[:count], group, size)
    if place is not None:
        assert takes(demand, place, resources, unit=group)
    elif groups == 1:
        free = [free_of(c, n.name)[:group] for n in snapshot.nodes]
        assert not any(len(picked) == group and whole(picked, group, size) for picked in free)
