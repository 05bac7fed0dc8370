"""Answers about the jobs that stand on the nodes of a job."""

from __future__ import annotations

from slurm_elastic.controller.queries.view import View, Viewer
from slurm_elastic.models.colocation.neighbour_speeds import NeighbourSpeed
from slurm_elastic.rpc.decision_answers import NeighbourRow


def neighbour_rows(view: View, viewer: Viewer, job_id: int) -> list[NeighbourRow]:
    """Return the neighbours of a job, the one that slows it most first.

    Args:
        view: the controller's view.
        viewer: the caller; where PrivateData hides other users' jobs, they have no owner here.
        job_id: a job that the caller may see.
    """
    rows: list[NeighbourRow] = []
    for neighbour in view.neighbours.get(job_id, ()):
        other = view.snapshot.job.get(neighbour.job_id)
        if other is None:
            continue
        rows.append(
            {
                "job_id": other.job_id,
                "display_id": other.display_id,
                "user": other.user if viewer.sees(other.uid) else None,
                "nodes": list(neighbour.nodes),
                "speed": _known(neighbour.speed),
                "error": neighbour.speed.error,
                "measured": neighbour.speed.measured,
                "other_speed": _known(neighbour.other),
                "resource": neighbour.speed.resource or neighbour.other.resource,
                "same_gpu": neighbour.same_gpu,
            }
        )
    return rows


def _known(speed: NeighbourSpeed) -> float | None:
    return speed.speed if speed.measured or speed.modelled else None
