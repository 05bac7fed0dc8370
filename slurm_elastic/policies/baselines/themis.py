"""Policy `themis`: finish-time fairness by auctions of leases.

Mahajan et al., NSDI'20. A job keeps its GPUs for a lease of 20 minutes. GPUs that are free, or
whose lease has ended, are offered to the fraction 1 - f of all jobs, f = 0.8, that are furthest
from their fair finish time (finish_time.py). They bid their rho for each shape that they could
get, and the auction maximises

    prod_i 1 / rho_i(X_i)

under the capacity of each type: a program of at most one shape per job, with the costs log rho
(milp/assignment_milp.py). GPUs that are left over go to other jobs: first to those that hold them,
then to waiting jobs in random order.

Simplified: jobs report true values, so hidden payments, which make false ones useless, are left
out; a job runs at the requested size or not at all, so that bids are shapes, not subsets of GPUs; a
job is an application of its own; placement chooses the nodes. Ours: a bid of a job that holds GPUs
counts what the cheapest kind of change to its shape costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slurm_elastic.config.schema import Config
from slurm_elastic.core.plan import Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.baselines.finish_time import FinishEstimate, account, by_fairness
from slurm_elastic.policies.baselines.rigid import Pool, Shape, proposal, requests, waits
from slurm_elastic.policies.milp.assignment_milp import AssignmentProgram, solve
from slurm_elastic.policies.policy_protocol import Capabilities, Question

#: Fairness knob f, and seconds of a lease, as published.
FAIRNESS, LEASE_S = 0.8, 1200.0
#: Cost of a new job's fastest shape: its rho has no bound, it wins against all others.
_NEW = -30.0


class Themis:
    """The policy; its state is the work of each job, and the ends of the leases."""

    capabilities = Capabilities(binding_proposals=True, batch_chosen_by="user")

    def __init__(self, config: Config) -> None:
        self._time_limit_s = config.sia.time_limit_s
        self._restart_s = config.resize.restart_s

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Keep leases, auction the rest; see the module."""
        now = question.snapshot.time
        estimates, accounts = account(question, state, requests(question))
        leases: Mapping[str, float] = state.get("leases", {})
        pool = Pool(question.capacity)
        chosen: dict[int, tuple[Shape, Reason]] = {}
        for estimate in estimates:
            request = estimate.request
            shape, until = request.present, leases.get(request.job.key, 0.0)
            if shape in request.shapes and shape and until > now and pool.room(shape):
                pool.take(shape)
                chosen[request.job.job_id] = (shape, Reason("lease-lasts", left_s=until - now))
        bidders = [
            e for e in by_fairness(estimates)
            if e.request.job.job_id not in chosen and e.request.shapes
        ]  # fmt: skip
        count = math.ceil((1.0 - FAIRNESS) * len(estimates))
        for estimate, shape in self._auction(question, bidders[:count], pool):
            pool.take(shape)
            rho = estimate.rho(None) if estimate.known else None
            chosen[estimate.request.job.job_id] = (shape, Reason("auction-won", rho=rho))
        others = [e for e in bidders if e.request.job.job_id not in chosen]
        for estimate in _in_turn(others, question):
            left_over = pool.first(estimate.request.staying_first)
            if left_over:
                pool.take(left_over)
                chosen[estimate.request.job.job_id] = (left_over, Reason("auction-left-over"))
        proposals, next_leases = [], {}
        for estimate in estimates:
            request = estimate.request
            shape, reason = chosen.get(request.job.job_id, (None, None))
            if shape:
                until = leases.get(request.job.key, 0.0)
                lasts = shape == request.present and until > now
                next_leases[request.job.key] = until if lasts else now + LEASE_S
            loser = Reason("others-less-fair") if request.shapes else waits(request)
            proposals.append(proposal(request, shape, reason or loser, -estimate.left_s))
        return tuple(proposals), {**accounts, "leases": next_leases}

    def _auction(
        self, question: Question, bidders: Sequence[FinishEstimate], pool: Pool
    ) -> list[tuple[FinishEstimate, Shape]]:
        """Return the winners and their shapes."""
        shapes = sorted({s for e in bidders for s in e.request.shapes if pool.room(s)})
        if not shapes:
            return []
        types = sorted({kind for kind, _ in shapes})
        cost = np.zeros((len(bidders), len(shapes)))
        valid = np.zeros(cost.shape, dtype=np.bool_)
        for row, bidder in enumerate(bidders):
            for shape in bidder.request.shapes:
                if shape in shapes and shape in bidder.speeds:
                    at = shapes.index(shape)
                    valid[row, at] = True
                    cost[row, at] = _bid(bidder, shape, self._restart_s)
        program = AssignmentProgram(
            cost=cost,
            valid=valid,
            config_type=np.array([types.index(kind) for kind, _ in shapes], dtype=np.int64),
            config_gpus=np.array([gpus for _, gpus in shapes], dtype=np.int64),
            capacity=np.array([max(0, pool.free.get(t, 0)) for t in types], dtype=np.int64),
            not_running=0.0,
            fixed=np.full(len(bidders), -1, dtype=np.int64),
        )
        solution = solve(program, time_limit_s=self._time_limit_s, gap=1e-6, seed=question.seed)
        return [
            (bidder, shapes[c])
            for bidder, c in zip(bidders, solution.choice.tolist(), strict=True)
            if c >= 0
        ]


def _bid(bidder: FinishEstimate, shape: Shape, restart_s: float) -> float:
    """Return log rho with the shape, less that of waiting for a lease.

    A move costs a restart, a change of size on the same type what its cheapest kind costs.
    """
    request = bidder.request
    moves_s = 0.0
    if request.held and shape != request.present:
        moves_s = request.record.change_s(restart_s)
        if shape[0] == request.held.gpu_type:
            moves_s = request.record.costs_s(request.job, shape[1:], restart_s)[shape[1]]
    if not bidder.known:
        return _NEW - math.log(max(bidder.speeds[shape], 1e-6)) + moves_s / LEASE_S
    ratio = bidder.rho(shape, wait_s=moves_s) / bidder.rho(None, wait_s=LEASE_S)
    return math.log(max(ratio, 1e-9))


def _in_turn(others: Sequence[FinishEstimate], question: Question) -> list[FinishEstimate]:
    """Return those that hold GPUs, then the others in random order."""
    holding = [e for e in others if e.request.held]
    waiting = [e for e in others if not e.request.held]
    rng = np.random.default_rng([question.seed, int(question.snapshot.time)])
    return holding + [waiting[i] for i in rng.permutation(len(waiting))]
