"""Answers about predicted run times."""

from __future__ import annotations

from typing import Any, TypedDict


class LengthRow(TypedDict):
    """A predicted run time on the GPUs that a job asked for.

    `basis`: the most similar kind of past jobs that it rests on (`same-name`, `similar-name`,
    `user`, `shape`, `all`), and their number.
    """

    median_s: float
    p90_s: float
    basis: str
    jobs: int


class LimitUseRow(TypedDict):
    """Time limits and run times of one user's jobs whose names differ in numbers only.

    `name`: with `#` in place of each number; `jobs`: that have ended; `limit_s`: median of their
    limits; `reached`: jobs that used their whole limit; `advised_s`: limit that such jobs rarely
    exceed; `gpu_hours`: requested beyond that, negative where the limits are less.
    """

    user: str
    name: str
    jobs: int
    limit_s: float
    median_s: float
    p90_s: float
    reached: int
    advised_s: float
    gpu_hours: float


class LimitsAnswer(TypedDict):
    """`selastic report` without a file.

    `jobs`, `trained`, `problem`: as of `DurationsAnswer`; `limits`: the largest `gpu_hours` first.
    """

    enabled: bool
    jobs: int
    trained: float | None
    problem: str
    limits: list[LimitUseRow]


class DurationsAnswer(TypedDict):
    """`selastic durations` without a file, and the advice of `esbatch --advise`.

    `jobs`: past jobs that predictions rest on; `trained`: epoch s; `problem`: why the last training
    failed, "" if it did not; `predictions`: errors, a row for each way to predict; `length` and
    `advised_limit_s`: of the job asked about, null without one or if too little is known.
    """

    enabled: bool
    jobs: int
    trained: float | None
    boosted: bool
    problem: str
    predictions: list[dict[str, Any]]
    length: LengthRow | None
    advised_limit_s: float | None
