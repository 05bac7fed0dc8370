"""Our policy for execution plans (`slurm_elastic.policies.execution.plan_choice`) in the simulator.

With known work each job's remaining steps are those of the trace: an assumption that many trainings
meet, as they have a number of steps or epochs. Without, they are estimated from jobs that are over:
the mean of what those of the same model still needed after as many steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from slurm_elastic.policies.execution.plan_choice import (
    PlanChoiceSettings,
    PlanDemand,
    choose_plans,
)
from slurm_elastic.policies.execution.plan_options import PlanHolding
from slurm_elastic.simulator.execution.plan_simulation import RESTART_S, PlanRun
from slurm_elastic.simulator.execution.step_table import StepTable

#: Seconds on the fastest option that a first job of a model is taken to need.
_FIRST_GUESS_S = 600.0


class OwnPlanPolicy:
    """The policy with the measured step times.

    Args:
        tables: step tables by model.
        known: whether the steps of a job are known in advance.
        settings: numbers of the policy.
    """

    def __init__(
        self,
        tables: Mapping[str, StepTable],
        *,
        known: bool,
        nodes: int = 8,
        node_gpus: int = 8,
        settings: PlanChoiceSettings | None = None,
    ) -> None:
        self._tables = tables
        self._options = {model: table.options() for model, table in tables.items()}
        self._known = known
        self._size = (nodes, node_gpus)
        self._settings = settings
        self._steps_over: dict[str, list[int]] = defaultdict(list)
        self._seen: dict[str, PlanRun] = {}

    def decide(
        self, now: float, runs: Sequence[PlanRun], decided: Mapping[str, PlanHolding]
    ) -> dict[str, PlanHolding]:
        """See `PlanPolicy`."""
        del now, decided
        active = {run.job.name for run in runs}
        for name in [n for n in self._seen if n not in active]:
            job = self._seen.pop(name).job
            self._steps_over[job.model].append(job.steps)
        self._seen |= {run.job.name: run for run in runs}
        nodes, node_gpus = self._size
        demands = [self._demand(run) for run in runs]
        return choose_plans(demands, nodes=nodes, node_gpus=node_gpus, settings=self._settings)

    def _demand(self, run: PlanRun) -> PlanDemand:
        left = float(run.left) if self._known else self._estimated(run)
        requested = self.requested_s(run)
        slack = None
        if run.job.guaranteed:
            slack = RESTART_S + run.steps * requested - run.training_s - run.standing_s
        return PlanDemand(
            name=run.job.name,
            options=self._options[run.job.model],
            left=left,
            known=self._known,
            holding=run.holding,
            step_s=run.step_s,
            standing_s=run.standing_s,
            slack_s=slack,
            requested_s=requested,
        )

    def requested_s(self, run: PlanRun) -> float:
        """Return the seconds of a step as the user requested it, on its fastest placement."""
        return requested_step_s(run, self._tables)

    def _estimated(self, run: PlanRun) -> float:
        over = self._steps_over[run.job.model]
        further = [steps - run.steps for steps in over if steps > run.steps]
        fastest = min(o.step_s for o in self._options[run.job.model])
        guess = max(_FIRST_GUESS_S / fastest, run.steps)
        # One guess beside what is known, so that a single job does not decide.
        return (sum(further) + guess) / (len(further) + 1)


def requested_step_s(run: PlanRun, tables: Mapping[str, StepTable]) -> float:
    """Return the seconds of a step in a job's requested plan and GPUs, on its fastest placement."""
    job = run.job
    times = [
        by_plan[job.plan]
        for placement, by_plan in tables[job.model].seconds.items()
        if sum(placement) == job.gpus and job.plan in by_plan
    ]
    return min(times) if times else tables[job.model].step_s(job.plan, (job.gpus,))
