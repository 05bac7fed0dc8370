"""Reader of `sacct --json`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from slurm_elastic.simulator.workloads.accounting_row import (
    AccountingRow,
    SacctError,
    most_of,
    one_word,
)


def rows(data: Any, name: str) -> Iterator[AccountingRow]:
    """Yield the jobs of a document.

    Args:
        data: the document.
        name: name of the file, for errors.

    Raises:
        SacctError: it is not sacct's, or a job has no id.
    """
    jobs = data.get("jobs") if isinstance(data, dict) else None
    if not isinstance(jobs, list):
        raise SacctError(f'{name}: no list "jobs"; write the file with: sacct -aD --json')
    for number, job in enumerate(jobs, 1):
        if not isinstance(job, dict) or not isinstance(job.get("job_id"), int):
            raise SacctError(f"{name}: job {number} has no job_id; write it with: sacct -aD --json")
        yield _row(job)


def _row(job: Mapping[str, Any]) -> AccountingRow:
    times = _mapping(job.get("time"))
    array = _mapping(job.get("array"))
    task = _number(array.get("task_id"))
    master = _number(array.get("job_id"))
    job_id = f"{master:.0f}_{task:.0f}" if master and task is not None else str(job["job_id"])
    if _number(_mapping(job.get("het")).get("job_id")):
        job_id += "+"
    state = _mapping(job.get("state")).get("current", job.get("state"))
    if isinstance(state, list):
        state = state[0] if state else ""
    gpu_type, gpus = most_of(_gpus(_mapping(job.get("tres")).get("allocated")))
    user = job.get("user") or _mapping(job.get("association")).get("user")
    return AccountingRow(
        job_id=job_id,
        name=str(job.get("name") or ""),
        user=sys.intern(str(user or "")),
        submit=_number(times.get("submission")) or None,
        start=_number(times.get("start")) or None,
        end=_number(times.get("end")) or None,
        seconds=_number(times.get("elapsed")),
        state=sys.intern(one_word(str(state or ""))),
        gpu_type=gpu_type,
        gpus=gpus,
        nodes=int(_number(job.get("allocation_nodes")) or 1),
        partition=sys.intern(str(job.get("partition") or "")),
        limit_s=(_number(times.get("limit")) or 0.0) * 60 or None,
    )


def _gpus(items: Any) -> dict[str, int]:
    """Return the number of GPUs by type from a list of TRES."""
    counts: dict[str, int] = {}
    for item in items if isinstance(items, list) else ():
        entry = _mapping(item)
        resource, _, kind = str(entry.get("name") or "").partition(":")
        if entry.get("type") == "gres" and resource == "gpu":
            counts[kind] = counts.get(kind, 0) + int(_number(entry.get("count")) or 0)
    return counts


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    """Return a number from 0 on, also from {"set": true, "number": 3}; None if there is none."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set", True) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value < 1e18 else None
