"""Reader of `sacct -P` with a header; `-p` and other separators are read as well.

Columns Partition and Timelimit (or TimelimitRaw) are read where the file has them. Steps are left
out. A job's name, or another text of its user, may hold the separator and line ends.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
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
#: Columns of them that may contain line ends if they are the last column.
_LONG_TEXTS = ("jobname", "submitline", "comment")
_JOB = re.compile(r"\d+(?:[_+.]\S*)?", re.ASCII)
_ELAPSED = re.compile(r"(?:(\d{1,9})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})(?:\.\d+)?", re.ASCII)
_GPU = re.compile(r"gres/gpu(?::([^=,]+))?=([0-9]+)")
_STATE = re.compile(r"[A-Z_]+(?: by \d+)?\+?$|$", re.ASCII)
#: A row of more lines, or with more separators in its texts, is refused.
_MOST_LINES = 1000
_MOST_SEPARATORS = 50
_TIME_REMEDY = "unset SLURM_TIME_FORMAT when sacct runs"


def separator(header: str) -> str | None:
    """Return the separator of the columns of sacct's header; None: it is not sacct's."""
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
    """Yield each row; it has several lines if a text of its user holds line ends."""
    job_index, width = columns.index("jobid"), len(columns)
    row, begin = _Row(mark), 2
    for number, line in enumerate(lines, start=2):
        alone = line.split(mark)
        # The id stands further back where a text before it holds separators.
        ids = alone[job_index : job_index + 1 + max(0, len(alone) - width)]
        begins = any(map(_is_begin, ids))
        complete = len(row.cells) >= width
        # A text goes on in the next line if it is the last column, or of a row with separators.
        open_text = (
            columns[-1] in _LONG_TEXTS
            or len(row.cells) > width
            or (complete and not _is_begin(row.cells[job_index]))
        )
        if row and complete and (begins or not (line.strip() and open_text)):
            yield f"{name}:{begin}", row.cells
            row = _Row(mark)
        elif row and ((begins and len(alone) >= width) or row.lines > _MOST_LINES):
            raise _cut(f"{name}:{begin}", row.cells, columns)
        if not row:
            begin = number
        if row or line.strip():
            row.add(line)
    if row and len(row.cells) < width:
        raise _cut(f"{name}:{begin}", row.cells, columns)
    if row:
        yield f"{name}:{begin}", row.cells


def _is_begin(job_id: str) -> bool:
    return bool(_JOB.fullmatch(job_id.strip())) or job_id.strip().lower().startswith("jobid")


class _Row:
    """Lines of one row, and their cells."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self.lines = 0
        self.cells: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.lines)

    def add(self, line: str) -> None:
        """Add a line; its first cell continues the last one."""
        cells = line.split(self._mark)
        if self.cells:
            self.cells[-1] += f" {cells[0]}"
            cells = cells[1:]
        self.cells += cells
        self.lines += 1


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
    for widths in _divisions(columns, len(cells) - len(columns)):
        rejoined = _rejoined(cells, columns, widths)
        if _is_state(rejoined, columns):
            with contextlib.suppress(SacctError):
                return _read(rejoined, columns, location)
    raise SacctError(
        f"{location}: {len(cells)} cells under {len(columns)} columns; write the file without"
        f" columns that users fill, but JobName: {COLUMNS}"
    )


def _divisions(columns: Sequence[str], surplus: int) -> Iterator[Mapping[str, int]]:
    """Yield how many separators the texts of users may hold: one text, or two."""
    texts = [column for column in _USER_TEXTS if column in columns]
    if surplus > _MOST_SEPARATORS:
        return
    for column in texts:
        yield {column: surplus}
    for one, other in itertools.combinations(texts, 2):
        for count in range(1, surplus):
            yield {one: count, other: surplus - count}


def _rejoined(cells: Sequence[str], columns: Sequence[str], widths: Mapping[str, int]) -> list[str]:
    """Return one cell per column, from a row whose texts hold so many separators."""
    joined, index = [], 0
    for column in columns:
        end = index + 1 + widths.get(column, 0)
        joined.append("|".join(cells[index:end]))
        index = end
    return joined


def _is_state(cells: Sequence[str], columns: Sequence[str]) -> bool:
    """Return whether the cell of the state holds one, if there is a column of it."""
    return "state" not in columns or bool(_STATE.match(cells[columns.index("state")]))


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
            raise SacctError(f'{location}: ElapsedRaw "{raw}" is invalid: expected seconds')
        return float(raw)
    if not text:
        return None
    match = _ELAPSED.fullmatch(text)
    if match is None:
        raise SacctError(f'{location}: Elapsed "{text}" is invalid: expected D-HH:MM:SS')
    return _clock_seconds(match)
