"""Inputs of the steps of transitions: the cluster as it was just read, and what is under way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slurm_elastic.controller.state.transition import UPROOTED, Transition, TransitionState
from slurm_elastic.controller.transitions import exchange_partners, handovers
from slurm_elastic.controller.transitions.admission import more
from slurm_elastic.core.cluster import Allocation, Job, JobState, UnusableNodes
from slurm_elastic.core.gpu_parts import has_free_half, held_gpus
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report
from slurm_elastic.core.resize_kind import ResizeKind
from slurm_elastic.slurm.release_rules import WAIT_AFTER_REQUEUE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs of one step of all transitions.

    Attributes:
        jobs: read just now.
        sizes: GPUs of each node.
        shards: number of shards of each GPU of a node; nodes without shards may be left out.
        unusable: nodes on which no job may start now.
        admitted: transitions whose target is free.
        hopeless: transitions whose target will not be free whatever else happens.
        live: all transitions under way.
        open: makes the reservation usable by a transition's owner.
        per_node: partition → type → GPUs on its smallest node of that type.
        lease_s: how far ahead a waiting job's start time is put.
        wait_after_requeue_s: seconds that a requeued job waits before it may start again.
        companions: jobs that are companions, as Slurm shows them; in `jobs` they are a part of
            their bases.
        report: returns the last report of a job.
        answering_s: seconds since slurmctld last did not answer.
    """

    jobs: Mapping[int, Job]
    sizes: Mapping[str, int]
    unusable: UnusableNodes
    admitted: frozenset[int]
    live: tuple[Transition, ...]
    open: Callable[[Transition], None]
    per_node: Mapping[str, Mapping[str, int]]
    lease_s: float
    wait_after_requeue_s: float = WAIT_AFTER_REQUEUE_S
    hopeless: frozenset[int] = frozenset()
    shards: Mapping[str, int] = field(default_factory=dict)
    companions: Mapping[int, Job] = field(default_factory=dict)
    report: Callable[[int], Report | None] = lambda _: None
    answering_s: float = math.inf

    def gpus_of_others(self, node: str, job_id: int) -> int:
        """Return the GPUs on a node that other jobs hold, completing ones included."""
        others = (j for j in self.jobs.values() if j.job_id != job_id and _is_on(j, node))
        return held_gpus(others)[node]

    def free(self, transition: Transition, target: Allocation) -> bool:
        """Return whether no other job holds the target's GPUs, or the same half of one."""
        if self._joins(transition, target):
            return True
        return all(
            self.gpus_of_others(node, transition.job_id) + gpus <= self.sizes.get(node, 0)
            for node, gpus in target.shares
        )

    def spare_gpu(self, transition: Transition, target: Allocation) -> Reason | None:
        """Return the reason if a GPU besides the target is free on its node; None for whole GPUs.

        Slurm could give a job that asks for half of a GPU that one.
        """
        if not target.half:
            return None
        (node, gpus), *_ = target.shares
        own = 0 if self._joins(transition, target) else gpus
        in_use = self.gpus_of_others(node, transition.job_id) + own
        return Reason("gpu-free-meanwhile") if in_use < self.sizes.get(node, 0) else None

    def _joins(self, transition: Transition, target: Allocation) -> bool:
        """Return whether a target is half of a GPU of which another job holds the other half."""
        node, *_ = target.nodes
        return target.half and has_free_half(node, self.jobs.values(), transition.job_id)

    def taken(self, transition: Transition) -> bool:
        """Return whether other jobs hold GPUs of the target, and are not about to leave them."""
        target = transition.target
        if target is None or self._joins(transition, target):
            return False
        soon_free = handovers.given(transition, self.live, self.jobs)
        return any(
            self.gpus_of_others(node, transition.job_id) + gpus - soon_free[node]
            > self.sizes.get(node, 0)
            for node, gpus in target.shares
        )

    def shards_of_half(self, target: Allocation) -> int:
        """Return the shards of half of a GPU of the target's node; 0: it cannot be divided."""
        shards = self.shards.get(target.nodes[0], 0)
        return shards // 2 if shards % 2 == 0 else 0

    def promised(self, transition: Transition, target: Allocation) -> bool:
        """Return whether a target's free GPUs are those that another job is about to get.

        Transitions that wait for admission do not count: they give way. Nor do those of the same
        exchange that are still in their old shape: they go back, too.
        """
        if self._joins(transition, target):
            return False
        begun = [
            t
            for t in self.live
            if t.id != transition.id
            and t.state.live
            and (t.state is not TransitionState.RESERVE or t.id in self.admitted)
            and not exchange_partners.goes_back_with(transition, t)
        ]
        taken = Counter[str]()
        for t in begun:
            soon_free = handovers.given(t, self.live, self.jobs)
            taken.update({n: g - soon_free[n] for n, g in more(t, self.jobs).items()})
        return any(
            self.gpus_of_others(node, transition.job_id) + gpus + taken[node]
            > self.sizes.get(node, 0)
            for node, gpus in target.shares
        )

    def obstacle(self, job: Job, target: Allocation | None) -> Reason | None:
        """Return why Slurm would not start a job on the target's nodes; None: nothing is known."""
        nodes = target.nodes if target else ()
        if not self.unusable.all.isdisjoint(nodes):
            return Reason("node-down")
        if not set(job.excluded_nodes).isdisjoint(nodes):
            return Reason("node-excluded")
        return None

    def lost_its_node(self, transition: Transition, job: Job) -> bool:
        """Return whether a node that a job has left in a change has been lost."""
        released = TransitionState.RELEASE.value in transition.entered
        has_left_target = released and job.run > transition.run + (transition.old is not None)
        left = (transition.old, transition.planned if has_left_target else None)
        return any(not self.unusable.lost.isdisjoint(place.nodes) for place in left if place)

    def donors(self, transition: Transition) -> bool:
        """Return whether another transition may still free GPUs on the target's nodes."""
        nodes = set(transition.target.nodes if transition.target else ())
        return any(t.old and nodes & set(t.old.nodes) for t in self.live if t.id != transition.id)


def present_job(transition: Transition, jobs: Mapping[int, Job]) -> Job | None:
    """Return the job of a transition; None when it has ended or another has its id.

    A job whose attempt was ended by the transition's own requeue counts as present.
    """
    job = jobs.get(transition.job_id)
    if job is None or job.key != transition.key:
        return None
    if job.state is JobState.ENDED and not ended_by_requeue(transition, job):
        return None
    return job


def ended_by_requeue(transition: Transition, job: Job) -> bool:
    """Return whether an attempt has ended by the requeue of a transition that is under way.

    slurmctld may be killed before it has saved the requeue. It then takes the attempt, whose
    processes that requeue has ended, for one that has failed, or that has completed if its script
    answers SIGTERM with exit code 0.

    Args:
        transition: under way.
        job: its job, as Slurm shows it.
    """
    if transition.state not in UPROOTED or not is_requeued_attempt(transition, job):
        return False
    if job.end_state == "COMPLETED":  # before the requeue: Slurm then ignores that
        return (job.end_time or 0.0) > transition.entered.get(TransitionState.DRAIN.value, math.inf)
    is_sent = transition.state is not TransitionState.REQUEUE or transition.tries > 0
    return job.end_state == "FAILED" and is_sent


def started_run(transition: Transition) -> int | None:
    """Return the number of the attempt that a change has started; None: it has started none."""
    if transition.target is None or TransitionState.RELEASE.value not in transition.entered:
        return None
    return transition.run + (transition.old is not None)


def is_requeued_attempt(transition: Transition, job: Job) -> bool:
    """Return whether a job shows the very attempt that a transition was to end by a requeue."""
    return (
        transition.kind is ResizeKind.REQUEUE
        and transition.old is not None
        and TransitionState.REQUEUE.value in transition.entered
        and job.run == transition.run
    )


def _is_on(job: Job, node: str) -> bool:
    """Return whether a job holds GPUs of a node, or a part of one."""
    holds = job.allocation is not None and job.allocation.on(node) > 0
    return holds or any(name == node for name, _ in job.parts)
