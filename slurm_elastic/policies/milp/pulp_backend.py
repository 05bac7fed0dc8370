"""The integer program of a round for PuLP, and the solvers that PuLP can call.

The program is stated independently of `assignment_milp.solve`: it is the reference of tests, and
what `[sia] solver = "pulp:NAME"` solves (program_solver.py). PuLP is the extra `pulp`; it is
imported when a function of this module is called.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np

from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.policies.milp.assignment_milp import AssignmentProgram, Ints

#: Classes of PuLP behind a name, in the order in which they are tried. Any other class of PuLP
#: is found by its own name.
_CLASSES = {
    "CBC": ("COIN_CMD",),
    "CPLEX": ("CPLEX_PY", "CPLEX_CMD"),
    "GLPK": ("GLPK_CMD",),
    "Gurobi": ("GUROBI", "GUROBI_CMD"),
    "HiGHS": ("HiGHS", "HiGHS_CMD"),
    "SCIP": ("SCIP_CMD", "SCIP_PY"),
}
#: A variable above it is 1.
_HALF = 0.5


class SolverUnavailableError(SlurmElasticError):
    """Error: a solver cannot be used on this host; one line without the setting's name."""


class SolverFailedError(SlurmElasticError):
    """Error: a solver gave no usable answer to one program; one line."""


class PulpBackend:
    """One solver behind PuLP.

    Args:
        name: of the solver, in any case: CBC, GLPK, or a class of PuLP.

    Raises:
        SolverUnavailableError: PuLP is not installed, does not know the name, or finds no such
            solver on this host.
    """

    def __init__(self, name: str) -> None:
        pulp = _pulp()
        classes = _classes(pulp, name)
        self._class = next((c for c in classes if _available(pulp, c)), None)
        if self._class is None:
            raise SolverUnavailableError(
                f"PuLP finds no {name} on this host; install the solver, or choose another one"
            )
        self.name = name

    def choose(
        self, program: AssignmentProgram, *, time_limit_s: float | None = None, gap: float = 0.0
    ) -> Ints:
        """Return the configuration of each job, -1 for none, within a relative gap.

        Fixings that do not fit make the program infeasible; `assignment_milp.fixings` lifts them.

        Raises:
            SolverFailedError: no answer, or none within the gap and the time limit.
        """
        pulp = _pulp()
        problem, variables = to_pulp(program)
        choice = np.full(len(program.cost), -1, dtype=np.int64)
        if not variables:
            return choice
        assert self._class is not None
        solver = _solver(pulp, self._class, time_limit_s, gap)
        try:
            problem.solve(solver)
        except Exception as error:
            # Every solver has exceptions of its own.
            raise SolverFailedError(f"{self.name} failed: {_one_line(error)}") from error
        if problem.sol_status != pulp.LpSolutionOptimal:
            status = pulp.LpSolution[problem.sol_status]
            raise SolverFailedError(f"{self.name} ended without an optimum: {status}")
        for (j, c), x in variables.items():
            if (x.value() or 0.0) > _HALF:
                choice[j] = c
        _check(program, choice, self.name)
        return choice


def to_pulp(program: AssignmentProgram) -> tuple[Any, dict[tuple[int, int], Any]]:
    """Return the program as `pulp.LpProblem`, and its variables by (job, configuration).

    Raises:
        SolverUnavailableError: PuLP is not installed.
    """
    pulp = _pulp()
    problem = pulp.LpProblem("round", pulp.LpMinimize)
    jobs, configs = program.cost.shape
    useful = program.valid & (program.cost < program.not_running)
    variables = {
        (j, c): problem.add_variable(f"x_{j}_{c}", cat=pulp.LpBinary)
        for j in range(jobs)
        for c in range(configs)
        if useful[j, c] or c == program.fixed[j]
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
        problem += pulp.lpSum(terms) <= max(0, int(program.capacity[kind])), f"type_{kind}"
    for i, limit in enumerate(program.limits):
        terms = [
            float(limit.use[member, c]) * variables[j, c]
            for member, j in enumerate(limit.jobs.tolist())
            for c in range(configs)
            if (j, c) in variables and limit.use[member, c] > 0
        ]
        left = max(limit.left, limit.used(program.fixed))
        problem += pulp.lpSum(terms) <= left, f"limit_{i}"
    for j, held in enumerate(program.fixed.tolist()):
        if held >= 0:
            problem += variables[j, held] == 1, f"fixed_{j}"
    return problem, variables


def _classes(pulp: Any, name: str) -> tuple[str, ...]:
    """Return PuLP's classes of a solver."""
    for known, classes in _CLASSES.items():
        if known.lower() == name.lower():
            return classes
    of_pulp = pulp.listSolvers()
    own = tuple(c for c in of_pulp if c.lower() == name.lower())
    if not own:
        raise SolverUnavailableError(
            f"PuLP has no solver {name}; known: {', '.join((*_CLASSES, *sorted(set(of_pulp))))}"
        )
    return own


def _available(pulp: Any, name: str) -> bool:
    try:
        return bool(_solver(pulp, name, None, 0.0).available())
    except Exception:  # noqa: BLE001 - a licence that has expired, a library that does not load
        return False


def _solver(pulp: Any, name: str, time_limit_s: float | None, gap: float) -> Any:
    """Return an object of PuLP's class, with those options that the class has."""
    kind = getattr(pulp, name)
    options: dict[str, Any] = {
        "msg": False,
        "timeLimit": time_limit_s,
        "gapRel": gap,
        "threads": 1,
    }
    if name == "COIN_CMD" and not kind().available():
        # The CBC that PuLP brings along.
        options["path"] = pulp.PULP_CBC_CMD.pulp_cbc_path
    if name == "GLPK_CMD":
        # It counts whole seconds, and has no argument for the gap.
        options["timeLimit"] = None if time_limit_s is None else max(1, math.ceil(time_limit_s))
        options["options"] = ["--mipgap", f"{gap:g}"]
    known = inspect.signature(kind.__init__).parameters
    return kind(**{k: v for k, v in options.items() if k in known})


def _check(program: AssignmentProgram, choice: Ints, name: str) -> None:
    """Refuse an answer that is not feasible: tolerances of a solver, or a fault in it."""
    runs = np.flatnonzero(choice >= 0)
    free = runs[program.fixed[runs] < 0]
    held = program.fixed >= 0
    feasible = (
        bool(program.valid[free, choice[free]].all())
        and bool((program.used(choice) <= np.maximum(program.capacity, 0)).all())
        and bool((choice[held] == program.fixed[held]).all())
        and not any(
            limit.exceeded(choice) and limit.used(choice) > limit.used(program.fixed)
            for limit in program.limits
        )
    )
    if not feasible:
        raise SolverFailedError(f"{name} gave an answer that is not feasible")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _pulp() -> Any:
    try:
        import pulp  # noqa: PLC0415  # of the extra `pulp`; HiGHS does without
    except ImportError:
        raise SolverUnavailableError(
            "PuLP is not installed: python3 -m pip install 'slurm-elastic[pulp]'"
        ) from None
    return pulp
