"""Reader of `sacct -P` with a header; `-p` and other separators are read as well.

Columns Partition and Timelimit (or TimelimitRaw) are read where the file has them. Steps are left
out. A job's name, or another text of its user, may hold the separator and line ends.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

from slurm_elastic.simulator.workloads.accounting_row import (
    COLUMNS,
    AccountingRow,
    SacctError,
    epoch_s,
    most_of,
    one_word,
)

_SEPARATORS = ("|", "\t", ";", ",")
#: Columns whose text users write: they may hold the separator.
_USER_TEXTS = ("jobname", "submitline", "comment", "admincomment", "systemcomment", "workdir")
_JOB = re.compile(r"\d+(?:[_+.]\S*)?", re.ASCII)
_ELAPSED = re.compile(r"(?:(\d{1,9})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})(?:\.\d+)?", re.ASCII)
_GPU = re.compile(r"gres/gpu(?::([^=,]+))?=([0-9]+)")
_MOST_LINES = 1000
_TIME_REMEDY = "unset SLURM_TIME_FORMAT when sacct runs"


def separator(header: str) -> str | None:
    """Return what separates the columns of sacct's header; None: it is not sacct's."""
    for mark in _SEPARATORS:
        if {"jobid", "jobidraw"} & set(_columns(header, mark)):
            return mark
    return None


def rows(header: str, lines: Iterator[str], name: str) -> Iterator[AccountingRow]:
    """Yield the jobs of a file.

    Args:
        header: its first line.
        lines: the others.
        name: name of the file, for errors.

    Raises:
        SacctError: a column is missing, or a row is invalid.
    """
    mark = separator(header) or "|"
    columns = _checked(_columns(header, mark), name)
    read_cells = _quoted_cells if mark == "," else _plain_cells
    for location, cells in read_cells(lines, columns, mark, name):
        row = _row(cells, columns, location)
        if row is not None:
            yield row


def _columns(header: str, mark: str) -> list[str]:
    columns = [c.strip().strip('"').lower() for c in header.split(mark)]
    if "jobid" not in columns and "jobidraw" in columns:
        columns[columns.index("jobidraw")] = "jobid"
    return columns


def _checked(columns: list[str], name: str) -> list[str]:
    if "jobid" not in columns:
        raise SacctError(
            f"{name}:1: no header with JobID; write the file with: sacct -aDX -P -o {COLUMNS};"
            " published traces that are read: docs/simulator.md"
        )
    for needed, shown in (
        ({"alloctres", "reqtres"}, "AllocTRES"),
        ({"elapsedraw", "elapsed"}, "ElapsedRaw"),
        ({"submit", "start"}, "Submit"),
    ):
        if not needed & set(columns) and not (
            shown == "ElapsedRaw" and {"start", "end"} <= set(columns)
        ):
            raise SacctError(f"{name}:1: no column {shown}; add it to sacct's -o: {COLUMNS}")
    return columns


def _plain_cells(
    lines: Iterator[str], columns: Sequence[str], mark: str, name: str
) -> Iterator[tuple[str, list[str]]]:
    """Yield each row; lines that are too short are a row together."""
    parts: list[str] = []
    begin = 0
    job_index = columns.index("jobid")

    def cut() -> SacctError:
        cells = " ".join(parts).split(mark)
        return _cut(f"{name}:{begin}", cells, columns)

    for number, line in enumerate(lines, start=2):
        alone = line.split(mark)
        complete = len(alone) >= len(columns)
        if parts and (
            (complete and _JOB.fullmatch(alone[job_index].strip())) or len(parts) > _MOST_LINES
        ):
            raise cut()
        if complete and not parts:
            yield f"{name}:{number}", alone
        elif parts or line.strip():
            begin = begin if parts else number
            parts.append(line)
            cells = " ".join(parts).split(mark)
            if len(cells) >= len(columns):
                yield f"{name}:{begin}", cells
                parts = []
    if parts:
        raise cut()


def _quoted_cells(
    lines: Iterator[str], columns: Sequence[str], mark: str, name: str
) -> Iterator[tuple[str, list[str]]]:
    reader = csv.reader(lines, delimiter=mark)
    begin = 2
    try:
        for cells in reader:
            location, begin = f"{name}:{begin}", reader.line_num + 2
            if len(cells) > len(columns):
                raise SacctError(
                    f"{location}: {len(cells)} cells under {len(columns)} columns: AllocTRES holds"
                    " commas; write the file with sacct -P, which separates columns by |"
                )
            if any(cells) and len(cells) < len(columns):
                raise _cut(location, cells, columns)
            if any(cells):
                yield location, cells
    except csv.Error as error:
        raise SacctError(f"{name}:{begin}: {error}; write the file with sacct -P") from None


def _cut(location: str, cells: Sequence[str], columns: Sequence[str]) -> SacctError:
    job_id = cells[columns.index("jobid")] if len(cells) > columns.index("jobid") else ""
    if job_id and not _JOB.fullmatch(job_id.strip()):
        return _no_job_id(job_id, location)
    return SacctError(
        f"{location}: {len(cells)} cells under {len(columns)} columns; was the file cut or edited?"
    )


def _no_job_id(job_id: str, location: str) -> SacctError:
    return SacctError(f'{location}: "{job_id}" is no job id; was the file cut or edited?')


def _row(cells: list[str], columns: Sequence[str], location: str) -> AccountingRow | None:
    """Return a row; None if it is a step, or the header again."""
    if len(cells) == len(columns):
        return _read(cells, columns, location)
    first_error = None
    for column in _USER_TEXTS:
        if column in columns:
            try:
                return _read(_rejoined(cells, columns, column), columns, location)
            except SacctError as error:
                first_error = first_error or error
    raise first_error or SacctError(
        f"{location}: {len(cells)} cells under {len(columns)} columns; leave out columns with text"
        f" of users: {COLUMNS}"
    )


def _rejoined(cells: list[str], columns: Sequence[str], column: str) -> list[str]:
    """Return the cells of a row, joined again where a text holds the separator."""
    surplus, begin = len(cells) - len(columns), columns.index(column)
    text = "|".join(cells[begin : begin + surplus + 1])
    return [*cells[:begin], text, *cells[begin + surplus + 1 :]]


def _read(cells: Sequence[str], columns: Sequence[str], location: str) -> AccountingRow | None:
    row = dict(zip(columns, (c.strip() for c in cells), strict=True))
    job_id = row["jobid"]
    if job_id.lower() in ("jobid", "jobidraw"):
        return None
    if not _JOB.fullmatch(job_id):
        raise _no_job_id(job_id, location)
    if "." in job_id:
        return None  # a step
    tres = row["alloctres"] if "alloctres" in row else row["reqtres"]
    if tres and "=" not in tres:
        raise SacctError(f'{location}: AllocTRES "{tres}" is invalid: expected e.g. gres/gpu=4')
    submit, start, end = (_time(row.get(key, ""), location) for key in ("submit", "start", "end"))
    seconds = _seconds(row, location)
    if seconds is None and start is not None and end is not None:
        seconds = max(0.0, end - start)
    gpu_type, gpus = most_of(_gpus(tres))
    nodes = row.get("nnodes") or row.get("allocnodes") or ""
    return AccountingRow(
        job_id=job_id,
        name=row.get("jobname", ""),
        user=sys.intern(row.get("user", "")),
        submit=submit,
        start=start,
        end=end,
        seconds=seconds,
        state=sys.intern(one_word(row.get("state", ""))),
        gpu_type=sys.intern(gpu_type),
        gpus=gpus,
        nodes=int(nodes) if nodes.isdecimal() and len(nodes) < 10 else 1,
        partition=sys.intern(row.get("partition", "")),
        limit_s=_limit(row),
    )


def _gpus(tres: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for kind, count in _GPU.findall(tres):
        counts[kind] = counts.get(kind, 0) + (int(count) if len(count) < 10 else 10**9)
    return counts


def _time(text: str, location: str) -> float | None:
    return epoch_s(text, location, _TIME_REMEDY) or None  # 0: never


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
        if not (raw.isdecimal() and raw.isascii() and len(raw) < 19):
            raise SacctError(f'{location}: ElapsedRaw "{raw}" is no number of seconds')
        return float(raw)
    if not text:
        return None
    match = _ELAPSED.fullmatch(text)
    if match is None:
        raise SacctError(f'{location}: Elapsed "{text}" is no time; D-HH:MM:SS is expected')
    return _clock_seconds(match)
