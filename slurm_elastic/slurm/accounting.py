"""Runs of jobs in Slurm's accounting: when they began and ended, and which GPUs they held.

One run is one row of `sacct -D`. The only text column read is AdminComment, which users cannot
change: a job's name could forge rows.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.core.submission import SubmissionError, parse_admin_comment

_COLUMNS = "JobIDRaw,JobID,User,Restarts,Start,End,ElapsedRaw,AllocTRES,AdminComment"


class AccountingError(SlurmElasticError):
    """Failure of sacct; the message says why, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountedRun:
    """One run of a job.

    Attributes:
        run: restart count.
        start, end: epoch s, whole; end None: it still runs.
        seconds: run time without suspended time, as Slurm counts it.
        gpus: GPUs held; None: AllocTRES has none (`AccountingStorageTRES=gres/gpu` is missing).
        gpu_type: "" if AllocTRES does not name it.
        submitted: `at` of its AdminComment; None: not an elastic job.
    """

    job_id: int
    display_id: str
    user: str
    run: int
    start: int
    end: int | None
    seconds: int
    gpus: int | None
    gpu_type: str
    submitted: int | None


def runs(
    since: float, *, users: Collection[str] = (), mine: bool = False, timeout_s: float = 60.0
) -> list[AccountedRun]:
    """Return the runs that held resources after `since` (epoch s).

    Args:
        since: the earliest end.
        users: users whose runs are wanted; (): all users.
        mine: only runs of the calling user.
        timeout_s: time for sacct, in seconds.

    Raises:
        AccountingError: sacct failed.
    """
    user_options = () if mine else ("-u", ",".join(users)) if users else ("-a",)
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))  # sacct takes no epoch s
    command = ("sacct", *user_options, "-DXPn", f"-S{start}", "-Enow", f"--format={_COLUMNS}")
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
        )
    except subprocess.TimeoutExpired:
        raise AccountingError(f"sacct: no answer in {timeout_s:g} s") from None
    except OSError as error:
        raise AccountingError(f"sacct: {error.strerror}") from None
    if process.returncode:
        error_text = " ".join(process.stderr.decode(errors="replace").split())
        raise AccountingError(f"sacct: {error_text or f'exit code {process.returncode}'}")
    return attributed(parse(process.stdout.decode(errors="replace")))


def parse(text: str) -> Iterator[AccountedRun]:
    """Yield the rows of sacct that have an allocation; rows that cannot be read are left out.

    >>> row = "7|7|alice|1|100|110|10|cpu=4,gres/gpu:a100=2,gres/gpu=2|"
    >>> [(r.run, r.seconds, r.gpus, r.gpu_type) for r in parse(row)]
    [(1, 10, 2, 'a100')]
    """
    for line in text.splitlines():
        fields = line.split("|", 8)
        if len(fields) != 9 or not (fields[0].isdigit() and fields[3].isdigit()):
            continue
        number, display, user, restarts, start, end, elapsed, tres, admin = fields
        if not start.isdigit() or not elapsed.isdigit():
            continue  # it never started
        counts = dict(part.partition("=")[::2] for part in tres.split(","))
        types = [k.partition(":")[2] for k in counts if k.startswith("gres/gpu:")]
        held = counts.get("gres/gpu", "")
        yield AccountedRun(
            job_id=int(number),
            display_id=display,
            user=user,
            run=int(restarts),
            start=int(start),
            end=int(end) if end.isdigit() else None,
            seconds=int(elapsed),
            gpus=int(held) if held.isdigit() else None,
            gpu_type=types[0] if len(types) == 1 else "",
            submitted=_submitted(admin),
        )


def attributed(rows: Iterable[AccountedRun]) -> list[AccountedRun]:
    """Return the runs with a job's `submitted` on each: Slurm loses AdminComment on some rows."""
    rows = list(rows)
    submitted = {r.job_id: r.submitted for r in rows if r.submitted is not None}
    return [dataclasses.replace(r, submitted=submitted.get(r.job_id)) for r in rows]


def _submitted(admin: str) -> int | None:
    try:
        submission = parse_admin_comment(admin)
    except SubmissionError:
        return None
    return int(submission.submitted) if submission else None
