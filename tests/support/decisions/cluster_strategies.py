"""Hypothesis strategy for clusters whose nodes, jobs and limits are random."""

import random

from hypothesis import strategies as st

from slurm_elastic.core.cluster import Allocation, Limit
from slurm_elastic.core.plan import Measurement
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node, racks


def clusters(*, transitions=True, costs=True):
    """Return mostly full clusters; hypothesis can shrink the counts of nodes and jobs."""
    counts = (st.integers(1, 8), st.integers(1, 12), st.integers(0, 2**32))
    return st.builds(
        lambda *args: random_cluster(*args, transitions=transitions, costs=costs), *counts
    )


def random_cluster(count, jobs, seed, *, transitions=True, costs=True):
    rng = random.Random(seed)
    kinds = rng.choice([["a100"], ["a100", "v100"], ["a100", "a100", "v100"]])
    nodes = []
    for i in range(count):
        gpus = rng.choice([2, 4, 8, 8])
        nodes.append(
            node(
                f"n{i}",
                gpus,
                rng.choice(kinds),
                cpus=rng.choice([2, 3, 8]) * gpus,
                available=rng.random() < 0.93,
                planned=rng.random() < 0.07,
            )
        )
    cluster = Cluster(nodes, switches=racks([n.name for n in nodes], rng.choice([2, 4])))
    free = {n.name: n.gpus for n in nodes}
    for job_id in range(1, jobs + 1):
        _add_job(rng, cluster, free, job_id, transitions=transitions, costs=costs)
    limits = []
    for i in range(rng.choice([0, 0, 1, 2])):
        members = [j.job_id for j in cluster.jobs if rng.random() < 0.5]
        resource = rng.choice(["gpu", "gpu:a100", "node", "cpu", "mem"])
        cap = rng.randint(1, 40) * (8_000 if resource == "mem" else 1)
        limits.append(Limit(name=f"limit {i}", resource=resource, cap=cap, jobs=frozenset(members)))
    cluster.limits = tuple(limits)
    return cluster


def _add_job(rng, cluster, free, job_id, *, transitions, costs):
    kind = rng.choice([n.gpu_type for n in cluster.nodes])
    on = {}
    if rng.random() < 0.75:
        homes = [n.name for n in cluster.nodes if n.gpu_type == kind and free[n.name]]
        for name in rng.sample(homes, min(len(homes), rng.choice([1, 1, 1, 2, 3]))):
            on[name] = rng.randint(1, min(free[name], 8))
    for name, gpus in on.items():
        free[name] -= gpus
    elastic, record = "", {}
    held = sum(on.values())
    size = held or rng.choice([1, 2, 3, 4, 4, 8])
    if rng.random() < 0.7:
        unit = rng.choice([u for u in (1, 1, 2, 4) if size % u == 0])
        least = unit * rng.randint(1, size // unit)
        elastic = f"{least}-{size + unit * rng.randint(0, 8)}"
        elastic += f",unit={unit}" if unit > 1 else ""
        elastic += rng.choice(["", f",types={kind}", ",types=a100:v100"])
        if rng.random() < 0.5 and held:
            measurement = Measurement(
                gpu_type=kind,
                gpus=held,
                nodes=len(on),
                samples_per_s=10 ** rng.uniform(-2, 3),
                steps=9,
                racks=rng.randint(1, len(on)),
                compute_s=rng.choice([None, 0.01, 0.1, 1.0]),
                sync_s=rng.choice([None, 0.0, 0.01, 1.0]),
                reports=rng.choice([0, 3]),
            )
            record["measurements"] = (measurement,)
            record["gradient_bytes"] = rng.choice([None, 1e6, 1e8, 1e10])
        if costs and held:
            record["checkpoint_s"] = rng.choice([None, 0.0, 30.0])
            record["last_change"] = NOW - rng.choice([10.0, 5000.0, 5000.0])
            record["proven"] = rng.random() < 0.9
            record["held"] = rng.random() < 0.1
        if transitions and held and rng.random() < 0.1:
            record["in_transition"] = True
            target = {n: max(1, g - rng.choice([0, 1, 2])) for n, g in on.items()}
            record["target"] = Allocation.of(kind, target)
    cluster.add(
        job_id,
        elastic=elastic,
        on=on or None,
        gpus=size,
        record=record,
        gpu_type=kind if on or rng.random() < 0.5 else "",
        min_nodes=1 if on else rng.choice([1, 1, 1, 2]),
        priority=rng.randint(0, 3),
        memory_per_gpu_mb=8_000.0 if on else rng.choice([0.0, 8_000.0, 60_000.0]),
    )
