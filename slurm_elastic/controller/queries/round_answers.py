"""Answers about rounds and time: the plan, past changes, GPU hours."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_elastic.controller.queries.job_answers import JobRows, change
from slurm_elastic.controller.queries.program_answer import program
from slurm_elastic.controller.queries.view import HistoryRow, SegmentRow, View, Viewer
from slurm_elastic.controller.sleep.sleep_record import ObservedSleep
from slurm_elastic.core.plan import Action, Decision
from slurm_elastic.rpc.decision_answers import HistoryAnswer, PlanAnswer, PlanRow
from slurm_elastic.rpc.usage_answers import RunUsage, SleepUsage, UsageAnswer, UsageRow, UserUsage


def plan(view: View, viewer: Viewer, *, with_program: bool = False) -> PlanAnswer:
    """Return the decisions of the last round, with its integer program on request.

    Raises:
        NoAnswerError: there is no such program for this viewer.
    """
    rows = JobRows(view, viewer)
    last_plan = view.plan
    shown = {j.job_id for j in viewer.jobs(view)}
    decisions = [d for d in last_plan.decisions if d.job_id in shown] if last_plan else []
    return {
        "time": view.snapshot.time,
        "planned": last_plan.time if last_plan else None,
        "mode": view.mode,
        "policy": view.policy,
        "changes": [_row(rows, d) for d in decisions if d.action is not Action.KEEP],
        "stays": [_row(rows, d) for d in decisions if d.action is Action.KEEP],
        "claims": [
            {
                "job_id": c.job_id,
                "display_id": rows.display(c.job_id),
                "gpus": dict(c.shares),
                "since": c.since,
                "until": c.until,
            }
            for c in (last_plan.claims if last_plan else ())
            if c.job_id in shown
        ],
        "notes": rows.notes(),
        "program": program(view, viewer) if with_program else None,
    }


def history(view: View, viewer: Viewer, history_rows: Sequence[HistoryRow]) -> HistoryAnswer:
    """Return past changes, oldest first."""
    rows = JobRows(view, viewer)
    shown = [h for h in history_rows if viewer.sees(_owner(view, h.get("job_id"), h.get("uid")))]
    return {
        "time": view.snapshot.time,
        "kept_since": view.kept_since,
        "changes": [change(rows, h) for h in shown],
    }


def usage(
    view: View,
    viewer: Viewer,
    segments: Sequence[SegmentRow],
    *,
    start: float | None = None,
    end: float | None = None,
    user: str = "",
    runs: bool = False,
) -> UsageAnswer:
    """Return GPU seconds by job and by user, from the allocations that the jobs held.

    Args:
        view: the controller's view.
        viewer: the caller.
        segments: rows that overlap the time asked for.
        start: epoch s; None: no bound. Segments are cut there.
        end: the same at the other end.
        user: only this user's jobs; "" for all.
        runs: whether each run is wanted, too.
    """
    now, rows = view.snapshot.time, JobRows(view, viewer)
    jobs: dict[tuple[int, str], UsageRow] = {}
    users: dict[str, UserUsage] = {}
    counted: list[RunUsage] = []
    for segment in segments:
        owner, kind = segment.get("user", ""), segment.get("gpu_type", "")
        job_id = segment["job_id"]
        counts_for = segment.get("base", job_id)
        if (user and owner != user) or not viewer.sees_usage(
            _owner(view, counts_for, segment.get("uid"))
        ):
            continue
        last = segment.get("end")
        begin = max(segment["start"], start) if start is not None else segment["start"]
        finish = min(now if last is None else last, end if end is not None else now)
        seconds = finish - begin
        settled = segment.get("seconds")
        if settled is not None and last is not None:
            seconds = min(seconds, float(settled))  # less what it was suspended
        if seconds <= 0:
            continue
        counted.append(
            {
                "job_id": job_id,
                "display_id": rows.display(job_id),
                "user": owner,
                "run": segment.get("run", 0),
                "gpu_type": kind,
                "gpus": segment["gpus"],
                "start": segment["start"],
                "end": last,
                "seconds": seconds,
                "settled": settled is not None,
            }
        )
        spent = seconds * segment["gpus"]
        row = jobs.setdefault(
            (counts_for, kind),
            {
                "job_id": counts_for,
                "display_id": rows.display(counts_for),
                "user": owner,
                "gpu_type": kind,
                "gpu_seconds": 0.0,
                "seconds": 0.0,
                "shapes": 0,
            },
        )
        row["gpu_seconds"] += spent
        row["seconds"] += seconds if counts_for == job_id else 0.0  # a companion's run beside
        row["shapes"] += 1
        total = users.setdefault(owner, {"user": owner, "gpu_seconds": 0.0, "types": {}})
        total["gpu_seconds"] += spent
        total["types"][kind] = total["types"].get(kind, 0.0) + spent
    sleep = view.sleep if viewer.may_know("nodes") else None
    return {
        "time": now,
        "kept_since": view.kept_since,
        "start": start,
        "end": end,
        "jobs": sorted(jobs.values(), key=lambda r: (r["job_id"], r["gpu_type"])),
        "runs": counted if runs else [],
        "users": sorted(users.values(), key=lambda r: -r["gpu_seconds"]),
        "sleep": _sleep(sleep, start, end) if sleep else None,
    }


def _sleep(observed: ObservedSleep, start: float | None, end: float | None) -> SleepUsage:
    """Return the energy that sleeping nodes would have saved in a period."""
    settings, total = observed.settings, observed.record.total(start, end)
    kwh = total["node_hours"] * settings.idle_watts / 1000
    return {
        "mode": "act" if observed.acts else "observe",
        "nodes": list(observed.asleep),
        "node_hours": total["node_hours"],
        "late": int(total["late"]),
        "late_s": total["late"] * settings.boot_s,
        "kwh": kwh,
        "cost": kwh * settings.price_per_kwh,
    }


def _row(rows: JobRows, decision: Decision) -> PlanRow:
    job, current = rows.view.snapshot.job.get(decision.job_id), decision.current
    report = rows.view.reports.get(decision.job_id)
    return {
        **rows.decision(decision),
        "job_id": decision.job_id,
        "display_id": rows.display(decision.job_id),
        "name": job.name if job else "",
        "user": job.user if job else "",
        "from_gpus": current.gpus if current else 0,
        "from_type": current.gpu_type if current else "",
        "from_where": rows.places(current.nodes) if current else [],
        "kind": report.kind if report else "",
        "steps_per_s": rows.steps_per_s(job) if job else None,
    }


def _owner(view: View, job_id: int | None, uid: int | None) -> int | None:
    if uid is not None:
        return uid
    job = view.snapshot.job.get(job_id) if job_id is not None else None
    return job.uid if job else None
