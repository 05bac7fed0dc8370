"""Training of the predictor in a process of its own, which ends after it.

It reads the request (JSON) from its standard input and Slurm's accounting by sacct, and writes a
pickled `Trained` to its standard output. It runs at the lowest priority, so that rounds are not
delayed.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.models.durations import prediction_error
from slurm_elastic.models.durations.duration_predictor import DurationPredictor
from slurm_elastic.models.durations.finished_job import FinishedJob, JobRequest
from slurm_elastic.models.durations.limit_use import LimitUse, limit_uses
from slurm_elastic.models.durations.prediction_error import PredictionError
from slurm_elastic.slurm import ended_runs
from slurm_elastic.slurm.ended_runs import EndedRun

#: Shorter jobs failed at their start, or were tests.
LEAST_S = 60.0
_LOWEST_PRIORITY = 19
_FAILED = 3
#: Part of the time that sacct may take.
_READING = 0.5


class TrainingError(SlurmElasticError):
    """A training without result; the message gives the reason, in one line."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a training.

    Attributes:
        jobs: number of jobs learned from.
        at: epoch s.
        errors: on the latest of these jobs, by the way to predict.
        limits: use of time limits by these jobs.
        seconds: time that it took.
    """

    predictor: DurationPredictor = field(default_factory=DurationPredictor)
    jobs: int = 0
    at: float = 0.0
    errors: Mapping[str, PredictionError] = field(default_factory=dict)
    limits: Sequence[LimitUse] = ()
    seconds: float = 0.0


def train(*, days: float, most: int, boosted: bool, timeout_s: float) -> Trained:
    """Train in a process of its own.

    Args:
        days: of accounting.
        most: jobs at most.
        boosted: learn the boosted model, too, if scikit-learn is installed.
        timeout_s: after which the process is killed.

    Raises:
        TrainingError: it failed or took too long.
    """
    request = {"days": days, "most": most, "boosted": boosted, "timeout_s": timeout_s}
    try:
        process = subprocess.run(
            [sys.executable, "-c", f"import sys; from {__name__} import main; sys.exit(main())"],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TrainingError(
            f"[durations] timeout_s: predictions were not trained in {timeout_s:g} s; lower"
            " history_days or most_jobs"
        ) from None
    except OSError as error:
        raise TrainingError(f"predictions were not trained: {error.strerror}") from None
    if process.returncode:
        lines = process.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {process.returncode}"
        raise TrainingError(f"predictions were not trained: {reason[:300]}")
    # Written by the process above, which runs this module under the same account.
    trained: Trained = pickle.loads(process.stdout)  # noqa: S301
    return trained


def finished(runs: Iterable[EndedRun]) -> list[FinishedJob]:
    """Return the jobs of these runs: run time at the size of the longest run."""
    jobs = []
    for life in ended_runs.by_job(runs):
        main = max(life, key=lambda r: r.seconds)
        seconds = sum(r.seconds * r.gpus for r in life) / main.gpus
        if seconds >= LEAST_S:
            request = JobRequest(
                user=main.user,
                name=main.name,
                gpus=main.gpus,
                group=main.partition,
                submitted=life[0].submitted,
                limit_s=life[-1].limit_s,
            )
            jobs.append(FinishedJob(request=request, seconds=seconds, ended=life[-1].end))
    return jobs


def main() -> int:
    """Read the request, train, write the result; return the exit code."""
    os.nice(_LOWEST_PRIORITY)
    begin = time.monotonic()
    request = json.load(sys.stdin)
    try:
        runs = ended_runs.read(
            days=request["days"],
            most=request["most"],
            timeout_s=request["timeout_s"] * _READING,
        )
    except SlurmElasticError as error:
        print(error, file=sys.stderr)  # noqa: T201 - read by `train`
        return _FAILED
    jobs = finished(runs)
    trained = Trained(
        predictor=DurationPredictor.trained(jobs, boosted=request["boosted"]),
        jobs=len(jobs),
        at=time.time(),
        errors=prediction_error.of_ways(jobs, boosted=request["boosted"]),
        limits=limit_uses(jobs),
        seconds=time.monotonic() - begin,
    )
    sys.stdout.buffer.write(pickle.dumps(trained))
    return 0
