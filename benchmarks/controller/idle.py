"""Cost of selasticd while nothing happens.

    python -m benchmarks.controller.idle [--jobs 2000] [--seconds 60] [--json] [--cluster selastic]

Starts the daemon, configured as a site would have it, on the container cluster,
with held jobs in the queue so that every look has something to read, and takes
the process's CPU time from /proc. A fresh cluster, please: slurmctld shows jobs
for five minutes after their end.
"""

from __future__ import annotations

import argparse
import json
import time

from benchmarks.support.container_commands import held_jobs, on_cluster

CONFIG = "/tmp/idle.toml"  # noqa: S108 - in the container
_TICKS = 100  # per second, sysconf(_SC_CLK_TCK) on Linux


def cpu_s(cluster: str, pid: str) -> float:
    """Return the CPU seconds that a process has used so far."""
    fields = on_cluster(cluster, "cat", f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller.idle")
    parser.add_argument("--jobs", type=int, default=2000, help="held jobs in the queue")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cluster", default="selastic")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    on_cluster(args.cluster, "cluster-start", "selasticd-stop")
    on_cluster(args.cluster, "tee", CONFIG, stdin='[controller]\nmode = "act"\n')
    start = f"cd /; selasticd --config {CONFIG} >{CONFIG}.log 2>&1 & echo $!"
    with held_jobs(args.cluster, args.jobs):
        pid = on_cluster(args.cluster, "bash", "-c", start, user="selastic").strip()
        time.sleep(10)  # the first rounds are not idle
        before = cpu_s(args.cluster, pid)
        time.sleep(args.seconds)
        share = (cpu_s(args.cluster, pid) - before) / args.seconds
        on_cluster(args.cluster, "kill", pid)
    if args.json:
        print(json.dumps({"jobs": args.jobs, "seconds": args.seconds, "core_share": share}))
    else:
        print(f"{share:.2%} of a core with {args.jobs} jobs in the queue")


if __name__ == "__main__":
    main()
