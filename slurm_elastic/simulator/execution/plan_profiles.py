"""Published profiles of Rubick: points that its step-time model is fitted to and validated with.

A folder with `MODEL-config.csv` and `MODEL-data.csv` (points of a fit), `fitted.csv`,
`environment.csv` (link speeds) and `validation_points.csv`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.core.execution.execution_plan import ExecutionPlan, Sharding
from slurm_elastic.core.layout import LayoutText
from slurm_elastic.models.execution.plan_fitting import MeasuredPlan
from slurm_elastic.models.execution.plan_times import (
    ModelWork,
    PassCounts,
    PlanCoefficients,
    PlanLinks,
    PlanStepParts,
)
from slurm_elastic.simulator.workloads.workload import WorkloadError

_SHARDINGS = {0: Sharding.NONE, 1: Sharding.OFFLOAD, 2: Sharding.OPTIMIZER}
#: Link speed between nodes of the published validation, for plans with stages or tensor=N.
_BETWEEN = 20.0


@dataclass(frozen=True, slots=True)
class ValidationPoint:
    """One published comparison: name of the plan, the point, and the published prediction."""

    plan_name: str
    point: MeasuredPlan
    published_ms: float


@dataclass(frozen=True, slots=True)
class PublishedProfile:
    """All that is published of one model.

    Attributes:
        links: speeds that go with the coefficients.
        fitted: published coefficients.
        points: to fit to.
        validation: to compare with.
    """

    links: PlanLinks
    fitted: PlanCoefficients
    points: tuple[MeasuredPlan, ...]
    validation: tuple[ValidationPoint, ...]


def read_profiles(folder: Path) -> dict[str, PublishedProfile]:
    """Read the profiles of all models.

    Raises:
        WorkloadError: a file is missing or has an unexpected form.
    """
    try:
        fitted = {
            row.pop("model").lower().removesuffix("b"): PlanCoefficients(*map(float, row.values()))
            for row in _rows(folder / "fitted.csv")
        }
        validation = [_validation(row) for row in _rows(folder / "validation_points.csv")]
        profiles = {}
        for row in _rows(folder / "environment.csv"):
            model = row["model"]
            stem = f"{model}b" if model.startswith("llama") else model
            profiles[model] = PublishedProfile(
                PlanLinks(
                    host=float(row["B_pcie"]), inside=float(row["B_nvlink"]), between=_BETWEEN
                ),
                fitted[model],
                tuple(
                    _point(config, data)
                    for config, data in zip(
                        _rows(folder / f"{stem}-config.csv"),
                        _rows(folder / f"{stem}-data.csv"),
                        strict=True,
                    )
                ),
                tuple(point for name, point in validation if name == model),
            )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise WorkloadError(f"{folder}: profiles are invalid: {error}") from None
    return profiles


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as stream:
        yield from csv.DictReader(stream)


def _point(config: Mapping[str, str], data: Mapping[str, str]) -> MeasuredPlan:
    return MeasuredPlan(
        plan=ExecutionPlan(
            LayoutText((int(config["gpus"]),)), sharding=_SHARDINGS[int(config["zero_type"])]
        ),
        work=ModelWork(parameters=float(config["parameter_size"]), batch=int(config["batch_size"])),
        forward_ms=float(data["forward_time"]),
        inside=True,
        threads=int(config["num_cpu_threads"]),
        # The published fit leaves these out.
        counts=PassCounts(),
        measured=PlanStepParts(float(data["Tcc"]), float(data["Topt"]), float(data["iter_time"])),
    )


def _validation(row: Mapping[str, str]) -> tuple[str, ValidationPoint]:
    ranks = int(row["gpus_or_pp"])
    counts, inside = None, True
    if row["form"] == "dp":
        plan = ExecutionPlan(LayoutText((ranks,)), sharding=_SHARDINGS[int(row["zero_type"])])
        counts = PassCounts(float(row["f"]), float(row["b"]), float(row["c"]))
    else:
        tensor, nodes, each = (int(row[name]) for name in ("tp", "nodes", "gpus_per_node"))
        replicas = nodes * each // tensor // ranks
        plan = ExecutionPlan(LayoutText((replicas,) * ranks), tensor=tensor)
        inside = each > tensor and ranks == nodes
    step_ms = float(row["actual_ms"])
    point = MeasuredPlan(
        plan=plan,
        work=ModelWork(
            parameters=float(row["P"]),
            batch=int(row["batch"]),
            width=float(row["S"]),
            layers=int(row["L"] or 1),
        ),
        forward_ms=float(row["forward_ms"]),
        inside=inside,
        threads=int(row["threads"] or 1),
        counts=counts,
        measured=PlanStepParts(step_ms, step_ms, step_ms),
    )
    return row["model"], ValidationPoint(row["plan"], point, float(row["published_prediction_ms"]))
