"""Record of one job in the ledger."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.controller.companions.placed_companions import PlacedCompanions
from slurm_elastic.controller.state.attempt_progress import AttemptProgress
from slurm_elastic.controller.state.job_ending import JobEnding
from slurm_elastic.controller.state.rehearsal_record import RehearsalRecord
from slurm_elastic.controller.state.reported.measurement import from_ledger
from slurm_elastic.controller.state.reported.observations import Observations
from slurm_elastic.controller.state.time_limits import TimeBudget
from slurm_elastic.controller.state.transition import Transition
from slurm_elastic.controller.state.trials.plan_trials import PlanTrials
from slurm_elastic.controller.state.trials.shape_trials import ShapeTrials
from slurm_elastic.core.application import Learned
from slurm_elastic.core.cluster import Job, JobState
from slurm_elastic.core.execution.execution_plan import ExecutionPlan, ExecutionPlanError
from slurm_elastic.core.plan import JobRecord, Measurement
from slurm_elastic.core.reason import Reason
from slurm_elastic.slurm.readers.kept_submissions import KeptSubmission


@dataclass(slots=True)
class StoredJob:
    """Record of one job in the ledger; see `JobRecord` for most fields.

    Attributes:
        recorded: its submission, as AdminComment had it; None: AdminComment never had one.
        pin: node list that the job was last given; None: not known.
        pins: earlier node lists, the latest last: a restarted slurmctld may have one of them again.
        override: directive that a user has put in place of the submitted one; "": none.
        layout: layout or execution plan that a user has ordered (`slurm_elastic.core.execution`);
            "": its own choice.
        broken: run whose lease its owner broke; it is not made to wait again.
        budget: of run time, where the time limit may be extended.
        spare: (run, seconds) that the attempt's time limit was rounded down by.
        nice: (value, epoch s, times) that the nice value was given back after a change; None: Slurm
            has saved it.
        gradient_bytes: as in `JobRecord`, with `frozen` layers from the front left out.
        counted: id of the last transition whose outcome is part of this record.
        observations: step times and noise that models are fitted to.
        watch: progress of its attempts.
        rehearsal: whether its script was seen to resume, and earlier rehearsals.
        trials: shapes in which it worked, and failed.
        plan_trials: execution plans that were tried, where the controller chooses them.
        jump: as in `JobRecord`.
        placed: its companions, and how changes in place went.
        reported: whether any report of the job has arrived.
        reported_run: newest run of which one has arrived; -1: none.
        ending: how it ended; None: it was not seen to end.
    """

    job_id: int
    measurements: dict[str, Measurement] = field(default_factory=dict)
    proven: bool = False
    checkpoint_s: float | None = None
    restart_s: float | None = None
    progress: float | None = None
    last_change: float | None = None
    changes: list[float] = field(default_factory=list)
    resizes: int = 0
    held: bool = False
    deaf_until: float | None = None
    override: str = ""
    layout: str = ""
    leased: bool = False
    pin: list[str] | None = None
    pins: list[list[str]] = field(default_factory=list)
    broken: int = -1
    spare: tuple[int, int] = (-1, 0)
    budget: TimeBudget | None = None
    nice: tuple[int, float, int] | None = None
    counted: int = 0
    seen_run: int = -1
    gradient_bytes: float | None = None
    frozen: int = 0
    observations: Observations = field(default_factory=Observations)
    watch: AttemptProgress = field(default_factory=AttemptProgress)
    rehearsal: RehearsalRecord = field(default_factory=RehearsalRecord)
    trials: ShapeTrials = field(default_factory=ShapeTrials)
    plan_trials: PlanTrials = field(default_factory=PlanTrials)
    jump: str = ""
    placed: PlacedCompanions = field(default_factory=PlacedCompanions)
    reported: bool = False
    reported_run: int = -1
    ending: JobEnding | None = None
    recorded: KeptSubmission | None = None
    dirty: bool = True

    def clear_failures(self) -> None:
        """Allow again what failed: the owner has changed or released the job."""
        self.trials.clear()
        self.placed.clear()

    def to_body(self) -> dict[str, Any]:
        """Return JSON for the ledger."""
        body = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del body["dirty"], body["observations"]
        rows = {key: dataclasses.asdict(row) for key, row in self.measurements.items()}
        body["measurements"] = rows
        body["budget"] = dataclasses.asdict(self.budget) if self.budget else None
        body["recorded"] = self.recorded.to_body() if self.recorded else None
        body["ending"] = dataclasses.asdict(self.ending) if self.ending else None
        body["lesson"] = self.observations.to_body()  # the key in every ledger since 0.1.0
        body["watch"], body["trials"] = self.watch.to_body(), self.trials.to_body()
        body["rehearsal"], body["placed"] = self.rehearsal.to_body(), self.placed.to_body()
        body["plan_trials"] = self.plan_trials.to_body()
        return body

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> StoredJob:
        """Return it from the ledger's JSON; unknown fields are ignored."""
        names = {f.name for f in dataclasses.fields(cls)}
        entry = cls(**{k: v for k, v in body.items() if k in names})
        entry.measurements = from_ledger(body["measurements"])
        entry.budget = TimeBudget.from_body(body.get("budget"))
        entry.observations = Observations.from_body(body.get("lesson"))
        entry.watch = AttemptProgress.from_body(body.get("watch"))
        entry.rehearsal = RehearsalRecord.from_body(body.get("rehearsal"))
        entry.trials = ShapeTrials.from_body(body.get("trials"))
        entry.plan_trials = PlanTrials.from_body(body.get("plan_trials"))
        entry.placed = PlacedCompanions.from_body(body.get("placed"))
        entry.ending = JobEnding.from_body(body.get("ending"))
        entry.recorded = KeptSubmission.from_body(body.get("recorded"))
        try:
            entry.layout = str(ExecutionPlan.parse(entry.layout)) if entry.layout else ""
        except (ExecutionPlanError, AttributeError, TypeError):
            entry.layout = ""
        entry.dirty = False
        return entry


def job_record(
    entry: StoredJob,
    job: Job,
    transition: Transition | None,
    *,
    measurements: tuple[Measurement, ...],
    gradient_bytes: float | None,
    learned: Learned | None,
    reporting: bool,
    may_regroup: bool,
    not_in_place: Reason | None,
    may_restart: bool,
) -> JobRecord:
    """Return the record of a job for a round.

    Args:
        entry: of the job.
        job: as Slurm shows it.
        transition: under way; None: none is.
        measurements: its own, or those of its application.
        gradient_bytes: likewise.
        learned: data for its models.
        reporting: whether its present attempt has reported lately.
        may_regroup: whether it runs and the site allows changes in place.
        not_in_place: why it cannot be changed in place, if `may_regroup`.
        may_restart: whether its ranks can be started again on other companions.
    """
    return JobRecord(
        job_id=job.job_id,
        measurements=measurements,
        proven=entry.proven,
        unproven=None if entry.proven else entry.rehearsal.why,
        jump=entry.jump,
        reporting=reporting,
        checkpoint_s=entry.checkpoint_s,
        restart_s=entry.restart_s,
        progress=entry.progress,
        last_change=entry.last_change,
        changes=tuple(entry.changes),
        held=entry.held,
        deaf_until=entry.deaf_until,
        in_transition=transition is not None,
        target=transition.target if transition else None,
        leased=entry.leased,
        resizes=entry.resizes,
        resizes_in_place=entry.placed.changes,
        in_place=may_regroup and not_in_place is None,
        not_in_place=not_in_place,
        pause_s=entry.placed.pause_s,
        restarts=may_restart,
        ranks_restart_s=entry.placed.restart_s,
        stopped=entry.watch.why,
        learned=learned,
        gradient_bytes=gradient_bytes,
        extended_s=entry.budget.extended_of(job.time_limit_s) if entry.budget else 0,
        on_trial=entry.trials.since if _is_current(entry, job) and entry.trials.on else None,
        failed=entry.trials.failure if _is_current(entry, job) else None,
        barred=entry.trials.shapes.left_out,
        half_barred=entry.trials.shapes.half_barred,
        ordered_plan=entry.plan_trials.ordered,
        plan_speeds=entry.plan_trials.speeds.measured(),
        oversized_plans=entry.plan_trials.memory.oversized(),
    )


def _is_current(entry: StoredJob, job: Job) -> bool:
    """Return whether the trials of a record are about the attempt that runs."""
    return job.state is JobState.RUNNING and entry.trials.run == job.run
