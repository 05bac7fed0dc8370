"""The integer program of a round in the answer to `plan`; `selastic plan --export` writes it."""

from __future__ import annotations

from typing import TypedDict


class ProgramConfiguration(TypedDict):
    """One configuration that jobs may get."""

    gpu_type: str
    nodes: int
    gpus: int


class ProgramJob(TypedDict):
    """One job; configurations are indices into those of the program.

    `fixed` is the one that it keeps, `chosen` the solver's choice; None: none.
    """

    job_id: int
    display_id: str
    configurations: list[int]
    costs: list[float]
    fixed: int | None
    chosen: int | None


class ProgramLimit(TypedDict):
    """A limit on some of the jobs.

    `uses` is what each job takes of it in each of its configurations, 0 for jobs that it does not
    count; `left` what they may take together.
    """

    left: float
    uses: list[list[float]]


class ProgramAnswer(TypedDict):
    """The program: at most one configuration per job, GPUs by type, limits, least cost.

    `capacity` is what the jobs shown may hold together; `not_running` the cost of a job without
    GPUs; `partial` whether other users' jobs are left out, with the GPUs that they got.
    `parts_per_gpu` are the parts in which GPUs and capacities are counted, 2: halves.
    """

    not_running: float
    capacity: dict[str, int]
    configurations: list[ProgramConfiguration]
    jobs: list[ProgramJob]
    limits: list[ProgramLimit]
    partial: bool
    parts_per_gpu: int
