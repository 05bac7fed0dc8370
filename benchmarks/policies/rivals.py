"""Published schedulers in Sia's setting, with the comparison of finish-time fairness of its paper.

    python -m benchmarks.policies.rivals [--trace saturn|philly|newtrace] [--numbers 1-5]
        [--homogeneous] [--policies sia,pollux,gavel,shockwave,themis] [--data DIR] [--json]

64 GPUs: 6 nodes of 4 aws, 2 of 8 dgx-ext, 3 of 8 rtx (Sia, SOSP'23, table 3), with --homogeneous 16
nodes of 4 aws (table 4). Sia and Pollux choose sizes and batches in rounds of 60 s; jobs of the
others are rigid, at the sizes of the workloads ("TunedJobs"), in rounds of 360 s.

`rho` is finish-time fairness by our definition (`slurm_elastic.simulator.fairness`): `WORST` of all
jobs, `UNFAIR` the part of the jobs above 1. Below each row the paper's figures, where it has any
for these traces: its worst rho and unfair fraction are those of the heterogeneous cluster and
saturn ("Helios"), by its own definition.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.simulator import CLUSTER
from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.core.application import JobClass
from slurm_elastic.policies import policy_protocol
from slurm_elastic.simulator.results import Result, summary
from slurm_elastic.simulator.simulation import simulate
from slurm_elastic.simulator.workloads import application_profiles, cluster_text, workload
from tests.support import published_data

POLICIES = "sia,pollux,gavel,shockwave,themis"
HOMOGENEOUS = "aws:16x4"
#: Policies that choose sizes; all others run rigid jobs.
_ADAPTIVE = ("sia", "pollux", "icefrog", "goodput")
_ROUND_S, _RIGID_ROUND_S = 60.0, 360.0
_NUMBERS = {"philly": "1-4", "saturn": "1-5", "newtrace": "1-2"}
#: Header, key of the summary, decimals, factor.
_COLUMNS = (
    ("AVG_JCT_H", "avg_jct_h", 2, 1.0),
    ("P99_H", "p99_jct_mean_h", 1, 1.0),
    ("MAKESPAN_H", "makespan_h", 1, 1.0),
    ("GPU_H", "gpu_h_per_job", 2, 1.0),
    ("RESTARTS", "restarts_per_job", 2, 1.0),
    ("WORST", "rho_max", 2, 1.0),
    ("UNFAIR_%", "unfair_fraction", 1, 100.0),
    ("POLICY_MS", "policy_ms_p50", 1, 1.0),
)
#: Tables 3 and 4 of the paper, and its figures of finish-time fairness.
_PAPER: dict[tuple[str, bool], dict[str, tuple[float | None, ...]]] = {
    ("philly", False): {
        "sia": (0.6, 9.5, 14.2, 4.0, None, None, None, None),
        "pollux": (1.0, 14.9, 24.5, 5.6, None, None, None, None),
        "gavel": (1.9, 30.0, 33.8, 9.0, None, None, None, None),
    },
    ("saturn", False): {
        "sia": (0.7, 10.9, 14.9, 4.8, None, 1.2, 0.3, None),
        "pollux": (1.0, 15.0, 25.5, 5.9, None, 4.6, 28.0, None),
        "gavel": (2.5, 38.7, 43.0, 12.1, None, 27.8, 15.0, None),
        "shockwave": (None, None, None, None, None, 3.3, 14.0, None),
    },
    ("newtrace", False): {
        "sia": (0.7, 4.6, 52.2, 3.0, None, None, None, None),
        "pollux": (1.5, 10.3, 62.3, 3.4, None, None, None, None),
        "gavel": (11.3, 98.1, 110.0, 6.4, None, None, None, None),
    },
    ("philly", True): {
        "sia": (1.9, 18.1, 21.4, 8.4, 2.6, None, None, None),
        "pollux": (2.0, 19.3, 21.7, 8.6, 5.1, None, None, None),
        "gavel": (4.3, 37.1, 44.3, 15.3, None, None, None, None),
        "shockwave": (3.6, 32.8, 35.0, 12.5, None, None, None, None),
        "themis": (5.4, 44.7, 49.7, 17.2, None, None, None, None),
    },
}


def run(policy: str, files: list[Path], traces: Path, cluster_name: str) -> list[Result]:
    """Return the results of one policy on each workload."""
    adaptive = policy in _ADAPTIVE
    interval_s = _ROUND_S if adaptive else _RIGID_ROUND_S
    controller = ControllerSettings(queue="controller", policy=policy, interval_s=interval_s)
    config = Config(controller=controller)
    cluster = cluster_text.parse(cluster_name)
    results = []
    for file in files:
        jobs = workload.read(file)
        profiles = application_profiles.read(traces, jobs.applications, cluster.types)
        result = simulate(
            jobs,
            profiles,
            cluster,
            config=config,
            policy=policy_protocol.load(config),
            interval_s=interval_s,
            job_class=None if adaptive else JobClass.RIGID,
        )
        results.append(result)
    return results


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies.rivals")
    parser.add_argument("--trace", choices=tuple(_NUMBERS), default="saturn")
    parser.add_argument("--numbers", help="of its workloads, e.g. 1-5; those of the figures")
    parser.add_argument("--homogeneous", action="store_true")
    parser.add_argument("--policies", default=POLICIES)
    published_data.add_option(parser)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = published_data.locate_or_exit(parser, args, "sia", "traces", "workloads")
    first, _, last = (args.numbers or _NUMBERS[args.trace]).partition("-")
    files = [
        folder / "workloads" / args.trace / f"workload-{i}.csv"
        for i in range(int(first), int(last or first) + 1)
    ]
    cluster = HOMOGENEOUS if args.homogeneous else CLUSTER
    figures: dict[str, dict[str, Any]] = {}
    if not args.json:
        print(f"{len(files)} workloads of {args.trace} on {cluster}")
        print(" ".join([f"{'POLICY':10}", *(f"{header:>10}" for header, *_ in _COLUMNS)]))
    for policy in args.policies.split(","):
        figures[policy] = summary(run(policy, files, folder / "traces", cluster))
        if not args.json:
            shown = [
                f"{figures[policy][key] * factor:.{digits}f}" for _, key, digits, factor in _COLUMNS
            ]
            print(_line(policy, shown), flush=True)
            paper = _PAPER.get((args.trace, args.homogeneous), {}).get(policy)
            if paper:
                print(_line("  paper", ["-" if v is None else f"{v:g}" for v in paper]))
    if args.json:
        print(json.dumps(figures, indent=2))


def _line(name: str, cells: list[str]) -> str:
    return " ".join([f"{name:10}", *(f"{cell:>10}" for cell in cells)])


if __name__ == "__main__":
    main()
