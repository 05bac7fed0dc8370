"""Programs that leave to be started again in place, and how often they may."""

from __future__ import annotations

from slurm_elastic.job.launch import say
from slurm_elastic.job.rank_socket import AGAIN
from slurm_elastic.job.rank_socket_server import RankSocketServer
from slurm_elastic.job.report_state import ReportState

#: So often in a row a program may leave with `AGAIN` without having come a step further.
_MOST = 3
_SETTLE_S = 2.0


class InPlaceRestart:
    """Decides what the end of a step means.

    Args:
        desk: knows how far the program has come.
        server: where the program speaks.
    """

    def __init__(self, desk: ReportState, server: RankSocketServer) -> None:
        self._desk, self._server = desk, server
        self._step = -1
        self._vain = 0

    def wanted(self, code: int) -> bool:
        """Whether the step is to be started again.

        Only for programs that have spoken to esrun: to all others `AGAIN` is a number like any.

        Args:
            code: of the first rank that ended the step.
        """
        if code != AGAIN or not self._server.met:
            return False
        self._server.settle(_SETTLE_S)  # the last words may say how far it came
        report = self._desk.report()
        told = (report.step, report.checkpoint_step, report.resumed_from)
        known = max((step for step in told if step is not None), default=-1)
        self._vain = 1 if known > self._step else self._vain + 1
        self._step = max(self._step, known)
        if self._vain >= _MOST:
            say(
                "the program asks for the third time in a row to be started again, without having"
                " come a step further: giving up"
            )
            return False
        say("the program asks to be started again")
        self._desk.begin_attempt()
        return True
