"""Jobs of Rubick's traces.

A trace is CSV with the columns name, submission_time, duration, application, num_gpus, exec_plan,
steps and is_sla (1: guaranteed); further ones are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.simulator.execution.step_table import StepTable, published_plan
from slurm_elastic.simulator.workloads.workload import WorkloadError, rows

_COLUMNS = (
    "name",
    "submission_time",
    "duration",
    "application",
    "num_gpus",
    "exec_plan",
    "steps",
    "is_sla",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJob:
    """One job of a trace.

    Attributes:
        name: unique in its trace.
        submit_s: seconds since the trace's start.
        model: name of its step table.
        gpus: GPUs that the user requests.
        plan: execution plan that the user requests.
        steps: optimisation steps of the whole job.
        guaranteed: whether it must be as fast as with what the user requests.
    """

    name: str
    submit_s: float
    model: str
    gpus: int
    plan: ExecutionPlan
    steps: int
    guaranteed: bool = False


def read_plan_jobs(path: Path, tables: Mapping[str, StepTable]) -> tuple[PlanJob, ...]:
    """Read one trace, in the order of the file.

    Args:
        path: the file.
        tables: step tables of the models that may occur.

    Raises:
        WorkloadError: unreadable, a column is missing, or a value is invalid.
    """
    jobs: dict[str, PlanJob] = {}
    shape = f"must have {','.join(_COLUMNS)}"
    for line, row in rows(path, _COLUMNS, what="a CSV file of jobs", header_line=shape):
        where = f"{path.name}:{line}"
        if row["application"] not in tables:
            known = ", ".join(sorted(tables))
            raise WorkloadError(
                f"{where}: application {row['application'][:40]!r} is invalid: expected {known}"
            )
        if row["name"] in jobs:
            raise WorkloadError(f"{where}: name {row['name']} occurs twice; give each job its own")
        gpus = round(_number(row, "num_gpus", where, least=1))
        try:
            plan = published_plan(row["exec_plan"], gpus)
        except WorkloadError as error:
            raise WorkloadError(f"{where}: {error}") from None
        jobs[row["name"]] = PlanJob(
            name=row["name"],
            submit_s=_number(row, "submission_time", where, least=0),
            model=row["application"],
            gpus=gpus,
            plan=plan,
            steps=round(_number(row, "steps", where, least=1)),
            guaranteed=_number(row, "is_sla", where, least=0) > 0,
        )
    if not jobs:
        raise WorkloadError(f"{path}: has no job; each line after the first is one")
    return tuple(jobs.values())


def read_step_tables(folder: Path) -> dict[str, StepTable]:
    """Read all step tables of a folder, by model.

    Raises:
        WorkloadError: there is none, or one is invalid.
    """
    tables = {path.stem: StepTable.read(path) for path in sorted(folder.glob("*.csv"))}
    if not tables:
        raise WorkloadError(f"{folder}: has no CSV file; name a folder of step tables")
    return tables


def _number(row: Mapping[str, str], column: str, where: str, *, least: float) -> float:
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not least <= value < 1e12:
        raise WorkloadError(
            f"{where}: {column} {row[column][:40]!r} is invalid: expected a number from {least:g}"
        )
    return value
