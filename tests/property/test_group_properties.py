"""Spatial groups on random nodes: neither rounds nor Slurm's pick of GPUs tears one."""

import json
import random
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.config.placement_settings import TopologySettings
from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings
from slurm_elastic.core.plan import Measurement
from slurm_elastic.fabric import Fabric
from slurm_elastic.placement.best_fit import NodeDemand, fit, takes
from slurm_elastic.placement.free_resources import FreeResources, ResourceNeed
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.policies.policy_protocol import load
from slurm_elastic.round import decide_round
from tests.support.decisions.synthetic_clusters import Cluster, node, racks

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


#: GPUs of each node where a group takes two of them.
WHOLE = 4


def invent(rng, group):
    """Draw nodes in racks, rigid jobs on a part of them, and spatial jobs in whole groups."""
    sizes = [WHOLE] if group > WHOLE else [4, 4, 6, 8]
    nodes = [node(f"n{i}", rng.choice(sizes)) for i in range(rng.randint(2, 8))]
    c = Cluster(nodes, switches=racks([n.name for n in nodes], rng.choice([2, 3, 4])))
    free = {n.name: n.gpus for n in nodes}
    for job_id in range(1, rng.randint(2, 7)):
        names = rng.sample(sorted(free), min(len(free), rng.choice([1, 1, 2])))
        if rng.random() < 0.4:
            on = {names[0]: rng.randint(1, free[names[0]])} if free[names[0]] else {}
            if on:
                c.add(job_id, on=on)
        else:
            on = {n: free[n] - free[n] % group for n in names if free[n] >= group}
            on = on if rng.random() < 0.5 else {}
            held = sum(on.values())
            least = group * rng.randint(1, held // group) if held else group * rng.choice([1, 1, 2])
            directive = f"{least}-{max(held, least) * rng.choice([1, 2, 4])}"
            record = {}
            if held:
                speed = held * rng.uniform(1, 2)
                measurement = Measurement(
                    gpu_type="a100", gpus=held, nodes=len(on), samples_per_s=speed, steps=9
                )
                record = {"measurements": (measurement,)}
            c.add(
                job_id,
                elastic=f"{directive},unit={group},parallel=spatial",
                on=on or None,
                gpus=held or least,
                record=record,
            )
        for name, gpus in on.items():
            free[name] -= gpus
    return c


def check_racks(c, free, target, group):
    """Check that groups over nodes lie in one rack each, unless there is no such place.

    Args:
        c: the cluster.
        free: GPUs of each node, without those of any other job.
        target: of the job.
        group: GPUs of each group.
    """
    rack_of = {name: s.name for s in c.switches if not s.level for name in s.nodes}
    (share,) = {gpus for _, gpus in target.shares}
    assert group % share == 0
    nodes_of_group = group // share
    taken = Counter(rack_of[name] for name in target.nodes)
    if any(count % nodes_of_group for count in taken.values()):
        idle = Counter(rack_of[name] for name, gpus in free.items() if gpus >= share)
        groups = sum(count // nodes_of_group for count in idle.values())
        assert groups * nodes_of_group < len(target.nodes)


@settings(max_examples=80)
@given(
    st.sampled_from(["sia", "goodput", "fair"]),
    st.booleans(),
    st.sampled_from([2, 3, 4, 8]),
    st.integers(0, 2**32),
)
def test_rounds_give_whole_groups_on_one_node_or_in_one_rack(name, at_once, group, seed):
    rng = random.Random(seed)
    reach = "any" if group > WHOLE else rng.choice(["domain", "node", "any"])
    config = Config(
        controller=ControllerSettings(policy=name, queue=rng.choice(["slurm", "controller"])),
        resize=ResizeSettings(min_interval_s=0.0, per_hour=1000, min_gain=0.0, restart_s=0.0),
        topology=TopologySettings(spatial_reach=reach),
    )
    c = invent(rng, group)
    policy, state, plan = load(config), {}, None
    for _ in range(2):
        before = c.snapshot()
        plan, state = decide_round(
            before, c.records, config=config, policy=policy, state=state, previous=plan,
            at_once=at_once,
        )  # fmt: skip
        c.carry_out(plan)
        after = {n.name: n.free_gpus for n in c.snapshot().nodes}
        for decision in plan.decisions:
            target, current = decision.target, decision.current
            if target is None or target == current:
                continue
            assert before.job[decision.job_id].directive.allows(target.gpus, target.gpu_type)
            if group <= WHOLE:
                assert not any(gpus % group for _, gpus in target.shares)
                continue
            own = dict(target.shares)
            free = {name: gpus + own.get(name, 0) for name, gpus in after.items()}
            if current is None and not at_once:  # it starts on what was free before
                free = {n.name: min(free[n.name], n.free_gpus) for n in before.nodes}
            check_racks(c, free, target, group)
        c.time += 700.0
        state = json.loads(json.dumps(state))
