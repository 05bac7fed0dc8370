"""One whole round, pure: snapshot, records and state in, plan and state out.

Who may be changed (placement/eligibility.py) → what is owed to pending jobs
(placement/pending_claims.py) → what the policy wants for the rest → where that fits
and pays (placement/assignment.py) → what can be begun now. Controller and
simulator both call `decide_round`.

The plan can be carried out in any order, and in part: nobody starts, grows or
moves into GPUs that are not free at the snapshot's time. Who waits for GPUs
that others give up first keeps what it has and says so; it gets them in a
later round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Allocation, Job, JobState, Snapshot
from slurm_elastic.core.plan import Alternative, Claim, FreeCapacity, JobRecord, Plan, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.fabric import Fabric
from slurm_elastic.placement import binding_proposals, decisions, deferred_grants, site_limits
from slurm_elastic.placement.assignment import Assignment
from slurm_elastic.placement.defragment import consolidate
from slurm_elastic.placement.delay.delay_gate import DelayGate
from slurm_elastic.placement.eligibility import Eligibility, RoundJob, tenants
from slurm_elastic.placement.free_resources import FreeResources, ResourceNeed, ResourceViews
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.placement.pending_claims import neighbours
from slurm_elastic.policies.policy_protocol import Policy, Question, capabilities_of

_EPSILON = 1e-9
#: How often idle GPUs are offered again after jobs refused them.
_MOST_OFFERS = 2
#: How often a plan is made again because it had more resizes than are left.
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
) -> tuple[Plan, Mapping[str, Any]]:
    """Decide what every elastic job shall hold.

    Args:
        snapshot: the cluster, time included.
        records: what is known of the elastic jobs; one without a record is not proven.
        config: the site's configuration.
        policy: asked once, and again with what was refused; binding proposals are carried out as
            far as they fit, and it is asked again without jobs that rather wait.
        state: what the last round returned, or {}; JSON-serialisable.
        previous: the last plan, whose claims go on; None: claims begin anew.
        seed: for policies that draw lots.
        at_once: all changes happen at the same instant (the simulator): nobody waits for GPUs
            that others give up in this round.
        explain: whether decisions say why they give neither more nor fewer GPUs nor others.
        resized: by user, when jobs were resized (epoch s), those under way included; None: as
            the records of the jobs that are there say.

    Returns:
        The plan, and the state for the next round.
    """
    limits = config.limits
    snapshot = dataclasses.replace(
        snapshot, limits=(*snapshot.limits, *site_limits.shares(snapshot, records, limits))
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
    )
    spent = site_limits.resized(snapshot, records) if resized is None else resized
    stay: Mapping[int, Reason] = {}
    for left in reversed(range(_MOST_REFUSALS)):
        plan, after, ways = decide(stay=stay)
        refused = site_limits.refused(
            plan, snapshot, ways=ways, spent=spent, limits=limits, all_others=not left
        )
        if not refused:
            return plan, after
        stay = {**refused, **stay}  # once more: what they do not take others may
    plan, after, _ = decide(stay=stay)
    return plan, after


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
    stay: Mapping[int, Reason],
) -> tuple[Plan, Mapping[str, Any], Collection[int]]:
    """As `decide_round`; jobs of `stay` only give way. The last value: ids of those that do."""
    binding = capabilities_of(policy).binding_proposals
    frame = NodeArrays(snapshot, Fabric.of(snapshot, config.topology))
    everyone = tenants(frame, records, config, stay)
    ledger = FreeResources(frame)
    books = ResourceViews(ledger, ledger.copy())
    for tenant in everyone.values():
        if tenant.standing is Eligibility.MOVING:
            books.change(tenant.need, tenant.current, tenant.record.target)
    for job in snapshot.jobs:
        if _leaves(job, everyone.get(job.job_id), snapshot.time, config):
            books.later.give(ResourceNeed.of(job), job.allocation)
    gate = DelayGate(config.placement, frame, state.get("placement", {}))
    owed = neighbours(
        books,
        everyone,
        config,
        gate=gate,
        claims=_still_meant(previous, snapshot),
        refused=state.get("refused", {}),
        at_once=at_once,
        binding=binding,
    )
    assignment = Assignment(books, gate, config, at_once=at_once, judging=not binding)
    for job_id, refusal in owed.picky.items():
        assignment.wait(everyone[job_id], refusal)
    free = [
        t
        for t in everyone.values()
        if t.standing is Eligibility.FREE and t.job.job_id not in owed.ways
    ]
    # Where proposals are binding, each round decides afresh: nothing was promised.
    promised = {} if binding else deferred_grants.valid(state.get("promised", {}), snapshot.time)
    for tenant in free:
        if tenant.job.key in promised:
            assignment.keep(tenant, deferred_grants.allocation(promised[tenant.job.key]))
    asked = [t.job.job_id for t in free if t.job.job_id not in assignment.outcomes]
    deciding = _Deciding(everyone, records, policy, state.get("policy", {}), seed)
    policy_state = deciding.assign(assignment, [*asked, *owed.ready])
    plan = decisions.made(everyone, owed, assignment, deciding.proposals, explain=explain)
    made = (
        {}
        if binding
        else deferred_grants.made(plan, assignment.outcomes.values(), promised, config)
    )
    waits = assignment.gate.after((t, plan.decision[j].target) for j, t in everyone.items())
    after = {
        "policy": dict(policy_state),
        "refused": dict(sorted(owed.refused.items())),
        "promised": made,
        **({"placement": waits} if waits else {}),
    }
    return plan, after, frozenset(owed.ways)


class _Deciding:
    """Asking the policy, with what it is to be asked."""

    def __init__(
        self,
        everyone: Mapping[int, RoundJob],
        records: Mapping[int, JobRecord],
        policy: Policy,
        state: Mapping[str, Any],
        seed: int,
    ) -> None:
        self._tenants = everyone
        self._records = records
        self._policy = policy
        self._state = state
        self._seed = seed
        #: The last answers, by job.
        self.proposals: dict[int, Proposal] = {}

    def assign(self, assignment: Assignment, asked: Sequence[int]) -> Mapping[str, Any]:
        """Fill the assignment; the policy's new state."""
        proposals, state = self._ask_all(assignment, asked)
        if not assignment.judging:
            repacks = capabilities_of(self._policy).allows_repacking
            again = partial(self._ask_all, assignment)
            binding_proposals.carry_out(
                assignment, asked, proposals, self._tenants, again, moves=repacks
            )
            return state
        before, kept = assignment.later.copy(), dict(assignment.outcomes)
        assignment.place(proposals, self._tenants)
        consolidate(assignment)
        assignment.restore()
        assignment.retry(proposals)
        gave = any(o.shrinks for o in assignment.outcomes.values())
        if gave and assignment.welfare() <= _EPSILON:
            assignment.later, assignment.outcomes = before, kept
            assignment.place([self._kept(p) for p in proposals], self._tenants)
            consolidate(assignment)
        for _ in range(_MOST_OFFERS):
            if not self._offer_again(assignment):
                break
        return state

    def _ask_all(
        self, assignment: Assignment, jobs: Sequence[int]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        capacity = assignment.idle()
        for job_id in jobs:
            _add(capacity, self._tenants[job_id].current)
        return self._ask(assignment.frame.snapshot, jobs, capacity, assignment.later.capacity())

    def _ask(
        self,
        snapshot: Snapshot,
        jobs: Sequence[int],
        capacity: Mapping[str, int],
        free: FreeCapacity | None = None,
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        question = Question(
            snapshot=snapshot,
            records=self._records,
            models={j: self._tenants[j].model for j in jobs},
            jobs=tuple(jobs),
            capacity=capacity,
            seed=self._seed,
            free=free,
        )
        proposals, state = self._policy.decide(question, self._state)
        self.proposals.update((p.job_id, p) for p in proposals)
        return proposals, state

    def _offer_again(self, assignment: Assignment) -> bool:
        """Offer what refused offers left idle to the other jobs; whether anybody took it."""
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
            and o.target.gpus < o.tenant.directive.max_gpus
            and not o.shrinks
        ]
        if not refused or not willing:
            return False
        for job_id in willing:
            _add(idle, assignment.outcomes[job_id].target)
        proposals, _ = self._ask(assignment.frame.snapshot, willing, idle)
        return assignment.grow(proposals)

    def _kept(self, proposal: Proposal) -> Proposal:
        """A proposal without giving up GPUs."""
        tenant, wished = self._tenants[proposal.job_id], proposal.alternatives[0]
        current = tenant.current
        if current is None or not tenant.allowed(current) or wished.gpus >= current.gpus:
            return proposal
        stay = Alternative(
            gpu_type=current.gpu_type,
            gpus=current.gpus,
            value=0.0,
            reason=Reason("trade-not-worth"),
        )
        return Proposal(job_id=proposal.job_id, alternatives=(stay,))


def _leaves(job: Job, tenant: RoundJob | None, at: float, config: Config) -> bool:
    """Whether a job is about to leave its GPUs; one that does so for too long is stuck."""
    if job.state is not JobState.COMPLETING or (tenant and tenant.standing is Eligibility.MOVING):
        return False
    return job.end_time is None or at - job.end_time < config.resize.keep_s


def _still_meant(previous: Plan | None, snapshot: Snapshot) -> tuple[Claim, ...]:
    """The last claims whose ids still name the same job."""
    return tuple(
        claim
        for claim in (previous.claims if previous else ())
        if (job := snapshot.job.get(claim.job_id)) and job.submit_time <= claim.since
    )


def _add(capacity: dict[str, int], allocation: Allocation | None) -> None:
    if allocation is not None:
        capacity[allocation.gpu_type] = capacity.get(allocation.gpu_type, 0) + allocation.gpus
