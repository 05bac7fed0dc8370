"""Policy `shockwave`: a plan for a window of rounds, from a market in which jobs buy time.

Zheng et al., NSDI'23. With T rounds of d seconds, jobs i of g_i GPUs on M, and x_it whether job i
runs in round t, the window's plan is (section 6; constants of the authors' public configuration)

    max  1/(N T) sum_i rho_i^l log U_i(x)  -  k max_i L_i(x),    sum_i g_i x_it <= M

U_i is the progress that a job has made at the window's end, L_i the seconds of training that are
left to it then, and rho_i, if it is above 1, else 1,

    (age + what is left) / (whole training / min(1, M / N))

T = 20, d = 120 s, k = 0.001, l = 12. log is piecewise linear with the same bases as theirs. GPUs
left over go to the jobs with most left to do.

Simplified: the program of the window is solved for numbers of rounds, not for each round (a linear
program over n_i = sum_t x_it), and is solved again every round, of which only the first is
carried out: jobs that get more of the rounds that they need first, then those of larger rho.
Their hard bounds on finish times, which they drop when these cannot be kept, are always dropped.
Batches do not change over time, so there is no prediction of changes (their section 5). With
several GPU types a job's rounds are divided between its shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

from slurm_elastic.config.schema import Config
from slurm_elastic.core.plan import Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.baselines.finish_time import FinishEstimate, account
from slurm_elastic.policies.baselines.rigid import Pool, Shape, proposal, requests, waits
from slurm_elastic.policies.policy_protocol import Capabilities, Question

Floats = NDArray[np.float64]

#: Rounds of a window, seconds of a round, weight of the longest rest, power of rho.
ROUNDS, ROUND_S, MAKESPAN, POWER = 20, 120.0, 1e-3, 12.0
#: Points between which the logarithm is linear; it begins at this progress.
_BASES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_ORIGIN = 1e-6
#: Largest weight of a job: rho^12 exceeds what a linear program can weigh.
_MOST_WEIGHT = 1e6
_DIGITS = 2


class Shockwave:
    """The policy; its state is the work of each job."""

    capabilities = Capabilities(binding_proposals=True, batch_chosen_by="user")

    def __init__(self, config: Config) -> None:
        del config

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Plan a window and carry its first round out; see the module."""
        estimates, accounts = account(question, state, requests(question))
        weights = [_weight(e, sum(question.capacity.values()), len(estimates)) for e in estimates]
        planned = plan_window(estimates, weights, question.capacity)
        wishes = []
        for i, rounds in enumerate(planned):
            part = round(sum(rounds.values()) / _useful_rounds(estimates[i]), _DIGITS)
            present = estimates[i].request.present
            for shape, count in rounds.items():
                wishes.append((-part, -weights[i], shape != present, i, -count, shape))
        pool = Pool(question.capacity)
        chosen: dict[int, tuple[Shape, Reason]] = {}
        for _, _, _, i, _, shape in sorted(wishes):
            if i not in chosen and pool.room(shape):
                pool.take(shape)
                rounds_planned = sum(planned[i].values())
                reason = Reason("window-turn", rounds=rounds_planned, window=ROUNDS)
                chosen[i] = (shape, reason)
        by_rest = sorted(range(len(estimates)), key=lambda i: (-estimates[i].left_s, i))
        for i in by_rest:
            shape_left = pool.first(estimates[i].request.staying_first)
            if i not in chosen and shape_left:
                pool.take(shape_left)
                chosen[i] = (shape_left, Reason("left-over"))
        proposals = []
        for i, estimate in enumerate(estimates):
            loser = Reason("others-turn") if estimate.request.shapes else waits(estimate.request)
            turn, turn_reason = chosen.get(i, (None, loser))
            value = sum(planned[i].values())
            proposals.append(proposal(estimate.request, turn, turn_reason, value))
        return tuple(proposals), accounts


def plan_window(
    estimates: Sequence[FinishEstimate], weights: Sequence[float], capacity: Mapping[str, int]
) -> list[dict[Shape, float]]:
    """Return the rounds of the window that each job gets in each of its shapes.

    No rounds for any job if the linear solver fails.
    """
    pairs = [
        (i, shape)
        for i, e in enumerate(estimates)
        for shape in e.speeds
        if shape[1] <= capacity.get(shape[0], 0)
    ]
    planned: list[dict[Shape, float]] = [{} for _ in estimates]
    if not pairs:
        return planned
    jobs, segments = len(estimates), len(_BASES) - 1
    slopes = _slopes()
    kinds = sorted({shape[0] for _, shape in pairs})
    # Variables: rounds of each pair, then the segments of each job's progress, then the rest.
    rest = len(pairs) + jobs * segments
    cost = np.zeros(rest + 1)
    cost[rest] = MAKESPAN
    for i in range(jobs):
        at = len(pairs) + i * segments
        cost[at : at + segments] = -weights[i] * slopes / (jobs * ROUNDS)
    upper: list[tuple[int, int, float]] = []
    bounds_upper: list[float] = []
    progress_rows: list[tuple[int, int, float]] = []
    for i, estimate in enumerate(estimates):
        own = [p for p, (j, _) in enumerate(pairs) if j == i]
        part = ROUND_S / max(estimate.total_s, ROUND_S * 1e-3)
        upper += [(len(bounds_upper), p, 1.0) for p in own]
        bounds_upper.append(float(ROUNDS))
        # What is left after the window: left_s - rounds <= rest.
        row = len(bounds_upper)
        upper += [(row, p, -ROUND_S * estimate.speeds[pairs[p][1]]) for p in own]
        upper.append((row, rest, -1.0))
        bounds_upper.append(-estimate.left_s)
        # Progress = its segments; the last one may be exceeded, as the job then ends.
        at = len(pairs) + i * segments
        progress_rows += [(i, at + s, 1.0) for s in range(segments)]
        progress_rows += [(i, p, -part * estimate.speeds[pairs[p][1]]) for p in own]
    for kind in kinds:
        row = len(bounds_upper)
        upper += [(row, p, float(s[1])) for p, (_, s) in enumerate(pairs) if s[0] == kind]
        bounds_upper.append(float(ROUNDS * capacity.get(kind, 0)))
    answer = linprog(
        cost,
        A_ub=_matrix(
            upper + [(r + len(bounds_upper), c, v) for r, c, v in progress_rows], rest + 1
        ),
        b_ub=[*bounds_upper, *(min(e.progress, 1.0) for e in estimates)],
        bounds=[
            *[(0.0, float(ROUNDS))] * len(pairs),
            *[(0.0, 1.0 / segments)] * (jobs * segments),
            (0.0, None),
        ],
        method="highs",
    )
    if answer.status == 0:
        for (i, shape), count in zip(pairs, answer.x, strict=False):
            if count > 10.0**-_DIGITS:
                planned[i][shape] = float(count)
    return planned


def _useful_rounds(estimate: FinishEstimate) -> float:
    """Return the rounds of the window after which the job would be at its end."""
    return min(float(ROUNDS), max(estimate.left_s / ROUND_S, 0.1))


def _weight(estimate: FinishEstimate, gpus: int, jobs: int) -> float:
    """Return rho^l where rho exceeds 1."""
    fair_s = estimate.total_s / min(1.0, gpus / max(1, jobs))
    rho = (estimate.age_s + estimate.left_s) / fair_s
    return min(_MOST_WEIGHT, float(max(1.0, rho) ** POWER))


def _slopes() -> Floats:
    """Return the slope of the logarithm in each segment."""
    values = [math.log(max(base, _ORIGIN)) for base in _BASES]
    return np.asarray(np.diff(values) / np.diff(_BASES))


def _matrix(entries: Sequence[tuple[int, int, float]], columns: int) -> Any:
    rows, at, values = zip(*entries, strict=True)
    return csr_array((values, (rows, at)), shape=(max(rows) + 1, columns))
