"""Jobs of a site's accounting, or of a published trace.

There is one `PastJob` per job or array task: a requeued job has a row for each run (with
`sacct -D`), of which the earliest submission and all running time count.
Jobs without GPUs are left out and counted.

    sacct -aDX -S 2026-10-01 -E 2026-11-01 -P \
        -o JobID,JobName,User,Submit,Start,End,ElapsedRaw,State,AllocTRES,NNodes > october.txt

The format is recognised by the first line: `sacct_text`, `sacct_json`, `published_traces`.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_elastic.simulator.workloads import (
    input_lines,
    published_traces,
    sacct_json,
    sacct_text,
)
from slurm_elastic.simulator.workloads.accounting_row import (
    COLUMNS,
    ENDED_WELL,
    LONGEST_S,
    MOST_GPUS,
    AccountingRow,
    SacctError,
)

#: Runs shorter than this (s) trained nothing.
LEAST_S = 60.0

#: States of the last run of a job that has not ended; after `REQUEUED` it waits for another run.
_NOT_ENDED = frozenset(
    (
        *("RUNNING", "SUSPENDED", "RESIZING", "COMPLETING", "CONFIGURING", "STOPPED"),
        *("REQUEUED", "PENDING"),
    )
)
#: Two runs of a job may overlap by this (s): times of a day on which clocks change.
_OVERLAP_S = 3700.0
_MOST_SHOWN = 20
_ELSEWHERE = "submitted outside of the period"


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
    state: str = ENDED_WELL
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

    @property
    def ended(self) -> bool:
        """Whether its last run is over."""
        return self.state not in _NOT_ENDED


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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSelection:
    """Which jobs of a file are taken.

    Attributes:
        begin, end: only jobs that were submitted from `begin` on and before `end`; epoch seconds,
            or seconds of a trace.
        partition: only jobs of this partition; None: of all.
        completed_only: leave out jobs that failed, were cancelled or ran out of time; else their
            running time counts.
        least_s: leave out jobs that ran for less in all.
    """

    begin: float | None = None
    end: float | None = None
    partition: str | None = None
    completed_only: bool = False
    least_s: float = LEAST_S


def read(
    path: Path,
    selection: JobSelection | None = None,
    *,
    progress: input_lines.ReadProgress | None = None,
) -> AccountingTrace:
    """Read a file, of which only the jobs of the selection are kept in memory.

    Args:
        path: output of `sacct --json` or `sacct -P`, or a published trace; also with gzip.
        selection: jobs that are taken; None: all.
        progress: called now and then with the part of the file that has been read.

    Raises:
        SacctError: unreadable, of no known form, or no GPU job in it.
    """
    selection = selection or JobSelection()
    try:
        with input_lines.opened(path, progress) as lines:
            lives = _Lives(selection)
            past = lives.trace(_rows(lines, path.name))
    except input_lines.InputFileError as error:
        raise SacctError(str(error)) from None
    if not past.jobs:
        raise SacctError(
            f"{path.name}: has no GPU job that ran ({past.summary()}){_advice(past, lives)}"
        )
    return past


def is_recognised(path: Path) -> bool:
    """Return whether the first line of a file is of accounting or a trace; it may be invalid."""
    try:
        with input_lines.opened(path) as lines:
            first = next((line for line in lines if line.strip("\0 \t")), "")
    except input_lines.InputFileError:
        return False
    return (
        first.lstrip()[:1] in ("{", "[")
        or sacct_text.separator(first) is not None
        or published_traces.table(first) is not None
        or published_traces.is_swf(first)
        or published_traces.is_gavel(first)
    )


def _advice(past: AccountingTrace, lives: _Lives) -> str:
    others = sorted(lives.other_partitions)
    if others == [""]:
        return "; the file names no partitions: add Partition to sacct's -o"
    if others:
        more = ", …" if len(others) == _MOST_SHOWN else ""
        return f"; its partitions: {', '.join(others)}{more}"
    if set(past.left_out) <= {"without GPUs", "never started"} and "without GPUs" in past.left_out:
        return "; sacct shows GPUs if AccountingStorageTRES in slurm.conf has gres/gpu"
    return ""


def _rows(lines: input_lines.InputLines, name: str) -> Iterator[AccountingRow]:
    first = next((line for line in lines if line.strip("\0 \t")), None)
    if first is None:
        raise SacctError(f"{name}: is empty; write it with: sacct -aDX -P -o {COLUMNS}")
    if first.lstrip()[:1] in ("{", "["):
        data = _document(f"{first}\n{lines.rest()}", name)
        if published_traces.is_philly(data):
            return published_traces.philly_rows(data, name)
        return sacct_json.rows(data, name)
    if sacct_text.separator(first) is None:
        table = published_traces.table(first)
        if table is not None:
            return published_traces.table_rows(table, first, lines, name)
        if published_traces.is_swf(first):
            return published_traces.swf_rows(first, lines, name)
        if published_traces.is_gavel(first):
            return published_traces.shockwave_rows(first, lines, name)
    return sacct_text.rows(first, lines, name)


def _document(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SacctError(f"{name}:{error.lineno}: not JSON ({error.msg}); was it cut?") from None
    except (ValueError, RecursionError) as error:  # absurd numbers, absurd depth
        raise SacctError(f"{name}: cannot be read as JSON: {error}") from None


class _Lives:
    """Rows of a file, by job."""

    def __init__(self, selection: JobSelection) -> None:
        self._selection = selection
        self._rows: dict[str, list[AccountingRow]] = {}
        #: Jobs of which no row has GPUs yet, and whether one ran.
        self._without_gpus: dict[str, bool] = {}
        #: Jobs that were submitted before the period.
        self._earlier: set[str] = set()
        #: Some partitions of which no job was chosen.
        self.other_partitions: set[str] = set()
        self._left_out: Counter[str] = Counter()
        self._notes: Counter[str] = Counter()

    def trace(self, rows: Iterable[AccountingRow]) -> AccountingTrace:
        """Return the jobs of all rows."""
        for row in rows:
            self._add(row)
        jobs = []
        for job_id, life in self._rows.items():
            self._without_gpus.pop(job_id, None)
            job = self._job(life)
            if isinstance(job, str):
                self._left_out[job] += 1
            else:
                jobs.append(job)
                self._note(job, life)
        for ran in self._without_gpus.values():
            self._left_out["without GPUs" if ran else "never started"] += 1
        if self._earlier:
            self._left_out[_ELSEWHERE] += len(self._earlier)
        jobs.sort(key=lambda j: (j.submit, j.job_id))
        return AccountingTrace(
            jobs=tuple(jobs), left_out=dict(self._left_out), notes=dict(self._notes)
        )

    def _add(self, row: AccountingRow) -> None:
        selection, job_id = self._selection, row.job_id
        if selection.partition is not None and row.partition != selection.partition:
            self._left_out["of other partitions"] += 1
            if len(self.other_partitions) < _MOST_SHOWN:
                self.other_partitions.add(row.partition)
            return
        submit = row.submit if row.submit is not None else row.start
        if submit is not None:
            if selection.begin is not None and submit < selection.begin:
                self._earlier.add(job_id)
                self._rows.pop(job_id, None)
                return
            late = selection.end is not None and submit >= selection.end
            if late and job_id not in self._rows and job_id not in self._earlier:
                self._left_out[_ELSEWHERE] += 1
                return
        if job_id in self._earlier:
            return
        if row.gpus or "+" in job_id:
            self._rows.setdefault(job_id, []).append(row)
        else:
            self._without_gpus[job_id] = self._without_gpus.get(job_id, False) or bool(row.seconds)

    def _note(self, job: PastJob, life: list[AccountingRow]) -> None:
        if len(job.runs) > 1:
            self._notes["requeued (all their runs count)"] += 1
        if not job.ended:
            self._notes["that have not ended (as far as they came)"] += 1
        elif job.state != ENDED_WELL:
            self._notes["that failed, timed out or were cancelled (as far as they came)"] += 1
        if life[0].note:
            self._notes[life[0].note] += 1

    def _job(self, life: list[AccountingRow]) -> PastJob | str:
        """Return one job, or the reason why it is left out."""
        if "+" in life[0].job_id:
            return "heterogeneous jobs"
        life = self._distinct(life)
        pairs = [(row, run) for row in life if (run := _run(row)) is not None]
        if not pairs:
            return self._without_run(life)
        pairs.sort(key=lambda pair: pair[1].start)
        runs = [run for _, run in pairs]
        if any(r.seconds > LONGEST_S or r.gpus > MOST_GPUS for r in runs):
            return "with an impossible run time or number of GPUs"
        if any(a.start + a.seconds > b.start + _OVERLAP_S for a, b in itertools.pairwise(runs)):
            return "whose runs overlap (jobs of several clusters with one id?)"
        last = max(life, key=lambda r: (r.start or 0.0, r.end or 0.0))
        submit = min((r.submit for r in life if r.submit is not None), default=runs[0].start)
        end = runs[-1].start + runs[-1].seconds
        job = PastJob(
            job_id=life[0].job_id,
            name=life[0].name or "job",
            user=life[0].user,
            submit=min(submit, runs[0].start),
            # Later than its run time says, if it was suspended.
            end=max(end, pairs[-1][0].end or 0.0) if last.state not in _NOT_ENDED else end,
            runs=tuple(runs),
            state=last.state,
            partition=last.partition,
            limit_s=last.limit_s,
        )
        if self._selection.completed_only and job.state != ENDED_WELL:
            return "not completed"
        if job.seconds < self._selection.least_s:
            return self._short
        return job

    @property
    def _short(self) -> str:
        return f"shorter than {self._selection.least_s:g} s"

    def _without_run(self, life: list[AccountingRow]) -> str:
        """Return the reason why a job without any running time is left out."""
        if all(row.start is None for row in life):
            return "never started"
        return self._short if any(row.seconds == 0 for row in life) else "without a run time"

    def _distinct(self, life: list[AccountingRow]) -> list[AccountingRow]:
        """Return the rows of a job, of each run the one that shows it longest.

        Two files of neighbouring months, joined, both hold a job that ran over the turn.
        """
        by_start: dict[tuple[float | None, float | None], AccountingRow] = {}
        for row in life:
            key = (row.start, None if row.start is not None else row.submit)
            other = by_start.get(key)
            if other is None or (row.seconds or 0.0) >= (other.seconds or 0.0):
                by_start[key] = row
        if len(by_start) < len(life):
            self._notes["in the file more than once (counted once)"] += 1
        return list(by_start.values())


def _run(row: AccountingRow) -> PastRun | None:
    start = row.start if row.start is not None else row.submit
    if not row.gpus or not row.seconds or start is None:
        return None
    return PastRun(start, row.seconds, row.gpu_type, row.gpus, max(1, row.nodes))
