"""Attempts of jobs from sacct, and the changes of their GPUs.

`sacct -D` has one row per run of a job. After a requeue one row ends, and the next begins. A change
in place leaves the job's row as it is: rows of companions, jobs of their own, begin and end.
Each row has the GPUs of its run, and when it began and ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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
#: Resizes and moves take 2 to 4 s; a longer pause means that the job had to wait.
WAITED_S = 8.0
#: What a companion's name has after that of its job.
COMPANION = "+1"
#: Companions that begin or end within this time belong to one change.
_TOGETHER_S = 3.0
#: Command whose output `parse` reads, for all jobs of a cluster that has just been started.
COMMAND = f"SLURM_TIME_FORMAT=%s sacct -a -S now-4hours -D -X -n -P -o {','.join(FIELDS)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One row of sacct, or a part of it in which the job and its companions had the same GPUs.

    Times are epoch seconds, None for Slurm's Unknown and None. `run` counts the rows of a job that
    held GPUs.
    """

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
    run: int = 0

    @property
    def ran(self) -> bool:
        """Whether it held GPUs."""
        return self.start is not None and self.gpus > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Difference between consecutive attempts of a job.

    Attributes:
        kind: grow, shrink, move, preempt (and resume), or restart on the same nodes.
        waited_s: seconds between the two.
        preempted_by: job that used its GPUs between the two, from start to end; "" if none.
        in_place: whether the job went on running.
    """

    kind: str
    name: str
    before: Attempt
    after: Attempt
    waited_s: float
    preempted_by: str = ""
    in_place: bool = False


def parse(text: str) -> dict[str, tuple[Attempt, ...]]:
    """Return the attempts of each job, and of its companions, in order, by name."""
    attempts: dict[str, list[Attempt]] = {}
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
        attempts.setdefault(attempt.name, []).append(attempt)
    return {
        name: tuple(
            replace(attempt, run=run)
            for run, attempt in enumerate(
                sorted(rows, key=lambda a: (a.start is None, a.start or 0.0))
            )
        )
        for name, rows in attempts.items()
    }


def with_companions(
    attempts: Mapping[str, Sequence[Attempt]], names: Collection[str]
) -> dict[str, tuple[Attempt, ...]]:
    """Return the attempts of these jobs, each cut where companions began or ended."""
    return {
        name: tuple(
            part
            for attempt in attempts.get(name, ())
            for part in _parts(attempt, attempts.get(name + COMPANION, ()))
        )
        for name in names
        if name in attempts
    }


def _parts(attempt: Attempt, companions: Sequence[Attempt]) -> list[Attempt]:
    """Return the parts of an attempt with the GPUs of the companions that ran at that time."""
    if not attempt.ran or attempt.start is None or attempt.end is None:
        return [attempt]
    own = [c for c in companions if c.ran and attempt.start <= (c.start or 0.0) < attempt.end]
    cuts = [attempt.start]
    for at in sorted({t for c in own for t in (c.start, c.end) if t is not None}):
        if at - cuts[-1] > _TOGETHER_S and attempt.end - at > _TOGETHER_S:
            cuts.append(at)
    parts = []
    for begin, end in pairwise([*cuts, attempt.end]):
        middle = (begin + end) / 2
        here = [c for c in own if (c.start or 0.0) <= middle < (c.end or attempt.end)]
        nodes = {node for held in (attempt, *here) for node in held.nodes}
        gpus = attempt.gpus + sum(c.gpus for c in here)
        parts.append(replace(attempt, start=begin, end=end, gpus=gpus, nodes=tuple(sorted(nodes))))
    return parts


def changes(jobs: Mapping[str, Sequence[Attempt]]) -> tuple[Change, ...]:
    """Return the changes of all jobs, as of `with_companions`, in order of time."""
    all_changes = []
    for name, attempts in jobs.items():
        ran = [a for a in attempts if a.ran]
        for before, after in pairwise(ran):
            assert after.start is not None
            waited = after.start - (before.end or after.start)
            preempted_by = _preempted_by(jobs, before, after) if waited >= WAITED_S else ""
            all_changes.append(
                Change(
                    kind="preempt" if preempted_by else _kind(before, after),
                    name=name,
                    before=before,
                    after=after,
                    waited_s=waited,
                    preempted_by=preempted_by,
                    in_place=before.run == after.run,
                )
            )
    return tuple(sorted(all_changes, key=lambda c: c.after.start or 0.0))


def _kind(before: Attempt, after: Attempt) -> str:
    if after.gpu_type != before.gpu_type:
        return "move"
    if after.gpus != before.gpus:
        return "grow" if after.gpus > before.gpus else "shrink"
    return "restart" if after.nodes == before.nodes else "move"


def _preempted_by(jobs: Mapping[str, Sequence[Attempt]], before: Attempt, after: Attempt) -> str:
    """Return the job that ran, while this one waited, on nodes that it had left; "" if none."""
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
