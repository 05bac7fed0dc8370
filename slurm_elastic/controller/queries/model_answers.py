"""Goodput model and exchange of gradients of a job, for `explain` and `show`."""

from __future__ import annotations

from slurm_elastic.core.application import Learned
from slurm_elastic.core.cluster import Job, Snapshot
from slurm_elastic.core.report import Report
from slurm_elastic.rpc.answers import ExchangeRow, ModelRow, TypeRow


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

    application, noise = learned.application, learned.noise
    per_node = snapshot.per_node
    held = job.allocation
    job_gpus = held.gpus if held else application.gpus
    model = GoodputModel.of(learned, per_node=per_node)
    rows: list[TypeRow] = []
    for profile in application.types:
        name = profile.gpu_type
        if name not in per_node:
            continue
        gpus = max(profile.unit, job_gpus // profile.unit * profile.unit)
        nodes = -(-gpus // per_node[name])
        if held and held.gpu_type == name:
            nodes = len(held.nodes)
        rows.append(
            {
                "gpu_type": name,
                "gpus": gpus,
                "nodes": nodes,
                "goodput": float(model.goodputs(name, nodes, gpus)) or None,
                "observed": sum(o.gpu_type == name for o in learned.observations),
            }
        )
    return {
        "application": application.name,
        "job_class": application.job_class.value,
        "batch": application.batch,
        "noise_scale": noise.var / noise.sqr * application.initial_batch
        if noise and noise.sqr
        else None,
        "observed": len(learned.observations),
        "types": rows,
    }


def exchange_row(job: Job, report: Report | None) -> ExchangeRow | None:
    """Return how the replicas of a running job exchange gradients, where they have a choice."""
    if report is None or report.run != job.run or job.allocation is None or not report.exchange:
        return None
    return {"schedule": report.exchange, "exposed": report.exposed}
