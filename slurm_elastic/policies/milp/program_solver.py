"""Solver of the integer program that the configuration names: HiGHS, or one behind PuLP.

`[sia] solver = "highs"` is `assignment_milp.solve`. With `"pulp:NAME"` the same program is stated
through PuLP (pulp_backend.py). If that solver fails, does not reach the gap within the time limit,
or gives an answer that does not fit, HiGHS decides the round, and the solution says why
(`ProgramSolution.fallback`). A solver that ignores its time limit is left alone to end, and as long
as it lasts HiGHS decides.

>>> type(from_setting("highs")).__name__
'HighsSolver'
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Protocol

import numpy as np

from slurm_elastic.config.schema import ConfigError
from slurm_elastic.policies.milp import assignment_milp
from slurm_elastic.policies.milp.assignment_milp import (
    AssignmentProgram,
    Ints,
    KnownChoices,
    ProgramSolution,
    fixings,
)
from slurm_elastic.policies.milp.pulp_backend import (
    PulpBackend,
    SolverFailedError,
    SolverUnavailableError,
)

#: The setting of the built-in solver, and the prefix of those behind PuLP.
HIGHS, PULP = "highs", "pulp:"
#: A solver may take this much longer than its time limit, to start and to write its answer.
_GRACE_S = 2.0


class ProgramSolver(Protocol):
    """A solver of the program of a round."""

    def solve(
        self,
        program: AssignmentProgram,
        *,
        time_limit_s: float = 10.0,
        gap: float = 1e-4,
        seed: int = 0,
        known: KnownChoices | None = None,
    ) -> ProgramSolution:
        """Return a feasible choice; see `assignment_milp.solve`."""
        ...


def from_setting(setting: str) -> ProgramSolver:
    """Return the solver that `[sia] solver` names.

    Raises:
        ConfigError: it cannot be used on this host.
    """
    if setting == HIGHS:
        return HighsSolver()
    try:
        return PulpSolver(PulpBackend(setting.removeprefix(PULP)))
    except SolverUnavailableError as error:
        raise ConfigError(f'[sia] solver: "{setting}" cannot be used: {error}') from None


def problem(setting: str) -> str:
    """Return why `[sia] solver` cannot be used on this host, "" if it can."""
    if setting == HIGHS:
        return ""
    try:
        PulpBackend(setting.removeprefix(PULP))
    except SolverUnavailableError as error:
        return str(error)
    return ""


class HighsSolver:
    """The built-in solver."""

    def solve(
        self,
        program: AssignmentProgram,
        *,
        time_limit_s: float = 10.0,
        gap: float = 1e-4,
        seed: int = 0,
        known: KnownChoices | None = None,
    ) -> ProgramSolution:
        """See `assignment_milp.solve`."""
        return assignment_milp.solve(
            program, time_limit_s=time_limit_s, gap=gap, seed=seed, known=known
        )


class PulpSolver:
    """A solver behind PuLP, with HiGHS in its place where it gives no answer.

    Ties are decided by the solver, not by the seed.
    """

    def __init__(self, backend: PulpBackend, *, grace_s: float = _GRACE_S) -> None:
        self._backend = backend
        self._grace_s = grace_s
        self._running: threading.Thread | None = None

    def solve(
        self,
        program: AssignmentProgram,
        *,
        time_limit_s: float = 10.0,
        gap: float = 1e-4,
        seed: int = 0,
        known: KnownChoices | None = None,
    ) -> ProgramSolution:
        """Return the solver's choice, else that of HiGHS; see `assignment_milp.solve`."""
        fixed, relaxed = fixings(program)
        stated = dataclasses.replace(program, fixed=fixed)
        try:
            choice = self._choose(stated, time_limit_s, gap)
        except SolverFailedError as error:
            solution = assignment_milp.solve(
                program, time_limit_s=time_limit_s, gap=gap, seed=seed, known=known
            )
            return dataclasses.replace(solution, fallback=str(error))
        objective = program.objective(choice)
        return ProgramSolution(
            choice=choice,
            objective=objective,
            bound=objective - gap * abs(objective),
            proven=True,
            limit_hit=False,
            how=f"{PULP}{self._backend.name}",
            relaxed=relaxed,
        )

    def _choose(self, program: AssignmentProgram, time_limit_s: float, gap: float) -> Ints:
        """Return the choice; wait no longer than the time limit, whatever the solver does."""
        if self._running is not None and self._running.is_alive():
            raise SolverFailedError(f"{self._backend.name} still solves an earlier program")
        answers: list[Ints | SolverFailedError] = []

        def work() -> None:
            try:
                answers.append(self._backend.choose(program, time_limit_s=time_limit_s, gap=gap))
            except SolverFailedError as error:
                answers.append(error)
            except Exception as error:  # noqa: BLE001 - whatever a solver's library raises
                answers.append(SolverFailedError(f"{self._backend.name} failed: {error!r}"))

        # A thread of its own: most solvers are processes, for which PuLP waits without an end.
        self._running = threading.Thread(target=work, name="solver", daemon=True)
        self._running.start()
        self._running.join(time_limit_s + self._grace_s)
        if not answers:
            raise SolverFailedError(
                f"{self._backend.name} did not end within its limit of {time_limit_s:g} s"
            )
        if isinstance(answers[0], SolverFailedError):
            raise answers[0]
        return np.asarray(answers[0], dtype=np.int64)
