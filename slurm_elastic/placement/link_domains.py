"""Link domains of GPUs (NVLink islands, PCIe switches): where enough of one are free together.

Slurm picks the GPUs on a node, best-linked first where gres.conf tells links; it cannot be told
which. So placement only prefers, among otherwise equal nodes, one on which so many GPUs of one
domain are free. Known from gres.conf or `[topology] domains`, and the indexes of the GPUs that
jobs hold as Slurm tells them; a node of which anything of that is not known counts as unknown.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.core.cluster import Snapshot
from slurm_elastic.fabric import Fabric


def free_together(snapshot: Snapshot, fabric: Fabric) -> NDArray[np.int64] | None:
    """Most free GPUs of one link domain on each node.

    Args:
        snapshot: the cluster; nodes in its order.
        fabric: which GPUs are linked.

    Returns:
        [N], -1 where it is not known; None when it is known nowhere.
    """
    known = {n.name: d for n in snapshot.nodes if n.gpus and (d := fabric.domains(n.name))}
    if not known:
        return None
    taken: dict[str, set[int]] = {name: set() for name in known}
    for job in snapshot.jobs:
        for name, indexes in job.indexes.items() if job.allocation else ():
            if name in taken:
                taken[name].update(indexes)
    found = np.full(len(snapshot.nodes), -1, dtype=np.int64)
    for i, node in enumerate(snapshot.nodes):
        if node.name in known and len(taken[node.name]) == node.used_gpus:
            free = (len(set(d) - taken[node.name]) for d in known[node.name])
            found[i] = max(free)
    return found
