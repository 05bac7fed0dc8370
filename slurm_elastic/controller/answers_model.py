"""What is believed of a job's goodput, for `explain` and `show`."""

from __future__ import annotations

from typing import TypedDict

from slurm_elastic.application import Learned
from slurm_elastic.cluster import Job, Snapshot


class TypeRow(TypedDict):
    """One GPU type: `goodput` on as many GPUs as the job holds, in samples/s at its initial batch.

    `observed` counts the shapes it was measured in; 0: the goodput is an estimate from other
    types and earlier jobs. None: it cannot run so.
    """

    gpu_type: str
    gpus: int
    nodes: int
    goodput: float | None
    observed: int


class ModelRow(TypedDict):
    """What goodput models are fitted to: samples, and the noise scale (samples) if measured."""

    application: str
    job_class: str
    batch: int
    noise_scale: float | None
    observed: int
    types: list[TypeRow]


def model_row(snapshot: Snapshot, job: Job, learned: Learned | None) -> ModelRow | None:
    """What is believed of a job.

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
    wanted = held.gpus if held else application.gpus
    model = GoodputModel.of(learned, per_node=per_node)
    rows: list[TypeRow] = []
    for profile in application.types:
        name = profile.gpu_type
        if name not in per_node:
            continue
        gpus = max(profile.unit, wanted // profile.unit * profile.unit)
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
