"""Runs of jobs in Slurm's accounting: when they began and ended, and which GPUs they held.

One run is one row of `sacct -D`. The only text column read is AdminComment, which users cannot
change: a job's name could forge rows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.core.submission import SubmissionError, parse_admin_comment
from slurm_elastic.slurm.release_rules import Release
from slurm_elastic.slurm.scontrol import SlurmUnreachableError
from slurm_elastic.slurm.slurm_command import installed_release, output

#: Columns without text of users, then AdminComment.
_COLUMNS = (
    *("JobIDRaw", "JobID", "User", "Restarts", "Start", "End", "ElapsedRaw", "AllocTRES"),
    "AdminComment",
)


class AccountingError(SlurmElasticError):
    """Failure of sacct; the message says why, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountedRun:
    """One run of a job.

    Attributes:
        run: restart count; None: sacct does not show it (before 24.11).
        start, end: epoch s, whole; end None: it still runs.
        seconds: run time without suspended time, as Slurm counts it.
        gpus: GPUs held; None: AllocTRES has none (`AccountingStorageTRES=gres/gpu` is missing).
        gpu_type: "" if AllocTRES does not name it.
        submitted: `at` of its AdminComment; None: not an elastic job.
    """

    job_id: int
    display_id: str
    user: str
    run: int | None
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
    try:
        shown = columns(installed_release(command="sacct", timeout_s=timeout_s))
        text = output(
            *("sacct", *user_options, "-DXPn", f"-S{start}", "-Enow"),
            f"--format={','.join(shown)}",
            timeout_s=timeout_s,
            shown="sacct",
        )
    except SlurmUnreachableError as error:
        raise AccountingError(str(error)) from None
    return attributed(parse(text.decode(errors="replace"), shown))


def columns(release: Release) -> tuple[str, ...]:
    """Return the columns that are asked of a release's sacct."""
    return tuple(c for c in _COLUMNS if c != "Restarts" or release.accounts_restarts)


def parse(text: str, shown: Sequence[str] = _COLUMNS) -> Iterator[AccountedRun]:
    """Yield the rows of sacct that have an allocation; rows that cannot be read are left out.

    >>> row = "7|7|alice|1|100|110|10|cpu=4,gres/gpu:a100=2,gres/gpu=2|"
    >>> [(r.run, r.seconds, r.gpus, r.gpu_type) for r in parse(row)]
    [(1, 10, 2, 'a100')]

    Args:
        text: rows of sacct.
        shown: their columns.
    """
    for line in text.splitlines():
        values = line.split("|", len(shown) - 1)
        if len(values) != len(shown):
            continue
        fields = dict(zip(shown, values, strict=True))
        numbers = [fields[c] for c in ("JobIDRaw", "Restarts", "Start", "ElapsedRaw") if c in shown]
        if not all(number.isdigit() for number in numbers):
            continue  # it is forged, or never started
        counts = dict(part.partition("=")[::2] for part in fields["AllocTRES"].split(","))
        types = [k.partition(":")[2] for k in counts if k.startswith("gres/gpu:")]
        held = counts.get("gres/gpu", "")
        yield AccountedRun(
            job_id=int(fields["JobIDRaw"]),
            display_id=fields["JobID"],
            user=fields["User"],
            run=int(fields["Restarts"]) if "Restarts" in fields else None,
            start=int(fields["Start"]),
            end=int(fields["End"]) if fields["End"].isdigit() else None,
            seconds=int(fields["ElapsedRaw"]),
            gpus=int(held) if held.isdigit() else None,
            gpu_type=types[0] if len(types) == 1 else "",
            submitted=_submitted(fields["AdminComment"]),
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
