"""Finish-time fairness of the jobs of Sia's artifact, by our definition.

The artifact's files state when each job was submitted and complete. Contention is the mean number
of jobs in between, weighted by time; the time alone is that of `simulator.fairness`.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from benchmarks.sia_tables import CLUSTER
from slurm_elastic.simulator import fairness, job_factory
from slurm_elastic.simulator.truth.restart_costs import RestartCosts
from slurm_elastic.simulator.workloads import application_profiles, cluster_text, workload


def fairness_figures(data: Path, trace: str, index: int) -> dict[str, float]:
    """Return the largest rho and the fraction above 1, as `simulator.results.summary` names them.

    Args:
        data: folder of Sia's data.
        trace: name of the trace.
        index: number of the workload in it; the artifact's file for it is there.
    """
    cluster = cluster_text.parse(CLUSTER)
    jobs = workload.read(data / "workloads" / trace / f"workload-{index}.csv")
    profiles = application_profiles.read(data / "traces", jobs.applications, cluster.types)
    simulated = job_factory.jobs(
        jobs, profiles, cluster, RestartCosts(), job_factory.JobOptions(adaptive_batch=True)
    )
    with (data / "reference" / f"sia-{trace}-{index}.csv").open(newline="") as lines:
        rows = {row["name"]: row for row in csv.DictReader(lines)}
    submitted = np.array([float(row["submission_s"]) for row in rows.values()])
    complete = np.array([float(row["completion_s"]) for row in rows.values()])
    values = []
    for job in simulated:
        row = rows[job.submitted.name]
        begin_s, end_s = float(row["submission_s"]), float(row["completion_s"])
        together_s = np.minimum(complete, end_s) - np.maximum(submitted, begin_s)
        contention = np.maximum(together_s, 0.0).sum() / (end_s - begin_s)
        alone_s = fairness.isolated_s(job, cluster, contention)
        values.append(float(row["jct_s"]) / alone_s)
    rho = np.array(values)
    return {"rho_max": float(rho.max()), "unfair_fraction": float((rho > 1).mean())}
