"""Recording of a report in the record of its job."""

from __future__ import annotations

import contextlib

from slurm_elastic.controller.state import attempt_progress
from slurm_elastic.controller.state.ledger import Ledger, LedgerError
from slurm_elastic.controller.state.reported import exchange_times, freezing_reports
from slurm_elastic.controller.state.reported.layer_profiles import LayerProfileStore
from slurm_elastic.controller.state.reported.measurement import key_of, measured, staged
from slurm_elastic.controller.state.reported.observation_store import ObservationStore
from slurm_elastic.controller.state.stored_job import StoredJob
from slurm_elastic.controller.state.trials.barred_shapes import shape_of
from slurm_elastic.controller.state.trials.plan_trials import failed_on
from slurm_elastic.controller.state.trials.shape_trials import program_failure
from slurm_elastic.core.cluster import Allocation, Job, JobState
from slurm_elastic.core.report import LEAST_STEPS, Report
from slurm_elastic.topology import Topology


class ReportRecording:
    """Recording of reports, as far as they can be true.

    Args:
        ledger: gets the record at the first report of an attempt.
        learning: data that jobs of one application share.
        profiles: layer profiles of applications.
    """

    def __init__(
        self, ledger: Ledger, learning: ObservationStore, profiles: LayerProfileStore
    ) -> None:
        self._ledger, self._learning, self._profiles = ledger, learning, profiles

    def record(
        self,
        entry: StoredJob,
        report: Report,
        job: Job,
        *,
        last: Report | None,
        now: float,
        as_allowed: Job,
        lost_node: bool,
        topology: Topology | None,
        shared: bool,
    ) -> bool:
        """Record a report.

        Args:
            entry: record of its job, which is changed.
            report: the report.
            job: the job that has reported.
            last: the report before it; None: not since the start.
            now: epoch s.
            as_allowed: the job with its allowed directive.
            lost_node: whether a node of the job was down in the last snapshot.
            topology: of the cluster; None: not known yet.
            shared: whether its times may be those of half a GPU beside another job: no model of
                whole GPUs may learn from them.

        Returns:
            Whether data of a decision has changed.
        """
        old_state = (entry.proven, entry.jump, len(entry.measurements), last is None)
        entry.reported = True
        if report.run > entry.reported_run:
            self._record_first_report(entry, report, job)
        entry.proven = report.proven or (entry.proven and not _is_of_another_script(report, last))
        rehearsed = entry.rehearsal.record(report, now=now)
        if report.kind == "script":
            entry.jump = report.jump
        entry.progress = report.progress if report.progress is not None else entry.progress
        entry.checkpoint_s = report.checkpoint_s or entry.checkpoint_s
        held = job.allocation
        if not (
            held
            and not shared
            and job.run == report.run
            and held.gpus == report.gpus
            and report.steps_measured >= LEAST_STEPS
        ):
            held = None
        self._record_plans(entry, report, job, as_allowed, held)
        self._profiles.add_report(report, job)
        profile = self._profiles.of(job, report.application) if report.frozen else None
        by_parts = exchange_times.separated(report)
        as_own, own_held = entry.plan_trials.as_own(by_parts, held)
        learned = self._learning.add_report(
            entry.observations, freezing_reports.thawed(as_own, profile), as_allowed, own_held
        )
        self._update_gradient_bytes(entry, report, job)
        attempt_progress.record_report(entry.watch, report, now=now)
        trial_ended = self._record_trial(entry, report, job, now, lost_node=lost_node)
        if held and report.step_time_s and report.global_batch:
            racks = _racks(held, topology)
            key = key_of(held, racks)
            rate = report.global_batch / report.step_time_s
            old = entry.measurements.get(key)
            measurement = measured(by_parts, held, rate, racks=racks, old=old)
            entry.measurements[key] = measurement
            self._learning.add_measurement(entry.observations, job, key, measurement)
        entry.dirty = True
        known = (entry.proven, entry.jump, len(entry.measurements), False)
        return rehearsed or trial_ended or learned or old_state != known

    def _record_first_report(self, entry: StoredJob, report: Report, job: Job) -> None:
        """Record at once that an attempt has reported: a later controller has to know it."""
        entry.reported_run = report.run
        with contextlib.suppress(LedgerError):  # the next round writes it
            self._ledger.put_job(job.key, job.job_id, entry.to_body())

    def _record_plans(
        self, entry: StoredJob, report: Report, job: Job, as_allowed: Job, held: Allocation | None
    ) -> None:
        """Record the speed of a job's plan, for it and for its application's next jobs."""
        directive, trials = as_allowed.directive, entry.plan_trials
        chosen = directive is not None and directive.plan == "auto"
        shared = self._learning.shared(job, entry.observations) if chosen else None
        if shared is not None:
            trials.begin_with(shared.plans)
        if trials.record(report, held):
            self._learning.add_plans(entry.observations, job, trials.results())

    def _record_trial(
        self, entry: StoredJob, report: Report, job: Job, now: float, *, lost_node: bool
    ) -> bool:
        """Record a report's part in a trial; return whether that has ended, or failed."""
        trials = entry.trials
        if job.run == report.run and job.state is JobState.RUNNING and job.allocation:
            trials.follow(job.run, job.allocation, now=now)
            trials.regroup(report, job.allocation, now=now)
        ended = trials.record(report, now=now)
        shape, is_alone = shape_of(trials.held), job.allocation == job.base_allocation
        if ended and shape and is_alone:
            entry.placed.record_alone(shape, worked=True)
        failure = program_failure(report, trials)
        if report.run != trials.run or failure is None or lost_node:
            return ended
        own, lacked_memory = job.base_allocation, entry.plan_trials.has_answered(report)
        if lacked_memory and report.failed_gpus is not None and trials.held != own:
            trials.lose_companions(own, failure, now=now)
            return ended
        # On half of a GPU the other job may have been the cause, whatever the plan.
        may_be_plan = not trials.on_half or entry.plan_trials.has_answered(report)
        if may_be_plan and entry.plan_trials.fail(report, failed_on(report, job), now):
            self._learning.add_plans(entry.observations, job, entry.plan_trials.results())
            return ended
        # Elsewhere the same number of GPUs may do: see `PlacedCompanions.fail_program`.
        in_companions = report.failed_in_companions and not report.out_of_memory
        if report.failed_gpus is not None and own is not None:
            shape = (own.gpu_type, report.failed_gpus)
            failed = trials.fail_in_place(report, own, failure, now=now, bars=not in_companions)
        else:
            failed = trials.failure is None
            trials.fail(failure, now=now, bars=not in_companions)
        if failed and shape and in_companions:
            entry.placed.fail_program(shape, failure, now=now)
        elif failed and shape and is_alone:
            entry.placed.record_alone(shape, worked=False)
        return ended or failed

    def _update_gradient_bytes(self, entry: StoredJob, report: Report, job: Job) -> None:
        """Update the bytes that its ranks reduce, which change with a profile and with freezing."""
        if staged(report):
            entry.gradient_bytes = None  # replicas of a stage reduce it, its neighbours wait
            return
        frozen = entry.frozen if report.frozen is None else report.frozen
        if report.profile or frozen != entry.frozen or entry.gradient_bytes is None:
            profile = self._profiles.of(job, entry.observations.stated)
            entry.frozen = frozen
            entry.gradient_bytes = profile.gradient_bytes(frozen) if profile else None


def _racks(held: Allocation, topology: Topology | None) -> int:
    """Return the number of racks of an allocation, as far as they are known."""
    if topology is None or not all(topology.has(n) for n in held.nodes):
        return 1
    return max(1, topology.spread(held)[1])


def _is_of_another_script(report: Report, last: Report | None) -> bool:
    """Return whether a report is of another script of the job than the one that was proven.

    A batch script may start several, one after the other; each shows itself that it resumes.
    """
    if report.kind != "script" or report.proven:
        return False
    was_proven = last is not None and last.run == report.run and last.proven
    return was_proven or bool(report.rehearsal)
