"""Readers of job traces that others have published, recognised by their first line.

| trace | file |
|---|---|
| Helios (SC'21), also as reduced by Lucid; Acme (NSDI'24) | cluster_log.csv; trace_*.csv |
| Philly (ATC'19) | cluster_job_log: JSON, a list of jobs with their attempts |
| Alibaba: tasks and jobs of 2020 (NSDI'22) | pai_task_table.csv; pai_job_*_estimate_100K.csv |
| Alibaba: pods of 2023 (ATC'23), jobs of 2026 (ASPLOS'26) | openb_pod_list_*.csv; job_info_df.csv |
| MIT Supercloud (HPEC'21) | slurm-log.csv |
| Tiresias (NSDI'19) | *_job.csv |
| Shockwave (NSDI'23) | *.trace |
| Parallel Workloads Archive | *.swf, the Standard Workload Format |

Every row becomes an `AccountingRow`, as those of Slurm's accounting. Where times are seconds from
the beginning of a trace they stay so. A processor of the Standard Workload Format is taken for a
GPU, a part of a GPU for a whole one, and each task of Alibaba's of 2020 for a job; the rows' notes
say so.
"""

from __future__ import annotations

import csv
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_elastic.simulator.workloads.accounting_row import (
    ENDED_WELL,
    LATEST_S,
    AccountingRow,
    SacctError,
    epoch_s,
    one_word,
)

PART_OF_GPU = "on a part of a GPU (counted as a whole one)"
PROCESSORS = "of processors (each counts as a GPU)"
NO_START = "without a time of start (waits count as none)"
TASKS = "tasks of jobs (each counts as a job, waits count as none)"

#: States of the traces that are not Slurm's.
_STATES = {
    "Pass": ENDED_WELL, "Succeeded": ENDED_WELL, "Killed": "CANCELLED", "Failed": "FAILED",
    "Terminated": ENDED_WELL, "Waiting": "PENDING",
    "Running": "CANCELLED",  # a pod that was deleted while it ran
}  # fmt: skip
#: Slurm's states by their numbers, as its database has them.
_SLURM_STATES = (
    "PENDING", "RUNNING", "SUSPENDED", ENDED_WELL, "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL",
    "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY",
)  # fmt: skip
#: GPUs among the numbered resources of MIT's cluster. Sites number theirs differently.
_TRES_GPUS = {"1001": "tesla", "1002": "volta"}
#: Cells of a job in Gavel's traces, of two ages, and in Shockwave's, which state a duration, too.
_GAVEL_CELLS, _SHOCKWAVE_CELLS = (7, 8, 9, 10, 11), 12
#: From here on a time limit in Slurm's database is none.
_NO_LIMIT = 2**32 - 2
_TIME_REMEDY = "expected seconds, or YYYY-MM-DD HH:MM:SS with or without a zone"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTable:
    """Columns of a CSV trace.

    Every attribute but `title` holds names of columns; "" or (): there is none.

    Attributes:
        title: name of the trace, for errors.
        job: id of the job.
        gpus: numbers whose product is the number of GPUs.
        name, partition: the first of these that a row has.
        milli: thousandths of a GPU, where a job has one GPU.
        percent: hundredths of a GPU, as another factor of `gpus`.
        task: name of a part of the job, which counts as a job.
        tres: resources by number, `1=20,2=170000,1002=2`, in place of `gpus`. The table is one of
            Slurm's database: states are numbers, and a time of 0 is unknown.
        limit_min: time limit in minutes.
        without_header: all columns, in order, of a file whose first line may be a row.
    """

    title: str
    job: str
    gpus: tuple[str, ...]
    submit: str
    seconds: str = ""
    start: str = ""
    end: str = ""
    state: str = ""
    user: str = ""
    name: tuple[str, ...] = ()
    partition: tuple[str, ...] = ()
    nodes: str = ""
    gpu_type: str = ""
    milli: str = ""
    percent: str = ""
    task: str = ""
    tres: str = ""
    limit_min: str = ""
    without_header: tuple[str, ...] = ()

    @property
    def required(self) -> frozenset[str]:
        """Columns by which a file is recognised."""
        return frozenset(
            column
            for column in (
                *(self.job, self.submit, self.seconds, self.start, self.end, self.gpu_type),
                *(self.milli, self.percent, self.task, self.tres, *self.gpus),
            )
            if column
        )

    def is_row(self, cells: Sequence[str]) -> bool:
        """Return whether cells, without a header before them, are a row of this table."""
        if not self.without_header or len(cells) != len(self.without_header):
            return False
        row = dict(zip(self.without_header, cells, strict=True))
        return row[self.state] in _STATES and row[self.gpus[0]].replace(".", "", 1).isdecimal()


TABLES = (
    TraceTable(
        title="Helios and Acme", job="job_id", gpus=("gpu_num",), submit="submit_time",
        seconds="duration", start="start_time", end="end_time", state="state", user="user",
        name=("jobname", "job_name", "type"), partition=("vc",), nodes="node_num",
    ),
    TraceTable(
        title="Alibaba's pods", job="name", gpus=("num_gpu",), submit="creation_time",
        start="scheduled_time", end="deletion_time", state="pod_phase", name=("qos",),
        partition=("qos",), milli="gpu_milli",
    ),
    TraceTable(
        title="Alibaba's jobs", job="job_name", gpus=("gpu_request", "worker_num"),
        submit="submit_time", seconds="duration", user="organization", name=("job_type",),
        partition=("job_type",), nodes="worker_num", gpu_type="gpu_model",
    ),
    TraceTable(
        title="Alibaba's tasks of 2020", job="job_name", task="task_name", gpus=("inst_num",),
        percent="plan_gpu", submit="start_time", start="start_time", end="end_time",
        state="status", nodes="inst_num", gpu_type="gpu_type",
        without_header=(
            "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu",
            "plan_mem", "plan_gpu", "gpu_type",
        ),
    ),
    TraceTable(
        title="Alibaba's jobs of 2020", job="job_id", gpus=("num_gpu", "num_inst"),
        submit="submit_time", seconds="duration", user="user", name=("group",), nodes="num_inst",
        gpu_type="gpu_type",
    ),
    TraceTable(
        title="MIT Supercloud", job="id_job", gpus=(), submit="time_submit", start="time_start",
        end="time_end", state="state", user="id_user", partition=("partition",),
        nodes="nodes_alloc", tres="tres_alloc", limit_min="timelimit",
    ),
    TraceTable(
        title="Tiresias", job="job_id", gpus=("num_gpu",), submit="submit_time",
        seconds="duration", name=("model_name",),
    ),
)  # fmt: skip


def table(first: str) -> TraceTable | None:
    """Return the table of which the first line of a file is the header, or a row; None: none."""
    cells = _columns(first)
    named = (t for t in TABLES if t.required <= set(cells))
    return next(named, None) or next((t for t in TABLES if t.is_row(cells)), None)


def table_rows(
    kind: TraceTable, first: str, lines: Iterator[str], name: str
) -> Iterator[AccountingRow]:
    """Yield the jobs of a CSV trace.

    Args:
        kind: its columns.
        first: its first line.
        lines: the others.
        name: name of the file, for errors.

    Raises:
        SacctError: a row is invalid.
    """
    columns: Sequence[str] = _columns(first)
    header = 1
    if kind.is_row(columns):
        columns, header = kind.without_header, 0
        lines = itertools.chain([first], lines)
    reader = csv.reader(lines)
    begin = header + 1
    try:
        for cells in reader:
            location, begin = f"{name}:{begin}", reader.line_num + header + 1
            if not any(cells):
                continue
            if len(cells) != len(columns):
                raise SacctError(
                    f"{location}: {len(cells)} cells under {len(columns)} columns of {kind.title};"
                    " was the file cut or edited?"
                )
            row = dict(zip(columns, (c.strip() for c in cells), strict=True))
            yield _table_row(kind, row, location)
    except csv.Error as error:
        raise SacctError(f"{name}:{begin}: {error}; was the file edited?") from None


def _columns(header: str) -> list[str]:
    return [c.strip().strip('"') for c in header.split(",")]


def _table_row(kind: TraceTable, row: Mapping[str, str], location: str) -> AccountingRow:
    job_id = row[kind.job]
    if not job_id or not job_id.isprintable() or len(job_id) > 200:
        raise SacctError(f'{location}: {kind.job} "{job_id[:40]}" is invalid: expected an id')
    submit, start, end = (
        epoch_s(_time_text(kind, row.get(c, "")), f"{location}: {c}", _TIME_REMEDY)
        for c in (kind.submit, kind.start, kind.end)
    )
    seconds = _number(row.get(kind.seconds, ""), kind.seconds, location)
    if seconds is None and start is not None and end is not None:
        seconds = max(0.0, end - start)
    gpu_type, wanted = _gpus(kind, row, location)
    limit_min = _number(row.get(kind.limit_min, ""), kind.limit_min, location)
    note = "" if kind.start else NO_START
    if kind.task:
        job_id, note = f"{job_id}/{row[kind.task][:200]}", TASKS
    if math.ceil(wanted) != wanted:
        note = f"{TASKS} {PART_OF_GPU}" if kind.task else PART_OF_GPU
    return AccountingRow(
        job_id=job_id,
        name=sys.intern(next((row[c] for c in kind.name if row.get(c)), "")),
        user=sys.intern(row.get(kind.user, "")),
        submit=submit,
        start=start if kind.start else submit,
        end=end,
        seconds=seconds if start is not None or not kind.start else None,
        state=sys.intern(_state(kind, row.get(kind.state, ""))),
        gpu_type=sys.intern(_type_name(gpu_type)),
        gpus=math.ceil(wanted),
        nodes=max(1, int(_number(row.get(kind.nodes, ""), kind.nodes, location) or 1)),
        partition=sys.intern(next((row[c] for c in kind.partition if row.get(c)), "")),
        limit_s=60 * limit_min if limit_min and limit_min < _NO_LIMIT else None,
        note=note,
    )


def _gpus(kind: TraceTable, row: Mapping[str, str], location: str) -> tuple[str, float]:
    """Return type and number of GPUs of a row."""
    if kind.tres:
        pairs = [part.partition("=") for part in row[kind.tres].split(",")]
        counts = {
            _TRES_GPUS[key.strip()]: _number(value, kind.tres, location) or 0.0
            for key, _, value in pairs
            if key.strip() in _TRES_GPUS
        }
        return max(counts, key=lambda name: counts[name], default=""), sum(counts.values())
    factors = [_number(row[c], c, location) or 0.0 for c in kind.gpus]
    if kind.percent:
        factors.append((_number(row[kind.percent], kind.percent, location) or 0.0) / 100)
    milli = _number(row.get(kind.milli, ""), kind.milli, location)
    part = milli / 1000 if factors == [1.0] and milli is not None else 1.0
    return row.get(kind.gpu_type, ""), math.prod(factors) * part


def _state(kind: TraceTable, text: str) -> str:
    """Return a state as one word of Slurm's."""
    state = one_word(text)
    if kind.tres and state.isdecimal():
        number = int(state[:10]) & 0xFF  # above: flags
        return _SLURM_STATES[number] if number < len(_SLURM_STATES) else "FAILED"
    return _STATES.get(state, state)


def _time_text(kind: TraceTable, text: str) -> str:
    """Return a time as `epoch_s` reads it; "": it is unknown."""
    return "" if kind.tres and text == "0" else _whole(text)


def _whole(text: str) -> str:
    """Return a number of seconds without its fraction; other texts unchanged."""
    whole, point, fraction = text.partition(".")
    return whole if point and whole.isdecimal() and fraction.isdecimal() else text


def _type_name(text: str) -> str:
    """Return a GPU type as --cluster can name it."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "_" for c in text[:60])


def _number(text: str, column: str, location: str) -> float | None:
    """Return a number from 0 on; None: there is none."""
    if text in ("", "nan", "NaN", "None", "NULL"):
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= LATEST_S:
        raise SacctError(
            f'{location}: {column} "{text[:40]}" is invalid: expected a number from 0 on'
        )
    return value


def is_swf(line: str) -> bool:
    """Return whether a first line is of the Standard Workload Format."""
    return line.startswith(";") or _swf_fields(line) is not None


def swf_rows(first: str, lines: Iterator[str], name: str) -> Iterator[AccountingRow]:
    """Yield the jobs of a file in the Standard Workload Format; see `table_rows`.

    Raises:
        SacctError: a line is invalid.
    """
    offset = 0.0
    for number, line in enumerate(_first_and(first, lines), start=1):
        if line.startswith(";"):
            key, _, value = line.lstrip("; ").partition(":")
            if key.strip() == "UnixStartTime" and value.strip().isdecimal():
                offset = float(value.strip()[:10])
            continue
        if not line.strip():
            continue
        fields = _swf_fields(line)
        if fields is None:
            raise SacctError(
                f'{name}:{number}: "{line[:40]}" is no job: expected 18 numbers; was the file cut?'
            )
        if fields[10] not in (2, 3, 4):  # parts of a job that has a line of its own
            yield _swf_row(fields, offset, f"{name}:{number}")


def _first_and(first: str, lines: Iterator[str]) -> Iterator[str]:
    yield first
    yield from lines


def _swf_fields(line: str) -> Sequence[float] | None:
    texts = line.split()
    if len(texts) != 18:
        return None
    try:
        values = [float(text) for text in texts]
    except ValueError:
        return None
    return values if all(-1e15 < value < 1e15 for value in values) else None


def _swf_row(fields: Sequence[float], offset: float, location: str) -> AccountingRow:
    (job, submit, wait, seconds, used, _, _, requested, limit, _, status, user, _, program, queue,
     partition, _, _) = fields  # fmt: skip
    if submit < 0 or submit + offset > LATEST_S:
        raise SacctError(f"{location}: time of submission {submit:g} is invalid: expected seconds")
    begin = submit + offset
    gpus = int(used if used > 0 else max(0, requested))
    return AccountingRow(
        job_id=f"{job:.0f}",
        name=f"app{program:.0f}" if program >= 0 else "",
        user=f"user{user:.0f}" if user >= 0 else "",
        submit=begin,
        start=begin + max(0.0, wait) if seconds >= 0 else None,
        end=None,
        seconds=seconds if seconds >= 0 else None,
        state={0: "FAILED", 5: "CANCELLED"}.get(int(status), ENDED_WELL),
        gpus=gpus,
        partition=f"{partition:.0f}" if partition >= 0 else f"{queue:.0f}" if queue >= 0 else "",
        limit_s=limit if limit > 0 else None,
        note=PROCESSORS if wait >= 0 else f"{PROCESSORS}, {NO_START}",
    )


def is_gavel(line: str) -> bool:
    """Return whether a first line is a job of Gavel's traces, of which Shockwave's are a form."""
    cells = line.split("\t")
    # Whether it needs a data folder, and its steps.
    flags = itertools.pairwise(c.strip() for c in cells[3:6])
    of_job = any(flag in ("0", "1") and steps.isdecimal() for flag, steps in flags)
    return of_job and len(cells) in (*_GAVEL_CELLS, _SHOCKWAVE_CELLS)


def shockwave_rows(first: str, lines: Iterator[str], name: str) -> Iterator[AccountingRow]:
    """Yield the jobs of one of Shockwave's traces; see `table_rows`.

    Raises:
        SacctError: a line is invalid, or of Gavel's own form, which states no run times.
    """
    for number, line in enumerate(_first_and(first, lines), start=1):
        location, cells = f"{name}:{number}", [c.strip() for c in line.split("\t")]
        if cells == [""]:
            continue
        if len(cells) in _GAVEL_CELLS:
            raise SacctError(
                f"{location}: a job of Gavel's has steps and no run time: expected"
                f" {_SHOCKWAVE_CELLS} cells, as Shockwave's have, with its duration in s before"
                " its arrival"
            )
        if len(cells) != _SHOCKWAVE_CELLS:
            raise SacctError(
                f"{location}: {len(cells)} cells in place of {_SHOCKWAVE_CELLS}; was the file cut?"
            )
        gpus = _number(cells[6], "scale factor", location)
        seconds = _number(cells[10], "duration", location)
        submit = _number(cells[11], "arrival", location)
        yield AccountingRow(
            job_id=str(number - 1),
            name=sys.intern(cells[0][:200]),
            user="",
            submit=submit,
            start=submit,
            end=None,
            seconds=seconds,
            gpus=math.ceil(gpus or 0.0),
            note=NO_START,
        )


def is_philly(data: Any) -> bool:
    """Return whether a JSON document is Philly's list of jobs."""
    return isinstance(data, list) and bool(data) and _is_philly_job(data[0])


def _is_philly_job(job: Any) -> bool:
    return isinstance(job, dict) and {"jobid", "attempts", "submitted_time"} <= job.keys()


def philly_rows(data: Sequence[Any], name: str) -> Iterator[AccountingRow]:
    """Yield the attempts of Philly's jobs; those without times never started.

    Raises:
        SacctError: a job is invalid.
    """
    for number, job in enumerate(data, start=1):
        location = f"{name}: job {number}"
        if not _is_philly_job(job) or not isinstance(job["attempts"], list):
            raise SacctError(f"{location} has no jobid, submitted_time and attempts")
        attempts = [a for a in job["attempts"] if isinstance(a, dict)]
        for attempt in attempts or [{}]:
            yield _philly_row(job, attempt, location)


def _philly_row(job: Mapping[str, Any], attempt: Mapping[str, Any], location: str) -> AccountingRow:
    times = (job["submitted_time"], attempt.get("start_time"), attempt.get("end_time"))
    submit, start, end = (epoch_s(str(t or ""), location, _TIME_REMEDY) for t in times)
    detail = attempt.get("detail")
    machines = [m for m in detail if isinstance(m, dict)] if isinstance(detail, list) else []
    gpus = [m["gpus"] for m in machines if isinstance(m.get("gpus"), list)]
    state = str(job.get("status") or "")
    known = start is not None and end is not None
    return AccountingRow(
        job_id=str(job["jobid"]).removeprefix("application_")[:200],
        name="",
        user=sys.intern(str(job.get("user") or "")),
        submit=submit,
        start=start,
        end=end,
        seconds=max(0.0, end - start) if known else None,  # type: ignore[operator]
        state=sys.intern(_STATES.get(state, one_word(state))),
        gpus=sum(map(len, gpus)),
        nodes=max(1, len(gpus)),
        partition=sys.intern(str(job.get("vc") or "")),
    )
