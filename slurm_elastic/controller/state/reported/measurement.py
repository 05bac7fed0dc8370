"""Measurement of a job's shape, from its reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slurm_elastic.controller.state.reported.exchange_times import schedule_kind
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.core.plan import Measurement
from slurm_elastic.core.report import Report

#: A stall is the running mean of about so many reports: it trembles more than whole steps.
_MEAN_OF = 5
#: Computing that differs by this factor is of another batch or model: the mean begins anew, as
#: with another kind of exchange.
_OTHER = 1.5


_FIELDS = frozenset(f.name for f in dataclasses.fields(Measurement))


def key_of(held: Allocation, racks: int) -> str:
    """Return the key of a shape in so many racks; for one rack as earlier versions wrote it."""
    shape = f"{held.gpu_type}:{held.gpus}:{len(held.nodes)}"
    return f"{shape}:{racks}" if racks > 1 else shape


def from_ledger(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Measurement]:
    """Return measurements from the ledger, by key; fields of later versions are ignored."""
    return {
        key: Measurement(**{n: v for n, v in row.items() if n in _FIELDS})
        for key, row in rows.items()
    }


def measured(
    report: Report,
    held: Allocation,
    samples_per_s: float,
    *,
    racks: int,
    old: Measurement | None,
) -> Measurement:
    """Return the newest speed, and running means of computing and waiting times.

    Args:
        report: of a job on `held`.
        held: what the job really has.
        samples_per_s: by the report.
        racks: number of racks that the nodes of `held` are in.
        old: measurement of the same shape so far.
    """
    compute_s, sync_s, reports, exchange = None, None, 0, ""
    if old is not None:
        compute_s, sync_s, reports = old.compute_s, old.sync_s, old.reports
        exchange = old.exchange
    parts = _parts(report)
    if parts is not None:
        near = compute_s is not None and compute_s / _OTHER < parts[0] < compute_s * _OTHER
        kind = schedule_kind(report.exchange)
        if compute_s is None or sync_s is None or not near or exchange != kind:
            exchange = kind
            compute_s, sync_s, reports = *parts, 0
        weight = 1.0 / min(reports + 1, _MEAN_OF)
        compute_s += weight * (parts[0] - compute_s)
        sync_s += weight * (parts[1] - sync_s)
        reports += 1
    return Measurement(
        gpu_type=held.gpu_type,
        gpus=held.gpus,
        nodes=len(held.nodes),
        racks=racks,
        samples_per_s=samples_per_s,
        steps=report.steps_measured,
        compute_s=compute_s,
        sync_s=sync_s,
        reports=reports,
        exchange=exchange,
    )


def staged(report: Report) -> bool:
    """Return whether several ranks make up a replica, and wait for each other, too."""
    if not report.layout:
        return False
    plan = ExecutionPlan.parse(report.plan or report.layout)
    return plan.stages > 1 or plan.space > 1 or plan.tensor > 1


def _parts(report: Report) -> tuple[float, float] | None:
    """Return (computing, waiting) s of one step; None: not reported, or not data-parallel."""
    forward, backward, sync = report.forward_s, report.backward_s, report.sync_s
    if forward is None or backward is None or sync is None or staged(report):
        return None
    compute_s = forward + backward + (report.optimizer_s or 0.0)
    whole_s = report.step_time_s
    if not compute_s > 0 or (whole_s and sync > 2 * whole_s):
        return None  # parts of a step cannot outlast it like that
    return compute_s, sync
