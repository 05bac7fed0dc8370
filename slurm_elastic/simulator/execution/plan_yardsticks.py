"""Plain rules to compare policies for execution plans with.

`QueuedPlans`: jobs start in an order, each in its fastest option that fits, and keep it to their
end; a job that does not fit is passed over. `SharedPlans` is a simple joint rule: options of any
number of GPUs up to the cluster's divided by the active jobs; a job that is four times shorter may
stop longer ones; when no job waits, jobs grow where that saves more than a second start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.policies.execution.plan_options import PlanHolding, PlanOption
from slurm_elastic.simulator.execution.plan_simulation import RESTART_S, PlanRun
from slurm_elastic.simulator.execution.step_table import StepTable

_NODES, _NODE_GPUS = 8, 8
#: A job stops others whose work is this many times as much.
_SHORTER = 4.0


class QueuedPlans:
    """Jobs keep what they start with.

    Args:
        tables: step tables by model.
        least_work: least GPU time first, which must be known; else first come, first served.
        best_plan: any plan on the requested GPUs; else the requested one.
    """

    def __init__(
        self, tables: Mapping[str, StepTable], *, least_work: bool, best_plan: bool
    ) -> None:
        self._measured = {model: _measured(table) for model, table in tables.items()}
        self._least_work, self._best_plan = least_work, best_plan
        self._options_of: dict[tuple[str, int, ExecutionPlan], list[PlanOption]] = {}

    def decide(
        self, now: float, runs: Sequence[PlanRun], decided: Mapping[str, PlanHolding]
    ) -> dict[str, PlanHolding]:
        """See `PlanPolicy`."""
        del now, decided
        held = {run.job.name: run.holding for run in runs if run.holding.nodes}
        free = _free(held)
        waiting = [run for run in runs if run.job.name not in held]
        if self._least_work:
            waiting.sort(key=lambda run: _work(run, self._options(run)))
        for run in waiting:
            holding = _fastest(self._options(run), free)
            if holding is not None:
                held[run.job.name] = holding
                _take(free, holding, 1)
        return held

    def _options(self, run: PlanRun) -> list[PlanOption]:
        job = run.job
        key = (job.model, job.gpus, job.plan)
        if key not in self._options_of:
            self._options_of[key] = [
                option
                for option in self._measured[job.model]
                if option.gpus == job.gpus and (self._best_plan or option.plan == job.plan)
            ]
        return self._options_of[key]


class SharedPlans:
    """A simple joint rule with known work; see the module.

    Args:
        tables: step tables by model.
    """

    def __init__(self, tables: Mapping[str, StepTable]) -> None:
        self._options = {model: _measured(table) for model, table in tables.items()}

    def decide(
        self, now: float, runs: Sequence[PlanRun], decided: Mapping[str, PlanHolding]
    ) -> dict[str, PlanHolding]:
        """See `PlanPolicy`."""
        del now, decided
        by_name = {run.job.name: run for run in runs}
        held = {run.job.name: run.holding for run in runs if run.holding.nodes}
        free = _free(held)
        waiting = sorted(
            (run for run in runs if run.job.name not in held),
            key=lambda run: _work(run, self._options[run.job.model]),
        )
        for run in waiting:
            options = self._shares(run, len(runs))
            holding = _fastest(options, free)
            if holding is None:
                holding = self._instead(run, options, free, held, by_name)
            if holding is not None:
                held[run.job.name] = holding
                _take(free, holding, 1)
        if len(held) == len(runs):
            self._grow(by_name, held, free)
        return held

    def _shares(self, run: PlanRun, active: int) -> list[PlanOption]:
        options = self._options[run.job.model]
        share = _NODES * _NODE_GPUS / active
        least = min(option.gpus for option in options)
        return [option for option in options if option.gpus <= max(share, least)]

    def _instead(
        self,
        run: PlanRun,
        options: Sequence[PlanOption],
        free: list[int],
        held: dict[str, PlanHolding],
        by_name: Mapping[str, PlanRun],
    ) -> PlanHolding | None:
        """Stop much longer jobs, longest first, until one option fits."""
        work = _work(run, options)
        longer = sorted(
            (
                by_name[name]
                for name in held
                if by_name[name].holding == held[name] and by_name[name].standing_s <= 0
            ),
            key=_left_gpu_s,
            reverse=True,
        )
        room, stopped = list(free), []
        for other in longer:
            if _left_gpu_s(other) < _SHORTER * work:
                return None
            _take(room, other.holding, -1)
            stopped.append(other)
            if _fastest(options, room) is not None:
                for victim in stopped:
                    _take(free, held.pop(victim.job.name), -1)
                return _fastest(options, free)
        return None

    def _grow(
        self, by_name: Mapping[str, PlanRun], held: dict[str, PlanHolding], free: list[int]
    ) -> None:
        while True:
            best: tuple[float, str, PlanHolding] | None = None
            for name, holding in held.items():
                run = by_name[name]
                if run.holding != holding or run.standing_s > 0:
                    continue
                room = list(free)
                _take(room, holding, -1)
                for option in self._options[run.job.model]:
                    more = option.gpus - holding.gpus
                    saved = run.left * (run.step_s - option.step_s) - RESTART_S
                    place = option.on(room) if more > 0 and saved > RESTART_S else None
                    if place is not None and (best is None or saved / more > best[0]):
                        best = (saved / more, name, place)
            if best is None:
                return
            _, name, place = best
            _take(free, held[name], -1)
            held[name] = place
            _take(free, place, 1)


def _measured(table: StepTable) -> list[PlanOption]:
    """Return all options, fastest first."""
    return sorted(
        (
            PlanOption(tuple(sorted(placement, reverse=True)), plan, step_s)
            for placement, by_plan in table.seconds.items()
            for plan, step_s in by_plan.items()
        ),
        key=lambda option: option.step_s,
    )


def _work(run: PlanRun, options: Sequence[PlanOption]) -> float:
    return min(run.left * option.step_s * option.gpus for option in options)


def _left_gpu_s(run: PlanRun) -> float:
    return run.left * run.step_s * run.holding.gpus


def _fastest(options: Sequence[PlanOption], free: list[int]) -> PlanHolding | None:
    return next((h for option in options if (h := option.on(free)) is not None), None)


def _free(held: Mapping[str, PlanHolding]) -> list[int]:
    free = [_NODE_GPUS] * _NODES
    for holding in held.values():
        _take(free, holding, 1)
    return free


def _take(free: list[int], holding: PlanHolding, sign: int) -> None:
    for node, gpus in holding.nodes:
        free[node] -= sign * gpus
