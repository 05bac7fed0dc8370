"""Policy `sia`: number and type of GPUs by goodput, in one integer program per round.

Sia (Jayaram Subramanya et al., SOSP'23), section 3. Every round:

1. the goodput of every job in every configuration it may have (round_arrays.py, models/goodput.py);
2. each row divided by its smallest entry, times the GPUs of that one, so that a row is in GPUs
   of the slowest type;
3. everything but what a job holds now multiplied by its restart factor
   `max(T - N S, 0) / (T + S)`: T its age, N its restarts so far, S the seconds of one; what it
   can reach in place (placement/in_place_places.py) with the seconds of such a change;
4. `min sum_jc X_jc G_jc^p + lambda_n (jobs - sum X)` under the capacity of each type
   (milp/assignment_milp.py); p < 0 evens goodput out, lambda_n lets a job have its first GPU before
   others have more.

Jobs without a goodput model count with their speed (models/speedup.py). Deviations of the
authors' artifact: artifact_rules.py and docs/sia-published.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Snapshot
from slurm_elastic.core.plan import Proposal
from slurm_elastic.core.resize_kind import ResizeKind
from slurm_elastic.placement.in_place_places import FreeRoom, place_in_place
from slurm_elastic.policies.milp.assignment_milp import (
    AssignmentProgram,
    Ints,
    ProgramSolution,
)
from slurm_elastic.policies.milp.program_solver import from_setting
from slurm_elastic.policies.milp.round_program import RoundProgram
from slurm_elastic.policies.policy_protocol import Capabilities, Question
from slurm_elastic.policies.sia.artifact_rules import COST_DIGITS, OTHER_RESTART_S, ArtifactRules
from slurm_elastic.policies.sia.goodput_rows import Candidate, Goodputs
from slurm_elastic.policies.sia.known_choices import known_choices
from slurm_elastic.policies.sia.ranked_proposals import ProgramInputs, ranked_proposals
from slurm_elastic.policies.sia.round_arrays import Bools, Floats, RoundArrays, table

#: Least difference in cost between a configuration and waiting.
_LEAST_WORTH = 0.01
#: Most attempts to keep jobs that may not be suspended, one by one.
_ROUNDS = 3


class Sia:
    """The policy; its state counts rounds that the solver's time limit ended.

    Attributes:
        round_program: the program of the last round, with all its jobs; None before the first.
    """

    capabilities = Capabilities(binding_proposals=True)

    def __init__(self, config: Config) -> None:
        self._config = config
        self._rules = ArtifactRules.of(config.sia)
        self._goodputs = Goodputs(self._rules)
        self._solver = from_setting(config.sia.solver)
        self.round_program: RoundProgram | None = None
        self._last_snapshot: Snapshot | None = None

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Rank alternatives for every job of the question; see the module."""
        weighed = self.weigh(question)
        solution = self._solve(question, weighed)
        proposals = ranked_proposals(weighed, solution.choice, limit_hit=solution.limit_hit)
        return proposals, noted_state(state, question, solution)

    def weigh(self, question: Question) -> ProgramInputs:
        """Return the arrays of a question's program."""
        rules, sia = self._rules, self._config.sia
        arrays = table(question, sia, self._goodputs)
        gain = normalised(arrays)
        factor = self._restart_factors(question, arrays)
        in_place = reached_in_place(question.snapshot, arrays)
        requeued = gain * factor[:, None]
        rows = np.flatnonzero(arrays.held >= 0)
        requeued[rows, arrays.held[rows]] = gain[rows, arrays.held[rows]]
        scaled = requeued
        if in_place.any():
            cheap = self._restart_factors(question, arrays, ResizeKind.IN_PLACE)
            scaled = np.where(in_place, gain * cheap[:, None], requeued)
        with np.errstate(divide="ignore"):
            cost = np.minimum(np.where(arrays.valid, scaled, 1.0) ** sia.p, sia.max_cost)
        if not rules.free_suspension and sia.p < 0:
            # A restart may outweigh a change, but never make waiting better than running.
            cost = np.minimum(cost, max(sia.lambda_n - _LEAST_WORTH, 0.0))
        if rules.rounding:
            cost = np.round(cost, COST_DIGITS)
        if sia.p > 0:
            cost = -cost
        return ProgramInputs(
            table=arrays,
            gain=gain,
            factor=factor,
            in_place=in_place,
            scaled=scaled,
            requeued=requeued,
            cost=cost,
        )

    def _restart_factors(
        self, question: Question, arrays: RoundArrays, kind: ResizeKind = ResizeKind.REQUEUE
    ) -> Floats:
        """Return [J] restart factors; 1 for jobs that never ran: they pay for a start anyhow.

        Past changes count with the seconds of this kind, those in place at most with their own.
        """
        jobs = arrays.candidates
        age = np.array([question.snapshot.time - submitted(j) for j in jobs], dtype=np.float64)
        restart = np.array([self._restart_s(j, kind) for j in jobs], dtype=np.float64)
        count = np.array([j.record.resizes for j in jobs], dtype=np.float64)
        age = np.maximum(age, 0.0)
        lost = count * restart
        cheaper = np.array([j.record.resizes_in_place for j in jobs], dtype=np.float64)
        if cheaper.any():
            saved = restart - [self._restart_s(j, ResizeKind.IN_PLACE) for j in jobs]
            lost -= cheaper * np.maximum(saved, 0.0)
        factor = np.maximum(age - lost, 0.0) / np.maximum(age + restart, 1e-9)
        if self._rules.restart_window:
            factor[age < restart] = 1.0
        free = self._rules.free_suspension
        factor[[j.held is None and (free or not j.job.run) for j in jobs]] = 1.0
        return factor

    def _restart_s(self, job: Candidate, kind: ResizeKind) -> float:
        record = job.record
        if kind is ResizeKind.IN_PLACE:
            return record.cost_s(kind, self._config.resize.restart_s)
        if self._rules.restart_constants:
            name = job.learned.application.name if job.learned else job.job.name
            return self._config.sia.restart_s.get(name, OTHER_RESTART_S)
        return record.change_s(self._config.resize.restart_s)

    def _solve(self, question: Question, weighed: ProgramInputs) -> ProgramSolution:
        """Solve the program; suspend running jobs only if the controller may start them again."""
        arrays, sia = weighed.table, self._config.sia
        columns = arrays.configurations
        fixed: Ints = np.full(len(arrays.candidates), -1, dtype=np.int64)
        stays = np.zeros(len(fixed), dtype=bool)
        if self._config.controller.queue != "controller":
            stays = (arrays.held >= 0) & arrays.valid.any(axis=1)
        for attempt in range(_ROUNDS + 1):
            program = AssignmentProgram(
                cost=weighed.cost,
                valid=arrays.valid,
                config_type=columns.kind,
                config_gpus=columns.gpus,
                capacity=np.array(
                    [question.capacity.get(t, 0) for t in columns.types], dtype=np.int64
                ),
                not_running=sia.lambda_n,
                fixed=fixed,
            )
            solution = self._solver.solve(
                program,
                time_limit_s=sia.time_limit_s,
                seed=question.round_seed,
                known=partial(known_choices, question, arrays, self._config),
            )
            suspended = stays & (solution.choice < 0)
            if not suspended.any():
                break
            keep = stays if attempt == _ROUNDS - 1 else suspended
            fixed[keep] = arrays.held[keep]
        self._keep(question, stated_program(arrays, program, solution))
        return solution

    def _keep(self, question: Question, round_program: RoundProgram) -> None:
        """Keep the program of a round as its `round_program`."""
        if question.snapshot is not self._last_snapshot:
            # A round asks first about all jobs, then about those that are left.
            self._last_snapshot = question.snapshot
            self.round_program = round_program


def stated_program(
    arrays: RoundArrays, program: AssignmentProgram, solution: ProgramSolution
) -> RoundProgram:
    """Return a solved program of a round, with the names of its jobs and configurations."""
    return RoundProgram(
        program=program,
        job_ids=tuple(j.job.job_id for j in arrays.candidates),
        types=arrays.configurations.types,
        nodes=arrays.configurations.nodes,
        choice=solution.choice,
    )


def reached_in_place(snapshot: Snapshot, arrays: RoundArrays) -> Bools:
    """Return [J, C] whether a job can reach a configuration in place, into GPUs free now."""
    columns = arrays.configurations
    reached = np.zeros(arrays.valid.shape, dtype=bool)
    free_room = FreeRoom(snapshot)
    for row, (job, held) in enumerate(zip(arrays.candidates, arrays.held.tolist(), strict=True)):
        if held < 0 or not job.record.in_place:
            continue
        kind = columns.kind[held]
        base = job.job.base_allocation
        least = base.gpus if base else 0
        others = np.flatnonzero(
            arrays.valid[row] & (columns.kind == kind) & (columns.gpus >= least)
        )
        room = free_room.of(job.job, int(columns.nodes[others].max(initial=1)))
        for column in others[others != held].tolist():
            gpus, most = int(columns.gpus[column]), int(columns.per_node[kind])
            reached[row, column] = place_in_place(job.job, gpus, most, room) is not None
    return reached


def submitted(job: Candidate) -> float:
    """Return when a job was first submitted (epoch s)."""
    first = float(job.job.submission.submitted) if job.job.submission else 0.0
    return first if job.job.run and first else job.job.submit_time


def normalised(arrays: RoundArrays) -> Floats:
    """Return [J, C] goodput in GPUs of the job's slowest type (Sia, section 3.3).

    The smallest valid entry of each row counts as many GPUs as the job needs there at least;
    0 where not valid.
    """
    goodput = np.where(arrays.valid, arrays.goodput, np.inf)
    rows = np.arange(len(goodput))
    if not goodput.size:
        return np.zeros(goodput.shape)
    at = goodput.argmin(axis=1)
    smallest = goodput[rows, at]
    columns = arrays.configurations
    gpus = np.maximum(arrays.least[rows, columns.kind[at]], 1)
    smallest[~np.isfinite(smallest)] = 1.0
    return np.asarray(np.where(arrays.valid, arrays.goodput, 0.0) * (gpus / smallest)[:, None])


def noted_state(
    state: Mapping[str, Any], question: Question, solution: ProgramSolution
) -> Mapping[str, Any]:
    """Return the state; rounds that the time limit ended may not repeat exactly."""
    if solution.fallback:
        count = int(state.get("solver_fallbacks", 0)) + 1
        fallback = {"time": question.snapshot.time, "error": solution.fallback}
        state = {**state, "solver_fallbacks": count, "solver_fallback": fallback}
    if not solution.limit_hit:
        return state
    count = int(state.get("limit_hits", 0)) + 1
    note = {"time": question.snapshot.time, "gap": round(solution.gap, 6), "how": solution.how}
    return {**state, "limit_hits": count, "limit_hit": note}
