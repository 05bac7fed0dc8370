"""The integer program of the last round, as far as a viewer may see it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurm_elastic.controller.queries.view import NoAnswerError, View, Viewer
from slurm_elastic.policies.milp.assignment_milp import Bools, fixings
from slurm_elastic.policies.milp.round_program import RoundProgram
from slurm_elastic.rpc.program_answers import ProgramAnswer, ProgramJob, ProgramLimit


def program(view: View, viewer: Viewer) -> ProgramAnswer:
    """Return the program; other users' jobs are left out where Slurm hides them.

    The GPUs that these got are then not part of the capacity.

    Raises:
        NoAnswerError: there is none, or it would show what the viewer may not know.
    """
    if not viewer.may_know("nodes", "partitions"):
        raise NoAnswerError("PrivateData hides the cluster's GPUs: ask an operator for the program")
    if view.program is None:
        raise NoAnswerError(
            f"policy {view.policy} has solved no integer program (yet); sia, icefrog and goodput"
            " solve one"
        )
    stated = view.program
    arrays, (fixed, _) = stated.program, fixings(stated.program)
    jobs = view.snapshot.job
    shown = np.array(
        [i in jobs and viewer.sees(jobs[i].uid) for i in stated.job_ids], dtype=np.bool_
    )
    capacity = np.maximum(arrays.capacity, 0) - arrays.used(np.where(shown, -1, stated.choice))
    rows: list[ProgramJob] = []
    for row in np.flatnonzero(shown).tolist():
        job = jobs[stated.job_ids[row]]
        held = int(fixed[row])
        useful = arrays.valid[row] & (arrays.cost[row] < arrays.not_running)
        columns = [held] if held >= 0 else np.flatnonzero(useful).tolist()
        rows.append(
            {
                "job_id": job.job_id,
                "display_id": job.display_id,
                "configurations": columns,
                "costs": [float(arrays.cost[row, c]) for c in columns],
                "fixed": held if held >= 0 else None,
                "chosen": int(stated.choice[row]) if stated.choice[row] >= 0 else None,
            }
        )
    return {
        "not_running": float(arrays.not_running),
        "capacity": {t: int(n) for t, n in zip(stated.types, capacity, strict=True)},
        "configurations": [
            {"gpu_type": stated.types[kind], "nodes": int(nodes), "gpus": int(gpus)}
            for kind, nodes, gpus in zip(
                arrays.config_type.tolist(), stated.nodes, arrays.config_gpus, strict=True
            )
        ],
        "jobs": rows,
        "limits": _limits(stated, shown, rows),
        "partial": not bool(shown.all()),
        "parts_per_gpu": stated.parts,
    }


def _limits(stated: RoundProgram, shown: Bools, rows: Sequence[ProgramJob]) -> list[ProgramLimit]:
    """Return the limits on the jobs that are shown, less what others got."""
    limits: list[ProgramLimit] = []
    hidden_choice = np.where(shown, -1, stated.choice)
    at = np.flatnonzero(shown).tolist()
    for limit in stated.program.limits:
        use_of = dict(zip(limit.jobs.tolist(), limit.use, strict=True))
        uses = [
            [float(use_of[row][c]) for c in job["configurations"]]
            if row in use_of
            else [0.0] * len(job["configurations"])
            for row, job in zip(at, rows, strict=True)
        ]
        if any(map(any, uses)):
            limits.append({"left": limit.left - limit.used(hidden_choice), "uses": uses})
    return limits
