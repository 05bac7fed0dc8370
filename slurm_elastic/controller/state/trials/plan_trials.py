"""Choice of a job's execution plan by trying plans, for jobs with `plan=auto`. Pure.

Our definition (docs/training-layouts.md, "Plans that the controller chooses"). The speed of each
plan is measured in the allocations in which the job runs in it, `""` being the job's own choice.
What a plan gains in an allocation where it was not measured is taken from a similar one
(`core.execution.plan_gains`).

- In a new allocation, or where its plan is not possible any more, the job begins with the plan that
  gains most as far as is known.
- As soon as `REPORTS` reports tell the speed of the present plan, a plan that is known to be faster
  by `MARGIN` replaces it. So a slow plan is left at once.
- When the restarts would cost at most a stated share of the time, the next unknown plan is tried;
  the job's own choice first, with which the others are compared. Once `FITTED` plans are measured
  in an allocation, the times of the others are predicted (`models.execution.plan_ranking`): the one
  that is predicted to be fastest is next, and none that would not replace the best.
- A plan in which the program fails before it has reported a step is not tried again there, and
  nowhere if it was to blame (`plan_failures`).
- Where the job's own choice does not fit into memory, a plan that needs less stands in for it
  (`plan_memory_record`): it is ordered where the own choice would be, others are compared with it,
  and its times are those of this allocation for models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.controller.state.trials.plan_failures import PlanFailures
from slurm_elastic.controller.state.trials.plan_memory_record import (
    AllocationShape,
    PlanMemoryRecord,
)
from slurm_elastic.controller.state.trials.plan_speeds import REPORTS, PlanSpeeds
from slurm_elastic.core.cluster import Allocation, Job
from slurm_elastic.core.execution.execution_plan import (
    ExecutionPlan,
    ExecutionPlanError,
    Sharding,
)
from slurm_elastic.core.execution.plan_gains import PlanGains, PlanKind
from slurm_elastic.core.execution.possible_plans import PlanCandidates, more_micro_batches
from slurm_elastic.core.execution.supported_options import SupportedOptions, SupportedOptionsError
from slurm_elastic.core.layout import LayoutText
from slurm_elastic.core.report import Report
from slurm_elastic.models.execution.plan_ranking import predicted_times

#: Factor by which a plan must be faster to replace another.
MARGIN = 1.05
#: Plans, the job's own choice among them, from which others are predicted (our choice: with 3 a
#: plan that is 5 % faster is missed on Rubick's tables, with 4 none is; ADR 24).
FITTED = 4
#: Seconds of a restart that has not been measured.
_RESTART_S = 30.0


@dataclass(slots=True, kw_only=True)
class PlanTrials:
    """Plans of one job: their speeds, and the one that is ordered now.

    Attributes:
        ordered: text of the plan; "": the job's own choice.
        shape: allocation for which it was chosen; None: no plan was chosen yet.
        since: when it was ordered (epoch s).
        running: whether the program is known to run in it.
        before: plan in which the program ran when it was ordered.
        supported: what the training can carry out.
        speeds: those of its plans.
        failures: plans in which the program failed.
        memory: of plans, and those that did not fit.
        failed_start: restart count of the attempt, and number of its start, that failed last.
        lost_in: restart count, and number of the change of members, at which the ranks of a
            companion ran out of memory last.
    """

    ordered: str = ""
    shape: AllocationShape | None = None
    since: float = 0.0
    running: bool = False
    before: str = ""
    supported: SupportedOptions = field(default_factory=SupportedOptions)
    speeds: PlanSpeeds = field(default_factory=PlanSpeeds)
    failures: PlanFailures = field(default_factory=PlanFailures)
    memory: PlanMemoryRecord = field(default_factory=PlanMemoryRecord)
    failed_start: tuple[int, int] = (-1, 0)
    lost_in: tuple[int, int] = (-1, 0)
    #: Allocation, number of its measured plans, and those that are worth a trial then.
    _ranked: tuple[AllocationShape | None, int, list[str]] = field(
        default=(None, 0, []), compare=False, repr=False
    )

    def record(self, report: Report, held: Allocation | None) -> bool:
        """Record a report; return whether it makes the speed of a plan known, or one to blame.

        Args:
            report: of the present attempt.
            held: the allocation that its times were measured in; None: they were not.
        """
        if report.supported_options:
            self.supported = SupportedOptions.parse(report.supported_options)
        text = report.plan or report.layout
        begins = report.phase == "starting"
        if not self.running:
            self.running = text == self.ordered if self.ordered else begins or text != self.before
        gpu_type = held.gpu_type if held else report.gpu_type
        self.memory.record(report, self._plan_of(report), gpu_type)
        if not (self.running and held and report.step_time_s and report.global_batch):
            return False
        if _shape_of(held) != self.shape:
            return False
        speed = report.global_batch / report.step_time_s
        names = {self.ordered} if self.ordered else {"", text if not report.plan else ""}
        shape, batch = self.shape, report.global_batch
        counts = [self.speeds.add(shape, batch, name, speed) for name in names]
        return self.failures.blame(shape, self.speeds.kinds()) or REPORTS in counts

    def _plan_of(self, report: Report) -> ExecutionPlan | None:
        """Return the plan in which a program trains; None: it has not said."""
        if not report.layout:
            return None
        if report.plan:
            return ExecutionPlan.parse(report.plan)
        layout, supported = LayoutText.parse(report.layout), self.supported
        divides = layout.stages == 1 and layout.world > 1
        return ExecutionPlan(
            layout,
            sharding=supported.own_sharding if divides else Sharding.NONE,
            recompute=supported.recompute,
        )

    def begin_with(self, results: object) -> None:
        """Begin with the speeds and failures of another job, unless there are own ones.

        Args:
            results: of that job, perhaps as an older release wrote them, or unreadable.
        """
        is_new = self.speeds == PlanSpeeds() and self.failures == PlanFailures()
        if is_new and not self.memory.failures:
            other = PlanTrials.from_body(results)
            self.speeds, self.failures = other.speeds, other.failures
            self.memory = other.memory if other.memory.weights else self.memory

    def results(self) -> dict[str, Any]:
        """Return JSON of what the next jobs of the application begin with."""
        body = self.to_body()
        speeds = [row for row in body["speeds"] if len(row[5]) >= REPORTS]
        return {"speeds": speeds, "failed": body["failed"], "memory": body["memory"]}

    def choose(
        self,
        candidates: PlanCandidates,
        held: Allocation,
        *,
        now: float,
        restart_s: float | None,
        share: float,
    ) -> bool:
        """Choose the plan for an allocation; return whether another is ordered now.

        Args:
            candidates: plans that are possible there, the faster ones in the order in which they
                are tried.
            held: the allocation.
            now: epoch s.
            restart_s: seconds that a change of the plan costs; None: not known.
            share: of the time that these restarts may take, 0 to 1; 0: nothing is tried.
        """
        shape = _shape_of(held)
        # "", or what stands in for the job's own choice; if nothing fits, its failures decide.
        own_text = self._stand_in(shape, candidates) or ""
        texts = self._possible(candidates, shape, divided=own_text != "")
        gains = self.gains()
        known: dict[str, float] = {}
        for kind, text in texts.items():
            gain = gains.of(kind, shape[0], gpus=shape[1], nodes=shape[2]) if gains else None
            if gain is not None and text != own_text:
                known[text] = gain
        own = self.speeds.is_measured(shape, own_text)
        best = max(known, key=lambda text: known[text], default="")
        # Faster than the job's own choice.
        faster = best if known.get(best, 0.0) >= MARGIN else own_text
        if shape != self.shape or self.ordered not in (own_text, *texts.values()):
            self.shape = shape
            return self._order(faster, now)
        if not (self.running and self.speeds.is_measured(shape, self.ordered)):
            return False
        present = known.get(self.ordered, 1.0)
        if self.ordered != own_text and own and present * MARGIN <= 1.0:
            return self._order(faster, now)
        if known.get(best, 0.0) >= MARGIN * present:
            return self._order(best, now)
        if not share or now - self.since < (restart_s or _RESTART_S) / share:
            return False
        if not own:
            return self._order(own_text, now)
        unknown = [text for text in texts.values() if text not in known and text != own_text]
        unknown = self._worth_trying(unknown, shape, candidates)
        return self._order(unknown[0], now) if unknown else False

    def _worth_trying(
        self, unknown: list[str], shape: AllocationShape, candidates: PlanCandidates
    ) -> list[str]:
        """Return the plans to try, the next one first, without those predicted to be too slow.

        Args:
            unknown: plans that were not measured in the allocation, in the order of the candidates.
            shape: the allocation.
            candidates: plans that are possible there.
        """
        batch = self.memory.batch
        speeds = self.speeds.medians(shape, batch)
        plans = {ExecutionPlan.parse(t) if t else candidates.own: s for t, s in speeds.items()}
        if len(plans) < FITTED or not unknown:
            return unknown
        if self._ranked[:2] != (shape, len(plans)):
            times = predicted_times(
                {plan: batch / speed for plan, speed in plans.items()},
                [ExecutionPlan.parse(text) for text in unknown],
                batch=batch,
            )
            most = batch / (MARGIN * max(plans.values()))
            worth = sorted((s, str(plan)) for plan, s in times.items() if s <= most)
            self._ranked = shape, len(plans), [text for _, text in worth]
        return [text for text in self._ranked[2] if text in unknown]

    def _possible(
        self, candidates: PlanCandidates, shape: AllocationShape, *, divided: bool
    ) -> dict[PlanKind, str]:
        """Return the text of each faster plan that is not known to fail, or not to fit.

        Args:
            candidates: plans for the allocation.
            shape: the allocation.
            divided: a plan that does not fit is taken with as few more micro-batches as it needs.
        """
        texts: dict[PlanKind, str] = {}
        for plan in candidates.faster:
            kind = PlanKind.of(plan)
            if self.failures.excludes(shape, kind):
                continue
            variants = (plan, *(more_micro_batches(plan, self.memory.batch) if divided else ()))
            fitting = (v for v in variants if self._fits(v, shape))
            if (chosen := next(fitting, None)) is not None:
                texts[kind] = str(chosen)
        return texts

    def _stand_in(self, shape: AllocationShape, candidates: PlanCandidates) -> str | None:
        """Return the plan in place of the job's own choice; see `PlanMemoryRecord.stand_in`."""
        if self.speeds.is_measured(shape, "") and not self.memory.failed(shape, ""):
            return ""  # it trains there, whatever has failed elsewhere
        return self.memory.stand_in(shape, candidates, without=self.failures.in_doubt(shape))

    def _fits(self, plan: ExecutionPlan, shape: AllocationShape) -> bool:
        text = str(plan)
        if self.memory.failed(shape, text):
            return False
        return self.speeds.is_measured(shape, text) or self.memory.fits(shape, text, plan)

    def _order(self, text: str, now: float) -> bool:
        """Order a plan; return whether it is another one."""
        changed = text != self.ordered
        if changed:
            self.before, self.running = self.ordered, False
        self.ordered, self.since = text, now
        return changed

    def ordered_in(self, shape: AllocationShape) -> str:
        """Return the plan that is ordered in an allocation; "": none, or the job's own choice."""
        return self.ordered if shape == self.shape else ""

    def is_new(self, held: Allocation) -> bool:
        """Return whether no plan was chosen for this allocation."""
        return _shape_of(held) != self.shape

    def withdraw(self, now: float) -> None:
        """Leave the plan to the job."""
        self.shape = None
        self._order("", now)

    def fail(self, report: Report, held: Allocation | None, now: float) -> bool:
        """Record a start that has failed, if its plan may be the cause: it has reported no speed.

        Args:
            report: of the failed start.
            held: the allocation in which it failed; None: that is not known.
            now: epoch s.

        Returns:
            Whether the program is to be started again, in the plan before.
        """
        if self.has_answered(report):
            return True
        if held is None:
            return False
        shape = _shape_of(held)
        text = self._failed_in(report, shape)
        if text is None or self.memory.failed(shape, text):
            return False
        if not text or self.speeds.reports(shape, text):
            self.failures.record_other_cause(shape)
            return False
        self.failures.doubt(shape, text)
        own_text = self.memory.stand_ins.get(shape, "")
        if text == own_text:
            return False  # the size may be the cause as well
        back = text != self.before and self.speeds.reports(shape, self.before)
        self._restart(report, self.before if back else own_text, now)
        return True

    def _failed_in(self, report: Report, shape: AllocationShape) -> str | None:
        """Return the plan in which a start has failed.

        Args:
            report: of the failed start.
            shape: allocation in which it failed.

        Returns:
            "": the job's own choice; None: a plan that was not ordered here.
        """
        ordered = self.ordered_in(shape)
        reported = report.plan or report.layout
        plan = ExecutionPlan.parse(reported) if reported else None
        if plan is None or plan.world != shape[1]:
            # It failed before it had reported its plan, or since its ranks have changed: orders
            # are read before that.
            return ordered
        if reported in (ordered, self.before):
            return reported
        # The own choice of a script is a plan, too, where ranks share layers by it.
        return "" if not report.plan or plan.tensor == self.supported.own_tensor > 1 else None

    def has_answered(self, report: Report) -> bool:
        """Return whether a failed start is repeated in another plan."""
        return (report.run, report.failed_start or 0) == self.failed_start

    def lack_memory(
        self, report: Report, candidates: PlanCandidates, held: Allocation, now: float
    ) -> bool:
        """Record that a start has run out of memory, and order a plan that needs less.

        Args:
            report: of the failed start.
            candidates: plans for the allocation in which it failed.
            held: that allocation.
            now: epoch s.

        Returns:
            Whether the program is to be started again in the ordered plan.
        """
        if self.has_answered(report):
            return True
        shape = _shape_of(held)
        old = self._failed_in(report, shape)
        if old is None:
            return False
        plan = ExecutionPlan.parse(old) if old else candidates.own
        self.memory.record(report, None, held.gpu_type)
        is_new = self.memory.fail(shape, old, plan)
        if not is_new and (report.run, report.change) != self.lost_in:
            return False  # but for ranks that failed just after those of a companion
        own_text = self._stand_in(shape, candidates)
        if own_text is None:
            return False
        self.shape = shape
        worked = old != self.before and self.speeds.reports(shape, self.before)
        back = worked and self._may_return(shape, candidates)
        self._restart(report, self.before if back else own_text, now)
        return True

    def lose_companion(
        self, run: int, change: int, shape: AllocationShape, candidates: PlanCandidates
    ) -> bool:
        """Record that the ranks of a companion have run out of memory, while the others train on.

        Args:
            run: restart count of the attempt.
            change: number of its last change of members.
            shape: of all ranks, the lost ones included.
            candidates: plans for so many GPUs.

        Returns:
            Whether that is new: each change counts once.
        """
        if (run, change) == self.lost_in:
            return False
        self.lost_in = run, change
        text = self.ordered_in(shape)
        plan = ExecutionPlan.parse(text) if text else candidates.own
        return self.memory.fail(shape, text, plan)

    def _may_return(self, shape: AllocationShape, candidates: PlanCandidates) -> bool:
        """Return whether the plan before the present one fits."""
        if not self.before:
            return self.memory.fits(shape, "", candidates.own)
        return not self.memory.failed(shape, self.before)

    def _restart(self, report: Report, text: str, now: float) -> None:
        """Order a plan for another start of the program, even if it is the same."""
        self.failed_start = report.run, report.failed_start or 0
        self._order(text, now)

    def gains(self) -> PlanGains | None:
        """Return the gain of each kind of plan that was measured; None: none was."""
        return self.speeds.gains(self.memory.stand_ins)

    def as_own(self, report: Report, held: Allocation | None) -> tuple[Report, Allocation | None]:
        """Return a report as if the job ran in its own choice, for models of that.

        Returns:
            The report, and the allocation in which its times count; None where the gain of its plan
            is not known. A plan that stands in for the own choice counts as that.
        """
        if held is None or not self.ordered:
            return report, held if self.running or self.shape is None else None
        if self.ordered == self.memory.stand_ins.get(_shape_of(held)):
            as_replicas = dataclasses.replace(report, plan="", layout="", micro_batches=None)
            return as_replicas, held if self.running else None
        kind = PlanKind.of(ExecutionPlan.parse(self.ordered))
        gains, (gpu_type, gpus, nodes) = self.gains(), _shape_of(held)
        gain = gains.of(kind, gpu_type, gpus=gpus, nodes=nodes) if gains else None
        if gain is None or not self.running or not report.step_time_s:
            return report, None
        own = dataclasses.replace(
            report,
            step_time_s=report.step_time_s * gain,
            micro_step_s=None,
            plan="",
            layout="",
            micro_batches=None,
        )
        return own, held

    def to_body(self) -> dict[str, Any]:
        """Return JSON for the ledger."""
        return {
            "ordered": self.ordered,
            "shape": self.shape,
            "since": self.since,
            "running": self.running,
            "before": self.before,
            "supported": str(self.supported),
            "speeds": self.speeds.to_rows(),
            **self.failures.to_body(),
            "memory": self.memory.to_body(),
            "failed_start": list(self.failed_start),
            "lost_in": list(self.lost_in),
        }

    @classmethod
    def from_body(cls, body: object) -> PlanTrials:
        """Return it from the ledger's JSON; nothing is known if it is missing or unreadable."""
        values: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
        try:
            shape, (run, start) = values.get("shape"), values.get("failed_start", (-1, 0))
            lost_run, change = values.get("lost_in", (-1, 0))
            ordered = str(values.get("ordered", ""))
            if ordered:
                ExecutionPlan.parse(ordered)
            return cls(
                ordered=ordered,
                shape=(str(shape[0]), int(shape[1]), int(shape[2])) if shape else None,
                since=float(values.get("since", 0.0)),
                running=values.get("running") is True,
                before=str(values.get("before", "")),
                supported=SupportedOptions.parse(str(values.get("supported", ""))),
                speeds=PlanSpeeds.from_rows(values.get("speeds", ())),
                failures=PlanFailures.from_body(values),
                memory=PlanMemoryRecord.from_body(values.get("memory")),
                failed_start=(int(run), int(start)),
                lost_in=(int(lost_run), int(change)),
            )
        except (
            *(TypeError, ValueError, IndexError, KeyError),
            *(ExecutionPlanError, SupportedOptionsError),
        ):
            return cls()


def failed_on(report: Report, job: Job) -> Allocation | None:
    """Return the allocation in which a start of a job has failed; None: it is not known.

    Args:
        report: of the failed start.
        job: as last read; its companions may have ended since, or not yet.
    """
    gpus = report.gpus if report.failed_gpus is None else report.failed_gpus
    for held in (job.allocation, job.base_allocation):
        if held is not None and held.gpus == gpus:
            return held
    return None


def _shape_of(held: Allocation) -> AllocationShape:
    """Return GPU type, GPUs and nodes of an allocation."""
    return held.gpu_type, held.gpus, len(held.nodes)
