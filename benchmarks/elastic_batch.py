"""Elastic batch sizes compared with elastic GPUs only: `python -m benchmarks.elastic_batch`.

    python -m benchmarks.elastic_batch [--gpus 40] [--arrivals low] [--seeds 3] [--json]
    python -m benchmarks.elastic_batch --options      what the options are worth
    python -m benchmarks.elastic_batch --dp           the time of the dynamic program

The evaluation of "Effective Elastic Scaling of Deep Learning Workloads" (MASCOTS 2020), invented
again: its own workloads are not public. Jobs arrive over eight hours, to a homogeneous cluster of
40 or 400 GPUs in nodes of four. Three applications out of public sizes (`APPLICATIONS`): parameters
and operations of ResNet-50, AlexNet and VGG-11 on 224 x 224 images; the times of a step are those
of `simulator/workloads/builtin_profiles.py` on V100s with 16 GB and a network of 25 Gbit/s. As the
paper assumes, a sample is worth as much in any batch of a job's range; `--options` also assumes
otherwise.

The baselines choose GPUs by the same program at a fixed batch: the largest, or one drawn from the
job's range. `--accumulate` lets all of them compute a batch in several micro-steps, `--wide N`
multiplies the largest batch of each range: one GPU holds a quarter of it, then 1 / (4 N).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slurm_elastic.config.policy_settings import ElasticBatchSettings
from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.core.application import Application, Learned, Observation, TypeProfile
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.policies import policy_protocol
from slurm_elastic.policies.elastic_batch.division import Floats, divide
from slurm_elastic.policies.elastic_batch.elastic_batch import ElasticBatch as Policy
from slurm_elastic.simulator.results import HOUR_S, Result, mean
from slurm_elastic.simulator.simulation import simulate
from slurm_elastic.simulator.workloads import builtin_profiles, cluster_text, generate
from slurm_elastic.simulator.workloads.application_profiles import (
    ApplicationProfile,
    MeasuredCurve,
    Shape,
    TypeTable,
)
from slurm_elastic.simulator.workloads.builtin_profiles import Family, Gpu
from slurm_elastic.simulator.workloads.workload import SubmittedJob, Workload
from tests.support.decisions.synthetic_clusters import Cluster, node

HOURS = 8.0
INTERVAL_S = 600.0
RESTART_S = 60.0
#: GPUs that a job may have.
MOST = 16
V100 = Gpu("v100", 125e12, 16, 40e9, 3.1e9)
#: Public sizes; `noise` (in initial batches) is ours, and counts with `--options` only.
APPLICATIONS = (
    Family(
        name="resnet50", parameters=25.6e6, operations=12.3e9, utilisation=0.10, latency=16,
        sample_gb=0.09, samples=1.28e6, epochs=10, batches=(64, 512), noise=(8, 8),
        restart_s=RESTART_S, weight=1.0, sizes=((1, 1.0),),
    ),
    Family(
        name="alexnet", parameters=61.1e6, operations=2.14e9, utilisation=0.10, latency=64,
        sample_gb=0.012, samples=1.28e6, epochs=10, batches=(256, 4096), noise=(8, 8),
        restart_s=RESTART_S, weight=1.0, sizes=((1, 1.0),),
    ),
    Family(
        name="vgg11", parameters=132.9e6, operations=22.8e9, utilisation=0.10, latency=8,
        sample_gb=0.1, samples=1.28e6, epochs=10, batches=(64, 512), noise=(8, 8),
        restart_s=RESTART_S, weight=1.0, sizes=((1, 1.0),),
    ),
)  # fmt: skip
#: Hours on one GPU at its largest batch, equally often.
LENGTHS_H = (0.5, 1.0, 2.0)
#: By name: how jobs arrive, and their work over what the cluster does in the eight hours with
#: every GPU as fast as if it were alone.
ARRIVALS = {"low": ("poisson", 0.4), "high": ("poisson", 1.2), "bursty": ("bursts", 0.8)}
POLICIES = {
    "elastic": ElasticBatchSettings(),
    "fixed-max": ElasticBatchSettings(batch="fixed-max"),
    "fixed-random": ElasticBatchSettings(batch="fixed-random"),
}


@dataclass(frozen=True, eq=False)
class Times(Mapping[Shape, MeasuredCurve]):
    """Times of an application at every placement; iteration yields only that of one GPU."""

    model: Family

    def __getitem__(self, shape: Shape) -> MeasuredCurve:
        """Return the times of each micro-batch on these nodes."""
        micro = tuple(builtin_profiles.micro_batches(self.model, V100))
        times = [
            builtin_profiles.step(self.model, V100, nodes=len(shape), gpus=sum(shape), micro=m)
            for m in micro
        ]
        return MeasuredCurve(micro, tuple(t for t, _ in times), tuple(s for _, s in times))

    def __iter__(self) -> Iterator[Shape]:
        """Yield the shape of one GPU."""
        return iter(((1,),))

    def __len__(self) -> int:
        """Return 1."""
        return 1


def profile(model: Family, hours: float, *, noise: bool) -> ApplicationProfile:
    """Return an application that takes so many hours on one GPU at its largest micro-batch.

    Args:
        model: its sizes.
        hours: on one GPU.
        noise: a sample is worth less in a larger batch; else as much in any.
    """
    most = builtin_profiles.most(model, V100)
    rate = most / builtin_profiles.step(model, V100, nodes=1, gpus=1, micro=most)[0]
    steps = rate * hours * HOUR_S / model.batches[0]
    targets = tuple(steps * (i + 1) / model.epochs for i in range(model.epochs))
    level = tuple(float(noise) for _ in targets)
    var = tuple(builtin_profiles.noise(model, i) for i in range(model.epochs))
    table = TypeTable(
        gpu_type=V100.name,
        curves=Times(model),
        scalability=(),
        least=builtin_profiles.micro_batches(model, V100)[0],
        most=most,
        source=model.name,
    )
    return ApplicationProfile(
        name=model.name,
        batches=model.batches,
        progress=(targets,) * 2,
        sqr=(level,) * 2,
        var=(var,) * 2,
        types={V100.name: table},
        restart_s=model.restart_s,
    )


def applications(wide: int = 1) -> list[tuple[str, Family, float]]:
    """Return every application in every length: name, sizes, hours on one GPU."""
    return [
        (f"{model.name}-{hours:g}h", _wider(model, wide), hours)
        for model in APPLICATIONS
        for hours in LENGTHS_H
    ]


def profiles(*, noise: bool = False, wide: int = 1) -> dict[str, ApplicationProfile]:
    """Return the profiles of all applications."""
    return {n: profile(model, hours, noise=noise) for n, model, hours in applications(wide)}


def _wider(model: Family, wide: int) -> Family:
    first, last = model.batches
    return dataclasses.replace(model, batches=(first, wide * last))


def workload(
    gpus: int, arrivals: str, *, seed: int = 0, hours: float = HOURS, wide: int = 1
) -> Workload:
    """Return jobs over the hours; their number follows from the load."""
    how, load = ARRIVALS[arrivals]
    count = round(load * gpus * hours / mean(LENGTHS_H))
    asks = {
        name: generate.RequestPattern(batches=m.batches, sizes=m.sizes)
        for name, m, _ in applications(wide)
    }
    lines = generate.generate(asks, jobs=count, hours=hours, arrivals=how, seed=seed)
    jobs = [
        SubmittedJob(
            name=line.name,
            time_s=float(line.time),
            application=line.application,
            gpus=line.gpus,
            batch=line.batch,
            most=MOST,
        )
        for line in lines
    ]
    return Workload.of(f"{arrivals}-{gpus}-{seed}", jobs)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Simulation parameters beside the policy: GPUs, and the truth about batches."""

    gpus: int
    noise: bool = False
    wide: int = 1


def run(jobs: Workload, case: Case, settings: ElasticBatchSettings, *, policy: str = "") -> Result:
    """Simulate once."""
    config = Config(
        controller=ControllerSettings(policy=policy or "elastic_batch"), elastic_batch=settings
    )
    often = bool(policy or settings.starvation_s or settings.interval_s < INTERVAL_S)
    return simulate(
        jobs,
        profiles(noise=case.noise, wide=case.wide),
        cluster_text.parse(f"{V100.name}:{case.gpus // 4}x4"),
        config=config,
        policy=policy_protocol.load(config),
        interval_s=60.0 if often else INTERVAL_S,
    )


def figures(results: Sequence[Result]) -> dict[str, float]:
    """Return the compared figures: means over workloads, hours as the mean of all jobs."""
    jobs = [j for r in results for j in r.jobs]
    dropped = sum(len(r.dropped) for r in results)
    inside = sum(j.completion_s <= HOURS * HOUR_S for j in jobs)
    jct = sorted(j.jct_s / HOUR_S for j in jobs)
    return {
        "jobs": (len(jobs) + dropped) / len(results),
        "completed": len(jobs) / len(results),
        "completed_8h": inside / len(results),
        "dropped_part": dropped / (len(jobs) + dropped),
        "avg_jct_h": mean(jct),
        "p99_jct_h": jct[min(len(jct) - 1, int(0.99 * len(jct)))],
        "restarts": mean([float(j.restarts) for j in jobs]),
        "policy_ms": 1000 * max((s for r in results for s in r.policy_s), default=0.0),
        "cpu_s": sum(r.cpu_s for r in results),
    }


def compare(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Print the paper's comparison."""
    for gpus in args.gpus or (40, 400):
        for arrivals in args.arrivals or tuple(ARRIVALS):
            case = Case(gpus=gpus, wide=args.wide)
            jobs = [workload(gpus, arrivals, seed=s, wide=args.wide) for s in range(args.seeds)]
            for mode in ("drop", "queue"):
                for name, settings in POLICIES.items():
                    changed = dataclasses.replace(settings, mode=mode, accumulate=args.accumulate)
                    row = figures([run(w, case, changed) for w in jobs])
                    yield {
                        "gpus": gpus, "arrivals": arrivals, "mode": mode, "policy": name, **row
                    }  # fmt: skip


OPTIONS = {
    "as published": ElasticBatchSettings(),
    "restart_cost": ElasticBatchSettings(restart_cost=True),
    "statistical": ElasticBatchSettings(statistical=True),
    "starvation_s = 120": ElasticBatchSettings(starvation_s=120.0),
    "interval_s = 60": ElasticBatchSettings(interval_s=60.0),
    "all but interval_s": ElasticBatchSettings(
        restart_cost=True, statistical=True, starvation_s=120.0
    ),
}


def options(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Print the policy's options beside `sia`, with and without samples of lower worth."""
    for gpus in args.gpus or (40,):
        for arrivals in args.arrivals or tuple(ARRIVALS):
            jobs = [workload(gpus, arrivals, seed=s) for s in range(args.seeds)]
            for noise in (False, True):
                case = Case(gpus=gpus, noise=noise)
                truth = "samples of large batches are worth less" if noise else "any batch"
                for name, settings in OPTIONS.items():
                    row = figures([run(w, case, settings) for w in jobs])
                    yield {
                        "gpus": gpus, "arrivals": arrivals, "mode": truth, "policy": name, **row
                    }  # fmt: skip
                results = [run(w, case, ElasticBatchSettings(), policy="sia") for w in jobs]
                yield {
                    "gpus": gpus, "arrivals": arrivals, "mode": truth, "policy": "sia",
                    **figures(results),
                }  # fmt: skip


def plain(rows: Floats, capacity: int) -> float:
    """Return the value of the program as in the paper, in plain loops; -inf if infeasible."""
    table = [0.0] * (capacity + 1)
    for row in rows.tolist():
        best = [-np.inf] * (capacity + 1)
        for k in range(1, capacity + 1):
            best[k] = max(table[k - g] + row[g] for g in range(1, min(k, len(row) - 1) + 1))
        table = best
    return max(table)


def factors(jobs: int, most: int, *, seed: int = 0) -> Floats:
    """Return random scaling factors with node boundaries: rows that are not concave."""
    rng = np.random.default_rng(seed)
    k = np.arange(1, most + 1)
    loss = rng.uniform(0.5, 1.0, (jobs, 1))
    values = k**loss * rng.uniform(0.9, 1.1, (jobs, most))
    return np.concatenate([np.full((jobs, 1), -np.inf), values], axis=1)


DP_SIZES = ((100, 200, 16), (100, 400, 64), (1000, 2048, 16), (1000, 2048, 64), (1000, 2048, 2048))


def dp(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time our program and the plain loop in alternating pairs; the loop at small sizes only."""
    for jobs, gpus, most in DP_SIZES:
        rows = factors(jobs, most)
        ours, loops = [], []
        small = jobs * gpus * most <= 2e8
        for _ in range(args.seeds):
            begin = time.process_time()
            division = divide(rows, gpus)
            ours.append(time.process_time() - begin)
            assert division is not None
            if small:
                begin = time.process_time()
                value = plain(rows, gpus)
                loops.append(time.process_time() - begin)
                assert abs(value - division.value) < 1e-6 * abs(value), (value, division.value)
        best = min(loops) if loops else None
        yield {
            "jobs": jobs, "gpus": gpus, "most": most, "ours_s": min(ours), "plain_s": best,
            "ratio": best / min(ours) if best else None,
        }  # fmt: skip


def call(jobs: int, nodes: int) -> tuple[float, float]:
    """Time a whole call of the policy: with all jobs new to it, and with none.

    Args:
        jobs: pending, each measured in 15 configurations of its own.
        nodes: of four GPUs.
    """
    rng = random.Random(0)
    cluster = Cluster([node(f"n{i}", 4) for i in range(nodes)])
    application = Application(
        name="net",
        initial_batch=64,
        max_batch=4096,
        batch=64,
        types=(TypeProfile("a100", least=1, most=128),),
    )
    for job in range(1, jobs + 1):
        fixed, sample, sync = rng.uniform(0.02, 0.1), rng.uniform(1e-3, 1e-2), rng.uniform(0, 0.3)
        seen = tuple(
            Observation("a100", max(1, g // 4), g, m, micro + (g > 1) * sync, micro)
            for g in (1, 2, 4, 8, 16)
            for m in (16, 64, 128)
            for micro in [fixed + sample * m]
        )
        cluster.add(job, elastic="1-64", gpus=1, record={"learned": Learned(application, seen)})
    config = Config(elastic_batch=ElasticBatchSettings(growth=100.0))
    question = policy_protocol.Question(
        snapshot=cluster.snapshot(),
        records=cluster.records,
        models={j: SpeedModel.fit(config.speedup, ()) for j in cluster.records},
        jobs=tuple(cluster.records),
        capacity={"a100": 4 * nodes},
    )
    policy, times = Policy(config), []
    for _ in range(2):
        begin = time.process_time()
        policy.decide(question, {})
        times.append(time.process_time() - begin)
    return times[0], times[1]


def main(argv: Sequence[str] | None = None) -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elastic_batch", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--gpus", type=int, action="append", choices=(40, 400))
    parser.add_argument("--arrivals", action="append", choices=tuple(ARRIVALS))
    parser.add_argument("--seeds", type=int, default=3, help="workloads of each kind, or repeats")
    parser.add_argument("--wide", type=int, default=1, choices=(1, 2, 4))
    parser.add_argument("--accumulate", action="store_true")
    parser.add_argument("--options", action="store_true")
    parser.add_argument("--dp", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error("--seeds must be from 1 on")
    work = dp if args.dp else options if args.options else compare
    rows = []
    for row in work(args):
        rows.append(row)
        if not args.json:
            print(_line(row), flush=True)
    if args.dp and not args.json:
        first, again = call(1000, 512)
        print(f"a whole call, 1000 jobs, 2048 GPUs: {first:.2f} s, nothing new {again:.2f} s")
    if args.json:
        json.dump(rows, sys.stdout, indent=1)
        print()


def _line(row: Mapping[str, Any]) -> str:
    if "most" in row:
        loops = f"{row['plain_s']:.2f} s, ratio {row['ratio']:.0f}" if row["ratio"] else "not run"
        size = f"{row['jobs']} jobs, {row['gpus']} GPUs, at most {row['most']} each"
        return f"{size}: {row['ours_s']:.3f} s; plain loops {loops}"
    return (
        f"| {row['gpus']} | {row['arrivals']} | {row['mode']} | {row['policy']} |"
        f" {row['completed']:.0f} of {row['jobs']:.0f} | {row['completed_8h']:.0f} |"
        f" {row['dropped_part']:.0%} | {row['avg_jct_h']:.2f} | {row['p99_jct_h']:.1f} |"
        f" {row['restarts']:.1f} | {row['policy_ms']:.0f} | {row['cpu_s']:.0f} |"
    )


if __name__ == "__main__":
    main()
