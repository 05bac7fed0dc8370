"""Link domains of nodes, and how many GPUs of a node hold whole spatial groups within them.

The ranks of a group of `parallel=spatial` exchange planes in every layer, so a group is placed
only where its GPUs are linked (`[topology] spatial_reach`). A request cannot name GPUs: Slurm is
taken to pick those with the lowest indexes, and groups are consecutive ranks, in the order of
indexes (docs/topology.md, "Link domains in placement").

>>> grouped((0, 1, 2, 3), ((0, 1), (2, 3)), 2), grouped((1, 2, 3), ((0, 1), (2, 3)), 2)
(4, 0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.core.cluster import Snapshot
from slurm_elastic.fabric import Domains, Fabric

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """Link domains of one node, and its free GPUs.

    Attributes:
        domains: indexes of the GPUs of each domain.
        free: indexes of the GPUs that no job holds, ascending; None: not known.
    """

    domains: Domains
    free: tuple[int, ...] | None

    @property
    def most_together(self) -> int:
        """Most free GPUs of one domain; -1 where they are not known."""
        if self.free is None:
            return -1
        return max(len(set(domain).intersection(self.free)) for domain in self.domains)

    def room(self, gpus: int, own: Sequence[int], group: int) -> int:
        """Return the most GPUs of the node that hold whole groups.

        Args:
            gpus: number that the job could have here, its own included.
            own: indexes of those that the job holds here.
            group: ranks of a group.
        """
        every = tuple(sorted(i for domain in self.domains for i in domain))
        if gpus >= len(every):
            return grouped(every, self.domains, group)
        if self.free is not None:
            free = tuple(sorted({*self.free, *own}))
            if len(free) == gpus:
                return grouped(free, self.domains, group)
        # Jobs leave or enter the node first: which GPUs will be free is not known yet.
        return min(gpus // group, sum(len(domain) // group for domain in self.domains)) * group


def grouped(free: Sequence[int], domains: Domains, group: int) -> int:
    """Return the number of first GPUs that hold groups within one domain each."""
    domain_of = {index: at for at, domain in enumerate(domains) for index in domain}
    for first in range(0, len(free) - group + 1, group):
        members = free[first : first + group]
        if len({domain_of.get(index, -1 - index) for index in members}) > 1:
            return first
    return len(free) // group * group


def node_links(snapshot: Snapshot, fabric: Fabric) -> dict[int, NodeLinks]:
    """Return the links of each node, by node index; nodes of which none are known are left out."""
    domains_of = {n.name: d for n in snapshot.nodes if n.gpus and (d := fabric.domains(n.name))}
    if not domains_of:
        return {}
    used_indexes = {n.name: set(n.shared_gpus) for n in snapshot.nodes if n.name in domains_of}
    for job in snapshot.jobs:
        for name, indexes in job.indexes.items() if job.allocation else ():
            if name in used_indexes:
                used_indexes[name].update(indexes)
    links = {}
    for i, node in enumerate(snapshot.nodes):
        if node.name in domains_of:
            domains, used = domains_of[node.name], used_indexes[node.name]
            every = sorted(index for domain in domains for index in domain)
            known = len(used) == node.used_gpus and len(every) == node.gpus
            free = tuple(index for index in every if index not in used) if known else None
            links[i] = NodeLinks(domains, free)
    return links


def group_room(
    links: Mapping[int, NodeLinks],
    room: Ints,
    free: Ints,
    own: Mapping[int, Sequence[int]],
    group: int,
) -> Ints:
    """Return the GPUs of each node that hold whole groups of a job, each in one link domain.

    Args:
        links: of the nodes; those without count as one domain.
        room: GPUs that the job could have on each node.
        free: free GPUs of each node, the job's own included.
        own: by node index, the indexes of the GPUs that it holds.
        group: ranks of a group.
    """
    limited = room // group * group
    for i in np.flatnonzero(limited).tolist():
        if i in links:
            limited[i] = min(limited[i], links[i].room(int(free[i]), own.get(i, ()), group))
    return limited
