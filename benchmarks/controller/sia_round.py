"""CPU seconds of one decision of policy sia or goodput on a synthetic cluster.

python -m benchmarks.controller.sia_round [--policy sia|goodput] [--nodes 2048] [--jobs 10000]
[--rounds 4] [--limited-users 0] [--seed 0] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Mapping
from typing import Any

from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.core.application import Application, Learned, Noise, Observation, TypeProfile
from slurm_elastic.core.cluster import Limit
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.policies.goodput.marginal_value import MarginalValue
from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.policies.sia.sia import Sia
from tests.support.decisions.synthetic_clusters import Cluster, node

TYPES = ("a100", "rtx", "t4")


def invent(nodes: int, jobs: int, seed: int) -> Cluster:
    """Return 8-GPU nodes of three types, and jobs of eight applications, running or waiting."""
    rng = random.Random(seed)
    members = [node(f"n{i}", 8, TYPES[i % 3]) for i in range(nodes)]
    cluster = Cluster(members)
    free = [8] * nodes
    applications = [
        Application(
            name=f"app{k}",
            initial_batch=16,
            max_batch=4096,
            batch=64,
            types=tuple(
                TypeProfile(t, least=1, most=64, single=100.0 * rng.uniform(1, 4)) for t in TYPES
            ),
        )
        for k in range(8)
    ]
    for job_id in range(1, jobs + 1):
        application = rng.choice(applications)
        at, gpus = rng.randrange(nodes), rng.choice([1, 2, 4, 8])
        observations: tuple[Observation, ...] = ()
        on = {}
        if free[at] >= gpus:
            free[at] -= gpus
            on = {members[at].name: gpus}
            kind = members[at].gpu_type
            rate = next(t.single or 1.0 for t in application.types if t.gpu_type == kind)
            observations = tuple(
                Observation(kind, 1, g, 16, 17 / rate, 16 / rate) for g in (1, 2, 4, 8) if g <= gpus
            )
        learned = Learned(application, observations, Noise(1.0, 400.0 + rng.random()))
        cluster.add(job_id, elastic="1-64", on=on or None, gpus=1, record={"learned": learned})
    return cluster


def limits(cluster: Cluster, users: int) -> tuple[Limit, ...]:
    """Return limits that bind: users share the jobs, and may use half of the GPUs together."""
    cap = sum(node.gpus for node in cluster.nodes) // (2 * users)
    ids = [job.job_id for job in cluster.jobs]
    return tuple(
        Limit(name=f"user {k}", resource="gpu", cap=cap, jobs=frozenset(ids[k::users]))
        for k in range(users)
    )


def _later(question: Question, seconds: float = 30.0) -> Question:
    """Return the question of the next round, with a little progress of each job."""
    snapshot = dataclasses.replace(question.snapshot, time=question.snapshot.time + seconds)
    records = {
        job_id: dataclasses.replace(record, progress=(record.progress or 0.1) + 1e-4)
        for job_id, record in question.records.items()
    }
    return dataclasses.replace(question, snapshot=snapshot, records=records)


def main() -> None:
    """Print CPU seconds of the first and of later rounds."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.controller.sia_round", description=__doc__
    )
    parser.add_argument("--policy", choices=("sia", "goodput"), default="sia")
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--limited-users", type=int, default=0, help="so many users, each with a limit that binds"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cluster = invent(options.nodes, options.jobs, options.seed)
    if options.limited_users:
        cluster.limits = limits(cluster, options.limited_users)
    config = Config(controller=ControllerSettings(queue="controller", policy=options.policy))
    capacity = dict.fromkeys(TYPES, 0)
    for one in cluster.nodes:
        capacity[one.gpu_type] += one.gpus
    model = SpeedModel.fit(config.speedup, ())
    question = Question(
        snapshot=cluster.snapshot(),
        records=cluster.records,
        models=dict.fromkeys(cluster.records, model),
        jobs=tuple(cluster.records),
        capacity=capacity,
    )
    policy: Sia = Sia(config)
    if options.policy == "goodput":
        policy = MarginalValue(config)
    state: Mapping[str, Any] = {}
    seconds = []
    for _ in range(options.rounds):
        begin = time.process_time()
        _, state = policy.decide(question, state)
        seconds.append(time.process_time() - begin)
        question = _later(question)
    columns = len(policy.weigh(question).table.configurations)
    figures = {
        "gpus": sum(capacity.values()),
        "jobs": options.jobs,
        "configurations": columns,
        "first_cpu_s": seconds[0],
        "later_cpu_s": statistics.median(seconds[1:] or seconds),
        "worst_later_cpu_s": max(seconds[1:] or seconds),
    }
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    print(
        f"{figures['jobs']} jobs, {figures['gpus']} GPUs, {columns} configurations:"
        f" {figures['first_cpu_s']:.3f} s of CPU at first, then {figures['later_cpu_s']:.3f} s,"
        f" at worst {figures['worst_later_cpu_s']:.3f} s"
    )


if __name__ == "__main__":
    main()
