"""What Slurm's accounting says of runs: when they began and ended, and what they held.

One run is one row of `sacct -D`. Of what users write only AdminComment is read, which they cannot
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
    """sacct gave no answer; the text says why, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountedRun:
    """One run of a job.

    Attributes:
        run: restart count.
        start, end: epoch s, whole; end None: it still runs.
        seconds: between them without the time it was suspended, as Slurm counts it.
        gpus: that it held; None: AllocTRES has none (`AccountingStorageTRES=gres/gpu` is missing).
        gpu_type: "" where AllocTRES does not say.
        submitted: `at` of its AdminComment; None: it is not ours.
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
    """Runs that held something after `since` (epoch s).

    Args:
        since: the earliest end.
        users: only theirs; (): everybody's.
        mine: only the caller's own.
        timeout_s: for sacct.

    Raises:
        AccountingError: sacct failed.
    """
    whose = () if mine else ("-u", ",".join(users)) if users else ("-a",)
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))  # epoch s it does not take
    command = ("sacct", *whose, "-DXPn", f"-S{start}", "-Enow", f"--format={_COLUMNS}")
    try:
        done = subprocess.run(
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
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise AccountingError(f"sacct: {said or f'exit code {done.returncode}'}")
    return attributed(parse(done.stdout.decode(errors="replace")))


def parse(text: str) -> Iterator[AccountedRun]:
    """Rows of sacct with an allocation; what makes no sense is left out.

    >>> row = "7|7|alice|1|100|110|10|cpu=4,gres/gpu:a100=2,gres/gpu=2|"
    >>> [(r.run, r.seconds, r.gpus, r.gpu_type) for r in parse(row)]
    [(1, 10, 2, 'a100')]
    """
    for line in text.splitlines():
        words = line.split("|", 8)
        if len(words) != 9 or not (words[0].isdigit() and words[3].isdigit()):
            continue
        number, display, user, restarts, start, end, elapsed, tres, admin = words
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


def attributed(found: Iterable[AccountedRun]) -> list[AccountedRun]:
    """With `submitted` of each job on all its rows: Slurm forgets AdminComment on some."""
    rows = list(found)
    told = {r.job_id: r.submitted for r in rows if r.submitted is not None}
    return [dataclasses.replace(r, submitted=told.get(r.job_id)) for r in rows]


def _submitted(admin: str) -> int | None:
    try:
        found = parse_admin_comment(admin)
    except SubmissionError:
        return None
    return int(found.submitted) if found else None
