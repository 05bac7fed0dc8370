"""Jobs with a given amount of work and a given scaling curve, without measured profiles.

A workload file with the additional columns `work_h` (hours on one GPU of speed 1) and `scaling` (a
curve of `scaling_curves`) needs no profiles: that of each job is made from its line. Optional:
`gpu_type` (the job stays on that type unless speeds of types are given), `user`, `most` (GPUs to
which it may grow).

Our definition of such a job's truth: its batch is fixed, its work is that of the file, and a
step takes 1 / (speed of the curve x speed of the GPU type), wherever its GPUs are.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from slurm_elastic.core.application import JobClass
from slurm_elastic.simulator.workloads import workload as workloads
from slurm_elastic.simulator.workloads.accounting_trace import AccountingTrace, PastJob
from slurm_elastic.simulator.workloads.application_profiles import (
    ApplicationProfile,
    Profiles,
    Shape,
    TypeTable,
)
from slurm_elastic.simulator.workloads.application_profiles import MeasuredCurve as Times
from slurm_elastic.simulator.workloads.cluster_text import Cluster
from slurm_elastic.simulator.workloads.scaling_curves import (
    CurveRules,
    ScalingCurve,
    ScalingError,
    curve,
)
from slurm_elastic.simulator.workloads.workload import SubmittedJob, Workload, WorkloadError

HEADER = (
    *workloads.COLUMNS, "category", "user", "gpu_type", "most", "work_h", "scaling",
)  # fmt: skip
#: Seconds of a restart, unless given.
RESTART_S = 60.0
#: A job may grow to this many times its request.
GROW = 4.0

#: Fixed batch, in arbitrary samples: large, so that every number of GPUs divides it well.
_BATCH = 65536
_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class CurveJob:
    """One job of such a workload.

    Attributes:
        submitted: usual columns, and the GPUs to which it may grow.
        gpu_type: type on which it ran; "": any.
        work_s: seconds on one GPU of speed 1.
        scaling: scaling curve.
    """

    submitted: SubmittedJob
    gpu_type: str
    work_s: float
    scaling: ScalingCurve


def from_accounting(
    past: AccountingTrace,
    rules: CurveRules,
    *,
    grow: float = GROW,
    speeds: Mapping[str, float] | None = None,
) -> list[CurveJob]:
    """Return the jobs of an accounting file; their work follows from their curves.

    Args:
        past: jobs.
        rules: their curves.
        grow: a job may grow to this many times its request.
        speeds: relative speeds of GPU types; 1 for others.

    Raises:
        ScalingError: a job without a curve.
    """
    begin = min(j.submit for j in past.jobs)
    return [_curve_job(job, rules.of(job.name), begin, grow, speeds or {}) for job in past.jobs]


def _curve_job(
    job: PastJob, scaling: ScalingCurve, begin: float, grow: float, speeds: Mapping[str, float]
) -> CurveJob:
    work = sum(r.seconds * scaling.speed(r.gpus) * speeds.get(r.gpu_type, 1.0) for r in job.runs)
    gpus = job.main.gpus
    application = "".join(c if c.isalnum() or c in "._-" else "_" for c in job.name)[:60]
    return CurveJob(
        submitted=SubmittedJob(
            name=job.job_id,
            time_s=job.submit - begin,
            application=application or "job",
            gpus=gpus,
            batch=_BATCH,
            job_class=JobClass.ADAPTIVE if scaling.elastic else JobClass.RIGID,
            user=job.user or "user",
            most=max(gpus, math.floor(gpus * grow)) if scaling.elastic else gpus,
        ),
        gpu_type=job.main.gpu_type,
        work_s=work,
        scaling=scaling,
    )


def write(jobs: Iterable[CurveJob], stream: TextIO) -> None:
    """Write a workload file."""
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(HEADER)
    for job in jobs:
        s = job.submitted
        writer.writerow(
            (
                s.name, f"{s.time_s:g}" if s.time_s < 1e5 else f"{s.time_s:.0f}", s.application,
                s.gpus, s.batch, s.job_class.value, s.user, job.gpu_type, s.most,
                f"{job.work_s / _HOUR:.6g}", job.scaling.name,
            )
        )  # fmt: skip


def has_curves(path: Path) -> bool:
    """Return whether a workload file has its own curves; False if it cannot be read."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            header = [cell.strip() for cell in next(csv.reader([stream.readline()]), [])]
    except (OSError, UnicodeDecodeError, csv.Error):
        return False
    return {"work_h", "scaling"} <= set(header)


def read(path: Path) -> tuple[str, list[CurveJob]]:
    """Read a workload file with curves; return its name and its jobs.

    Raises:
        WorkloadError: as of `workload.read`, or an invalid curve or work.
    """
    base = workloads.read(path)
    shape = f"must be {','.join(HEADER)}"
    by_name = {
        row["name"]: (f"{path.name}:{line}", row)
        for line, row in workloads.rows(
            path, (*workloads.COLUMNS, "work_h", "scaling"), what="a CSV file", header_line=shape
        )
    }
    return base.name, [_of_row(job, *by_name[job.name]) for job in base.jobs]


def _of_row(job: SubmittedJob, location: str, row: Mapping[str, str]) -> CurveJob:
    try:
        scaling = curve(row["scaling"])
    except ScalingError as error:
        raise WorkloadError(f"{location}: {error}") from None
    if not scaling.elastic:
        job = dataclasses.replace(job, job_class=JobClass.RIGID)
    hours = _number(row["work_h"], "work_h", location)
    most = row.get("most", "")
    return CurveJob(
        submitted=dataclasses.replace(
            job,
            user=row.get("user", "") or "user",
            most=max(job.gpus, int(_number(most, "most", location) if most else job.gpus * GROW)),
        ),
        gpu_type=row.get("gpu_type", ""),
        work_s=hours * _HOUR,
        scaling=scaling,
    )


def _number(text: str, column: str, location: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise WorkloadError(
            f"{location}: {column} {text[:40]!r} is invalid: expected a number above 0"
        )
    return value


def build(
    name: str,
    jobs: Sequence[CurveJob],
    types: Sequence[str],
    *,
    speeds: Mapping[str, float] | None = None,
    restart_s: float = RESTART_S,
    keep_types: bool = False,
) -> tuple[Workload, Profiles]:
    """Return the workload and the profiles of such jobs, for the simulator.

    Args:
        name: name of the workload.
        jobs: jobs of the file.
        types: GPU types of the cluster.
        speeds: relative speeds of GPU types; a job may run on every type that has one.
        restart_s: seconds of a restart.
        keep_types: keep each job on its type even so, as users requested it.

    Raises:
        WorkloadError: a job's GPU type is not in the cluster.
    """
    speeds = speeds or {}
    tables: dict[tuple[str, float, ScalingCurve, int], TypeTable] = {}
    profiles: dict[str, ApplicationProfile] = {}
    submitted = []
    for job in jobs:
        key = f"{job.submitted.application}#{job.submitted.name}"
        job_tables = {}
        free = {} if keep_types and job.gpu_type in types else speeds
        for kind in _types(job, types, free):
            speed = speeds.get(kind, 1.0)
            which = (kind, speed, job.scaling, job.submitted.most or job.submitted.gpus)
            if which not in tables:
                tables[which] = _table(*which)
            job_tables[kind] = tables[which]
        profiles[key] = _profile(key, job.work_s, job_tables, restart_s)
        submitted.append(dataclasses.replace(job.submitted, application=key, batch=_BATCH))
    return Workload.of(name, submitted), profiles


def oversized(
    jobs: Iterable[CurveJob], cluster: Cluster, speeds: Mapping[str, float] | None = None
) -> int:
    """Return the number of jobs that request more GPUs than there are of any allowed type."""
    return sum(
        job.submitted.gpus
        > max(
            group.gpus
            for group in cluster
            if group.gpu_type in _types(job, cluster.types, speeds or {})
        )
        for job in jobs
    )


def _types(job: CurveJob, types: Sequence[str], speeds: Mapping[str, float]) -> list[str]:
    if not job.gpu_type:
        return list(types)
    usable_types = [
        t for t in types if t == job.gpu_type or (t in speeds and job.gpu_type in speeds)
    ]
    if not usable_types:
        raise WorkloadError(
            f"job {job.submitted.name} ran on {job.gpu_type}, of which the cluster has none;"
            f" add {job.gpu_type}:NODESxGPUS to --cluster, or give its speed relative to the"
            f" others: --speeds {job.gpu_type}=1,{types[0]}=2"
        )
    return usable_types


def _profile(
    name: str, work_s: float, types: Mapping[str, TypeTable], restart_s: float
) -> ApplicationProfile:
    """Return a profile with a fixed batch and no gradient noise: one step per second at speed 1."""
    return ApplicationProfile(
        name=name,
        batches=(_BATCH,),
        progress=((work_s,),),
        sqr=((1.0,),),
        var=((0.0,),),
        types=types,
        restart_s=restart_s,
    )


def _table(gpu_type: str, speed: float, scaling: ScalingCurve, most: int) -> TypeTable:
    return TypeTable(
        gpu_type=gpu_type,
        curves=_CurveTimes(scaling, speed),
        scalability=(),
        # With a fixed batch, its smallest part bounds the number of GPUs for policies as well.
        least=max(1, _BATCH // most),
        most=_BATCH,
        source=f"curve {scaling.name}",
    )


@dataclass(frozen=True)
class _CurveTimes(Mapping[Shape, Times]):
    """Times at every placement; iteration yields only that of one GPU.

    The loss against a linear curve counts as synchronisation.
    """

    scaling: ScalingCurve
    speed: float

    def __getitem__(self, shape: Shape) -> Times:
        gpus = sum(shape)
        if gpus < 1:
            raise KeyError(shape)
        step_s = 1.0 / (self.speed * self.scaling.speed(gpus))
        compute_s = min(1.0 / (self.speed * gpus), step_s)
        sync = step_s - compute_s
        per_sample = compute_s * gpus / _BATCH
        per_gpu = _BATCH // gpus
        ends = (1, per_gpu, _BATCH) if 1 < per_gpu < _BATCH else (1, _BATCH)
        return Times(ends, tuple(per_sample * m + sync for m in ends), (sync,) * len(ends))

    def __iter__(self) -> Iterator[Shape]:
        return iter(((1,),))

    def __len__(self) -> int:
        return 1
