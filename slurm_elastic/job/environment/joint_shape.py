"""Ranks of a program on a job and its companions together: one srun for each job.

Each node of a job is a node of the program (`NODE_RANK`, `GROUP_RANK`): first those of the base,
then those of the companions. A host on which base and companion have GPUs counts twice, as the
ranks of each see only the GPUs of their own job.

Standard library only.

>>> shape = JointShape((("g01", 2), ("g02", 1), ("g01", 1)))
>>> shape.nodes, shape.ranks, shape.hosts, shape.tasks_per_node
(3, 4, 'g01,g02', '2,1,1')
>>> [shape.first_rank(node) for node in range(3)]
[0, 2, 3]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slurm_elastic.job.slurm_env import SlurmAllocation


class CompanionPart(NamedTuple):
    """Ranks of an attempt that run in a companion.

    Attributes:
        allocation: of the companion, on one node.
        ranks: their number; each gets a GPU.
        mark: of their processes.
    """

    allocation: SlurmAllocation
    ranks: int
    mark: str

    @property
    def job_id(self) -> int:
        """Job id of the companion."""
        return self.allocation.job_id

    @property
    def node(self) -> str:
        """Name of its node."""
        return self.allocation.nodes[0]


class JointShape(NamedTuple):
    """Ranks of an attempt on several jobs.

    Attributes:
        shares: (host, ranks) of each node of each job, in the order of the ranks.
    """

    shares: tuple[tuple[str, int], ...]

    @classmethod
    def of(
        cls, allocation: SlurmAllocation, tasks: Sequence[int], parts: Sequence[CompanionPart]
    ) -> JointShape:
        """Return the shape of an attempt of a base, with so many tasks on its nodes, and parts."""
        base = zip(allocation.nodes, tasks, strict=True)
        own = [(name, count) for name, count in base if count]
        return cls((*own, *((part.node, part.ranks) for part in parts)))

    @property
    def nodes(self) -> int:
        """Number of nodes of the program."""
        return len(self.shares)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(count for _, count in self.shares)

    @property
    def hosts(self) -> str:
        """Names of the hosts, separated by commas."""
        return ",".join(dict.fromkeys(name for name, _ in self.shares))

    @property
    def tasks_per_node(self) -> str:
        """Numbers of ranks of the nodes, separated by commas."""
        return ",".join(str(count) for _, count in self.shares)

    def first_rank(self, node: int) -> int:
        """Return the first rank of a node."""
        return sum(count for _, count in self.shares[:node])

    def variables(self, job_id: int, node: int) -> dict[str, str]:
        """Return the variables of the step that begins with a node.

        Args:
            job_id: of the base.
            node: number of the step's first node.
        """
        return {
            "GROUP_WORLD_SIZE": str(self.nodes),
            "ESRUN_JOB": str(job_id),
            "ESRUN_FIRST_RANK": str(self.first_rank(node)),
            "ESRUN_FIRST_NODE": str(node),
            "ESRUN_WORLD": str(self.ranks),
            "ESRUN_HOSTS": self.hosts,
            "ESRUN_TASKS_PER_NODE": self.tasks_per_node,
        }
