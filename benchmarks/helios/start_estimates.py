"""Start estimates of pending jobs against the starts in drawn queues (docs/durations.md).

    python -m benchmarks.helios.start_estimates [--queues 100] [--seed 1] [--json]

Each queue is simulated apart (planned_queue.py): Slurm's backfill, which plans every
pending job with time limits, and, with elastic jobs, shrinks to MIN where they let one start. All
rows estimate the same jobs from the same snapshots: pending elastic ones that have to wait, and of
which every row says something. No jobs are submitted later.

- `in order`: each partition starts in order, without backfill.
- `backfill`: what lies behind in the queue starts sooner where it fits.
- `backfill, giving way`: and elastic jobs give GPUs away.

ERROR: mean distance between the estimate's median and the start, in minutes. BIAS: the mean of
estimate less start. WITHIN_P90: starts no later than the 90 % quantile; 90 % is right.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.helios import planned_queue
from benchmarks.helios.planned_queue import PlannedQueue
from slurm_elastic.placement.starts.start_estimates import StartEstimate, start_estimates

ROWS: dict[str, Callable[[PlannedQueue], dict[int, StartEstimate]]] = {
    "in order": lambda q: start_estimates(q.snapshot(), q.lengths(), backfill=False),
    "backfill": lambda q: start_estimates(q.snapshot(), q.lengths()),
    "backfill, giving way": lambda q: start_estimates(q.snapshot(), q.lengths(), gives=q.givers()),
}


def errors(count: int, seed: int, *, elastic: bool) -> list[dict[str, Any]]:
    """Return the figures of each row on the same queues.

    Args:
        count: queues.
        seed: of the first; the next ones have the next numbers.
        elastic: whether some of the running jobs are elastic and give way.
    """
    estimated: dict[str, list[tuple[StartEstimate, float]]] = {name: [] for name in ROWS}
    for number in range(seed, seed + count):
        queue = planned_queue.drawn(random.Random(number), elastic=elastic)
        estimates = {name: of(queue) for name, of in ROWS.items()}
        known = set[int].intersection(*(set(e) for e in estimates.values()))
        now, starts = queue.now, queue.run()
        for job_id in sorted(known & starts.keys()):
            for name, of_jobs in estimates.items():
                estimated[name].append((_relative(of_jobs[job_id], now), starts[job_id] - now))
    return [_figures(name, rows) for name, rows in estimated.items()]


def _relative(estimate: StartEstimate, now: float) -> StartEstimate:
    return StartEstimate(median=estimate.median - now, p90=estimate.p90 - now)


def _figures(name: str, rows: list[tuple[StartEstimate, float]]) -> dict[str, Any]:
    return {
        "estimate": name,
        "jobs": len(rows),
        "wait_min": statistics.fmean(start for _, start in rows) / 60,
        "error_min": statistics.fmean(abs(e.median - start) for e, start in rows) / 60,
        "bias_min": statistics.fmean(e.median - start for e, start in rows) / 60,
        "within_p90": statistics.fmean(start <= e.p90 + 1e-6 for e, start in rows),
    }


def lines(figures: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Return the table."""
    for queues, rows in figures.items():
        yield f"{queues}: {rows[0]['jobs']} jobs, which waited {rows[0]['wait_min']:.0f} min"
        yield f"{'ESTIMATE':<22}{'ERROR':>8}{'BIAS':>8}{'WITHIN_P90':>12}"
        for row in rows:
            yield (
                f"{row['estimate']:<22}{row['error_min']:>8.1f}{row['bias_min']:>+8.1f}"
                f"{100 * row['within_p90']:>11.0f}%"
            )


def main() -> None:
    """Print the figures of queues without, and with, elastic jobs that run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.helios.start_estimates",
        description=__doc__,
        formatter_class=_Raw,
    )
    parser.add_argument("--queues", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = {
        "rigid jobs run": errors(options.queues, options.seed, elastic=False),
        "elastic jobs run, too": errors(options.queues, options.seed, elastic=True),
    }
    print(json.dumps(figures) if options.json else "\n".join(lines(figures)))


_Raw = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
