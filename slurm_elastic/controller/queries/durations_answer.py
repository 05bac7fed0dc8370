"""Answers to `durations` and `limits`: predictions of run times, and the use of time limits."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from slurm_elastic.controller.lengths.length_predictions import LengthPredictions
from slurm_elastic.core.prediction.duration_estimate import DurationEstimate
from slurm_elastic.models.durations.finished_job import JobRequest
from slurm_elastic.models.durations.limit_advice import advised_limit_s
from slurm_elastic.rpc.duration_answers import DurationsAnswer, LengthRow, LimitsAnswer, LimitUseRow


def durations(
    predictions: LengthPredictions, user: str, args: Mapping[str, Any], *, own_names: bool
) -> DurationsAnswer:
    """Return the state of predictions and, if a job is named, that of its run time.

    Args:
        predictions: of the controller.
        user: the caller, whose job it would be.
        args: `name`, and optionally `gpus`, `partition`, `limit_s`.
        own_names: leave out names of other users.
    """
    trained = predictions.trained
    estimate = None
    if args.get("name") is not None:
        estimate = predictions.predict(
            JobRequest(
                user=user,
                name=args["name"],
                gpus=max(1, args.get("gpus") or 1),
                group=args.get("partition") or "",
                submitted=time.time(),
                limit_s=args.get("limit_s") or None,
                own_names=own_names,
            )
        )
    return {
        "enabled": predictions.enabled,
        "jobs": trained.jobs,
        "trained": trained.at or None,
        "boosted": trained.predictor.boosted is not None,
        "problem": predictions.problem,
        "predictions": [
            {"prediction": name, **dataclasses.asdict(error)}
            for name, error in trained.errors.items()
        ],
        "length": length_row(estimate),
        "advised_limit_s": advised_limit_s(estimate) if estimate else None,
    }


def limits(
    predictions: LengthPredictions, args: Mapping[str, Any], *, private_to: str | None
) -> LimitsAnswer:
    """Return the use of time limits by the jobs that predictions rest on.

    Args:
        predictions: of the controller.
        args: `user`, whose jobs are shown; without it those of all users.
        private_to: name of the caller, who sees only the own jobs; None: the caller sees all.
    """
    users = {args.get("user"), private_to} - {None}
    trained = predictions.trained
    return {
        "enabled": predictions.enabled,
        "jobs": trained.jobs,
        "trained": trained.at or None,
        "problem": predictions.problem,
        "limits": [
            LimitUseRow(**dataclasses.asdict(use))  # type: ignore[typeddict-item]
            for use in trained.limits
            if users <= {use.user}
        ],
    }


def length_row(estimate: DurationEstimate | None) -> LengthRow | None:
    """Return the row of a prediction; None: there is none."""
    if estimate is None:
        return None
    return {
        "median_s": estimate.median,
        "p90_s": estimate.quantile(0.9),
        "basis": estimate.basis,
        "jobs": estimate.jobs,
    }
