"""Which idle nodes may sleep, and the choice among them; pure.

A node may sleep only if nothing is on it and it is assigned to nothing: no job, no GPUs, CPUs or
memory in use, no plan of Slurm's backfill, no reservation, no claim, no decision and no transition
of the controller, and no state but plain IDLE. Those that have been idle longest sleep first; those
that have slept least wake first. Of each type of GPU some idle nodes stay awake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from slurm_elastic.core.cluster import Job, JobState, Node, Snapshot
from slurm_elastic.core.plan import JobRecord, Plan

#: The one state in which a node may sleep; any flag beside it (PLANNED, DRAIN, POWERING_UP, …)
#: says that the node is assigned to something, or not in order.
IDLE = "IDLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepChanges:
    """Nodes that go to sleep and nodes that wake."""

    sleep: tuple[str, ...] = ()
    wake: tuple[str, ...] = ()


def in_use(node: Node) -> bool:
    """Return whether any job uses a node."""
    return bool(node.used_gpus or node.used_cpus or node.used_memory_mb)


def counted_nodes(snapshot: Snapshot, asleep: Collection[str] = ()) -> tuple[Node, ...]:
    """Return the nodes with GPUs that can be awake or asleep: available ones, and sleeping ones."""
    return tuple(n for n in snapshot.nodes if n.gpus and (n.available or n.name in asleep))


def assigned_nodes(
    snapshot: Snapshot,
    plan: Plan | None,
    records: Mapping[int, JobRecord],
    *,
    others: Iterable[Job] = (),
    reserved_within_s: float = 0.0,
) -> frozenset[str]:
    """Return the nodes that a job holds or is to get, by Slurm, a plan, a claim or a transition.

    Args:
        snapshot: the cluster.
        plan: of the last round.
        records: of the elastic jobs.
        others: further jobs, such as companions that are not part of their bases yet.
        reserved_within_s: reservations that begin later than so many seconds ahead do not count.
    """
    names: set[str] = set()
    for job in (*snapshot.jobs, *others):
        if job.allocation is not None:
            names.update(job.allocation.nodes)
        names.update(node for node, _ in job.devices)
        if job.state is JobState.PENDING:
            names.update(job.required_nodes)
    for record in records.values():
        if record.target is not None:
            names.update(record.target.nodes)
    if plan is not None:
        for decision in plan.decisions:
            for allocation in (decision.current, decision.target):
                names.update(allocation.nodes if allocation else ())
        for claim in plan.claims:
            names.update(node for node, _ in claim.shares)
    for reservation in snapshot.reservations:
        if reservation.start_time - reserved_within_s <= snapshot.time < reservation.end_time:
            names.update(reservation.nodes)
    names.update(n.name for n in snapshot.nodes if n.planned)
    return frozenset(names)


def may_sleep(snapshot: Snapshot, assigned: Collection[str]) -> tuple[str, ...]:
    """Return the nodes that may sleep, by name."""
    return tuple(
        n.name
        for n in counted_nodes(snapshot)
        if n.state == IDLE and not in_use(n) and not n.planned and n.name not in assigned
    )


def idle_assigned(nodes: Iterable[Node], assigned: Collection[str]) -> int:
    """Return the number of nodes that are assigned but not in use."""
    return sum(not in_use(node) and node.name in assigned for node in nodes)


def soon_needed(snapshot: Snapshot, within_s: float) -> int:
    """Return the nodes of jobs that may begin only in a while, and do so within these seconds."""
    most = max(snapshot.per_node.values(), default=0)
    until = snapshot.time + within_s
    return sum(
        max(job.min_nodes, -(-job.gpus // (snapshot.per_node.get(job.gpu_type) or most)))
        for job in snapshot.jobs
        if most and job.state is JobState.PENDING and snapshot.time < (job.begin_time or 0) <= until
    )


def changes(
    free: Collection[str],
    asleep: Mapping[str, float],
    idle_since: Mapping[str, float],
    *,
    total: int,
    awake: int,
    now: float,
    least_idle_s: float,
    types: Mapping[str, str] | None = None,
    spare: int = 0,
) -> SleepChanges:
    """Return which nodes change so that `awake` nodes are.

    Args:
        free: nodes that may sleep.
        asleep: since when (epoch s) each sleeping node sleeps.
        idle_since: since when (epoch s) each node has been free.
        total: nodes that are awake or asleep.
        awake: nodes that shall be awake.
        now: epoch s.
        least_idle_s: a node sleeps only after having been free for so long.
        types: GPU type of each node; None: all are alike.
        spare: idle nodes of each type that stay awake.
    """
    of_type = (types or {}).get
    idle = Counter(of_type(name) for name in free if name not in asleep)
    wake: list[str] = []
    for name in sorted(asleep, key=lambda name: (-asleep[name], name)):
        if idle[of_type(name)] < spare or len(wake) < awake - (total - len(asleep)):
            wake.append(name)
            idle[of_type(name)] += 1
    if wake:
        return SleepChanges(wake=tuple(wake))
    ready = [
        name
        for name in free
        if name not in asleep and now - idle_since.get(name, now) >= least_idle_s
    ]
    sleep: list[str] = []
    for name in sorted(ready, key=lambda name: (idle_since[name], name)):
        if len(sleep) < total - len(asleep) - awake and idle[of_type(name)] > spare:
            sleep.append(name)
            idle[of_type(name)] -= 1
    return SleepChanges(sleep=tuple(sleep))
