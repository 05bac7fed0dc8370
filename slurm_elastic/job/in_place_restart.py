"""Restart in place of programs that exit with `RESTART_CODE`, and its limit."""

from __future__ import annotations

from slurm_elastic.job.launch import log_line
from slurm_elastic.job.rank_socket import RESTART_CODE
from slurm_elastic.job.rank_socket_server import RankSocketServer
from slurm_elastic.job.report_state import ReportState

#: Exits with `RESTART_CODE` in a row without a newer step; the last one ends the job.
_MAX_WITHOUT_PROGRESS = 3
_SETTLE_S = 2.0


class InPlaceRestart:
    """Decision whether a program is started again.

    Args:
        state: the job's, with the steps reported.
        server: receives the program's reports.
    """

    def __init__(self, state: ReportState, server: RankSocketServer) -> None:
        self._state, self._server = state, server
        self._step = -1
        self._without_progress = 0

    def should_restart(self, code: int) -> bool:
        """Return whether the step is to be started again.

        Only for programs that have connected to esrun: for others it is an ordinary exit code.

        Args:
            code: exit code of the step.
        """
        if code != RESTART_CODE or not self._server.has_connected:
            return False
        self._server.drain(_SETTLE_S)  # the last report may have a newer step
        report = self._state.report()
        reported_steps = (report.step, report.checkpoint_step, report.resumed_from)
        newest = max((step for step in reported_steps if step is not None), default=-1)
        self._without_progress = 1 if newest > self._step else self._without_progress + 1
        self._step = max(self._step, newest)
        if self._without_progress >= _MAX_WITHOUT_PROGRESS:
            log_line(
                f"the program exited with {code} for the third time in a row without a newer step:"
                " not started again"
            )
            return False
        log_line(f"the program exited with {code}: starting it again in place")
        self._state.begin_attempt()
        return True
