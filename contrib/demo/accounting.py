"""What sacct says: every attempt of every job, and how consecutive attempts differ.

`sacct -D` keeps one row per run of a job. A resize or a move is a requeue, so
it shows as the end of one row and the beginning of the next; the rows tell
which GPUs each run had, from when to when.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from slurm_elastic.core.nodelist import expand

FIELDS = (
    "JobIDRaw",
    "JobName",
    "User",
    "State",
    "ExitCode",
    "Submit",
    "Start",
    "End",
    "AllocTRES",
    "NodeList",
    "Suspended",
)
#: Resizes and moves take 2 to 4 s; a job that had to wait, waited longer than this.
WAITED_S = 8.0


def command(ids: Iterable[int]) -> str:
    """Prints what `parse` reads."""
    jobs = ",".join(str(i) for i in ids)
    return f"SLURM_TIME_FORMAT=%s sacct -D -X -n -P -j {jobs} -o {','.join(FIELDS)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One row; times in epoch seconds, None where Slurm says Unknown or None."""

    job_id: int
    name: str
    user: str
    state: str
    exit_code: str
    submit: float
    start: float | None
    end: float | None
    gpu_type: str
    gpus: int
    nodes: tuple[str, ...]
    suspended: bool

    @property
    def ran(self) -> bool:
        """Whether it ever held GPUs."""
        return self.start is not None and self.gpus > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From one attempt to the next.

    Attributes:
        kind: grow, shrink, move, preempt (and resume), or restart: the same place again.
        waited_s: between the two.
        meanwhile: of a preemption: who had its GPUs, from that job's beginning to its end.
    """

    kind: str
    name: str
    before: Attempt
    after: Attempt
    waited_s: float
    meanwhile: str = ""


def parse(text: str) -> dict[str, tuple[Attempt, ...]]:
    """Attempts by job name, in their order."""
    found: dict[str, list[Attempt]] = {}
    for line in text.splitlines():
        row = dict(zip(FIELDS, line.split("|"), strict=True))
        tres = dict(part.split("=") for part in row["AllocTRES"].split(",") if "=" in part)
        types = [k.partition(":")[2] for k in tres if k.startswith("gres/gpu:")]
        start = _time(row["Start"])
        attempt = Attempt(
            job_id=int(row["JobIDRaw"]),
            name=row["JobName"],
            user=row["User"],
            state=row["State"].split()[0],
            exit_code=row["ExitCode"],
            submit=_time(row["Submit"]) or 0.0,
            start=start,
            end=_time(row["End"]),
            gpu_type=types[0] if types else "",
            gpus=int(tres.get("gres/gpu", 0)),
            nodes=expand(row["NodeList"]) if start is not None and tres else (),
            suspended=row["Suspended"].strip("0:") != "",
        )
        found.setdefault(attempt.name, []).append(attempt)
    return {
        name: tuple(sorted(rows, key=lambda a: (a.start is None, a.start or 0.0)))
        for name, rows in found.items()
    }


def changes(jobs: Mapping[str, Sequence[Attempt]]) -> tuple[Change, ...]:
    """All changes of all jobs, in the order of time."""
    found = []
    for name, attempts in jobs.items():
        ran = [a for a in attempts if a.ran]
        for before, after in pairwise(ran):
            assert after.start is not None
            waited = after.start - (before.end or after.start)
            meanwhile = _took_over(jobs, before, after) if waited >= WAITED_S else ""
            found.append(
                Change(
                    kind="preempt" if meanwhile else _kind(before, after),
                    name=name,
                    before=before,
                    after=after,
                    waited_s=waited,
                    meanwhile=meanwhile,
                )
            )
    return tuple(sorted(found, key=lambda c: c.after.start or 0.0))


def _kind(before: Attempt, after: Attempt) -> str:
    if after.gpu_type != before.gpu_type:
        return "move"
    if after.gpus != before.gpus:
        return "grow" if after.gpus > before.gpus else "shrink"
    return "restart" if after.nodes == before.nodes else "move"


def _took_over(jobs: Mapping[str, Sequence[Attempt]], before: Attempt, after: Attempt) -> str:
    """Who ran from beginning to end, while a job waited, on nodes that it had left; or ""."""
    for name, attempts in jobs.items():
        for other in attempts:
            if name == before.name or not other.ran or other.start is None:
                continue
            inside = (before.end or 0.0) <= other.start and (other.end or 0.0) <= (after.start or 0)
            if inside and other.end and set(other.nodes) & set(before.nodes):
                return name
    return ""


def _time(text: str) -> float | None:
    return float(text) if text.isdecimal() else None
