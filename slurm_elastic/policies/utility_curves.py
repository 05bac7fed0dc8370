"""Utility of GPUs to one job: over its legal sizes, and its concave envelope.

Utility (our definition, docs/policies.md) is the logarithm of the job's speed
relative to its speed at MIN on the same type: 0 at MIN, 0.69 at twice that
speed. Steps lead from one vertex of its concave envelope to the next, so a
size that only doubles the nodes for one more GPU is stepped over. Beyond
`_FINE_NODES` nodes only sizes that fill nodes are considered, unless a
directive lists few sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.models.speedup import Floats, SpeedModel, concave_envelope

Ints = NDArray[np.int64]

_MOST_GPUS = 65536
_FINE_NODES = 8
#: Most listed sizes that are all considered.
_FEW_SIZES = 64


@dataclass(frozen=True, slots=True)
class UtilityCurve:
    """Utility of one job on one GPU type.

    Attributes:
        sizes: sizes worth considering, ascending; the first is MIN on this type.
        speeds: of each size, evenly on the fewest nodes that take whole replicas.
        utility: of each size.
        vertices: indices of the envelope's vertices, from 0 up.
    """

    sizes: Ints
    speeds: Floats
    utility: Floats
    vertices: tuple[int, ...]

    def at(self, gpus: int) -> int:
        """Return the index of the largest size within this many GPUs; -1: there is none."""
        return int(np.searchsorted(self.sizes, gpus, side="right")) - 1

    def best(self, begin: int, gpus: int) -> int:
        """Return the index of the fastest size from index `begin` on within this many GPUs."""
        return begin + int(np.argmax(self.utility[begin : max(begin, self.at(gpus)) + 1]))


# Models are immutable, and shared by equal jobs and rounds. Each report makes a new one, so the
# cache fills up: 4,096 entries take 13 MB, a round of 2,000 jobs on two types.
@lru_cache(maxsize=4096)
def curve(
    model: SpeedModel,
    legal: Sequence[int],
    gpu_type: str,
    *,
    unit: int,
    per_node: int,
    max_nodes: int | None = None,
) -> UtilityCurve | None:
    """Return the curve of a job on a type, or None when it cannot run there.

    Args:
        model: of the job.
        legal: its sizes on this type, ascending and hashable.
        gpu_type: the type.
        unit: GPUs per replica.
        per_node: most GPUs of that type on one node.
        max_nodes: of the job's partition.
    """
    sizes = np.array(legal, dtype=np.int64)
    sizes = sizes[sizes <= _MOST_GPUS]
    nodes = _fewest_nodes(per_node, unit)[sizes]
    keep = nodes > 0
    if unit <= per_node and (isinstance(legal, range) or len(legal) > _FEW_SIZES):
        full = per_node // unit * unit
        keep &= (sizes <= _FINE_NODES * full) | (sizes % full == 0) | (sizes == sizes[:1])
    if max_nodes is not None:
        keep &= nodes <= max_nodes
    sizes, nodes = sizes[keep], nodes[keep]
    if not len(sizes):
        return None
    speeds = model.speeds(gpu_type, sizes, nodes)
    utility = np.log(speeds / speeds[0])
    vertices = concave_envelope(sizes.astype(np.float64), utility)
    return UtilityCurve(sizes, speeds, utility, tuple(vertices.tolist()))


@lru_cache(maxsize=256)
def _fewest_nodes(per_node: int, unit: int) -> Ints:
    """Return the fewest nodes of an even share with whole replicas, by GPUs; 0: there is none."""
    fewest = np.zeros(_MOST_GPUS + 1, dtype=np.int64)
    for share in range(1, per_node + 1):
        if share % unit == 0 if unit <= per_node else unit % share == 0:
            fewest[share::share] = np.arange(1, _MOST_GPUS // share + 1)
    if unit > per_node:
        fewest[np.arange(_MOST_GPUS + 1) % unit != 0] = 0
    return fewest
