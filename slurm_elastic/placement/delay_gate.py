"""`[placement] mode = "delay"`: under any policy, a job waits a while for a near place.

After Dally's delay timers (arXiv 2401.16492), for the rounds and for elastic jobs; our
definition. A place is *near* when it is on as few nodes, in as few racks, as its GPUs take. One
that is not is accepted at once when the job loses no more than `tolerance` of its speed there by
its own model (stated curve, corrected by what was measured), so that jobs that do not suffer
never wait. Else more nodes are accepted after `wait_node_s` and more racks after `wait_rack_s`,
both counted from when the job began to wait or last changed. A refused place falls back to the
policy's next alternative, at last to what the job has; giving GPUs up, and moving at its size,
are not its business.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_elastic.cluster import Allocation
from slurm_elastic.config import Placement
from slurm_elastic.placement.consolidate import even_splits
from slurm_elastic.placement.frame import Frame
from slurm_elastic.placement.tenants import Tenant


@dataclass(frozen=True, slots=True)
class Gate:
    """The timers at the time of one round."""

    placement: Placement
    frame: Frame

    def refusal(self, tenant: Tenant, target: Allocation) -> str:
        """Why a job rather waits than takes this place, or ""."""
        current = tenant.current
        grows = current is None or (
            target.gpus > current.gpus or target.gpu_type != current.gpu_type
        )
        if self.placement.mode != "delay" or not grows:
            return ""
        nodes, racks = self.frame.topology.spread(target.nodes)
        fewest, least = self._near(tenant, target)
        if nodes <= fewest and racks <= least:
            return ""
        kind, gpus = target.gpu_type, target.gpus
        best = tenant.model.speed(kind, gpus, fewest, least)
        part = tenant.model.speed(kind, gpus, nodes, racks) / best if best > 0 else 1.0
        if part >= 1 - self.placement.tolerance:
            return ""
        limit = self.placement.wait_rack_s if racks > least else self.placement.wait_node_s
        waited = max(0.0, self.frame.snapshot.time - _since(tenant))
        if waited >= limit:
            return ""
        over = f"{racks} racks" if racks > least else f"{nodes} nodes"
        near = f"{_count(least, 'rack')}" if racks > least else f"{_count(fewest, 'node')}"
        return (
            f"over {over} it would run at {part:.2f} of its speed in {near}; it waited"
            f" {waited:.0f} s of at most {limit:.0f} s for that"
        )

    def _near(self, tenant: Tenant, target: Allocation) -> tuple[int, int]:
        """(nodes, racks): the fewest that so many GPUs take on this cluster."""
        kind, gpus = target.gpu_type, target.gpus
        most = self.frame.per_node.get(kind, 1)
        unit = tenant.directive.unit_for(kind)
        fewest = next((n for n, _ in even_splits(gpus, most, unit)), len(target.nodes))
        mask = self.frame.of_type(kind) & self.frame.allowed(tenant.job, planned=True)
        largest = int(np.bincount(self.frame.rack[mask]).max()) if mask.any() else 1
        return fewest, -(-fewest // max(1, largest))


def _since(tenant: Tenant) -> float:
    """When it began to wait, or last changed."""
    job, record = tenant.job, tenant.record
    if tenant.current is None:
        return job.submit_time
    return record.last_change if record.last_change is not None else job.start_time or 0.0


def _count(number: int, word: str) -> str:
    return f"one {word}" if number == 1 else f"{number} {word}s"
