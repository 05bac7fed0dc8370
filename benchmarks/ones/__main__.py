"""ONES (SC'21): its operators, its predictor and the anytime search, on the published trace.

    python -m benchmarks.ones [--data DIR] [--json]

Parts, each with the figures of REFERENCE beside ours:

- replays of the first jobs of the trace (trace_replay.py): first come, first served, shortest
  first, freely dealt GPUs, the published operators, and the anytime search at each event;
- progress: mean absolute error at half of the work, each of the 20 trainings predicted from the
  others, and the log likelihood;
- the anytime search on a round of Sia's program that took a solver more than 85 s, in 0.5 s of CPU
  time, without any solver and without a start;
- one generation of 64 GPUs in ms of CPU time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from scipy.stats import beta

from benchmarks import solver
from benchmarks.ones import trace_replay
from benchmarks.ones.beta_progress import BetaProgress, EpochRecord, mean_log_likelihood
from benchmarks.ones.trace_replay import TraceJob
from slurm_elastic.policies.milp import anytime_search, assignment_milp
from slurm_elastic.policies.milp.milp_solver import Clock
from slurm_elastic.policies.ones import evolution
from slurm_elastic.policies.ones.block_order import EMPTY
from tests.support import published_data

FILES = ("trace.csv", "types.csv", "history.csv")
#: Epochs of finished trainings, by their numbers.
Trainings = Mapping[str, Sequence[EpochRecord]]

#: Digests of the files to which REFERENCE belongs.
KNOWN_FILES = ("4adcf51aed3b", "7b844274f921")
#: (jobs, GPUs): average completion in s of another implementation.
REFERENCE: dict[tuple[int, int], dict[str, float | None]] = {
    (50, 64): {
        "fcfs": 421.6, "fcfs, strict": 533.7, "shortest first, strict": 457.7,
        "freely dealt": 249.6, "ones": 1176.6, "anytime search": None,
    },
    (20, 32): {
        "fcfs": 516.3, "fcfs, strict": None, "shortest first, strict": 539.8,
        "freely dealt": 340.6, "ones": 960.3, "anytime search": None,
    },
}  # fmt: skip
HARD, OPTIMUM, CPU_S = "hard_instance.json", 117.05, 0.5


class CpuClock(Clock):
    """Rest of a limit of CPU time."""

    def __init__(self, limit_s: float) -> None:
        self._until = time.process_time() + limit_s

    @property
    def left(self) -> float:
        """Seconds."""
        return self._until - time.process_time()


def replays(
    trace: Sequence[TraceJob], history: Trainings, *, published: bool
) -> Iterator[dict[str, Any]]:
    """Yield the average completion of each way to schedule.

    Args:
        trace: jobs, in order of submission.
        history: all that the predictor learns from.
        published: whether REFERENCE belongs to these jobs.
    """
    predictor = BetaProgress.fit([r for records in history.values() for r in records])
    for (count, gpus), figures in REFERENCE.items():
        reference = figures if published else {}
        jobs = [job for job in trace[:count] if job.gpus <= gpus]
        if not jobs:
            continue
        rigid = {
            "fcfs": trace_replay.rigid(jobs, gpus, key=lambda j: j.submitted, strict=False),
            "fcfs, strict": trace_replay.rigid(jobs, gpus, key=lambda j: j.submitted, strict=True),
            "shortest first, strict": trace_replay.rigid(
                jobs, gpus, key=lambda j: j.seconds, strict=True
            ),
            "freely dealt": trace_replay.fluid(jobs, gpus),
        }
        elastic = {
            "ones": trace_replay.published(jobs, gpus, predictor),
            "anytime search": trace_replay.searched(jobs, gpus),
        }
        for name, completions in rigid.items():
            yield _row(len(jobs), gpus, name, mean(completions), reference.get(name))
        for name, outcome in elastic.items():
            row = _row(len(jobs), gpus, name, outcome.completion_s, reference.get(name))
            yield row | {"execution_s": outcome.execution_s, "changes": outcome.changes}


def _row(
    jobs: int, gpus: int, name: str, completion_s: float, reference: float | None
) -> dict[str, Any]:
    return {
        "jobs": jobs,
        "gpus": gpus,
        "schedule": name,
        "completion_s": completion_s,
        "reference": reference,
    }


def progress(history: Trainings) -> dict[str, float]:
    """Return the errors of predicted progress, each training left out once."""
    errors, by_epochs, likelihood, constant = [], [], [], []
    for number, records in history.items():
        others = [r for n, of_other in history.items() if n != number for r in of_other]
        model = BetaProgress.fit(others)
        half = min(records, key=lambda r: abs(r.progress - 0.5))
        usual = mean(len(of_other) for n, of_other in history.items() if n != number)
        errors.append(abs(float(model.expected([half])[0]) - half.progress))
        by_epochs.append(abs(min(1.0, half.epochs / usual) - half.progress))
        likelihood.append(model.log_likelihood(records))
        done = np.array([r.progress for r in others])
        a, b, _, _ = beta.fit(done, floc=0, fscale=1)
        ones = np.ones(len(records))
        own = np.array([r.progress for r in records])
        constant.append(mean_log_likelihood(a * ones, b * ones, own))
    return {
        "error_at_half": mean(errors),
        "error_by_mean_epochs": mean(by_epochs),
        "log_likelihood": mean(likelihood),
        "log_likelihood_of_constant": mean(constant),
    }


def hard_instance(folder: Path) -> dict[str, float]:
    """Return the objective that the anytime search reaches without a start."""
    _, program = solver.published(folder / HARD)
    fixed, _ = assignment_milp.fixings(program)
    columns = assignment_milp.program_columns(program, fixed)
    settled = program.objective(fixed)
    picked = anytime_search.improved(columns, [], clock=CpuClock(CPU_S))
    objective = settled - float(columns.profit[picked].sum())
    return {"objective": objective, "optimum": OPTIMUM, "above": objective / OPTIMUM - 1}


def generation_ms() -> float:
    """Return the CPU time of one generation of 64 GPUs and 20 jobs."""
    gpus, count, rng = 64, 20, np.random.default_rng(0)
    left = rng.uniform(100, 5000, size=count)
    sizes = np.arange(gpus + 1)
    jobs = evolution.EvolvingJobs(
        known=np.ones(count, dtype=np.bool_),
        least=np.ones(count, dtype=np.int64),
        room=rng.integers(1, 8, size=count),
        limit=np.full(count, 8),
        single_s=left,
        service=np.outer(left, sizes**0.1) * (sizes > 0),
    )
    present = np.full(gpus, EMPTY, dtype=np.int64)
    rows = evolution.first_generation(jobs, gpus, rng)
    begin = time.process_time()
    for _ in range(10):
        rows = evolution.next_generation(rows, jobs, present, rng)
        present = rows[0]
    return 100 * (time.process_time() - begin)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ones", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    published_data.add_option(parser)
    options = parser.parse_args()
    folder = published_data.locate_or_exit(parser, options, "ones", *FILES)
    sia = published_data.locate_optional(
        parser, options, "sia", HARD, without="the hard instance is left out"
    )
    with published_data.malformed_exits(parser, folder):
        trace, history = trace_replay.read(folder)
        published = published_data.digests(folder, "trace.csv", "types.csv") == KNOWN_FILES
    figures: dict[str, Any] = {
        "replays": list(replays(trace, history, published=published)),
        "progress": progress(history),
        "hard_instance": hard_instance(sia) if sia else None,
        "generation_ms": generation_ms(),
    }
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    print(
        f"{'JOBS':>4} {'GPUS':>4}  {'SCHEDULE':<24} {'AVG_JCT_S':>9} {'REFERENCE':>9} {'DIFF':>7}"
    )
    for row in figures["replays"]:
        known = row["reference"]
        tail = f"{known:>9.1f} {row['completion_s'] / known - 1:>+7.1%}" if known else ""
        print(
            f"{row['jobs']:>4} {row['gpus']:>4}  {row['schedule']:<24}"
            f" {row['completion_s']:>9.1f} {tail}"
        )
    print(
        "progress at half of the work, mean absolute error:"
        " {error_at_half:.3f}; by the mean number of epochs: {error_by_mean_epochs:.3f}\n"
        "log likelihood: {log_likelihood:.3f}; of a constant distribution:"
        " {log_likelihood_of_constant:.3f}".format(**figures["progress"])
    )
    if figures["hard_instance"]:
        print(
            "hard instance, {0} s of CPU: {objective:.2f}, optimum {optimum}, {above:+.2%}".format(
                CPU_S, **figures["hard_instance"]
            )
        )
    print(f"one generation of 64 GPUs and 20 jobs: {figures['generation_ms']:.1f} ms of CPU")


if __name__ == "__main__":
    main()
