"""Table of `selastic partition --plans`: execution plans by number of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurm_elastic.cli.formatting import clean, short_seconds, size
from slurm_elastic.cli.tables import Column, TableLayout, render

if TYPE_CHECKING:
    from slurm_elastic.models.execution.profile_plans import ProfiledPlan

_COLUMNS = (
    Column("GPUS", lambda r: str(r["gpus"]), right=True),
    Column("PLAN", lambda r: r["plan"]),
    Column("MEMORY", lambda r: size(r["memory_bytes"]), right=True),
    Column(
        "STEP", lambda r: "-" if r["step_s"] is None else short_seconds(r["step_s"]), right=True
    ),
)


def plan_answer(
    plans: list[ProfiledPlan], *, samples: int, batch: int, gpu_bytes: float | None
) -> dict[str, Any]:
    """Return the answer of --json.

    Args:
        plans: those that fit.
        samples: that the profile is of.
        batch: samples of a step.
        gpu_bytes: memory of a GPU; None: not given.
    """
    from slurm_elastic.models.execution.profile_plans import MISSING  # noqa: PLC0415

    rows = [
        {
            "gpus": row.gpus,
            "plan": str(row.plan),
            "replicas": row.plan.replicas,
            "stages": row.plan.stages,
            "tensor": row.plan.tensor,
            "shard": row.plan.sharding.value,
            "recompute": row.plan.recompute,
            "accumulation": row.plan.accumulation,
            "memory_bytes": row.memory_bytes,
            "step_s": row.step_s,
        }
        for row in plans
    ]
    return {
        "samples": samples,
        "batch": batch,
        "gpu_bytes": gpu_bytes,
        "missing": list(MISSING),
        "plans": rows,
    }


def shown_plans(answer: dict[str, Any], name: str, layout: TableLayout) -> list[str]:
    """Return the lines of the answer."""
    rows, limit = answer["plans"], answer["gpu_bytes"]
    table = render(rows, _COLUMNS, [c.header for c in _COLUMNS], layout)
    if layout.parsable or not layout.header:
        return table
    count = f"{len(rows)} plan{'s' * (len(rows) != 1)}"
    fit = "; --memory=BYTES of a GPU leaves out what does not fit"
    if limit is not None:
        fit = f" that fit{'s' * (len(rows) == 1)} into {size(limit)}" if rows else ""
        count = count if rows else f"no plan fits into {size(limit)}"
    return [
        f"{clean(name)}, {answer['batch']} samples in a step: {count}{fit}",
        *(table if rows else ()),
        f"Not in a profile: {', '.join(answer['missing'])}.",
    ]
