"""Benefit of measuring GPU types on which nothing is known of a job.

    python -m benchmarks.policies.unprofiled_types [--trace philly] [--workload 1] [--data DIR]

Sia's published workloads come with the speed of one GPU of each type, as if every job had been
profiled. Here these speeds are left out: types of which nothing was measured count as equal, and
policy `goodput` runs with several `[goodput] profiles`, with and without sharing between jobs of an
application. One line per run: averages over the jobs.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from unittest import mock

from benchmarks.policies import policy_rows
from slurm_elastic.config.policy_settings import GoodputSettings
from slurm_elastic.simulator import job_factory
from slurm_elastic.simulator.applications import DescribedApplication, describe
from slurm_elastic.simulator.truth.ground_truth import GroundTruth
from slurm_elastic.simulator.workloads.cluster_text import Cluster
from slurm_elastic.simulator.workloads.workload import SubmittedJob
from tests.support import published_data

SETTINGS = {
    "profiled": GoodputSettings(),
    "unknown": GoodputSettings(),
    "unknown, profiles 1": GoodputSettings(profiles=1),
    "unknown, profiles 2": GoodputSettings(profiles=2),
    "unknown, alone": GoodputSettings(share=False, growth=2.0),
    "unknown, alone, profiles 2": GoodputSettings(share=False, growth=2.0, profiles=2),
}
FIGURES = ("avg_jct_h", "p99_jct_mean_h", "gpu_h_per_job", "restarts_per_job")


def unprofiled(job: SubmittedJob, truth: GroundTruth, cluster: Cluster) -> DescribedApplication:
    """Return the application of a job without the speeds of one GPU."""
    described = describe(job, truth, cluster)
    types = tuple(dataclasses.replace(t, single=None) for t in described.application.types)
    application = dataclasses.replace(described.application, types=types, profiled=False)
    return dataclasses.replace(described, application=application)


def run(label: str, trace: str, index: int, data: Path) -> dict[str, float]:
    """Return the figures of one simulation."""
    row = policy_rows.Row(label=label, policy="goodput", goodput=SETTINGS[label])
    described = describe if label == "profiled" else unprofiled
    with mock.patch.object(job_factory, "describe", described):
        summary = policy_rows.run(row, trace, index, data).summary()
    return {name: float(summary[name]) for name in FIGURES}


def main() -> None:
    """Print one line per run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policies.unprofiled_types", description=__doc__
    )
    parser.add_argument("--trace", default="philly")
    parser.add_argument("--workload", type=int, default=1)
    published_data.add_option(parser)
    options = parser.parse_args()
    data = published_data.locate_or_exit(parser, options, "sia", "traces", "workloads")
    for label in SETTINGS:
        figures = run(label, options.trace, options.workload, data)
        cells = " ".join(f"{name}={value:.3f}" for name, value in figures.items())
        print(f"{label:28} {cells}", flush=True)


if __name__ == "__main__":
    main()
