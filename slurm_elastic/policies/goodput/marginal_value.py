"""Policy `goodput`: number and type of GPUs by their marginal value, in one program per round.

Our own policy (docs/goodput.md; figures: docs/goodput-figures.md), built on Sia's configurations,
goodput models and solver. Every round:

1. the goodput of every job in every configuration it may have (sia/round_arrays.py), with the
   batch and the frozen layers that are best there (icefrog/effective_rows.py);
2. the gain `u = lambda goodput` per second, from prices of GPUs (type_prices.py, value_terms.py);
3. everything but what a job holds now multiplied by what a change leaves of it, less `hysteresis`.
   The change of a job whose length is known (remaining_work.py) has to pay back within
   `[resize] payback_s` and within the time that it has left; such a job is *informed*, and short
   jobs count more, the more jobs there are per GPU. Any other is *oblivious*: its factor is Sia's,
   by age and past restarts, with the price of the GPUs that stand idle during the change, and its
   weight is 1;
4. `max sum_jc X_jc (w_j (u_jc f_jc)^p / p - charge price k)` under the capacity of each type, and
   the limits of accounts, users and the site (round_limits.py); where jobs may share GPUs, halves
   of GPUs are configurations, too (half_columns.py);
5. overdue jobs that this leaves out get their smallest sizes (wait_bound.py), and the program is
   solved again for the others;
6. small jobs may measure types of which nothing is known, on idle GPUs (type_profiles.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from slurm_elastic.config.policy_settings import SiaSettings
from slurm_elastic.config.schema import Config
from slurm_elastic.core.plan import Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.resize_kind import ResizeKind
from slurm_elastic.policies.goodput import (
    predicted_work,
    remaining_work,
    round_limits,
    type_profiles,
    value_terms,
    wait_bound,
)
from slurm_elastic.policies.goodput.half_columns import HalfColumns, half_columns
from slurm_elastic.policies.goodput.type_prices import type_prices
from slurm_elastic.policies.icefrog.effective_rows import EffectiveGoodputs
from slurm_elastic.policies.milp.assignment_milp import (
    AssignmentProgram,
    Ints,
    ProgramSolution,
)
from slurm_elastic.policies.policy_protocol import Capabilities, Question
from slurm_elastic.policies.sia.known_choices import known_choices
from slurm_elastic.policies.sia.ranked_proposals import ProgramInputs, ranked_proposals
from slurm_elastic.policies.sia.round_arrays import Bools, Floats, RoundArrays, table
from slurm_elastic.policies.sia.sia import (
    Sia,
    noted_state,
    reached_in_place,
    stated_program,
    submitted,
)

#: Most attempts to keep jobs that may not be suspended, one by one.
_ROUNDS = 3
#: Most jobs for which the program is solved to the least gap. With more it is solved to a part of
#: one job's gain: its relaxation splits one job per GPU type, and a better solution than
#: well-rounded splits takes seconds.
_FEW_JOBS, _LEAST_GAP, _LOST_JOBS = 64, 1e-4, 0.5
#: Least profit of a configuration: running is better than waiting.
_LEAST_PROFIT = 0.01


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ValueInputs(ProgramInputs):
    """Arrays of a round and the inputs of its program.

    Attributes:
        weight: [J] factor of each job's gains by its length.
    """

    weight: Floats


class MarginalValue(Sia):
    """The policy; its state is the account of remaining work, and since when jobs wait."""

    def __init__(self, config: Config) -> None:
        settings = config.goodput
        super().__init__(
            dataclasses.replace(
                config,
                sia=SiaSettings(
                    growth=settings.growth,
                    whole_nodes=settings.whole_nodes,
                    solver=config.sia.solver,
                    time_limit_s=settings.time_limit_s,
                ),
            )
        )
        self._settings = settings
        self._goodputs = EffectiveGoodputs(self._rules)
        self.capabilities = Capabilities(
            binding_proposals=True,
            predicts_frozen_layers=True,
            shares_measurements=settings.share,
            residual_models=settings.residuals,
            predicted_lengths=settings.predicted,
            weighs_halves=True,
        )

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Rank alternatives for every job of the question; see the module."""
        settings = self._settings
        arrays = self._arrays(question)
        remaining, work = remaining_work.account(question, arrays, state.get("work", {}))
        if not settings.lengths:
            remaining[:] = np.nan
        predicted: Mapping[str, Any] = {}
        if settings.predicted:
            remaining, predicted = predicted_work.account(
                question, arrays, remaining, state.get("predicted", {})
            )
        weighed = self._terms(question, arrays, remaining)
        jobs = arrays.candidates
        old_waits = state.get("waits", {})
        waited = wait_bound.waited_before(
            question, state.get("waited", {}), old_waits, settings.wait_s
        )
        last_s = state.get("work", {}).get("time", question.snapshot.time)
        waits = wait_bound.waiting_since(question, jobs, old_waits, waited, last_s)
        overdue = wait_bound.overdue(question, jobs, waits, settings.wait_s)
        profiles = type_profiles.account(question, arrays, settings, state.get("profiles", {}))
        # Jobs that waited too long come before measurements.
        measuring = {} if overdue else profiles.staying
        halves = self._halves(question, weighed, remaining, {*overdue, *measuring})
        not_suspended = self._not_suspended(question, arrays, waited, overdue)
        solution, first = self._divide(
            question, weighed, overdue, not_suspended, measuring=measuring, halves=halves
        )
        choice = profiles.begin(solution.choice, remaining)
        runs = np.flatnonzero(choice >= 0)
        left = np.full(len(jobs), np.nan)
        left[runs] = remaining[runs] / arrays.goodput[runs, choice[runs]]
        left_s, weights = left.tolist(), weighed.weight.tolist()

        def explained(row: int, reason: Reason) -> Reason:
            """Add the effect of the length, or that the job was overdue or measures a type."""
            if first[row]:
                waited_s = question.snapshot.time - waits[jobs[row].job.key]
                return Reason("waited-longest", waited_s=waited_s, reason=reason)
            if (gpu_type := profiles.measured_type(row, int(choice[row]))) is not None:
                return Reason("measures-type", gpu_type=gpu_type, limit_s=settings.profile_s)
            if math.isnan(left_s[row]):
                return reason
            further = Reason("work-left", left_s=left_s[row], weight=weights[row])
            return Reason("several", reasons=[reason, further])

        proposals = ranked_proposals(
            weighed, choice, limit_hit=solution.limit_hit, explained=explained
        )
        if halves:
            proposals = tuple(
                halves.noted(row, p, question.snapshot) for row, p in enumerate(proposals)
            )
        suspends = self._config.controller.queue == "controller"
        kept = np.flatnonzero(not_suspended).tolist() if suspends else []
        proposals = wait_bound.urgent_first(proposals, arrays, overdue, weighed.scaled, kept=kept)
        next_state = {**state, "work": work, "waits": dict(sorted(waits.items()))}
        next_state["waited"] = dict(sorted(waited.items()))
        next_state.pop("profiles", None)
        next_state.pop("predicted", None)
        if predicted:
            next_state["predicted"] = predicted
        if profiles.entries:
            next_state["profiles"] = profiles.entries
        return proposals, noted_state(next_state, question, solution)

    def _not_suspended(
        self,
        question: Question,
        arrays: RoundArrays,
        waited: Mapping[str, float],
        overdue: Collection[int],
    ) -> Bools:
        """Return [J] which running jobs are not suspended for overdue ones, nor for any others."""
        if self._config.controller.queue != "controller":
            return arrays.held >= 0
        recent, late = wait_bound.protected(
            question, arrays.candidates, waited, self._settings.wait_s
        )
        return (arrays.held >= 0) & (recent if overdue else late)

    def weigh(self, question: Question) -> ValueInputs:
        """Return the arrays of a question's program, as for jobs of unknown length."""
        arrays = self._arrays(question)
        return self._terms(question, arrays, np.full(len(arrays.candidates), np.nan))

    def _arrays(self, question: Question) -> RoundArrays:
        arrays = table(question, self._config.sia, self._goodputs)
        return round_limits.within_node_limits(question, arrays)

    def _terms(self, question: Question, arrays: RoundArrays, remaining: Floats) -> ValueInputs:
        settings = self._settings
        prices = type_prices(arrays, settings.price, settings.prices)
        values = value_terms.unit_values(arrays, prices)
        gain = value_terms.gains(arrays, values)
        factor = self._restart_factors(question, arrays)
        requeued = gain * self._factors(question, arrays, remaining, prices, ResizeKind.REQUEUE)
        in_place = reached_in_place(question.snapshot, arrays)
        scaled = requeued
        if in_place.any():
            cheap = gain * self._factors(question, arrays, remaining, prices, ResizeKind.IN_PLACE)
            scaled = np.where(in_place, cheap, requeued)
        crowding = value_terms.crowding(len(arrays.candidates), sum(question.capacity.values()))
        power = settings.length_power * crowding
        weight = value_terms.weights(values, remaining, power=power)
        columns = arrays.configurations
        return ValueInputs(
            weight=weight,
            table=arrays,
            gain=gain,
            factor=factor,
            in_place=in_place,
            scaled=scaled,
            requeued=requeued,
            cost=np.where(
                arrays.valid,
                self._cost(weight, scaled, prices[columns.kind] * columns.gpus),
                0.0,
            ),
        )

    def _cost(self, weight: Floats, gain: Floats, price: Floats) -> Floats:
        """Return the costs of the program, from [J, C] gains after changes and [C] prices."""
        settings = self._settings
        profit = weight[:, None] * gain**settings.p / settings.p
        profit -= (settings.charge * price)[None, :]
        return -np.maximum(profit, _LEAST_PROFIT)

    def _halves(
        self, question: Question, weighed: ValueInputs, remaining: Floats, without: Collection[int]
    ) -> HalfColumns | None:
        """Return the configurations of half a GPU; the rows `without` have none."""
        if question.halves is None:
            return None
        arrays = weighed.table
        excluded = np.zeros(len(arrays.candidates), dtype=bool)
        excluded[list(without)] = True
        prices = type_prices(arrays, self._settings.price, self._settings.prices)

        def cost(columns: Ints, speeds: Floats) -> Floats:
            """Return the costs of half a GPU: of a requeue, unless the job has half already."""
            nothing_held = dataclasses.replace(arrays, held=np.full_like(arrays.held, -1))
            factors = self._factors(question, nothing_held, remaining, prices, ResizeKind.REQUEUE)
            factors[[bool(j.held and j.held.half) for j in arrays.candidates]] = 1.0
            gain = (weighed.gain * factors)[:, columns] * speeds
            kinds = arrays.configurations.kind[columns]
            return self._cost(weighed.weight, gain, prices[kinds] / 2)

        return half_columns(question.halves, arrays, cost, excluded)

    def _factors(
        self,
        question: Question,
        arrays: RoundArrays,
        remaining: Floats,
        prices: Floats,
        kind: ResizeKind,
    ) -> Floats:
        """Return [J, C] what is left of the gain after a change of this kind."""
        jobs = arrays.candidates
        change_s = np.array([self._restart_s(job, kind) for job in jobs], dtype=np.float64)
        change_s[[job.held is None and not job.job.run for job in jobs]] = 0.0
        columns = arrays.configurations
        by_age = value_terms.age_factors(
            self._restart_factors(question, arrays, kind),
            np.array([question.snapshot.time - submitted(job) for job in jobs], dtype=np.float64),
            change_s,
            prices[columns.kind] * columns.gpus,
        )
        paid = value_terms.payback_factors(
            arrays, remaining, change_s, self._config.resize.payback_s
        )
        factors = value_terms.selected(by_age, paid, ~np.isnan(remaining))
        return value_terms.hysteresis(factors, arrays, self._settings.hysteresis)

    def _divide(
        self,
        question: Question,
        weighed: ValueInputs,
        overdue: list[int],
        not_suspended: Bools,
        *,
        measuring: Mapping[int, int],
        halves: HalfColumns | None,
    ) -> tuple[ProgramSolution, Bools]:
        """Solve the program; return also [J] which jobs run only because they are overdue.

        Args:
            question: of this round.
            weighed: inputs of the program.
            overdue: rows of overdue jobs.
            not_suspended: [J] from `_not_suspended`.
            measuring: column of each row that stays to measure a type.
            halves: configurations of half a GPU; None: there are none.
        """
        arrays, settings = weighed.table, self._settings
        columns, jobs = arrays.configurations, arrays.candidates
        capacity = np.array([question.capacity.get(t, 0) for t in columns.types], dtype=np.int64)
        stays = not_suspended & arrays.valid.any(axis=1)
        smallest = wait_bound.smallest_columns(arrays) if overdue else arrays.held[:, None]
        floor = _floor(arrays, smallest) if overdue else arrays.held.copy()
        limits = round_limits.limit_rows(question, arrays)
        fixed: Ints = np.full(len(jobs), -1, dtype=np.int64)
        for row, column in measuring.items():
            fixed[row] = column
        solve = partial(
            self._solver.solve,
            time_limit_s=settings.time_limit_s,
            gap=_gap(len(jobs)),
            seed=question.round_seed,
            known=partial(known_choices, question, arrays, self._config),
        )
        for attempt in range(_ROUNDS + 1):
            program = AssignmentProgram(
                cost=weighed.cost,
                valid=arrays.valid,
                config_type=columns.kind,
                config_gpus=columns.gpus,
                capacity=capacity,
                not_running=0.0,
                fixed=fixed,
                limits=limits,
            )
            solution = halves.solve(program, solve) if halves else solve(program)
            missing = stays & (solution.choice < 0)
            served = stays.copy()
            left_out = [row for row in overdue if solution.choice[row] < 0]
            for row in overdue:
                if solution.choice[row] >= 0:
                    floor[row] = smallest[row, columns.kind[solution.choice[row]]]
                    served[row] = True
            if left_out:
                room = capacity - _used(arrays, floor, served)
                limit_room = wait_bound.LimitRoom(limits, np.where(served, floor, -1), left_out)
                granted = wait_bound.granted(
                    arrays, smallest, left_out, weighed.gain, room=room, limit_room=limit_room
                )
                for row, column in granted.items():
                    floor[row] = column
                    missing[row] = served[row] = True
            if not missing.any():
                break
            # At last all of them are kept, which fits by the way in which the room was counted.
            keep = served if attempt == _ROUNDS - 1 else missing
            fixed[keep] = floor[keep]
        stated = halves.stated if halves else None
        self._keep(question, stated or stated_program(arrays, program, solution))
        only = np.zeros(len(jobs), dtype=bool)
        only[[row for row in overdue if fixed[row] >= 0]] = True
        return solution, only


def _gap(jobs: int) -> float:
    """Return the distance to the optimum, relative to it, that is not worth its solution time."""
    return _LEAST_GAP if jobs <= _FEW_JOBS else max(_LEAST_GAP, _LOST_JOBS / jobs)


def _floor(arrays: RoundArrays, smallest: Ints) -> Ints:
    """Return [J] the least that a running job keeps: its smallest size on its present type."""
    columns = arrays.configurations
    floor = arrays.held.copy()
    for row in np.flatnonzero(arrays.held >= 0):
        column = smallest[row, columns.kind[floor[row]]]
        if column >= 0 and columns.gpus[column] < columns.gpus[floor[row]]:
            floor[row] = column
    return floor


def _used(arrays: RoundArrays, chosen: Ints, rows: Bools) -> Ints:
    """Return the [T] GPUs that these rows take in their chosen columns."""
    columns = arrays.configurations
    at = chosen[rows & (chosen >= 0)]
    used = np.bincount(columns.kind[at], weights=columns.gpus[at], minlength=len(columns.types))
    return used.astype(np.int64)
