"""Goodput model, exchange of gradients and execution plans of a job, for `explain` and `show`."""

from __future__ import annotations

import bisect

from slurm_elastic.core.application import Learned
from slurm_elastic.core.cluster import Job, Snapshot
from slurm_elastic.core.plan import JobRecord
from slurm_elastic.core.report import Report
from slurm_elastic.rpc.decision_answers import (
    ExchangeRow,
    ModelRow,
    PlanSpeedRow,
    PlansRow,
    TypeRow,
)


def model_row(snapshot: Snapshot, job: Job, learned: Learned | None) -> ModelRow | None:
    """Return the goodput that is predicted for a job.

    Args:
        snapshot: for the sizes of nodes.
        job: running or pending.
        learned: from its record; None: nothing is known.
    """
    if learned is None:
        return None
    # It brings scipy, 50 MB: not every site's policy needs it.
    from slurm_elastic.models.goodput import GoodputModel  # noqa: PLC0415
    from slurm_elastic.models.model_uncertainty import goodput_deviation  # noqa: PLC0415

    application, noise = learned.application, learned.noise
    per_node = snapshot.per_node
    held = job.allocation
    job_gpus = held.gpus if held else application.gpus
    model = GoodputModel.of(learned, per_node=per_node)

    def row(name: str, gpus: int, nodes: int) -> TypeRow:
        goodput, micro_batch, _ = model.best(name, nodes, gpus)
        deviation = goodput_deviation(learned, name, nodes, gpus, int(micro_batch))
        return {
            "gpu_type": name,
            "gpus": gpus,
            "nodes": nodes,
            "goodput": float(goodput) or None,
            "observed": sum(o.gpu_type == name for o in learned.observations),
            "uncertainty": deviation if goodput else None,
        }

    rows: list[TypeRow] = []
    for profile in application.types:
        name = profile.gpu_type
        if name not in per_node:
            continue
        gpus = max(profile.unit, job_gpus // profile.unit * profile.unit)
        nodes = -(-gpus // per_node[name])
        if held and held.gpu_type == name:
            nodes = len(held.nodes)
        rows.append(row(name, gpus, nodes))
    sizes: list[TypeRow] = []
    if held is not None and application.on(held.gpu_type) is not None:
        sizes = [row(held.gpu_type, *shape) for shape in _next_shapes(snapshot, job)]
    return {
        "application": application.name,
        "job_class": application.job_class.value,
        "batch": application.batch,
        "noise_scale": noise.var / noise.sqr * application.initial_batch
        if noise and noise.sqr
        else None,
        "observed": len(learned.observations),
        "types": rows,
        "sizes": sizes,
    }


def exchange_row(job: Job, report: Report | None) -> ExchangeRow | None:
    """Return how the replicas of a running job exchange gradients, where they have a choice."""
    if report is None or report.run != job.run or job.allocation is None or not report.exchange:
        return None
    return {"schedule": report.exchange, "exposed": report.exposed}


def plans_row(job: Job, record: JobRecord) -> PlansRow | None:
    """Return the execution plans that were tried of a job, if the controller chooses them."""
    if job.directive is None or job.directive.plan != "auto":
        return None
    measured: list[PlanSpeedRow] = [
        {
            "gpu_type": speed.gpu_type,
            "gpus": speed.gpus,
            "nodes": speed.nodes,
            "plan": speed.plan,
            "samples_per_s": speed.samples_per_s,
        }
        for speed in record.plan_speeds
    ]
    return {
        "ordered": record.ordered_plan,
        "measured": measured,
        "out_of_memory": [
            {"gpu_type": row.gpu_type, "gpus": row.gpus, "nodes": row.nodes, "plan": row.plan}
            for row in record.oversized_plans
        ],
    }


def _next_shapes(snapshot: Snapshot, job: Job) -> list[tuple[int, int]]:
    """Return (GPUs, nodes) of about half and twice what a job holds, on as few nodes as possible.

    Where its directive allows neither, the nearest sizes.
    """
    held, directive = job.allocation, job.directive
    per_node = snapshot.per_node.get(held.gpu_type, 0) if held else 0
    if held is None or directive is None or not per_node:
        return []
    sizes = directive.sizes(held.gpu_type)
    below = sizes[: bisect.bisect_left(sizes, held.gpus)]
    above = sizes[bisect.bisect_right(sizes, held.gpus) :]
    half = min(bisect.bisect_left(below, held.gpus / 2), len(below) - 1)
    twice = max(bisect.bisect_right(above, 2 * held.gpus) - 1, 0)
    chosen = (*below[half : half + 1], *above[twice : twice + 1])
    return [(gpus, -(-gpus // per_node)) for gpus in chosen]
