"""Policy `gavel`: shares of time on each GPU type for the largest total throughput, in rounds.

Narayanan et al., OSDI'20. Two steps per round:

1. Shares x (section 4, maximum total throughput), [jobs, types]:
   `max sum_ij rate_ij x_ij`, `sum_j x_ij <= 1`, `sum_i gpus_ij x_ij <= GPUs of type j`.
   Equal jobs shall get equal shares, so an interior-point method answers, without a crossover
   to a vertex.
2. Priorities (section 5): x_ij divided by the part of type j's time that job i has received.
   By priority, each job that still fits gets its GPUs until the next round; left-over GPUs go to
   jobs with no share. A job that gets the same type again keeps its GPUs.

As in the artifact of Sia (SOSP'23, `gavel.py`), with whose figures ours are compared: time
received begins at half a round for each job and type, and shares are rounded to 5 decimals.
At a tie (all jobs without a share tie at 0) a job's present type goes first; with `[sia]
artifact_compat` types go in the order of their names, jobs in that of their arrival, as there.
A round lasts until the next question; 360 s in the artifact. Rates are the
applications' in the requested shape; where they are missing, what the speed model says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from slurm_elastic.config.schema import Config
from slurm_elastic.core.plan import Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.baselines.rigid import (
    Pool,
    RigidRequest,
    Shape,
    elapsed,
    proposal,
    rates,
    requests,
    waits,
)
from slurm_elastic.policies.milp.quiet_highs import QuietHighs
from slurm_elastic.policies.policy_protocol import Capabilities, Question

Floats = NDArray[np.float64]

_DIGITS = 5
_COLUMN_WISE = 1
_MINIMISE = 1


class Gavel:
    """The policy; its state is the seconds that each job has received on each type."""

    capabilities = Capabilities(binding_proposals=True, batch_chosen_by="user")

    def __init__(self, config: Config) -> None:
        self._interval_s = config.controller.interval_s
        self._compat = config.sia.artifact_compat

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Rank jobs by share and time received; see the module."""
        all_requests = requests(question)
        kinds = tuple(sorted(question.capacity))
        received, offered_seconds = self._account(question, state, kinds)
        x = self._shares(all_requests, question, kinds)
        wishes = []
        for i, request in enumerate(all_requests):
            for shape in request.shapes:
                if shape[0] in kinds:
                    j = kinds.index(shape[0])
                    part = received[request.job.key][shape[0]] / offered_seconds[shape[0]]
                    share = float(x[i, j])
                    moves = shape != request.present and not self._compat
                    wishes.append((-share / part, -share, moves, j, i, shape))
        pool = Pool(question.capacity)
        chosen: dict[int, Shape] = {}
        values: dict[int, float] = {}
        for priority, _, _, _, i, shape in sorted(wishes):
            if i not in chosen and pool.room(shape):
                pool.take(shape)
                chosen[i], values[i] = shape, -priority
        proposals = []
        for i, request in enumerate(all_requests):
            reason = Reason("others-turn") if request.shapes else waits(request)
            if i in chosen:
                kind = chosen[i][0]
                share = x[i, kinds.index(kind)]
                reason = Reason("left-over")
                if share:
                    reason = Reason("time-share", gpu_type=kind, share=share)
            proposals.append(proposal(request, chosen.get(i), reason, values.get(i, 0.0)))
        chosen_types = {all_requests[i].job.key: shape[0] for i, shape in chosen.items()}
        return tuple(proposals), {
            "time": question.snapshot.time,
            "received": received,
            "given": offered_seconds,
            "taken": chosen_types,
        }

    def _account(
        self, question: Question, state: Mapping[str, Any], kinds: Sequence[str]
    ) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
        """Return seconds received by job and type, and their sum by type with ended jobs."""
        now, since = question.snapshot.time, state.get("time")
        # The clock shows rounds longer than configured (a simulation's).
        half_s = max(self._interval_s, now - since if since is not None else 0.0) / 2
        earlier: Mapping[str, Mapping[str, float]] = state.get("received", {})
        offered_seconds = {kind: float(state.get("given", {}).get(kind, 0.0)) for kind in kinds}
        held = elapsed(question, since) if since is not None else {}
        received = {}
        for job in question.snapshot.jobs:
            if job.submission is None:
                continue
            of_job = dict(earlier.get(job.key, {}))
            for kind in kinds:
                if kind not in of_job:
                    of_job[kind] = half_s
                    offered_seconds[kind] += half_s
            if job.allocation is not None and job.allocation.gpu_type in of_job:
                of_job[job.allocation.gpu_type] += held.get(job.key, 0.0)
                if job.allocation.gpu_type in offered_seconds:
                    offered_seconds[job.allocation.gpu_type] += held.get(job.key, 0.0)
            received[job.key] = of_job
        for key, kind in state.get("taken", {}).items():
            if key not in received and kind in offered_seconds and since is not None:
                offered_seconds[kind] += now - since
        return received, offered_seconds

    def _shares(
        self, all_requests: Sequence[RigidRequest], question: Question, kinds: Sequence[str]
    ) -> Floats:
        """Return [jobs, types] shares of time."""
        per_node = question.snapshot.per_node
        table = np.zeros((len(all_requests), len(kinds)))
        gpus = np.ones((len(all_requests), len(kinds)))
        for i, request in enumerate(all_requests):
            for (kind, count), rate in rates(request, question, per_node).items():
                if kind in kinds:
                    table[i, kinds.index(kind)] = rate
                    gpus[i, kinds.index(kind)] = count
        room = np.array([float(question.capacity[k]) for k in kinds])
        return np.clip(np.round(shares(table, gpus, room), _DIGITS), 0.0, 1.0)


def shares(rates: Floats, gpus: Floats, room: Floats) -> Floats:
    """Return the shares of time with the largest sum of rates.

    Args:
        rates: [J, T] speed of each job on each type; 0: it cannot run there.
        gpus: [J, T] GPUs that it would hold.
        room: [T] GPUs of each type.

    Returns:
        [J, T] in [0, 1]; 0 everywhere if the linear solver gave up.
    """
    x = np.zeros(rates.shape)
    job, kind = np.nonzero((rates > 0) & (gpus <= room))
    count, rows = len(job), len(rates)
    if not count:
        return x
    highs = QuietHighs()
    for option, value in (
        ("threads", 1),
        ("solver", "ipx"),
        ("run_crossover", "off"),
        ("presolve", "off"),
    ):
        highs.setOptionValue(option, value)
    values = np.ones(2 * count)
    values[1::2] = gpus[job, kind]
    # Only ratios matter: in units of the largest rate the tolerances are comparable.
    highs.passModel(
        count,
        rows + len(room),
        2 * count,
        _COLUMN_WISE,
        _MINIMISE,
        0.0,
        -rates[job, kind] / rates.max(),
        np.zeros(count),
        np.ones(count),
        np.full(rows + len(room), -highspy.kHighsInf),
        np.r_[np.ones(rows), room],
        np.arange(0, 2 * count, 2, dtype=np.int32),
        np.stack([job, rows + kind], axis=1).ravel().astype(np.int32),
        values,
        np.zeros(count, dtype=np.int32),
    )
    highs.run()
    values = np.asarray(highs.getSolution().col_value, dtype=np.float64)
    if len(values) == count and np.isfinite(values).all():
        x[job, kind] = values
    return x
