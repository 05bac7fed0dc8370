"""CPU seconds of one whole round on a synthetic busy cluster, by stage.

    python -m benchmarks.controller.round [--nodes 1000] [--jobs 2000] [--repeat 5] [--links]
        [--json]

`first` starts with empty caches, as after a restart; `later` is the median of
the rounds after it, in which every tenth job has a new measurement. The stages
are those of `first`. The fair policy, with changes costing nothing, is compared
with the plain loop that looks at every job again for every GPU: its time as a
multiple of ours, and both divisions' value (sum of utilities, larger is better).
With `--links` the speed of links is configured, and measured jobs tell stalls and gradient bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from slurm_elastic import round as rounds
from slurm_elastic.config.placement_settings import TopologySettings
from slurm_elastic.config.schema import Config, ResizeSettings
from slurm_elastic.core.plan import Plan
from slurm_elastic.models import speedup
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.placement import decisions
from slurm_elastic.placement.assignment import Assignment
from slurm_elastic.policies import utility_curves
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.policies.policy_protocol import Question
from tests.support.decisions.synthetic_clusters import Cluster, busy


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.controller.round", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--links", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(
        options.nodes, options.jobs, repeat=options.repeat, seed=options.seed, links=options.links
    )
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        print(f"{name:24} {value:.3f}" if isinstance(value, float) else f"{name:24} {value}")


def measure(
    nodes: int, jobs: int, *, repeat: int, seed: int, links: bool = False
) -> dict[str, Any]:
    """Return all figures; times are CPU seconds of this process."""
    cluster = busy(nodes, jobs, seed=seed)
    config = Config()
    if links:
        _tell_stalls(cluster, random.Random(seed))
        config = Config(
            topology=TopologySettings(speeds={"node": 2400.0, "rack": 100.0, "spine": 10.0})
        )
    stages: Counter[str] = Counter()
    _forget()
    with _timed(stages):
        begin = time.process_time()
        plan = _decide(cluster, config)
        first = time.process_time() - begin
    later = []
    for turn in range(repeat):
        _remeasure(cluster, turn)
        begin = time.process_time()
        _decide(cluster, config)
        later.append(time.process_time() - begin)
    snapshot = cluster.snapshot()
    return {
        "nodes": nodes,
        "gpus": sum(n.gpus for n in snapshot.nodes),
        "gpus_used": sum(n.used_gpus for n in snapshot.nodes),
        "jobs": {
            f"{'elastic' if j else 'rigid'} {state}": count
            for (j, state), count in sorted(
                Counter((bool(j.submission), j.state.value) for j in snapshot.jobs).items()
            )
        },
        "changes": dict(Counter(d.action.value for d in plan.changes)),
        "claims": len(plan.claims),
        "first_cpu_s": first,
        "later_cpu_s": statistics.median(later) if later else None,
        "stages_cpu_s": {name: round(value, 4) for name, value in stages.items()},
        "against_plain_loop": against_plain_loop(busy(nodes, jobs, seed=seed)),
    }


def against_plain_loop(cluster: Cluster) -> dict[str, float]:
    """Compare the fair policy with the loop that visits every job again for every GPU."""
    question = _question(cluster)
    _forget()
    begin = time.process_time()
    free_of_cost = Config(resize=ResizeSettings(restart_s=0.0, min_gain=0.0))
    proposals, _ = FairShare(free_of_cost).decide(question, {})
    ours_s = time.process_time() - begin
    _forget()
    begin = time.process_time()
    plain = _plain(question)
    plain_s = time.process_time() - begin
    ours = {p.job_id: (p.alternatives[0].gpu_type, p.alternatives[0].gpus) for p in proposals}
    return {
        "times_as_slow": round(plain_s / ours_s, 1),
        "value_ours": round(_value(question, ours), 3),
        "value_plain": round(_value(question, plain), 3),
    }


def _tell_stalls(cluster: Cluster, rng: random.Random) -> None:
    for job_id, record in cluster.records.items():
        measurements = tuple(
            dataclasses.replace(
                m,
                racks=min(m.nodes, 2),
                compute_s=rng.uniform(0.05, 0.5),
                sync_s=rng.uniform(0.001, 0.3),
                reports=5,
            )
            for m in record.measurements
        )
        size = rng.choice([1e6, 1e8, 5e8])
        known = dataclasses.replace(record, measurements=measurements, gradient_bytes=size)
        cluster.records[job_id] = known


def _decide(cluster: Cluster, config: Config) -> Plan:
    plan, _ = rounds.decide_round(
        cluster.snapshot(), cluster.records, config=config, policy=FairShare(config), state={}
    )
    return plan


def _remeasure(cluster: Cluster, turn: int) -> None:
    for job_id, record in cluster.records.items():
        if job_id % 10 == turn % 10 and record.measurements:
            (m, *_) = record.measurements
            newer = dataclasses.replace(m, samples_per_s=m.samples_per_s * 1.01)
            cluster.records[job_id] = dataclasses.replace(record, measurements=(newer,))


def _forget() -> None:
    for cache in (speedup._fit, utility_curves.curve):  # noqa: SLF001 - a cold start is what is measured
        cache.cache_clear()


@contextmanager
def _timed(stages: Counter[str]) -> Iterator[None]:
    """Count CPU seconds of the stages; the policy's are those of all its calls."""
    places: list[tuple[Any, str, str]] = [
        (rounds, "elastic_jobs", "models and eligibility"),
        (rounds, "claims_for_pending", "claims of pending jobs"),
        (FairShare, "decide", "policy"),
        (Assignment, "place", "placement"),
        (Assignment, "restore", "placement"),
        (Assignment, "retry", "placement"),
        (Assignment, "grow", "placement"),
        (Assignment, "welfare", "placement"),
        (decisions, "build_plan", "decisions"),
    ]
    before = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, stage), function in zip(places, before, strict=True):
        setattr(owner, name, _counted(function, stages, stage))
    try:
        yield
    finally:
        for (owner, name, _), function in zip(places, before, strict=True):
            setattr(owner, name, function)


def _counted(function: Callable[..., Any], stages: Counter[str], stage: str) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        begin = time.process_time()
        try:
            return function(*args, **more)
        finally:
            stages[stage] += time.process_time() - begin  # type: ignore[assignment]

    return call


def _question(cluster: Cluster) -> Question:
    """Return a question with all running elastic jobs, their GPUs and the idle ones."""
    snapshot = cluster.snapshot()
    jobs = tuple(j.job_id for j in snapshot.jobs if j.submission and j.allocation)
    capacity: Counter[str] = Counter()
    for n in snapshot.nodes:
        capacity[n.gpu_type] += n.free_gpus
    for job_id in jobs:
        held = snapshot.job[job_id].allocation
        if held:
            capacity[held.gpu_type] += held.gpus
    config = Config()
    models = {j: SpeedModel.fit(config.speedup, cluster.records[j].measurements) for j in jobs}
    records = {
        j: dataclasses.replace(cluster.records[j], checkpoint_s=0, restart_s=0) for j in jobs
    }
    return Question(snapshot=snapshot, records=records, models=models, jobs=jobs, capacity=capacity)


def _curve(question: Question, job_id: int, gpu_type: str) -> utility_curves.UtilityCurve | None:
    directive = question.snapshot.job[job_id].directive
    assert directive is not None
    return utility_curves.curve(
        question.models[job_id],
        directive.sizes(gpu_type),
        gpu_type,
        unit=directive.unit_for(gpu_type),
        per_node=max(n.gpus for n in question.snapshot.nodes),
    )


def _plain(question: Question) -> dict[int, tuple[str, int]]:
    """Give every job its MIN on its type, then the next size to the job with most gain per GPU."""
    free = dict(question.capacity)
    at: dict[int, int] = {}
    on: dict[int, tuple[str, utility_curves.UtilityCurve]] = {}
    for job_id in question.jobs:
        held = question.snapshot.job[job_id].allocation
        curve = _curve(question, job_id, held.gpu_type) if held else None
        if held and curve:
            on[job_id] = (held.gpu_type, curve)
            at[job_id] = 0
            free[held.gpu_type] -= int(curve.sizes[0])
    while True:
        best: tuple[float, int, int] | None = None
        for job_id, (kind, curve) in on.items():
            i = at[job_id]
            if i + 1 < len(curve.sizes):
                step = int(curve.sizes[i + 1] - curve.sizes[i])
                gain = float(curve.utility[i + 1] - curve.utility[i]) / step
                if step <= free[kind] and gain > 0 and (best is None or gain > best[0]):
                    best = (gain, job_id, step)
        if best is None:
            return {j: (on[j][0], int(on[j][1].sizes[i])) for j, i in at.items()}
        _, job_id, step = best
        at[job_id] += 1
        free[on[job_id][0]] -= step


def _value(question: Question, shares: dict[int, tuple[str, int]]) -> float:
    total = 0.0
    for job_id, (gpu_type, gpus) in shares.items():
        curve = _curve(question, job_id, gpu_type)
        if curve and gpus:
            total += float(curve.utility[curve.at(gpus)])
    return total


if __name__ == "__main__":
    main()
