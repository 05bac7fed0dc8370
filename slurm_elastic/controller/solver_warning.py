"""Warning that the configured solver gave no answer in a round, and HiGHS decided it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_elastic.core.reason import Reason


class SolverWarning:
    """Note of the last round, and one line in the log in the life of the controller.

    Args:
        solver: `[sia] solver`.
        log: of the daemon.
    """

    def __init__(self, solver: str, log: Any) -> None:
        self._solver, self._log = solver, log
        self._is_logged = False

    def note(self, state: Mapping[str, Any], round_time: float) -> Reason | None:
        """Return the note to show; None if the configured solver decided this round.

        Args:
            state: of the round, with that of the policy.
            round_time: of its snapshot.
        """
        fallback = state.get("policy", {}).get("solver_fallback")
        if not isinstance(fallback, Mapping) or fallback.get("time") != round_time:
            return None
        error = str(fallback.get("error", ""))
        if not self._is_logged:
            self._is_logged = True
            self._log.warning(
                f"{error}; HiGHS decides such rounds (further ones are not logged)"
                f" Solver={self._solver}"
            )
        return Reason("solver-fallback", solver=self._solver, error=error)
