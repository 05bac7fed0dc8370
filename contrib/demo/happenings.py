"""What has happened between two views, in words."""

from __future__ import annotations

from collections.abc import Iterator

from contrib.demo.view import Seen, View
from slurm_elastic.core.nodelist import fold


def happenings(before: View, after: View) -> Iterator[str]:
    """One line per thing that an onlooker would remark on."""
    for name, job in after.jobs.items():
        old = before.jobs.get(name)
        if old is None or (old.state, old.run) != (job.state, job.run):
            yield from _news(old, job)


def held(job: Seen) -> str:
    """`4 a100 on g[01-02]`."""
    return f"{job.count} {job.gpu_type} on {fold(job.gpus)}"


def _news(old: Seen | None, job: Seen) -> Iterator[str]:
    if old and job.run > old.run and old.state == "RUNNING":
        yield f"{job.name} has saved step {job.step} and left {held(old)}"
    if job.state == "RUNNING":
        goes_on = job.wants and job.run
        yield f"{job.name} {'goes on' if goes_on else 'runs'} with {held(job)}"
    elif job.state == "PENDING" and old is None and not job.wants:
        yield f"{job.name} waits ({job.reason})"
    elif job.over and (old is None or not old.over):
        yield f"{job.name} is over: {job.state.lower()}"
