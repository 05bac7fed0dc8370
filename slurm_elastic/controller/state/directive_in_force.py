"""The directive of a job that is in force, and what of it the job may get now. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from slurm_elastic.controller.state.stored_job import StoredJob
from slurm_elastic.core.cluster import Job
from slurm_elastic.core.directive import Directive


def directive_in_force(entry: StoredJob, job: Job) -> Directive | None:
    """Return the directive that the owner wants now: the last `selastic update`, else as submitted.

    Args:
        entry: record of the job.
        job: as Slurm shows it; its `override` may be an earlier one.

    Returns:
        None: the job is rigid.
    """
    if entry.override:
        return Directive.parse(entry.override)
    return job.submission.directive if job.submission else None


def allowed_directive(entry: StoredJob, job: Job, types: Iterable[str]) -> Directive | None:
    """Return the directive in force without the shapes that are barred after failed changes.

    Args:
        entry: record of the job.
        job: as of `directive_in_force`.
        types: GPU types of the cluster.

    Returns:
        The very directive in force where nothing is barred. None: the job is rigid.
    """
    directive = directive_in_force(entry, job)
    if directive is None or job.submission is None:
        return directive
    return entry.trials.restricted(directive, types)


def with_directive(job: Job, directive: Directive | None) -> Job:
    """Return a job whose `directive` is this one, the same job if it has it already.

    Args:
        job: elastic, as Slurm shows it or with an earlier override.
        directive: of one of the functions above.
    """
    submitted = job.submission.directive if job.submission else None
    override = None if directive is submitted else directive
    return job if override == job.override else dataclasses.replace(job, override=override)
