"""The integer program of a round for PuLP: reference of tests, and export.

Independent of `assignment_milp.solve`, and not used in rounds. PuLP belongs to the extra `dev`; it
is imported when a function of this module is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slurm_elastic.policies.milp.assignment_milp import AssignmentProgram, Ints


def to_pulp(program: AssignmentProgram) -> tuple[Any, dict[tuple[int, int], Any]]:
    """Return the program as `pulp.LpProblem`, and its variables by (job, configuration).

    Raises:
        ModuleNotFoundError: PuLP is not installed.
    """
    pulp = _pulp()
    problem = pulp.LpProblem("round", pulp.LpMinimize)
    jobs, configs = program.cost.shape
    variables = {
        (j, c): problem.add_variable(f"x_{j}_{c}", cat=pulp.LpBinary)
        for j in range(jobs)
        for c in range(configs)
        if program.valid[j, c] or c == program.fixed[j]
    }
    problem += pulp.lpSum(
        (float(program.cost[j, c]) - program.not_running) * x for (j, c), x in variables.items()
    ) + (program.not_running * jobs)
    of_job: dict[int, list[Any]] = {}
    of_type: dict[int, list[Any]] = {}
    for (j, c), x in variables.items():
        of_job.setdefault(j, []).append(x)
        of_type.setdefault(int(program.config_type[c]), []).append(int(program.config_gpus[c]) * x)
    for j, terms in of_job.items():
        problem += pulp.lpSum(terms) <= 1, f"job_{j}"
    for kind, terms in of_type.items():
        problem += pulp.lpSum(terms) <= int(program.capacity[kind]), f"type_{kind}"
    for j, held in enumerate(program.fixed.tolist()):
        if held >= 0:
            problem += variables[j, held] == 1, f"fixed_{j}"
    return problem, variables


def solve_reference(
    program: AssignmentProgram, *, time_limit_s: float | None = None, gap: float = 0.0
) -> tuple[Ints | None, float]:
    """Return choice [J] and objective of CBC; (None, nan) when it did not prove the gap.

    Fixings that do not fit make this program infeasible; `assignment_milp.solve` relaxes them.

    Raises:
        ModuleNotFoundError: PuLP is not installed.
    """
    pulp = _pulp()
    problem, variables = to_pulp(program)
    # The CBC that PuLP brings along: `PULP_CBC_CMD` itself is deprecated.
    bundled = pulp.PULP_CBC_CMD.pulp_cbc_path
    solver = pulp.COIN_CMD(path=bundled, msg=False, timeLimit=time_limit_s, gapRel=gap, threads=1)
    problem.solve(solver)
    if problem.sol_status != pulp.LpSolutionOptimal:
        return None, float("nan")
    choice = np.full(len(program.cost), -1, dtype=np.int64)
    for (j, c), x in variables.items():
        if (x.value() or 0.0) > 0.5:
            choice[j] = c
    return choice, program.objective(choice)


def export(program: AssignmentProgram, path: Path) -> None:
    """Write the program in the LP format, for any other solver.

    Raises:
        ModuleNotFoundError: PuLP is not installed.
        OSError: the file cannot be written.
    """
    problem, _ = to_pulp(program)
    problem.writeLP(str(path))


def _pulp() -> Any:
    try:
        import pulp  # noqa: PLC0415  # of the extra `dev`; rounds do without
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "PuLP is not installed; it writes the reference program: pip install slurm-elastic[dev]"
        ) from None
    return pulp
