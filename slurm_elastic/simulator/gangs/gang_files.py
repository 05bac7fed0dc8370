"""Workloads and slowdown tables in the format of Dally's published data (`--format dally`).

Workload: `job_id,arrival_time,model,total_iterations,time_per_iteration,max_parallelism`;
seconds, seconds per iteration and GPU, GPUs of the gang. Slowdown table:
`model,gpus,racks,machines,slots` and `compute_us,exposed_comm_us`, or `s`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slurm_elastic.models.communication import SlowdownTable
from slurm_elastic.placement.delay.free_map import NodeLayout
from slurm_elastic.simulator.workloads.cluster_text import MAX_NODES, MAX_PER_NODE, ClusterError
from slurm_elastic.simulator.workloads.workload import WorkloadError, rows

_WORKLOAD = (
    "job_id",
    "arrival_time",
    "model",
    "total_iterations",
    "time_per_iteration",
    "max_parallelism",
)
_TABLE = ("model", "gpus", "racks", "machines", "slots")
_MOST = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedGang:
    """One gang of a workload.

    Attributes:
        iterations: iterations over all its GPUs.
        iteration_s: seconds of one iteration on one GPU, without communication.
    """

    job_id: int
    arrival_s: float
    model: str
    iterations: int
    iteration_s: float
    gpus: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class GangWorkload:
    """Gangs in the order of the file."""

    name: str
    gangs: tuple[SubmittedGang, ...]


def read_workload(path: Path) -> GangWorkload:
    """Read one CSV file.

    Raises:
        WorkloadError: unreadable, a column is missing, or a value is invalid.
    """
    gangs: list[SubmittedGang] = []
    lines: dict[int, str] = {}
    for location, row in _rows(path, _WORKLOAD):
        gang = SubmittedGang(
            job_id=_whole_number(row, "job_id", location, least=0),
            arrival_s=_number(row, "arrival_time", location, least=0.0),
            model=row["model"],
            iterations=_whole_number(row, "total_iterations", location, least=1),
            iteration_s=_number(row, "time_per_iteration", location, least=1e-12),
            gpus=_whole_number(row, "max_parallelism", location, least=1),
            source=location,
        )
        if gang.job_id in lines:
            raise WorkloadError(
                f"{location}: job_id {gang.job_id} occurs also in {lines[gang.job_id]};"
                " give each job its own"
            )
        lines[gang.job_id] = location
        gangs.append(gang)
    if not gangs:
        raise WorkloadError(f"{path}: has no job; each line after the first is one")
    return GangWorkload(path.stem, tuple(gangs))


def read_slowdowns(path: Path) -> SlowdownTable:
    """Read a slowdown table.

    If both times are given, s is computed from them in single precision, as ASTRA-sim writes it.

    Raises:
        WorkloadError: unreadable, a column is missing, a value is invalid, or a row is repeated.
    """
    parts: dict[tuple[str, int, int, int, int], float] = {}
    for location, row in _rows(path, _TABLE):
        key = (
            row["model"],
            _whole_number(row, "gpus", location, least=1),
            _whole_number(row, "racks", location, least=1),
            _whole_number(row, "machines", location, least=1),
            _whole_number(row, "slots", location, least=1),
        )
        if row.get("compute_us") and row.get("exposed_comm_us"):
            compute = float(np.float32(_number(row, "compute_us", location, least=1e-9)))
            exposed = float(np.float32(_number(row, "exposed_comm_us", location, least=0.0)))
            part = compute / (exposed + compute)
        elif row.get("s"):
            part = _number(row, "s", location, least=1e-9)
        else:
            raise WorkloadError(
                f"{location}: compute_us and exposed_comm_us, or s, is missing: write one of them"
            )
        if part > 1:
            raise WorkloadError(
                f"{location}: s {part:g} is invalid: expected a part of the time, at most 1"
            )
        if parts.setdefault(key, part) != part:
            raise WorkloadError(
                f"{location}: {key[0]} on {key[1]} GPUs, {key[2]} racks, {key[3]} machines,"
                f" {key[4]} slots has another s in an earlier row; keep one row"
            )
    if not parts:
        raise WorkloadError(f"{path}: has no row; each line after the first is one")
    return SlowdownTable(parts)


def read_sites(text: str, *, slots: int) -> NodeLayout:
    """Parse a cluster: `2x4x8` is two racks of four nodes of eight GPUs.

    Args:
        text: RACKSxNODESxGPUS.
        slots: link domains of each node.

    Raises:
        ClusterError: the text has another form.
    """
    counts = text.split("x")
    try:
        racks, nodes, gpus = (int(w) for w in counts)
    except ValueError:
        racks = nodes = gpus = 0
    remedy = "expected RACKSxNODESxGPUS, e.g. 2x4x8"
    if min(racks, nodes, gpus) < 1 or racks * nodes > MAX_NODES or gpus > MAX_PER_NODE:
        raise ClusterError(f'cluster "{text[:60]}" is invalid: {remedy}')
    if slots < 1 or gpus % slots:
        raise ClusterError(
            f"--slots {slots} is invalid: expected a divisor of the {gpus} GPUs of a node, e.g. 2"
        )
    return NodeLayout.regular(racks=racks, nodes=nodes, gpus=gpus, domains=slots)


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield each row with its place in the file."""
    shape = f"must have {','.join(columns)}"
    for line, row in rows(path, columns, what="a CSV file", header_line=shape):
        yield f"{path.name}:{line}", row


def _number(row: Mapping[str, str], column: str, location: str, *, least: float) -> float:
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not least <= value <= _MOST:
        raise WorkloadError(
            f"{location}: {column} {row[column][:40]!r} is invalid:"
            f" expected a number from {least:g} on"
        )
    return value


def _whole_number(row: Mapping[str, str], column: str, location: str, *, least: int) -> int:
    value = _number(row, column, location, least=least)
    if value != int(value):
        raise WorkloadError(
            f"{location}: {column} {row[column][:40]!r} is invalid: expected a whole number"
        )
    return int(value)
