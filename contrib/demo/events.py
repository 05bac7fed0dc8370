"""Lines that describe how the jobs changed between two views."""

from __future__ import annotations

from collections.abc import Iterator

from contrib.demo.cluster_view import ClusterView, VisibleJob
from slurm_elastic.core.nodelist import fold


def events(old_view: ClusterView, new_view: ClusterView) -> Iterator[str]:
    """Yield one line per job that started, stopped, waits or ended."""
    for name, job in new_view.jobs.items():
        old = old_view.jobs.get(name)
        if old is None or (old.state, old.run) != (job.state, job.run):
            yield from _changes(old, job)
        elif old.ranks and job.ranks not in (0, old.ranks):
            yield f"{job.name} has {job.ranks} ranks without a stop, at step {job.step}"


def held(job: VisibleJob) -> str:
    """Return `4 a100 on g[01-02]`."""
    return f"{job.gpu_count} {job.gpu_type} on {fold(job.gpus)}"


def _changes(old: VisibleJob | None, job: VisibleJob) -> Iterator[str]:
    if old and job.run > old.run and old.state == "RUNNING":
        yield f"{job.name} has saved step {job.step} and left {held(old)}"
    if job.state == "RUNNING":
        continues = job.directive and job.run
        yield f"{job.name} {'goes on' if continues else 'runs'} with {held(job)}"
    elif job.state == "PENDING" and old is None and not job.directive:
        yield f"{job.name} waits ({job.reason})"
    elif job.ended and (old is None or not old.ended):
        yield f"{job.name} is over: {job.state.lower()}"
