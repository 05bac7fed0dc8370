"""Racks of a simulated cluster, and the cost of training across them; our definition.

The tables of the profiles have nodes, not racks. Here every `rack_nodes` nodes, in the order of
the cluster, are a rack with one uplink. A job over r racks pays, once per
step, a ring all-reduce of its gradients between them, not overlapped:

    2 (r - 1) / r * bytes / (uplink * share)

The share is `1 / (jobs on the busiest of its uplinks * congestion)` (models/communication.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.core.cluster import Allocation, Switch
from slurm_elastic.models.communication import uplink_shares
from slurm_elastic.simulator.workloads.builtin_profiles import FAMILIES
from slurm_elastic.simulator.workloads.workload import WorkloadError, rows

#: A row beyond this many bytes is a typing error.
_MOST_BYTES = 1e15


@dataclass(frozen=True, kw_only=True)
class Network:
    """Racks and their uplinks.

    Attributes:
        rack_nodes: nodes of each rack.
        uplink_bytes_s: bandwidth of a rack's uplink.
        gradient_bytes: bytes per step by application; unknown ones send nothing. A suffix `#JOB`
            of the application (workloads/curve_jobs.py) is ignored.
        congestion: other traffic leaves 1 / congestion of each uplink.
    """

    rack_nodes: int
    uplink_bytes_s: float
    gradient_bytes: Mapping[str, float]
    congestion: float = 1.0

    def switches(self, nodes: Sequence[str]) -> tuple[Switch, ...]:
        """Return the switch tree over these nodes."""
        size = self.rack_nodes
        leaves = tuple(
            Switch(f"rack{i // size}", 0, tuple(nodes[i : i + size]))
            for i in range(0, len(nodes), size)
        )
        return (*leaves, Switch("spine", 1, tuple(nodes), tuple(s.name for s in leaves)))

    def extra_s(
        self, jobs: Mapping[int, tuple[str, Allocation]], rack_of: Mapping[str, str]
    ) -> dict[int, float]:
        """Return the extra seconds per step of the jobs that cross racks.

        Args:
            jobs: application and allocation of each job.
            rack_of: rack of each node.
        """
        racks = {j: {rack_of[n] for n in allocation.nodes} for j, (_, allocation) in jobs.items()}
        users: dict[str, int] = {}
        for crossed in racks.values():
            for rack in crossed if len(crossed) > 1 else ():
                users[rack] = users.get(rack, 0) + 1
        shares = uplink_shares(users, congestion=self.congestion)
        extra_s = {}
        for job_id, crossed in racks.items():
            if len(crossed) > 1:
                share = min(shares[rack] for rack in crossed)
                size = self.gradient_bytes.get(jobs[job_id][0].partition("#")[0], 0.0)
                count = len(crossed)
                extra_s[job_id] = 2 * (count - 1) / count * size / (self.uplink_bytes_s * share)
        return extra_s


def builtin_gradients() -> dict[str, float]:
    """Return the gradient bytes of the built-in applications: 4 per parameter."""
    return {family.name: 4 * family.parameters for family in FAMILIES}


def read_gradients(path: Path) -> dict[str, float]:
    """Read gradient bytes per step by application from a CSV file `application,bytes`.

    Raises:
        WorkloadError: unreadable, a column is missing, a value is invalid, or a row is repeated.
    """
    sizes: dict[str, float] = {}
    columns = ("application", "bytes")
    shape = "must be application,bytes"
    for line, row in rows(path, columns, what="a CSV file application,bytes", header_line=shape):
        location, name = f"{path.name}:{line}", row["application"]
        try:
            size = float(row["bytes"])
        except ValueError:
            size = -1.0
        if not 0 <= size <= _MOST_BYTES:
            raise WorkloadError(
                f"{location}: bytes {row['bytes'][:40]!r} is invalid: expected a number from 0 on"
            )
        if name in sizes:
            raise WorkloadError(
                f"{location}: {name[:60]} occurs also in an earlier row; keep one row"
            )
        sizes[name] = size
    if not sizes:
        raise WorkloadError(f"{path}: has no row; each line after the first is one")
    return sizes
