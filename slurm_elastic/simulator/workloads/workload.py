"""Workloads: which jobs are submitted when, read from CSV.

Columns `name,time,application,num_replicas,batch_size[,category][,sizes]`, as in the
published traces of Sia (SOSP'23): seconds since the beginning, GPUs and global
batch that the user asks for. `category` is `adaptive` (also when empty or
missing), `strong-scaling` (the traces say `scale-gpus`) or `rigid`. `sizes` is ours:
the numbers of GPUs that the script can run on, as in a directive (`1:2:4`); empty: all.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.core.application import JobClass
from slurm_elastic.core.directive import Directive, DirectiveError
from slurm_elastic.core.errors import InvalidInputError

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
_CLASSES = {
    "": JobClass.ADAPTIVE,
    "scale-gpus": JobClass.STRONG_SCALING,
    **{c.value: c for c in JobClass},
}
#: Larger numbers are taken for a damaged file.
_MOST_TIME = 1e10
_MOST_GPUS = 65536
_MOST_BATCH = 1_000_000_000


class WorkloadError(InvalidInputError):
    """A workload is invalid; the message names file, line and remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """One job of a workload.

    Attributes:
        name: name, unique in its workload.
        time_s: submission, seconds since the workload's start; may be fractional.
        application: name of its profile.
        gpus: GPUs that the user requests.
        batch: global batch that the user requests.
        job_class: what a scheduler may choose.
        source: `file:line` from which it was read; "" if it was generated.
        user: user who submits it.
        most: GPUs to which an adaptive job may grow; None: as many as Sia's artifact allows.
        listed: numbers of GPUs that it can run on; empty: all.
    """

    name: str
    time_s: float
    application: str
    gpus: int
    batch: int
    job_class: JobClass = JobClass.ADAPTIVE
    source: str = ""
    user: str = "user"
    most: int | None = None
    listed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in order of submission; `name` is displayed."""

    name: str
    jobs: tuple[SubmittedJob, ...]

    @classmethod
    def of(cls, name: str, jobs: Iterable[SubmittedJob]) -> Workload:
        """Sort jobs by submission; those of the same instant keep their order."""
        return cls(name, tuple(sorted(jobs, key=lambda j: j.time_s)))

    @property
    def applications(self) -> tuple[str, ...]:
        """Names of the applications, sorted."""
        return tuple(sorted({j.application for j in self.jobs}))

    def forced(self, job_class: JobClass | None) -> Workload:
        """Return the same jobs, all of one class; None: unchanged."""
        if job_class is None:
            return self
        jobs = tuple(dataclasses.replace(j, job_class=job_class) for j in self.jobs)
        return Workload(self.name, jobs)


def read(path: Path, *, applications: Collection[str] | None = None) -> Workload:
    """Read one CSV file.

    Args:
        path: the file.
        applications: names that may occur; None: not checked here.

    Raises:
        WorkloadError: unreadable, a column is missing, or a value is invalid.
    """
    jobs: list[SubmittedJob] = []
    lines: dict[str, int] = {}
    shape = f"must be {','.join(COLUMNS)}[,category][,sizes]"
    for line, row in rows(path, COLUMNS, what="a CSV file of jobs", header_line=shape):
        location = f"{path.name}:{line}"
        job = _job(row, location, applications)
        if job.name in lines:
            raise WorkloadError(
                f"{location}: name {job.name} occurs also in line {lines[job.name]};"
                " give each job its own"
            )
        lines[job.name] = line
        jobs.append(job)
    if not jobs:
        raise WorkloadError(f"{path}: has no job; each line after the first is one")
    return Workload.of(path.stem, jobs)


def rows(
    path: Path, columns: Sequence[str], *, what: str, header_line: str
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the lines that are not empty: line number, and stripped cells by column.

    Args:
        path: the file.
        columns: required columns.
        what: expected kind of file, for the error of an unreadable one.
        header_line: description of the first line, for the error of a missing column.

    Raises:
        WorkloadError: unreadable, a column is missing, or a row has another number of cells.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise WorkloadError(f"{path}: {reason}; name {what}") from None
    numbered = _numbered_rows(text, path.name)
    header = [cell.strip() for cell in next(numbered, (1, []))[1]]
    for column in columns:
        if column not in header:
            mark = next((m for m in (";", "\t", "|") if any(m in cell for cell in header)), None)
            commas = f", separated by commas, not by {mark!r}" if mark else ""
            raise WorkloadError(
                f"{path.name}:1: column {column} is missing; the first line {header_line}{commas}"
            )
    repeated = next((column for column in header if column and header.count(column) > 1), None)
    if repeated is not None:
        raise WorkloadError(f"{path.name}:1: duplicate column {repeated[:40]}; keep one of them")
    for number, cells in numbered:
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            raise WorkloadError(
                f"{path.name}:{number}: {len(cells)} cells under {len(header)} columns;"
                " each row needs one cell per column"
            )
        yield number, dict(zip(header, (cell.strip() for cell in cells), strict=True))


def _numbered_rows(text: str, name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each row with the number of the line on which it begins."""
    reader = csv.reader(io.StringIO(text, newline=""))
    number = 1
    try:
        for cells in reader:
            yield number, cells
            number = reader.line_num + 1
    except csv.Error as error:
        raise WorkloadError(
            f"{name}:{number}: {error}; is a quotation mark left open there?"
        ) from None


def _job(row: dict[str, str], location: str, applications: Collection[str] | None) -> SubmittedJob:
    name, application = row["name"], row["application"]
    if not name or not name.isprintable() or len(name) > 200:
        raise WorkloadError(
            f"{location}: name {name[:40]!r} is invalid: expected a name such as cifar10-0"
        )
    if not application:
        raise WorkloadError(f"{location}: application is empty: expected a folder of the profiles")
    if applications is not None and application not in applications:
        known_names = ", ".join(sorted(applications)) or "none"
        raise WorkloadError(
            f"{location}: application {application[:60]} of {name} has no profile; known:"
            f" {known_names}; add its folder to --profiles"
        )
    category = row.get("category", "")
    if category not in _CLASSES:
        known_names = ", ".join(c for c in _CLASSES if c)
        raise WorkloadError(
            f"{location}: category {category[:40]} is unknown; known: {known_names}"
        )
    return SubmittedJob(
        name=name,
        time_s=_number(row["time"], "time", location, _MOST_TIME, "seconds from 0 on"),
        application=application,
        gpus=_count(row["num_replicas"], "num_replicas", location, _MOST_GPUS),
        batch=_count(row["batch_size"], "batch_size", location, _MOST_BATCH),
        job_class=_CLASSES[category],
        source=location,
        listed=_sizes(row.get("sizes", ""), location),
    )


def _sizes(text: str, location: str) -> tuple[int, ...]:
    if not text:
        return ()
    if "," in text:  # would begin another key of a directive
        raise WorkloadError(
            f"{location}: sizes {text[:40]!r} is invalid: expected numbers of GPUs such as 1:2:4"
        )
    try:
        return Directive.parse(f"1-{_MOST_GPUS},sizes={text}").listed
    except DirectiveError as error:
        raise WorkloadError(f"{location}: {error.reason}") from None


def _number(text: str, column: str, location: str, most: float, remedy: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise WorkloadError(f"{location}: {column} {text[:40]!r} is invalid: expected {remedy}")
    return value


def _count(text: str, column: str, location: str, most: int) -> int:
    value = _number(text, column, location, most, "a whole number from 1 on")
    if value < 1 or value != int(value):
        raise WorkloadError(
            f"{location}: {column} {text[:40]!r} is invalid: expected a whole number from 1 on"
        )
    return int(value)
