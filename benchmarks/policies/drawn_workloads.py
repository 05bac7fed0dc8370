"""Workloads drawn from published ones, for `benchmarks.policies --drawn`.

Nobody tuned a policy on them, and they are of the same kind as those that were published: each hour
has the submissions of that hour in one of a trace's workloads, and each submission is a job drawn
from all of them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from slurm_elastic.simulator.workloads.workload import Workload

_HOUR_S = 3600.0


def draw(trace: str, published: Sequence[Workload], seed: int) -> Workload:
    """Return one workload, named after the trace and the seed.

    Args:
        trace: name of the trace.
        published: its workloads.
        seed: number of the workload; equal seeds give equal workloads.
    """
    rng = random.Random(f"{trace} {seed}")
    jobs = [job for workload in published for job in workload.jobs]
    hours = int(max(job.time_s for job in jobs) // _HOUR_S) + 1
    times = []
    for hour in range(hours):
        source = rng.choice(published)
        times += [job.time_s for job in source.jobs if job.time_s // _HOUR_S == hour]
    drawn = [(time_s, rng.choice(jobs)) for time_s in sorted(times)]
    return Workload.of(
        f"{trace}-drawn-{seed}",
        [
            dataclasses.replace(job, name=f"{job.application}-{number}", time_s=time_s)
            for number, (time_s, job) in enumerate(drawn)
        ],
    )
