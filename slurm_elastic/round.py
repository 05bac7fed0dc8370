"""One whole round, pure: snapshot, records and state in, plan and state out.

Jobs that may change (placement/eligibility.py) → GPUs kept for pending jobs
(placement/pending_claims.py) → pairs of jobs on one GPU that part
(placement/sharing/pair_separation.py) → the policy's proposals for the others → their places,
where they fit and pay (placement/assignment.py) → changes that can begin now
(placement/decisions.py) → new pairs on one GPU (placement/sharing/gpu_sharing.py). Controller and
simulator both call `decide_round`.

The plan can be carried out in any order, and in part: no job starts, grows or moves into GPUs
that are not free at the snapshot's time. A job that waits for GPUs of others keeps what it has,
with that reason, and gets them in a later round. There are two exceptions. Jobs that exchange GPUs
(placement/exchanges.py) begin together: all of them, or none. A job that grows in place may begin
with the jobs that leave its GPUs in place (placement/beginnings.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Allocation, Job, JobState, Snapshot
from slurm_elastic.core.gpu_parts import HalfOptions, has_free_half
from slurm_elastic.core.plan import Alternative, Claim, FreeCapacity, JobRecord, Plan, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.fabric import Fabric
from slurm_elastic.placement import binding_proposals, decisions, deferred_grants, site_limits
from slurm_elastic.placement.assignment import Assignment
from slurm_elastic.placement.defragment import consolidate
from slurm_elastic.placement.delay.delay_gate import DelayGate
from slurm_elastic.placement.eligibility import Eligibility, RoundJob, elastic_jobs
from slurm_elastic.placement.free_resources import FreeResources, ResourceNeed, ResourceViews
from slurm_elastic.placement.neighbours.gpu_pair_table import GpuPairTable
from slurm_elastic.placement.neighbours.neighbour_table import NeighbourTable
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.placement.pending_claims import claims_for_pending
from slurm_elastic.placement.separation import separate
from slurm_elastic.placement.sharing.gpu_sharing import share_gpus
from slurm_elastic.placement.sharing.half_options import half_options
from slurm_elastic.placement.sharing.pair_separation import separate_pairs
from slurm_elastic.placement.sleep.clearing import clear
from slurm_elastic.placement.starts.start_swaps import swap_starts
from slurm_elastic.policies.policy_protocol import Policy, Question, capabilities_of

_EPSILON = 1e-9
#: Most further offers of idle GPUs that jobs refused.
_MOST_OFFERS = 2
#: Most further plans when one has more resizes than are left.
_MOST_REFUSALS = 3


def decide_round(
    snapshot: Snapshot,
    records: Mapping[int, JobRecord],
    *,
    config: Config,
    policy: Policy,
    state: Mapping[str, Any],
    previous: Plan | None = None,
    seed: int = 0,
    at_once: bool = False,
    explain: bool = True,
    resized: Mapping[str, Sequence[float]] | None = None,
    neighbours: NeighbourTable | None = None,
    gpu_pairs: GpuPairTable | None = None,
) -> tuple[Plan, Mapping[str, Any]]:
    """Decide the allocation of every elastic job.

    Args:
        snapshot: the cluster, time included.
        records: of the elastic jobs; one without a record is not proven.
        config: the site's configuration.
        policy: is asked once, and again about idle GPUs that jobs refused. Binding proposals are
            carried out as far as they fit; then it is asked again without the jobs that wait for a
            nearer place.
        state: that the last round returned, or {}; JSON-serialisable.
        previous: the last plan, whose claims continue; None: claims begin anew.
        seed: for policies that draw at random.
        at_once: all changes happen at the same instant (the simulator): no job waits for GPUs
            that others give up in this round.
        explain: whether decisions have reasons for neither more nor fewer nor other GPUs.
        resized: times of resizes by user (epoch s), those under way included; None: those in
            `records`.
        neighbours: speeds of jobs on one node; None: placement does not take them into account.
        gpu_pairs: speeds of two jobs on one GPU; None: no GPU is shared.

    Returns:
        The plan, and the state for the next round.
    """
    limits = config.limits
    snapshot = dataclasses.replace(
        snapshot, limits=(*snapshot.limits, *site_limits.shares(snapshot, limits))
    )
    decide = partial(
        _decide,
        snapshot,
        records,
        config=config,
        policy=policy,
        state=state,
        previous=previous,
        seed=seed,
        at_once=at_once,
        explain=explain,
        neighbours=neighbours,
        gpu_pairs=gpu_pairs,
    )
    spent = site_limits.resized(snapshot, records) if resized is None else resized
    stay: Mapping[int, Reason] = {}
    for left in reversed(range(_MOST_REFUSALS)):
        plan, next_state, concessions = decide(stay=stay)
        refused = site_limits.refused(
            plan, snapshot, concessions=concessions, spent=spent, limits=limits, all_others=not left
        )
        if not refused:
            return plan, next_state
        stay = {**refused, **stay}  # other jobs may take what these do not
    plan, next_state, _ = decide(stay=stay)
    return plan, next_state


def _decide(
    snapshot: Snapshot,
    records: Mapping[int, JobRecord],
    *,
    config: Config,
    policy: Policy,
    state: Mapping[str, Any],
    previous: Plan | None,
    seed: int,
    at_once: bool,
    explain: bool,
    neighbours: NeighbourTable | None,
    gpu_pairs: GpuPairTable | None,
    stay: Mapping[int, Reason],
) -> tuple[Plan, Mapping[str, Any], Collection[int]]:
    """Decide as `decide_round`; jobs of `stay` only give way. Return also ids of those that do."""
    binding = capabilities_of(policy).binding_proposals
    frame = NodeArrays(snapshot, Fabric.of(snapshot, config.topology), neighbours)
    round_jobs = elastic_jobs(frame, records, config, stay)
    resources = FreeResources(frame)
    views = ResourceViews(resources, resources.copy())
    for round_job in round_jobs.values():
        if round_job.eligibility is Eligibility.MOVING:
            target = _booked(round_job, snapshot)
            views.change(round_job.need, round_job.current, target)
    for job in snapshot.jobs:
        elastic = round_jobs.get(job.job_id)
        if _leaves(job, elastic, snapshot.time, config):
            held = elastic.current if elastic else job.allocation
            views.later.give(ResourceNeed.of(job), held)
    gate = DelayGate(config.placement, frame, state.get("placement", {}))
    pending_claims = claims_for_pending(
        views,
        round_jobs,
        config,
        gate=gate,
        claims=_valid_claims(previous, snapshot),
        refused=state.get("refused", {}),
        at_once=at_once,
        binding=binding,
    )
    assignment = Assignment(views, gate, config, at_once=at_once, judging=not binding)
    for job_id, refusal in pending_claims.waits_for_nearer.items():
        assignment.wait(round_jobs[job_id], refusal)
    separate_pairs(
        assignment,
        round_jobs,
        gpu_pairs,
        ready=pending_claims.ready,
        counts_halves=capabilities_of(policy).weighs_halves,
    )
    changeable = [
        t
        for t in round_jobs.values()
        if t.eligibility is Eligibility.FREE and t.job.job_id not in pending_claims.concessions
    ]
    # Where proposals are binding, each round decides afresh: nothing was promised.
    promised = {} if binding else deferred_grants.valid(state.get("promised", {}), snapshot.time)
    for round_job in changeable:
        if round_job.job.key in promised:
            assignment.keep(round_job, deferred_grants.allocation(promised[round_job.job.key]))
    undecided_ids = [t.job.job_id for t in changeable if t.job.job_id not in assignment.outcomes]
    questions = _PolicyQuestions(
        round_jobs, records, policy, state.get("policy", {}), seed, gpu_pairs=gpu_pairs
    )
    policy_state = questions.assign(assignment, [*undecided_ids, *pending_claims.ready])
    swap_starts(assignment)
    separate(assignment)
    clear(assignment, round_jobs)
    plan = decisions.build_plan(
        round_jobs, pending_claims, assignment, questions.proposals, explain=explain
    )
    deferred = (
        {}
        if binding
        else deferred_grants.deferred(plan, assignment.outcomes.values(), promised, config)
    )
    plan = share_gpus(plan, assignment, round_jobs, gpu_pairs)
    waits = assignment.gate.next_state((t, plan.decision[j].target) for j, t in round_jobs.items())
    next_state = {
        "policy": dict(policy_state),
        "refused": dict(sorted(pending_claims.refused.items())),
        "promised": deferred,
        **({"placement": waits} if waits else {}),
    }
    return plan, next_state, frozenset(pending_claims.concessions)


class _PolicyQuestions:
    """Questions to the policy in one round, and the placement of its answers."""

    def __init__(
        self,
        round_jobs: Mapping[int, RoundJob],
        records: Mapping[int, JobRecord],
        policy: Policy,
        state: Mapping[str, Any],
        seed: int,
        *,
        gpu_pairs: GpuPairTable | None,
    ) -> None:
        self._round_jobs = round_jobs
        self._records = MappingProxyType(records)
        self._policy = policy
        self._state = state
        self._seed = seed
        self._gpu_pairs = gpu_pairs
        #: Last answers, by job id.
        self.proposals: dict[int, Proposal] = {}

    def assign(self, assignment: Assignment, job_ids: Sequence[int]) -> Mapping[str, Any]:
        """Fill the assignment; return the policy's new state."""
        proposals, state = self._ask_all(assignment, job_ids)
        if not assignment.judging:
            repacks = capabilities_of(self._policy).allows_repacking
            again = partial(self._ask_all, assignment)
            binding_proposals.carry_out(
                assignment,
                job_ids,
                proposals,
                self._round_jobs,
                again,
                ask_alone=partial(again, kept=False),
                moves=repacks,
            )
            return state
        saved_later, saved_outcomes = assignment.later.copy(), dict(assignment.outcomes)
        assignment.place(proposals, self._round_jobs)
        consolidate(assignment)
        assignment.restore()
        assignment.retry(proposals)
        any_shrinks = any(o.shrinks for o in assignment.outcomes.values())
        if any_shrinks and assignment.welfare() <= _EPSILON:
            assignment.later, assignment.outcomes = saved_later, saved_outcomes
            assignment.place([self._without_shrinking(p) for p in proposals], self._round_jobs)
            consolidate(assignment)
        for _ in range(_MOST_OFFERS):
            if not self._offer_again(assignment):
                break
        return state

    def _ask_all(
        self, assignment: Assignment, jobs: Sequence[int], *, kept: bool = True
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        capacity = assignment.idle()
        for job_id in jobs:
            _add(capacity, self._round_jobs[job_id].current)
        free = assignment.later.capacity()
        halves = self._halves(assignment, jobs)
        return self._ask(assignment.frame.snapshot, jobs, capacity, free, kept=kept, halves=halves)

    def _halves(self, assignment: Assignment, jobs: Sequence[int]) -> HalfOptions | None:
        """Return the halves of GPUs that the jobs may have, for a policy that weighs them."""
        if not capabilities_of(self._policy).weighs_halves or self._gpu_pairs is None:
            return None
        free = assignment.later.meet(assignment.now)
        return half_options(self._round_jobs, jobs, self._gpu_pairs, free)

    def _ask(
        self,
        snapshot: Snapshot,
        jobs: Sequence[int],
        capacity: Mapping[str, int],
        free: FreeCapacity | None = None,
        *,
        kept: bool = True,
        halves: HalfOptions | None = None,
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        question = Question(
            snapshot=snapshot,
            records=self._records,
            models={j: self._round_jobs[j].model for j in jobs},
            jobs=tuple(jobs),
            capacity=capacity,
            seed=self._seed,
            free=free,
            halves=halves,
        )
        proposals, state = self._policy.decide(question, self._state)
        if kept:
            self.proposals.update((p.job_id, p) for p in proposals)
        return proposals, state

    def _offer_again(self, assignment: Assignment) -> bool:
        """Offer GPUs that refusals left idle to other jobs; return whether any was taken."""
        idle = assignment.idle()
        refused = {
            j
            for j, o in assignment.outcomes.items()
            if o.wished and o.wished.gpus > (o.target.gpus if o.target else 0)
        }
        willing = [
            j
            for j, o in assignment.outcomes.items()
            if j not in refused
            and o.target is not None
            and idle.get(o.target.gpu_type)
            and o.target.gpus < o.round_job.directive.max_gpus
            and not o.shrinks
        ]
        if not refused or not willing:
            return False
        for job_id in willing:
            _add(idle, assignment.outcomes[job_id].target)
        proposals, _ = self._ask(assignment.frame.snapshot, willing, idle)
        return assignment.grow(proposals)

    def _without_shrinking(self, proposal: Proposal) -> Proposal:
        """Return a proposal without giving up GPUs."""
        round_job, wished = self._round_jobs[proposal.job_id], proposal.alternatives[0]
        current = round_job.current
        if current is None or not round_job.allowed(current) or wished.gpus >= current.gpus:
            return proposal
        stay = Alternative(
            gpu_type=current.gpu_type,
            gpus=current.gpus,
            value=0.0,
            reason=Reason("trade-not-worth"),
        )
        return Proposal(job_id=proposal.job_id, alternatives=(stay,))


def _leaves(job: Job, round_job: RoundJob | None, at: float, config: Config) -> bool:
    """Return whether a job is about to leave its GPUs; one that does so for too long is stuck."""
    if job.state is not JobState.COMPLETING or (
        round_job and round_job.eligibility is Eligibility.MOVING
    ):
        return False
    return job.end_time is None or at - job.end_time < config.resize.keep_s


def _booked(round_job: RoundJob, snapshot: Snapshot) -> Allocation | None:
    """Return the target of a change under way, as it is booked.

    Half of a GPU counts as a whole one unless another job holds the other half.
    """
    target, job_id = round_job.record.target, round_job.job.job_id
    if target is None or not target.half:
        return target
    beside = has_free_half(target.nodes[0], snapshot.jobs, job_id)
    return target if beside else target.whole


def _valid_claims(previous: Plan | None, snapshot: Snapshot) -> tuple[Claim, ...]:
    """Return the last claims whose ids still belong to the same job."""
    return tuple(
        claim
        for claim in (previous.claims if previous else ())
        if (job := snapshot.job.get(claim.job_id)) and job.submit_time <= claim.since
    )


def _add(capacity: dict[str, int], allocation: Allocation | None) -> None:
    if allocation is not None:
        capacity[allocation.gpu_type] = capacity.get(allocation.gpu_type, 0) + allocation.gpus
