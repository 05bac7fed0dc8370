"""Records of jobs: from their reports, from users' orders, from past transitions.

A record follows its job across requeues and restarts of the daemon; it is kept
in the ledger under a key that tells reused job ids apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.companions.in_place_permission import InPlacePermission
from slurm_elastic.controller.state.allocation_segments import AllocationSegments
from slurm_elastic.controller.state.directive_in_force import (
    allowed_directive,
    directive_in_force,
    with_directive,
)
from slurm_elastic.controller.state.ended_jobs import EndedJobs
from slurm_elastic.controller.state.ledger import Ledger, LedgerError
from slurm_elastic.controller.state.rehearsal_record import RehearsalRecord
from slurm_elastic.controller.state.report_recording import ReportRecording
from slurm_elastic.controller.state.reported import freezing_reports
from slurm_elastic.controller.state.reported.layer_profiles import LayerProfileStore, StoredProfile
from slurm_elastic.controller.state.reported.observation_store import ObservationStore
from slurm_elastic.controller.state.reported.observations import Observations
from slurm_elastic.controller.state.resize_rate import ResizeRate
from slurm_elastic.controller.state.stored_job import StoredJob, job_record
from slurm_elastic.controller.state.transition import Transition, TransitionState
from slurm_elastic.controller.state.transition_outcome import record_outcome
from slurm_elastic.controller.state.trials.shape_trials import ShapeTrials
from slurm_elastic.core.application import Learned
from slurm_elastic.core.cluster import Job, JobState, Snapshot
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.gpu_parts import partners
from slurm_elastic.core.plan import JobRecord
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report
from slurm_elastic.slurm.readers.kept_submissions import KeptSubmission
from slurm_elastic.topology import Topology

#: A job without a report for this many seconds is not changed.
_SILENT_S = 180.0
#: Words in the state of a node on which no program can run.
_DOWN = ("DOWN", "NOT_RESPONDING", "FAIL")
#: The ledger's oldest rows are looked for this often, and while there are any.
_FORGET_S, _FORGET_MORE_S = 600.0, 30.0


class JobStore:
    """Records of all jobs that Slurm knows. Thread-safe.

    Args:
        ledger: where records and allocation segments are kept.
        config: for `learning`.

    Attributes:
        learning: data that jobs of one application share.
        ended: how jobs ended.
        kept_since: epoch s from which on the ledger is complete.
    """

    def __init__(self, ledger: Ledger, config: Config | None = None) -> None:
        self._ledger = ledger
        self.learning = ObservationStore(ledger, config)
        self._profiles = LayerProfileStore(ledger)
        self._recording = ReportRecording(ledger, self.learning, self._profiles)
        self._attached = freezing_reports.FreezingReports()
        self._lock = threading.RLock()
        self._topology: Topology | None = None
        self._types: tuple[str, ...] = ()
        self._down: frozenset[str] = frozenset()
        #: When each job that shared a GPU was first seen without the other one, by key (epoch s);
        #: infinity: it shares it now.
        self._shared_until: dict[str, float] = {}
        self._entries: dict[str, StoredJob] = {}
        self._reports: dict[int, tuple[float, Report]] = {}
        self.kept_since = ledger.since()
        self._forget_at = 0.0
        self._resized = ResizeRate(ledger)
        self.ended = EndedJobs(ledger)
        self._segments = AllocationSegments(ledger)

    def entry(self, job: Job) -> StoredJob:
        """Return the record of a job, from the ledger or fresh."""
        with self._lock:
            if job.key not in self._entries:
                # The place of a job that runs or has run may come from a ledger that is lost.
                never_ran = job.run == 0 and job.state is not JobState.RUNNING
                entry = StoredJob(job.job_id, pin=[] if never_ran else None)
                self._entries[job.key] = self._stored(job) or entry
                self._catch_up(job)
            return self._entries[job.key]

    def _catch_up(self, job: Job) -> None:
        """Count transitions that ended shortly before the daemon died."""
        with contextlib.suppress(LedgerError):
            for row in self._ledger.ended_transitions(job.job_id, job.key):
                with contextlib.suppress(ValueError):
                    transition = Transition.from_body(row)
                    if transition.state is TransitionState.DONE or transition.given_up:
                        self.record_end_of_change(transition, job, row["updated"])

    def _stored(self, job: Job) -> StoredJob | None:
        try:
            body = self._ledger.get_job(job.key)
            return StoredJob.from_body(body) if body else None
        except (LedgerError, KeyError, TypeError, ValueError, AttributeError):
            return None

    def record_report(self, report: Report, job: Job, now: float) -> bool:
        """Record the plausible parts of a report.

        Returns:
            Whether data of a decision has changed.
        """
        with self._lock:
            last = self._reports.get(report.job_id)
            if last and last[1].run > report.run:
                if report.run != job.run:
                    return False  # of an attempt that is over
                last = None  # of another job with this id, or slurmctld has forgotten attempts
            self._reports[report.job_id] = (now, report)
            return self._recording.record(
                self.entry(job),
                report,
                job,
                last=last[1] if last else None,
                now=now,
                as_allowed=self.with_allowed_directive(job),
                lost_node=self.lost_node(job),
                topology=self._topology,
                shared=self._shared_since(job, last, report.run),
            )

    def _shared_since(self, job: Job, last: tuple[float, Report] | None, run: int) -> bool:
        """Return whether a job may have shared its GPU at any time since its last report."""
        if job.allocation is None or not job.allocation.half:
            return False
        if last is None or last[1].run != run:
            return True  # since its start; whether it was alone all the time is not known
        return self._shared_until.get(job.key, -math.inf) >= last[0]

    def last_report(self, job_id: int) -> Report | None:
        """Return the newest report of a job."""
        with self._lock:
            last = self._reports.get(job_id)
        return last[1] if last else None

    def failed_by_plan(self, job: Job, report: Report) -> bool:
        """Return whether this start failed in a plan that was new to it: it is repeated without."""
        return self.entry(job).plan_trials.failed_start == (report.run, report.failed_start)

    def lost_node(self, job: Job) -> bool:
        """Return whether a node of a job was down in the last snapshot: its program fails then."""
        held = job.allocation
        return held is not None and not self._down.isdisjoint(held.nodes)

    def reported(self, job_id: int) -> float | None:
        """Return when (epoch s) the newest report of a job came; None: not since the start."""
        with self._lock:
            last = self._reports.get(job_id)
        return last[0] if last else None

    def last_reports(self, snapshot: Snapshot) -> dict[int, Report]:
        """Return the newest report of each job of a snapshot."""
        ids = [j.job_id for j in snapshot.jobs]
        return {i: r for i in ids if (r := self.last_report(i)) is not None}

    def rehearsals(self, snapshot: Snapshot) -> dict[int, RehearsalRecord]:
        """Return the rehearsal of each running elastic job."""
        with self._lock:
            running = [j for j in snapshot.jobs if j.elastic and j.state is JobState.RUNNING]
            return {j.job_id: self.entry(j).rehearsal for j in running}

    def with_directive_in_force(self, job: Job) -> Job:
        """Return a job with the directive in force as `job.directive`, barred shapes included."""
        return with_directive(job, directive_in_force(self.entry(job), job))

    def with_allowed_directive(self, job: Job) -> Job:
        """Return a job with its allowed directive as `job.directive`."""
        return with_directive(job, self.allowed_directive(job))

    def all_with_allowed_directives(self, jobs: Mapping[int, Job]) -> dict[int, Job]:
        """Return jobs as Slurm shows them, by id, each elastic one with its allowed directive."""
        return {
            i: self.with_allowed_directive(j) if j.elastic and j.state is not JobState.ENDED else j
            for i, j in jobs.items()
        }

    def allowed_directive(self, job: Job) -> Directive | None:
        """Return the directive in force without barred shapes, also when it has just changed."""
        return allowed_directive(self.entry(job), job, self._types)

    def profile(self, job: Job) -> StoredProfile | None:
        """Return the newest layer profile of a job's application."""
        with self._lock:
            return self._profiles.of(job, self.entry(job).observations.stated)

    def freezable(self, job: Job, report: Report) -> Learned | None:
        """Return the learned data of the last round with the layers of this report, or None."""
        with self._lock:
            learned = self._attached.of(job.key)
            prefixes = freezing_reports.of(report, self.allowed_directive(job), self.profile(job))
            if learned is None or prefixes is None:
                return None
            return dataclasses.replace(learned, prefixes=prefixes)

    def record_end_of_change(self, transition: Transition, job: Job | None, now: float) -> None:
        """Record the end of a transition: start the interval, count it if it moved its job."""
        if job is None:
            return
        with self._lock:
            if record_outcome(self.entry(job), transition, job, now):
                self._resized.add(transition, now)

    def companions(self, job: Job) -> frozenset[int]:
        """Return the ids of the companions that belong to a job's present attempt."""
        with self._lock:
            return self.entry(job).placed.of(job.run)

    def adopt_companion(self, job: Job, job_id: int) -> None:
        """Add a companion to a job, whose esrun reports that ranks of the job run there."""
        with self._lock:
            self.entry(job).placed.switch(job.run, joined=[job_id], left=())
            self.touch(job)

    def lose_companion(self, job: Job, job_id: int, reason: Reason | None) -> bool:
        """Remove a companion that has ended; return whether its change has failed by that.

        Args:
            job: its base.
            job_id: the companion.
            reason: why the job is not changed in place for some time, if the change is still
                on trial; None: others have ended it.
        """
        with self._lock:
            entry = self.entry(job)
            entry.placed.switch(job.run, joined=(), left=[job_id])
            entry.dirty = True
            if not entry.trials.judge_loss(reason) or reason is None:
                return False
            entry.placed.fail(reason, now=time.time())
            return True

    def in_place(self, job: Job) -> InPlacePermission:
        """Return the conditions of changes of a job in place."""
        return InPlacePermission(
            job=job,
            directive=self.allowed_directive(job),
            report=self.last_report(job.job_id),
            placed=self.entry(job).placed,
            site_allows=self.learning.config.resize.in_place == "auto",
        )

    def trial_outcome(self, transition: Transition) -> str | Reason:
        """Return the outcome of a transition that was carried out; see `ShapeTrials.outcome`."""
        with self._lock:
            entry = self._entries.get(transition.key)
        if entry is None:
            body = self._ledger.get_job(transition.key) or {}
            return ShapeTrials.from_body(body.get("trials")).outcome(transition.id)
        return entry.trials.outcome(transition.id)

    def resized(self, now: float, live: Iterable[Transition]) -> dict[str, list[float]]:
        """Return times of resizes in the last hour (epoch s), by user; those under way too."""
        with self._lock:
            return self._resized.by_user(now, live)

    def spare_s(self, job: Job) -> int:
        """Return the seconds by which the time limit of the attempt was rounded down."""
        run, seconds = self.entry(job).spare
        return seconds if run == job.run else 0

    def command(self, job: Job, **values: Any) -> None:
        """Keep values that the controller set (leased, broken) or measured."""
        with self._lock:
            entry = self.entry(job)
            for name, value in values.items():
                setattr(entry, name, value)
            entry.dirty = True
            self._ledger.put_job(job.key, job.job_id, entry.to_body())
            entry.dirty = False

    def order(self, job: Job, **values: Any) -> None:
        """Keep an order of a user.

        Raises:
            LedgerError: it could not be written, and does not count.
        """
        with self._lock:
            entry = self.entry(job)
            self._ledger.put_job(job.key, job.job_id, {**entry.to_body(), **values})
            for name, value in values.items():
                setattr(entry, name, value)

    def touch(self, job: Job) -> None:
        """Mark a record as changed: it is written with the next round."""
        with self._lock:
            self.entry(job).dirty = True

    def let_go(self, job: Job) -> bool:
        """Release a job that the crash-loop guard holds; return whether it holds it."""
        with self._lock:
            watch = self.entry(job).watch
            watch.freed = bool(watch.why)
            return watch.freed

    def import_observations(self, job: Job, observations: Observations) -> None:
        """Keep the observations that an owner imports for a job's application."""
        with self._lock:
            self.learning.adopt(job, observations)

    def observe(self, snapshot: Snapshot) -> None:
        """Follow a snapshot: attempts that begin or end, jobs that are gone.

        Raises:
            LedgerError: segments could not be written; other data is kept.
        """
        with self._lock:
            self._topology = Topology.of(snapshot)
            self._types = tuple(sorted({n.gpu_type for n in snapshot.nodes if n.gpus}))
            down = (n.name for n in snapshot.nodes if any(word in n.state for word in _DOWN))
            self._down = frozenset(down)
            alive = {j.key: j for j in snapshot.jobs if j.state is not JobState.ENDED}
            self._note_partners(snapshot, alive)
            for job in alive.values():
                if job.elastic:
                    self._record_submission(job)
                if job.elastic and job.state is JobState.RUNNING:
                    entry = self.entry(job)
                    entry.dirty |= entry.trials.shapes.lapse(snapshot.time)
                    if entry.trials.run != job.run:
                        entry.trials.follow(job.run, job.allocation, now=snapshot.time)
                        entry.dirty = True
                    if entry.seen_run != job.run:
                        entry.seen_run, entry.dirty = job.run, True
                        entry.last_change = job.start_time
            self.ended.observe(
                snapshot, alive, lambda job: self._entries.get(job.key) or self._stored(job)
            )
            self._entries = {k: e for k, e in self._entries.items() if k in alive}
            self._attached.forget(set(alive))
            ids = {j.job_id for j in alive.values()}
            self._reports = {k: r for k, r in self._reports.items() if k in ids}
            self._segments.observe(snapshot, alive)
            changed = {k: e for k, e in self._entries.items() if e.dirty}
            self._ledger.put_jobs((k, e.job_id, e.to_body()) for k, e in changed.items())
            for entry in changed.values():
                entry.dirty = False
            self.learning.save(alive.values())
            self._profiles.save(alive.values())
            if time.monotonic() >= self._forget_at:
                self._forget(snapshot.time, alive)

    def _record_submission(self, job: Job) -> None:
        """Keep the submission of each attempt, in case AdminComment is replaced."""
        entry = self.entry(job)
        if entry.ending is not None:  # it was requeued, or was only not shown
            entry.ending, entry.dirty = None, True
        last = entry.recorded
        now = (job.run, job.submit_time, job.name)
        if last is None or (last.run, last.submit_time, last.name) != now:
            entry.recorded = KeptSubmission.of(job)
            entry.dirty |= entry.recorded != last

    def kept_submissions(self) -> dict[int, KeptSubmission]:
        """Return the submissions of the ledger by job id, the newest of each.

        Not of jobs that had ended, or that Slurm had forgotten: another job may have the id now.

        Raises:
            LedgerError: the ledger cannot be read.
        """
        submissions: dict[int, KeptSubmission] = {}
        for job_id, body, ended_run in self._ledger.submissions():
            kept = KeptSubmission.from_body(body)
            if kept is not None and ended_run is not None and ended_run >= kept.run:
                submissions.pop(job_id, None)
            elif kept is not None:
                submissions[job_id] = kept
        return submissions

    def _note_partners(self, snapshot: Snapshot, alive: Mapping[str, Job]) -> None:
        """Note which jobs share a GPU now, and which no longer do."""
        keys = [snapshot.job[i].key for i, others in partners(snapshot.jobs).items() if others]
        over = {k: min(at, snapshot.time) for k, at in self._shared_until.items() if k in alive}
        self._shared_until = {**over, **dict.fromkeys(keys, math.inf)}

    def _forget(self, now: float, alive: Mapping[str, Job]) -> None:
        """Delete old rows of the ledger."""
        settings = self.learning.config.controller
        deleted = self._ledger.forget(
            now, keep_days=settings.keep_days, keep_mb=settings.keep_mb, alive=alive.keys()
        )
        self.kept_since = self._ledger.since()
        self._forget_at = time.monotonic() + (_FORGET_MORE_S if deleted else _FORGET_S)

    def records(self, snapshot: Snapshot, live: Mapping[int, Transition]) -> dict[int, JobRecord]:
        """Return the record of each elastic job, for a round."""
        types = tuple(sorted({n.gpu_type for n in snapshot.nodes if n.gpus}))
        with self._lock:
            return {
                j.job_id: self._record(j, live.get(j.job_id), snapshot.time, types)
                for j in snapshot.jobs
                if j.elastic and j.state is not JobState.ENDED
            }

    def resizes(self) -> dict[int, int]:
        """Return the number of changes of each job in its life."""
        with self._lock:
            return {e.job_id: e.resizes for e in self._entries.values()}

    def _record(
        self, job: Job, transition: Transition | None, now: float, types: tuple[str, ...]
    ) -> JobRecord:
        entry = self.entry(job)
        reported_s, report = self._reports.get(job.job_id, (0.0, None))
        directive = self.allowed_directive(job)
        learned = self.learning.learned(
            job, entry.observations, directive=directive, cluster=types, now=now
        )
        plans = entry.plan_trials if directive and directive.plan == "auto" else None
        if plans and learned and (gains := plans.gains()):
            learned = dataclasses.replace(learned, plan_gains=gains)
        frozen = None
        if report is not None and report.certified:  # a new attempt keeps the frozen layers
            profile = self._profiles.of(job, entry.observations.stated)
            frozen = freezing_reports.of(report, directive, profile)
        shapes, gradient_bytes = entry.measurements, entry.gradient_bytes
        shared = None if entry.observations.batch else self.learning.shared(job, entry.observations)
        if shared:  # before its first report: measurements of the latest job of its name
            shapes = shapes or shared.shapes
            layers = self._profiles.of(job, shared.stated)
            gradient_bytes = layers.gradient_bytes(0) if layers else None
        in_place = self.in_place(job)
        may_regroup = in_place.is_considered
        return job_record(
            entry,
            job,
            transition,
            measurements=tuple(shapes.values()),
            gradient_bytes=gradient_bytes,
            learned=self._attached.put(job.key, learned, frozen),
            reporting=report is not None and report.run == job.run and now - reported_s < _SILENT_S,
            may_regroup=may_regroup,
            not_in_place=in_place.obstacle(now) if may_regroup else None,
            may_restart=may_regroup and in_place.may_restart(now),
        )
