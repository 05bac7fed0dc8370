"""Answer to `show`: all data of one job."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from slurm_elastic.controller.queries.durations_answer import length_row
from slurm_elastic.controller.queries.job_answers import JobRows, change, explain
from slurm_elastic.controller.queries.view import HistoryRow, Particulars, View, Viewer
from slurm_elastic.controller.state.job_ending import EndedJob
from slurm_elastic.controller.state.reported.layer_profiles import StoredProfile
from slurm_elastic.core.cluster import Job
from slurm_elastic.core.layers import Layer, chain
from slurm_elastic.core.report import Report
from slurm_elastic.models.pipedream.profile_reader import as_json
from slurm_elastic.rpc.decision_answers import RunningRow, ShowAnswer


def show(
    view: View,
    viewer: Viewer,
    job_id: int,
    history: Sequence[HistoryRow] = (),
    *,
    particulars: Particulars | None = None,
    layers: bool = False,
    ended: EndedJob | None = None,
) -> ShowAnswer:
    """Return all data of one job.

    Args:
        view: the controller's view.
        viewer: the caller.
        job_id: the job.
        history: rows of its changes, oldest first.
        particulars: what the view does not hold.
        layers: whether the layer profile itself is wanted.
        ended: record of the job if it has ended.

    Raises:
        NoAnswerError: the job is not in the snapshot.
    """
    explained = explain(view, viewer, job_id, history, ended)
    rows, report = JobRows(view, viewer), view.reports.get(job_id)
    job = view.snapshot.job.get(job_id) or (ended.job if ended else None)
    assert job is not None, "explain has refused a job that is not known"
    record = rows.record(job_id)
    more = particulars or Particulars()
    return {
        **explained,
        "account": job.account,
        "qos": job.qos,
        "directive": str(job.submission.directive) if job.submission else "",
        "override": _override(job),
        "run": job.run,
        "submit_time": job.submit_time,
        "start_time": job.start_time,
        "end_time": job.end_time,
        "step": report.step if report else None,
        "global_batch": report.global_batch if report else None,
        "checkpoint_step": report.checkpoint_step if report else None,
        "measurements": [dataclasses.asdict(m) for m in record.measurements],
        "history": [change(rows, h) for h in history if h.get("job_id") == job_id],
        "ordered_layout": more.layout,
        "ordered_batch": more.orders.batch,
        "ordered_frozen": more.orders.frozen,
        "running": _running(job, report),
        "profile_layers": len(more.profile.rows) if more.profile else None,
        "profile_batch": more.profile.batch if more.profile else None,
        "profile": layer_profile(more.profile) if more.profile and layers else None,
        "length": length_row(record.length),
    }


def _override(job: Job) -> str:
    """Return the directive that a user has put in place of the submitted one; "": none."""
    submitted = str(job.submission.directive) if job.submission else ""
    override = str(job.override) if job.override else ""
    return "" if override == submitted else override  # it may only leave out barred shapes


def layer_profile(profile: StoredProfile) -> dict[str, Any]:
    """Return a job's layers as `selastic partition` reads them: each reads the one before."""
    return as_json(chain(Layer(*row) for row in profile.rows)) | {"batch": profile.batch}


def _running(job: Job, report: Report | None) -> RunningRow | None:
    """Return how the present attempt runs, by its own reports."""
    if report is None or report.run != job.run or job.allocation is None:
        return None
    return {
        "layout": report.layout,
        "plan": report.plan,
        "micro_batches": report.micro_batches,
        "layers": report.layers,
        "frozen": report.frozen,
        "certified": report.certified,
        "penalty": report.penalty,
        "certified_penalty": report.certified_penalty,
        "data_s": report.data_s,
        "forward_s": report.forward_s,
        "backward_s": report.backward_s,
        "sync_s": report.sync_s,
        "optimizer_s": report.optimizer_s,
        "peak_memory_bytes": report.peak_memory_bytes,
    }
