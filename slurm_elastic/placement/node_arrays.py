"""A snapshot's nodes as numpy arrays, and the masks that say where a job may go.

Built once a round and never changed. Index i is the i-th node of the
snapshot, whose order is Slurm's own: the order in which Slurm fills nodes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.core.cluster import GPUS_OF_A_NODE, Job, Partition, Snapshot
from slurm_elastic.core.feature_expression import FeatureExpression, alternatives
from slurm_elastic.core.nodelist import expand
from slurm_elastic.fabric import Fabric
from slurm_elastic.placement.link_domains import NodeLinks, node_links
from slurm_elastic.placement.neighbours.neighbour_table import NeighbourTable
from slurm_elastic.topology import Topology

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class NodeArrays:
    """Nodes of a snapshot, constant while a round is decided.

    Attributes:
        names: node names; `index` maps back.
        gpus, cpus, memory: of each node (memory in MB).
        free: GPUs that Slurm shows as free on each node.
        open: nodes that elastic jobs may grow into: available and not PLANNED.
        asleep: nodes on which Slurm starts jobs after a boot.
        types: GPU types present, sorted; `type_of` indexes them, -1 on nodes without GPUs.
        per_node: for each type the most GPUs that one node has.
        links: link domains by node index; nodes whose domains are not known are left out.
        together: most free GPUs of one link domain by node, -1 unknown; None: known nowhere.
        neighbours: speeds of jobs that stand on one node; None: they do not count.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        fabric: Fabric | None = None,
        neighbours: NeighbourTable | None = None,
    ) -> None:
        nodes = snapshot.nodes
        self.snapshot = snapshot
        self.neighbours = neighbours
        self.topology = Topology.of(snapshot)
        self.names: tuple[str, ...] = tuple(n.name for n in nodes)
        self.index: Mapping[str, int] = {name: i for i, name in enumerate(self.names)}
        self.gpus = _ints([n.gpus for n in nodes])
        self.cpus = _ints([n.cpus for n in nodes])
        self.memory = _ints([n.memory_mb for n in nodes])
        self.free = self.gpus - _ints([n.used_gpus for n in nodes])
        self.available: Mask = np.array([n.available for n in nodes], dtype=bool)
        self.planned: Mask = np.array([n.planned for n in nodes], dtype=bool)
        self.open: Mask = self.available & ~self.planned
        self.asleep: Mask = np.array([n.asleep for n in nodes], dtype=bool)
        self.types: tuple[str, ...] = tuple(sorted({n.gpu_type for n in nodes if n.gpus}))
        numbers = {name: i for i, name in enumerate(self.types)}
        self.type_of = _ints([numbers[n.gpu_type] if n.gpus else -1 for n in nodes])
        self.per_node: Mapping[str, int] = snapshot.per_node
        self.rack: Ints = self.topology.rack
        self.links = node_links(snapshot, fabric) if fabric else {}
        self.together = _free_in_one_domain(len(nodes), self.links) if self.links else None
        self._ours = frozenset(r.name for r in snapshot.reservations if r.ours)
        self._coming = [
            (r.start_time, frozenset(r.nodes))
            for r in snapshot.reservations
            if not r.ours and r.start_time > snapshot.time
        ]
        self._partitions = {p.name: p for p in snapshot.partitions}
        self._for_one_user = any(p.exclusive_user for p in snapshot.partitions)
        self._node_limits = [m for m in snapshot.limits if m.resource == GPUS_OF_A_NODE]
        self._masks: dict[tuple[object, ...], Mask] = {}
        self._of_type: dict[str, Mask] = {t: self.type_of == i for t, i in numbers.items()}
        self._unmanaged = frozenset(n.name for n in nodes if n.unmanaged_gpus)
        self._none: Mask = np.zeros(len(nodes), dtype=bool)

    def partition(self, name: str) -> Partition | None:
        """Return a partition of the snapshot; None if there is none of that name."""
        return self._partitions.get(name)

    def tier(self, job: Job) -> int:
        """Return the highest priority tier of a job's partitions; Slurm looks at that first."""
        partitions = map(self._partitions.get, job.partition.split(","))
        return max((p.tier for p in partitions if p), default=0)

    def takes_whole_nodes(self, job: Job) -> bool:
        """Return whether Slurm gives a job whole nodes, at its own request or a partition's."""
        partitions = map(self._partitions.get, job.partition.split(","))
        return job.whole_nodes or any(p.whole_nodes for p in partitions if p)

    def of_type(self, gpu_type: str) -> Mask:
        """Return the mask of nodes with GPUs of this type; "" is any type."""
        mask = self._of_type.get(gpu_type)
        if mask is None:
            return self._none if gpu_type else self.type_of >= 0
        return mask

    def unmanaged_node(self, job: Job) -> str:
        """Return a node with GPUs that are not managed, of which a job holds some; "" for none."""
        names = job.allocation.nodes if job.allocation else ()
        return next((n for n in names if n in self._unmanaged), "")

    def crowd(self, nodes: Sequence[str], job_id: int) -> int:
        """Return the number of other jobs on the most used switch uplink that these nodes cross.

        Of the snapshot: other decisions of the same round are not counted.
        """
        most = 0
        for link in self.topology.links(nodes):
            users = self._users.get(link, ()) if link.startswith("switch:") else ()
            most = max(most, len(users) - (job_id in users))
        return most

    @cached_property
    def _users(self) -> Mapping[str, tuple[int, ...]]:
        """Job ids by uplink that they cross."""
        places = {
            job.job_id: [n for n in job.allocation.nodes if n in self.index]
            for job in self.snapshot.jobs
            if job.allocation and len(job.allocation.shares) > 1
        }
        return self.topology.users(places)

    def shares(self, shares: tuple[tuple[str, int], ...]) -> dict[int, int]:
        """Return an allocation's shares by node index, without nodes that left the cluster."""
        return {self.index[n]: g for n, g in shares if n in self.index}

    def own_constraints(self, job: Job) -> tuple[tuple[str, ...], tuple[str, ...], str, str]:
        """Return (required, excluded, features, reservation) as the job's user wrote them.

        For an elastic job those of its submission: node list and reservation in force may be the
        controller's. Its features are those in force, which the site's job_submit.lua, or its owner
        while it waited, may have set later. Without a record of it (only Comment carries the
        directive) the node list is the user's as long as the job has not been requeued.
        """
        shape = job.submission.shape if job.submission else {}
        if not shape:
            submitted_here = job.submission is not None and job.run > 0
            reservation = "" if job.reservation in self._ours else job.reservation
            required = () if submitted_here else job.required_nodes
            return required, job.excluded_nodes, job.features, reservation
        return (
            _expanded(str(shape.get("req_nodes", ""))),
            _expanded(str(shape.get("exc_nodes", ""))),
            job.features or str(shape.get("features", "")),
            str(shape.get("reservation", "")),
        )

    def allowed(self, job: Job, *, planned: bool = False, asleep: bool = False) -> Mask:
        """Return the mask of nodes on which a job may get further GPUs, of any type.

        Empty (it keeps to its present nodes) when its partition is down, it runs in its user's
        reservation, or its features are no `FeatureExpression`. Of several alternatives (`[a|b]`)
        that of its present nodes counts. Not on nodes that are reserved for others before its time
        limit ends: Slurm would not start it there. Not on nodes that another user has alone; in a
        partition with such nodes on idle and own ones. If it takes all memory, only where no job
        uses any.

        Args:
            job: any job.
            planned: also nodes that Slurm's backfill keeps for a pending job.
            asleep: also nodes that have to boot first.
        """
        _, excluded, features, reservation = self.own_constraints(job)
        features = self._alternative(job, features)
        excluded += tuple(sorted(self._reserved_before_its_end(job)))
        all_memory = job.takes_all_memory
        own = job.allocation.nodes if all_memory and job.allocation else ()
        user = job.user if self._for_one_user else ""
        flags = (user, bool(reservation), planned, asleep, all_memory)
        key = (job.partition, excluded, features, own, flags)
        mask = self._masks.get(key)
        if mask is None:
            usable = self.available if planned else self.open
            usable = usable | self.asleep if asleep else usable
            mask = self._allowed(job.partition, excluded, features, reservation, usable)
            if user:
                mask = mask & self._open_to(user, job.partition)
            if all_memory:
                mask = mask & self._with_all_memory(own)
            self._masks[key] = mask
        return mask

    def most_on_nodes(self, job: Job, held: Mapping[int, int]) -> Ints | None:
        """Return the GPUs that limits of its partition and QOS leave a job on each node.

        Limits of the CPUs and of the memory of a node, and of the GPUs of a job there.

        Args:
            job: any job.
            held: GPUs that it has, by node index: these it keeps.

        Returns:
            None: there are no such limits.
        """
        caps = [m.cap for m in self._node_limits if job.job_id in m.jobs]
        partition = self._partitions.get(job.partition)
        most_cpus = partition.max_cpus_per_node if partition else None
        most_memory = partition.max_memory_per_node_mb if partition else None
        if most_memory and job.memory_per_gpu_mb > 0:
            caps.append(math.floor(most_memory / job.memory_per_gpu_mb + 1e-6))
        by_cpus = most_cpus is not None and job.cpus_per_gpu > 0
        if not caps and not by_cpus:
            return None
        most: Ints = np.minimum(self.gpus, min(caps)) if caps else self.gpus.copy()
        if by_cpus and most_cpus is not None:
            left = most_cpus - self._partition_cpus(job)
            most = np.minimum(most, np.floor(left / job.cpus_per_gpu + 1e-6).astype(np.int64))
        for i, gpus in held.items():
            most[i] = max(int(most[i]), gpus)
        return np.maximum(most, 0)

    def _partition_cpus(self, job: Job) -> Ints:
        """Return the CPUs that the other jobs with GPUs of a job's partition have on each node."""
        cpus = self._cpus_of_partitions.get(job.partition)
        others: Ints = np.zeros(len(self.names), dtype=np.int64) if cpus is None else cpus.copy()
        for i, own in self._cpus_on(job):
            others[i] -= own
        return others

    @cached_property
    def _cpus_of_partitions(self) -> dict[str, Ints]:
        """CPUs that the jobs with GPUs of each partition with a limit have on each node."""
        cpus: dict[str, Ints] = {
            name: np.zeros(len(self.names), dtype=np.int64)
            for name, partition in self._partitions.items()
            if partition.max_cpus_per_node is not None
        }
        for job in self.snapshot.jobs:
            if job.partition in cpus:
                for i, own in self._cpus_on(job):
                    cpus[job.partition][i] += own
        return cpus

    def _cpus_on(self, job: Job) -> list[tuple[int, int]]:
        """Return the CPUs that a job has on each of its nodes, by index."""
        shares = self.shares(job.allocation.shares if job.allocation else ())
        return [(i, math.ceil(job.cpus_per_gpu * gpus - 1e-6)) for i, gpus in shares.items()]

    def closed(self, job: Job, held: Mapping[int, int]) -> frozenset[int]:
        """Return the nodes that a job holds, by index, on which Slurm would not start it again.

        They are reserved for others before its time limit ends: the reservation was made while it
        ran.
        """
        reserved = self._reserved_before_its_end(job)
        return frozenset(i for i in held if self.names[i] in reserved)

    def _open_to(self, user: str, partitions: str) -> Mask:
        """Return the mask of nodes that no other user has alone.

        In a partition whose nodes have jobs of one user only, a node in use has to be this user's:
        which users have jobs without GPUs there is not known otherwise.
        """
        records = (self._partitions.get(name) for name in partitions.split(","))
        alone = any(p.exclusive_user for p in records if p)
        return np.array(
            [
                n.owner == user or (not n.owner and not (alone and n.used_cpus))
                for n in self.snapshot.nodes
            ],
            dtype=bool,
        )

    def _with_all_memory(self, own: Sequence[str]) -> Mask:
        """Return the mask of nodes whose memory no job uses, and of its own."""
        mask = self._memory_unused.copy()
        mask[[self.index[name] for name in own if name in self.index]] = True
        return mask

    @cached_property
    def _memory_unused(self) -> Mask:
        return np.array([n.used_memory_mb == 0 for n in self.snapshot.nodes], dtype=bool)

    def _reserved_before_its_end(self, job: Job) -> frozenset[str]:
        if not self._coming:
            return frozenset()
        ends = math.inf
        if job.time_limit_s is not None:
            ends = (job.start_time or self.snapshot.time) + job.time_limit_s
        return frozenset[str]().union(*(nodes for start, nodes in self._coming if start < ends))

    def bound_by(self, job: Job) -> str:
        """Return why a job gets no further GPUs: "reservation", "constraint", or ""."""
        *_, features, reservation = self.own_constraints(job)
        if reservation:
            return "reservation"
        known = FeatureExpression.parse(self._alternative(job, features)) is not None
        return "" if known else "constraint"

    def by_alternative(self, job: Job) -> tuple[Job, ...]:
        """Return a pending job once for each alternative of its features, with only that one."""
        *_, features, _ = self.own_constraints(job)
        texts = alternatives(features)
        if len(texts) == 1:
            return (job,)
        return tuple(dataclasses.replace(job, features=text) for text in texts)

    def _alternative(self, job: Job, features: str) -> str:
        """Return the first alternative of a job's features that all its nodes have.

        Returns:
            The features themselves if they have none, it holds no node, or its nodes have none.
        """
        texts = alternatives(features)
        if len(texts) == 1:
            return texts[0]
        names = job.allocation.nodes if job.allocation else ()
        nodes = [self.snapshot.node[n] for n in names if n in self.snapshot.node]
        if not nodes:
            return features
        for text in texts:
            expression = FeatureExpression.parse(text)
            if expression and all(expression.matches(n.features) for n in nodes):
                return text
        return features

    def only_slurm_can_start(self, job: Job) -> bool:
        """Return whether a pending elastic job fits only where the controller counts no GPUs.

        In a reservation of its user, with features that are no `FeatureExpression`, or where the
        nodes whose GPUs are managed do not have its MIN, whatever their state.
        """
        required, excluded, features, _ = self.own_constraints(job)
        if self.bound_by(job):
            return True
        if not self._unmanaged or job.directive is None:
            return False
        if required:
            return not self._unmanaged.isdisjoint(required)
        matching = self._matching(frozenset(job.partition.split(",")), excluded, features)
        for gpu_type in self.types:
            least = job.directive.sizes(gpu_type)[:1]
            if least and self.gpus[matching & self.of_type(gpu_type)].sum() >= least[0]:
                return False
        return any(matching[self.index[name]] for name in self._unmanaged)

    def _allowed(
        self,
        partitions: str,
        excluded: tuple[str, ...],
        features: str,
        reservation: str,
        usable: Mask,
    ) -> Mask:
        up_partitions = frozenset(
            name
            for name in partitions.split(",")
            if (partition := self._partitions.get(name)) is None or partition.up
        )
        if reservation or not up_partitions:
            return self._none
        return np.asarray(self._matching(up_partitions, excluded, features) & usable)

    def _matching(
        self, partitions: frozenset[str], excluded: tuple[str, ...], features: str
    ) -> Mask:
        """Return the mask of the nodes of partitions, not excluded and with the features.

        Empty where these are no `FeatureExpression`.
        """
        key = ("matching", partitions, excluded, features)
        if (known := self._masks.get(key)) is not None:
            return known
        expression = FeatureExpression.parse(features)
        if expression is None:
            return self._none
        mask = np.array(
            [
                not partitions.isdisjoint(n.partitions) and expression.matches(n.features)
                for n in self.snapshot.nodes
            ],
            dtype=bool,
        )
        mask[[self.index[n] for n in excluded if n in self.index]] = False
        self._masks[key] = mask
        return mask


def _free_in_one_domain(count: int, links: Mapping[int, NodeLinks]) -> Ints:
    """Return the most free GPUs of one link domain (NVLink island, PCIe switch) of each node.

    Slurm picks the GPUs on a node, best-linked first where gres.conf tells links; a request
    cannot name them. So placement only prefers such nodes among otherwise equal ones.

    Args:
        count: number of nodes.
        links: of nodes whose domains are known, by index.

    Returns:
        [N], -1 where domains, or the indexes of the GPUs that jobs hold, are not known.
    """
    most = np.full(count, -1, dtype=np.int64)
    for i, node in links.items():
        most[i] = node.most_together
    return most


@lru_cache(maxsize=4096)
def _expanded(folded: str) -> tuple[str, ...]:
    try:
        return expand(folded)
    except ValueError:
        return ()


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
