"""Two jobs on one GPU: waiting jobs beside running ones, and pairs that part again. Pure.

Both jobs of a pair have `share=yes` in their directives, and each holds half of the GPU's shards.
Pairs are made after everything else is decided: a job that waits, and for which nothing is free,
kept or given up, gets half of the GPU of a running job. The running job is requeued first, with
half of its GPU; the other one starts as soon as that runs. A half whose other half is free counts
as a whole GPU everywhere else. A policy that weighs halves (half_options.py) may name jobs that are
to be joined: they start on half of a GPU at once, where Slurm can put them on one only.

Pairs part before the policy decides: a job of a pair gets a GPU that is free, if what both lose
by sharing exceeds the cost of its restart. Without a free GPU, a job that was measured to slow the
one that was there before it waits again.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from slurm_elastic.core.cluster import Allocation, Job, JobState, Node
from slurm_elastic.core.gpu_parts import jobs_by_gpu
from slurm_elastic.core.plan import Action, Decision, Plan
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.assignment import Assignment, JobOutcome
from slurm_elastic.placement.best_fit import NodeDemand, fit, takes
from slurm_elastic.placement.decisions import BEGIN_ORDER
from slurm_elastic.placement.eligibility import Eligibility, RoundJob
from slurm_elastic.placement.free_resources import FreeResources
from slurm_elastic.placement.neighbours.gpu_pair_table import EXPECTED_SPEED, GpuPairTable
from slurm_elastic.placement.neighbours.pair_matching import PossiblePair, matched
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.placement.pending_claims import waiting_jobs

#: Fields of a submission that ask for CPUs or memory per GPU: Slurm cannot compute these for a job
#: on shards, which holds no GPU.
_BY_GPUS = ("cpus_per_tres", "mem_per_tres")
#: Limits on the jobs that a round compares: waiting ones, running ones of a node (of which one gets
#: a partner in a round), and running ones in all.
_MOST_WAITING, _MOST_ON_NODE, _MOST_RUNNING = 64, 4, 64


def separate_pairs(
    assignment: Assignment,
    round_jobs: Mapping[int, RoundJob],
    table: GpuPairTable | None,
    *,
    ready: Iterable[int] = (),
    counts_halves: bool = False,
) -> None:
    """Give one job of each pair a free GPU, or let it wait, where that is better.

    Args:
        assignment: of this round; it is changed.
        round_jobs: all elastic jobs.
        table: speeds of two jobs on one GPU; None: they are not measured.
        ready: ids of waiting jobs that the policy is asked about. GPUs for the MIN of those that
            may not share are not free; the others get the halves that fall free.
        counts_halves: whether the policy gives halves to waiting jobs itself: then none of their
            GPUs is free.
    """
    pairs = {
        frozenset((t.job.job_id, t.partner.job_id))
        for t in round_jobs.values()
        if t.partner is not None
    }
    if not pairs:
        return
    free = assignment.later.meet(assignment.now)
    shares = table is not None and table.pairs_jobs and not counts_halves
    for job_id in ready:
        _keep_least(free, round_jobs[job_id], assignment.frame, shares=shares)
    for pair in sorted(pairs, key=sorted):
        jobs = [round_jobs[j] for j in sorted(pair) if j in round_jobs]
        movable = [t for t in jobs if t.separable and t.current and t.current.half]
        movable.sort(key=lambda t: (t.cost_s, t.job.job_id))
        outcomes = (_separated(assignment, t, table, free) for t in movable)
        outcome = next((o for o in outcomes if o is not None), None)
        if outcome is not None:
            for resources in (assignment.later, free):
                resources.take(outcome.round_job.need, outcome.target)
            assignment.outcomes[outcome.job_id] = outcome


def _keep_least(
    free: FreeResources, round_job: RoundJob, frame: NodeArrays, *, shares: bool
) -> None:
    """Take GPUs for the least size of a waiting job, if it could start there.

    Args:
        free: is changed.
        round_job: the job.
        frame: the cluster.
        shares: whether pairs are made: none are taken for a job that may get half of a GPU.
    """
    demand, directive = round_job.demand(frame), round_job.directive
    for gpu_type in directive.types or frame.types:
        if shares and may_share(round_job, gpu_type):
            return
        sizes = directive.sizes(gpu_type)
        unit = directive.unit_for(gpu_type)
        place = fit(demand, gpu_type, sizes[0], free, unit=unit) if sizes else None
        if place is not None:
            free.take(round_job.need, place)
            return


def _separated(
    assignment: Assignment,
    round_job: RoundJob,
    table: GpuPairTable | None,
    free: FreeResources,
) -> JobOutcome | None:
    """Return the outcome of a job that leaves its half; None: it stays."""
    current, partner = round_job.current, round_job.partner
    assert current is not None
    assert partner is not None
    job, (node,) = round_job.job, current.nodes
    own = table.speed(node, job.job_id, partner.job_id) if table else EXPECTED_SPEED
    other = table.speed(node, partner.job_id, job.job_id) if table else EXPECTED_SPEED
    named = {"job": partner.display_id, "user": partner.user, "speed": min(own, other)}
    gain = 2 - own - other
    if round_job.directive.max_gpus > 1:  # with a GPU of its own it may grow again
        gain = max(gain, assignment.config.resize.min_gain)
    must = _disagree(job, partner) or round_job.record.half_barred is not None
    pays = must or gain * round_job.window_s > round_job.cost_s
    target = _free_gpu(assignment.frame, round_job, current.gpu_type, free) if pays else None
    if target is not None:
        reason = Reason("leaves-shared-gpu", gain=gain, cost_s=round_job.cost_s, **named)
    elif _started_later(job, partner) and table and table.hurts(node, partner.job_id, job.job_id):
        reason = Reason("slows-partner", **named)
    else:
        return None
    return JobOutcome(round_job, target, reason=reason, promised=True)


def _disagree(job: Job, partner: Job) -> bool:
    """Return whether one of two jobs on a GPU does not allow that, or not any more."""
    return any(j.directive is None or j.directive.share == "no" for j in (job, partner))


def _free_gpu(
    frame: NodeArrays, round_job: RoundJob, gpu_type: str, free: FreeResources
) -> Allocation | None:
    """Return a GPU of this type that is free for a job, now and later; None: there is none."""
    if not round_job.directive.allows(1, gpu_type):
        return None
    return fit(dataclasses.replace(round_job, current=None).demand(frame), gpu_type, 1, free)


def _started_later(job: Job, partner: Job) -> bool:
    """Return whether a job came onto the GPU of its partner, by the starts of their attempts."""
    return (job.start_time or 0.0, job.job_id) > (partner.start_time or 0.0, partner.job_id)


def share_gpus(
    plan: Plan,
    assignment: Assignment,
    round_jobs: Mapping[int, RoundJob],
    table: GpuPairTable | None,
) -> Plan:
    """Return the plan with pairs of jobs on one GPU; the same plan where there is none.

    Args:
        plan: decided without pairs.
        assignment: of this round; it has the resources that are free beside the plan.
        round_jobs: all elastic jobs.
        table: speeds of two jobs on one GPU; None: nothing is shared.
    """
    plan = _as_held(plan, round_jobs)
    if table is None or not table.pairs_jobs:
        return plan
    open_gpus = OpenGpus(assignment.frame, round_jobs)
    plan = _started_on_halves(plan, assignment, round_jobs, open_gpus)
    hosts = [
        t
        for t in round_jobs.values()
        if _is_host(t, plan, assignment.frame) and open_gpus.has_no_other(t.job)
    ]
    hosts = _first_of_each_node(hosts)
    guests = _guests(plan, assignment.frame, round_jobs) if hosts else []
    if not guests:
        return plan
    room = SharedNodeRoom(assignment.later.meet(assignment.now))
    pairs = [
        pair
        for host in hosts
        for guest in guests
        if (pair := _pair(host, guest, table)) is not None
        and pair.allowed
        and room.fits(host, guest)
    ]
    changed: dict[int, Decision] = {}
    nodes: set[str] = set()
    host_ids = {t.job.job_id for t in hosts}
    for first, second in matched(pairs):
        host, guest = round_jobs[first], round_jobs[second]
        if second in host_ids:
            host, guest = guest, host
        (node,) = _half(host).nodes
        # Earlier pairs have taken resources; the jobs of two pairs on a node Slurm might exchange.
        if node in nodes or not room.fits(host, guest):
            continue
        nodes.add(node)
        room.take(host, guest)
        changed |= _decisions(host, guest, plan, table)
    if not changed:
        return plan
    decisions = (changed.get(d.job_id, d) for d in plan.decisions)
    return dataclasses.replace(plan, decisions=_in_order(decisions))


def _first_of_each_node(hosts: Iterable[RoundJob]) -> list[RoundJob]:
    """Return some running jobs of each node, first those that need no restart."""
    on_node, chosen = Counter[str](), []
    for host in sorted(hosts, key=lambda t: t.current == t.job.allocation):
        (node,) = _half(host).nodes
        on_node[node] += 1
        if on_node[node] <= _MOST_ON_NODE:
            chosen.append(host)
    return chosen[:_MOST_RUNNING]


def _as_held(plan: Plan, round_jobs: Mapping[int, RoundJob]) -> Plan:
    """Return the plan with the halves that jobs hold and keep, which counted as whole GPUs."""
    halves = {
        job_id: held
        for job_id, t in round_jobs.items()
        if (held := t.job.allocation) is not None and held.half and t.partner is None
    }
    if not halves:
        return plan
    decisions = [
        d
        if (held := halves.get(d.job_id)) is None
        else dataclasses.replace(
            d, current=held, target=held if d.action is Action.KEEP else d.target
        )
        for d in plan.decisions
    ]
    return dataclasses.replace(plan, decisions=tuple(decisions))


def _started_on_halves(
    plan: Plan, assignment: Assignment, round_jobs: Mapping[int, RoundJob], open_gpus: OpenGpus
) -> Plan:
    """Return the plan in which jobs that are to share their GPU start on half of it at once."""
    starting = {
        d.job_id
        for d in plan.decisions
        if d.action is Action.START
        and d.target is not None
        and (outcome := assignment.outcomes.get(d.job_id)) is not None
        and outcome.wished is not None
        and outcome.wished.half
        and d.target.gpus == 1
        and may_share(round_jobs[d.job_id], d.target.gpu_type)
        and open_gpus.has_one_free(d.target.nodes[0], assignment)
    }
    if not starting:
        return plan
    decisions = tuple(
        dataclasses.replace(d, target=dataclasses.replace(d.target, half=True))
        if d.job_id in starting and d.target is not None
        else d
        for d in plan.decisions
    )
    return dataclasses.replace(plan, decisions=decisions)


class OpenGpus:
    """GPUs of each node on which Slurm could put a job that asks for half of one.

    Slurm takes the first GPU of a node with enough free shards, and a request cannot name one.

    Args:
        frame: the cluster.
        round_jobs: all elastic jobs.
    """

    def __init__(self, frame: NodeArrays, round_jobs: Mapping[int, RoundJob]) -> None:
        self._frame = frame
        self._divided: dict[str, list[tuple[Job, ...]]] = {}
        for (node, _), present in jobs_by_gpu(frame.snapshot.jobs).items():
            self._divided.setdefault(node, []).append(present)
        self._unclear = {n for j in frame.snapshot.jobs for n, index in j.parts if index < 0}
        for round_job in round_jobs.values():
            if round_job.eligibility is Eligibility.MOVING:
                for place in (round_job.current, round_job.record.target):
                    self._unclear.update(place.nodes if place else ())

    def has_no_other(self, job: Job) -> bool:
        """Return whether Slurm could put a partner nowhere on a job's node but on the job's GPU.

        False where jobs come and go, or where jobs hold other parts of GPUs.
        """
        held = job.allocation
        if held is None or held.nodes[0] in self._unclear:
            return False
        (node,) = held.nodes
        if node not in self._frame.index or self._frame.free[self._frame.index[node]] > 0:
            return False
        return self.no_other_part(job, node)

    def no_other_part(self, job: Job | None, node: str) -> bool:
        """Return whether all divided GPUs of a node belong to pairs, or to this job alone."""
        divided = self._divided.get(node, ())
        return node not in self._unclear and all(p == (job,) or _is_pair(p) for p in divided)

    def has_one_free(self, name: str, assignment: Assignment) -> bool:
        """Return whether one GPU of a node is free, and none has a free half.

        Then Slurm puts a job that asks for half of a GPU there on that one.
        """
        node = self._frame.snapshot.node.get(name)
        if node is None or not is_divisible(node) or not self.no_other_part(None, name):
            return False
        at = self._frame.index[name]
        free = assignment.later.gpus[at] + 1 if assignment.at_once else self._frame.free[at]
        return int(free) == 1


def _is_pair(present: Sequence[Job]) -> bool:
    return len(present) == 2 and all(j.allocation and j.allocation.half for j in present)


def _is_host(round_job: RoundJob, plan: Plan, frame: NodeArrays) -> bool:
    """Return whether a running job has a GPU, or half of one, beside which another may start."""
    job, held = round_job.job, round_job.job.allocation
    decision = plan.decision[job.job_id]
    if job.state is not JobState.RUNNING or held is None or held.gpus != 1 or job.companions:
        return False
    if not may_share(round_job, held.gpu_type) or decision.action is not Action.KEEP:
        return False
    node = frame.snapshot.node.get(held.nodes[0])
    if node is None or not is_divisible(node):
        return False
    if held.half:
        is_settled = round_job.eligibility is not Eligibility.MOVING
        return is_settled and round_job.partner is None
    return round_job.eligibility is Eligibility.FREE


def _guests(
    plan: Plan, frame: NodeArrays, round_jobs: Mapping[int, RoundJob]
) -> Sequence[RoundJob]:
    """Return the jobs that wait for a GPU, and for which none is free, kept or given up."""
    claimed = {claim.job_id for claim in plan.claims}
    guests = []
    for job in waiting_jobs(round_jobs, frame):
        round_job = round_jobs.get(job.job_id)
        if round_job is None or job.job_id in claimed or not job.managed or round_job.record.held:
            continue
        decision = plan.decision[job.job_id]
        starts_at_all = round_job.reason is None or round_job.reason.code == "slurm-starts"
        if starts_at_all and decision.action is Action.KEEP and round_job.record.stopped is None:
            guests.append(round_job)
    return guests[:_MOST_WAITING]


def is_divisible(node: Node) -> bool:
    """Return whether two jobs may share a GPU of a node, by its shards."""
    return node.available and node.shards >= 2 and node.shards % 2 == 0


def may_share(round_job: RoundJob, gpu_type: str) -> bool:
    """Return whether a job may run on half of a GPU of this type."""
    job, directive = round_job.job, round_job.directive
    shape = job.submission.shape if job.submission else {}
    return (
        directive.share == "yes"
        and round_job.record.half_barred is None
        and bool(shape)
        and directive.allows(1, gpu_type)
        and not job.cpus_follow_gpus
        and not any(name in shape for name in _BY_GPUS)
    )


def pays_for_half(host: RoundJob) -> bool:
    """Return whether the restart of a running job with half of its GPU pays, if it needs one."""
    return host.job.allocation == _half(host) or not host.cost_s or host.window_s > host.cost_s


def _half(host: RoundJob) -> Allocation:
    held = host.job.allocation
    assert held is not None
    return dataclasses.replace(held, half=True)


class SharedNodeRoom:
    """Free resources beside a plan, for jobs that start on halves of GPUs.

    Args:
        free: is changed.
    """

    def __init__(self, free: FreeResources) -> None:
        self._free = free
        self._demands: dict[int, NodeDemand] = {}

    def fits(self, host: RoundJob, guest: RoundJob) -> bool:
        """Return whether a waiting job may start on the node of a running one, but for its GPU."""
        place, gpus = _half(host).whole, self._free.gpus
        index = self._free.frame.index.get(place.nodes[0])
        if index is None or not may_share(guest, place.gpu_type):
            return False
        demand = self._demand(guest)
        if not demand.allowed[index]:
            return False
        in_use, gpus[index] = int(gpus[index]), 1
        fits = takes(demand, place, self._free)
        gpus[index] = in_use
        return fits

    def take(self, host: RoundJob, guest: RoundJob) -> None:
        """Book a job beside another one."""
        self._free.take(guest.need, _half(host))

    def _demand(self, guest: RoundJob) -> NodeDemand:
        demand = self._demands.get(guest.job.job_id)
        if demand is None:
            frame = self._free.frame
            # Slurm's backfill has often planned the node for this very job, once a GPU is free.
            allowed = frame.allowed(guest.job, planned=True)
            demand = dataclasses.replace(guest.demand(frame), allowed=allowed)
            self._demands[guest.job.job_id] = demand
        return demand


def _pair(host: RoundJob, guest: RoundJob, table: GpuPairTable) -> PossiblePair | None:
    """Return a pair and its value.

    None: the host's restart would not be paid back, or the GPU's memory does not suffice for both.
    """
    half, host_id, guest_id = _half(host), host.job.job_id, guest.job.job_id
    (node,) = half.nodes
    if not pays_for_half(host):
        return None
    cost_s = 0.0 if host.job.allocation == half else host.cost_s
    if not table.has_memory(node, host_id, guest_id):
        return None
    speeds = (
        table.speed(node, host_id, guest_id),
        table.speed(node, guest_id, host_id),
    )
    return PossiblePair(
        first=host_id,
        second=guest_id,
        speeds=speeds,
        surely=speeds,
        gates=(table.gate, table.gate),
        caution=0.0,
        cost=cost_s / host.window_s if cost_s else 0.0,
    )


def _decisions(
    host: RoundJob, guest: RoundJob, plan: Plan, table: GpuPairTable
) -> dict[int, Decision]:
    """Return the decisions of a pair: the guest starts, or the host makes room for it first."""
    half, host_id, guest_id = _half(host), host.job.job_id, guest.job.job_id
    (node,) = half.nodes
    beside_guest = {"job": guest.job.display_id, "user": guest.job.user}
    beside_host = {"job": host.job.display_id, "user": host.job.user}
    waiting = plan.decision[guest_id]
    if host.job.allocation == half:
        speed = table.speed(node, guest_id, host_id)
        starts = dataclasses.replace(
            waiting,
            target=half,
            action=Action.START,
            reason=Reason("starts-on-half", speed=speed, **beside_host),
            waiting_for=None,
        )
        return {guest_id: starts}
    speed = table.speed(node, host_id, guest_id)
    divides = dataclasses.replace(
        plan.decision[host_id],
        target=half,
        action=Action.MOVE,
        reason=Reason("halves-gpu", speed=speed, cost_s=host.cost_s, **beside_guest),
        gain=speed - 1,
        cost_s=host.cost_s,
        waiting_for=None,
    )
    waits = dataclasses.replace(waiting, waiting_for=Reason("half-given-first", **beside_host))
    return {host_id: divides, guest_id: waits}


def _in_order(decisions: Iterable[Decision]) -> tuple[Decision, ...]:
    """Return decisions in the order in which they begin."""
    return tuple(sorted(decisions, key=lambda d: BEGIN_ORDER.index(d.action)))
