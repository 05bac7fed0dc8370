"""Reader of a site's accounting: `sacct --json`, or `sacct -P` with a header.

Columns Partition and Timelimit (or TimelimitRaw) are read where the file has them.

There is one `PastJob` per job or array task: a requeued job has a row for each run (with
`sacct -D`), of which the earliest submission and all running time count.
Jobs without GPUs are left out and counted.

    sacct -aDX -S 2026-10-01 -E 2026-11-01 -P \
        -o JobID,JobName,User,Submit,Start,End,ElapsedRaw,State,AllocTRES,NNodes > october.txt
"""

from __future__ import annotations

import csv
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_elastic.core.errors import InvalidInputError

#: Columns that `sacct -P` must print.
COLUMNS = "JobID,JobName,User,Submit,Start,End,ElapsedRaw,State,AllocTRES,NNodes"
#: Runs shorter than this (s) trained nothing.
LEAST_S = 60.0

_ENDED_WELL = "COMPLETED"
_JOB = re.compile(r"(\d+(?:_\d+)?)")
_ELAPSED = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?")
_GPU = re.compile(r"gres/gpu(?::([^=,]+))?=(\d+)")


class SacctError(InvalidInputError):
    """The file is invalid; the message names file, line and remedy."""

    def __init__(self, text: str) -> None:
        # The message quotes the file, whose lines may have any length.
        super().__init__(text if len(text) <= 500 else f"{text[:500]}...")


@dataclass(frozen=True, slots=True)
class PastRun:
    """One run of a job: `seconds` on `gpus` GPUs of a type ("" if untyped) from `start` on."""

    start: float
    seconds: float
    gpu_type: str
    gpus: int
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PastJob:
    """A job of the past, with all its runs.

    Attributes:
        job_id: id as users type it (`4711_3`).
        submit: epoch seconds of its submission.
        end: epoch seconds of the end of its last run.
        runs: runs in order, at least one.
        state: state of its last run.
        partition: "": the file does not name it.
        limit_s: time limit of its last run; None: unlimited, or the file does not name it.
    """

    job_id: str
    name: str
    user: str
    submit: float
    end: float
    runs: tuple[PastRun, ...]
    state: str = _ENDED_WELL
    partition: str = ""
    limit_s: float | None = None

    @property
    def seconds(self) -> float:
        """Running time over all runs."""
        return sum(r.seconds for r in self.runs)

    @property
    def main(self) -> PastRun:
        """Longest run: its size counts as the requested one."""
        return max(self.runs, key=lambda r: r.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountingTrace:
    """Jobs of one accounting file.

    Attributes:
        jobs: jobs in order of submission.
        left_out: number of jobs left out, by reason.
        notes: number of other remarkable jobs, by remark.
    """

    jobs: tuple[PastJob, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)

    def summary(self) -> str:
        """Return one line that sums up the file."""
        text = f"{len(self.jobs)} GPU jobs taken"
        if self.left_out:
            parts = ", ".join(f"{n} {why}" for why, n in sorted(self.left_out.items()))
            text += f"; left out: {parts}"
        if self.notes:
            text += "; " + ", ".join(f"{n} {what}" for what, n in sorted(self.notes.items()))
        return text


@dataclass(frozen=True, slots=True)
class _Row:
    job_id: str
    name: str
    user: str
    submit: float | None
    start: float | None
    end: float | None
    seconds: float | None
    state: str
    tres: str
    nodes: int
    partition: str
    limit_s: float | None


def read(path: Path, *, completed_only: bool = False, least_s: float = LEAST_S) -> AccountingTrace:
    """Read a file.

    Args:
        path: output of `sacct --json` or `sacct -P`.
        completed_only: leave out jobs that failed, were cancelled or ran out of time; else their
            running time counts.
        least_s: leave out jobs that ran for less in all.

    Raises:
        SacctError: unreadable, neither form, or no GPU job in it.
    """
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise SacctError(f"{path}: {error.strerror}") from None
    if not text.strip():
        raise SacctError(f"{path.name}: is empty; write it with: sacct -aDX -P -o {COLUMNS}")
    rows = _from_json(text, path.name) if text.lstrip()[0] in "{[" else _from_text(text, path.name)
    past = _past(rows, completed_only=completed_only, least_s=least_s)
    if not past.jobs:
        raise SacctError(f"{path.name}: has no GPU job that ran ({past.summary()})")
    return past


def _past(rows: Iterable[_Row], *, completed_only: bool, least_s: float) -> AccountingTrace:
    lives: dict[str, list[_Row]] = {}
    for row in rows:
        lives.setdefault(row.job_id, []).append(row)
    jobs: list[PastJob] = []
    left_out: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    for life in lives.values():
        job = _job(life, completed_only=completed_only, least_s=least_s)
        if isinstance(job, str):
            left_out[job] += 1
            continue
        jobs.append(job)
        if len(job.runs) > 1:
            notes["requeued (all their runs count)"] += 1
        if job.state == "RUNNING":
            notes["still running (as far as they are)"] += 1
        elif job.state != _ENDED_WELL:
            notes["that failed, timed out or were cancelled (as far as they came)"] += 1
    jobs.sort(key=lambda j: (j.submit, j.job_id))
    return AccountingTrace(jobs=tuple(jobs), left_out=dict(left_out), notes=dict(notes))


def _job(life: list[_Row], *, completed_only: bool, least_s: float) -> PastJob | str:
    """Return one job, or the reason why it is left out."""
    runs = sorted((r for r in map(_run, life) if r is not None), key=lambda r: r.start)
    last = max(life, key=lambda r: (r.start or 0.0, r.end or 0.0))
    if "+" in life[0].job_id:
        return "heterogeneous jobs"
    if not runs:
        ran = any(r.seconds for r in life)
        return "without GPUs" if ran else "never started"
    submit = min((r.submit for r in life if r.submit is not None), default=runs[0].start)
    job = PastJob(
        job_id=life[0].job_id,
        name=life[0].name or "job",
        user=life[0].user,
        submit=min(submit, runs[0].start),
        end=runs[-1].start + runs[-1].seconds,
        runs=tuple(runs),
        state=last.state,
        partition=last.partition,
        limit_s=last.limit_s,
    )
    if completed_only and job.state != _ENDED_WELL:
        return "not completed"
    if job.seconds < least_s:
        return f"shorter than {least_s:g} s"
    return job


def _run(row: _Row) -> PastRun | None:
    kinds: dict[str, int] = {}
    for kind, count in _GPU.findall(row.tres):
        kinds[kind] = kinds.get(kind, 0) + int(count)
    typed = {k: n for k, n in kinds.items() if k and n}
    total = max(kinds.get("", 0), sum(typed.values()))
    start = row.start if row.start is not None else row.submit
    if not total or not row.seconds or start is None:
        return None
    # A job with GPUs of several types counts as one of the type it has most of.
    gpu_type = max(typed, key=lambda k: typed[k]) if typed else ""
    return PastRun(start, row.seconds, gpu_type, total, max(1, row.nodes))


def _from_text(text: str, name: str) -> Iterator[_Row]:
    lines = text.splitlines()
    header = [c.strip().lower() for c in lines[0].split("|")]
    if "jobid" not in header:
        raise SacctError(
            f"{name}:1: no header with JobID; write the file with: sacct -aDX -P -o {COLUMNS}"
        )
    if not {"alloctres", "reqtres"} & set(header):
        raise SacctError(f"{name}:1: no column AllocTRES; add it to sacct's -o: {COLUMNS}")
    if not {"elapsedraw", "elapsed"} & set(header) and not {"start", "end"} <= set(header):
        raise SacctError(f"{name}:1: no column ElapsedRaw; add it to sacct's -o: {COLUMNS}")
    if not {"submit", "start"} & set(header):
        raise SacctError(f"{name}:1: no column Submit; add it to sacct's -o: {COLUMNS}")
    for number, cells in enumerate(csv.reader(lines, delimiter="|", quoting=csv.QUOTE_NONE), 1):
        if number == 1 or not any(cells) or cells[0].strip().lower() == "jobid":
            continue
        row = dict(zip(header, (c.strip() for c in _rejoined(cells, header)), strict=False))
        if "." in row["jobid"]:
            continue  # a step
        yield _text_row(row, f"{name}:{number}")


def _rejoined(cells: list[str], header: list[str]) -> list[str]:
    """Return the cells of a row, joined again where the job's name holds the separator."""
    surplus = len(cells) - len(header)
    if surplus <= 0 or "jobname" not in header:
        return cells
    name_index = header.index("jobname")
    name = "|".join(cells[name_index : name_index + surplus + 1])
    return [*cells[:name_index], name, *cells[name_index + surplus + 1 :]]


def _text_row(row: Mapping[str, str], location: str) -> _Row:
    job_id = row["jobid"]
    if not _JOB.match(job_id):
        raise SacctError(f'{location}: "{job_id}" is no job id; was the file cut or edited?')
    start, end = (_time(row.get(key, ""), location) for key in ("start", "end"))
    seconds = _seconds(row, location)
    if seconds is None and start is not None and end is not None:
        seconds = max(0.0, end - start)
    nodes = row.get("nnodes") or row.get("allocnodes") or ""
    return _Row(
        job_id=job_id,
        name=row.get("jobname", ""),
        user=row.get("user", ""),
        submit=_time(row.get("submit", ""), location),
        start=start,
        end=end,
        seconds=seconds,
        state=_word(row.get("state", "")),
        tres=row.get("alloctres") or "",
        nodes=int(nodes) if nodes.isdecimal() and len(nodes) < 10 else 1,
        partition=row.get("partition", ""),
        limit_s=_limit(row),
    )


def _limit(row: Mapping[str, str]) -> float | None:
    """Return the time limit in seconds; None: there is none."""
    minutes, text = row.get("timelimitraw", ""), row.get("timelimit", "")
    if minutes.isdecimal() and len(minutes) < 12:
        return float(minutes) * 60 or None
    match = _ELAPSED.fullmatch(text)
    return _clock_seconds(match) or None if match else None


def _clock_seconds(match: re.Match[str]) -> float:
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _seconds(row: Mapping[str, str], location: str) -> float | None:
    raw, text = row.get("elapsedraw", ""), row.get("elapsed", "")
    if raw:
        if not raw.isdecimal():
            raise SacctError(f'{location}: ElapsedRaw "{raw}" is no number of seconds')
        return float(raw)
    if not text:
        return None
    match = _ELAPSED.fullmatch(text)
    if match is None:
        raise SacctError(f'{location}: Elapsed "{text}" is no time; D-HH:MM:SS is expected')
    return _clock_seconds(match)


def _time(text: str, location: str) -> float | None:
    if text in ("", "Unknown", "None", "N/A"):
        return None
    if text.isdecimal():  # SLURM_TIME_FORMAT=%s
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        raise SacctError(
            f'{location}: "{text}" is no time; unset SLURM_TIME_FORMAT when sacct runs'
        ) from None


def _from_json(text: str, name: str) -> Iterator[_Row]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise SacctError(f"{name}:{error.lineno}: not JSON ({error.msg}); was it cut?") from None
    except (ValueError, RecursionError) as error:  # absurd numbers, absurd depth
        raise SacctError(f"{name}: cannot be read as JSON: {error}") from None
    jobs = data.get("jobs") if isinstance(data, dict) else None
    if not isinstance(jobs, list):
        raise SacctError(f'{name}: no list "jobs"; write the file with: sacct -aD --json')
    for number, job in enumerate(jobs, 1):
        if not isinstance(job, dict) or not isinstance(job.get("job_id"), int):
            raise SacctError(f"{name}: job {number} has no job_id; write it with: sacct -aD --json")
        yield _json_row(job)


def _json_row(job: Mapping[str, Any]) -> _Row:
    times = _mapping(job.get("time"))
    array = _mapping(job.get("array"))
    task = _number(array.get("task_id"))
    master = _number(array.get("job_id"))
    job_id = f"{master:g}_{task:g}" if master and task is not None else str(job["job_id"])
    if _number(_mapping(job.get("het")).get("job_id")):
        job_id += "+"
    state = _mapping(job.get("state")).get("current", job.get("state"))
    if isinstance(state, list):
        state = state[0] if state else ""
    start = _number(times.get("start")) or None
    tres = _mapping(job.get("tres"))
    nodes = _number(job.get("allocation_nodes"))
    return _Row(
        job_id=job_id,
        name=str(job.get("name") or ""),
        user=str(job.get("user") or ""),
        submit=_number(times.get("submission")) or None,
        start=start,
        end=_number(times.get("end")) or None,
        seconds=_number(times.get("elapsed")),
        state=_word(str(state or "")),
        tres=_tres(tres.get("allocated")),
        nodes=int(nodes or 1),
        partition=str(job.get("partition") or ""),
        limit_s=(_number(times.get("limit")) or 0.0) * 60 or None,
    )


def _tres(items: Any) -> str:
    """Return the list of `--json` in the form of AllocTRES."""
    parts = []
    for item in items if isinstance(items, list) else ():
        entry = _mapping(item)
        count = _number(entry.get("count"))
        if entry.get("type") == "gres" and count:
            parts.append(f"gres/{entry.get('name')}={count:.0f}")
    return ",".join(parts)


def _word(state: str) -> str:
    """Return a state without its details: `CANCELLED by 1000` is CANCELLED; "" is a failure."""
    return next(iter(state.split()), _ENDED_WELL)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    """Return a number from 0 on, also from {"set": true, "number": 3}; None if there is none."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set", True) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value < 1e18 else None
