"""The integer program of a round with the names of its jobs and configurations, for answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from slurm_elastic.policies.milp.assignment_milp import AssignmentProgram, Ints


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundProgram:
    """Program of one round.

    Attributes:
        program: J jobs, C configurations, T GPU types (`types`).
        job_ids: [J] raw id of each row's job.
        types: [T] names of the GPU types.
        nodes: [C] nodes of each configuration.
        choice: [J] configuration that the solver chose, -1: none.
        parts: in which GPUs are counted, of each GPU: 2 where half of one is a configuration.
    """

    program: AssignmentProgram
    job_ids: tuple[int, ...]
    types: tuple[str, ...]
    nodes: Ints
    choice: Ints
    parts: int = 1


@runtime_checkable
class StatesProgram(Protocol):
    """A policy that keeps the program of its last round; `selastic plan --export` shows it."""

    round_program: RoundProgram | None
