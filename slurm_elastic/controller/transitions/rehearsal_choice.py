"""Choice of the jobs that are rehearsed now. Pure.

An unproven script is requeued once, in its present allocation, soon after a checkpoint: little is
at stake then. Rehearsals count as resizes, and only so many are under way at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.state.rehearsal_record import RehearsalRecord
from slurm_elastic.core.cluster import Job, JobState, Snapshot
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.limit_rivals import limit_rivals, rival_reason
from slurm_elastic.core.plan import Action, Decision, JobRecord
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report
from slurm_elastic.placement.eligibility import time_limit_near

#: A job has this long to save and to keep its checkpoint, at least: copies take minutes.
NOTICE_S = 600.0
#: Seconds since the report of a complete checkpoint in which a rehearsal may begin; esrun accepts
#: one that was shown to be complete 120 s ago.
_FRESH_S = 45.0
#: At most one in so many of the transitions under way is a rehearsal (our choice).
_PART = 4
_HOUR_S = 3600.0


def due(
    snapshot: Snapshot,
    *,
    records: Mapping[int, JobRecord],
    rehearsals: Mapping[int, RehearsalRecord],
    reports: Mapping[int, Report],
    config: Config,
    live: Collection[Action],
    busy: Collection[int],
    spent: Mapping[str, Sequence[float]],
) -> list[Decision]:
    """Return the rehearsals to begin, those of the jobs that wait longest first.

    Args:
        snapshot: read just now.
        records: of its jobs.
        rehearsals: of those that have reported.
        reports: newest of each job.
        config: the site's.
        live: action of each transition under way.
        busy: jobs that are changed already.
        spent: by user, when jobs were resized in the last hour.
    """
    most = max(1, config.resize.max_in_flight // _PART) - sum(a is Action.REHEARSE for a in live)
    room = min(most, config.resize.max_in_flight - len(live))
    limits, decisions = config.limits, list[Decision]()
    used = {user: len(times) for user, times in spent.items()}
    rivals = limit_rivals(snapshot)
    waiting = sorted(snapshot.jobs, key=lambda job: job.start_time or 0.0)
    for job in waiting:
        if len(decisions) >= room or sum(used.values()) >= limits.resizes:
            break
        rehearsal, report = rehearsals.get(job.job_id), reports.get(job.job_id)
        if rehearsal is None or report is None or job.job_id in busy:
            continue
        record = records.get(job.job_id) or JobRecord(job_id=job.job_id)
        if (
            used.get(job.user, 0) < limits.resizes_per_user
            and rehearsal.may_begin(snapshot.time)
            and snapshot.time - rehearsal.saved <= _FRESH_S
            and _has_saved(job, report)
            and _permitted(job, record, config, snapshot.time)
            and not rival_reason(job, rivals)
        ):
            used[job.user] = used.get(job.user, 0) + 1
            decisions.append(
                Decision(
                    job_id=job.job_id,
                    current=job.allocation,
                    target=job.allocation,
                    action=Action.REHEARSE,
                    reason=Reason("resume-rehearsal"),
                )
            )
    return decisions


def _has_saved(job: Job, report: Report) -> bool:
    """Return whether a script has completed a checkpoint in its present attempt."""
    return (
        report.run == job.run
        and report.kind == "script"
        and report.phase == "training"
        and not report.proven
        and report.checkpoint_age_s is not None
    )


def _may_get_half(directive: Directive, config: Config) -> bool:
    """Return whether a job of one size may be resized all the same: to half of its GPU."""
    return (
        directive.share == "yes"
        and directive.min_gpus == 1
        and config.neighbours.share_gpus == "act"
    )


def _permitted(job: Job, record: JobRecord, config: Config, now: float) -> bool:
    """Return whether a round could resize this job, were it proven."""
    directive, partitions = job.directive, config.controller.partitions
    recent = [t for t in record.changes if t > now - _HOUR_S]
    return (
        directive is not None
        and (directive.min_gpus < directive.max_gpus or _may_get_half(directive, config))
        and job.elastic
        and job.managed
        and job.state is JobState.RUNNING
        and job.allocation is not None
        and job.requeueable
        and (not partitions or job.partition in partitions)
        and not record.held
        and not record.proven
        and record.reporting
        and not record.in_transition
        and len(recent) < config.resize.per_hour
        and time_limit_near(job, record, config, now) is None
    )
