"""Ended GPU jobs in Slurm's accounting, with their names, from which run times are predicted.

Names are written by users and may hold any character, line breaks too. Fields are therefore
separated by a word that is drawn anew for each call, so that no name can forge a row.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from slurm_elastic.slurm.accounting import AccountingError
from slurm_elastic.slurm.scontrol import SlurmUnreachableError
from slurm_elastic.slurm.slurm_command import output

_COLUMNS = (
    *("JobIDRaw", "User", "Partition", "Submit", "Start", "End", "ElapsedRaw", "TimelimitRaw"),
    *("State", "AllocTRES", "JobName"),
)
_DAY_S = 86400.0
_GPUS = re.compile(r"(?:^|,)gres/gpu=(\d+)")
#: Characters of a name that are read.
_MOST_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """One ended run of a GPU job; times in epoch s, `limit_s` None: unlimited."""

    job_id: int
    user: str
    partition: str
    name: str
    submitted: float
    start: float
    end: float
    seconds: float
    gpus: int
    limit_s: float | None
    state: str


def read(*, days: float, most: int, timeout_s: float) -> list[EndedRun]:
    """Return the latest ended runs, oldest first.

    The accounting is asked day by day, the newest first, so that an answer stays small.

    Args:
        days: how far back.
        most: number of runs after which no earlier day is asked for.
        timeout_s: for all calls of sacct together.

    Raises:
        AccountingError: sacct failed.
    """
    until, end = time.monotonic() + timeout_s, time.time()
    runs: dict[tuple[int, float], EndedRun] = {}
    first = end - days * _DAY_S
    while end > first and len(runs) < most:
        start = max(first, end - _DAY_S)
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        for run in _asked(start, end, left_s):
            runs.setdefault((run.job_id, run.start), run)
        end = start
    return sorted(runs.values(), key=lambda r: r.end)[-most:]


def _asked(start: float, end: float, timeout_s: float) -> Iterator[EndedRun]:
    separator = f"\x1f{secrets.token_hex(16)}\x1f"
    shown_start, shown_end = (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(t)) for t in (start, end)
    )
    try:
        text = output(
            *("sacct", "-aDXpn", f"--delimiter={separator}", f"-S{shown_start}", f"-E{shown_end}"),
            f"--format={','.join(_COLUMNS)}",
            timeout_s=timeout_s,
            shown="sacct",
        )
    except SlurmUnreachableError as error:
        raise AccountingError(str(error)) from None
    return parse(text.decode(errors="replace"), separator)


def parse(text: str, separator: str) -> Iterator[EndedRun]:
    r"""Yield the runs of sacct's output that have ended and held GPUs.

    >>> row = ["7", "al", "gpu", "10", "20", "50", "30", "60", "COMPLETED", "gres/gpu=2", "a\n|b"]
    >>> [(r.name, r.seconds, r.gpus) for r in parse("#".join((*row, "\n")), "#")]
    [('a\n|b', 30.0, 2)]

    Args:
        text: every field, the last one of a row too, is followed by the separator.
        separator: of no other text.
    """
    fields = text.split(separator)
    width = len(_COLUMNS)
    for first in range(0, len(fields) - width, width):
        row = dict(zip(_COLUMNS, fields[first : first + width], strict=True))
        run = _run(row)
        if run is not None:
            yield run


def _run(row: dict[str, str]) -> EndedRun | None:
    numbers = [row[c].strip() for c in ("JobIDRaw", "Submit", "Start", "End", "ElapsedRaw")]
    gpus = _GPUS.search(row["AllocTRES"])
    if not all(n.isdigit() and len(n) < 13 for n in numbers) or gpus is None:
        return None  # it never started, still runs, or had no GPUs
    job_id, submitted, start, end, seconds = map(int, numbers)
    limit = row["TimelimitRaw"]
    return EndedRun(
        job_id=job_id,
        user=row["User"],
        partition=row["Partition"],
        name=row["JobName"][:_MOST_NAME],
        submitted=float(submitted),
        start=float(start),
        end=float(end),
        seconds=float(seconds),
        gpus=max(1, int(gpus[1])),
        limit_s=60.0 * int(limit) if limit.isdigit() and len(limit) < 10 else None,
        state=next(iter(row["State"].split()), ""),
    )


def by_job(runs: Iterable[EndedRun]) -> Iterator[list[EndedRun]]:
    """Yield the runs of each job that has ended, in order; requeued ones have several."""
    lives: dict[int, list[EndedRun]] = {}
    for run in sorted(runs, key=lambda r: r.start):
        lives.setdefault(run.job_id, []).append(run)
    for life in lives.values():
        if life[-1].state not in ("REQUEUED", "PENDING", "RUNNING", "SUSPENDED"):
            yield life
