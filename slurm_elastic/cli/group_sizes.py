"""Table of `selastic partition` for samples cut in space: memory of a rank by size of its group."""

from __future__ import annotations

from typing import Any

from slurm_elastic.cli.formatting import clean, size
from slurm_elastic.cli.tables import Column, TableLayout, render
from slurm_elastic.core.slab_grid import SlabGrid
from slurm_elastic.models.spatial.group_memory import group_memory
from slurm_elastic.models.spatial.volume_layers import VolumeNetwork

#: Sizes that are shown, those up to the smallest one that fits.
_SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

_COLUMNS = (
    Column("LAYOUT", lambda r: r["layout"]),
    Column("SLAB", lambda r: "x".join(map(str, r["slab"]))),
    Column("ACTIVATIONS", lambda r: size(r["activation_bytes"]), right=True),
    Column("PLANES", lambda r: size(r["plane_bytes"]), right=True),
    Column("WORKING", lambda r: size(r["working_bytes"]), right=True),
    Column("WEIGHTS", lambda r: size(r["weight_bytes"]), right=True),
    Column("MEMORY", lambda r: size(r["memory_bytes"]), right=True),
    Column("SENT", lambda r: size(r["sent_bytes"]), right=True),
)


def group_answer(
    network: VolumeNetwork, *, most: int, batch: int, memory_bytes: float | None
) -> dict[str, Any]:
    """Return the answer of --json: groups that cut the first dimension, and the least that fits.

    Args:
        network: layers.
        most: GPUs of the largest group.
        batch: samples that go through a group at once.
        memory_bytes: of a GPU; None: `unit` is None.
    """
    extents = network.layers[0].extents[0]
    counts = [count for count in range(1, most + 1) if count <= extents[0]]
    rows: list[dict[str, Any]] = []
    unit = None
    for count in counts:
        parts = (count, *(1,) * (len(extents) - 1))
        memory = group_memory(network, parts, batch=batch)
        grids = [SlabGrid(parts, index) for index in range(count)]
        fits = memory_bytes is not None and memory.total <= memory_bytes
        if count in _SHOWN or fits:
            slab = grids[0].slab(extents)
            sent = max(sum(network.sent_bytes(grid, batch=batch)) for grid in grids)
            rows.append(
                {
                    "layout": f"1x1s{count}" if count > 1 else "1x1",
                    "gpus": count,
                    "slab": [int(part.stop - part.start) for part in slab],
                    "activation_bytes": memory.activations,
                    "plane_bytes": memory.planes,
                    "working_bytes": memory.working,
                    "weight_bytes": memory.weights,
                    "memory_bytes": memory.total,
                    "sent_bytes": sent,
                }
            )
        if fits:
            unit = count
            break
    return {"extents": list(extents), "batch": batch, "groups": rows, "unit": unit}


def shown_groups(
    answer: dict[str, Any], name: str, layout: TableLayout, memory_bytes: float | None
) -> list[str]:
    """Return the lines of the answer."""
    table = render(answer["groups"], _COLUMNS, [c.header for c in _COLUMNS], layout)
    if layout.parsable or not layout.header:
        return table
    extents = "x".join(map(str, answer["extents"]))
    first = f"{clean(name)}, volumes of {extents}, {answer['batch']} at once"
    if memory_bytes is None:
        return [f"{first}; --memory=BYTES of a GPU finds the least group", *table]
    if answer["unit"] is None:
        most = answer["groups"][-1]["gpus"]
        return [f"{first}: no group of up to {most} GPUs fits into {size(memory_bytes)}", *table]
    unit = answer["unit"]
    asked = f"--elastic={unit}-MAX,parallel=spatial,unit={unit}" if unit > 1 else "one GPU"
    return [f"{first}: {asked} is the least that fits into {size(memory_bytes)}", *table]
