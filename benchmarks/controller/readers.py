"""Cost of reading all jobs, through pyslurm and through Slurm's JSON; and three jobs by JSON.

    python -m benchmarks.controller.readers [--jobs 2000] [--blocks 3] [--json] [--cluster selastic]

Both read the same held jobs on the container cluster, in alternating blocks of five reads. CPU is
that of the reader and of the commands that it starts, not slurmctld's. A fresh cluster, please:
slurmctld shows jobs for five minutes after their end.
"""

from __future__ import annotations

import argparse
import json
import statistics

from benchmarks import ROOT
from benchmarks.support.container_commands import PYTHON, held_jobs, on_cluster

PROGRAM = ROOT / "tests" / "cluster" / "drivers" / "compare_readers.py"
PLACE = "/tmp/readers.py"  # noqa: S108 - in the container
_READS = "5"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller.readers")
    parser.add_argument("--jobs", type=int, default=2000, help="held jobs in the queue")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--cluster", default="selastic")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    on_cluster(args.cluster, "tee", PLACE, stdin=PROGRAM.read_text(encoding="utf-8"))
    read = (PYTHON, PLACE, "--time", _READS)
    with held_jobs(args.cluster, args.jobs):
        blocks = [
            json.loads(on_cluster(args.cluster, *read, user="selastic")) for _ in range(args.blocks)
        ]
    medians = {
        f"{name}_{unit}": statistics.median(block[name][unit] for block in blocks)
        for name in blocks[0]
        for unit in ("seconds", "cpu")
    }
    ratios = [block["json"]["cpu"] / block["pyslurm"]["cpu"] for block in blocks]
    parts = [block["json_three"]["cpu"] / block["json"]["cpu"] for block in blocks]
    if args.json:
        result = {"jobs": args.jobs, **medians, "cpu_ratios": ratios, "three_to_all": parts}
        print(json.dumps(result))
        return
    for name in blocks[0]:
        seconds, cpu = medians[f"{name}_seconds"], medians[f"{name}_cpu"]
        print(f"{name:10} {seconds * 1000:6.0f} ms, {cpu * 1000:6.0f} ms of CPU for each read")
    print(f"CPU json / pyslurm: {min(ratios):.0f} to {max(ratios):.0f}")
    print(f"CPU of three jobs / of all, by JSON: {min(parts):.2f} to {max(parts):.2f}")


if __name__ == "__main__":
    main()
