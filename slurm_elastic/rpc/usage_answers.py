"""JSON of `selastic usage`; see `answers`."""

from __future__ import annotations

from typing import TypedDict


class UsageRow(TypedDict):
    """GPU seconds of one job on one GPU type."""

    job_id: int
    display_id: str
    user: str
    gpu_type: str
    gpu_seconds: float
    seconds: float
    shapes: int


class RunUsage(TypedDict):
    """One allocation of one run; `settled`: as Slurm's accounting has it.

    `gpus` is 0.5 for half of a GPU.
    """

    job_id: int
    display_id: str
    user: str
    run: int
    gpu_type: str
    gpus: float
    start: float
    end: float | None
    seconds: float
    settled: bool


class UserUsage(TypedDict):
    """GPU seconds of one user, by type."""

    user: str
    gpu_seconds: float
    types: dict[str, float]


class SleepUsage(TypedDict):
    """Idle nodes that slept (`mode` is `act`), or could have: `observe`, nothing is switched."""

    mode: str
    nodes: list[str]
    node_hours: float
    late: int
    late_s: float
    kwh: float
    cost: float


class UsageAnswer(TypedDict):
    """`selastic usage`; `kept_since` is the epoch s from which on allocations are kept."""

    time: float
    kept_since: float
    start: float | None
    end: float | None
    jobs: list[UsageRow]
    runs: list[RunUsage]
    users: list[UserUsage]
    sleep: SleepUsage | None
