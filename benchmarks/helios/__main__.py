"""Philly's queues and idle nodes of 2017 under QSSF and CES (Helios, SC'21), published and ours.

    python -m benchmarks.helios [--part queues,sleep] [--divide 1,2,3,4] [--errors] [--data DIR]
        [--json]

Queues, October and November:
68,503 jobs of eleven virtual clusters, each with its nodes of 8 GPUs over --divide, as this reduced
list of jobs loads the real ones so little that nobody waits. Rows:

- `fifo`, `sjf` (true run time), `service` (true GPU seconds), `qssf` (the run times of the file,
  which have the errors of the published noise model; some are negative): the first job without
  room stops the queue. REFERENCE: another implementation's figures.
- `qssf, backfill`: the same estimates, at least 1 s, with EASY backfill and `[qssf] ageing`;
- `predicted`: the same with our rolling estimates, from the jobs that have ended in this replay.
  The list has neither names nor users: they follow from virtual cluster and size alone.

Sleep, 1 to 14 December, and the month before the 15th: nodes in use per node awake, lacking
node-bins of ten minutes, switchings (sleep_replay.py).

--errors: errors of our predictions on these jobs (docs/durations.md).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gzip
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.helios import rigid_replay, sleep_replay
from benchmarks.helios.rigid_replay import Outcome, ReplayedJob, ReplayOrder, RigidReplay
from slurm_elastic.config.policy_settings import QssfSettings
from slurm_elastic.core.prediction.duration_estimate import DurationEstimate
from slurm_elastic.models.durations import prediction_error
from slurm_elastic.models.durations.finished_job import FinishedJob, JobRequest
from slurm_elastic.models.durations.rolling_history import RollingHistory
from slurm_elastic.policies.baselines.qssf import ASSUMED_S, aged_service
from tests.support import published_data

PER_NODE = 8
#: Digests of the files to which REFERENCE belongs.
KNOWN_FILES = ("4f31227a05fe", "7e5f251256b8")
#: Average completion and queueing in s of an independent implementation, by divisor and order.
REFERENCE = {
    (1, "fifo"): (11585, 105), (1, "sjf"): (11543, 63), (1, "service"): (11543, 62),
    (1, "qssf"): (11553, 73),
    (2, "fifo"): (16559, 5078), (2, "sjf"): (13026, 1546), (2, "service"): (12999, 1518),
    (2, "qssf"): (13443, 1962),
    (3, "fifo"): (84805, 73324), (3, "sjf"): (21659, 10178), (3, "service"): (22204, 10723),
    (3, "qssf"): (26092, 14612),
    (4, "fifo"): (193055, 181574), (4, "sjf"): (28781, 17300), (4, "service"): (29021, 17541),
    (4, "qssf"): (35648, 24167),
}  # fmt: skip
#: Given estimates, and those from which a fresh prediction is made.
_BACKFILLED = ("qssf, backfill", "predicted")
ORDERS = ("fifo", "sjf", "service", "qssf", *_BACKFILLED)
JOBS, NODES = "philly_oct_nov.csv.gz", "philly_vc.csv"
PARTS = ("queues", "sleep")


def read(folder: Path) -> dict[str, tuple[int, list[ReplayedJob]]]:
    """Return the nodes and jobs of each virtual cluster, jobs in order of submission.

    Raises:
        KeyError, ValueError: a column is missing or no number, or a job's virtual cluster unknown.
    """
    clusters: dict[str, tuple[int, list[ReplayedJob]]] = {}
    with (folder / NODES).open(encoding="utf-8") as lines:
        clusters = {row["vc"]: (int(row["nodes"]), []) for row in csv.DictReader(lines)}
    with gzip.open(folder / JOBS, "rt", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            job = ReplayedJob(
                submitted=float(row["submit_s"]),
                seconds=float(row["duration_s"]),
                gpus=int(row["gpus"]),
                estimate_s=float(row["estimate_s"]),
            )
            if row["vc"] not in clusters:
                raise ValueError(f"{JOBS} has jobs of {row['vc']}, which is not in {NODES}")
            clusters[row["vc"]][1].append(job)
    for _, jobs in clusters.values():
        jobs.sort(key=lambda j: j.submitted)
    return clusters


def order(name: str, jobs: list[ReplayedJob]) -> ReplayOrder:
    """Return the order of a row; one object for one virtual cluster."""
    if name == "fifo":
        place = {id(job): float(number) for number, job in enumerate(jobs)}
        return ReplayOrder(key=lambda j: place[id(j)])
    if name == "sjf":
        return ReplayOrder(key=lambda j: j.seconds)
    if name == "service":
        return ReplayOrder(key=lambda j: j.seconds * j.gpus)
    if name == "qssf":
        return ReplayOrder(key=lambda j: j.estimate_s * j.gpus)
    ageing = QssfSettings().ageing
    if name == "qssf, backfill":
        return ReplayOrder(
            # All ranks fall alike while jobs wait: the submission stands for the wait.
            key=lambda j: aged_service(j.gpus, max(1.0, j.estimate_s), -j.submitted, ageing),
            bound=rigid_replay.point_bound,
        )
    return _predicted(ageing)


def _predicted(ageing: float) -> ReplayOrder:
    history = RollingHistory()
    assumed = DurationEstimate.of_sample([ASSUMED_S / 4, ASSUMED_S, ASSUMED_S * 4])
    estimates: dict[int, DurationEstimate] = {}

    def request(job: ReplayedJob) -> JobRequest:
        return JobRequest(user="", name="", gpus=job.gpus, submitted=job.submitted)

    def key(job: ReplayedJob) -> float:
        estimates[id(job)] = history.estimate(request(job)) or assumed
        return aged_service(job.gpus, estimates[id(job)].mean, -job.submitted, ageing)

    def ended(job: ReplayedJob, at: float) -> None:
        del estimates[id(job)]
        history.add(FinishedJob(request=request(job), seconds=job.seconds, ended=at))

    bound = rigid_replay.quantile_bound(lambda j: estimates[id(j)], QssfSettings().quantile)
    return ReplayOrder(key=key, bound=bound, ended=ended)


def replay(
    clusters: dict[str, tuple[int, list[ReplayedJob]]], name: str, divisor: int
) -> list[Outcome]:
    """Return the outcomes of all jobs under one order."""
    outcomes: list[Outcome] = []
    for nodes, jobs in clusters.values():
        free = [PER_NODE] * (nodes // divisor)
        fitting = [job for job in jobs if job.gpus <= PER_NODE * len(free)]
        outcomes += RigidReplay(fitting, PER_NODE, free, order(name, fitting)).run()
    return outcomes


def summary(outcomes: list[Outcome]) -> dict[str, float]:
    """Return averages and tails in seconds, of one job at least."""
    completions = sorted(o.completion_s for o in outcomes)
    waits = sorted(o.waited_s for o in outcomes)
    return {
        "jobs": len(outcomes),
        "avg_completion_s": sum(completions) / len(completions),
        "avg_waiting_s": sum(waits) / len(waits),
        "p99_completion_s": completions[int(0.99 * len(completions))],
        "p99_waiting_s": waits[int(0.99 * len(waits))],
    }


def rows(
    clusters: dict[str, tuple[int, list[ReplayedJob]]], divisors: Iterable[int], *, published: bool
) -> Iterator[dict[str, Any]]:
    """Yield the row of each divisor and order; `published`: REFERENCE belongs to these jobs."""
    for divisor in divisors:
        for name in ORDERS:
            begin = time.process_time()
            row: dict[str, Any] = {"divide": divisor, "order": name}
            outcomes = replay(clusters, name, divisor)
            if not outcomes:
                continue  # no job fits on so few nodes
            row |= summary(outcomes)
            row["reference"] = REFERENCE.get((divisor, name)) if published else None
            row["cpu_s"] = time.process_time() - begin
            yield row


def errors(clusters: dict[str, tuple[int, list[ReplayedJob]]]) -> dict[str, Any]:
    """Return the errors of our predictions by virtual cluster and size."""
    jobs = [
        FinishedJob(
            request=JobRequest(
                user="", name="", gpus=job.gpus, group=group, submitted=job.submitted
            ),
            seconds=job.seconds,
            ended=job.submitted + job.seconds,
        )
        for group, (_, group_jobs) in clusters.items()
        for job in group_jobs
    ]
    ways = prediction_error.of_ways(jobs, boosted=True)
    return {name: dataclasses.asdict(error) for name, error in ways.items()}


def shown(row: dict[str, Any]) -> str:
    """Return the line of a row."""
    completion_s, waiting_s = row["reference"] or (None, None)
    difference = (
        f"{100 * (row['avg_completion_s'] / completion_s - 1):+.1f}%" if completion_s else ""
    )
    beside = f"{completion_s or '':>9} {waiting_s or '':>9} {difference:>6}"
    return (
        f"{row['divide']:>6}  {row['order']:<14} {row['avg_completion_s']:>9.0f}"
        f" {row['avg_waiting_s']:>9.0f}   {beside} {row['p99_completion_s']:>10.0f}"
        f" {row['p99_waiting_s']:>10.0f}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.helios", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--part", default=",".join(PARTS), help="queues, sleep or both")
    parser.add_argument("--divide", default="1,2,3,4", help="nodes of each cluster over these")
    parser.add_argument("--errors", action="store_true", help="errors of predictions instead")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    published_data.add_option(parser)
    options = parser.parse_args()
    try:
        divisors = [int(text) for text in options.divide.split(",")]
    except ValueError:
        divisors = []
    if not divisors or not all(1 <= d <= 8 for d in divisors):
        parser.error(f"--divide: {options.divide!r} is invalid: expected numbers from 1 to 8")
    parts = options.part.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--part: {options.part!r} is invalid: expected {' or '.join(PARTS)}")
    if options.errors and "queues" not in parts:
        parser.error("--errors: of the part queues; leave --part out")
    files: tuple[str, ...] = (JOBS, NODES) if "queues" in parts else ()
    files += sleep_replay.FILES if "sleep" in parts else ()
    folder = published_data.locate_or_exit(parser, options, "helios", *files)
    with published_data.malformed_exits(parser, folder):
        clusters = read(folder) if "queues" in parts else {}
        published = bool(clusters) and published_data.digests(folder, JOBS, NODES) == KNOWN_FILES
        nodes = sleep_replay.read(folder) if "sleep" in parts else None
    if options.errors:
        print(json.dumps(errors(clusters), indent=1))
        return
    queues = rows(clusters, divisors, published=published) if clusters else iter(())
    sleep = sleep_replay.figures(nodes) if nodes else None
    if options.json:
        print(json.dumps({"queues": list(queues), "sleep": sleep}, indent=1))
        return
    if clusters:
        print(
            f"{'DIVIDE':>6}  {'ORDER':<14} {'AVG_JCT_S':>9} {'AVG_WAIT_S':>9}   {'REFERENCE':>9}"
            f" {'':>9} {'':>6} {'P99_JCT_S':>10} {'P99_WAIT_S':>10}"
        )
    for row in queues:
        print(shown(row), flush=True)
    if sleep:
        print("\n".join(sleep_replay.lines(sleep)))


if __name__ == "__main__":
    main()
